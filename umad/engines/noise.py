"""One uniform number per (seed, position): a response's noise, whatever else is in its batch.

Counter-based, so there is no stream to advance and nothing to save: SplitMix64 (Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014), started at the mixed seed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream(seed: int) -> int:
    """The 64-bit start of a response's stream. Seeds that differ by little give streams that have nothing in common."""
    return int(_mix(np.array([seed & _MASK], dtype=np.uint64) + _GAMMA)[0])


def uniforms(streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), float64 [B], for the tokens at `positions` [B] of the responses with `streams` [B]."""
    z = streams + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53
