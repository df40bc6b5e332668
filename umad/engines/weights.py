"""Copying weights into an engine's module, one by one as they come."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from umad.engines.adapters import adapter_state, is_adapted


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies `weights` (names as in the model's state dict) into the module's own tensors, converting their type.

    A model with an adapter takes its adapter's tensors and no others: its base is frozen, and may be shared. Each tensor is
    copied before the next one is asked for, since the giver may keep no more than one whole (ZeRO-3). Of tensors that the
    model ties, one is enough; if several come, they must be equal.

    Raises ValueError that names the tensor at fault; the tensors before it are copied then, so the model is of no use until
    a copy succeeds.
    """
    adapted = is_adapted(model)
    state = model.state_dict()
    own = adapter_state(model) if adapted else state
    tied: dict[str, tuple[int, int]] = {name: (tensor.data_ptr(), tensor.numel()) for name, tensor in own.items()}
    first: dict[tuple[int, int], tuple[str, int]] = {}
    """By the place of a tensor of the model: what came for it, and where that lay."""
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in own:
            if name in state:
                raise ValueError(f"weights hold {name!r}, which is of the engine's frozen base; push the adapter only")
            raise ValueError(f"weights hold {name!r}, which the engine's model does not have")
        if name in seen:
            raise ValueError(f"weights hold {name!r} twice")
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"weights hold {name!r} with shape {tuple(tensor.shape)}, the engine's model has "
                f"{tuple(own[name].shape)}"
            )
        seen.add(name)
        if tied[name] not in first:
            first[tied[name]] = name, tensor.data_ptr()
            own[name].copy_(tensor)
            continue
        other, place = first[tied[name]]
        if tensor.data_ptr() != place and not torch.equal(own[name], tensor.to(own[name])):
            raise ValueError(f"{other!r} and {name!r} are one tensor in the engine's model but differ")
    missing = [name for name, place in tied.items() if place not in first]
    if missing:
        raise ValueError(f"weights lack {missing[0]!r}")
