from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning.learning_helpers import make_sample, tiny_model

from umad.config import AdvantageConfig, LossConfig, TrainingConfig, WeightConfig
from umad.learning.advantages import advantage_metrics, assign_advantages, group_advantages
from umad.learning.weights import (
    UCAS_NEGATIVE,
    UCAS_PENALTY,
    edge_exponents,
    group_weights,
    penalised,
    token_certainty,
    ucas_exponents,
    weight_measure,
)
from umad.records import Sample, Scores


def config(mode: str, **values: Any) -> AdvantageConfig:
    return AdvantageConfig.model_validate({"weight": {"mode": mode, **values}})


def scored(
    reward: float | None,
    logits: list[float],
    certainty: float = 1.0,
    entropy: float = 1.0,
    at: tuple[int, int] = (0, 0),
) -> Sample:
    n = len(logits)
    columns = (np.full(n, value, np.float32) for value in (-1.0, entropy, certainty))
    scores = Scores(*columns, np.array(logits, np.float32))
    return make_sample(group=at, completion=n, reward=reward, scores=scores)


# --- ucas -------------------------------------------------------------------------------------------------------------


def test_ucas_reinforces_what_is_right_and_unsure_and_punishes_what_is_wrong_and_sure():
    # two members: z is -1 and 1
    assert ucas_exponents([1.0, 3.0], [1.0, -1.0], 0.25) == pytest.approx([0.25, 0.35])
    assert ucas_exponents([3.0, 1.0], [1.0, -1.0], 0.25) == pytest.approx([-0.25, -0.35])
    assert ucas_exponents([3.0, 1.0], [0.0, 0.0], 0.25) == [0.0, 0.0]
    samples = [scored(r, [0.0, 0.0], c) for r, c in ((1, 1.0), (1, 3.0), (0, 1.0), (0, 3.0))]
    found, _ = assign_advantages(samples, config("ucas"))
    unsure_right, sure_right, unsure_wrong, sure_wrong = (s.advantage for s in found)
    assert unsure_right > sure_right > 0 > unsure_wrong > sure_wrong


def test_ucas_takes_from_each_token_what_its_logit_says_and_never_turns_a_right_one_round():
    assert [row.tolist() for row in token_certainty([np.array([0.0, 10.0]), np.array([5.0])])] == [[0, 1], [0.5]]
    assert penalised(1.0, np.array([0.0, 0.5, 1.0])).tolist() == pytest.approx([1.0, 0.975, 0.95])
    assert penalised(-1.0, np.array([0.0, 1.0])).tolist() == pytest.approx([-1.0, -1.05])
    assert penalised(0.03, np.array([0.0, 0.5, 1.0])).tolist() == pytest.approx([0.03, 0.005, 0.0])


def test_a_samples_advantage_is_the_mean_of_its_tokens():
    samples = [scored(1, [0.0, 10.0], 2.0), scored(0, [5.0, 5.0, 10.0], 4.0)]
    found, tallies = assign_advantages(samples, config("ucas", alpha=0.25))
    right, wrong = (sample.token_advantages for sample in found)
    plain = math.sqrt(0.5)
    up, down = plain * math.exp(0.25), -plain * math.exp(0.35)
    assert right.dtype == wrong.dtype == np.float32
    assert right.tolist() == pytest.approx([up, up - 0.05], rel=1e-5)
    assert wrong.tolist() == pytest.approx([down - 0.025, down - 0.025, down - 0.05], rel=1e-5)
    for sample in found:
        assert sample.advantage == np.mean(sample.token_advantages, dtype=np.float64)
    assert found[0].weight == pytest.approx(math.exp(0.25))
    assert found[1].weight == pytest.approx(math.exp(0.25 * UCAS_NEGATIVE))
    metrics = advantage_metrics([tallies])
    assert metrics["advantage_abs/turn_0"] == pytest.approx((found[0].advantage - found[1].advantage) / 2)


def test_alpha_0_leaves_ucas_the_penalty_alone():
    samples = [scored(1, [0.0, 10.0], 2.0), scored(0, [5.0, 5.0], 4.0)]
    found, _ = assign_advantages(samples, config("ucas", alpha=0))
    plain = group_advantages([1, 0])
    assert [s.weight for s in found] == [1.0, 1.0]
    assert found[0].token_advantages.tolist() == pytest.approx([plain[0], plain[0] - UCAS_PENALTY])


