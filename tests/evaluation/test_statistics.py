from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from umad.evaluation import statistics
from umad.evaluation.statistics import (
    bootstrap,
    bootstrap_mean,
    bootstrap_ratio,
    holm,
    interval,
    maj_at_k,
    mcnemar,
    pass_at_k,
    resampled_totals,
    two_sided_p,
)

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden" / "equations.json"


def test_a_draw_takes_whole_problems_with_replacement():
    columns = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    totals = resampled_totals(columns, draws=500, seed=0)
    assert totals[:, 1] == pytest.approx(10 * totals[:, 0])
    possible = {sum(pick) for pick in itertools.product([1.0, 2.0, 4.0], repeat=3)}
    assert set(totals[:, 0]) == possible


def test_draws_do_not_depend_on_the_chunk_size(monkeypatch):
    columns = np.random.default_rng(0).random((50, 3))
    whole = resampled_totals(columns, 200, seed=5)
    monkeypatch.setattr(statistics, "CHUNK", 170)
    assert resampled_totals(columns, 200, seed=5) == pytest.approx(whole)
    assert not np.allclose(resampled_totals(columns, 200, seed=6), whole)


def test_the_interval_of_a_mean_agrees_with_scipy():
    x = np.random.default_rng(1).normal(size=80)
    ours = bootstrap_mean(x[:, None], draws=20_000, seed=0)
    theirs = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=20_000, method="percentile", random_state=np.random.default_rng(0)
    ).confidence_interval
    assert ours.value[0] == pytest.approx(x.mean())
    assert (ours.low[0], ours.high[0]) == pytest.approx(tuple(theirs), abs=0.012)


def test_the_interval_of_a_paired_difference_agrees_with_scipy():
    rng = np.random.default_rng(2)
    a = rng.random(120) < 0.5
    b = a ^ (rng.random(120) < 0.2)
    ones = np.ones(120)
    ours = bootstrap(
        np.stack([a, ones, b, ones], axis=1),
        lambda t: (t[..., 2:3] / t[..., 3:4]) - (t[..., 0:1] / t[..., 1:2]),
        draws=20_000,
        seed=0,
    )
    theirs = scipy.stats.bootstrap(
        (b.astype(float), a.astype(float)),
        lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    assert (ours.low[0], ours.high[0]) == pytest.approx(tuple(theirs), abs=0.012)


def test_rollouts_of_a_problem_do_not_count_as_independent():
    """Every rollout of a problem ends alike: the interval must be that of one rollout, not four times as many."""
    right = (np.arange(100) % 2).astype(float)[:, None]
    one = bootstrap_ratio(right, np.ones((100, 1)), draws=4_000, seed=0)
    four = bootstrap_ratio(4 * right, np.full((100, 1), 4.0), draws=4_000, seed=0)
    assert (four.low, four.high) == (one.low, one.high)
    assert one.high[0] - one.low[0] == pytest.approx(2 * 1.96 * 0.05, rel=0.08)


def test_an_interval_repeats_by_seed_and_narrows_with_the_level():
    x = np.random.default_rng(3).random((40, 1))
    wide, again = (bootstrap_mean(x, draws=1_000, seed=7) for _ in range(2))
    assert (wide.low, wide.high) == (again.low, again.high)
    narrow = bootstrap_mean(x, draws=1_000, seed=7, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_problem_has_no_interval_and_none_is_an_error():
    found = bootstrap_mean([[0.5]], draws=10)
    assert found.value[0] == 0.5
    assert np.isnan(found.low[0])
    assert np.isnan(found.high[0])
    with pytest.raises(ValueError, match="no problem"):
        bootstrap_mean(np.zeros((0, 1)), draws=10)


def test_undefined_values_are_left_out_of_means_and_intervals():
    found = bootstrap_mean([[1.0, np.nan], [3.0, np.nan], [np.nan, np.nan]], draws=500)
    assert found.value[0] == 2.0
    assert 1.0 <= found.low[0] <= found.high[0] <= 3.0
    assert np.isnan([found.value[1], found.low[1], found.high[1]]).all()
    low, high = interval(np.array([[1.0, np.nan], [np.nan, np.nan], [3.0, np.nan]]))
    assert (low[0], high[0]) == pytest.approx((1.05, 2.95))
    assert np.isnan(low[1])


def test_memory_stays_bounded_at_ten_thousand_draws():
    columns = np.ones((2_000, 4))
    tracemalloc.start()
    resampled_totals(columns, draws=10_000, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6  # all picks at once would be 160 MB


def test_p_value_of_a_difference():
    assert two_sided_p(np.zeros((99, 1)))[0] == 1.0
    assert two_sided_p(np.ones((99, 1)))[0] == pytest.approx(2 / 100)
    assert two_sided_p(np.array([[-1.0]] * 10 + [[1.0]] * 89))[0] == pytest.approx(2 * 11 / 100)
    assert np.isnan(two_sided_p(np.full((5, 1), np.nan))[0])


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_exact_binomial_test(a, b):
    expected = scipy.stats.binomtest(a, a + b, 0.5).pvalue if a + b else 1.0
    assert mcnemar(a, b) == pytest.approx(expected, rel=1e-10)
    assert mcnemar(a, b) == mcnemar(b, a)


def test_mcnemar_by_counting_every_outcome_and_at_sizes_that_overflow_floats():
    outcomes = [sum(bits) for bits in itertools.product([0, 1], repeat=9)]
    assert mcnemar(2, 7) == pytest.approx(sum(x <= 2 or x >= 7 for x in outcomes) / len(outcomes))
    assert mcnemar(2_500, 2_700) == pytest.approx(scipy.stats.binomtest(2_500, 5_200, 0.5).pvalue, rel=1e-9)
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_exactly_what_the_step_down_procedure_rejects(p):
    adjusted = holm(p)
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
            if (len(p) - rank) * p[i] > level:
                break
            rejected.add(i)
        assert {i for i, q in enumerate(adjusted) if q <= level} == rejected


def test_holm_on_a_worked_case_and_with_missing_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, None, float("nan"), 0.02]) == [pytest.approx(0.02), None, None, pytest.approx(0.02)]
    assert holm([]) == []


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    n, c, k = case
    subsets = list(itertools.combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_agrees_with_the_reference_values_where_they_are():
    if not GOLDEN.is_file():
        pytest.skip("no reference values beside this checkout")
    for case in json.loads(GOLDEN.read_text())["pass_at_k"]:
        assert pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["value"])


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_pass_at_k_is_an_error(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


def majority_by_hand(keys, correct, k):
    right = {key for key, ok in zip(keys, correct, strict=True) if ok}
    scores = []
    for subset in itertools.combinations(keys, k):
        votes = Counter(key for key in subset if key is not None)
        leaders = [key for key in votes if votes[key] == max(votes.values())]
        scores.append(sum(key in right for key in leaders) / len(leaders) if leaders else 0.0)
    return sum(scores) / len(scores)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7), st.data())
