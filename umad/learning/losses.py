"""The loss as pure functions on flat token tensors: no padding, no mask, no state.

Everywhere, [n] are the completion tokens of a micro-batch, sequence after sequence, and `sequence` (int64 [n]) says which
row each belongs to. What is not in the loss is not in the tensors. Sums are divided by one normaliser per optimiser step
that the caller computes over all its samples, so how they are split into micro-batches changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from umad.config import CorrectionConfig, LossConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp, which stays finite in float32 and below any sensible clip."""

Correction = Literal["none", "truncate", "mask"]


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`loss`: the scalar to differentiate, already divided by the normaliser. `sums`: detached sums over tokens for
    metrics (`loss_metrics`), raw where the loss itself clips. `maxima`: detached maxima."""

    loss: Tensor
    sums: dict[str, float]
    maxima: dict[str, float]


def loss_normaliser(config: LossConfig, lengths: Sequence[int], max_tokens: int) -> float:
    """The divisor of an optimiser step from the completion lengths of all samples in its loss (advantage 0 included).

    `dapo` (arXiv 2503.14476), `cispo` (arXiv 2506.13585): the number of tokens. `grpo` (arXiv 2402.03300), `gspo` (arXiv
    2507.18071): the number of sequences. `dr_grpo` (arXiv 2503.20783): the number of sequences times `max_tokens`, the longest
    response that may be sampled: a constant, so that a sequence's length changes nothing in its tokens' weight. The
    normalisers of parts (micro-batches, ranks) add up to that of the whole.
    """
    if config.type in ("dapo", "cispo"):
        return float(sum(lengths))
    return float(len(lengths)) * (max_tokens if config.type == "dr_grpo" else 1)


def token_weights(kind: str, sequence: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's share [n] in the sum before the normaliser: 1, or 1/length of its sequence (`grpo`, `gspo`).

    lengths: int64 [rows], completion tokens of each row.
    """
    if kind in ("grpo", "gspo"):
        return lengths.to(dtype).reciprocal()[sequence]
    return torch.ones(sequence.shape, dtype=dtype, device=sequence.device)


def correction_mode(config: CorrectionConfig, exact: bool) -> Correction:
    """What `auto` means: `truncate` where the sampler's log-probabilities are not the trainer's own, else `none`."""
    if config.mode == "auto":
        return "none" if exact else "truncate"
    return config.mode


def is_token_level(config: LossConfig, correction: Correction) -> bool:
    """Whether a token's loss depends on its own log-probability and entropy only, so that tokens can be cut anywhere."""
    return config.type != "gspo" and (correction == "none" or config.correction.level == "token")


def policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """Clipped policy gradient per token [n] (PPO, arXiv 1707.06347), with dual clipping (arXiv 1912.09729).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old); for A < 0 never above -dual_clip A.
    logprobs [n] carry the gradient; old [n] and advantages [n] don't.
    """
    return _clipped(_exp(logprobs - old), advantages, clip_low, clip_high, dual_clip)


def cispo_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """CISPO per token [n] (arXiv 2506.13585, Eq. 4 and 5): -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs.

    The ratio weighs a token's gradient and is never differentiated, so that no token loses its gradient to a clip. The paper
    leaves the lower bound open (clip_low near 1); here it is what the setting says.
    """
    ratio = _exp(logprobs.detach() - old).clamp(1 - clip_low, 1 + clip_high)
    return -ratio * advantages * logprobs


