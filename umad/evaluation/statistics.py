"""Statistics for figures that come from problems: bootstrap by problem, paired tests, pass@k and maj@k.

Problems are the independent units. Several rollouts, agents and turns of one problem hang together, so a draw takes a
problem with everything that belongs to it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Maps totals over problems [..., M] to figures [..., S]."""

CHUNK = 1 << 20
"""Most problem picks held at once; memory stays under 50 MB whatever the number of draws."""


@dataclass(frozen=True, slots=True, eq=False)
class Bootstrap:
    """value: [S], the statistic of the data. low, high: [S], the percentile interval (NaN below two problems, and where
    the statistic is undefined). draws: [B, S]."""

    value: Floats
    low: Floats
    high: Floats
    draws: Floats


def resampled_totals(columns: ArrayLike, draws: int, seed: int) -> Floats:
    """Totals over problems drawn with replacement: [draws, M] from per-problem sums `columns` [P, M].

    Picks are made a chunk at a time, so memory does not grow with `draws` beyond the result.
    """
    x = np.asarray(columns, dtype=np.float64)
    n = len(x)
    if n == 0:
        raise ValueError("nothing to resample: there is no problem")
    rng = np.random.default_rng(seed)
    totals = np.empty((draws, x.shape[1]))
    step = max(1, CHUNK // n)
    for start in range(0, draws, step):
        rows = min(step, draws - start)
        picks = rng.integers(0, n, size=(rows, n)) + n * np.arange(rows)[:, None]
        copies = np.bincount(picks.ravel(), minlength=rows * n).reshape(rows, n)
        totals[start : start + rows] = copies.astype(np.float64) @ x
    return totals


def bootstrap(
    columns: ArrayLike, statistic: Statistic, *, draws: int = 10_000, seed: int = 0, level: float = 0.95
) -> Bootstrap:
    """Percentile bootstrap by problem of any figure that is a function of totals over problems.

    columns: [P, M], sums of each problem (over its rollouts). A mean is a total over a count, a paired difference of two
    runs a difference of such ratios over columns of both.
    """
    x = np.asarray(columns, dtype=np.float64)
    value = np.asarray(statistic(x.sum(axis=0)), dtype=np.float64)
    drawn = np.asarray(statistic(resampled_totals(x, draws, seed)), dtype=np.float64)
    if len(x) < 2:
        low = high = np.full(value.shape, np.nan)
    else:
        low, high = interval(drawn, level)
    return Bootstrap(value, low, high, drawn)


def interval(draws: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
    """The central `level` percentile interval over axis 0; undefined (NaN) draws are left out."""
    values = np.asarray(draws, dtype=np.float64)
    tail = 100 * (1 - level) / 2
    empty = np.isnan(values).all(axis=0)
    if not np.isnan(values).any():
        low, high = np.percentile(values, [tail, 100 - tail], axis=0)
    else:
        low, high = np.nanpercentile(np.where(empty, 0.0, values), [tail, 100 - tail], axis=0)
    return np.where(empty, np.nan, low), np.where(empty, np.nan, high)


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Floats:
    """Element by element; NaN where the denominator is 0."""
    a, b = np.broadcast_arrays(np.asarray(numerators, np.float64), np.asarray(denominators, np.float64))
    return np.divide(a, b, out=np.full(a.shape, np.nan), where=b != 0)


def bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, *, draws: int = 10_000, seed: int = 0, level: float = 0.95
) -> Bootstrap:
    """Bootstrap by problem of sum(numerators) / sum(denominators), each [P, S]; `value` and bounds are [S].

    With counts of right and of graded rollouts this is accuracy, clustered over rollouts.
    """
    a, b = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if a.ndim != 2 or a.shape != b.shape:
        raise ValueError(f"expected two arrays of one shape [problems, figures], not {a.shape} and {b.shape}")
    s = a.shape[1]
    return bootstrap(np.hstack([a, b]), lambda x: ratio(x[..., :s], x[..., s:]), draws=draws, seed=seed, level=level)


def bootstrap_mean(values: ArrayLike, *, draws: int = 10_000, seed: int = 0, level: float = 0.95) -> Bootstrap:
    """Bootstrap by problem of the mean of per-problem values [P, S]; NaN entries are left out."""
    x = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(x)
    return bootstrap_ratio(np.where(known, x, 0.0), known, draws=draws, seed=seed, level=level)


def two_sided_p(draws: ArrayLike) -> Floats:
    """Two-sided p-values [S] of "the difference is 0" from bootstrap draws of it [B, S], by inverting the percentile
    interval; never below 2 / (B + 1). NaN where no draw is defined."""
    values = np.asarray(draws, dtype=np.float64)
    n = (~np.isnan(values)).sum(axis=0)
    fewer = np.minimum((values <= 0).sum(axis=0), (values >= 0).sum(axis=0))
    return np.where(n > 0, np.minimum(1.0, 2 * (fewer + 1) / (n + 1)), np.nan)


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided McNemar test: the binomial test of the discordant pairs against 1/2.

    only_a, only_b: pairs in which only the first, only the second is right.
    """
    n, k = only_a + only_b, min(only_a, only_b)
    if k < 0:
        raise ValueError(f"counts of pairs cannot be negative: {only_a}, {only_b}")
    below, term = 0, 1
    for i in range(k + 1):
        below += term
        term = term * (n - i) // (i + 1)
    return min(1.0, 2 * below / 2**n)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p-values, in the given order. None and NaN stay out of the family and are None."""
    known = [(p, i) for i, p in enumerate(p_values) if p is not None and not math.isnan(p)]
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(sorted(known)):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[i] = running
    return adjusted


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k (Chen et al. 2021, arXiv 2107.03374): 1 - C(n - c, k) / C(n, k), c of n samples being right."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(
    keys: Sequence[str | None], correct: Sequence[bool], k: int, *, draws: int = 2_000, seed: int = 0
) -> float:
    """Expected correctness of the majority answer among k of the n samples drawn without replacement.

    keys: answer classes, None for no answer, which never wins; only unanswered samples: wrong. Ties count in expectation,
    every leading class alike. A class is as right as the share of its samples that were graded right. Exact where there are
    at most `draws` subsets, else over so many seeded ones.
    """
    n = len(keys)
    if len(correct) != n or not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n and a grade per sample, not n={n}, {len(correct)} grades, k={k}")
    members = Counter(key for key in keys if key is not None)
    right = Counter(key for key, ok in zip(keys, correct, strict=True) if key is not None and ok)
    subsets: Sequence[Sequence[int]]
    if math.comb(n, k) <= draws:
        subsets = list(itertools.combinations(range(n), k))
    else:
        rng = np.random.default_rng(seed)
        subsets = np.argsort(rng.random((draws, n)), axis=1)[:, :k].tolist()
    score = 0.0
    for subset in subsets:
        votes = Counter(key for i in subset if (key := keys[i]) is not None)
        top = max(votes.values(), default=0)
        leaders = [key for key, count in votes.items() if count == top]
        if leaders:
            score += sum(right[key] / members[key] for key in leaders) / len(leaders)
    return score / len(subsets)
