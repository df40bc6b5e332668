"""Samples in micro-batches under a token budget, as padded ids with flat completion positions, and their log-probs.

Rows are prompt + completion, padded on the right. In a causal model nothing looks to the right, so padding can't reach a
real token: no attention mask is needed, and position ids are the plain 0, 1, 2, ... Padding is known by position, never
by id, so a pad token that is also the end-of-sequence token is trained where it was sampled and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from umad.records import Sample


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of B rows, n completion tokens in all.

    input_ids: int64 [B, T], right-padded. index: int64 [n], the flat positions (row * T + column) whose output predicts
    the completion tokens; targets: int64 [n], those tokens; sequence: int64 [n], their rows. lengths: int64 [B], completion
    tokens per row. tokens: real tokens, prompts included.
    """

    input_ids: Tensor
    index: Tensor
    targets: Tensor
    sequence: Tensor
    lengths: Tensor
    tokens: int

    @property
    def padded(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()


BATCH_COST = 256
"""What starting one more micro-batch is taken to cost, in tokens of computing: it weighs against padding."""


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
    """Splits samples into micro-batches (lists of positions) of at most `max_tokens` padded tokens each.

    Sorted by length, the longest first, so rows of a batch are near in length and too little memory shows at once; ties
    keep their order. The cuts are those with the least padded tokens plus `BATCH_COST` per batch. A sample that is longer
    than the budget makes a batch of its own.
    """
    order = sorted(range(len(samples)), key=lambda i: -_length(samples[i]))
    widths = [_length(samples[i]) for i in order]
    n = len(order)
    cost, cut = [0] * (n + 1), [n] * n  # of the best split of what is left from a position on, and its first cut
    for first in reversed(range(n)):
        width, best = widths[first], None
        for end in range(first + 1, min(n, first + max(1, max_tokens // width)) + 1):
            own = width * (end - first)
            if best is not None and own >= best:
                break  # adding rows only costs more
            if best is None or own + cost[end] < best:
                best, cut[first] = own + cost[end], end
        assert best is not None
        cost[first] = best + BATCH_COST
    batches, first = [], 0
    while first < n:
        batches.append(order[first : cut[first]])
        first = cut[first]
    return batches


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


def completion_logprobs(
    model: nn.Module, head: nn.Module, batch: Batch, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Natural log-probabilities [n] of the completion tokens under softmax(logits / temperature), and where asked their
    distributions' entropies [n] (detached, nats). At least float32 whatever the model computes in.

    `model` may be wrapped (Accelerate, DDP, DeepSpeed); `head` is the module inside it that makes logits. Only completion
    positions pass through the head: a [B, T, vocabulary] tensor is never made.
    """

    def select(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1])[batch.index], *args[1:])

    # a hook, and not a forward pass of our own, so that whatever a model does after its head (scaling, soft-capping,
    # all of it elementwise) is kept, and so that wrappers see their module's own forward
    handle = head.register_forward_pre_hook(select)
    try:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    finally:
        handle.remove()
    if logits.shape[:-1] != batch.index.shape:
        raise RuntimeError(
            f"the head gave {tuple(logits.shape)}, not one row per completion token ({len(batch.index)})"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, batch.targets[:, None]).squeeze(-1) - normaliser
    if not entropy:
        return logprobs, None
    with torch.no_grad():
        return logprobs, torch.special.entr((logits - normaliser[:, None]).exp()).sum(-1)
