from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umad.config import CorrectionConfig, LossConfig
from umad.learning.losses import (
    cispo_loss,
    correction_mode,
    importance_weights,
    is_token_level,
    k3,
    loss_metrics,
    loss_normaliser,
    policy_loss,
    token_weights,
    total_loss,
)


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
    assert float(weights.sum()) / loss_normaliser(LossConfig(type=kind), lengths, 100) == pytest.approx(1.0)


def loss_of(config: LossConfig, advantages: list[float], lengths: list[int], **changes: Any) -> torch.Tensor:
    """-logprob ratio loss with ratio 1: every token of sequence i has the loss -advantages[i]."""
    counts = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    logprobs = torch.zeros(int(counts.sum()), dtype=torch.float64)
    normaliser = loss_normaliser(config, lengths, 100)
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


# --- further losses -------------------------------------------------------------------------------------------------


KINDS = ("dapo", "grpo", "dr_grpo", "gspo", "cispo")


def ragged(seed: int, lengths: list[int], spread: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    n = int(counts.sum())
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)

    def normal() -> torch.Tensor:
        return spread * torch.randn(n, generator=generator, dtype=torch.float64)

    old = -1 + normal()
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[sequence]
    return {
        "logprobs": old + normal(),
        "old": old,
        "sampler": old + normal(),
        "reference": old + normal(),
        "entropy": normal().abs(),
        "advantages": advantages,
        "sequence": sequence,
        "lengths": counts,
    }


def by_loops(config: LossConfig, data: dict[str, torch.Tensor], max_tokens: int) -> torch.Tensor:
    """The losses of the papers, sequence by sequence and token by token."""
    lengths = data["lengths"].tolist()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    rows = []
    for i, length in enumerate(lengths):
        where = data["sequence"] == i
        lp, old, adv = (data[name][where] for name in ("logprobs", "old", "advantages"))
        if config.type == "gspo":
            ratio = torch.exp(sum(lp - old) / length)
            pair = [-ratio * adv[0], -min(max(float(ratio.detach()), low), high) * adv[0]]
            rows.append([pair[0] if pair[0] >= pair[1] else torch.as_tensor(pair[1])])
            if adv[0] < 0 and float(rows[-1][0].detach()) > -3 * float(adv[0]):
                rows[-1] = [torch.as_tensor(-3 * adv[0])]
            continue
        tokens = []
        for j in range(length):
            ratio = torch.exp(lp[j] - old[j])
            if config.type == "cispo":
                tokens.append(-min(max(float(ratio.detach()), low), high) * adv[j] * lp[j])
                continue
            loss = torch.maximum(-ratio * adv[j], -ratio.clamp(low, high) * adv[j])
            tokens.append(torch.minimum(loss, -3 * adv[j]) if adv[j] < 0 else loss)
        rows.append(tokens)
    if config.type == "dr_grpo":
        return sum(sum(tokens) for tokens in rows) / (len(rows) * max_tokens)
    if config.type in ("grpo", "gspo"):
        return sum(sum(tokens) / len(tokens) for tokens in rows) / len(rows)
    return sum(sum(tokens) for tokens in rows) / sum(lengths)


def run(
    config: LossConfig, data: dict[str, torch.Tensor], rows: slice = slice(None), **changes: object
) -> torch.Tensor:
    arguments = {k: v if k == "lengths" else v[rows] for k, v in data.items()} | changes
    normaliser = loss_normaliser(config, data["lengths"].tolist(), 50)
    return total_loss(config, normaliser=normaliser, **arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_loss_and_its_gradient_is_that_of_the_plain_loops(kind, seed):
    config = LossConfig(type=kind)
    data = ragged(seed, [5, 1, 3, 8])
    gradients = []
    for compute in (lambda d: run(config, d).loss, lambda d: by_loops(config, d, 50)):
        leaf = data["logprobs"].clone().requires_grad_()
        value = compute(data | {"logprobs": leaf})
        value.backward()
        gradients.append((float(value.detach()), leaf.grad))
    assert gradients[0][0] == pytest.approx(gradients[1][0], abs=1e-12)
    assert torch.allclose(gradients[0][1], gradients[1][1], atol=1e-12)
    assert gradients[0][1].abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 50), cut=st.integers(1, 16))
