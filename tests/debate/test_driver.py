"""The driver on scripted agents: batching, order, failures, cost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from umad.debate.agents import Agent
from umad.debate.driver import Driver, jobs_for
from umad.debate.prompts import Prompts
from umad.debate.protocols import load_protocol
from umad.engines.base import Request
from umad.engines.scripted import ScriptedEngine
from umad.grading import Grader
from umad.records import Debate, Problem, Sampling, UserError

PROBLEMS = [Problem(f"p{i}", f"{i}+{i}=?", str(2 * i)) for i in range(5)]
SAMPLING = Sampling(max_tokens=32)


def boxed(value: object) -> str:
    return rf"\boxed{{{value}}}"


def driver_of(scripts: dict[str, Any], **more: Any) -> Driver:
    agents = [Agent(name, ScriptedEngine(script)) for name, script in scripts.items()]
    return Driver(agents, Prompts("compact"), Grader(), **more)


def run(
    driver: Driver, protocol: str = "mad", rollouts: int = 1, turns: int | None = None, **more: Any
) -> list[Debate]:
    settings = {k: v for k, v in more.items() if k == "samples"}
    together = more.get("together", False)
    mode = "shared_context" if together else "trajectory"
    jobs = jobs_for(PROBLEMS, rollouts, together=together)
    return driver.run(jobs, load_protocol(protocol, turns, settings), SAMPLING, 0, "test", mode)


def test_all_speak_once_per_turn_and_read_the_previous_turn_only() -> None:
    prompts: dict[tuple[int, int, str], str] = {}

    def script(request: Request) -> str:
        instance, _, turn, agent, _ = request.key
        prompts[(instance, turn, agent)] = request.messages[-1]["content"]
        return f"{agent} at {turn} {boxed(turn)}"

    debates = run(driver_of({"a": script, "b": script}), turns=3)
    assert [len(d.turns) for d in debates] == [3] * 5
    assert [r.agent for r in debates[0].turns[2]] == ["a", "b"]
    assert prompts[(0, 0, "a")] == PROBLEMS[0].question
    assert prompts[(0, 2, "a")] == prompts[(0, 2, "b")]
    assert "a at 1" in prompts[(0, 2, "a")]
    assert "b at 1" in prompts[(0, 2, "a")]
    assert "at 0" not in prompts[(0, 2, "a")]
    assert debates[0].turns[2][0].saw == ((1, "a"), (1, "b"))


def test_one_failing_agent_is_recorded_and_the_rest_go_on() -> None:
    def failing(request: Request) -> Any:
        if request.key[0] == 2 and request.key[2] == 1:
            return {"error": "out of order"}
        return boxed(4)

    def slow(request: Request) -> Any:
        return {"text": boxed(2), "delay": 0.002}

    debates = run(driver_of({"slow": slow, "failing": failing}))
    assert [d.error for d in debates] == [None, None, "GenerationError: out of order", None, None]
    broken = debates[2]
    assert [len(turn) for turn in broken.turns] == [2, 1]  # what was said before is kept
    assert broken.decision is None
    assert broken.cost.calls == 3
    assert debates[1].turns[1][0].correct is True


def test_engines_get_whole_turns_at_once_and_sorted() -> None:
    batches: list[list[tuple[Any, ...]]] = []

    class Recording(ScriptedEngine):
        def pump(self) -> Any:
            batches.append([r.key for r in self._queue])
            return super().pump()

    engine = Recording(lambda r: boxed(1))
    agents = [Agent("a", engine), Agent("b", ScriptedEngine(lambda r: boxed(1)))]
    Driver(agents, Prompts("compact"), Grader()).run(jobs_for(PROBLEMS, 3), load_protocol("mad"), SAMPLING, 0, "test")
    assert [len(batch) for batch in batches] == [15, 15]
    assert all(batch == sorted(batch) for batch in batches)


def test_cost_counts_calls_messages_and_depth() -> None:
    two = {"a": lambda r: boxed(1), "b": lambda r: boxed(2)}
    cost = run(driver_of(two), turns=3)[0].cost
    assert (cost.calls, cost.messages, cost.depth) == (6, 4, 3)
    cost = run(driver_of(two), "single")[0].cost
    assert (cost.calls, cost.messages, cost.depth) == (2, 0, 1)
    cost = run(driver_of(two), "consistency", samples=4)[0].cost
    assert (cost.calls, cost.messages, cost.depth) == (8, 0, 1)


def test_consistency_elects_the_most_frequent_class() -> None:
    answers = iter(["1/2", "0.5", "3"] * 5)
    debates = run(driver_of({"a": lambda r: boxed(next(answers))}), "consistency", samples=3)
    assert all(d.decision is not None and d.decision.answer in ("1/2", "0.5") for d in debates)


def test_seeds_differ_per_response_and_repeat_per_run() -> None:
    def seeds(**more: Any) -> list[int]:
        seen: list[tuple[Any, int]] = []

        def script(request: Request) -> str:
            seen.append((request.key, request.seed))
            return boxed(1)

        run(driver_of({"a": script, "b": script}), rollouts=3, **more)
        return [seed for _, seed in sorted(seen)]

    first = seeds()
    assert len(set(first)) == len(first) == 5 * 3 * 2 * 2
    assert first == seeds()


def test_shared_context_shows_only_the_first_rollout() -> None:
    prompts: dict[tuple[int, int, int], str] = {}

    def script(request: Request) -> str:
        instance, rollout, turn, _, _ = request.key
        prompts[(instance, rollout, turn)] = request.messages[-1]["content"]
        return f"{rollout}:{turn} {boxed(rollout)}"

    debates = run(driver_of({"a": script, "b": script}), rollouts=3, together=True)
    assert len(debates) == 15
    assert [d.rollout for d in debates[:3]] == [0, 1, 2]
    assert len({prompts[(0, rollout, 1)] for rollout in range(3)}) == 1
    assert "0:0" in prompts[(0, 2, 1)]
    assert debates[2].cost.calls == 4


def test_a_user_error_or_interrupt_in_an_engine_ends_the_run() -> None:
    def interrupted(request: Request) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(driver_of({"a": interrupted}))


def test_runs_inside_a_running_event_loop() -> None:
    async def notebook() -> list[Debate]:
        return run(driver_of({"a": lambda r: boxed(1)}))

    assert len(asyncio.run(notebook())) == 5


def test_two_thousand_debates_at_once_take_seconds() -> None:
    driver = driver_of({"a": lambda r: boxed(1), "b": lambda r: boxed(2)})
    problems = [Problem(f"p{i}", "1+0=?", "1") for i in range(2000)]
    start = time.process_time()
    debates = driver.run(jobs_for(problems, 1), load_protocol("mad", 5), SAMPLING, 0, "test")
    assert len(debates) == 2000
    assert time.process_time() - start < 15


def test_a_problems_alternatives_required_answers_and_choices_reach_the_grader() -> None:
    problems = [
        Problem("roots", "x^2=4", "2", required=("-2",)),
        Problem("one", "1/2?", "1/2", alternatives=("7",)),
        Problem("which", "A or B?", "B", kind="choice", choices=("red", "blue")),
    ]
    texts = {"roots": [boxed("2, -2"), boxed(2)], "one": [boxed(7), boxed(8)], "which": ["blue", "red"]}

    def script(request: Request) -> str:
        instance, rollout, *_ = request.key
        return texts[problems[instance].id][rollout]

    debates = driver_of({"a": script}).run(jobs_for(problems, 2), load_protocol("single"), SAMPLING, 0, "test")
    assert [d.turns[0][0].correct for d in debates] == [True, False] * 3


def test_turns_given_twice_are_refused() -> None:
    with pytest.raises(UserError, match=r"debate\.settings\.turns"):
        load_protocol("mad", 2, {"turns": 3})


def test_an_engine_that_was_interrupted_can_be_used_again() -> None:
    class Stubborn(ScriptedEngine):
        stop = True

        def pump(self) -> Any:
            if self.stop:
                self.stop = False
                raise KeyboardInterrupt
            return super().pump()

    driver = Driver([Agent("a", Stubborn(lambda r: boxed(r.key[2])))], Prompts("compact"), Grader())
    with pytest.raises(KeyboardInterrupt):
        driver.run(jobs_for(PROBLEMS, 1), load_protocol("mad"), SAMPLING, 0, "first")
    debates = driver.run(jobs_for(PROBLEMS, 1), load_protocol("mad"), SAMPLING, 0, "second")
    assert [d.error for d in debates] == [None] * 5


def test_the_noise_of_a_problem_does_not_depend_on_its_place_in_the_batch() -> None:
    seeds: dict[str, set[int]] = {}

    def script(request: Request) -> str:
        seeds.setdefault(request.messages[-1]["content"], set()).add(request.seed)
        return boxed(1)

    driver = driver_of({"a": script})
    for problems in (PROBLEMS, PROBLEMS[::-1], PROBLEMS[3:]):
        driver.run(jobs_for(problems, 1), load_protocol("single"), SAMPLING, 0, "test")
    assert all(len(found) == 1 for found in seeds.values())
    driver.run(jobs_for([PROBLEMS[0]] * 2, 1), load_protocol("single"), SAMPLING, 0, "test")
    assert len(seeds[PROBLEMS[0].question]) == 2


def test_ties_are_drawn_anew_for_every_rollout() -> None:
    debates = run(driver_of({"a": lambda r: boxed(1), "b": lambda r: boxed(2)}), rollouts=16)
    for i in range(5):
        elected = {d.decision.answer for d in debates if d.decision and d.instance == i}
        assert elected == {"1", "2"}


def test_answers_without_a_canonical_form_are_one_class_where_math_verify_finds_them_equal() -> None:
    texts = {"a": boxed(r"\int_0^1 2x dx"), "b": boxed(r"\int_0^1 (x+x) dx"), "c": boxed(r"\int_0^1 5x dx")}
    scripts = {name: (lambda r, text=text: text) for name, text in texts.items()}
    driver = driver_of(scripts)
    problem = Problem("integral", "?", "1")
    debate = driver.run(jobs_for([problem], 1), load_protocol("single"), SAMPLING, 0, "test")[0]
    a, b, c = (r.key for r in debate.turns[0])
    assert a == b != c
    assert debate.decision is not None
    assert debate.decision.answer in (r"\int_0^1 2x dx", r"\int_0^1 (x+x) dx")
