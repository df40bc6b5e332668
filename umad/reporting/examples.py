"""Chooses the debates that a report shows, one after another from files of any size, and shapes them for the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umad.reporting.folder import mapping, number
from umad.reporting.progress import printable

LONGEST = 4000
"""Characters of one response that the page shows; the middle of longer ones is left out, and said so."""

OUTCOMES = {
    "corrected": "corrected: all right in the end",
    "spoiled": "spoiled: some right at first, all wrong in the end",
    "split": "split: some right in the end",
    "right": "all right, first and last",
    "wrong": "all wrong, first and last",
    "other": "not graded, or ended early",
}
"""Kinds of debates, the most telling first."""


@dataclass(frozen=True, slots=True)
class Said:
    """One response on the page. `mark` is right, wrong or ungraded; `figures` are short labelled numbers."""

    agent: str
    mark: str
    answer: str
    text: str
    cut: int
    figures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One debate on the page; `turns` are lists of responses, one list per turn."""

    title: str
    where: str
    outcome: str
    question: str
    gold: str
    turns: tuple[tuple[Said, ...], ...]
    decision: str
    error: str


def choose(rows: Iterable[Mapping[str, Any]], count: int, where: str) -> list[Example]:
    """Up to `count` debates, of as many kinds as there are: the first of each kind, then the second, and so on."""
    found: dict[str, list[Example]] = {kind: [] for kind in OUTCOMES}
    for row in rows:
        kind = outcome(row)
        if len(found[kind]) < count:
            found[kind].append(example(row, where))
    ranked = sorted(
        ((rank, order, one) for order, kept in enumerate(found.values()) for rank, one in enumerate(kept)),
        key=lambda item: item[:2],
    )
    picked = sorted(ranked[:count], key=lambda item: (item[1], item[0]))
    return [one for _, _, one in picked]


def outcome(row: Mapping[str, Any]) -> str:
    """Which of OUTCOMES a debate row is, by its agents' first and last turn."""
    turns = [[said.get("correct") for said in turn] for turn in _turns(row)]
    if not turns or row.get("error") or any(not isinstance(ok, bool) for turn in (turns[0], turns[-1]) for ok in turn):
        return "other"
    first, last = turns[0], turns[-1]
    if not first or not last:
        return "other"
    if all(last):
        return "right" if all(first) else "corrected"
    if any(last):
        return "split"
    return "spoiled" if any(first) else "wrong"


def example(row: Mapping[str, Any], where: str) -> Example:
    decision = mapping(row.get("decision"))
    kind = outcome(row)
    return Example(
        title=f"{row.get('problem_id', '?')}, rollout {row.get('rollout', 0)}",
        where=where,
        outcome=OUTCOMES[kind],
        question=_shortened(row.get("question"))[0],
        gold=_text(row.get("gold")),
        turns=tuple(tuple(_said(said) for said in turn) for turn in _turns(row)),
        decision=_decision(decision),
        error=_text(row.get("error")),
    )


def _said(row: Mapping[str, Any]) -> Said:
    correct = row.get("correct")
    text, cut = _shortened(row.get("text"))
    shown = [
        _figure("reward", row.get("reward"), ".2f"),
        _figure("advantage", row.get("advantage"), "+.2f"),
        _figure("weight", row.get("weight"), ".2f"),
        _figure("NLL", row.get("nll"), ".2f"),
        _figure("tokens", row.get("completion_tokens"), ",.0f"),
    ]
    if row.get("finish_reason") in ("length", "context"):
        shown.append("cut off")
    return Said(
        agent=_text(row.get("agent")) or "?",
        mark="right" if correct is True else "wrong" if correct is False else "ungraded",
        answer=_text(row.get("answer")),
        text=text,
        cut=cut,
        figures=tuple(figure for figure in shown if figure),
    )


def _figure(name: str, value: Any, style: str) -> str:
    known = number(value)
    return "" if known is None else f"{name} {known:{style}}".replace("-", "−")


def _decision(decision: Mapping[str, Any]) -> str:
    if not decision:
        return ""
    answer, rule = _text(decision.get("answer")) or "no answer", _text(decision.get("rule"))
    graded = {True: ", right", False: ", wrong"}.get(decision.get("correct"), "")  # type: ignore[arg-type]
    return f"{answer}{graded}" + (f" (by {rule})" if rule else "")


def _turns(row: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    turns = row.get("turns")
    if not isinstance(turns, list):
        return []
    return [[said for said in turn if isinstance(said, dict)] for turn in turns if isinstance(turn, list)]


def _text(value: Any) -> str:
    """Short fields: answers, names, golds."""
    text = "" if value is None else str(value)
    return printable(text if len(text) <= 300 else text[:300] + "…")


def _shortened(value: Any) -> tuple[str, int]:
    """Long fields: the text that is shown, and how many characters of its middle are not."""
    text = "" if value is None else str(value)
    if len(text) <= LONGEST:
        return printable(text), 0
    half = LONGEST // 2
    cut = len(text) - 2 * half
    return printable(f"{text[:half]}\n[… {cut:,} characters left out …]\n{text[-half:]}"), cut


def agents_of(examples: Sequence[Example]) -> tuple[str, ...]:
    """Agent names in the order in which the examples show them."""
    return tuple(dict.fromkeys(said.agent for one in examples for turn in one.turns for said in turn))
