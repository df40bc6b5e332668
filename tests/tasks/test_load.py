from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from umad.config import SourceConfig
from umad.records import UserError
from umad.tasks import load_problems
from umad.tasks.sets import KNOWN

SHARED = Path(__file__).parents[3] / "shared" / "data"


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(path, role="eval", on_bad_rows="error", check_golds=None, **keys):
    return load_problems(SourceConfig(path=str(path), **keys), role, on_bad_rows, check_golds)


def row(i, **extra):
    return {"id": f"p{i}", "problem": f"{i}+1?", "answer": str(i + 1)} | extra


# --- what a row may look like -----------------------------------------------------------------------------------------


def one(tmp_path, row, **keys):
    (problem,), skipped = load(write(tmp_path / "data.jsonl", row), **keys)
    assert skipped == []
    return problem


def test_plain_rows(tmp_path):
    problem = one(tmp_path, {"id": "a", "problem": "1+1?", "answer": "2"})
    assert (problem.id, problem.question, problem.gold, problem.kind) == ("a", "1+1?", "2", "math")


def test_question_stands_in_for_problem_and_a_missing_id_is_made_from_the_place(tmp_path):
    problem = one(tmp_path, {"question": "1+1?", "answer": 2})
    assert (problem.id, problem.question, problem.gold) == ("data/0", "1+1?", "2")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("16-3=13\n13*2=26\n#### 26", "26"),
        ("#### 1,234", "1234"),
        (27.0, "27"),
        (0, "0"),
        (0.5, "0.5"),
        ("  \\frac{1}{2} ", "\\frac{1}{2}"),
        ("so x=1.\n\\boxed{5} no\nthus \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ],
)
def test_answers_are_read_in_the_forms_that_sets_use(tmp_path, answer, gold):
    assert one(tmp_path, {"problem": "?", "answer": answer}).gold == gold


def test_the_last_box_of_a_solution_is_the_gold_where_there_is_no_answer(tmp_path):
    solution = "First \\boxed{5}. Wait, that's wrong. \\boxed{\\{1,2\\}}"
    assert one(tmp_path, {"problem": "?", "solution": solution}, name="math").gold == "\\{1,2\\}"


def test_a_list_of_answers_gives_alternatives(tmp_path):
    problem = one(tmp_path, {"problem": "?", "answer": ["NYC", "New York"]}, kind="text")
    assert (problem.gold, problem.alternatives, problem.kind) == ("NYC", ("New York",), "text")


def test_fields_can_be_named(tmp_path):
    problem = one(tmp_path, {"q": "1+1?", "a": "2", "answer": "3"}, question_field="q", answer_field="a", kind="number")
    assert (problem.question, problem.gold, problem.kind) == ("1+1?", "2", "number")


@pytest.mark.parametrize(
    ("choices", "answer"),
    [
        ({"A": "bank", "B": "mall"}, "B"),
        (["bank", "mall"], 1),
        (["bank", "mall"], "mall"),
        ({"label": ["A", "B"], "text": ["bank", "mall"]}, "b"),
    ],
)
def test_choices_are_appended_and_the_gold_is_a_letter(tmp_path, choices, answer):
    problem = one(tmp_path, {"problem": "Where?", "choices": choices, "answer": answer})
    assert problem.question == "Where?\nA. bank\nB. mall"
    assert (problem.gold, problem.kind) == ("B", "choice")