def sequence_log_ratio(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """GSPO's (arXiv 2507.18071, Eq. 7): the mean of a sequence's log-ratios [n], at each of its tokens [n].

    A sequence must be there whole: its sum is divided by its length in `lengths`.
    """
    sums = torch.zeros(len(lengths), dtype=log_ratio.dtype, device=log_ratio.device).index_add(0, sequence, log_ratio)
    return (sums / lengths)[sequence]


def importance_weights(
    log_ratio: Tensor, mode: Correction, config: CorrectionConfig, sequence: Tensor, lengths: Tensor
) -> Tensor:
    """Weights [n] that turn an expectation under the sampler into one under the trainer, from log trainer - log sampler [n].

    Truncated importance sampling: min(w, cap). Masked: w where it lies within [1 / cap, cap], else 0. `level: token`: w is the
    token's ratio. `sequence`: the whole response's, the product of its tokens' (which is what is unbiased; its variance grows
    with the length). No gradient.
    """
    log_ratio = log_ratio.detach()
    if config.level == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, sequence, lengths) * lengths[sequence]
    weights = _exp(log_ratio)
    if mode == "truncate":
        return weights.clamp(max=config.cap)
    inside = (weights <= config.cap) & (weights >= 1 / config.cap)
    return torch.where(inside, weights, torch.zeros_like(weights))


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) per token [n], estimated without bias and never negative: exp(d) - 1 - d with
    d = reference - logprobs (Schulman, "Approximating KL divergence", k3)."""
    difference = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - 1 - difference


def total_loss(
    config: LossConfig,
    logprobs: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    normaliser: float,
    *,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    sampler: Tensor | None = None,
    correction: Correction = "none",
) -> LossOutput:
    """The policy loss, plus `kl.coef` times the KL term, minus `entropy.coef` times the entropy, all aggregated as `type` says.

    logprobs, entropy [n] may carry gradients. old [n]: before the iteration's first update; None: `logprobs` themselves, all
    ratios 1. advantages [n]: what each token is multiplied with. sampler [n]: the log-probabilities that were sampled from;
    with `correction`, importance weights between them and `old` multiply the policy's term. lengths: of all rows that
    `sequence` counts. Losses and sums of parts add up, cut anywhere where `is_token_level`, else between sequences.

    `gspo` has one ratio for a sequence, and the clips, the dual one too, act on it. It is GSPO-token (section 4.3 of its
    paper), which is GSPO where a sequence's advantages are one value: each token's gradient is weighed by its own advantage.
    `cispo` clips its weights only; `dual_clip` has no effect on it. Importance weights come on top of a type's own clips.
    """
    before = logprobs.detach() if old is None else old
    weights = token_weights(config.type, sequence, lengths, logprobs.dtype)
    log_ratio = logprobs - before
    if config.type == "cispo":
        policy = cispo_loss(logprobs, before, advantages, config.clip_low, config.clip_high)
    else:
        if config.type == "gspo":
            own = logprobs - logprobs.detach()  # exactly 0, and what carries the gradient
            log_ratio = sequence_log_ratio(log_ratio.detach(), sequence, lengths) + own
        policy = _clipped(_exp(log_ratio), advantages, config.clip_low, config.clip_high, config.dual_clip)
    importance = None
    if correction != "none":
        if sampler is None:
            raise ValueError("a correction needs the sampler's log-probabilities")
        importance = importance_weights(before - sampler, correction, config.correction, sequence, lengths)
        policy = policy * importance
    loss = (policy * weights).sum()
    if reference is not None and config.kl.coef:
        loss = loss + config.kl.coef * (k3(logprobs, reference) * weights).sum()
    if entropy is not None and config.entropy.coef:
        loss = loss - config.entropy.coef * (entropy * weights).sum()
    with torch.no_grad():
        sums = _ratio_sums(config, logprobs.detach() - before, log_ratio.detach(), advantages)
        sums |= {"policy_loss": (policy * weights).sum()}
        if reference is not None:
            sums["kl"] = k3(logprobs, reference).sum()
        if entropy is not None:
            sums["entropy"] = entropy.sum()
        maxima = {"log_ratio_abs_max": (logprobs - before).abs().max()}
        maxima["ratio_max"] = (logprobs - before).double().exp().max()
        if sampler is not None:
            _mismatch(before - sampler, importance, config, sums, maxima)
    return LossOutput(
        loss / normaliser, *_floats(sums | {"completion_tokens": weights.new_tensor(len(weights))}, maxima)
    )


def loss_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics from the sums (of all micro-batches and ranks) and maxima: means over tokens, and `ess`, the effective sample
    size (sum w)^2 / (n sum w^2) of the raw importance weights between sampler and trainer, as a share of the tokens."""
    tokens = sums["completion_tokens"]
    left_out = ("completion_tokens", "sampler_ratio_square")
    metrics = {name: value / tokens for name, value in sums.items() if name not in left_out}
    if "sampler_ratio_square" in sums:
        metrics["ess"] = sums["sampler_ratio"] ** 2 / (tokens * sums["sampler_ratio_square"])
    return metrics | dict(maxima)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss


def _ratio_sums(config: LossConfig, raw: Tensor, used: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Ratios as they are, before any clipping: clipped ones always look healthy. raw, used: the tokens' log-ratios [n], and
    those that the clips look at (of the sequence, under `gspo`)."""
    ratio, negative = used.double().exp(), advantages < 0
    high, low = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
    if config.type == "cispo":  # it cuts weights, whatever the advantage's sign, and takes no gradient away
        return {"ratio": raw.double().exp().sum(), "clipped_high": high.sum(), "clipped_low": low.sum()}
    sums = {
        "ratio": raw.double().exp().sum(),
        # tokens whose gradient the clip takes away
        "clipped_high": (high & (advantages > 0)).sum(),
        "clipped_low": (low & negative).sum(),
    }
    if config.dual_clip is not None:
        sums["clipped_dual"] = ((ratio > config.dual_clip) & negative).sum()
    return sums


def _mismatch(
    log_ratio: Tensor,
    importance: Tensor | None,
    config: LossConfig,
    sums: dict[str, Tensor],
    maxima: dict[str, Tensor],
) -> None:
    """How far the sampler is from the trainer, from log trainer - log sampler [n], uncorrected and uncut."""
    weights = log_ratio.double().exp()
    sums["sampler_gap"] = log_ratio.abs().sum()
    sums["sampler_ratio"], sums["sampler_ratio_square"] = weights.sum(), weights.square().sum()
    sums["mismatch_kl"] = (weights - 1 - log_ratio.double()).sum()  # k3 of KL(sampler || trainer)
    maxima["sampler_gap_max"], maxima["sampler_ratio_max"] = log_ratio.abs().max(), weights.max()
    if importance is not None:
        sums["correction_weight"] = importance.sum()
        sums["correction_cut"] = ((importance == 0) | (importance == config.correction.cap)).sum()


def _floats(sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> tuple[dict[str, float], dict[str, float]]:
    """All of them in one transfer from the device."""
    values = torch.stack([value.double() for value in (*sums.values(), *maxima.values())]).tolist()
    return dict(zip(sums, values, strict=False)), dict(zip(maxima, values[len(sums) :], strict=True))
