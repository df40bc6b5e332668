"""The driver: runs thousands of debates at once and batches what they ask.

Protocols run on an asyncio loop of their own. An in-process engine is fed when no coroutine can go on (the loop has
nothing ready): its requests, sorted, go in together, so what is in a batch does not depend on timing, and a run can be
repeated and resumed bit for bit. The loop tells us of that moment through its selector, which it asks for events only
when nothing is ready.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from umad.debate.agents import Agent
from umad.debate.prompts import Prompts
from umad.debate.table import LOOSE, Outcome, Table
from umad.engines.base import Generation, GenerationError, Request
from umad.records import Cost, Debate, Problem, Response, Sampling, UserError

if TYPE_CHECKING:
    from umad.debate.protocols import Protocol
    from umad.engines.base import Engine
    from umad.grading import Grade, GradeItem, Grader

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A debate to run: one rollout, or all rollouts of a group that share their context."""

    problem: Problem
    instance: int
    rollouts: tuple[int, ...] = (0,)
    occurrence: int = 0
    """How often the problem came earlier in the same batch."""


def jobs_for(problems: Sequence[Problem], rollouts: int, *, together: bool = False) -> list[Job]:
    """`rollouts` debates of each problem; `together`: as one job each (shared context)."""
    every = tuple(range(rollouts))
    groups = [every] if together else [(r,) for r in every]
    seen: Counter[str] = Counter()
    jobs = []
    for i, problem in enumerate(problems):
        jobs += [Job(problem, i, group, seen[problem.id]) for group in groups]
        seen[problem.id] += 1
    return jobs


@dataclass(eq=False)
class Driver:
    """Runs jobs with one set of agents, prompts and one grader.

    `on_response` is told of every request that is finished; it must not raise.
    `timings` collects the seconds spent in generation and grading.
    """

    agents: Sequence[Agent]
    prompts: Prompts
    grader: Grader
    on_response: Callable[[Request], None] | None = None
    timings: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "grade": 0.0})

    def run(
        self,
        jobs: Sequence[Job],
        protocol: Protocol,
        sampling: Sampling,
        seed: int,
        label: str,
        mode: str = "trajectory",
    ) -> list[Debate]:
        """Runs all jobs to their end and returns their debates in the order of the jobs (and rollouts).

        `seed` and `label` (the purpose, such as "train/12") decide every response's noise. A debate that fails is
        returned with its error; the rest go on. KeyboardInterrupt and UserError pass through.
        """
        names = [agent.name for agent in self.agents]
        if len(set(names)) != len(names):
            raise ValueError(f"agent names must differ: {', '.join(names)}")
        session = _Session(self)
        tables = [
            Table(
                problem=job.problem,
                instance=job.instance,
                occurrence=job.occurrence,
                agents=self.agents,
                prompts=self.prompts,
                sampling=sampling,
                seed_root=f"{seed}/{label}",
                generate=session.generate,
                grade=session.grade,
                class_keys=self.grader.class_keys,
                rollouts=job.rollouts,
            )
            for job in jobs
        ]

        async def everything() -> list[list[Debate]]:
            return await asyncio.gather(*(_finish(table, protocol, seed, mode) for table in tables))

        finished = _run_loop(everything, session)
        return _merge_classes([debate for group in finished for debate in group], self.grader)


def _merge_classes(debates: Sequence[Debate], grader: Grader) -> list[Debate]:
    """Answers without a canonical form get one key where math-verify finds them equal, over all debates of a problem."""
    loose = {d.problem.id for d in debates if any(r.key.startswith(LOOSE) for r in d.responses())}
    merged: dict[tuple[str, str | None], str] = {}
    for problem_id in sorted(loose):
        said = [(r.answer, d.problem.kind) for d in debates if d.problem.id == problem_id for r in d.responses()]
        answers = sorted({answer for answer, _ in said if answer is not None})
        merged |= {(problem_id, a): key for a, key in zip(answers, grader.class_keys(answers, said[0][1]), strict=True)}

    def keyed(debate: Debate) -> Debate:
        if debate.problem.id not in loose:
            return debate
        turns = tuple(
            tuple(replace(r, key=merged.get((debate.problem.id, r.answer), r.key)) for r in turn)
            for turn in debate.turns
        )
        return replace(debate, turns=turns)

    return [keyed(debate) for debate in debates]