def test_parts_add_up_to_the_whole(kind, seed, cut):
    config = LossConfig.model_validate(
        {"type": kind, "kl": {"coef": 0.1}, "entropy": {"coef": 0.1}, "correction": {"mode": "truncate"}}
    )
    data = ragged(seed, [5, 1, 3, 8])
    if not is_token_level(config, "truncate"):
        cut = min((c for c in (5, 6, 9)), key=lambda c: abs(c - cut))  # between sequences
    whole = run(config, data, correction="truncate")
    if is_token_level(config, "truncate"):
        parts = [run(config, data, rows, correction="truncate") for rows in (slice(0, cut), slice(cut, None))]
    else:
        parts = []
        for rows in (slice(0, cut), slice(cut, None)):
            kept = data["sequence"][rows].unique()
            part = {k: v[rows] for k, v in data.items() if k != "lengths"}
            part |= {"lengths": data["lengths"][kept], "sequence": torch.searchsorted(kept, part["sequence"])}
            normaliser = loss_normaliser(config, data["lengths"].tolist(), 50)
            parts.append(total_loss(config, normaliser=normaliser, correction="truncate", **part))
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), abs=1e-12)
    for name, value in whole.sums.items():
        assert sum(part.sums[name] for part in parts) == pytest.approx(value, abs=1e-9), name
    for name, value in whole.maxima.items():
        assert max(part.maxima[name] for part in parts) == value


def test_dr_grpo_divides_by_a_constant_whatever_the_lengths():
    assert loss_normaliser(LossConfig(type="dr_grpo"), [3, 90], 100) == 200
    assert float(loss_of(LossConfig(type="dr_grpo"), [-4.0, 0.0], [1, 3])) == pytest.approx(4 / 200)


def test_cispo_keeps_the_gradient_of_tokens_that_a_clip_would_silence():
    logprobs = t(math.log(5.0), math.log(0.1)).requires_grad_()
    cispo_loss(logprobs, t(0.0, 0.0), t(1.0, -1.0), 0.2, 0.3).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.3, 0.8])


@pytest.mark.parametrize("kind", KINDS)
def test_without_old_log_probabilities_every_ratio_is_1_and_the_gradient_is_the_policy_gradient(kind):
    config = LossConfig(type=kind)
    data = ragged(0, [4, 2])
    leaf = data["logprobs"].clone().requires_grad_()
    output = run(config, data, logprobs=leaf, old=None)
    output.loss.backward()
    weights = token_weights(kind, data["sequence"], data["lengths"], torch.float64)
    expected = -data["advantages"] * weights / loss_normaliser(config, [4, 2], 50)
    assert torch.allclose(leaf.grad, expected)
    assert output.maxima["ratio_max"] == 1.0


@pytest.mark.parametrize("old", ["given", "current"])
def test_gspo_weighs_each_tokens_gradient_by_its_own_advantage(old):
    # GSPO-token: d/dlogp_t = -s_i A_t / (length_i n), s_i = exp(mean log-ratio), where no clip acts
    data = ragged(4, [3, 2], spread=0.02)
    advantages = t(1.0, -2.0, 0.5, -1.0, 3.0)
    leaf = data["logprobs"].clone().requires_grad_()
    changes = {"old": None} if old == "current" else {}
    run(LossConfig(type="gspo"), data, logprobs=leaf, advantages=advantages, **changes).loss.backward()
    for i, length in enumerate([3, 2]):
        where = data["sequence"] == i
        gap = (data["logprobs"] - data["old"])[where].sum() / length if old == "given" else t(0.0)
        assert torch.allclose(leaf.grad[where], -gap.exp() * advantages[where] / (length * 2), atol=1e-14)


