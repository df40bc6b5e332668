"""The figures that docs/grading.md gives, on real rows, where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from umad.grading import check_golds, class_key, grade_file
from umad.grading.relation import decide

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not here")


def rows(name: str) -> list[dict]:
    with (DATA / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_equivalence_and_extraction_rows(tmp_path):
    kinds = ("equivalence", "extraction")
    chosen = [row for row in rows("equivalence_pairs.jsonl") if row["kind"] in kinds]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    summary = grade_file(source)
    assert summary.agreeing / summary.labelled >= 0.985
    assert sum(one.equal is True for one in summary.disagreements) <= 3
    assert summary.ungraded == 0


def test_graded_outputs():
    summary = grade_file(DATA / "graded_outputs.jsonl")
    assert summary.agreeing / summary.labelled >= 0.995


@pytest.mark.parametrize("name", ["math_train", "math500", "gsm8k_train", "gsm8k_test", "amc23", "aime24", "aime25"])
def test_every_gold_can_be_graded_against_and_equals_itself(name):
    golds = list(dict.fromkeys(str(row["answer"]) for row in rows(f"{name}.jsonl")))
    assert check_golds([(gold, "math") for gold in golds]) == []
    assert all(decide(gold, gold, "math").equal for gold in golds)


def test_different_golds_with_one_key_are_equal_answers():
    by_key: dict[str, list[str]] = {}
    for row in rows("math_train.jsonl"):
        if not any(mark in row["answer"] for mark in ("\\text", "\\mbox", "circ", "%", "_")):  # what keys leave out
            by_key.setdefault(class_key(row["answer"]), []).append(row["answer"])
    pairs = [(golds[0], other) for golds in by_key.values() for other in set(golds[1:]) - {golds[0]}]
    assert len(pairs) > 100
    assert [pair for pair in pairs if not decide(*pair, "math").equal] == []
