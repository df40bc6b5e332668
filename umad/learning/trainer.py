"""The training loop's one step: debate, grade, reward, advantage, update, push. It reads top to bottom.

The learner proper (`Policy`) sees samples only; this file is where debates become samples.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from umad.config import Recipe, TrainingConfig
from umad.debate.driver import Driver, jobs_for
from umad.debate.protocols import Protocol
from umad.learning.advantages import advantage_metrics, assign_advantages
from umad.learning.metrics import combined, debate_metrics
from umad.learning.rewards import RewardFunction, load_functions, reward_debate, reward_metrics
from umad.learning.samples import samples_of, write_back
from umad.learning.schedule import ProblemSampler, active_agents, with_signal
from umad.learning.world import World
from umad.records import Debate, RunError, Sample

if TYPE_CHECKING:
    from umad.learning.policy import Policy


class NonFiniteError(RunError):
    """Too many updates in a row had a loss or gradient that isn't finite."""

    def __init__(self, agent: str, count: int) -> None:
        super().__init__(f"the last {count} updates of agent {agent!r} had a loss or gradient that is not finite")
        self.debates: list[Debate] = []


@dataclass(frozen=True)
class Drawn:
    """One rank's debates of a step. places: instance of a problem -> its place (0-based) among the step's problems that are
    learned from, over all ranks."""

    debates: list[Debate]
    places: Mapping[int, int]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Learnable:
    """One agent's samples, this rank's, with the places of their problems (None: not learned from)."""

    samples: list[Sample]
    places: list[int | None]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepResult:
    """One finished training step. `debates` carry rewards, advantages and weights; `metrics` is the flat row."""

    step: int
    debates: list[Debate]
    metrics: dict[str, float]