def test_gspo_clips_whole_sequences_where_a_token_alone_would_have_been():
    config = LossConfig(type="gspo", clip_low=0.1, clip_high=0.1)
    # log-ratios 0.5 and -0.5 have mean 0: no clip; 0.5 and 0.1 have mean 0.3: clipped
    leaf = t(0.5, -0.5, 0.5, 0.1).requires_grad_()
    counts = torch.tensor([2, 2])
    output = total_loss(
        config, leaf, torch.zeros(4).double(), torch.ones(4).double(), t(0, 0, 1, 1).long(), counts, 2.0
    )
    output.loss.backward()
    assert leaf.grad.tolist() == pytest.approx([-0.25, -0.25, 0.0, 0.0])
    assert output.sums["clipped_high"] == 2
    # the metric of the ratios is the tokens' own, unclipped
    assert output.sums["ratio"] == pytest.approx(2 * math.exp(0.5) + math.exp(-0.5) + math.exp(0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_gives_the_loss_and_gradient_of_float64(kind):
    config = LossConfig.model_validate({"type": kind, "kl": {"coef": 0.1}, "entropy": {"coef": 0.1}})
    data = ragged(5, [40, 7, 25])
    found = []
    for dtype in (torch.float32, torch.float64):
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in data.items()}
        leaf = cast["logprobs"].requires_grad_()
        output = run(config, cast, correction="truncate")
        output.loss.backward()
        found.append((output, leaf.grad.double()))
    (narrow, g32), (wide, g64) = found
    assert narrow.loss.dtype == torch.float32
    assert narrow.loss.item() == pytest.approx(wide.loss.item(), abs=1e-5)
    assert float((g32 - g64).norm() / g64.norm()) < 1e-5
    assert narrow.sums.keys() == wide.sums.keys()
    for name, value in wide.sums.items():
        assert narrow.sums[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.integers(1, 30), max_size=8), st.integers(0, 8))
def test_normalisers_of_parts_add_up(kind, lengths, cut):
    config = LossConfig(type=kind)
    parts = loss_normaliser(config, lengths[:cut], 64) + loss_normaliser(config, lengths[cut:], 64)
    assert parts == loss_normaliser(config, lengths, 64)


def test_only_gspo_and_corrections_of_whole_sequences_need_whole_sequences():
    by_sequence = CorrectionConfig(level="sequence")
    for kind in KINDS:
        assert is_token_level(LossConfig(type=kind), "truncate") == (kind != "gspo")
        # where nothing is corrected, its level does not matter
        assert is_token_level(LossConfig(type=kind, correction=by_sequence), "none") == (kind != "gspo")
        assert not is_token_level(LossConfig(type=kind, correction=by_sequence), "mask")


# --- correction between sampler and trainer ---------------------------------------------------------------------------


def weights_of(log_ratio: list[float], mode: str, **settings: object) -> list[float]:
    config = CorrectionConfig.model_validate({"cap": 2.0, **settings})
    sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    return importance_weights(t(*log_ratio), mode, config, sequence, lengths).tolist()


def test_importance_weights_by_hand():
    logs = [math.log(1.5), math.log(3.0), math.log(0.4)]
    assert weights_of(logs, "truncate") == pytest.approx([1.5, 2.0, 0.4])
    assert weights_of(logs, "mask") == pytest.approx([1.5, 0.0, 0.0])
    assert weights_of(logs, "truncate", cap=5.0) == pytest.approx([1.5, 3.0, 0.4])
    # the response's own: 1.5 * 3 for both tokens of the first
    assert weights_of(logs, "truncate", level="sequence", cap=10.0) == pytest.approx([4.5, 4.5, 0.4])
    assert weights_of(logs, "mask", level="sequence") == pytest.approx([0.0, 0.0, 0.0])


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_have_no_gradient_and_stay_finite(mode, level):
    config = CorrectionConfig(level=level, cap=100.0)
    sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    leaf = torch.tensor([400.0, 1.0, -400.0], requires_grad=True)
    weights = importance_weights(leaf, mode, config, sequence, lengths)
    assert not weights.requires_grad
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert (weights <= 100).all()


@pytest.mark.parametrize("kind", KINDS)
def test_masked_sequences_leave_the_policys_term_and_stay_in_the_normaliser(kind):
    config = LossConfig.model_validate({"type": kind, "correction": {"level": "sequence", "cap": 1.5}})
    data = ragged(6, [3, 4])
    data["sampler"] = data["old"] - torch.where(data["sequence"] == 0, 1.0, 0.0)  # e^3 and 1
    leaf = data["logprobs"].clone().requires_grad_()
    output = run(config, data, logprobs=leaf, correction="mask")
    output.loss.backward()
    assert (leaf.grad[:3] == 0).all()
    assert output.sums["correction_cut"] == 3
    kept = {k: v[data["sequence"] == 1] for k, v in data.items() if k != "lengths"}
    kept |= {"sequence": torch.zeros(4).long(), "lengths": torch.tensor([4])}
    normaliser = loss_normaliser(config, [3, 4], 50)
    expected = total_loss(config, normaliser=normaliser, **kept).loss.item()
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)


