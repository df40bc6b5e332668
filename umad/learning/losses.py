"""The loss as pure functions on flat token tensors: no padding, no mask, no state.

Everywhere, [n] are the completion tokens of a micro-batch, sequence after sequence, and `sequence` (int64 [n]) says which
row each belongs to. What is not in the loss is not in the tensors. Sums are divided by one normaliser per optimiser step
that the caller computes over all its samples, so how they are split into micro-batches changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umad.config import LossConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp, which stays finite in float32 and below any sensible clip."""


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`loss`: the scalar to differentiate, already divided by the normaliser. `sums`: detached sums over tokens for
    metrics (divide by the number of tokens), raw where the loss itself clips. `maxima`: detached maxima."""

    loss: Tensor
    sums: dict[str, float]
    maxima: dict[str, float]


def loss_normaliser(kind: str, lengths: Sequence[int]) -> float:
    """The divisor of an optimiser step from the completion lengths of all samples in its loss (advantage 0 included).

    `dapo` (arXiv 2503.14476): the number of tokens. `grpo` (arXiv 2402.03300): the number of sequences.
    """
    return float(sum(lengths)) if kind == "dapo" else float(len(lengths))


def token_weights(kind: str, sequence: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's share [n] in the sum before the normaliser: 1 (`dapo`), or 1/length of its sequence (`grpo`).

    lengths: int64 [rows], completion tokens of each row.
    """
    if kind == "dapo":
        return torch.ones(sequence.shape, dtype=dtype, device=sequence.device)
    return lengths.to(dtype).reciprocal()[sequence]


def policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """Clipped policy gradient per token [n] (PPO, arXiv 1707.06347), with dual clipping (arXiv 1912.09729).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old); for A < 0 never above -dual_clip A.
    logprobs [n] carry the gradient; old [n] and advantages [n] (one value per sequence, repeated) don't.
    """
    ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) per token [n], estimated without bias and never negative: exp(d) - 1 - d with
    d = reference - logprobs (Schulman, "Approximating KL divergence", k3)."""
    difference = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - 1 - difference


def total_loss(
    config: LossConfig,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    normaliser: float,
    reference: Tensor | None = None,
) -> LossOutput:
    """Policy loss plus `kl.coef` times the KL term, aggregated as `config.type` says. Shapes as in the functions above."""
    weights = token_weights(config.type, sequence, lengths, logprobs.dtype)
    policy = policy_loss(logprobs, old, advantages, config.clip_low, config.clip_high, config.dual_clip)
    loss = (policy * weights).sum() / normaliser
    with torch.no_grad():
        sums, maxima = _ratio_metrics(config, logprobs.detach(), old, advantages)
        sums["policy_loss"] = float((policy * weights).sum())
    if reference is not None:
        kl = k3(logprobs, reference)
        loss = loss + config.kl.coef * (kl * weights).sum() / normaliser
        sums["kl"] = float(kl.detach().sum())
    return LossOutput(loss, sums, maxima)


def _ratio_metrics(
    config: LossConfig, logprobs: Tensor, old: Tensor, advantages: Tensor
) -> tuple[dict[str, float], dict[str, float]]:
    """Ratios as they are, before any clipping: clipped ones always look healthy."""
    log_ratio = logprobs - old
    ratio = log_ratio.double().exp()
    negative = advantages < 0
    sums = {
        "ratio": float(ratio.sum()),
        # tokens whose gradient the clip takes away
        "clipped_high": float(((ratio > 1 + config.clip_high) & (advantages > 0)).sum()),
        "clipped_low": float(((ratio < 1 - config.clip_low) & negative).sum()),
    }
    if config.dual_clip is not None:
        sums["clipped_dual"] = float(((ratio > config.dual_clip) & negative).sum())
    maxima = {"ratio_max": float(ratio.max()), "log_ratio_abs_max": float(log_ratio.abs().max())}
    return sums, maxima
