"""What the tiny agents are taught with: generated sums, rendered by the project's own prompts, with worked solutions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from umad.debate.prompts import Prompts
from umad.records import Problem, Response
from umad.tasks import arithmetic

if TYPE_CHECKING:
    import torch

PEERS = ("A", "B")
FLAWED = 0.5
"""Share of flawed solutions among those that a debate turn shows."""

Lesson = tuple[list[int], list[int]]
"""Prompt ids and the ids of the right response, its end-of-sequence token included."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """ids: int64 [B, L], right-padded with 0; target: bool [B, L], true where a token belongs to a response."""

    ids: torch.Tensor
    target: torch.Tensor


class Teacher:
    """Draws lessons: first turns, and debate turns that show two solutions, each flawed or not."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prompts = Prompts(style="compact", mask_answers=True)

    def lesson(self, problem: Problem, debate: bool, rng: random.Random) -> Lesson:
        expression = problem.question.removesuffix("=?")
        messages = self._prompts.first(problem)
        if debate:
            shown = [Response(name, 0, self._peer(expression, rng)) for name in PEERS]
            messages = self._prompts.debate(problem, self._prompts.shown(shown, PEERS))
        prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        response = arithmetic.solution(expression) + self._tokenizer.eos_token
        return self._encode(prompt), self._encode(response)

    def _peer(self, expression: str, rng: random.Random) -> str:
        if rng.random() < FLAWED:
            return arithmetic.flawed_solution(expression, rng)
        return arithmetic.solution(expression)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def collate(lessons: list[Lesson]) -> Batch:
    import torch

    length = max(len(prompt) + len(response) for prompt, response in lessons)
    ids = torch.zeros(len(lessons), length, dtype=torch.long)
    target = torch.zeros(len(lessons), length, dtype=torch.bool)
    for i, (prompt, response) in enumerate(lessons):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        target[i, len(prompt) : end] = True
    return Batch(ids, target)
