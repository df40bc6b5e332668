"""THE grader: extraction, equality, class keys, votes. Rewards, votes, influence and evaluation all use it."""

from __future__ import annotations

from umad.grading.extract import extract
from umad.grading.grader import Grade, Grader, GradeItem
from umad.grading.keys import NO_ANSWER, class_key
from umad.grading.votes import Vote, vote

__all__ = ["NO_ANSWER", "Grade", "GradeItem", "Grader", "Vote", "class_key", "extract", "vote"]
