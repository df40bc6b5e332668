"""LoRA adapters as an engine meets them: which tensors are the adapter's, and models that have their base in common.

peft puts an adapter into a model's own module tree: a layer `q_proj` becomes `q_proj.base_layer`, `q_proj.lora_A.default`
and `q_proj.lora_B.default`. Nothing here needs peft itself, so engines without adapters never load it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def is_adapted(model: nn.Module) -> bool:
    """Whether an adapter was added (`umad.learning.adapters.add_adapter`)."""
    return hasattr(model, "peft_config")


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of that name is the adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The name that a tensor of the base has in the model without adapter."""
    return name.replace(".base_layer.", ".")


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """What training changes, by its name in `model.named_parameters()`: detached, sharing memory with the weights."""
    return {name: p.detach() for name, p in model.named_parameters() if is_adapter_name(name)}


@torch.no_grad()
def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies tensors as `adapter_state` returns them into the adapter. Raises ValueError that names a tensor at fault."""
    own = adapter_state(model)
    if own.keys() != state.keys():
        raise ValueError(f"the adapter's tensors have other names: {sorted(own.keys() ^ state.keys())[0]!r}")
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, the adapter's {tuple(own[name].shape)}")
    for name, tensor in state.items():
        own[name].copy_(tensor)


def share_base(model: Model, dtype: torch.dtype | None = None, base: nn.Module | None = None) -> Model:
    """A second module tree on the same base tensors, with a copy of the adapter where `model` has one.

    dtype: of all parameters of the copy. A base tensor of another type is converted, so not shared with `model`; buffers
    stay as they are (rotary frequencies in bfloat16 would misplace distant tokens). base: a model on the same base, adapted
    in whatever way, whose base tensors the copy gets instead of `model`'s.

    Parameters of the copy are objects of their own on the same memory: freezing, emptying or replacing one's does nothing
    to the other's. Writing to a base tensor in place would change both.
    """
    donor = model if base is None else base
    given = {plain_name(name): p.detach() for name, p in donor.named_parameters() if not is_adapter_name(name)}
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        own = is_adapter_name(name)
        tensor = parameter.detach() if own else given[plain_name(name)]
        tensor = tensor.to(dtype or tensor.dtype, copy=own)
        memo[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)
