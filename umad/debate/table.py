"""What a protocol sees: seats to ask, a grader to ask, and `gather`. What things cost is counted here, for all alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TypeVar

from umad.debate.agents import Agent, Prompt, fit_prompt
from umad.debate.prompts import Message, Prompts
from umad.engines.base import Generation, Key, Request, response_seed
from umad.grading import Grade, GradeItem, vote
from umad.records import Cost, Decision, Problem, Response, Sampling
from umad.uncertainty.nll import mean_nll

T = TypeVar("T")

_depth: ContextVar[int] = ContextVar("depth", default=0)
"""How many calls, one after another, led to this point of a protocol."""


LOOSE = "s:"
"""Keys of answers without a canonical form begin so; they are merged where several stand beside each other."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a protocol returns for one rollout: its turns and its decision."""

    turns: tuple[tuple[Response, ...], ...]
    decision: Decision | None


async def gather(*parts: Awaitable[T]) -> list[T]:
    """Awaits all at once, in order. When one fails, the others still end before its exception is raised."""
    start = _depth.get()

    async def one(part: Awaitable[T]) -> tuple[T, int]:
        return await part, _depth.get()

    done = await asyncio.gather(*(one(part) for part in parts), return_exceptions=True)
    values: list[T] = []
    depth = start
    for result in done:
        if isinstance(result, BaseException):
            raise result
        values.append(result[0])
        depth = max(depth, result[1])
    _depth.set(depth)
    return values


@dataclass(eq=False)
class Table:
    """One debate in progress: its problem, who sits there, and the running counts (per rollout)."""

    problem: Problem
    instance: int
    occurrence: int
    agents: Sequence[Agent]
    prompts: Prompts
    sampling: Sampling
    seed_root: str
    generate: Callable[[Agent, Request], Awaitable[Generation]]
    grade: Callable[[GradeItem], Awaitable[Grade]]
    class_keys: Callable[[Sequence[str | None], str | None], list[str]]
    rollouts: tuple[int, ...] = (0,)
    costs: dict[int, Cost] = field(default_factory=dict)
    said: dict[int, list[Response]] = field(default_factory=dict)
    _calls: dict[tuple[int, int, str], int] = field(default_factory=dict)

    def seats(self) -> list[Seat]:
        return [Seat(self, agent) for agent in self.agents]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(agent.name for agent in self.agents)

    async def ask(
        self,
        agent: Agent,
        turn: int,
        shown: Sequence[Response],
        rollout: int,
        role: str | None,
        messages: Sequence[Message] | None,
    ) -> Response:
        """One call: prompt, generation, grade, count."""
        texts = self.prompts.shown(shown, self.names)
        prompt = (
            fit_prompt(agent, self.prompts, self.problem, texts, turn)
            if messages is None
            else Prompt(tuple(messages), agent.encode(messages))
        )
        call = self._calls.get((rollout, turn, agent.name), 0)
        self._calls[(rollout, turn, agent.name)] = call + 1
        key: Key = (self.instance, rollout, turn, agent.name, call)
        seed = response_seed(self.seed_root, self.problem.id, self.occurrence, key)
        depth = _depth.get() + 1
        generation = await self.generate(agent, Request(key, self.sampling, seed, prompt.ids, prompt.messages))
        _depth.set(depth)
        response = _response(agent, turn, prompt, generation)
        response = replace(
            response, role=role, saw=tuple((r.turn, r.agent) for r in sorted(shown, key=lambda r: (r.turn, r.agent)))
        )
        self._count(rollout, response, depth, sum(r.agent != agent.name for r in shown))
        response = with_grade(response, await self.grade(_item(self.problem, response.text)), self.problem)
        self.said.setdefault(rollout, []).append(response)
        return response

    def _count(self, rollout: int, response: Response, depth: int, messages: int) -> None:
        cost = self.costs.get(rollout, Cost())
        self.costs[rollout] = Cost(
            calls=cost.calls + 1,
            prompt_tokens=cost.prompt_tokens + response.prompt_tokens,
            completion_tokens=cost.completion_tokens + response.completion_tokens,
            messages=cost.messages + messages,
            depth=max(cost.depth, depth),
        )

    async def vote(self, responses: Sequence[Response], rollout: int | None = None, rule: str = "vote") -> Decision:
        """The majority class of `responses`: ties by the debate's seed, "no answer" never wins (see `grading.vote`)."""
        own = self.rollouts[0] if rollout is None else rollout
        key = (self.instance, own, -1, rule, 0)
        seed = response_seed(self.seed_root, self.problem.id, self.occurrence, key)
        answers, keys = [r.answer for r in responses], [r.key for r in responses]
        if any(r.key.startswith(LOOSE) for r in responses):
            keys = self.class_keys(answers, self.problem.kind)
        won = vote(answers, seed, keys=keys)
        if won is None:
            return Decision(None, False if self.problem.gold is not None else None, rule)
        # members of one class can differ in their verdict (25% against a gold of 0.25): the elected wording decides
        correct = next(
            r.correct for r, key in zip(responses, keys, strict=True) if (key, r.answer) == (won.key, won.answer)
        )
        return Decision(won.answer, correct, rule, won.key)


@dataclass(frozen=True, slots=True)
class Seat:
    """An agent at the table of one debate."""

    table: Table
    agent: Agent

    @property
    def name(self) -> str:
        return self.agent.name

    async def respond(
        self,
        turn: int,
        shown: Sequence[Response] = (),
        *,
        rollout: int | None = None,
        role: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
    ) -> Response:
        """Asks for one graded response. `shown` are the responses that the prompt quotes; `messages` replaces the
        usual prompt (then `shown` only says what was in it)."""
        own = self.table.rollouts[0] if rollout is None else rollout
        plain = None if messages is None else [dict(m) for m in messages]
        return await self.table.ask(self.agent, turn, shown, own, role, plain)


def _response(agent: Agent, turn: int, prompt: Prompt, generation: Generation) -> Response:
    ids = generation.token_ids
    text = generation.text if generation.text is not None else agent.decode(ids)
    logprobs = generation.logprobs
    nll = None
    if logprobs is not None and len(logprobs):
        nll = mean_nll(logprobs)
    prompt_tokens = len(prompt.ids) if prompt.ids is not None else generation.prompt_tokens or 0
    completion_tokens = len(ids) if ids is not None else generation.completion_tokens or 0
    return Response(
        agent=agent.name,
        turn=turn,
        text=text,
        finish_reason=generation.finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        nll=nll,
        weight_version=generation.weight_version,
        shortened=prompt.shortened,
        prompt_ids=prompt.ids,
        token_ids=ids,
        logprobs=logprobs,
        messages=prompt.messages,
    )


def _item(problem: Problem, text: str) -> GradeItem:
    # without a gold only the answer and its class are of use; `with_grade` drops the verdict
    gold = problem.gold or ""
    return GradeItem(
        (gold, *problem.required) if problem.required else gold,
        text,
        problem.kind,
        problem.alternatives,
        problem.choices,
    )


def with_grade(response: Response, grade: Grade, problem: Problem) -> Response:
    """The response with what the grader found; without a gold it has an answer and a class but no verdict."""
    correct = grade.equal if problem.gold is not None else None
    return replace(response, answer=grade.extracted, key=grade.key, correct=correct, status=grade.status)
