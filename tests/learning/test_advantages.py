from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning.learning_helpers import golden, make_debate, make_sample

from umad.config import AdvantageConfig, RewardConfig, WeightConfig
from umad.learning import advantages as advantages_module
from umad.learning.advantages import advantage_metrics, group_advantages
from umad.learning.rewards import reward_debate
from umad.learning.samples import samples_of
from umad.learning.weights import group_weights, sample_nll, zscores
from umad.records import Sample


def assign_advantages(*arguments: Any, **settings: Any) -> tuple[list[Sample], dict[str, float]]:
    samples, tallies = advantages_module.assign_advantages(*arguments, **settings)
    return samples, advantage_metrics([tallies])


def weights(mode: str = "nll", **values: Any) -> AdvantageConfig:
    return AdvantageConfig.model_validate({"weight": {"mode": mode, **values}})


def group(rewards: list[float | None], nll: list[float] | None = None, at: tuple[int, int] = (0, 0), **changes: Any):
    values = nll or [1.0] * len(rewards)
    return [make_sample(group=at, reward=r, nll=u, **changes) for r, u in zip(rewards, values, strict=True)]


# --- golden values and closed forms -----------------------------------------------------------------------------------


def test_group_advantages_match_the_reference_values():
    for case in golden("grpo_advantage"):
        assert group_advantages(case["rewards"]) == pytest.approx(case["advantages"], abs=1e-12)


def test_weights_match_the_reference_values():
    for case in golden("nll_weights"):
        config = WeightConfig(alpha=case["alpha"])
        found, clamped = group_weights(case["nll"], [0.0] * len(case["nll"]), config)
        assert found == pytest.approx(case["weights"], abs=1e-12)
        assert clamped == 0


def test_weighted_advantages_match_the_reference_values():
    for case in golden("umad_advantage"):
        samples, _ = assign_advantages(group(case["rewards"], case["nll"]), weights(alpha=case["alpha"]))
        assert [s.advantage for s in samples] == pytest.approx(case["advantages"], abs=1e-12)


def test_one_right_of_two_is_plus_and_minus_one_over_root_two():
    # sample std of (1, 0) is 1/sqrt(2), so A = +-0.5 / (1/sqrt(2))
    assert group_advantages([1, 0]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)
    assert group_advantages([1, 0, 0], "none") == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_weights_of_two_members_are_exp_of_plus_and_minus_alpha():
    # with two members z is +-1 whatever their distance
    found, _ = group_weights([0.1, 7.0], [1.0, 1.0], WeightConfig(alpha=0.25))
    assert found == pytest.approx([math.exp(0.25), math.exp(-0.25)], rel=1e-7)


def test_the_weight_pushes_confident_answers_whatever_the_advantages_sign():
    samples, _ = assign_advantages(group([1, 0, 1, 0], [0.1, 0.1, 2.0, 2.0]), weights())
    sure_right, sure_wrong, unsure_right, unsure_wrong = (s.advantage for s in samples)
    assert sure_right > unsure_right > 0 > unsure_wrong > sure_wrong
    assert sure_right == pytest.approx(-sure_wrong)


def test_signed_nll_follows_the_sign_of_the_advantage():
    config = WeightConfig(mode="signed_nll", alpha=0.5)
    found, _ = group_weights([0.1, 0.9], [1.0, 1.0], config)
    assert found == pytest.approx([math.exp(0.5), math.exp(-0.5)], rel=1e-6)
    found, _ = group_weights([0.1, 0.9], [-1.0, -1.0], config)
    assert found == pytest.approx([math.exp(-0.5), math.exp(0.5)], rel=1e-6)
    assert group_weights([0.1, 0.9], [0.0, 0.0], config)[0] == [1.0, 1.0]


@pytest.mark.parametrize("mode", ["nll", "signed_nll"])
def test_weights_that_would_overflow_are_clamped_and_counted(mode):
    samples, metrics = assign_advantages(group([1, 0, 1], [0.5, 100.0, 0.6]), weights(mode, alpha=1000, clip=8))
    for sample in samples:
        assert np.isfinite(np.float32(sample.advantage))
        assert 1 / 8 <= sample.weight * (1 + 1e-12) <= 8 * (1 + 1e-9)
    assert metrics["weight_clamped/turn_0"] == 3
    _, metrics = assign_advantages(group([1, 0, 1], [0.5, 100.0, 0.6]), weights(mode))
    assert metrics["weight_clamped/turn_0"] == 0


# --- laws -------------------------------------------------------------------------------------------------------------

numbers = st.floats(-5, 5).map(lambda x: round(x, 4))
lists = st.lists(numbers, min_size=2, max_size=16)


@given(lists)
def test_advantages_sum_to_0_and_do_not_depend_on_order_or_offset(rewards):
    found = group_advantages(rewards)
    assert math.fsum(found) == pytest.approx(0, abs=1e-9)
    assert group_advantages(rewards[::-1]) == found[::-1]
    assert group_advantages([r + 8 for r in rewards]) == pytest.approx(found, abs=1e-6)
    if max(rewards) - min(rewards) > 0.01:
        std = math.sqrt(math.fsum(a * a for a in found) / (len(found) - 1))
        assert std == pytest.approx(1, abs=1e-3)
    else:
        assert all(abs(a) < len(rewards) for a in found)


