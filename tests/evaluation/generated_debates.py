"""Debates made up for these tests: answers are drawn by a seeded generator, no model involved."""

from __future__ import annotations

import numpy as np

from umad.records import Cost, Debate, Decision, Problem, Response

AGENTS = ("ann", "bob")


def problems(n):
    return [Problem(f"p{i}", f"question {i}", "0") for i in range(n)]


def response(agent, turn, answer, *, correct=None, finish="stop"):
    right = (answer == "0") if correct is None else correct
    key = "no-answer" if answer is None else answer
    return Response(agent, turn, f"so {answer}", answer=answer, key=key, correct=right, finish_reason=finish)


def debate(problem, answers, *, rollout=0, agents=AGENTS, sampling=None, decide=True):
    """answers[turn][agent]; the decision is the first agent's last answer."""
    turns = tuple(
        tuple(response(name, t, a) for name, a in zip(agents, turn, strict=True)) for t, turn in enumerate(answers)
    )
    last = answers[-1][0]
    return Debate(
        problem,
        "mad",
        agents,
        turns,
        rollout=rollout,
        seed=7,
        sampling=sampling or {},
        decision=Decision(last, last == "0", "vote") if decide else None,
        cost=Cost(
            calls=len(answers) * len(agents), prompt_tokens=10, completion_tokens=20, messages=2, depth=len(answers)
        ),
    )


def random_debate(rng, problem, rollout, turns, skill, agents=AGENTS, sampling=None):
    def answer():
        draw = rng.random()
        return "0" if draw < skill else None if draw > 0.95 else str(rng.integers(1, 4))

    answers = [[answer() for _ in agents] for _ in range(turns)]
    return debate(problem, answers, rollout=rollout, agents=agents, sampling=sampling)


def random_run(n, *, turns=2, skill=0.5, seed=0, rollouts=1, agents=AGENTS):
    rng = np.random.default_rng(seed)
    return [random_debate(rng, p, k, turns, skill, agents) for p in problems(n) for k in range(rollouts)]
