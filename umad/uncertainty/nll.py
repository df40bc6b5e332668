"""Token-level negative log-likelihood of a sampled response: U of Eq. 4 (UMAD, arXiv 2603.01221)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def mean_nll(logprobs: ArrayLike | None) -> float:
    """U of Eq. 4: minus the mean over completion tokens of log pi_old, in nats per token.

    logprobs: [C], natural logarithms of the tokens exactly as sampled, the end-of-sequence token included where the model
    wrote it, the prompt and padding left out. Log-probabilities are float32; their mean is taken in float64.

    Raises ValueError where a value is missing, not finite or above 0. Filling such a hole with 0.0 would say that the
    token was certain.
    """
    if logprobs is None:
        raise ValueError("no log-probabilities: this engine does not report them, so there is no NLL")
    if isinstance(logprobs, Sequence) and any(value is None for value in logprobs):
        missing = next(i for i, value in enumerate(logprobs) if value is None)
        raise ValueError(f"the log-probability of completion token {missing} is missing")
    values = np.asarray(logprobs, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"expected the log-probabilities of one completion, shape [C], not {list(values.shape)}")
    if not len(values):
        raise ValueError("an empty completion has no NLL")
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"the log-probability of completion token {where} is {values[where]}")
    if values.max() > _ROUNDING:
        where = int(values.argmax())
        raise ValueError(f"the log-probability of completion token {where} is {values[where]:g}, above 0")
    return max(0.0, -math.fsum(values) / len(values))


_ROUNDING = 1e-4
"""float32 log-softmax of a near certain token may come out this far above 0."""