@given(lists, st.floats(0, 2))
def test_weights_have_mean_log_0_and_lie_within_their_bound(nll, alpha):
    found, _ = group_weights(nll, [0.0] * len(nll), WeightConfig(alpha=alpha, clip=1e9))
    bound = math.exp(alpha * math.sqrt(len(nll) - 1))
    assert all(1 / bound - 1e-9 <= w <= bound + 1e-9 for w in found)
    assert math.fsum(map(math.log, found)) == pytest.approx(0, abs=1e-6)
    # a surer answer never weighs less
    order = sorted(range(len(nll)), key=nll.__getitem__)
    assert all(found[a] >= found[b] - 1e-12 for a, b in pairwise(order))


@pytest.mark.parametrize("noise", [0.0, 1e-17, 4e-7])
def test_equal_rewards_give_exactly_0_and_not_blown_up_noise(noise):
    assert group_advantages([0.3, 0.3 + noise, 0.3 - noise]) == [0.0, 0.0, 0.0]
    assert group_advantages([0.1 + 0.2, 0.3]) == [0.0, 0.0]


def test_a_constant_group_or_a_single_member_weighs_1():
    assert group_weights([0.4] * 5, [1.0] * 5, WeightConfig())[0] == [1.0] * 5
    assert group_weights([3.0], [1.0], WeightConfig())[0] == [1.0]
    assert zscores([]) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_and_nll_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([bad, 1.0])
    with pytest.raises(ValueError, match="finite"):
        assign_advantages(group([1, 0], [bad, 1.0]), weights())


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups_are_instance_and_turn_never_prompt_or_position():
    # siblings' prompts all differ from turn 1 on, and the groups' members come interleaved
    rng = np.random.default_rng(1)
    samples = [make_sample(rng, group=(i % 2, 1), prompt=2 + i, reward=float(i < 2)) for i in range(6)]
    found, _ = assign_advantages(samples, weights("none"))
    for instance in (0, 1):
        members = [s.advantage for s in found if s.group[0] == instance]
        assert members == pytest.approx(group_advantages([1.0, 0.0, 0.0]))
    assert [s.prompt_ids is t.prompt_ids for s, t in zip(found, samples, strict=True)] == [True] * 6


def test_a_group_of_equal_rewards_gets_0_whatever_its_neighbours_get():
    samples = group([0.7] * 3, [0.1, 0.5, 0.9]) + group([1, 0, 0], at=(1, 0)) + group([5, 9], at=(2, 0))
    found, metrics = assign_advantages(samples, weights())
    assert [s.advantage for s in found[:3]] == [0.0, 0.0, 0.0]
    assert all(s.in_loss for s in found)
    assert metrics["no_signal/turn_0"] == pytest.approx(1 / 3)


def test_an_ungraded_member_moves_neither_baseline_nor_weights_and_is_not_in_the_loss():
    with_it, metrics = assign_advantages(group([1, None, 0, 0], [0.3, 9.0, 0.4, 0.5]), weights())
    without, _ = assign_advantages(group([1, 0, 0], [0.3, 0.4, 0.5]), weights())
    kept = [s for s in with_it if s.reward is not None]
    assert [(s.advantage, s.weight) for s in kept] == [(s.advantage, s.weight) for s in without]
    left_out = with_it[1]
    assert (left_out.advantage, left_out.weight, left_out.in_loss, left_out.reward) == (0.0, 1.0, False, None)
    assert metrics["ungraded/turn_0"] == 1
    assert metrics["reward/turn_0"] == pytest.approx(1 / 3)


def test_a_masked_truncated_member_stays_in_the_baseline_and_leaves_the_loss():
    samples = group([1, 0, 0], [0.3, 0.4, 0.5])
    samples[1] = replace(samples[1], truncated=True)
    masked, metrics = assign_advantages(samples, weights(), mask_truncated=True)
    plain, _ = assign_advantages(samples, weights(), mask_truncated=False)
    assert [s.in_loss for s in masked] == [True, False, True]
    assert [s.in_loss for s in plain] == [True, True, True]
    assert [s.advantage for s in masked] == [s.advantage for s in plain]
    assert metrics["masked/turn_0"] == 1


def test_a_group_that_shrank_to_one_gives_0_and_is_counted():
    found, metrics = assign_advantages(group([1, None, None]) + group([1, 0], at=(1, 0)), weights())
    assert (found[0].advantage, found[0].weight, found[0].in_loss) == (0.0, 1.0, True)
    assert metrics["shrunk/turn_0"] == 1
    assert metrics["no_signal/turn_0"] == 0.5


