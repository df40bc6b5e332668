"""Golds that nothing could be graded against: found at load time, never a reward for everyone (or no one)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umad.grading.canonical import form_key
from umad.grading.forms import read
from umad.grading.keys import NO_ANSWER, class_key
from umad.grading.kinds import check_kind
from umad.grading.nodes import TooLarge, Unreadable
from umad.grading.options import option_letter
from umad.grading.relation import _numbers, readings
from umad.grading.shapes import Opaque, Scalar, Text
from umad.grading.values import Undefined
from umad.records import UserError

if TYPE_CHECKING:
    from umad.grading.grader import Grader


@dataclass(frozen=True, slots=True)
class GoldFault:
    """A gold at fault: its position among those that were given, and why."""

    index: int
    reason: str


def check_golds(golds: Iterable[tuple[object, str]], grader: Grader | None = None) -> list[GoldFault]:
    """The golds, given as (gold, kind) pairs, that cannot be graded against.

    What our own parser cannot read is tried on math-verify in a worker (of `grader`, or of the default one).
    """
    faults, unread = [], []
    for index, (gold, kind) in enumerate(golds):
        reason = _fault(gold, kind)
        if reason == "":
            unread.append((index, str(gold)))
        elif reason is not None:
            faults.append(GoldFault(index, reason))
    if unread:
        if grader is None:
            from umad.grading.default import default_grader

            grader = default_grader()
        readable = grader.can_read([gold for _, gold in unread])
        faults += [
            GoldFault(index, f"neither our parser nor math-verify can read {gold!r:.80}")
            for (index, gold), fine in zip(unread, readable, strict=True)
            if not fine
        ]
    return sorted(faults, key=lambda fault: fault.index)


_NO_NUMBER = ("nan", "-nan", "none", "null", "inf", "-inf")
"""What other programs write where they have no answer; it would equal itself in a model's output."""


def _fault(gold: object, kind: str) -> str | None:
    """Why a gold is at fault; None: it is fine; "": only math-verify can tell."""
    try:
        check_kind(kind)
    except UserError as error:
        return str(error)
    if not isinstance(gold, str):
        return f"the gold is {type(gold).__name__}, not text"
    if class_key(gold, kind) == NO_ANSWER:
        return "the gold is empty"
    if kind == "choice":
        return None if option_letter(gold) else f"{gold!r:.80} names no option"
    if kind not in ("math", "number"):
        return None
    if gold.strip().lower() in _NO_NUMBER:
        return f"{gold!r} is what a failed computation leaves, not an answer"
    if kind == "number":
        scalars = [form for form in _numbers(gold, readings(gold)) if isinstance(form, Scalar)]
        return None if scalars else f"{gold!r:.80} holds no single number"
    form = read(gold)
    if isinstance(form, Opaque):
        return f"the gold is too large ({len(gold)} characters)" if form.size and len(gold) > 2_000 else ""
    if isinstance(form, Text):
        return None if any(map(str.isalnum, form.text)) else f"{gold!r:.80} says nothing"
    try:
        form_key(form)
    except Undefined:
        return f"{gold!r:.80} has no value (a division by zero?)"
    except (TooLarge, Unreadable):
        return ""
    return None