async def _finish(table: Table, protocol: Protocol, seed: int, mode: str) -> list[Debate]:
    error = None
    outcomes: list[Outcome] = []
    try:
        outcomes = await protocol.run(table)
    except (UserError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except Exception as failure:  # one debate's failure is recorded with it; the others go on
        error = f"{type(failure).__name__}: {failure}"
    if error is None and len(outcomes) != len(table.rollouts):
        error = f"protocol {protocol.name!r} returned {len(outcomes)} outcomes for {len(table.rollouts)} rollouts"
    if error is not None:
        outcomes = [Outcome(_turns_so_far(table.said.get(r, [])), None) for r in table.rollouts]
    return [
        Debate(
            problem=table.problem,
            protocol=protocol.name,
            agents=table.names,
            turns=outcome.turns,
            rollout=rollout,
            instance=table.instance,
            seed=seed,
            sampling={"mode": mode, **table.sampling.to_row()},
            decision=outcome.decision,
            cost=table.costs.get(rollout, Cost()),
            error=error,
        )
        for rollout, outcome in zip(table.rollouts, outcomes, strict=True)
    ]


def _turns_so_far(said: Sequence[Response]) -> tuple[tuple[Response, ...], ...]:
    count = max((r.turn for r in said), default=-1) + 1
    return tuple(tuple(r for r in said if r.turn == turn) for turn in range(count))


class _Session:
    """The requests of one `Driver.run` and their futures."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.waiting: dict[int, list[Request]] = {}
        self.engines: dict[int, Engine] = {}
        self.futures: dict[int, asyncio.Future[Generation]] = {}
        """By identity of the request: an engine may still hold requests of an earlier run that was interrupted."""
        self.requests: dict[tuple[Any, ...], Request] = {}
        self.grading: list[tuple[GradeItem, asyncio.Future[Grade]]] = []
        self.running: dict[int, int] = {}
        self.failure: BaseException | None = None

    async def generate(self, agent: Agent, request: Request) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if request.key in self.requests:
            raise ValueError(f"two requests with the same key {request.key}")
        self.requests[request.key] = request
        self.futures[id(request)] = future
        self.engines[id(agent.engine)] = agent.engine
        self.waiting.setdefault(id(agent.engine), []).append(request)
        return await future

    async def grade(self, item: GradeItem) -> Grade:
        future: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        self.grading.append((item, future))
        return await future

    def idle(self) -> bool:
        """No coroutine can go on: grade what waits, else generate. False when there is nothing to do."""
        if self.grading:
            self._grade()
            return True
        if not self.waiting and not any(self.running.values()):
            return False
        self._generate()
        return True

    def _grade(self) -> None:
        batch, self.grading = self.grading, []
        with _timed(self.driver.timings, "grade"):
            grades = self.driver.grader.grade([item for item, _ in batch])
        for (_, future), grade in zip(batch, grades, strict=True):
            if not future.done():
                future.set_result(grade)

    def _generate(self) -> None:
        waiting, self.waiting = self.waiting, {}
        with _timed(self.driver.timings, "generate"):
            for place, requests in waiting.items():
                for request in sorted(requests, key=lambda r: r.key):
                    self._submit(place, request)
            finished = [
                (place, result)
                for place, engine in self.engines.items()
                if self.running.get(place)
                for result in engine.pump()
            ]
        for place, (request, outcome) in finished:
            if id(request) in self.futures:
                self.running[place] -= 1
                self._resolve(request, outcome)

    def _submit(self, place: int, request: Request) -> None:
        try:
            self.engines[place].submit(request)
        except GenerationError as error:
            self._resolve(request, error)
        else:
            self.running[place] = self.running.get(place, 0) + 1

    def _resolve(self, request: Request, outcome: Generation | Exception) -> None:
        future = self.futures.pop(id(request))
        del self.requests[request.key]
        if self.driver.on_response:
            self.driver.on_response(request)
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[name] = timings.get(name, 0.0) + time.perf_counter() - start


class _QuiescenceSelector(selectors.DefaultSelector):
    """A selector that works off the session's requests at the moments when the loop has nothing else to do."""

    def __init__(self, session: _Session) -> None:
        super().__init__()
        self.session = session

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        nothing_ready = timeout is None or timeout > 0
        if nothing_ready and self.session.failure is None:
            try:
                if self.session.idle():
                    timeout = 0
            except BaseException as failure:  # raised again in the thread that called `run`
                self.session.failure = failure
                raise
        return super().select(timeout)


def _run_loop(main: Callable[[], Any], session: _Session) -> Any:
    """Runs `main` on a loop of its own; in another thread when this one already runs a loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(main, session)
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(_run_here(main, session))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="umad-driver")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _run_here(main: Callable[[], Any], session: _Session) -> Any:
    loop = asyncio.SelectorEventLoop(_QuiescenceSelector(session))
    try:
        return loop.run_until_complete(main())
    finally:
        # after a failure or Ctrl-C the debates in progress are dropped without another word
        for task in asyncio.all_tasks(loop):
            task.cancel()
        session.failure = session.failure or KeyboardInterrupt()
        loop.run_until_complete(_settle(loop))
        loop.close()


async def _settle(loop: asyncio.AbstractEventLoop) -> None:
    others = [t for t in asyncio.all_tasks(loop) if t is not asyncio.current_task()]
    if others:
        await asyncio.gather(*others, return_exceptions=True)
