"""Batches, the cache, alternatives, counts."""

from __future__ import annotations

import pytest

from umad.grading import GradeItem, Grader
from umad.records import UserError


def test_alternatives_and_several_required_answers():
    grades = Grader().grade(
        [
            GradeItem("1", "\\boxed{2}", alternatives=("2", "3")),
            GradeItem("1", "\\boxed{4}", alternatives=("2", "3")),
            GradeItem(("2", "3"), "\\boxed{3} and \\boxed{2}"),
            GradeItem(("2", "3"), "\\boxed{3}"),
            GradeItem(("\\frac12", "x=4"), "the answer is 4 and 0.5"),
            GradeItem(("Paris", "London"), "The answer is London and Paris.", kind="text"),
            GradeItem("B,C", "B and C", kind="choice"),
            GradeItem("B,C", "B", kind="choice"),
        ]
    )
    assert [grade.equal for grade in grades] == [True, False, True, False, True, True, True, False]


def test_a_kind_per_item_overrides_the_graders():
    grader = Grader(kind="number")
    items = [
        GradeItem("36", "3 dozen = 36 eggs"),
        GradeItem("A", "the answer is A", "choice"),
        GradeItem("Paris", "paris", "text"),
    ]
    assert all(grade.equal for grade in grader.grade(items))
    with pytest.raises(UserError, match="unknown answer kind 'numbers'"):
        grader.grade([GradeItem("1", "1", "numbers")])
    with pytest.raises(UserError, match="did you mean 'choice'"):
        Grader(kind="choise")


def test_numbers_are_compared_as_numbers():
    grader = Grader(kind="number")
    items = [("1,234", "$1234.00"), ("72", "#### 72"), ("She has #### 72", "72 apples"), ("0.5", "1/2"), ("10", "10%")]
    assert all(grade.equal for grade in grader.grade([GradeItem(*item) for item in items]))
    wrong = [("72", "#### 73"), ("5", "3 or 5 of them: \\boxed{3, 5}"), ("13", "3")]
    assert not any(grade.equal for grade in grader.grade([GradeItem(*item) for item in wrong]))


def test_a_batch_in_any_split_and_order_gives_the_same_grades_and_the_cache_changes_nothing():
    items = [GradeItem(f"{n % 7}", f"work {n}\n\\boxed{{{n % 5}}}") for n in range(60)] * 2
    whole = Grader().grade(items)
    grader = Grader(cache_size=10)
    assert [grade for item in items for grade in grader.grade([item])] == whole
    assert Grader().grade(items[::-1])[::-1] == whole
    assert grader.counts == {"ok": 120}


def test_repeats_are_answered_from_the_cache_even_when_a_worker_was_needed():
    with Grader(time_limit=1.0, workers=1) as grader:
        bomb = GradeItem("5", "\\boxed{\\sum_{k=1}^{10^9} k!}")
        first = grader.grade([bomb, bomb])
        started = grader.workers_started
        assert grader.grade([bomb]) == first[:1]
        other_text = GradeItem("5", "In other words: \\boxed{\\sum_{k=1}^{10^9} k!}")
        assert grader.grade([other_text])[0].status == "timeout"
        assert grader.workers_started == started
        assert grader.counts == {"timeout": 4}


def test_the_cache_is_bounded():
    grader = Grader(cache_size=100)
    grader.grade([GradeItem(str(n), str(n)) for n in range(1000)])
    assert len(grader._grades.entries) <= 100
    assert len(grader._verdicts.entries) <= 100


def test_an_empty_batch_is_empty():
    assert Grader().grade([]) == []


def test_strict_required_answers_of_text_are_all_needed():
    assert not Grader(kind="text").grade([GradeItem(("Paris", "London"), "Paris")])[0].equal
