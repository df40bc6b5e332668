"""The recipe: its sections together, and what cannot be combined."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from umad.config.base import Count, KeyedError, Section
from umad.config.debating import AgentConfig, DebateConfig, SamplingConfig
from umad.config.learning import AdvantageConfig, LossConfig, RewardConfig, TrainingConfig
from umad.config.running import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    GradingConfig,
    LoggingConfig,
)
from umad.config.sft import SFTConfig


def nearest_multiples(number: int, divisor: int) -> str:
    """The multiples of `divisor` around `number`, in words: what a size that does not divide could be instead."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


class Recipe(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: Count = 0
    output: str | None = None
    """The run folder; `runs/<name>` by default."""
    agents: tuple[AgentConfig, ...] = Field(min_length=1)
    distinct: bool = False
    """true: two agents whose loaded weights are the same are an error."""
    debate: DebateConfig = DebateConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig | None = None
    """Left out in recipes that only evaluate."""
    sft: SFTConfig | None = None
    """Supervised fine-tuning, for `umad sft`."""
    engine: EngineConfig = EngineConfig()
    data: DataConfig = DataConfig()
    grading: GradingConfig = GradingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        names = [agent.name for agent in self.agents]
        for name in names:
            if names.count(name) > 1:
                raise KeyedError("agents", f"two agents are called {name!r}; names must differ")
        self._check_adapters()
        if self.training is not None:
            self._check_learning(self.training)
            if self.sampling.top_p < 1 or self.sampling.top_k:
                key = "sampling.top_p" if self.sampling.top_p < 1 else "sampling.top_k"
                raise KeyedError(
                    key,
                    "cuts the distribution, so the log-probabilities that training needs would be inexact; "
                    "remove it here (evaluation.accuracy has its own)",
                )
            if self.sampling.temperature == 0:
                raise KeyedError(
                    "sampling.temperature", "0 makes all members of a group alike; training needs more than 0"
                )
            if self.data.train is None:
                raise KeyedError("data.train", "is missing: training needs problems")
        if self.reward.overlong.weight and self.reward.overlong.buffer > self.sampling.max_tokens:
            raise KeyedError(
                "reward.overlong.buffer",
                f"is {self.reward.overlong.buffer}, more than sampling.max_tokens ({self.sampling.max_tokens})",
            )
        if (self.evaluation.before or self.evaluation.every) and self.data.eval is None:
            key = "evaluation.before" if self.evaluation.before else "evaluation.every"
            raise KeyedError(key, "there is nothing to evaluate on: data.eval is missing")
        if self.debate.grouping == "shared_context" and self.debate.protocol != "mad":
            raise KeyedError("debate.grouping", "shared_context is only defined for protocol 'mad'")
        if self.evaluation.decomposition.sampling == "shared_context" and self.debate.protocol != "mad":
            raise KeyedError("evaluation.decomposition.sampling", "shared_context is only defined for protocol 'mad'")
        return self

    def _check_adapters(self) -> None:
        shared = [(i, agent) for i, agent in enumerate(self.agents) if agent.base == "shared"]
        for i, agent in shared:
            if agent.adapter is None:
                raise KeyedError(f"agents[{i}].base", "shared needs an adapter: the base itself is never trained")
            first = shared[0][1]
            if (agent.model, agent.revision) != (first.model, first.revision):
                raise KeyedError(
                    f"agents[{i}].base",
                    f"agents that share a base need one model, not {first.model!r} and {agent.model!r}",
                )
        for i, agent in enumerate(self.agents):
            if agent.adapter is not None and not agent.trainable:
                raise KeyedError(f"agents[{i}].adapter", "has no use where trainable is false")

    def _check_learning(self, training: TrainingConfig) -> None:
        if not any(agent.trainable for agent in self.agents):
            raise KeyedError("agents", "none of them is trainable, so there is nothing to train")
        if training.problems_per_step % training.updates_per_batch:
            raise KeyedError(
                "training.updates_per_batch",
                f"{training.updates_per_batch} does not divide problems_per_step ({training.problems_per_step}); "
                f"{nearest_multiples(training.problems_per_step, training.updates_per_batch)} would do",
            )
        if training.attention.startswith("flash") and training.precision != "bfloat16":
            raise KeyedError(
                "training.attention", f"{training.attention} computes in bfloat16 only; set training.precision"
            )
        mode, whose = self.advantage.weight.mode, self.advantage.weight.logprobs
        if mode in ("ucas", "edge") and whose == "sampler":
            raise KeyedError(
                "advantage.weight.logprobs",
                f"{mode!r} needs full distributions, which only the trainer has: say trainer",
            )

    @property
    def folder(self) -> Path:
        return Path(self.output or f"runs/{self.name}")
