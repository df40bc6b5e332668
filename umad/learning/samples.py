"""From debates to the learner's flat samples, and the results back into the debates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from umad.records import Debate, Response, Sample


def samples_of(debates: Sequence[Debate], agent: str, dropped: Counter[str] | None = None) -> list[Sample]:
    """One sample per response of `agent`, in the debates' order, then by turn; ids and log-probabilities as sampled.

    The group is (debate.instance, agent, turn). Debates that ended with an error give what they have up to there.
    Left out, and counted in `dropped` by reason:

    * `failed`: the generation failed (finish reason `error`);
    * `empty`: no token was sampled (no room in the context), so there is nothing to learn from;
    * `no ids`, `no logprobs`, `bad logprobs` (NaN, positive or infinite): raises `ValueError` instead where `dropped` is
      None. A missing log-probability is never taken for 0, which would mean certainty.
    """
    samples = []
    for debate, response in _of(debates, agent):
        fault = _fault(response)
        if fault is None:
            samples.append(_sample(debate, response))
        elif dropped is not None:
            dropped[fault] += 1
        elif fault not in ("failed", "empty"):
            raise ValueError(
                f"problem {debate.problem.id!r}, rollout {debate.rollout}, agent {agent!r}, turn {response.turn}: "
                f"{fault} from the engine; it cannot be trained on"
            )
    return samples


def write_back(debates: Sequence[Debate], samples: Iterable[Sample]) -> list[Debate]:
    """Copies of `debates` whose responses carry their samples' advantage, weight and reward.

    `samples`: those that `samples_of` made of the same debates, for any of the agents, each agent's in that order.
    Responses that gave no sample stay as they are. Raises `ValueError` where samples and debates don't belong together.
    """
    queues: dict[str, list[Sample]] = {}
    for sample in samples:
        queues.setdefault(sample.agent, []).append(sample)
    streams = {agent: iter(queue) for agent, queue in queues.items()}
    result = [
        replace(debate, turns=tuple(tuple(_written(debate, r, streams) for r in turn) for turn in debate.turns))
        for debate in debates
    ]
    for agent, stream in streams.items():
        if next(stream, None) is not None:
            raise ValueError(f"agent {agent!r} has more samples than usable responses in these debates")
    return result


def _written(debate: Debate, response: Response, streams: Mapping[str, Iterator[Sample]]) -> Response:
    stream = streams.get(response.agent)
    if stream is None or _fault(response) is not None:
        return response
    sample = next(stream, None)
    if sample is None or sample.group != (debate.instance, response.agent, response.turn):
        raise ValueError(f"the samples of {response.agent!r} are not those of these debates, or in another order")
    if sample.completion_ids is not response.token_ids and not np.array_equal(
        sample.completion_ids, response.token_ids if response.token_ids is not None else ()
    ):
        raise ValueError(f"a sample of {response.agent!r} has other token ids than its response")
    return replace(response, reward=sample.reward, advantage=sample.advantage, weight=sample.weight)


def _of(debates: Iterable[Debate], agent: str) -> Iterator[tuple[Debate, Response]]:
    for debate in debates:
        for response in debate.responses():
            if response.agent == agent:
                yield debate, response


def _fault(response: Response) -> str | None:
    """Why a response cannot be a sample, or None."""
    if response.finish_reason == "error":
        return "failed"
    if response.prompt_ids is None or response.token_ids is None:
        return "no ids"
    if len(response.token_ids) == 0:
        return "empty"
    if response.logprobs is None or len(response.logprobs) != len(response.token_ids):
        return "no logprobs"
    # a little above 0 is rounding in float32
    if not (np.isfinite(response.logprobs).all() and (response.logprobs <= 1e-4).all()):
        return "bad logprobs"
    return None


def _sample(debate: Debate, response: Response) -> Sample:
    assert response.prompt_ids is not None
    assert response.token_ids is not None
    assert response.logprobs is not None
    return Sample(
        agent=response.agent,
        group=(debate.instance, response.agent, response.turn),
        prompt_ids=response.prompt_ids,
        completion_ids=response.token_ids,
        logprobs=response.logprobs,
        reward=response.reward,
        truncated=response.truncated,
        weight_version=response.weight_version,
        nll=-float(np.mean(response.logprobs, dtype=np.float64)),
    )
