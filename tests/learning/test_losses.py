from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umad.config import LossConfig
from umad.learning.losses import k3, loss_normaliser, policy_loss, token_weights, total_loss


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_hand(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """The clipped objective in plain scalars."""
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        loss = min(loss, -advantage * dual)
    return loss


@given(
    st.floats(-3, 3),
    st.floats(-3, 3),
    st.floats(0, 0.5),
    st.floats(0, 0.9),
    st.sampled_from([None, 1.5, 3.0]),
)
def test_policy_loss_is_the_clipped_objective(log_ratio, advantage, low, high, dual):
    found = policy_loss(t(log_ratio - 1), t(-1.0), t(advantage), low, high, dual)
    assert float(found) == pytest.approx(by_hand(log_ratio, advantage, low, high, dual), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 2.0, -2.0),  # -A r
        (1.1, 2.0, -2.2),
        (1.3, 2.0, 0.0),  # past the upper clip, pushed further up: no gradient
        (1.3, -2.0, 2.6),
        (0.7, 2.0, -1.4),
        (0.7, -2.0, 0.0),  # past the lower clip, pushed further down
        (3.5, -2.0, 0.0),  # past the dual clip
    ],
)
def test_gradients_of_the_policy_loss_in_each_region(ratio, advantage, gradient):
    logprobs = t(math.log(ratio)).requires_grad_()
    policy_loss(logprobs, t(0.0), t(advantage), 0.2, 0.2, 3.0).sum().backward()
    assert float(logprobs.grad) == pytest.approx(gradient)


def test_without_a_dual_clip_the_loss_of_a_bad_token_is_not_bounded():
    assert float(policy_loss(t(math.log(9.0)), t(0.0), t(-1.0), 0.2, 0.2, None)) == pytest.approx(9.0)
    assert float(policy_loss(t(math.log(9.0)), t(0.0), t(-1.0), 0.2, 0.2, 3.0)) == pytest.approx(3.0)


def test_ratios_that_would_overflow_stay_finite():
    loss = policy_loss(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), 0.2, 0.2, None)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(k3(torch.tensor([-500.0]), torch.tensor([0.0]))).all()


def test_k3_is_0_at_the_reference_never_negative_and_the_kl_on_average():
    assert float(k3(t(-1.3), t(-1.3))) == 0
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    values = k3(p.log(), q.log())
    assert (values >= 0).all()
    assert float((p * values).sum()) == pytest.approx(float((p * (p / q).log()).sum()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["dapo", "grpo"]))
def test_a_constant_token_loss_aggregates_to_that_constant(lengths, kind):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    weights = token_weights(kind, sequence, torch.tensor(lengths), torch.float64)
    assert float(weights.sum()) / loss_normaliser(kind, lengths) == pytest.approx(1.0)


def loss_of(config: LossConfig, advantages: list[float], lengths: list[int], **changes: Any) -> torch.Tensor:
    """-logprob ratio loss with ratio 1: every token of sequence i has the loss -advantages[i]."""
    counts = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    logprobs = torch.zeros(int(counts.sum()), dtype=torch.float64)
    normaliser = loss_normaliser(config.type, lengths)
    return total_loss(
        config, logprobs, logprobs, t(*advantages)[sequence], sequence, counts, normaliser, **changes
    ).loss


def test_dapo_is_the_token_mean_and_grpo_the_mean_of_sequence_means():
    # sequences of 1 and 3 tokens with token losses 4 and 0
    assert float(loss_of(LossConfig(type="dapo"), [-4.0, 0.0], [1, 3])) == pytest.approx(1.0)
    assert float(loss_of(LossConfig(type="grpo"), [-4.0, 0.0], [1, 3])) == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_kl_is_added_with_its_coefficient_and_the_same_aggregation(kind):
    config = LossConfig.model_validate({"type": kind, "kl": {"coef": 0.5}})
    reference = t(1.0, 0.0, 0.0, 0.0)  # only the one-token sequence differs: k3 = e - 2
    found = float(loss_of(config, [0.0, 0.0], [1, 3], reference=reference))
    share = 1 / 4 if kind == "dapo" else 1 / 2
    assert found == pytest.approx(0.5 * (math.e - 2) * share)


def test_ratio_metrics_are_raw_while_the_loss_clips():
    config = LossConfig()
    logprobs, old = t(1.0, 3.0, 0.0, -1.0), t(0.0, 0.0, 0.0, 0.0)
    output = total_loss(
        config, logprobs, old, t(1.0, -1.0, 1.0, -1.0), torch.tensor([0, 1, 2, 3]), torch.ones(4).long(), 4.0
    )
    assert output.sums["ratio"] == pytest.approx(math.e + math.e**3 + 1 + 1 / math.e)
    assert output.maxima["ratio_max"] == pytest.approx(math.e**3)
    assert output.maxima["log_ratio_abs_max"] == pytest.approx(3)
    assert output.sums["clipped_high"] == 1
    assert output.sums["clipped_low"] == 1
    assert output.sums["clipped_dual"] == 1
    # beyond where the loss cuts log-ratios
    far = total_loss(config, t(50.0), t(0.0), t(1.0), torch.tensor([0]), torch.tensor([1]), 1.0)
    assert far.maxima["ratio_max"] == pytest.approx(math.exp(50))


@pytest.mark.parametrize(("setting", "value"), [("clip_low", 0.05), ("clip_high", 0.05), ("dual_clip", 1.5)])
def test_each_clip_setting_changes_the_loss(setting, value):
    logprobs = t(math.log(0.5), math.log(1.6), math.log(5.0))
    args = (logprobs, t(0, 0, 0), t(-1.0, 1.0, -1.0), torch.tensor([0, 1, 2]), torch.ones(3).long(), 3.0)
    plain = total_loss(LossConfig(), *args).loss
    assert float(total_loss(LossConfig.model_validate({setting: value}), *args).loss) != pytest.approx(float(plain))