def test_a_group_with_nothing_graded_does_not_stop_the_others():
    found, metrics = assign_advantages(group([None, None]) + group([1, 0], at=(1, 0)), weights())
    assert [s.in_loss for s in found] == [False, False, True, True]
    assert metrics["ungraded/turn_0"] == 2
    assert assign_advantages(group([None, None]), weights())[1]["no_signal/turn_0"] == 1
    assert assign_advantages([], weights()) == ([], {})


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_the_share_of_groups_without_signal_is_logged_per_turn(p):
    # G = 5: 0.1^5 + 0.9^5 = 0.59
    rng = np.random.default_rng(0)
    samples = [
        s
        for g in range(2000)
        for s in group([float(x) for x in rng.random(5) < p], at=(g, 0)) + group([0, 1], at=(g, 1))
    ]
    _, metrics = assign_advantages(samples, weights())
    assert metrics["no_signal/turn_0"] == pytest.approx(0.59, abs=0.04)
    assert metrics["no_signal/turn_1"] == 0


def test_the_spread_of_weights_is_logged():
    _, metrics = assign_advantages(group([1, 0], [0.1, 0.2]), weights(alpha=0.5))
    low, high = math.exp(-0.5), math.exp(0.5)
    assert metrics["weight_min/turn_0"] == pytest.approx(low)
    assert metrics["weight_max/turn_0"] == pytest.approx(high)
    assert metrics["weight_std/turn_0"] == pytest.approx((high - low) / 2)


# --- settings ---------------------------------------------------------------------------------------------------------


def rewarded_samples(eta: float) -> list[Sample]:
    rng = np.random.default_rng(5)
    samples = []
    for instance in range(6):
        for rollout in range(5):
            grades = [[bool(x) for x in rng.random(2) < 0.5] for _ in range(3)]
            debate = make_debate(grades, instance=instance, rollout=rollout)
            turns = tuple(
                tuple(
                    replace(
                        r,
                        prompt_ids=np.arange(4, dtype=np.int32),
                        token_ids=np.arange(3, dtype=np.int32),
                        logprobs=-rng.random(3, np.float32),
                    )
                    for r in turn
                )
                for turn in debate.turns
            )
            config = RewardConfig.model_validate({"influence": {"eta": eta}})
            samples += samples_of([reward_debate(replace(debate, turns=turns), config)], "ada")
    return samples


def test_alpha_0_and_eta_0_equal_no_weights_and_no_influence_bit_for_bit():
    found, _ = assign_advantages(rewarded_samples(0.0), weights("nll", alpha=0))
    plain, _ = assign_advantages(rewarded_samples(0.0), weights("none"))
    pairs = list(zip(found, plain, strict=True))
    assert all(np.float64(a.advantage).tobytes() == np.float64(b.advantage).tobytes() for a, b in pairs)
    assert all(a.weight == b.weight == 1.0 for a, b in pairs)
    assert any(a.advantage for a in found)
    # and the settings do something
    other, _ = assign_advantages(rewarded_samples(0.2), weights("none"))
    assert [s.advantage for s in other] != [s.advantage for s in plain]
    other, _ = assign_advantages(rewarded_samples(0.0), weights("nll"))
    assert [s.advantage for s in other] != [s.advantage for s in plain]


def test_normalize_none_leaves_the_division_out():
    config = AdvantageConfig.model_validate({"normalize": "none", "weight": {"mode": "none"}})
    found, _ = assign_advantages(group([1, 0, 0, 0]), config)
    assert [s.advantage for s in found] == [0.75, -0.25, -0.25, -0.25]


def test_the_nll_is_the_samples_own_or_else_its_samplers():
    sample = make_sample(completion=2, logprobs=np.array([-0.5, -1.5], np.float32))
    assert sample_nll(sample) == 1.0
    assert sample_nll(replace(sample, nll=3.0)) == 3.0


def test_metrics_of_parts_are_those_of_the_whole():
    groups = [
        group([1, 0, 1], [0.5, 0.1, 0.6], at=(0, 0)),
        group([1, 1, 1], [0.5, 0.2, 0.6], at=(1, 0)),
        group([0, None, 1], [0.3, 0.2, 0.9], at=(2, 1)),
    ]
    whole = [sample for members in groups for sample in members]
    parts = [advantages_module.assign_advantages(members, weights())[1] for members in groups]
    assert advantage_metrics(parts) == pytest.approx(assign_advantages(whole, weights())[1])


def test_groups_without_signal_can_be_left_out_of_the_normaliser():
    samples = group([1, 1, 1], [0.5, 0.2, 0.6]) + group([1, 0, 0], [0.5, 0.2, 0.6], at=(1, 0))
    kept, _ = assign_advantages(samples, weights())
    dropped, metrics = assign_advantages(samples, weights(), drop_no_signal=True)
    assert [s.in_loss for s in kept] == [True] * 6
    assert [s.in_loss for s in dropped] == [False] * 3 + [True] * 3
    assert [s.advantage for s in dropped] == [s.advantage for s in kept]
    assert metrics["masked/turn_0"] == 0
    assert metrics["no_signal/turn_0"] == 0.5
