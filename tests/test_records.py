"""Records, JSON lines in and out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from umad.records import (
    Cost,
    Debate,
    Decision,
    Problem,
    Response,
    Sample,
    Sampling,
    UserError,
    atomic_writer,
    read_debates,
    read_jsonl,
    to_json,
    write_jsonl,
)


def debate() -> Debate:
    said = Response("a", 0, "I say \\boxed{2}", "2", "2", True, nll=0.5, completion_tokens=7, reward=1.0)
    later = Response("b", 1, "<script>", None, "", False, status="no_answer", saw=((0, "a"), (0, "b")))
    return Debate(
        problem=Problem("p", "1+1", "2"),
        protocol="mad",
        agents=("a", "b"),
        turns=((said,), (later,)),
        seed=3,
        sampling={"mode": "trajectory"},
        decision=Decision("2", True, "vote"),
        cost=Cost(2, 10, 14, 1, 2),
    )


def test_a_debate_survives_its_row() -> None:
    row = json.loads(to_json(debate().to_row()))
    again = Debate.from_row(row)
    assert json.loads(to_json(again.to_row())) == row
    assert again.turns[1][0].saw == ((0, "a"), (0, "b"))
    assert again.cost == Cost(2, 10, 14, 1, 2)


def test_rows_of_other_tools_need_only_agents_and_turns(tmp_path: Path) -> None:
    row = {"problem_id": 7, "agents": ["x"], "turns": [[{"agent": "x", "answer": "4", "correct": None}]]}
    path = tmp_path / "debates.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found = read_debates(path)[0]
    assert found.turns[0][0].correct is None
    assert found.problem.id == "7"


ODD = [
    '{"problem_id": 1, "agents": ["a"], "turns": [], "rollout": 1e999}',
    '{"problem_id": 1, "agents": ["a"], "turns": [[{"agent": "a", "answer": {}}]]}',
    '{"problem_id": 1, "agents": ["a"], "turns": [[{"agent": "a", "correct": "yes"}]]}',
    '{"problem_id": 1, "agents": ["a"], "turns": [], "cost": {"calls": "x"}}',
    '{"problem_id": 1, "agents": ["a"], "turns": [], "sampling": [1]}',
    "[" * 100_000,
]


@pytest.mark.parametrize(
    "row", ["{}", '{"problem_id": 1, "agents": ["a"], "turns": [[{"text": "x"}]]}', "[]", "{", *ODD]
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "debates.jsonl"
    path.write_text(to_json(debate().to_row()) + "\n" + row + "\n")
    with pytest.raises(UserError, match=r"debates\.jsonl:2"):
        read_debates(path)


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "debates.jsonl"
    path.write_text(to_json(debate().to_row()) + "\n" + to_json(debate().to_row())[:40])
    assert len(read_debates(path)) == 1
    with pytest.raises(UserError, match=":2"):
        list(read_jsonl(path))


def test_json_is_strict_and_survives_lone_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_jsonl(path, [{"a": float("nan"), "b": "\udc80", "c": np.float32(1.5), "d": [float("inf")]}])
    assert [row for _, row in read_jsonl(path)] == [{"a": None, "b": "\udc80", "c": 1.5, "d": [None]}]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), atomic_writer(path) as file:
        file.write("new\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_records_are_validated_on_construction() -> None:
    with pytest.raises(ValueError, match="empty question"):
        Problem("p", "  ", "2")
    with pytest.raises(ValueError, match="top_p"):
        Sampling(8, top_p=0)
    with pytest.raises(ValueError, match="max_tokens"):
        Sampling(0)
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="3 completion tokens but 2"):
        Sample("a", (0, "a", 0), ids, ids, np.zeros(2, np.float32), 1.0)
    with pytest.raises(ValueError, match="differ"):
        Debate(Problem("p", "q", "1"), "mad", ("a", "a"), ())


def test_a_row_that_is_nested_without_end_is_refused() -> None:
    row: dict[str, object] = {}
    for _ in range(600):
        row = {"x": row}
    with pytest.raises(UserError, match="nested"):
        to_json(row)
