from __future__ import annotations

import math

import numpy as np
import pytest

from umad.uncertainty.nll import mean_nll


def test_nll_is_minus_the_mean_over_all_completion_tokens_the_last_included():
    logprobs = np.log(np.array([0.5, 0.25, 0.125], dtype=np.float32)).astype(np.float32)
    assert mean_nll(logprobs) == pytest.approx(2 * math.log(2), rel=1e-6)
    assert mean_nll([math.log(0.5)]) == pytest.approx(math.log(2))


def test_a_certain_completion_has_nll_zero_even_with_float_rounding_above_zero():
    assert mean_nll(np.array([0.0, 1e-6], dtype=np.float32)) == 0.0


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (None, "no log-probabilities"),
        ([], "empty completion"),
        ([-1.0, None, -2.0], "token 1 is missing"),
        ([-1.0, float("nan")], "token 1 is nan"),
        ([-1.0, -2.0, -math.inf], "token 2 is -inf"),
        ([-1.0, 0.3], "token 1 is 0.3, above 0"),
        ([[-1.0, -2.0]], "shape"),
    ],
)
def test_a_missing_or_impossible_log_probability_is_an_error_and_never_certainty(logprobs, message):
    with pytest.raises(ValueError, match=message):
        mean_nll(logprobs)
