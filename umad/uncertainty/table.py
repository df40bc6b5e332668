"""Debates as flat arrays, one entry a response: what the decomposition and every count of the evaluation start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umad.grading import NO_ANSWER, class_key
from umad.records import Debate, Response

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNPARSED = 0
"""Label of the one class that all responses without an answer share."""


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTable:
    """Responses of many debates. All arrays are [R], R the number of responses, but where said otherwise."""

    problems: tuple[str, ...]
    """Problem ids in order of first appearance; `problem` indexes them."""
    agents: tuple[str, ...]
    turns: int
    """The largest number of turns of any debate."""
    debates: int
    problem: Ints
    debate: Ints
    turn: Ints
    agent: Ints
    label: Ints
    """Answer class, numbered within the problem; `UNPARSED` for none, -1 where nobody knows what was answered."""
    graded: Bools
    correct: Bools
    """Right; False where not graded."""
    parsed: Bools
    truncated: Bools
    debate_problem: Ints
    """[D]: the problem of each debate."""


def tabulate(debates: Sequence[Debate]) -> ResponseTable:
    """Flattens debates of one set of agents.

    An answer's class is the key that the grader left in the record, else (rows that another tool wrote) the grader's key
    of the answer. Agents that appear in some debates only are kept: each agent's figures come from its own responses.
    """
    problems: dict[str, int] = {}
    agents: dict[str, int] = {}
    labels: list[dict[str, int]] = []
    rows: list[tuple[int, int, int, int, int, bool, bool, bool, bool]] = []
    debate_problem = []
    for d, debate in enumerate(debates):
        p = problems.setdefault(debate.problem.id, len(problems))
        if p == len(labels):
            labels.append({})
        debate_problem.append(p)
        for name in debate.agents:
            agents.setdefault(name, len(agents))
        for t, turn in enumerate(debate.turns):
            for response in turn:
                label = _label(response, debate, labels[p])
                correct = response.correct
                rows.append(
                    (
                        *(p, d, t, agents.setdefault(response.agent, len(agents)), label),
                        *(correct is not None, bool(correct), label > UNPARSED, response.truncated),
                    )
                )
    columns = np.array(rows, dtype=np.int64).reshape(-1, 9).T
    return ResponseTable(
        problems=tuple(problems),
        agents=tuple(agents),
        turns=max((len(debate.turns) for debate in debates), default=0),
        debates=len(debates),
        **dict(zip(("problem", "debate", "turn", "agent", "label"), columns[:5], strict=True)),
        **{
            name: column.astype(bool)
            for name, column in zip(("graded", "correct", "parsed", "truncated"), columns[5:], strict=True)
        },
        debate_problem=np.array(debate_problem, dtype=np.int64),
    )


def _label(response: Response, debate: Debate, known: dict[str, int]) -> int:
    if response.finish_reason == "error":
        return -1
    key = response.key if response.key and response.answer is not None else _key(response, debate)
    if key == NO_ANSWER:
        # with a gold answer, "no answer" is graded wrong: no grade means that our own grading failed
        lost = response.correct is None and debate.problem.gold is not None
        return -1 if lost else UNPARSED
    return known.setdefault(key, len(known) + 1)


def _key(response: Response, debate: Debate) -> str:
    return class_key(response.answer, debate.problem.kind)