@pytest.mark.parametrize("mode", ["ucas", "edge"])
def test_a_group_of_equal_rewards_has_exactly_0_for_every_token(mode):
    samples = [scored(1, [0.0, 90.0], 1.0, 0.1), scored(1, [5.0, -40.0], 7.0, 3.0)]
    samples += [scored(1, [400.0], 9.0, 0.0, at=(1, 0)), scored(0, [-400.0], 0.0, 5.0, at=(1, 0))]
    found, tallies = assign_advantages(samples, config(mode))
    for sample in found[:2]:
        assert sample.advantage == 0
        assert sample.token_advantages is None or not sample.token_advantages.any()
        assert sample.in_loss
    assert advantage_metrics([tallies])["no_signal/turn_0"] == 0.5


@pytest.mark.parametrize("mode", ["ucas", "edge"])
def test_neither_neighbours_nor_ungraded_members_have_a_say(mode):
    group = [scored(1, [0.0, 9.0], 1.0, 0.5), scored(0, [5.0, 2.0, 1.0], 4.0, 2.0)]
    wild = scored(None, [1e6, -1e6], 1e3, 1e3)
    neighbours = [scored(1, [1e5], 50.0, 9.0, at=(1, 0)), scored(0, [-1e5], 0.0, 0.1, at=(1, 0))]
    alone, _ = assign_advantages(group, config(mode))
    together, _ = assign_advantages([neighbours[0], group[1], wild, group[0], neighbours[1]], config(mode))
    for a, b in ((alone[0], together[3]), (alone[1], together[1])):
        assert (a.advantage, a.weight) == (b.advantage, b.weight)
        assert np.array_equal(a.token_advantages, b.token_advantages) or a.token_advantages is None
    left_out = together[2]
    assert (left_out.advantage, left_out.token_advantages, left_out.in_loss) == (0.0, None, False)


def test_equal_logits_tell_no_tokens_apart():
    assert [row.tolist() for row in token_certainty([np.full(2, 3.0), np.full(1, 3.0)])] == [[0, 0], [0]]
    assert token_certainty([]) == []


rows = st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=5), min_size=2, max_size=5)


@given(rows, st.floats(-3, 3))
def test_a_penalty_never_flips_a_sign_nor_exceeds_its_size(logits, advantage):
    for certainty in token_certainty([np.array(row) for row in logits]):
        assert (certainty >= 0).all()
        assert (certainty <= 1).all()
        values = penalised(advantage, certainty)
        assert (values * advantage >= 0).all()
        assert (np.abs(values - advantage) <= UCAS_PENALTY + 1e-6).all()
        assert (values <= advantage + 1e-6).all()


# --- edge -------------------------------------------------------------------------------------------------------------


def test_edge_divides_by_the_entropy_beside_the_groups_mean():
    found, clamped = group_weights([1.0, 3.0], [1.0, -1.0], WeightConfig(mode="edge"))
    assert found == pytest.approx([2.0, 2 / 3])
    assert clamped == 0
    samples = [scored(1, [0.0], entropy=1.0), scored(0, [0.0], entropy=3.0)]
    assigned, _ = assign_advantages(samples, config("edge"))
    plain = group_advantages([1, 0])
    assert [s.advantage for s in assigned] == pytest.approx([2 * plain[0], plain[1] * 2 / 3])
    assert [s.token_advantages for s in assigned] == [None, None]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.floats(0.1, 10))
def test_the_harmonic_mean_of_edges_weights_is_1_and_the_unit_of_entropy_does_not_matter(entropy, unit):
    wide = WeightConfig(mode="edge", clip=1e9)
    found, _ = group_weights(entropy, [1.0] * len(entropy), wide)
    assert math.fsum(1 / w for w in found) / len(found) == pytest.approx(1)
    assert group_weights([h * unit for h in entropy], [1.0] * len(entropy), wide)[0] == pytest.approx(found)


@given(st.floats(0.001, 50), st.integers(1, 9), st.sampled_from(["ucas", "edge"]))
def test_members_that_are_all_alike_weigh_exactly_1(value, members, mode):
    found, clamped = group_weights([value] * members, [1.0] * members, WeightConfig(mode=mode))
    assert (found, clamped) == ([1.0] * members, 0)


def test_equal_entropies_whose_mean_is_rounded_weigh_exactly_1():
    value = 0.7667572179255246
    assert math.fsum([value] * 3) / 3 != value
    assert edge_exponents([value] * 3) == [0.0] * 3


