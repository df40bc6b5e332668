"""The schema of a recipe: every setting, its default, and what cannot be combined. `umad.recipe_io` reads the files."""

from umad.config.base import KeyedError, Section
from umad.config.debating import (
    AdapterConfig,
    AgentConfig,
    DebateConfig,
    SamplingConfig,
)
from umad.config.learning import (
    AdvantageConfig,
    CorrectionConfig,
    EntropyConfig,
    InfluenceConfig,
    KLConfig,
    LossConfig,
    OverlongConfig,
    RewardConfig,
    RewardFunctionConfig,
    TrainingConfig,
    WeightConfig,
)
from umad.config.recipe import Recipe
from umad.config.running import (
    AccuracyConfig,
    CheckpointConfig,
    DataConfig,
    DecompositionConfig,
    EngineConfig,
    EvaluationConfig,
    GradingConfig,
    LoggingConfig,
    SourceConfig,
)
from umad.config.sft import SFTConfig, SolutionsConfig

__all__ = [
    "AccuracyConfig",
    "AdapterConfig",
    "AdvantageConfig",
    "AgentConfig",
    "CheckpointConfig",
    "CorrectionConfig",
    "DataConfig",
    "DebateConfig",
    "DecompositionConfig",
    "EngineConfig",
    "EntropyConfig",
    "EvaluationConfig",
    "GradingConfig",
    "InfluenceConfig",
    "KLConfig",
    "KeyedError",
    "LoggingConfig",
    "LossConfig",
    "OverlongConfig",
    "Recipe",
    "RewardConfig",
    "RewardFunctionConfig",
    "SFTConfig",
    "SamplingConfig",
    "Section",
    "SolutionsConfig",
    "SourceConfig",
    "TrainingConfig",
    "WeightConfig",
]
