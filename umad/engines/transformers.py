"""The `transformers` engine: batched decoding of any causal language model in this process.

`generate` draws one stream of noise per batch and waits for the longest row; this loop gives every response its own
noise, drops finished rows, refills from the queue, and computes a prompt that several requests share once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from umad.engines.adapters import is_adapted, is_adapter_name
from umad.engines.architecture import Architecture
from umad.engines.base import Generation, GenerationError, Request
from umad.engines.kv import KVRows
from umad.engines.models import check_ids, context_length
from umad.engines.noise import stream, uniforms
from umad.engines.sampling import SamplingPlan, sample
from umad.engines.weights import copy_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = 16384
"""Most tokens (padding included) of one prefill pass."""


class TransformersEngine:
    """Generates with `model`, which from here on is the engine's own: nobody else may train or move it.

    Args:
        model: a causal language model with an ordinary key-value cache, on its device, in its type. One with an adapter
            (`umad.learning.adapters`) may share its base's tensors with others; only the adapter is pushed then, and the
            base stays in memory while the engine sleeps.
        stop_ids: tokens that end a response (`umad.engines.models.stop_ids`); they are part of it.
        max_batch: most responses decoded at once.
        max_context: most tokens of prompt and response together; by default what the model was made for.

    A response depends on the weights, its prompt, sampling and seed; float32 rounding apart, never on its neighbours.
    Interrupted at any moment (Ctrl-C, out of memory), the engine starts the responses in work again at the next `pump`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Sequence[int],
        *,
        max_batch: int = 128,
        max_context: int | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        self.model = model.eval().requires_grad_(False)
        self._adapted = is_adapted(model)
        longest = context_length(model)
        self.max_context = min(max_context or longest, longest)
        self.architecture = Architecture.of(model, self.max_context)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        check_ids(stop_ids, self.vocabulary, "stop ids")
        self.max_batch = max_batch
        self.version = 0
        self.exact_logprobs = model.dtype == torch.float32
        self._state = "ready"
        self._stops = np.zeros(self.vocabulary, dtype=bool)
        self._stops[list(stop_ids)] = True
        self._waiting: list[Request] = []
        self._sorted = True
        self._done: list[tuple[Request, Generation | Exception]] = []
        """Finished or refused, not yet handed out."""
        self._batch = _Batch(max_batch)
        self._kv = KVRows(self.architecture.layers, max_batch, self.architecture.own_attention)
        self._plan: SamplingPlan | None = None
        self.architecture.verify(model, self._kv)

    # ------------------------------------------------------------------ the engine's interface

    def submit(self, request: Request) -> None:
        self._require_ready()
        error = self._fault(request)
        if error is not None:
            self._done.append((request, error))
            return
        self._waiting.append(request)
        self._sorted = False

    @torch.inference_mode()
    def pump(self) -> list[tuple[Request, Generation | Exception]]:
        self._require_ready()
        try:
            while not self._done and (self._waiting or self._batch.n):
                self._admit()
                self._step()
        except BaseException:
            self._restart()
            raise
        if not self._batch.n:
            self._kv.clear()
        done, self._done = self._done, []
        return done

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self._state in ("asleep", "closed"):
            raise RuntimeError(f"the engine is {self._state}; wake it before pushing weights")
        self._restart()  # what is in work was begun with other weights
        self._state = "left with half of a failed push's weights"
        copy_weights(self.model, weights)
        self.version = version
        self._state = "ready"

    def sleep(self) -> None:
        if self._state == "closed":
            raise RuntimeError("the engine is closed")
        if self._state == "asleep":
            return
        self._restart()
        pushed = {name: p for name, p in self.model.named_parameters() if not self._adapted or is_adapter_name(name)}
        self._shapes = {name: parameter.shape for name, parameter in pushed.items()}
        for parameter in pushed.values():
            parameter.data = parameter.data.new_empty(0)
        self._state = "asleep"

    def wake(self) -> None:
        if self._state != "asleep":
            return
        parameters = dict(self.model.named_parameters())
        for name, shape in self._shapes.items():
            parameters[name].data = parameters[name].data.new_empty(shape)
        self._state = "awake without weights"

    def close(self) -> None:
        if self._state == "closed":
            return
        self._restart()
        self._waiting.clear()
        self._done.clear()
        del self.model
        self._state = "closed"

    # ------------------------------------------------------------------ requests

    def _require_ready(self) -> None:
        if self._state != "ready":
            raise RuntimeError(f"the engine is {self._state}; it can generate only after a push")

    def _fault(self, request: Request) -> GenerationError | None:
        ids = request.prompt_ids
        if ids is None or len(ids) == 0:
            return GenerationError(f"request {request.key} has an empty prompt")
        if len(ids) >= self.max_context:
            return GenerationError(
                f"request {request.key} has a prompt of {len(ids)} tokens, which leaves no room for a response in a "
                f"context of {self.max_context}"
            )
        try:
            check_ids(ids, self.vocabulary, f"the prompt of request {request.key}")
        except ValueError as error:
            return GenerationError(str(error))
        return None

    def _restart(self) -> None:
        """Puts responses in work back into the queue. They come out the same, as their noise is theirs alone."""
        # An interrupt may fall between taking a request over and letting go of it, so it may stand in two places.
        done = {id(request) for request, _ in self._done}
        open_ = {id(request): request for request in (*self._waiting, *self._batch.requests)}
        self._waiting = [request for key, request in open_.items() if key not in done]
        self._sorted = False
        self._batch.clear()
        self._kv.clear()
        self._plan = None

    # ------------------------------------------------------------------ decoding

    def _admit(self) -> None:
        """Fills free rows from the queue; not one by one, since every prefill is a pass of its own."""
        free = self.max_batch - self._batch.n
        enough = min(len(self._waiting), max(1, self.max_batch // 8))
        if not self._waiting or (self._batch.n and free < enough):
            return
        if not self._sorted:
            # Longest prompts first keeps rows of like length together; a group's members stay neighbours.
            # Taken from the end, so in reverse.
            self._waiting.sort(key=lambda request: (-len(_ids(request)), request.key), reverse=True)
            self._sorted = True
        taken = self._waiting[: -free - 1 : -1]
        for chunk in _chunks(taken, PREFILL_TOKENS):
            self._prefill(chunk)
            self._batch.add(chunk, self.max_context)
            del self._waiting[-len(chunk) :]
        self._plan = None

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Computes keys and values of all but the last prompt token, which the next step takes with everyone's."""
        prompts = [_ids(request)[:-1] for request in requests]
        unique: dict[bytes, int] = {}
        sources = [unique.setdefault(prompt.tobytes(), len(unique)) for prompt in prompts]
        width = max(map(len, prompts))
        if width == 0:
            self._kv.append(None, None, len(requests), 0)
            return
        padded = np.zeros((len(unique), width), dtype=np.int64)
        for source, prompt in zip(sources, prompts, strict=True):
            padded[source, : len(prompt)] = prompt
        device = self.model.device
        prefix = self.architecture.prefill(self.model, torch.from_numpy(padded).to(device))
        index = None if len(unique) == len(requests) else torch.tensor(sources, device=device)
        self._kv.append(prefix, index, len(requests), width)

    def _step(self) -> None:
        """One token for every row; finished rows move to `_done`."""
        batch, device = self._batch, self.model.device
        n = batch.n
        if self._plan is None:
            self._plan = SamplingPlan.of([r.sampling for r in batch.requests], self.vocabulary, device)
        noise = torch.from_numpy(uniforms(batch.streams[:n], batch.counts[:n])).to(device)
        logits = self.architecture.step(self.model, self._kv, batch.pending[:n], batch.lengths[:n])
        tokens, chosen = sample(logits, self._plan, noise)
        logprobs = chosen.cpu().numpy()
        finished = batch.record(tokens.cpu().numpy(), logprobs, self._stops)
        if not len(finished):
            return
        self._done += [(batch.requests[row], batch.result(row, self._stops, self.version)) for row in finished.tolist()]
        failed = np.flatnonzero(~np.isfinite(logprobs))
        if len(failed):
            self._kv.scrub(torch.from_numpy(failed).to(device))
        width = int(batch.lengths[:n].max())
        holes, movers = batch.drop(finished)
        self._kv.replace(torch.from_numpy(holes).to(device), torch.from_numpy(movers).to(device), batch.n, width)
        if not self._plan.uniform:
            self._plan = None


class _Batch:
    """The rows in work, as arrays [max_batch]; the first `n` count."""

    def __init__(self, size: int) -> None:
        self.requests: list[Request] = []
        self.pending = np.zeros(size, dtype=np.int64)
        """The token whose keys and values the next step adds."""
        self.lengths = np.zeros(size, dtype=np.int64)
        """Tokens in the key-value cache."""
        self.counts = np.zeros(size, dtype=np.int64)
        """Tokens sampled."""
        self.limits = np.zeros(size, dtype=np.int64)
        """Most tokens that may be sampled: max_tokens, or what the context leaves."""
        self.streams = np.zeros(size, dtype=np.uint64)
        self.tokens = np.zeros((size, 64), dtype=np.int32)
        self.logprobs = np.zeros((size, 64), dtype=np.float32)

    @property
    def n(self) -> int:
        return len(self.requests)

    def clear(self) -> None:
        self.requests = []

    def add(self, requests: Sequence[Request], max_context: int) -> None:
        for row, request in enumerate(requests, self.n):
            ids = _ids(request)
            self.pending[row] = ids[-1]
            self.lengths[row] = len(ids) - 1
            self.counts[row] = 0
            self.limits[row] = min(request.sampling.max_tokens, max_context - len(ids))
            self.streams[row] = stream(request.seed)
        self.requests = [*self.requests, *requests]

    def record(self, tokens: np.ndarray, logprobs: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Takes what was sampled, [n] each; returns the rows that are finished. A row without a finite log-probability
        ends there, as a failure."""
        n = self.n
        rows, counts = np.arange(n), self.counts[:n]
        if counts.max() >= self.tokens.shape[1]:
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)], axis=1)
            self.logprobs = np.concatenate([self.logprobs, np.zeros_like(self.logprobs)], axis=1)
        self.tokens[rows, counts] = tokens
        self.logprobs[rows, counts] = logprobs
        self.pending[:n] = tokens
        self.lengths[:n] += 1
        counts += 1
        return np.flatnonzero(stops[tokens] | (counts >= self.limits[:n]) | ~np.isfinite(logprobs))

    def result(self, row: int, stops: np.ndarray, version: int) -> Generation | Exception:
        request, count = self.requests[row], int(self.counts[row])
        tokens, logprobs = self.tokens[row, :count].copy(), self.logprobs[row, :count].copy()
        if not np.isfinite(logprobs[-1]):
            return GenerationError(f"request {request.key}: the model's logits are not finite at token {count - 1}")
        if stops[tokens[-1]]:
            reason = "stop"
        else:
            reason = "length" if count == request.sampling.max_tokens else "context"
        return Generation(reason, tokens, logprobs, None, version, len(_ids(request)), count)

    def drop(self, finished: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Removes rows; returns which places (holes) the last rows (movers) took."""
        n = self.n
        left = n - len(finished)
        holes = finished[finished < left]
        movers = np.setdiff1d(np.arange(left, n), finished, assume_unique=True)
        for array in (
            *(self.pending, self.lengths, self.counts, self.limits, self.streams),
            *(self.tokens, self.logprobs),
        ):
            array[holes] = array[movers]
        requests = list(self.requests)
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            requests[hole] = requests[mover]
        self.requests = requests[:left]
        return holes, movers


def _ids(request: Request) -> Any:
    return request.prompt_ids


def _chunks(requests: Sequence[Request], tokens: int) -> Iterable[list[Request]]:
    """Parts whose different prompts, padded to the longest, stay within `tokens`; at least one request each."""
    chunk: list[Request] = []
    seen: set[bytes] = set()
    width = 0
    for request in requests:
        key, length = _ids(request).tobytes(), len(_ids(request))
        more = len(seen | {key})
        if chunk and more * max(width, length) > tokens:
            yield chunk
            chunk, seen, width = [], set(), 0
        chunk.append(request)
        seen.add(key)
        width = max(width, length)
    if chunk:
        yield chunk
