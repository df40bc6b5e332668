from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umad.engines import sampling as module
from umad.engines.sampling import SamplingPlan, sample
from umad.records import Sampling

GRID = 4000


def draw(logits: torch.Tensor, asked: Sampling, points: int = GRID) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities for evenly spaced noise: frequencies are probabilities to 1 / points."""
    plan = SamplingPlan.of([asked] * points, logits.shape[-1], torch.device("cpu"))
    uniform = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens, logprobs = sample(logits.expand(points, -1), plan, uniform)
    return tokens.numpy(), logprobs.numpy()


def reference(logits: np.ndarray, asked: Sampling) -> np.ndarray:
    """Probabilities by plain loops: temperature, then top-k, then top-p over what is left."""
    p = np.exp(logits / asked.temperature - (logits / asked.temperature).max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    kept = order[: asked.top_k or len(p)]
    share = sum(p[i] for i in kept)
    chosen, reached = [], 0.0
    for i in kept:
        if reached >= asked.top_p * share and asked.top_p < 1:
            break
        chosen.append(i)
        reached += p[i]
    out = np.zeros(len(p))
    out[chosen] = p[chosen] / p[chosen].sum()
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.1, 0.6, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 1, 3, 11, 12, 50]),
    partial=st.sampled_from([4, 1024]),
)
def test_draws_follow_exactly_the_distribution_that_was_asked_for(
    seed: int, temperature: float, top_p: float, top_k: int, partial: int
) -> None:
    asked = Sampling(1, temperature, top_p, top_k)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 3
    before = module._PARTIAL
    module._PARTIAL = partial  # also the way that large vocabularies take
    try:
        tokens, logprobs = draw(logits, asked)
    finally:
        module._PARTIAL = before
    wanted = reference(logits.double().numpy(), asked)
    assert np.abs(np.bincount(tokens, minlength=12) / GRID - wanted).max() < 2 / GRID
    assert np.abs(logprobs - np.log(wanted[tokens])).max() < 1e-5


def test_zero_temperature_takes_the_largest_and_reports_the_unscaled_softmax() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0])
    tokens, logprobs = draw(logits, Sampling(1, 0.0, top_p=0.5, top_k=2), points=10)
    assert set(tokens) == {1}
    assert logprobs[0] == pytest.approx(3 - math.log(math.e + 2 * math.e**3 + math.e**-2), abs=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    plan = SamplingPlan.of([Sampling(1)] * 3, 5, torch.device("cpu"))
    tokens, _ = sample(logits.expand(3, -1), plan, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3, 3]


def test_rare_tokens_of_a_large_vocabulary_keep_their_share() -> None:
    logits = torch.full((1, 150_000), -12.0)
    logits[0, 0] = 0.0
    rest = 1 - 1 / (1 + 149_999 * math.exp(-12))
    tokens, logprobs = draw(logits, Sampling(1), points=400)
    assert np.mean(tokens != 0) == pytest.approx(rest, abs=1 / 400)
    assert logprobs.min() == pytest.approx(-12 - math.log(1 + 149_999 * math.exp(-12)), abs=1e-5)


def test_a_row_is_sampled_as_if_it_were_alone() -> None:
    kinds = [Sampling(1), Sampling(1, 0.7), Sampling(1, 0.0), Sampling(1, 1.0, 0.9), Sampling(1, 0.8, 1.0, 5)]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 40, generator=generator) * 2
    uniform = torch.rand(50, dtype=torch.float64, generator=generator)
    asked = [kinds[i % 5] for i in range(50)]
    tokens, logprobs = sample(logits, SamplingPlan.of(asked, 40, torch.device("cpu")), uniform)
    for i in range(50):
        alone = SamplingPlan.of([asked[i]], 40, torch.device("cpu"))
        token, logprob = sample(logits[i : i + 1], alone, uniform[i : i + 1])
        assert token.item() == tokens[i].item()
        assert logprob.item() == pytest.approx(logprobs[i].item(), abs=1e-6)


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tokens, logprobs = draw(logits, Sampling(1), points=100)
    assert logprobs.dtype == np.float32
    assert np.allclose(logprobs, logits.double().log_softmax(-1)[0].numpy()[tokens], atol=1e-6)


def test_greedy_logprobs_stay_exact_over_a_large_vocabulary() -> None:
    logits = torch.full((1, 150_000), -12.0)
    logits[0, 7] = 0.0
    tokens, logprobs = draw(logits, Sampling(1, 0.0), points=1)
    assert tokens[0] == 7
    assert logprobs[0] == pytest.approx(-math.log(1 + 149_999 * math.exp(-12)), abs=2e-6)


@pytest.mark.parametrize("kinds", [[Sampling(1)], [Sampling(1, 0.5), Sampling(1, 2.0)]])
def test_large_batches_are_sampled_in_blocks_with_the_same_result(
    kinds: list[Sampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, uniform = torch.randn(11, 40, generator=generator), torch.rand(11, dtype=torch.float64, generator=generator)
    plan = SamplingPlan.of([kinds[i % len(kinds)] for i in range(11)], 40, torch.device("cpu"))
    whole = sample(logits, plan, uniform)
    monkeypatch.setattr(module, "_BLOCK", 100)
    parts = sample(logits, plan, uniform)
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1], atol=1e-6)
