"""THE grader: extraction, equality, class keys, votes. Rewards, votes, influence and evaluation all use it."""

from __future__ import annotations

from umad.grading.default import default_grader, equal
from umad.grading.extract import extract
from umad.grading.file import FileSummary, grade_file
from umad.grading.golds import GoldFault, check_golds
from umad.grading.grader import STATUSES, Grade, GradeItem, Grader
from umad.grading.keys import NO_ANSWER, class_key
from umad.grading.kinds import KINDS, check_kind, is_kind
from umad.grading.texts import token_f1
from umad.grading.votes import Vote, vote

__all__ = [
    "KINDS",
    "NO_ANSWER",
    "STATUSES",
    "FileSummary",
    "GoldFault",
    "Grade",
    "GradeItem",
    "Grader",
    "Vote",
    "check_golds",
    "check_kind",
    "class_key",
    "default_grader",
    "equal",
    "extract",
    "grade_file",
    "is_kind",
    "token_f1",
    "vote",
]
