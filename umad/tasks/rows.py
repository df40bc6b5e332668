"""From a row, whatever set it comes from, to a `Problem`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from umad.grading.extract import unbox
from umad.grading.kinds import KINDS
from umad.records import Problem
from umad.tasks.sets import ANSWER_FIELDS, ID_FIELDS, QUESTION_FIELDS

_HASHES = re.compile(r"^\s*####\s*(.*?)\s*$", re.MULTILINE)


class BadRow(ValueError):
    """A row that can't be used; the message says why, the caller adds where it stands."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields to read. None: the usual names, and the forms that the known sets use."""

    question: str | None = None
    answer: str | None = None


def to_problem(row: Mapping[str, Any], fields: Fields, kind: str | None, default_id: str, source: str) -> Problem:
    """Reads one row. A gold that is given as null stays None; everything else that is missing is a `BadRow`.

    `kind` is the data set's; a row's own `answer_kind` (or `kind`, where it names
    one of ours) wins. `alternatives` (other right answers) and `required` (needed
    beside the answer) are lists; an answer that is itself a list holds alternatives.
    """
    question = _text(_pick(row, fields.question, QUESTION_FIELDS), "question")
    options = _options(row["choices"]) if row.get("choices") else {}
    plain = row.get("kind") if row.get("kind") in KINDS else None  # many sets have a `kind` that means something else
    kind = _kind(row.get("answer_kind")) or plain or kind or ("choice" if options else "math")
    gold, alternatives = _gold(row, fields.answer)
    alternatives += _list(row, "alternatives")
    required = _list(row, "required")
    if options and kind == "choice":
        question = "\n".join([question, *(f"{letter}. {text}" for letter, text in options.items())])
        gold = _letter(gold, row, fields.answer, options)
    identity = next((row[name] for name in ID_FIELDS if row.get(name) not in (None, "")), default_id)
    return Problem(str(identity), question, gold, kind, alternatives, source, required, tuple(options.values()))


def _kind(value: Any) -> str | None:
    """A row's own kind. Data names no code to run: a user's function is chosen in the recipe only."""
    if value is None:
        return None
    if value not in KINDS:
        raise BadRow(f"answer_kind {value!r} is none of {', '.join(KINDS)}")
    return str(value)


def _list(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise BadRow(f"{name} is not a list but {type(value).__name__}")
    return tuple(_answer(item) for item in value)


def _pick(row: Mapping[str, Any], chosen: str | None, usual: Sequence[str]) -> Any:
    names = (chosen,) if chosen else usual
    for name in names:
        if name in row:
            return row[name]
    raise BadRow(
        f"has no field {' or '.join(repr(name) for name in names)} (it has {', '.join(map(repr, row)) or 'none'})"
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"the {what} is not text but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"the {what} is empty")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise BadRow(f"the {what} holds half a character (a lone surrogate), which no tokenizer takes")
    return value


def _gold(row: Mapping[str, Any], chosen: str | None) -> tuple[str | None, tuple[str, ...]]:
    """(gold, further accepted answers). MATH and AIME24 have it as the last box of the solution."""
    usual = ANSWER_FIELDS
    if chosen is None and not any(name in row for name in usual) and "solution" in row:
        solution = _text(row["solution"], "solution")
        boxed = unbox(solution)
        if boxed is None:
            raise BadRow("there is no answer, and no \\boxed{} in the solution")
        return boxed, ()
    value = _pick(row, chosen, usual)
    if value is None:
        return None, ()
    if isinstance(value, (list, tuple)):
        golds = [_answer(item) for item in value]
        if not golds:
            raise BadRow("the list of answers is empty")
        return golds[0], tuple(golds[1:])
    return _answer(value), ()


def _answer(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    text = _text(value, "answer")
    hashes = _HASHES.findall(text)
    if hashes:  # GSM8K: a solution, then "#### 1,234"
        text = hashes[-1].replace(",", "")
        if not text:
            raise BadRow("nothing stands after ####")
    elif "\n" in text and (boxed := unbox(text)) is not None:  # a whole solution in the answer field
        text = boxed
    return text.strip()


def _options(value: Any) -> dict[str, str]:
    """Options by letter: from {letter: text}, a list of texts, or {"label": [...], "text": [...]}."""
    if isinstance(value, Mapping) and {"label", "text"} <= set(value) and isinstance(value["text"], (list, tuple)):
        return {str(label): str(text) for label, text in zip(value["label"], value["text"], strict=True)}
    if isinstance(value, Mapping):
        return {str(label): str(text) for label, text in value.items() if text is not None}
    if isinstance(value, (list, tuple)) and len(value) <= len(ascii_uppercase):
        return {ascii_uppercase[i]: str(text) for i, text in enumerate(value)}
    raise BadRow(f"choices are neither a list nor an object but {type(value).__name__}")


def _letter(gold: str | None, row: Mapping[str, Any], chosen: str | None, options: Mapping[str, str]) -> str | None:
    """The gold as a letter: given so, as a position in the list (0 first), or as an option's text."""
    if gold is None or gold in options:
        return gold
    position = row.get(chosen or ANSWER_FIELDS[0])
    if isinstance(position, int) and not isinstance(position, bool) and 0 <= position < len(options):
        return list(options)[position]
    for letter, text in options.items():
        if gold == text or gold.upper() == letter:
            return letter
    raise BadRow(f"the answer {gold!r} is none of the choices {', '.join(options)}")
