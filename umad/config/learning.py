"""Sections of a recipe that say what is learned: rewards, advantages, the loss, the training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from umad.config.base import Beta, Count, PositiveInt, Section


class InfluenceConfig(Section):
    """Eq. 5: the reward for what peers that saw a response did next."""

    eta: float = Field(0.2, ge=0)
    """0: no influence reward."""
    form: Literal["linear", "sign"] = "linear"
    source: Literal["peer", "team"] = "peer"
    """`team`: the speaker's own change counts too."""


class OverlongConfig(Section):
    """DAPO's soft punishment of responses that come near `sampling.max_tokens`."""

    weight: float = Field(0.0, ge=0)
    """0: off."""
    buffer: PositiveInt = 128
    """The punishment grows over the last so many tokens, to -weight at `sampling.max_tokens`."""


class RewardFunctionConfig(Section):
    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, called with (debate, agent, turn); returns a number, or None where it does not apply."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Names its metrics; the function's name by default."""
    weight: float = 1.0
    time_limit: float = Field(10.0, gt=0)
    """Seconds for one call."""


class RewardConfig(Section):
    team: Literal["own", "sum", "mean", "max"] = "own"
    credit: Literal["dense", "final", "accumulated"] = "dense"
    """`final`: every turn is paid by the last turn's grade. `accumulated`: by the sum from that turn to the last."""
    correctness: float = Field(1.0, ge=0)
    """Weight of the correctness reward."""
    influence: InfluenceConfig = InfluenceConfig()
    format: float = Field(0.0, ge=0)
    """Weight of a reward of 1 for ending with the answer in a balanced box; 0: off."""
    overlong: OverlongConfig = OverlongConfig()
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Rewards of your own."""

    @field_validator("functions")
    @classmethod
    def _distinct(cls, value: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
        taken = ["correct", "influence", "format", "overlong"]
        for entry in value:
            name = entry.name or entry.function.rpartition(":")[2]
            if name in taken:
                raise ValueError(f"there are two rewards called {name!r}; give one of them another name")
            taken.append(name)
        return value


class WeightConfig(Section):
    mode: Literal["nll", "none", "signed_nll", "ucas", "edge"] = "nll"
    """`ucas` and `edge` look at the full distributions, which only the trainer's own forward pass gives."""
    alpha: float = Field(0.25, ge=0)
    """How much weights differ; 0: not at all. `edge` has no such strength."""
    logprobs: Literal["auto", "sampler", "trainer"] = "auto"
    """Whose log-probabilities U is taken from; `auto`: the sampler's where they are exact (float32), else the trainer's."""
    clip: float = Field(100.0, gt=1)
    """Weights are kept within [1/clip, clip]; how many were cut is counted."""


class AdvantageConfig(Section):
    normalize: Literal["std", "none"] = "std"
    weight: WeightConfig = WeightConfig()


class KLConfig(Section):
    coef: float = Field(0.0, ge=0)


class EntropyConfig(Section):
    coef: float = Field(0.0, ge=0)
    """Weight of a bonus for the entropy of the policy's next-token distributions; 0: off."""


class CorrectionConfig(Section):
    """Importance weights between the sampler's distribution and the trainer's."""

    mode: Literal["auto", "none", "truncate", "mask"] = "auto"
    """`truncate`: weights above `cap` become `cap`. `mask`: what is above `cap` or below 1 / `cap` leaves the loss.
    `auto`: `truncate` where the sampler's log-probabilities are not exact, else `none`."""
    level: Literal["token", "sequence"] = "token"
    cap: float = Field(2.0, gt=1)


class LossConfig(Section):
    type: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = "dapo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """null: off."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    correction: CorrectionConfig = CorrectionConfig()
    mask_truncated: bool = False
    """Leave truncated responses out of the loss; they stay in their group's baseline."""


class TrainingConfig(Section):
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    """Give `steps` or `epochs`."""
    problems_per_step: PositiveInt = 8
    group_size: int = 5
    learning_rate: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip by global norm; 0: off."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens (padding included) in one forward pass of the update."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the update's forward and backward pass; master weights are float32."""
    gradient_checkpointing: bool = False
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Of the update. The flash ones pack sequences without padding; `auto` takes one where it is installed, else sdpa."""
    updates_per_batch: PositiveInt = 1
    """Split each step's problems into so many parts, and update once with each."""
    agent_schedule: Literal["joint", "alternate", "round_robin"] = "joint"
    """Who is updated: all at every step; one for `alternate_every` steps, then the next; or one after the other."""
    alternate_every: PositiveInt = 10
    """Steps that one agent learns before the next one does, under `agent_schedule: alternate`."""
    no_signal: Literal["keep", "drop", "refill"] = "keep"
    """Groups whose rewards are all equal: `keep` them in the loss's normaliser, `drop` them, or `refill`: draw further
    problems until `problems_per_step` of them have a group with signal."""
    refill_rounds: PositiveInt = 4
    """Most further rounds of debates that one step may take under `no_signal: refill`."""
    max_nonfinite: PositiveInt = 5
    """Stop after so many updates in a row that a loss or gradient norm which isn't finite made useless."""
    offload_idle: bool = False
    """Keep an agent's optimiser state in CPU memory while it isn't being updated."""

    @field_validator("group_size")
    @classmethod
    def _group(cls, value: int) -> int:
        if value < 2:
            raise ValueError("a group of one has no baseline and every advantage would be 0; use at least 2")
        return value

    @model_validator(mode="after")
    def _length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        return self
