"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): a frozen base W and W + (alpha / rank) B A in its place.

peft injects them, so the model stays the Hugging Face class that it was. The base is never written to: the reference is the
model with its adapter off, and merged weights are made beside it. Merging in place and back would drift (in bfloat16 most
weights have changed after a hundred times).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from umad.config import AdapterConfig
from umad.engines.adapters import (
    adapter_state,
    is_adapted,
    is_adapter_name,
    load_adapter_state,
    plain_name,
    share_base,
)
from umad.records import UserError

__all__ = [
    "adapter_state",
    "add_adapter",
    "is_adapted",
    "load_adapter",
    "load_adapter_state",
    "merged_weights",
    "save_adapter",
    "share_base",
    "without_adapter",
]

NAME = "default"
"""peft can keep several adapters in one model, by name; here every model has one."""

Whole = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]
"""Makes parameters whole while it is entered, where they lie in parts on several ranks."""


def add_adapter(model: Any, config: AdapterConfig, seed: int) -> None:
    """Gives `model` (a Hugging Face causal LM) an adapter and freezes everything else.

    The adapter is float32; B is zero, so that nothing changes yet, and A is uniform within 1 / sqrt(inputs), from `seed`
    alone. No dropout: scoring and updating are one function. The head stays plain.

    Raises:
        UserError: peft is not installed, or `config.targets` names what isn't there, or isn't a linear layer.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("adapter: needs peft, which is not installed: pip install 'umad[peft]'")
    from peft import LoraConfig, inject_adapter_in_model

    if is_adapted(model):
        raise ValueError("the model has an adapter already")
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_targets(model, config.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=_transposed(model),
    )
    with torch.random.fork_rng(devices=[]):  # peft draws too, before A is overwritten
        inject_adapter_in_model(settings, model, NAME)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        own = is_adapter_name(name)
        parameter.requires_grad_(own)
        if not own:
            continue
        start = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            bound = 1 / math.sqrt(start.shape[1])
            start.uniform_(-bound, bound, generator=generator)
        parameter.data = start.to(parameter.device)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what its base does, to the bit."""
    layers: list[Any] = list(_layers(model).values())
    before = [layer._disable_adapters for layer in layers]
    # peft's own switch would also change requires_grad, which DDP and DeepSpeed took note of when they wrapped the model
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


@torch.no_grad()
def merged_weights(model: nn.Module, whole: Whole | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model without adapter that computes the same: names as in that model's state dict.

    Sums are made in float32, out of place, and rounded once to the base's type; for a bfloat16 base that loses what is
    finer than its rounding, so keep the adapter beside it. Tensors without adapter share memory with the base. Under
    ZeRO-3 give `whole`, call on all ranks, and copy each tensor before asking for the next one.
    """
    make_whole: Whole = whole or (lambda parameters: nullcontext())
    tensors: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    layers = _layers(model)
    for name in model.state_dict():
        if is_adapter_name(name):
            continue
        layer: Any = layers.get(name.removesuffix(".base_layer.weight"))
        parts = [tensors[name]]
        if layer is not None:
            parts += [layer.lora_A[NAME].weight, layer.lora_B[NAME].weight]
        with make_whole([part for part in parts if isinstance(part, nn.Parameter)]):
            base = tensors[name].detach()
            yield plain_name(name), base if layer is None else _merge(base, layer)


def _merge(base: Tensor, layer: Any) -> Tensor:
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    wide = torch.promote_types(base.dtype, torch.float32)
    product = (b.to(wide) @ a.to(wide)).mul_(layer.scaling[NAME])
    return product.t().add(base).to(base.dtype) if layer.fan_in_fan_out else product.add_(base).to(base.dtype)


def save_adapter(model: Any, folder: Path, base_name: str, state: Mapping[str, Tensor] | None = None) -> None:
    """Writes the adapter as peft does (`adapter_config.json`, `adapter_model.safetensors`): PeftModel.from_pretrained loads
    it onto the base, and so does `load_adapter`.

    base_name: what the base is loaded from. state: as of `adapter_state`; by default the model's, which under ZeRO-3 has to
    be made whole first.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = model.peft_config[NAME].to_dict()
    settings |= {"base_model_name_or_path": base_name, "inference_mode": True}
    # sets become lists whose order doesn't depend on the process: equal adapters are equal files
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {_stored(n): t.contiguous() for n, t in (adapter_state(model) if state is None else state).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def load_adapter(model: Any, folder: Path) -> None:
    """Copies an adapter that `save_adapter` wrote into the model's own, which must have the same rank, alpha and targets.

    Raises:
        UserError: it was made with other settings, or its file is not whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"adapter {folder} cannot be read: {error}") from error
    own = model.peft_config[NAME]
    for key, field in (("rank", "r"), ("alpha", "lora_alpha")):
        if saved.get(field) != getattr(own, field):
            raise UserError(
                f"adapter {folder} was made with {key} {saved.get(field)}, here it is {getattr(own, field)}"
            )
    names = {_stored(name): name for name in adapter_state(model)}
    try:
        load_adapter_state(model, {names.get(name, name): tensor for name, tensor in stored.items()})
    except ValueError as error:
        raise UserError(f"adapter {folder} does not fit the model and its adapter.targets: {error}") from error


def _stored(name: str) -> str:
    """The name that peft's files have for a parameter."""
    return "base_model.model." + name.replace(f".{NAME}.", ".")


# --- layers -----------------------------------------------------------------------------------------------------------


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Adapted layers by name."""
    return {name: module for name, module in model.named_modules() if NAME in getattr(module, "lora_A", ())}


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def _transposed(model: nn.Module) -> bool:
    """Whether linear layers keep their weights as [inputs, outputs], as GPT-2's do."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return any(not isinstance(module, nn.Linear) for module in _linear(model).values() if module is not head)


def _targets(model: Any, wanted: str | Sequence[str]) -> list[str]:
    """Names for peft, each of which stands for all modules that are called so or whose last parts are."""
    head = model.get_output_embeddings()
    linear = [name for name, module in _linear(model).items() if module is not head]
    if wanted == "all-linear":
        chosen = linear
    else:
        chosen = []
        for target in [wanted] if isinstance(wanted, str) else wanted:
            found = [name for name in linear if _matches(name, target)]
            every = [name for name, _ in model.named_modules() if _matches(name, target)]
            if not found or len(every) > len(found):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                what = "is not a linear layer that can have an adapter" if every else "is no module of the model"
                raise UserError(f"adapter.targets: {target!r} {what}; there are {known} (or all-linear)")
            chosen += found
    short = {name.rpartition(".")[2] for name in chosen}
    matched = {name for name, _ in model.named_modules() if any(_matches(name, last) for last in short)}
    return sorted(short if matched == set(chosen) else set(chosen))


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