@dataclass(eq=False)
class Trainer:
    """Holds what training changes (the policies) and what it drives (engines, by way of the driver's agents)."""

    recipe: Recipe
    driver: Driver
    protocol: Protocol
    policies: Mapping[str, Policy]
    """Of the agents that are trained."""
    sampler: ProblemSampler
    world: World = field(default_factory=World)
    position: int = 0
    """How many of the sampler's problems were drawn so far."""
    timings: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    functions: Sequence[RewardFunction] = ()

    def __post_init__(self) -> None:
        self.functions = load_functions(self.recipe.reward)

    @property
    def training(self) -> TrainingConfig:
        assert self.recipe.training is not None
        return self.recipe.training

    def push(self, version: int, names: Iterable[str] | None = None) -> None:
        """Gives the engines their policies' weights. Mandatory after load, resume and each update."""
        for agent in self.driver.agents:
            if agent.name in self.policies and (names is None or agent.name in names):
                agent.engine.push(self.policies[agent.name].weights(), version)

    def step(self, step: int) -> StepResult:
        """Runs training step `step` (1-based); the engines of the agents that are trained hold version step-1 before and
        `step` after it."""
        self.timings, self.memory = {}, {}
        self.driver.timings.clear()
        start = time.perf_counter()
        active = active_agents(list(self.policies), self.training, step)
        drawn = self.draw(step, active)
        metrics = dict(drawn.metrics)
        batches = {name: self.samples(drawn, name) for name in active}  # all before any policy of this step is updated
        for name, batch in batches.items():
            metrics |= {f"agent/{name}/{key}": value for key, value in batch.metrics.items()}
        self.world.barrier()  # no rank may wait for another's debates inside a collective of the back end
        with self._timed("update"):
            for name, batch in batches.items():
                try:
                    updated = self._update(self.policies[name], batch, step)
                except NonFiniteError as error:
                    error.debates = self._together(drawn.debates)
                    raise
                metrics |= {f"agent/{name}/{key}": value for key, value in updated.items()}
        self._check_weights(step, active)
        with self._timed("push"):
            self.push(step)
        samples = [sample for batch in batches.values() for sample in batch.samples]
        debates = self._together(write_back(drawn.debates, samples))
        faults = self.world.sum({f.name: float(f.faults.total()) for f in self.functions})
        if self.world.main:
            metrics |= dict(debate_metrics(debates)) | reward_metrics(debates)
            metrics |= {f"reward/{name}/faults": total for name, total in faults.items()}
        return StepResult(step, debates, metrics | self._times(time.perf_counter() - start, debates))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: JSON values, of all ranks."""
        faults = {f.name: dict(sum(self.world.gather(f.faults), Counter())) for f in self.functions}
        return {"position": self.position, "faults": faults}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])
        for function in self.functions:
            function.faults = Counter(state["faults"].get(function.name, {}) if self.world.main else {})

    # --- debates ----------------------------------------------------------------------------------------------------

    def draw(self, step: int, active: Sequence[str] | None = None) -> Drawn:
        """This rank's debates of the step, with rewards. Under `no_signal: refill` rounds go on until enough problems, over
        all ranks, have a group with signal; how many were needed is the same on all of them."""
        size, training = self.training.problems_per_step, self.training
        debates: list[Debate] = []
        kept: list[int] = []
        places: dict[int, int] = {}
        rounds = offset = 0
        while True:
            count = -(-(size - len(kept)) // self.world.size) * self.world.size
            found = self._debates(step, offset, count)
            debates += found
            if training.no_signal != "refill":
                kept = list(range(size))
                break
            kept += sorted(
                i
                for part in self.world.gather(
                    sorted(with_signal(found, list(self.policies) if active is None else active))
                )
                for i in part
            )
            offset += count
            if len(kept) >= size or rounds == training.refill_rounds:
                break
            rounds += 1
        places = {instance: place for place, instance in enumerate(kept[:size])}
        self.position += max(offset, size)
        metrics = {}
        if training.no_signal == "refill":
            metrics = {
                "debate/refill_rounds": float(rounds),
                "debate/problems_drawn": float(offset),
                "debate/problems_kept": float(len(places)),
            }
        return Drawn(debates, places, metrics)

    def _debates(self, step: int, offset: int, count: int) -> list[Debate]:
        """G debates of each of this rank's share of the step's problems from `offset` on, rewarded. Whole groups lie on one
        rank. What a debate says does not depend on which."""
        mode = self.recipe.debate.grouping
        problems = self.sampler.take(self.position, offset + count)
        share = self.world.share(range(offset, offset + count))
        jobs = jobs_for(problems, self.training.group_size, together=mode == "shared_context")
        own = [job for job in jobs if job.instance in share]
        sampling = self.recipe.sampling.sampling()

        def run() -> list[Debate]:
            found = self.driver.run(own, self.protocol, sampling, self.recipe.seed, f"train/{step}", mode)
            return [reward_debate(debate, self.recipe.reward, self.functions) for debate in found]

        with self._measured("generate"):
            debates = self.world.agree(run)
        errors = [error for part in self.world.gather([debate.error for debate in debates]) for error in part]
        if errors and all(error is not None for error in errors):
            raise RunError(f"step {step}: all {len(errors)} debates failed; the first: {errors[0]}")
        return debates

    def _together(self, debates: list[Debate]) -> list[Debate]:
        """All ranks' debates on rank 0, in the order of their problems; elsewhere this rank's own."""
        if self.world.size == 1:
            return debates
        parts = self.world.gather(debates if not self.world.main else [])
        if not self.world.main:
            return debates
        parts[0] = debates
        return sorted((debate for part in parts for debate in part), key=lambda d: (d.instance, d.rollout))

    # --- learning ---------------------------------------------------------------------------------------------------

    def samples(self, drawn: Drawn, name: str) -> Learnable:
        """The agent's samples with advantages, scored by its policy where something needs it."""
        weight, exact = self.recipe.advantage.weight, self._exact(name)
        dropped: Counter[str] = Counter()
        samples = samples_of(drawn.debates, name, dropped)
        wide = weight.mode in ("ucas", "edge")
        own_nll = weight.mode != "none" and (weight.logprobs == "trainer" or (weight.logprobs == "auto" and not exact))
        reused = self.training.updates_per_batch > 1
        if wide or own_nll or (reused and not exact):
            with self._timed("score"):
                scored = self.policies[name].score(samples)
            samples = [
                replace(s, scores=found, nll=-float(found.logprobs.mean()) if own_nll else s.nll)
                for s, found in zip(samples, scored, strict=True)
            ]
        drop = self.training.no_signal == "drop"
        ready, tallies = assign_advantages(samples, self.recipe.advantage, self.recipe.loss.mask_truncated, drop)
        counts = self.world.sum({f"dropped_{reason.replace(' ', '_')}": float(n) for reason, n in dropped.items()})
        metrics = advantage_metrics(self.world.gather(tallies)) | counts
        return Learnable(ready, [drawn.places.get(sample.group[0]) for sample in ready], metrics)

    def _update(self, policy: Policy, batch: Learnable, step: int) -> dict[str, float]:
        """`updates_per_batch` updates, each on every so-manieth problem; metrics are the updates' means, counts their sums."""
        count = self.training.updates_per_batch
        rows = []
        for part in range(count):
            chosen = [
                sample
                for sample, place in zip(batch.samples, batch.places, strict=True)
                if place is not None and place % count == part
            ]
            old = None if count == 1 else [_old_logprobs(sample) for sample in chosen]
            rows.append(policy.update(chosen, old, step))
        if policy.failures >= self.training.max_nonfinite:
            raise NonFiniteError(policy.name, policy.failures)
        return combined(rows)

    def _exact(self, name: str) -> bool:
        """Whether the sampler's log-probabilities are those of the policy that is updated."""
        return exact_sampler(self.driver, name, self.training)

    def _check_weights(self, step: int, names: Iterable[str]) -> None:
        """Weights that are not finite would be saved and could never be resumed from."""
        for name in names:
            if not self.policies[name].finite():
                raise RunError(
                    f"step {step}: the weights of agent {name!r} are no longer finite; lower training.learning_rate (the last "
                    "checkpoint is from before)"
                )

    # --- measuring --------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._measured(name):
            yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        """Keeps the most GPU memory that this process held in the block."""
        import torch

        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        yield
        self.memory[name] = max(self.memory.get(name, 0.0), torch.cuda.max_memory_allocated() / 1e9)

    def _times(self, whole: float, debates: Sequence[Debate]) -> dict[str, float]:
        """Seconds per phase, of the slowest rank, and tokens of all ranks per second of it."""
        parts = self.world.most({**self.driver.timings, **self.timings, "step": whole})
        memory = self.world.most(self.memory)
        tokens = sum(d.cost.completion_tokens for d in debates)
        row = {f"time/{name}": seconds for name, seconds in parts.items()}
        row["throughput/tokens_per_second"] = tokens / max(parts.get("generate", 0.0), 1e-9)
        return row | {f"memory/{name}_gb": most for name, most in memory.items()}


def exact_sampler(driver: Driver, name: str, training: TrainingConfig) -> bool:
    """Whether an agent's engine samples from what its policy computes: both in float32."""
    engine = next(agent.engine for agent in driver.agents if agent.name == name)
    return engine.exact_logprobs and training.precision == "float32"


def _old_logprobs(sample: Sample) -> Any:
    """Before the iteration's first update: the trainer's where it scored, else the sampler's, which are then exact."""
    return sample.logprobs if sample.scores is None else sample.scores.logprobs
