"""`class_key`: the class of an answer for votes, entropies and agreement.

Classes are equality of keys, so they are deterministic, transitive and independent of order, which `equal` is not (25%
equals 25 and 0.25, yet 25 is not 0.25). The key ignores what stands around a number: units, the percent sign, a base.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from umad.grading.canonical import form_key, scalar_text
from umad.grading.cleaning import MAX_LENGTH
from umad.grading.forms import normal_string, normal_words, plain, read
from umad.grading.nodes import TooLarge, Unreadable
from umad.grading.options import option_letter
from umad.grading.relation import _numbers, plain_text, readings
from umad.grading.shapes import Opaque, Scalar, Text
from umad.grading.values import Undefined

NO_ANSWER = "no-answer"
"""The key of no answer. It is a class of its own in entropies, never elected in votes."""

_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,14})")
_COMMA_DECIMAL = re.compile(r"-?(?:0,\d{3,}|\d{4,},\d{1,2})")


def class_key(answer: str | None, kind: str = "math") -> str:
    """The class of a short answer; `NO_ANSWER` for None and for nothing but layout. Never raises on any text.

    Keys that begin with "s:" have no canonical form (mathematics that our parser doesn't read); `Grader.class_keys`
    merges those of one group by math-verify.
    """
    if answer is None:
        return NO_ANSWER
    if _INTEGER.fullmatch(answer) and answer != "-0" and kind in ("math", "number"):
        return "n:" + answer
    return _key(answer, kind)


@lru_cache(maxsize=16384)
def _key(answer: str, kind: str) -> str:
    if len(answer) > MAX_LENGTH:
        return _short("s:" + normal_string(answer)) if answer.strip() else NO_ANSWER
    if kind == "choice" and (letter := option_letter(answer)):
        return "c:" + letter
    if kind in ("choice", "text"):
        return _short("t:" + words) if (words := normal_words(plain_text(answer))) else NO_ANSWER
    if kind.startswith("code:"):
        return _short("s:" + " ".join(answer.split())) if answer.strip() else NO_ANSWER
    form = read(answer, "decimal" if _COMMA_DECIMAL.fullmatch(answer.strip().strip("$")) else "auto")
    if kind == "number" and not isinstance(form, Scalar):
        form = next(
            (other for other in reversed(_numbers(answer, readings(answer))) if isinstance(other, Scalar)), form
        )
    if isinstance(form, Text) and not form.text and not form.number:
        return NO_ANSWER if not plain(answer) else _short("s:" + normal_string(plain(answer)))
    try:
        return _short(form_key(form))
    except (TooLarge, Undefined, Unreadable):
        return _short("s:" + normal_string(plain(answer)))


def _short(key: str) -> str:
    """Long keys end in a hash, so that keys stay small whatever a model wrote."""
    if len(key) <= 200:
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{key[:100]}#{digest}"


__all__ = ["NO_ANSWER", "Opaque", "class_key", "scalar_text"]
