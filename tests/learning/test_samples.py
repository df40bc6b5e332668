from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from learning.learning_helpers import make_debate

from umad.learning.samples import samples_of, write_back
from umad.records import Debate, Response


def with_tokens(debate: Debate, seed: int = 0, **changes: Any) -> Debate:
    """`debate` with random token ids; `changes` go into ada's response of turn 0."""
    rng = np.random.default_rng(seed)

    def tokens(response: Response) -> Response:
        n = int(rng.integers(1, 6))
        response = replace(
            response,
            reward=None if response.correct is None else float(response.correct),
            prompt_ids=rng.integers(0, 40, 4).astype(np.int32),
            token_ids=rng.integers(0, 40, n).astype(np.int32),
            logprobs=-rng.random(n, np.float32),
            weight_version=7,
        )
        return replace(response, **changes) if (response.agent, response.turn) == ("ada", 0) else response

    return replace(debate, turns=tuple(tuple(tokens(r) for r in turn) for turn in debate.turns))


def debates() -> list[Debate]:
    grades = [[[True, False], [True, True]], [[False, None], [True, True]]]
    return [with_tokens(make_debate(g, instance=3, rollout=k), k) for k, g in enumerate(grades)]


def test_samples_are_what_was_sampled_in_order_with_explicit_groups():
    found = samples_of(debates(), "bob")
    assert [s.group for s in found] == [(3, "bob", 0), (3, "bob", 1)] * 2
    assert [s.reward for s in found] == [0.0, 1.0, None, 1.0]
    expected = [r for d in debates() for r in d.responses() if r.agent == "bob"]
    for sample, response in zip(found, expected, strict=True):
        assert np.array_equal(sample.prompt_ids, response.prompt_ids)
        assert np.array_equal(sample.completion_ids, response.token_ids)
        assert sample.weight_version == 7
        assert sample.nll == pytest.approx(-float(response.logprobs.astype(np.float64).mean()), abs=1e-12)


def test_a_debate_that_failed_gives_what_it_has():
    partial = replace(debates()[0], error="the engine died", turns=debates()[0].turns[:1])
    assert len(samples_of([partial], "ada")) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "no logprobs"),
        ({"token_ids": None}, "no ids"),
        ({"prompt_ids": None}, "no ids"),
        ({"token_ids": np.array([1, 2], np.int32), "logprobs": np.array([-1.0], np.float32)}, "no logprobs"),
        ({"token_ids": np.array([1], np.int32), "logprobs": np.array([np.nan], np.float32)}, "bad logprobs"),
        ({"token_ids": np.array([1], np.int32), "logprobs": np.array([-np.inf], np.float32)}, "bad logprobs"),
        ({"token_ids": np.array([1], np.int32), "logprobs": np.array([0.5], np.float32)}, "bad logprobs"),
    ],
)
def test_missing_or_impossible_logprobs_raise_or_are_dropped_and_counted(changes, reason):
    damaged = with_tokens(make_debate([[True, False], [True, True]]), **changes)
    with pytest.raises(ValueError, match=f"agent 'ada', turn 0: {reason}"):
        samples_of([damaged], "ada")
    dropped: Counter[str] = Counter()
    assert [s.group[2] for s in samples_of([damaged], "ada", dropped)] == [1]
    assert dropped == {reason: 1}
    assert len(samples_of([damaged], "bob")) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": "error", "token_ids": None, "logprobs": None}, "failed"),
        (
            {"finish_reason": "context", "token_ids": np.array([], np.int32), "logprobs": np.array([], np.float32)},
            "empty",
        ),
    ],
)
def test_responses_without_tokens_by_nature_are_left_out_and_counted(changes, reason):
    debate = with_tokens(make_debate([[True, False], [True, True]]), **changes)
    dropped: Counter[str] = Counter()
    assert len(samples_of([debate], "ada")) == len(samples_of([debate], "ada", dropped)) == 1
    assert dropped == {reason: 1}


def test_truncation_reaches_the_sample():
    debate = with_tokens(make_debate([[True, False]]), finish_reason="length")
    assert samples_of([debate], "ada")[0].truncated
    assert not samples_of([debate], "bob")[0].truncated


def test_results_come_back_into_their_responses():
    before = debates()
    samples = [
        replace(s, advantage=float(i), weight=1.0 + i)
        for i, s in enumerate(samples_of(before, "bob") + samples_of(before, "ada"))
    ]
    after = write_back(before, samples)
    bob = [(r.advantage, r.weight) for d in after for r in d.responses() if r.agent == "bob"]
    ada = [(r.advantage, r.weight) for d in after for r in d.responses() if r.agent == "ada"]
    assert bob == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert ada == [(4, 5), (5, 6), (6, 7), (7, 8)]
    assert after[0].turns[0][0].to_row()["advantage"] == 4
    assert all(r.advantage is None for d in before for r in d.responses())


def test_responses_that_gave_no_sample_stay_as_they_are():
    debate = with_tokens(make_debate([[None, False], [True, True]]), finish_reason="error", token_ids=None)
    after = write_back([debate], samples_of([debate], "ada"))
    assert after[0].turns[0] == debate.turns[0]
    assert after[0].turns[1][0].advantage == 0.0
    assert after[0].turns[1][1].advantage is None  # bob's samples were not given


def test_samples_of_other_debates_are_refused():
    before = debates()
    samples = samples_of(before, "ada")
    for wrong in (samples[:-1], [*samples, samples[0]], samples[1:] + samples[:1]):
        with pytest.raises(ValueError, match="ada"):
            write_back(before, wrong)
    with pytest.raises(ValueError, match="token ids"):
        write_back(before, [replace(samples[0], completion_ids=samples[0].completion_ids + 1), *samples[1:]])