def test_parquet_equals_jsonl(tmp_path):
    rows = [row(i) for i in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert load(tmp_path / "data.parquet").problems == load(write(tmp_path / "data.jsonl", *rows)).problems


# --- what is wrong ----------------------------------------------------------------------------------------------------


BROKEN = [
    ('{"problem": "1+1?", "answer": ', "not a line of JSON"),
    ("[1, 2]", "expected a JSON object, found list"),
    ({"answer": "2"}, "no field 'problem' or 'question' (it has 'answer')"),
    ({"problem": "1+1?"}, "no field 'answer'"),
    ({"problem": " \n", "answer": "2"}, "the question is empty"),
    ({"problem": 7, "answer": "2"}, "the question is not text but int"),
    ({"problem": "1+1?", "answer": ""}, "the answer is empty"),
    ({"problem": "1+1?", "answer": None}, "the answer is null"),
    ({"problem": "1+1?", "answer": True}, "the answer is not text but bool"),
    ({"problem": "1+1?", "answer": []}, "the list of answers is empty"),
    ({"problem": "1+1?", "answer": "x\n####"}, "nothing stands after ####"),
    ({"problem": "1+1?", "solution": "no box"}, "no \\boxed{} in the solution"),
    ({"problem": "1?", "answer": "C", "choices": {"A": "x", "B": "y"}}, "'C' is none of the choices A, B"),
    ({"problem": "1?", "answer": "A", "choices": 3}, "choices are neither"),
    ({"id": "p1", "problem": "1+1?", "answer": "2"}, "the id 'p1' was already used at {path}:1"),
    (b'{"problem": "\xff", "answer": "2"}', "not a line of JSON"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_a_broken_row_is_reported_with_file_and_line_or_skipped_and_counted(tmp_path, broken, message):
    path = tmp_path / "data.jsonl"
    line = broken if isinstance(broken, bytes) else (broken if isinstance(broken, str) else json.dumps(broken)).encode()
    path.write_bytes(json.dumps(row(1)).encode() + b"\n\n" + line + b"\n" + json.dumps(row(2)).encode())
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message.replace("{path}", str(path)) in str(caught.value)
    assert "on_bad_rows: skip" in str(caught.value)
    problems, skipped = load(path, on_bad_rows="skip")
    assert [p.id for p in problems] == ["p1", "p2"]
    assert len(skipped) == 1
    assert skipped[0].startswith(f"{path}:3: ")


def test_several_broken_rows_are_reported_at_once(tmp_path):
    path = write(tmp_path / "data.jsonl", row(0), *["x"] * 12)
    with pytest.raises(UserError, match=r":2: (.|\n)*:11: (.|\n)*and 2 more"):
        load(path)


def refuse(*golds):
    def check(problems):
        return ["cannot be parsed" if p.gold in golds else None for p in problems]

    return check


def test_a_gold_that_cannot_be_graded_is_a_broken_row(tmp_path):
    path = write(tmp_path / "data.jsonl", *(row(i) for i in range(4)))
    with pytest.raises(UserError, match=r"data\.jsonl:3: the answer '3' can't be used \(cannot be parsed\)"):
        load(path, check_golds=refuse("3"))
    problems, skipped = load(path, "train", "skip", refuse("3"))
    assert [p.id for p in problems] == ["p0", "p1", "p3"]
    assert len(skipped) == 1


def test_a_limit_is_filled_past_skipped_rows_and_only_what_is_used_is_checked(tmp_path):
    path = write(tmp_path / "data.jsonl", *(row(i) for i in range(50)))
    asked = Counter()

    def check(problems):
        asked.update(p.id for p in problems)
        return refuse("1", "2")(problems)

    problems, skipped = load(path, "train", "skip", check, limit=5)
    assert [p.id for p in problems] == ["p2", "p3", "p4", "p5", "p6"]
    assert len(skipped) == 2
    assert asked == Counter({f"p{i}": 1 for i in range(7)})


def test_a_set_without_any_answer_can_be_debated_but_not_trained_on(tmp_path):
    path = write(tmp_path / "data.jsonl", *(row(i, answer=None) for i in range(3)))
    assert [p.gold for p in load(path).problems] == [None] * 3
    with pytest.raises(UserError, match=r"data\.jsonl:1: the answer is null.*training needs answers"):
        load(path, "train")


def test_missing_folder_and_empty_files(tmp_path):
    with pytest.raises(UserError, match=r"data\.eval\.path: .*nowhere\.jsonl does not exist"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        load(tmp_path)
    for content in ("", "\n\n"):
        (tmp_path / "empty.jsonl").write_text(content)
        for mode in ("error", "skip"):
            with pytest.raises(UserError, match=r"empty\.jsonl: there is no row"):
                load(tmp_path / "empty.jsonl", on_bad_rows=mode)
    (tmp_path / "no.parquet").write_text("text")
    with pytest.raises(UserError, match=r"no\.parquet: cannot be read as parquet"):
        load(tmp_path / "no.parquet")


def test_skipping_everything_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no problem could be used; all 2 were skipped, the first: .*:1: not a line"):
        load(write(tmp_path / "data.jsonl", "x", "y"), on_bad_rows="skip")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "gsm9k"}, "did you mean gsm8k?"),
        ({"name": "gsm9k", "path": "x.jsonl"}, "did you mean gsm8k?"),
        ({"name": "qqq"}, "known are gsm8k"),
        ({"name": "gsm8k", "level": 2}, "only arithmetic has levels"),
        ({"path": "x.jsonl", "split": "test"}, "a local file has no splits"),
        ({"name": "arithmetic", "path": "x.jsonl"}, "arithmetic is generated"),
        ({"name": "arithmetic", "kind": "text"}, "compared as math"),
        ({"name": "arithmetic", "answer_field": "a"}, "arithmetic is generated"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(keys, message):
    with pytest.raises(UserError, match=r"data\.eval") as caught:
        load_problems(SourceConfig(**keys), "eval")
    assert message in str(caught.value)


def test_a_test_only_set_is_not_trained_on_unless_its_split_is_named():
    with pytest.raises(UserError, match="math500 has no train split"):
        load_problems(SourceConfig(name="math500"), "train")


# --- order ------------------------------------------------------------------------------------------------------------


def test_limit_takes_the_first_in_file_order_or_after_a_seeded_shuffle(tmp_path):
    path = write(tmp_path / "data.jsonl", *(row(i) for i in range(100)))

    def ids(**keys):
        return [p.id for p in load(path, **keys).problems]

    assert ids(limit=3) == ["p0", "p1", "p2"]
    assert ids(limit=10, seed=1) == ids(limit=10, seed=1) == ids(seed=1)[:10]
    assert ids(seed=1) != ids(seed=2)
    assert sorted(ids(seed=1)) == sorted(ids())
    assert ids(limit=1000) == ids()


def test_arithmetic_comes_from_the_split_of_its_role():
    train = load_problems(SourceConfig(name="arithmetic", limit=300, seed=1), "train").problems
    held_out = load_problems(SourceConfig(name="arithmetic", limit=300, seed=1), "eval").problems
    named = load_problems(SourceConfig(name="arithmetic", limit=300, seed=1, split="train"), "eval").problems
    assert len(train) == len(held_out) == 300
    assert not {p.id for p in train} & {p.id for p in held_out}
    assert named == train
    level_3 = load_problems(SourceConfig(name="arithmetic", level=3, limit=5), "eval").problems
    assert all(p.source == "arithmetic/3/test" for p in level_3)


# --- the Hub ----------------------------------------------------------------------------------------------------------

HUB_ROWS = {
    "gsm8k": ({"question": "Eggs?", "answer": "16-3=<<16-3=13>>13\n#### 13"}, "13"),
    "math": ({"problem": "x?", "level": "Level 5", "type": "Algebra", "solution": "$\\boxed{2}$"}, "2"),
    "math500": (
        {
            "problem": "x?",
            "solution": "\\boxed{9}",
            "answer": "2",
            "subject": "Algebra",
            "level": 5,
            "unique_id": "test/algebra/1.json",
        },
        "2",
    ),
    "amc23": ({"id": 0, "question": "x?", "answer": "27"}, "27"),
    "aime24": ({"id": 60, "problem": "x?", "solution": "\\boxed{204}", "url": "u"}, "204"),
    "aime25": ({"problem": "x?", "answer": "70", "id": "0"}, "70"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_sets_are_read_in_their_hub_form(monkeypatch, name):
    asked = []

    def load_dataset(repository, config, split):
        asked.append((repository, config, split))
        return [HUB_ROWS[name][0]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (problem,), _ = load_problems(SourceConfig(name=name), "eval")
    assert problem.gold == HUB_ROWS[name][1]
    assert asked == [(KNOWN[name].repository, KNOWN[name].config, "test")]
    load_problems(SourceConfig(name=name, split="train"), "train")
    assert asked[1][2] == "train"


def test_any_hub_set_with_its_fields(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kw: [{"q": "1+1?", "a": 2}])
    source = SourceConfig(name="org/set", question_field="q", answer_field="a")
    (problem,), _ = load_problems(source, "train")
    assert (problem.id, problem.question, problem.gold) == ("org/set/train/0", "1+1?", "2")


def test_no_network_is_the_users_matter_with_the_way_out(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"data\.train\.name: openai/gsm8k(.|\n)*data\.train\.path=FILE"):
        load_problems(SourceConfig(name="gsm8k"), "train")


# --- real files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name", "n"),
    [
        ("gsm8k_train", "gsm8k", 7473),
        ("gsm8k_test", "gsm8k", 1319),
        ("math500", "math500", 500),
        ("math_train", "math", 7498),
        ("amc23", "amc23", 40),
        ("aime24", "aime24", 30),
        ("aime25", "aime25", 30),
        ("commonsenseqa_dev", None, 400),
        ("hotpotqa_dev_sample", None, 400),
        ("xstest_prompts", None, 450),
    ],
)
def test_published_problem_files_load_as_they_are(file, name, n):
    path = SHARED / f"{file}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    problems, skipped = load(path, name=name)
    assert len(problems) == n
    assert skipped == []
    assert all(p.kind == ("choice" if file == "commonsenseqa_dev" else "math") for p in problems)


def test_a_row_may_have_its_own_kind_alternatives_and_several_required_answers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"problem": "roots of x^2=4?", "answer": "2", "required": ["-2"]},
        {"problem": "capital of France?", "answer": "Paris", "alternatives": ["City of Light"], "answer_kind": "text"},
        {"problem": "which?", "answer": "B", "choices": ["red", "blue"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    roots, capital, which = load_problems(SourceConfig(path=str(path)), "eval").problems
    assert (roots.required, roots.kind) == (("-2",), "math")
    assert (capital.alternatives, capital.kind) == (("City of Light",), "text")
    assert which.choices == ("red", "blue")
    path.write_text("".join(json.dumps({**rows[0], "id": k, "kind": k}) + "\n" for k in ("number", "arithmetic")))
    assert [p.kind for p in load_problems(SourceConfig(path=str(path)), "eval").problems] == ["number", "math"]
    path.write_text(json.dumps({**rows[0], "answer_kind": "code:os:system"}) + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: answer_kind"):
        load_problems(SourceConfig(path=str(path)), "eval")


def test_json_nested_beyond_reason_is_a_broken_row(tmp_path):
    path = write(tmp_path / "a.jsonl", row(0), "[" * 100_000)
    with pytest.raises(UserError, match=r"a\.jsonl:2: not a line of JSON"):
        load(path)
