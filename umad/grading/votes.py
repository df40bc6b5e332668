"""Votes over answers: the largest class of equal keys, whatever the order of the agents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from umad.grading.keys import NO_ANSWER, class_key


@dataclass(frozen=True, slots=True)
class Vote:
    """What was elected: one wording of the answer, its class key, the share of all ballots, and whether a tie was drawn."""

    answer: str
    key: str
    share: float
    tied: bool


def vote(
    answers: Sequence[str | None],
    seed: int,
    *,
    kind: str = "math",
    keys: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
) -> Vote | None:
    """The answer class with the most votes (the largest sum of `weights`), or None where nobody has an answer.

    Classes are equal keys (`keys`, or `class_key` of each answer). No answer never wins, though it counts in `share`.
    Among tied classes the one whose key has the smallest hash under `seed` wins; of its wordings the most frequent, then
    the shortest, then the first in sorted order. So the order of the agents never matters.
    """
    if keys is None:
        keys = [class_key(answer, kind) for answer in answers]
    if weights is None:
        weights = [1.0] * len(answers)
    if not len(answers) == len(keys) == len(weights):
        raise ValueError(f"{len(answers)} answers, {len(keys)} keys, {len(weights)} weights: the lengths must agree")
    totals: dict[str, list[float]] = {}
    for key, weight in zip(keys, weights, strict=True):
        if key != NO_ANSWER:
            totals.setdefault(key, []).append(weight)
    if not totals:
        return None
    sums = {key: sum(sorted(values)) for key, values in totals.items()}  # sorted: float sums must not depend on order
    best = max(sums.values())
    tied = [key for key, total in sums.items() if total >= best - 1e-12 * abs(best)]
    winner = min(tied, key=lambda key: (_draw(seed, key), key))
    wordings = [answer for answer, key in zip(answers, keys, strict=True) if key == winner and answer is not None]
    answer = min(set(wordings), key=lambda text: (-wordings.count(text), len(text), text), default="")
    everything = sum(sorted(weights))
    return Vote(answer, winner, sums[winner] / everything if everything else 0.0, len(tied) > 1)


def _draw(seed: int, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
