"""What a group-relative advantage is multiplied with: Eq. 4's weight and the alternatives to it.

Like the advantages: float64 on one group at a time, with exactly rounded sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from umad.config import WeightConfig
from umad.records import Sample, Scores

WEIGHT_EPS = 1e-8
UCAS_NEGATIVE = 1.4
"""Advantages below 0 are weighed so much more steeply than those above (0.35 beside 0.25 in the authors' code)."""
UCAS_PENALTY = 0.05
"""What the surest token of a group loses of its advantage (the authors' code)."""


def zscores(values: Sequence[float]) -> list[float]:
    """(v - mean) / (std + 1e-8) with population std; |z| <= sqrt(n - 1). A constant or single value: exactly 0."""
    finite(values, "what weights are made from")
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    centred = [v - mean for v in values]
    # population std: the group is all there is, not a sample of it (arXiv 2603.01221, Eq. 4)
    std = math.sqrt(math.fsum(c * c for c in centred) / len(values))
    return [c / (std + WEIGHT_EPS) for c in centred]


def group_weights(
    measures: Sequence[float], advantages: Sequence[float], config: WeightConfig
) -> tuple[list[float], int]:
    """One group's weights, and how many of them were clamped to [1/clip, clip].

    measures: of each member, what `weight_measure` gives for the mode. With z as in `zscores`:

    * `nll`, Eq. 4 of arXiv 2603.01221: W = exp(-alpha z(U)), whatever the advantage's sign.
    * `signed_nll`, an earlier public variant: W = exp(sign(A) alpha z(-U)).
    * `ucas`: `ucas_exponents`. `edge`: `edge_exponents`. `none`: 1.
    """
    if config.mode == "none":
        return [1.0] * len(advantages), 0
    if config.mode == "edge":
        exponents = edge_exponents(measures)
    elif config.mode == "ucas":
        exponents = ucas_exponents(measures, advantages, config.alpha)
    elif config.mode == "signed_nll":
        exponents = [-_sign(a) * config.alpha * z for a, z in zip(advantages, zscores(measures), strict=True)]
    else:
        exponents = [-config.alpha * z for z in zscores(measures)]
    limit = math.log(config.clip)
    clamped = [max(-limit, min(limit, e)) for e in exponents]
    return [math.exp(e) for e in clamped], sum(c != e for c, e in zip(clamped, exponents, strict=True))


def ucas_exponents(certainty: Sequence[float], advantages: Sequence[float], alpha: float) -> list[float]:
    """UCAS's first stage (arXiv 2510.10649): log W of one group's responses from their mean certainties.

    W = exp(-alpha z) for A > 0: what is right and unsure is reinforced more. W = exp(1.4 alpha z) for A < 0: what is wrong and
    sure is punished more. z of the certainty, KL(uniform || policy) averaged over the response's tokens. The authors' code
    adds the tokens' certainties up, by which the longer response would be the surer one, and takes the sample std; here the
    mean (as self-certainty is defined, arXiv 2502.18581) and the population std, as in Eq. 4, for which |z| is bounded.
    """
    slopes = [-alpha if a > 0 else UCAS_NEGATIVE * alpha if a < 0 else 0.0 for a in advantages]
    return [slope * z for slope, z in zip(slopes, zscores(certainty), strict=True)]


def edge_exponents(entropy: Sequence[float]) -> list[float]:
    """EDGE-GRPO's entropy-driven advantage (arXiv 2507.21848): log W, W = mean_g H / H, from mean entropies H of a group.

    A sure response counts more, right or wrong. H is taken before the update and has no gradient; the authors' code lets one
    through, counts padding in H, and takes the mean over all processes' samples instead of the group. No setting but `clip`
    acts on it. A response of entropy 0 beside others has the largest weight, where all have it each weighs 1. The paper's
    other part, guided correction of wrong responses, changes what is sampled and is not here.
    """
    finite(entropy, "entropies")
    mean = math.fsum(entropy) / len(entropy) if entropy else 0.0
    # equal ones must weigh exactly 1, and the rounded mean of equal values is not always the value
    if mean <= 0 or max(entropy) == min(entropy):
        return [0.0] * len(entropy)
    # float32 sums may leave an entropy of 0 a little below it
    return [math.log(mean / h) if h > 0 else math.inf for h in entropy]


def token_certainty(logits: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A group's tokens' raw logits, float64 [C] each, brought to [0, 1] by the group's smallest and largest; equal ones: 0.

    UCAS's authors scale by the whole batch. By the group no other problem, and no other process, has a say in it.
    """
    if not logits:
        return []
    flat = np.concatenate(logits).astype(np.float64)
    if not np.isfinite(flat).all():
        raise ValueError("logits must be finite")
    low, high = flat.min(), flat.max()
    if low == high:
        return [np.zeros(len(row)) for row in logits]
    return [(row.astype(np.float64) - low) / (high - low) for row in logits]


def penalised(advantage: float, certainty: np.ndarray) -> np.ndarray:
    """UCAS's second stage: float32 [C] advantages of a response's tokens, the weighted advantage less 0.05 times
    `token_certainty`; a positive one stops at 0.

    Where the advantage is 0 it stays 0. In the authors' code a group whose rewards are all equal still has its tokens pushed
    down; here it has nothing to learn from, as under every other mode.
    """
    if advantage == 0:
        return np.zeros(len(certainty), np.float32)
    values = advantage - UCAS_PENALTY * certainty
    return np.maximum(values, 0.0 if advantage > 0 else -np.inf).astype(np.float32)


def weight_measure(sample: Sample, mode: str) -> float:
    """What a mode's weights are made from: U of Eq. 4, the mean certainty (`ucas`), or the mean entropy (`edge`) per token.

    Raises `ValueError` where a mode needs the trainer's scores and the sample has none.
    """
    if mode == "ucas":
        return float(np.mean(scores_of(sample, mode).certainty, dtype=np.float64))
    if mode == "edge":
        return float(np.mean(scores_of(sample, mode).entropy, dtype=np.float64))
    return 0.0 if mode == "none" else sample_nll(sample)


def sample_nll(sample: Sample) -> float:
    """U of Eq. 4 in nats per token: the sample's own where it carries one (say, the trainer's), else the sampler's."""
    if sample.nll is not None:
        return sample.nll
    return -math.fsum(sample.logprobs.tolist()) / len(sample.logprobs)


def scores_of(sample: Sample, mode: str) -> Scores:
    """The trainer's scores of a sample, which must be there."""
    if sample.scores is None:
        raise ValueError(f"weights of mode {mode!r} need the trainer's scores, and a sample of {sample.group} has none")
    if len(sample.scores.logit) != len(sample.completion_ids):
        raise ValueError(f"{len(sample.completion_ids)} completion tokens but scores of {len(sample.scores.logit)}")
    return sample.scores


def finite(values: Sequence[float], what: str) -> None:
    """Raises `ValueError` for NaN and infinities."""
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{what} must be finite, not {value}")


def _sign(value: float) -> float:
    return float((value > 0) - (value < 0))
