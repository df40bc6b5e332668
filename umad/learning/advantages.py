"""From rewards to the factors of the loss: group-relative advantages (GRPO) times Eq. 4's weights.

Everything here is float64 on small lists and uses exactly rounded sums, so results do not depend on the order of a
group's members.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from umad.config import AdvantageConfig
from umad.learning.weights import finite, group_weights, penalised, scores_of, token_certainty, weight_measure
from umad.records import Sample

ADVANTAGE_EPS = 1e-6
SAME = 1e-6
"""Rewards that differ by no more than this are equal: rounding noise must not be blown up to full-size advantages."""


def group_advantages(rewards: Sequence[float], normalize: Literal["std", "none"] = "std") -> list[float]:
    """GRPO (arXiv 2402.03300): A = (r - mean) / (std + 1e-6), sample std (ddof 1); `none` leaves the division out.

    Rewards that are equal to within 1e-6, and a group of one: exactly 0.
    """
    finite(rewards, "rewards")
    if len(rewards) < 2 or max(rewards) - min(rewards) <= SAME:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if normalize == "none":
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + ADVANTAGE_EPS) for c in centred]


def assign_advantages(
    samples: Sequence[Sample], config: AdvantageConfig, mask_truncated: bool = False, drop_no_signal: bool = False
) -> tuple[list[Sample], Tallies]:
    """The samples of one agent with advantage (A' = A W, not re-centred), weight and `in_loss`, and what `advantage_metrics`
    makes metrics per turn of. Under `ucas` they have `token_advantages`, and `advantage` is those' mean.

    A group is `Sample.group`. What is left out, and of what:

    * ungraded (`reward` None): neither in its group's baseline and weights nor in the loss;
    * truncated, with `mask_truncated`: in the baseline, not in the loss;
    * advantage 0: in both; with `drop_no_signal`, a group whose rewards are all equal is in neither loss nor normaliser.

    A group that shrank to one graded member gives 0 and is counted (`shrunk`).
    """
    groups: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[sample.group].append(index)
    result = list(samples)
    turns: dict[int, _Tally] = defaultdict(_Tally)
    for (_, _, turn), members in groups.items():
        graded = [i for i in members if samples[i].reward is not None]
        rewards = [r for i in graded if (r := samples[i].reward) is not None]
        plain = group_advantages(rewards, config.normalize)
        measures = [weight_measure(samples[i], config.weight.mode) for i in graded]
        weights, cut = group_weights(measures, plain, config.weight)
        whole = [advantage * weight for advantage, weight in zip(plain, weights, strict=True)]
        shaped = _shaped([samples[i] for i in graded], whole, config)
        tally = turns[turn]
        for i in members:
            result[i] = replace(samples[i], advantage=0.0, weight=1.0, in_loss=False, token_advantages=None)
        for i, advantage, weight, tokens in zip(graded, whole, weights, shaped, strict=True):
            mean = advantage if tokens is None else float(np.mean(tokens, dtype=np.float64))
            masked = mask_truncated and samples[i].truncated
            keep = not masked and not (drop_no_signal and not any(plain))
            tally.counts["masked"] += masked
            result[i] = replace(samples[i], advantage=mean, weight=weight, in_loss=keep, token_advantages=tokens)
        tally.rewards += rewards
        tally.weights += weights
        tally.advantages += [result[i].advantage for i in graded]
        tally.counts["groups"] += 1
        tally.counts["no_signal"] += not any(plain)
        tally.counts["shrunk"] += len(graded) == 1
        tally.counts["ungraded"] += len(members) - len(graded)
        tally.counts["weight_clamped"] += cut
    return result, dict(turns)


def _shaped(
    samples: Sequence[Sample], advantages: Sequence[float], config: AdvantageConfig
) -> Sequence[np.ndarray | None]:
    """A group's advantages per token, where the weight mode tells tokens apart."""
    if config.weight.mode != "ucas":
        return [None] * len(samples)
    certainty = token_certainty([scores_of(sample, "ucas").logit for sample in samples])
    return [penalised(advantage, row) for advantage, row in zip(advantages, certainty, strict=True)]


def advantage_metrics(parts: Iterable[Tallies]) -> dict[str, float]:
    """Metrics `name/turn_T` of what `assign_advantages` gave on each rank: those that one process would give."""
    turns: dict[int, _Tally] = defaultdict(_Tally)
    for part in parts:
        for turn, tally in part.items():
            turns[turn].add(tally)
    return {f"{name}/turn_{turn}": value for turn in sorted(turns) for name, value in turns[turn].metrics().items()}


@dataclass
class _Tally:
    """What one turn's groups add up to."""

    rewards: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Tally) -> None:
        self.rewards += other.rewards
        self.weights += other.weights
        self.advantages += other.advantages
        self.counts.update(other.counts)

    def metrics(self) -> dict[str, float]:
        metrics = {
            "no_signal": self.counts["no_signal"] / self.counts["groups"],
            **{name: float(self.counts[name]) for name in ("shrunk", "ungraded", "masked", "weight_clamped")},
        }
        if self.rewards:
            n = len(self.rewards)
            mean = math.fsum(self.weights) / n
            metrics["reward"] = math.fsum(self.rewards) / n
            metrics["advantage_abs"] = math.fsum(map(abs, self.advantages)) / n
            metrics["weight_std"] = math.sqrt(math.fsum((w - mean) ** 2 for w in self.weights) / n)
            metrics["weight_min"], metrics["weight_max"] = min(self.weights), max(self.weights)
        return metrics


Tallies = dict[int, _Tally]
"""By turn."""
