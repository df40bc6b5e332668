from __future__ import annotations

import numpy as np
import pytest

from umad.engines.noise import stream, uniforms


def noise(seeds: list[int], positions: np.ndarray) -> np.ndarray:
    streams = np.array([stream(s) for s in seeds], dtype=np.uint64)
    return np.stack([uniforms(streams, np.full(len(seeds), p)) for p in positions], axis=1)


def test_a_number_depends_on_its_seed_and_position_only() -> None:
    together = noise([5, 17, 2**63 - 1], np.arange(100))
    for row, seed in enumerate([5, 17, 2**63 - 1]):
        alone = noise([seed], np.arange(100)[::-1])[0, ::-1]
        assert np.array_equal(together[row], alone)


def test_known_value_of_the_generator() -> None:
    # SplitMix64 started at 1234567 gives 6457827717110365317 first (reference implementation's published check value)
    z = uniforms(np.array([1234567], dtype=np.uint64), np.array([0]))
    assert z[0] == (6457827717110365317 >> 11) * 2.0**-53


@pytest.mark.parametrize(
    "seeds", [list(range(200)), [i << 40 for i in range(200)], [2**63 - 1 - i for i in range(200)]]
)
def test_numbers_are_even_and_unrelated_for_neighbouring_seeds(seeds: list[int]) -> None:
    u = noise(seeds, np.arange(500))
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - u.size / 100) ** 2 / (u.size / 100)).sum() < 160  # chi-square, 99 degrees of freedom
    for one, other in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.015
    assert len(np.unique(u)) == u.size
