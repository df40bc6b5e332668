"""Samples in micro-batches under a token budget, as ids with flat completion positions, and their log-probs.

Two layouts. Padded: rows are prompt + completion, filled up on the right. In a causal model nothing looks to the right, so
padding can't reach a real token: no attention mask is needed, and position ids are the plain 0, 1, 2, ... Padding is known
by position, never by id, so a pad token that is also the end-of-sequence token is trained where it was sampled and nowhere
else. Packed: all sequences one after the other in a single row, with position ids that start again at 0 with each, from
which transformers tells attention where one ends and the next begins; there is no padding at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from umad.records import Sample


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of S sequences, n completion tokens in all.

    input_ids: int64 [B, T]; B = S rows, right-padded, or one row of all sequences. index: int64 [n], the flat positions
    (row * T + column) whose output predicts the completion tokens; targets: int64 [n], those tokens; sequence: int64 [n],
    which of the S sequences they belong to. lengths: int64 [S], completion tokens of each. tokens: real tokens, prompts
    included. position_ids: int64 [1, T] in a packed batch, else None.
    """

    input_ids: Tensor
    index: Tensor
    targets: Tensor
    sequence: Tensor
    lengths: Tensor
    tokens: int
    position_ids: Tensor | None = None

    @property
    def padded(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    def inputs(self) -> dict[str, Any]:
        """What a model is called with. No attention mask: with one, transformers does not look for packed sequences."""
        given: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        return given if self.position_ids is None else given | {"position_ids": self.position_ids}


BATCH_COST = 256
"""What starting one more micro-batch is taken to cost, in tokens of computing: it weighs against padding."""


def micro_batches(samples: Sequence[Sample], max_tokens: int, packed: bool = False) -> list[list[int]]:
    """Splits samples into micro-batches (lists of positions) of at most `max_tokens` tokens each, padding included.

    Sorted by length, the longest first, so rows of a batch are near in length and too little memory shows at once; ties
    keep their order. The cuts are those with the least padded tokens plus `BATCH_COST` per batch; `packed` ones have no
    padding and are filled one after the other. A sample that is longer than the budget makes a batch of its own.
    """
    order = sorted(range(len(samples)), key=lambda i: -_length(samples[i]))
    widths = [_length(samples[i]) for i in order]
    cuts = [*(_filled if packed else _least_padded)(widths, max_tokens), len(order)]
    return [order[first:end] for first, end in itertools.pairwise(cuts)]


def _filled(widths: Sequence[int], max_tokens: int) -> list[int]:
    """Where batches begin if each takes what its budget holds."""
    starts: list[int] = []
    room = 0
    for i, width in enumerate(widths):
        if not starts or width > room:
            starts.append(i)
            room = max_tokens
        room -= width
    return starts


def _least_padded(widths: Sequence[int], max_tokens: int) -> list[int]:
    """Where batches begin in the cheapest split of falling widths, by dynamic programming from the end."""
    n = len(widths)
    cost = np.zeros(n + 1, np.int64)  # of the best split of what is left from a position on
    cut = np.empty(n, np.int64)  # and where its first batch ends
    rows = np.arange(1, n + 1)
    for first in reversed(range(n)):
        most = min(n - first, max(1, max_tokens // widths[first]))
        options = widths[first] * rows[:most] + cost[first + 1 : first + most + 1]
        best = int(options.argmin())
        cost[first], cut[first] = options[best] + BATCH_COST, first + best + 1
    starts, first = [], 0
    while first < n:
        starts.append(first)
        first = int(cut[first])
    return starts


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)


def collate(samples: Sequence[Sample], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Pads samples to one `Batch`. Any valid token serves as `pad_id`."""
    width = max(_length(s) for s in samples)
    ids = np.full((len(samples), width), pad_id, dtype=np.int64)
    index, lengths = [], []
    for row, s in enumerate(samples):
        prompt, total = len(s.prompt_ids), _length(s)
        ids[row, :prompt] = s.prompt_ids
        ids[row, prompt:total] = s.completion_ids
        # the output at a position predicts the next token
        index.append(np.arange(row * width + prompt - 1, row * width + total - 1))
        lengths.append(total - prompt)
    flat = np.concatenate(index)
    return Batch(
        input_ids=torch.from_numpy(ids).to(device),
        index=torch.from_numpy(flat).to(device),
        targets=torch.from_numpy(ids.reshape(-1)[flat + 1]).to(device),
        sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)).to(device),
        lengths=torch.tensor(lengths, device=device),
        tokens=sum(_length(s) for s in samples),
    )


def pack(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Puts samples one after the other into one row, for a model that `is_packable`."""
    widths = [_length(s) for s in samples]
    ids = np.concatenate([part for s in samples for part in (s.prompt_ids, s.completion_ids)]).astype(np.int64)
    lengths = [len(s.completion_ids) for s in samples]
    ends = np.cumsum(widths)
    flat = np.concatenate([np.arange(end - length - 1, end - 1) for end, length in zip(ends, lengths, strict=True)])
    return Batch(
        input_ids=torch.from_numpy(ids[None]).to(device),
        index=torch.from_numpy(flat).to(device),
        targets=torch.from_numpy(ids[flat + 1]).to(device),
        sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)).to(device),
        lengths=torch.tensor(lengths, device=device),
        tokens=len(ids),
        position_ids=torch.from_numpy(np.concatenate([np.arange(width) for width in widths])[None]).to(device),
    )


def is_packable(model: Any) -> bool:
    """Whether packed batches are right and cheaper for this model, wrapped or not.

    Its attention must be one of the flash ones, which never look from one sequence at another. (sdpa and eager get a
    block-diagonal mask instead: right, but as wide as the row is long.) Every layer must be attention: a recurrent or
    convolutional one would carry its state over from one sequence to the next.
    """
    model = unwrapped(model)
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    stateful = any(getattr(module, "_is_stateful", False) for module in model.modules())
    # the name may be that of a kernel on the Hub, as "kernels-community/flash-attn2"
    flash = "flash" in str(config._attn_implementation)
    return flash and not stateful and kinds <= {"full_attention", "sliding_attention"}


def unwrapped(model: Any) -> Any:
    """The model inside what DDP, DeepSpeed and their like have put around it."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def completion_logits(model: nn.Module, head: nn.Module, batch: Batch) -> Tensor:
    """The model's own logits [n, V] at the completion positions, with whatever it does after its head.

    `model` may be wrapped (Accelerate, DDP, DeepSpeed); `head` is the module inside it that makes logits. Only completion
    positions pass through the head: a [B, T, V] tensor is never made.
    """

    def select(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1])[batch.index], *args[1:])

    # a hook, and not a forward pass of our own, so that whatever a model does after its head (scaling, soft-capping,
    # all of it elementwise) is kept, and so that wrappers see their module's own forward
    handle = head.register_forward_pre_hook(select)
    try:
        logits: Tensor = model(**batch.inputs()).logits
    finally:
        handle.remove()
    if logits.shape[:-1] != batch.index.shape:
        raise RuntimeError(
            f"the head gave {tuple(logits.shape)}, not one row per completion token ({len(batch.index)})"
        )
    return logits


def completion_logprobs(
    model: nn.Module, head: nn.Module, batch: Batch, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Natural log-probabilities [n] of the completion tokens under softmax(logits / temperature), and where asked their
    distributions' entropies [n] (detached, nats). At least float32 whatever the model computes in.

    The plain path: all logits [n, V] at once. `umad.learning.head` does the same piece by piece.
    """
    logits = completion_logits(model, head, batch)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, batch.targets[:, None]).squeeze(-1) - normaliser
    if not entropy:
        return logprobs, None
    with torch.no_grad():
        return logprobs, torch.special.entr((logits - normaliser[:, None]).exp()).sum(-1)
