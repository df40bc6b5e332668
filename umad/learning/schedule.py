"""What a step is made of: which problems, which of them are worth learning from, and which agents learn."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from umad.config import Recipe, TrainingConfig
from umad.learning.advantages import SAME
from umad.records import Debate, Problem


class ProblemSampler:
    """The order in which problems are seen: every epoch is a permutation decided by (seed, epoch) alone.

    It has no state: what lies at a position can be computed, so a checkpoint needs to hold one number.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self.problems, self.seed = problems, seed
        self._cached: tuple[int, list[int]] = (-1, [])

    def take(self, position: int, count: int) -> list[Problem]:
        """The `count` problems from `position` (0-based) on; they may reach over the end of an epoch."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, position: int) -> Problem:
        epoch, place = divmod(position, len(self.problems))
        return self.problems[self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        import numpy as np

        if self._cached[0] != epoch:
            rng = np.random.default_rng([self.seed, 0x5EED, epoch])
            self._cached = (epoch, rng.permutation(len(self.problems)).tolist())
        return self._cached[1]


def total_steps(recipe: Recipe, n_problems: int) -> int:
    """Steps of the whole training: as given, or so many that `epochs` passes over the problems are begun and ended."""
    training = recipe.training
    assert training is not None
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None
    return max(1, math.ceil(training.epochs * n_problems / training.problems_per_step))


def active_agents(names: Sequence[str], training: TrainingConfig, step: int) -> list[str]:
    """The trained agents that step `step` (1-based) updates, as `training.agent_schedule` says."""
    if training.agent_schedule == "joint":
        return list(names)
    every = training.alternate_every if training.agent_schedule == "alternate" else 1
    return [names[(step - 1) // every % len(names)]]


def with_signal(debates: Iterable[Debate], agents: Collection[str]) -> set[int]:
    """The problem instances of which any group (agent, turn), of `agents`, has rewards that are not all equal."""
    groups: dict[tuple[int, str, int], list[float]] = {}
    for debate in debates:
        for response in debate.responses():
            if response.agent in agents and response.reward is not None:
                groups.setdefault((debate.instance, response.agent, response.turn), []).append(response.reward)
    return {group[0] for group, rewards in groups.items() if max(rewards) - min(rewards) > SAME}
