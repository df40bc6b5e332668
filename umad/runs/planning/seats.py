"""One agent as the plan sees it, and what decides how its trainer and engine compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from umad.config import AgentConfig, Recipe, TrainingConfig
from umad.runs.planning.machines import Layout
from umad.runs.planning.shapes import Shape
from umad.runs.planning.work import Lengths

Mode = Literal["float32", "autocast", "bfloat16"]
"""How the update computes; `autocast`: bfloat16 products on float32 weights."""


@dataclass(frozen=True)
class Seat:
    """What the plan has to know of one agent."""

    config: AgentConfig
    shape: Shape
    lengths: Lengths

    @property
    def trained(self) -> int:
        """Parameters that are updated."""
        if not self.config.trainable:
            return 0
        adapter = self.config.adapter
        if adapter is None:
            return self.shape.parameters
        return self.shape.adapter_parameters(adapter.rank, adapter.targets)


def mode_of(seat: Seat, training: TrainingConfig, layout: Layout) -> Mode:
    """A frozen base is loaded in bfloat16, so that autocast has nothing to convert."""
    if training.precision == "float32":
        return "float32"
    return "bfloat16" if layout.deepspeed or seat.config.adapter is not None else "autocast"


def needs_scores(recipe: Recipe) -> bool:
    """Whether samples are scored by the trainer before they are learned from (as `Trainer.samples` decides)."""
    training, weight = recipe.training, recipe.advantage.weight
    if training is None:
        return False
    exact = recipe.engine.dtype == "float32" and training.precision == "float32"
    own = weight.mode != "none" and (weight.logprobs == "trainer" or (weight.logprobs == "auto" and not exact))
    return weight.mode in ("ucas", "edge") or own or (training.updates_per_batch > 1 and not exact)


def engine_size(recipe: Recipe) -> int:
    return 2 if recipe.engine.dtype == "bfloat16" else 4