@settings(max_examples=60)
def test_maj_at_k_is_the_mean_over_all_subsets(keys, data):
    k = data.draw(st.integers(1, len(keys)))
    correct = [key == "a" for key in keys]
    assert maj_at_k(keys, correct, k) == pytest.approx(majority_by_hand(keys, correct, k))


def test_maj_at_k_cases():
    assert maj_at_k(["a", "a", "b"], [True, True, False], 3) == 1.0
    assert maj_at_k([None, None, "a"], [False, False, True], 3) == 1.0, "no answer never wins"
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    assert maj_at_k(["a", "b"], [True, False], 2) == 0.5, "ties in expectation"
    with pytest.raises(ValueError, match="maj@k needs"):
        maj_at_k(["a"], [True], 2)


def test_maj_at_k_by_sampled_subsets_comes_close_to_the_exact_value():
    rng = np.random.default_rng(0)
    keys = [str(x) for x in rng.integers(0, 3, size=14)]
    correct = [key == "0" for key in keys]
    exact = maj_at_k(keys, correct, 7, draws=math.comb(14, 7))
    sampled = maj_at_k(keys, correct, 7, draws=3_000, seed=1)
    assert sampled == pytest.approx(exact, abs=0.03)
    assert sampled == maj_at_k(keys, correct, 7, draws=3_000, seed=1)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hits = 0
    for repeat in range(400):
        skill = rng.beta(2, 2, size=150)[:, None]  # problems differ, four rollouts of each
        right = rng.binomial(4, skill)
        found = bootstrap_ratio(right, np.full(right.shape, 4), draws=1_000, seed=repeat)
        hits += found.low[0] <= 0.5 <= found.high[0]
    assert 0.92 <= hits / 400 <= 0.98
