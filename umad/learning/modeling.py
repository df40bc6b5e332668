"""Small preparations that every model gets before it is trained."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from umad.records import UserError


def widen(model: nn.Module) -> None:
    """Trained weights narrower than float32 become float32."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def choose_attention(model: Any, wanted: str, precision: str) -> None:
    """Sets the attention that `training.attention` asks for; `auto`: FlashAttention 2 in bfloat16 on a GPU where it is
    installed, which can do without padding, else what the model was loaded with."""
    if wanted == "auto":
        if precision != "bfloat16" or not torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is None:
            return
        wanted = "flash_attention_2"
    try:
        model.set_attn_implementation(wanted)
    except (ImportError, ValueError) as error:
        raise UserError(f"training.attention: {wanted!r} cannot be used here ({error})") from error


def no_dropout(model: nn.Module) -> None:
    """Turns dropout off in every mode, so that updating and scoring are the same function. The config keeps its value."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def make_savable(model: Any) -> None:
    """transformers loads generation configs that contradict themselves (temperature without do_sample, as Llama 2's) and
    refuses to save them: found out here, not after hours of training. Only the special tokens of such a one are kept."""
    from transformers import GenerationConfig

    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**special)


@contextmanager
def no_bars() -> Iterator[None]:
    """Keeps transformers' progress bars out of the run's own output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def checkpoint_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # transformers >= 5.24's name for it
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def frozen_copy(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy that is never trained, in `dtype` where one is given."""
    reference = copy.deepcopy(model).to(device).eval()
    return reference.requires_grad_(False) if dtype is None else reference.requires_grad_(False).to(dtype)


def halve_linear(model: nn.Module) -> None:
    """Linear layers' weights to bfloat16, but for a head that is tied to the embedding: autocast computes with bfloat16 copies
    of them anyway, so nothing changes in what the model computes under it."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
            module.to(torch.bfloat16)
