"""Sections of a recipe that say what it runs on: engines, data, grading, evaluation, logging, checkpoints."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from umad.config.base import Count, PositiveInt, Section


class EngineConfig(Section):
    backend: Literal["transformers", "scripted"] = "transformers"
    max_batch: PositiveInt = 128
    """Most responses decoded at once by one engine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    script: str | None = None
    """For `scripted`: a JSON lines file of replies."""

    @model_validator(mode="after")
    def _script(self) -> Self:
        if (self.backend == "scripted") != (self.script is not None):
            raise ValueError("backend: scripted needs script: FILE, and only it takes one")
        return self


class SourceConfig(Section):
    """Where problems come from: `name` (a known set, on the Hub or generated) or `path` (jsonl or parquet)."""

    name: str | None = None
    path: str | None = None
    """A local file; with `name` it stands in for the download, read in that set's format."""
    split: str | None = None
    limit: PositiveInt | None = None
    """Use only the first `limit` problems after shuffling by `seed` (file order without one)."""
    seed: int | None = None
    kind: str | None = None
    """How answers are compared; the set's own by default."""
    question_field: str | None = None
    answer_field: str | None = None
    level: PositiveInt | None = None
    """For `arithmetic`: difficulty."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.name is None and self.path is None:
            raise ValueError("give name (gsm8k, math, math500, amc23, aime24, aime25, arithmetic) or path")
        return self


class DataConfig(Section):
    train: SourceConfig | None = None
    eval: SourceConfig | None = None
    on_bad_rows: Literal["error", "skip"] = "error"


class AccuracyConfig(Section):
    problems: Count = 500
    """0: leave it out."""
    rollouts: PositiveInt = 1
    temperature: float = Field(0.6, ge=0, le=1000)
    top_p: float = Field(0.95, gt=0, le=1)
    top_k: Count = 0


class DecompositionConfig(Section):
    problems: Count = 64
    """0: leave it out."""
    rollouts: int = Field(16, ge=2)
    temperature: float = Field(1.0, ge=0, le=1000)
    top_p: float = Field(1.0, gt=0, le=1)
    sampling: Literal["trajectory", "shared_context"] = "trajectory"


class EvaluationConfig(Section):
    turns: PositiveInt | None = None
    """Turns of the debates that are measured; those of training by default."""
    every: Count = 0
    """Evaluate every so many training steps; 0: not during training."""
    before: bool = False
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    max_tokens: PositiveInt | None = None
    """`sampling.max_tokens` by default."""
    accuracy: AccuracyConfig = AccuracyConfig()
    decomposition: DecompositionConfig = DecompositionConfig()
    bootstrap: PositiveInt = 10_000
    seed: int = 0


class GradingConfig(Section):
    require_box: bool = False
    """Only a boxed answer counts."""
    time_limit: float = Field(5.0, gt=0)
    """Seconds for one comparison."""
    memory_limit: int = Field(1024, ge=256)
    """MB for one worker."""
    workers: PositiveInt = 1


class LoggingConfig(Section):
    wandb: Literal["off", "online", "offline"] = "off"
    project: str = "umad"
    transcripts: Count = 1
    """Write transcripts and rollouts every so many steps; 0: never."""


class CheckpointConfig(Section):
    every: Count = 0
    """Save every so many steps; the last step is always saved. 0: only the last."""
    keep: PositiveInt | None = None
    """Keep only the newest so many; null: all."""
    keep_best: bool = False
    """Keep the checkpoint with the best evaluation too."""
