"""An engine that says what it is told: a function, a list, or a JSON lines file of replies. For tests and first steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umad.engines.base import Generation, GenerationError, Request
from umad.records import UserError, read_jsonl

if TYPE_CHECKING:
    import torch

Reply = str | Mapping[str, Any]
Script = Callable[[Request], Reply]


class ScriptedEngine:
    """`script` maps a request to a text, or to a mapping with `text` and any of `error` (this request fails with it),
    `delay` (seconds that it takes), `finish_reason`, `nll`.

    With a tokenizer the reply also has ids and log-probabilities (each token's is -nll, 1.0 by default), so that a
    scripted debate can go through the learner.
    """

    exact_logprobs = True

    def __init__(self, script: Script, tokenizer: Any = None) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.version = 0
        self._queue: list[Request] = []

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def pump(self) -> list[tuple[Request, Generation | Exception]]:
        queue, self._queue = self._queue, []
        return [(request, self._answer(request)) for request in queue]

    def _answer(self, request: Request) -> Generation | Exception:
        reply = self.script(request)
        fields: Mapping[str, Any] = {"text": reply} if isinstance(reply, str) else reply
        if delay := fields.get("delay"):
            time.sleep(float(delay))
        if error := fields.get("error"):
            return GenerationError(str(error))
        text = str(fields["text"])
        finish = str(fields.get("finish_reason", "stop"))
        if self.tokenizer is None:
            words = len(text.split())
            return Generation(finish, text=text, weight_version=self.version, completion_tokens=words)
        import numpy as np

        ids = list(self.tokenizer.encode(text, add_special_tokens=False))[: request.sampling.max_tokens]
        if finish == "stop" and len(ids) < request.sampling.max_tokens:
            ids.append(self.tokenizer.eos_token_id)
        nll = float(fields.get("nll", 1.0))
        if not math.isfinite(nll):
            return GenerationError(f"the script's nll is {nll}")
        logprobs = np.full(len(ids), -nll, dtype=np.float32)
        return Generation(finish, np.asarray(ids, dtype=np.int32), logprobs, text, self.version)

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for _ in weights:  # a generator may hold the trainer's lock until it is read
            pass
        self.version = version

    def sleep(self) -> None:
        """Nothing to give up."""

    def wake(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        self._queue.clear()


def script_from_file(path: str | Path) -> Script:
    """Replies from a JSON lines file. A row has `text` (and what `ScriptedEngine` knows) and any of the conditions
    `agent`, `turn`, `rollout`, `problem` (a part of the prompt); the first row whose conditions all hold is the reply.

    Raises:
        UserError: a row without `text` or `error`, or with an unknown key (file and line are named).
    """
    path = Path(path)
    conditions = ("agent", "turn", "rollout", "problem")
    known = {*conditions, "text", "error", "delay", "finish_reason", "nll"}
    rows = []
    for line, row in read_jsonl(path):
        if unknown := sorted(set(row) - known):
            raise UserError(f"{path}:{line}: unknown key {unknown[0]!r}; valid: {', '.join(sorted(known))}")
        if "text" not in row and "error" not in row:
            raise UserError(f"{path}:{line}: a reply needs 'text' or 'error'")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: holds no replies")

    def reply(request: Request) -> Reply:
        _, rollout, turn, agent, _ = request.key
        here: dict[str, Any] = {"agent": agent, "turn": turn, "rollout": rollout}
        prompt = request.messages[-1]["content"] if request.messages else ""
        for row in rows:
            exact = all(row[name] == here[name] for name in here if name in row)
            if exact and str(row.get("problem", "")) in prompt:
                return row
        return {"error": f"no reply in {path} for agent {agent!r} at turn {turn}"}

    return reply