def test_an_entropy_of_0_is_clamped_and_counted():
    assert group_weights([0.0, 2.0], [1.0, 1.0], WeightConfig(mode="edge", clip=8))[0] == pytest.approx([8, 0.5])
    samples = [scored(1, [0.0], entropy=0.0), scored(0, [0.0], entropy=2.0)]
    found, tallies = assign_advantages(samples, config("edge", clip=8))
    assert all(np.isfinite(np.float32(s.advantage)) for s in found)
    assert advantage_metrics([tallies])["weight_clamped/turn_0"] == 1
    # none is surer than another; nor is a float32 sum that came out below 0
    assert edge_exponents([0.0, 0.0]) == [0.0, 0.0]
    assert group_weights([-1e-9, 2.0], [1.0, 1.0], WeightConfig(mode="edge", clip=8))[0][0] == pytest.approx(8)
    assert edge_exponents([]) == []


# --- what they need ---------------------------------------------------------------------------------------------------


def test_measures_are_means_over_a_responses_tokens():
    scores = Scores(*(np.array(v, np.float32) for v in ([-1, -2], [0.5, 1.5], [3, 5], [0, 0])))
    sample = make_sample(completion=2, scores=scores, nll=0.7)
    assert [weight_measure(sample, mode) for mode in ("ucas", "edge", "nll", "signed_nll")] == [4.0, 1.0, 0.7, 0.7]


@pytest.mark.parametrize("mode", ["ucas", "edge"])
def test_modes_that_look_at_distributions_refuse_samples_without_scores(mode):
    with pytest.raises(ValueError, match="need the trainer's scores"):
        assign_advantages([make_sample(reward=1.0), make_sample(reward=0.0)], config(mode))
    short = scored(1, [0.0, 1.0])
    with pytest.raises(ValueError, match="3 completion tokens"):
        assign_advantages([make_sample(completion=3, scores=short.scores)], config(mode))


@pytest.mark.parametrize(
    ("mode", "sample"),
    [
        ("ucas", scored(1, [0.0], certainty=math.nan)),
        ("ucas", scored(1, [math.inf])),
        ("edge", scored(1, [0.0], entropy=math.nan)),
    ],
)
def test_scores_that_are_not_finite_are_refused(mode, sample):
    with pytest.raises(ValueError, match="finite"):
        assign_advantages([sample, scored(0, [1.0])], config(mode))


def test_other_modes_leave_no_advantages_per_token_behind():
    samples = [replace(scored(r, [0.0, 1.0]), token_advantages=np.ones(2, np.float32)) for r in (1, 0, None)]
    found, _ = assign_advantages(samples, config("nll"))
    assert [s.token_advantages for s in found] == [None] * 3


@pytest.mark.parametrize("mode", ["ucas", "edge"])
def test_the_mode_changes_the_advantages(mode):
    samples = [scored(1, [0.0, 1.0], 1.0, 0.5), scored(0, [2.0, 1.0], 2.0, 1.5)]
    found, _ = assign_advantages(samples, config(mode))
    plain, _ = assign_advantages(samples, config("none"))
    assert all(a.advantage != b.advantage for a, b in zip(found, plain, strict=True))


# --- with a model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dapo", "gspo"])
def test_each_tokens_gradient_is_weighed_by_its_own_advantage(kind):
    import torch

    from umad.learning.policy import Policy

    model = tiny_model()
    policy = Policy("ada", model, TrainingConfig(steps=1), LossConfig(type=kind), 1.0, 0, 1)
    rng = np.random.default_rng(3)
    samples = [make_sample(rng, prompt=3, completion=n, reward=float(n > 2)) for n in (2, 5, 3, 1)]
    samples = [replace(s, scores=found) for s, found in zip(samples, policy.score(samples), strict=True)]
    ready, _ = assign_advantages(samples, config("ucas"))
    assert len({value for sample in ready for value in sample.token_advantages.tolist()}) > 4
    tokens = [len(sample.completion_ids) for sample in ready]
    policy.backward(ready, sum(tokens) if kind == "dapo" else len(tokens))
    found = [p.grad.clone() for p in policy.parallel.module.parameters()]
    policy.parallel.module.zero_grad()
    for sample in ready:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()[None]
        n = len(sample.completion_ids)
        logits = policy.parallel.module(ids).logits[0, -n - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, -n:, None])[:, 0]
        divisor = sum(tokens) if kind == "dapo" else n * len(tokens)
        (-(torch.from_numpy(sample.token_advantages) * logprobs).sum() / divisor).backward()
    for a, p in zip(found, policy.parallel.module.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6)
    assert sum(float(g.abs().sum()) for g in found) > 0
