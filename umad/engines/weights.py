"""Copying weights into an engine's module: everything or nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies `weights` (names as in the model's state dict) into the module's own tensors, converting their type.

    Names and shapes are checked before anything is written. Of tensors that the model ties, one is enough; if several
    come, they must be equal. Raises ValueError that names the tensors at fault.
    """
    own = model.state_dict()
    given: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name not in own:
            raise ValueError(f"weights hold {name!r}, which the engine's model does not have")
        if name in given:
            raise ValueError(f"weights hold {name!r} twice")
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"weights hold {name!r} with shape {tuple(tensor.shape)}, the engine's model has "
                f"{tuple(own[name].shape)}"
            )
        given[name] = tensor
    tied: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in own.items():
        tied.setdefault((tensor.data_ptr(), tensor.numel()), []).append(name)
    for names in tied.values():
        present = [name for name in names if name in given]
        if not present:
            raise ValueError(f"weights lack {names[0]!r}")
        first = given[present[0]]
        for name in present[1:]:
            if given[name].data_ptr() != first.data_ptr() and not torch.equal(given[name], first):
                raise ValueError(f"{present[0]!r} and {name!r} are one tensor in the engine's model but differ")
    for names in tied.values():
        name = next(name for name in names if name in given)
        own[name].copy_(given[name])
