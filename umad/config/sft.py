"""The section of a recipe for supervised fine-tuning, `umad sft`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from umad.config.base import Count, PositiveInt, Section
from umad.config.running import SourceConfig


class SolutionsConfig(SourceConfig):
    """Problems with worked solutions."""

    solution_field: str | None = None
    """The field with the solution; by default `solution`, else an `answer` that holds one, as GSM8K's does."""


class SFTConfig(Section):
    """What to imitate, and for how long. `training` says the rest where a recipe has it: precision, schedule, weight decay,
    clipping, gradient checkpointing, tokens in one forward pass."""

    data: SolutionsConfig | None = None
    """Imitate solutions from a data set."""
    debates: str | None = None
    """Imitate right responses of recorded debates: a run folder, an evaluation folder, or a JSON lines file of debates."""
    responses: Literal["own", "all"] = "own"
    """Of debates: an agent learns from its own right responses, or from everybody's."""
    turns: tuple[Count, ...] | None = None
    """Of debates: only these turns, 0 the first; null: all."""
    per_problem: PositiveInt | None = None
    """Of debates: at most so many responses of a problem and turn, drawn by `seed`; null: all."""
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    """Give `steps` or `epochs`, for each agent."""
    batch_size: PositiveInt = 8
    """Responses in one step, over all processes."""
    learning_rate: float = Field(1e-5, gt=0)
    """`agents.*.learning_rate` overrides it."""
    max_tokens: PositiveInt | None = None
    """Longest prompt and response together, longer ones are left out; by default what the model's context holds."""

    @model_validator(mode="after")
    def _choices(self) -> Self:
        if (self.data is None) == (self.debates is None):
            raise ValueError("give either data (problems with solutions) or debates (recorded ones)")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if self.data is not None:
            for name in ("responses", "turns", "per_problem"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} chooses among recorded debates; with data it has no effect, remove it")
        return self