def test_a_correction_without_the_samplers_log_probabilities_is_refused():
    data = ragged(0, [2])
    with pytest.raises(ValueError, match="sampler"):
        run(LossConfig(), data, sampler=None, correction="truncate")


def test_auto_corrects_where_the_sampler_is_not_exact():
    config = CorrectionConfig()
    assert (correction_mode(config, True), correction_mode(config, False)) == ("none", "truncate")
    assert correction_mode(CorrectionConfig(mode="mask"), True) == "mask"


def test_the_correction_multiplies_the_policys_term_alone_and_has_no_gradient():
    data = ragged(1, [4, 3])
    config = LossConfig.model_validate({"correction": {"cap": 1.1}, "kl": {"coef": 0.2}})
    plain, corrected = (torch.zeros(()), torch.zeros(()))
    gradients = []
    for mode in ("none", "truncate"):
        leaf = data["logprobs"].clone().requires_grad_()
        run(config, data, logprobs=leaf, old=None, correction=mode, reference=None).loss.backward()
        gradients.append(leaf.grad)
    expected = torch.exp(data["logprobs"] - data["sampler"]).clamp(max=1.1)
    assert torch.allclose(gradients[1], gradients[0] * expected)
    plain, corrected = (run(config, data, correction=mode).loss for mode in ("none", "truncate"))
    without = config.model_copy(update={"kl": LossConfig().kl})
    bare = [run(without, data, correction=mode).loss for mode in ("none", "truncate")]
    assert float(plain - bare[0]) == pytest.approx(float(corrected - bare[1]))  # the KL term is untouched


def test_mismatch_metrics_are_raw_and_in_closed_form():
    logprobs, sampler = t(0.0, 0.0), t(0.0, -math.log(3.0))  # weights 1 and 3
    output = total_loss(
        LossConfig(), logprobs, None, t(1.0, 1.0), torch.tensor([0, 1]), torch.ones(2).long(), 2.0,
        sampler=sampler, correction="truncate",
    )  # fmt: skip
    metrics = loss_metrics(output.sums, output.maxima)
    assert metrics["sampler_ratio"] == pytest.approx(2.0)
    assert metrics["sampler_ratio_max"] == pytest.approx(3.0)
    assert metrics["ess"] == pytest.approx((1 + 3) ** 2 / (2 * (1 + 9)))
    assert metrics["mismatch_kl"] == pytest.approx((3 - 1 - math.log(3)) / 2)
    assert metrics["correction_cut"] == 0.5
    assert metrics["correction_weight"] == pytest.approx(1.5)
    assert metrics["sampler_gap"] == pytest.approx(math.log(3) / 2)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"entropy": {"coef": 0.1}}, {}),
        ({"correction": {"cap": 1.05}}, {"correction": "truncate"}),
        ({"correction": {"level": "sequence"}}, {"correction": "truncate"}),
        ({}, {"correction": "mask"}),
    ],
)
def test_each_setting_of_entropy_and_correction_changes_the_loss(settings, changes):
    data = ragged(2, [4, 3])
    base = {"correction": "truncate"} if changes and settings else {}
    plain = run(LossConfig(), data, **base).loss
    assert float(run(LossConfig.model_validate(settings), data, **changes).loss) != pytest.approx(float(plain))


def test_a_bonus_for_entropy_is_its_weighted_mean():
    data = ragged(3, [4, 2])
    for kind in KINDS:
        config = LossConfig.model_validate({"type": kind, "entropy": {"coef": 0.5}})
        found = run(LossConfig(type=kind), data).loss - run(config, data).loss
        weights = token_weights(kind, data["sequence"], data["lengths"], torch.float64)
        expected = 0.5 * (weights * data["entropy"]).sum() / loss_normaliser(config, [4, 2], 50)
        assert float(found) == pytest.approx(float(expected))
