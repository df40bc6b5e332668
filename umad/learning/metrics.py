"""The flat metrics of a training step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from umad.grading import STATUSES
from umad.records import Debate

COUNTS = ("samples", "in_loss", "skipped", "loss_tokens", "computed_tokens", "micro_batches", "nonfinite", "updated")


def combined(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row of several updates': sums of counts, maxima of maxima, means of the rest over the updates that have it."""
    if len(rows) == 1:
        return dict(rows[0])
    combined = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name in COUNTS:
            combined[name] = math.fsum(values)
        elif name.endswith("_max"):
            combined[name] = max(values)
        else:
            combined[name] = sum(values) / len(values)
    return combined


def debate_metrics(debates: Sequence[Debate]) -> Iterator[tuple[str, float]]:
    """Flat metrics of a step's debates, over all agents and per agent and turn. Ungraded responses are left out."""
    yield "debate/failed", float(sum(d.error is not None for d in debates))
    yield "debate/calls", float(sum(d.cost.calls for d in debates))
    yield "debate/prompt_tokens", float(sum(d.cost.prompt_tokens for d in debates))
    yield "debate/completion_tokens", float(sum(d.cost.completion_tokens for d in debates))
    decided = [d.decision.correct for d in debates if d.decision and d.decision.correct is not None]
    if decided:
        yield "debate/accuracy", sum(decided) / len(decided)
    groups: dict[tuple[str, int], list[Any]] = {}
    for debate in debates:
        for r in debate.responses():
            groups.setdefault((r.agent, r.turn), []).append(r)
    by_agent: dict[str, list[Any]] = {}
    for (agent, turn), responses in sorted(groups.items()):
        by_agent.setdefault(agent, []).extend(responses)
        graded = [r.correct for r in responses if r.correct is not None]
        if graded:
            yield f"agent/{agent}/accuracy/turn_{turn}", sum(graded) / len(graded)
    for agent, responses in by_agent.items():
        n = len(responses)
        rewards = [r.reward for r in responses if r.reward is not None]
        nlls = [r.nll for r in responses if r.nll is not None]
        if rewards:
            yield f"agent/{agent}/reward", sum(rewards) / len(rewards)
        if nlls:
            yield f"agent/{agent}/nll", sum(nlls) / len(nlls)
        yield f"agent/{agent}/truncated", sum(r.truncated for r in responses) / n
        yield f"agent/{agent}/unparsed", sum(r.answer is None for r in responses) / n
        yield f"agent/{agent}/ungraded", float(sum(r.correct is None for r in responses))
        statuses = Counter(r.status for r in responses)
        for status in STATUSES:
            yield f"agent/{agent}/grade_{status}", float(statuses[status])
        yield f"agent/{agent}/length", sum(r.completion_tokens for r in responses) / n
        yield f"agent/{agent}/shortened", float(sum(r.shortened > 0 for r in responses))
