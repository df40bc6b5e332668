"""What an engine is: token ids in, token ids and log-probabilities out. It knows nothing of debates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from umad.records import Sampling

if TYPE_CHECKING:
    import numpy as np
    import torch

Key = tuple[int, int, int, str, int]
"""(problem instance, rollout, turn, agent, call): names one response, and sorts requests."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One response to generate.

    `prompt_ids` (int32 [P]) is the whole prompt, special tokens included; nothing is added to it. Engines that take no ids
    (`scripted`, `http`) read `messages`. `seed` alone decides the noise of this response, whatever else is in the batch.
    """

    key: Key
    sampling: Sampling
    seed: int
    prompt_ids: np.ndarray | None = None
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What came back.

    token_ids: int32 [C], as sampled, the end-of-sequence token included where the model wrote it. logprobs: float32 [C],
    under the distribution that was sampled from (logits / temperature, then top-k and top-p renormalised); for greedy
    decoding (temperature 0) under the unscaled softmax. Both None for engines that don't know them; `text` is then given.
    """

    finish_reason: str
    token_ids: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    text: str | None = None
    weight_version: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class GenerationError(RuntimeError):
    """One request failed for good; the others go on."""


class Engine(Protocol):
    """An engine holds one agent's model. It never assumes its process: weights arrive by `push` only."""

    exact_logprobs: bool
    """Whether `Generation.logprobs` are those of the model that training updates."""
    version: int
    """Of the weights that it has: what the last push gave."""

    def submit(self, request: Request) -> None:
        """Takes a request; nothing is computed yet."""

    def pump(self) -> list[tuple[Request, Generation | Exception]]:
        """Works until at least one request is finished, and returns the finished ones; empty only when none is left."""

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes new weights (names as in the model's state dict) and drops every cached prefix."""

    def sleep(self) -> None:
        """Gives up device memory, weights included: a `push` must follow `wake`."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


def response_seed(root: str, problem_id: str, occurrence: int, key: Key) -> int:
    """The 63-bit seed of one response.

    `root` names the run's seed and the purpose ("0/train/12"), so the same problem gets other noise at another step. The
    agent goes in by name: agents that share a base, and the members of a group, never share noise. `occurrence` counts the
    same problem's earlier places in the batch; the place itself does not matter, so another selection or order of problems
    leaves a problem's noise as it was.
    """
    _, rollout, turn, agent, call = key
    text = "\x1f".join((root, problem_id, str(occurrence), str(rollout), str(turn), agent, str(call)))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") >> 1
