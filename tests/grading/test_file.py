"""`grade_file`, the work behind `umad grade`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from umad.grading import Grader, grade_file
from umad.records import UserError

ROWS = [
    {"id": 1, "gold": "1/2", "candidate": "\\boxed{0.5}", "correct": True},
    {"id": 2, "gold": "3", "candidate": "the answer is 13", "correct": True},
    {"id": 3, "gold": 7, "candidate": "no idea at all, sorry, none", "correct": False},
    {"id": 4, "gold": ["2", "3"], "candidate": "\\boxed{3, 2}"},
    {"id": 5, "gold": "B", "candidate": "It must be (B).", "kind": "choice"},
    {"id": 6, "gold": "x", "candidate": "\\boxed{y}", "alternatives": ["z", "y"], "kind": "equivalence"},
]


def write(path: Path, rows: list[object]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_rows_keep_what_they_had_and_gain_the_grade(tmp_path):
    seen: list[tuple[int, int]] = []
    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "new" / "graded.jsonl"
    summary = grade_file(source, out, progress=lambda done, total: seen.append((done, total)))
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["equal"] for row in rows] == [True, False, False, True, True, True]
    assert [row["status"] for row in rows] == ["ok", "ok", "no_answer", "ok", "ok", "ok"]
    assert [row["extracted"] for row in rows] == ["0.5", "13", None, "3, 2", "B", "y"]
    assert all(row.items() >= before.items() for row, before in zip(rows, ROWS, strict=True))
    assert seen == [(6, 6)]
    assert (summary.rows, summary.right, summary.wrong, summary.ungraded) == (6, 4, 2, 0)
    assert (summary.labelled, summary.agreeing) == (3, 2)
    assert [one.line for one in summary.disagreements] == [2]
    text = "\n".join(summary.lines())
    assert "6 rows" in text
    assert "2 of 3 (66.67%)" in text
    assert "line 2: labelled right, graded wrong" in text
    assert "'equivalence' (1)" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "rows.jsonl"]


def test_progress_comes_batch_by_batch(tmp_path):
    seen: list[int] = []
    source = write(tmp_path / "rows.jsonl", [{"gold": str(n), "candidate": str(n)} for n in range(1200)])
    assert grade_file(source, progress=lambda done, _: seen.append(done)).right == 1200
    assert seen == [512, 1024, 1200]


BROKEN = [
    ("{not json", "not a line of JSON"),
    ("[1]", "expected a JSON object"),
    ({"candidate": "5"}, "no 'gold'"),
    ({"gold": "5"}, "no 'candidate'"),
    ({"gold": "5", "candidate": ["5"]}, "'candidate' is list"),
    ({"gold": None, "candidate": "5"}, "'gold' is NoneType"),
    ({"gold": {"a": 1}, "candidate": "5"}, "'gold' is dict"),
    ({"gold": "", "candidate": "5"}, "the gold is empty"),
    ({"gold": "1/0", "candidate": "5"}, "has no value"),
    ({"gold": "5", "candidate": "5", "alternatives": "6"}, "'alternatives' is str"),
    ({"gold": "5", "candidate": "5", "kind": "code:os:system"}, "may not name code"),
]


@pytest.mark.parametrize(("row", "message"), BROKEN)
def test_a_broken_row_is_named_by_file_and_line_and_nothing_is_written(tmp_path, row, message):
    source, out = write(tmp_path / "rows.jsonl", [ROWS[0], "", row]), tmp_path / "graded.jsonl"
    with pytest.raises(UserError) as caught:
        grade_file(source, out)
    assert f"{source}:3: " in str(caught.value)
    assert message in str(caught.value)
    assert not out.exists()


def test_bad_arguments_are_user_errors(tmp_path):
    source = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(UserError, match="cannot be read"):
        grade_file(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="no rows"):
        grade_file(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(UserError, match="did you mean 'math'"):
        grade_file(source, kind="maths")
    with pytest.raises(UserError, match="code:module:function"):
        grade_file(source, kind="code:nothing")
    with pytest.raises(UserError, match="is a folder"):
        grade_file(source, tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        grade_file(source, source / "below" / "out.jsonl")


def test_a_users_function_grades_a_file_when_it_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "mine_for_files.py").write_text("def longer(gold, answer):\n    return len(answer) > int(gold)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"gold": "3", "candidate": "four"}, {"gold": "9", "candidate": "four"}, {"gold": "x", "candidate": "four"}]
    summary = grade_file(write(tmp_path / "rows.jsonl", rows), kind="code:mine_for_files:longer")
    assert (summary.right, summary.wrong, summary.ungraded) == (1, 1, 1)


def test_a_grader_that_is_passed_stays_open(tmp_path):
    with Grader(workers=1) as grader:
        source = write(tmp_path / "rows.jsonl", [{"gold": "1/2", "candidate": "\\boxed{\\int_0^1 x\\,dx}"}])
        assert grade_file(source, grader=grader).right == 1
        assert grade_file(source, grader=grader).right == 1
        assert grader.workers_started == 1


def test_an_empty_list_of_golds_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"gold": [], "candidate": "1"}])
    with pytest.raises(UserError, match=r"a\.jsonl:1: 'gold' is an empty list"):
        grade_file(path)


@pytest.mark.parametrize("kind", ["code:no_such_module:f", "code:json:no_such_function"])
def test_a_kind_whose_function_cannot_be_found_is_the_users_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"gold": "1", "candidate": "1"}\n')
    with pytest.raises(UserError, match=kind):
        grade_file(path, None, kind)


@pytest.mark.parametrize("gold", ["NaN", "inf", "None"])
def test_golds_that_are_no_answer_are_refused(tmp_path: Path, gold: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"gold": gold, "candidate": gold}) + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:1"):
        grade_file(path)
