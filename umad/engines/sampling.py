"""Tokens from logits: exactly the sampling that was asked for, with the log-probabilities of exactly that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from umad.records import Sampling

_PARTIAL = 1024
"""How many of the largest logits are sorted first where the distribution is cut; all of them only where it takes more."""

_BLOCK = 1 << 24
"""Most logits whose cumulative sums (float64) are in memory at once."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the rows of a batch are sampled, worked out once for as long as the batch's rows stay the same.

    Index tensors [rows of that kind]; None stands for all rows. `temperature` goes with `plain`, as a number where all
    are alike, else float32 [rows, 1]; so do `cut_*` with `cut`.
    """

    greedy: torch.Tensor | None
    plain: torch.Tensor | None
    cut: torch.Tensor | None
    temperature: float | torch.Tensor
    cut_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    rows: int

    @property
    def uniform(self) -> bool:
        """All rows are sampled alike, so the plan holds for any number of them."""
        plain = self.plain is None and isinstance(self.temperature, float)
        return plain or self.greedy is None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], vocabulary: int, device: torch.device) -> SamplingPlan:
        kinds = np.array([_kind(s, vocabulary) for s in samplings])
        temperatures = np.array([s.temperature for s in samplings], dtype=np.float32)

        def rows_of(kind: str) -> torch.Tensor | None:
            found = np.flatnonzero(kinds == kind)
            return None if len(found) == len(kinds) else torch.from_numpy(found).to(device)

        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        plain = temperatures[kinds == "plain"]
        alike = len(plain) > 0 and bool((plain == plain[0]).all())
        cut = [s for s, kind in zip(samplings, kinds, strict=True) if kind == "cut"]
        return cls(
            greedy=rows_of("greedy"),
            plain=rows_of("plain"),
            cut=rows_of("cut"),
            temperature=float(plain[0]) if alike else column(plain.tolist(), torch.float32),
            cut_temperature=column([s.temperature for s in cut], torch.float32),
            top_k=column([min(s.top_k, vocabulary) or vocabulary for s in cut], torch.int64),
            top_p=column([s.top_p for s in cut], torch.float64),
            rows=len(samplings),
        )


def _kind(sampling: Sampling, vocabulary: int) -> str:
    if sampling.temperature == 0:
        return "greedy"
    return "cut" if sampling.top_p < 1 or 0 < sampling.top_k < vocabulary else "plain"


def sample(logits: torch.Tensor, plan: SamplingPlan, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row.

    Args: logits: [B, V], any float type; uniform: float64 [B] in [0, 1).
    Returns: tokens int64 [B] and log-probabilities float32 [B] under the distribution that was sampled from.

    A row is treated alone: its token does not depend on how its neighbours are sampled.
    """
    logits = logits.float()
    if plan.plain is None:
        return _plain(logits, plan.temperature, uniform)
    if plan.greedy is None:
        return _greedy(logits)
    if plan.cut is None:
        return _cut(logits, plan, uniform)
    tokens = torch.empty(plan.rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(plan.rows, dtype=torch.float32, device=logits.device)
    if len(plan.plain):
        tokens[plan.plain], logprobs[plan.plain] = _plain(logits[plan.plain], plan.temperature, uniform[plan.plain])
    if len(plan.greedy):
        tokens[plan.greedy], logprobs[plan.greedy] = _greedy(logits[plan.greedy])
    if len(plan.cut):
        tokens[plan.cut], logprobs[plan.cut] = _cut(logits[plan.cut], plan, uniform[plan.cut])
    return tokens, logprobs


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = logits.argmax(-1, keepdim=True)
    logprobs = logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)
    return tokens.squeeze(1), logprobs.squeeze(1)


def _plain(
    logits: torch.Tensor, temperature: float | torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = max(1, _BLOCK // logits.shape[1])
    if len(logits) > rows:
        parts = [
            _plain(logits[i : i + rows], _slice(temperature, i, rows), uniform[i : i + rows])
            for i in range(0, len(logits), rows)
        ]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])
    scaled = logits if isinstance(temperature, float) and temperature == 1 else logits / temperature
    largest = scaled.amax(-1, keepdim=True)
    # Summed in float64, also for the log-probability: torch's float32 log_softmax is off by 2e-4 where 150,000 tokens
    # share the mass
    cumulative = (scaled - largest).exp_().cumsum(-1, dtype=torch.float64)
    tokens = _invert(cumulative, uniform)
    logprobs = (scaled.gather(1, tokens) - largest).double() - cumulative[:, -1:].log()
    return tokens.squeeze(1), logprobs.squeeze(1).float()


def _slice(temperature: float | torch.Tensor, start: int, rows: int) -> float | torch.Tensor:
    return temperature if isinstance(temperature, float) else temperature[start : start + rows]


def _cut(logits: torch.Tensor, plan: SamplingPlan, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k, then top-p over what is left: the fewest most likely tokens whose probabilities reach top_p."""
    scaled = logits / plan.cut_temperature
    vocabulary = logits.shape[1]
    if vocabulary <= _PARTIAL:
        return _cut_sorted(scaled, *scaled.sort(dim=-1, descending=True, stable=True), plan.top_k, plan.top_p, uniform)[
            :2
        ]
    top, ids = scaled.topk(_PARTIAL)
    tokens, logprobs, sure = _cut_sorted(scaled, top, ids, plan.top_k, plan.top_p, uniform)
    if not sure.all():
        rows = (~sure).nonzero().squeeze(1)
        whole, ids = scaled[rows].sort(dim=-1, descending=True, stable=True)
        tokens[rows], logprobs[rows], _ = _cut_sorted(
            scaled[rows], whole, ids, plan.top_k[rows], plan.top_p[rows], uniform[rows]
        )
    return tokens, logprobs


def _cut_sorted(
    scaled: torch.Tensor,
    top: torch.Tensor,
    ids: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples from the sorted largest logits `top` [B, S] with their `ids`; the third result says in which rows [B]
    everything that is kept lies within them."""
    size, vocabulary = top.shape[1], scaled.shape[1]
    weights = (top.double() - scaled.double().logsumexp(-1, keepdim=True)).exp()
    rank = torch.arange(size, device=top.device)
    within = weights.masked_fill(rank >= top_k, 0.0)
    # with no top-k the whole distribution is cut by top-p, so its sum is 1 whatever was sorted
    total = torch.where(top_k < vocabulary, within.sum(-1, keepdim=True), 1.0)
    before = within.cumsum(-1) - within
    kept = within.masked_fill((before >= top_p * total) & (top_p < 1), 0.0)
    sure = (top_k <= size) | ((top_k == vocabulary) & (kept[:, -1:] == 0))
    places = _invert(kept.cumsum(-1), uniform)
    logprobs = (kept.gather(1, places).log() - kept.sum(-1, keepdim=True).log()).float()
    return ids.gather(1, places).squeeze(1), logprobs.squeeze(1), sure.squeeze(1)


def _invert(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of a cumulative distribution (float64 [B, S], any scale): places [B, 1], never one of weight 0."""
    places = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True)
    return places.clamp_(max=cumulative.shape[1] - 1)
