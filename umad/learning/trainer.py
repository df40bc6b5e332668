"""The training loop's one step: debate, grade, reward, advantage, update, push. It reads top to bottom.

The learner proper (`Policy`) sees samples only; this file is where debates become samples.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from umad.config import Recipe
from umad.debate.driver import Driver, jobs_for
from umad.debate.protocols import Protocol
from umad.grading import STATUSES
from umad.learning.advantages import assign_advantages
from umad.learning.rewards import RewardFunction, load_functions, reward_debate, reward_metrics
from umad.learning.samples import samples_of, write_back
from umad.records import Debate, Problem, RunError, Sample

if TYPE_CHECKING:
    from umad.learning.policy import Policy


@dataclass(frozen=True)
class StepResult:
    """One finished training step. `debates` carry rewards, advantages and weights; `metrics` is the flat row."""

    step: int
    debates: list[Debate]
    metrics: dict[str, float]


class ProblemSampler:
    """Which problems a step sees: every epoch is a permutation decided by (seed, epoch) alone.

    It has no state: the batch of a step can be computed from the step's number, so resuming can't lose its place. A batch
    may reach over the end of an epoch.
    """

    def __init__(self, problems: Sequence[Problem], batch: int, seed: int) -> None:
        self.problems, self.size, self.seed = problems, batch, seed
        self._cached: tuple[int, list[int]] = (-1, [])

    def batch(self, step: int) -> list[Problem]:
        """The problems of `step` (1-based)."""
        first = (step - 1) * self.size
        return [self._at(position) for position in range(first, first + self.size)]

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


@dataclass(eq=False)
class Trainer:
    """Holds what training changes (the policies) and what it drives (engines, by way of the driver's agents)."""

    recipe: Recipe
    driver: Driver
    protocol: Protocol
    policies: Mapping[str, Policy]
    sampler: ProblemSampler
    timings: dict[str, float] = field(default_factory=dict)
    functions: Sequence[RewardFunction] = ()

    def __post_init__(self) -> None:
        self.functions = load_functions(self.recipe.reward)

    def push(self, version: int) -> None:
        """Gives every engine its policy's weights. Mandatory after load, resume and each update."""
        for agent in self.driver.agents:
            agent.engine.push(self.policies[agent.name].weights(), version)

    def step(self, step: int) -> StepResult:
        """Runs training step `step` (1-based); the engines hold version step-1 before and `step` after."""
        self.timings = {}
        self.driver.timings.clear()
        start = time.perf_counter()
        debates = self.rollout(step)
        if all(debate.error is not None for debate in debates):
            raise RunError(f"step {step}: all {len(debates)} debates failed; the first: {debates[0].error}")
        debates = [reward_debate(debate, self.recipe.reward, self.functions) for debate in debates]
        metrics = dict(debate_metrics(debates)) | reward_metrics(debates, self.functions)
        ready: dict[str, list[Sample]] = {}
        for name in self.policies:
            samples, counts = self.samples(debates, name)
            ready[name] = samples
            metrics |= {f"agent/{name}/{key}": value for key, value in counts.items()}
        with self._timed("update"):
            for name, policy in self.policies.items():
                updated = policy.update(ready[name])
                metrics |= {f"agent/{name}/{key}": value for key, value in updated.items()}
        self._check_weights(step)
        with self._timed("push"):
            self.push(step)
        debates = write_back(debates, [sample for samples in ready.values() for sample in samples])
        return StepResult(step, debates, metrics | self._times(time.perf_counter() - start, debates))

    def _exact(self, name: str) -> bool:
        """Whether the sampler's log-probabilities are those of the policy that is updated."""
        return next(agent.engine.exact_logprobs for agent in self.driver.agents if agent.name == name)

    def _check_weights(self, step: int) -> None:
        """Weights that are not finite would be saved and could never be resumed from."""
        for name, policy in self.policies.items():
            if not policy.finite():
                raise RunError(
                    f"step {step}: the weights of agent {name!r} are no longer finite; lower training.learning_rate (the last "
                    "checkpoint is from before)"
                )

    def rollout(self, step: int) -> list[Debate]:
        """The step's debates: G rollouts of each problem."""
        training = self.recipe.training
        assert training is not None
        mode = self.recipe.debate.grouping
        jobs = jobs_for(self.sampler.batch(step), training.group_size, together=mode == "shared_context")
        sampling = self.recipe.sampling.sampling()
        return self.driver.run(jobs, self.protocol, sampling, self.recipe.seed, f"train/{step}", mode)

    def samples(self, debates: Sequence[Debate], name: str) -> tuple[list[Sample], dict[str, float]]:
        """The agent's samples with advantages, before any policy of this step is updated."""
        weight = self.recipe.advantage.weight
        dropped: Counter[str] = Counter()
        samples = samples_of(debates, name, dropped)
        if weight.mode != "none" and (
            weight.logprobs == "trainer" or (weight.logprobs == "auto" and not self._exact(name))
        ):
            with self._timed("score"):
                scored = self.policies[name].score(samples)
            samples = [replace(s, nll=-float(lp.mean())) for s, lp in zip(samples, scored, strict=True)]
        ready, metrics = assign_advantages(samples, self.recipe.advantage, self.recipe.loss.mask_truncated)
        return ready, metrics | {f"dropped_{reason.replace(' ', '_')}": float(n) for reason, n in dropped.items()}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    def _times(self, whole: float, debates: Sequence[Debate]) -> dict[str, float]:
        parts = {**self.driver.timings, **self.timings}
        tokens = sum(d.cost.completion_tokens for d in debates)
        row = {f"time/{name}": seconds for name, seconds in parts.items()}
        row["time/step"] = whole
        row["throughput/tokens_per_second"] = tokens / max(parts.get("generate", 0.0), 1e-9)
        return row


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
