"""Rewards: what each response is worth, from the grades of one debate. `None` (not known, not applicable) is never 0.

A response's reward is the sum of its parts, each already times its weight: `correct`, `influence` (Eq. 5), `format`,
`overlong` and the user's own functions. A part that does not apply is absent. A response that was not graded has no
reward at all, and neither has one for which a user's function failed: such responses reach neither baseline nor loss.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from umad.config import OverlongConfig, RewardConfig, RewardFunctionConfig
from umad.grading import extract
from umad.records import Debate, Response, UserError

log = logging.getLogger(__name__)

Grade = float | None
"""1 right, 0 wrong, None not graded (or no such response)."""


def influence(
    before: Sequence[Grade],
    after: Sequence[Grade],
    eta: float,
    form: Literal["linear", "sign"] = "linear",
    source: Literal["peer", "team"] = "peer",
    saw: Sequence[Sequence[bool]] | None = None,
) -> list[float | None]:
    """Eq. 5 of arXiv 2603.01221 for all N agents of one turn: r_eu(i) = eta/(N-1) * sum over peers j of [R_j' - R_j].

    `before` and `after` are the agents' own 0/1 grades at turns t and t+1, in one order. `saw[j][i]`: j's answer at t+1
    was given after seeing i's of turn t (None: everybody saw everybody). A peer that did not see it, or whose grade is
    None at either turn, drops out of the sum and of the count N-1. Nobody left (N = 1 included): None, not applicable.

    `sign` gives eta times the sign of the sum. `team` sums over the speaker itself too (the authors' released code is
    sign + team); it still needs a peer that saw the speaker.
    """
    n = len(before)
    if len(after) != n:
        raise ValueError(f"{n} grades at one turn and {len(after)} at the next")
    changes = [None if b is None or a is None else a - b for b, a in zip(before, after, strict=True)]
    result: list[float | None] = []
    for i in range(n):
        counted = [c for j, c in enumerate(changes) if j != i and c is not None and (saw is None or saw[j][i])]
        if not counted:
            result.append(None)
            continue
        own = changes[i]
        if source == "team" and own is not None:
            counted.append(own)
        total = math.fsum(counted)
        result.append(eta * (total / len(counted) if form == "linear" else float((total > 0) - (total < 0))))
    return result


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), in [-1, 0]; lengths in tokens.

    0 up to `max_tokens - buffer`, then falling in a straight line to -1 at `max_tokens`.
    """
    free = max_tokens - buffer
    return 0.0 if length <= free else max(-1.0, (free - length) / buffer)


def reward_debate(debate: Debate, config: RewardConfig, functions: Sequence[RewardFunction] | None = None) -> Debate:
    """A copy of `debate` whose responses carry `reward` and its `parts`.

    `functions`: the user's, as `load_functions(config)` made them; pass the same list at every call, so that a fault is
    named once only.
    """
    functions = load_functions(config) if functions is None else functions
    credit = _credit(debate, config)
    helped = _influence(debate, config)
    turns = []
    for t, turn in enumerate(debate.turns):
        rewarded = []
        for response in turn:
            parts = _parts(debate, response, t, config, credit, helped, functions)
            reward = None if parts is None else math.fsum(parts.values())
            rewarded.append(replace(response, reward=reward, parts=parts or {}))
        turns.append(tuple(rewarded))
    return replace(debate, turns=tuple(turns))


def _parts(
    debate: Debate,
    response: Response,
    turn: int,
    config: RewardConfig,
    credit: Callable[[Response, int], Grade],
    helped: dict[tuple[int, str], float],
    functions: Sequence[RewardFunction],
) -> dict[str, float] | None:
    correct = credit(response, turn)
    if response.correct is None or correct is None:
        return None
    parts = {"correct": config.correctness * correct}
    if (turn, response.agent) in helped:
        parts["influence"] = helped[turn, response.agent]
    if config.format:
        parts["format"] = config.format * float(has_boxed_answer(response, debate.problem.kind))
    if config.overlong.weight:
        parts["overlong"] = config.overlong.weight * _overlong(debate, response, config.overlong)
    for function in functions:
        value, failed = function(debate, response.agent, turn)
        if failed:
            return None
        if value is not None:
            parts[function.name] = function.weight * value
    return parts


def has_boxed_answer(response: Response, kind: str = "math") -> bool:
    """Whether the response ended by itself and gives its answer in a box, as the grader finds it."""
    return not response.truncated and extract(response.text, kind, require_box=True) is not None


def _overlong(debate: Debate, response: Response, config: OverlongConfig) -> float:
    longest = debate.sampling.get("max_tokens")
    if longest is None:
        raise ValueError(
            f"problem {debate.problem.id!r}: an overlong penalty needs sampling.max_tokens in the debate's row"
        )
    return overlong_penalty(response.completion_tokens, int(longest), config.buffer)


# --- correctness: team and credit ---------------------------------------------------------------------------------


def _credit(debate: Debate, config: RewardConfig) -> Callable[[Response, int], Grade]:
    """The correctness term of a response as a function of (response, turn).

    `team` combines the grades of one turn, `credit` those of the turns from this one on. A term that would need a grade
    which is not there is None: leaving it out of a sum would count it as wrong.
    """
    grades = [_grades(debate, turn) for turn in range(len(debate.turns))]

    def at(response: Response, turn: int) -> Grade:
        own = None if response.correct is None else float(response.correct)
        return own if config.team == "own" else _team(list(grades[turn].values()), config.team)

    def later(agent: str, turn: int) -> Grade:
        return grades[turn][agent] if config.team == "own" else _team(list(grades[turn].values()), config.team)

    def credit(response: Response, turn: int) -> Grade:
        last = len(debate.turns) - 1
        if config.credit == "dense":
            return at(response, turn)
        if debate.error is not None:
            return None  # the turns that would decide it were never spoken
        if config.credit == "final":
            return at(response, turn) if turn == last else later(response.agent, last)
        terms = [at(response, turn), *(later(response.agent, t) for t in range(turn + 1, last + 1))]
        known = [term for term in terms if term is not None]
        return math.fsum(known) if len(known) == len(terms) else None

    return credit


def _grades(debate: Debate, turn: int) -> dict[str, Grade]:
    """Every agent's grade at a turn; None too where it did not speak, or spoke more than once."""
    spoken: dict[str, list[bool | None]] = defaultdict(list)
    for response in debate.turns[turn]:
        spoken[response.agent].append(response.correct)
    single = {agent: values[0] for agent, values in spoken.items() if len(values) == 1}
    return {agent: None if (value := single.get(agent)) is None else float(value) for agent in debate.agents}


def _team(grades: Sequence[Grade], mode: Literal["sum", "mean", "max"]) -> Grade:
    known = [grade for grade in grades if grade is not None]
    if mode == "max" and 1.0 in known:
        return 1.0  # whatever the missing grades are
    if not known or len(known) < len(grades):
        return None
    if mode == "max":
        return max(known)
    total = math.fsum(known)
    return total if mode == "sum" else total / len(known)


# --- influence ------------------------------------------------------------------------------------------------------


def _influence(debate: Debate, config: RewardConfig) -> dict[tuple[int, str], float]:
    """Eq. 5 by (turn, agent), where it applies."""
    settings = config.influence
    # with one shared context per turn only rollout 0's responses were shown to anyone
    unseen = debate.sampling.get("mode") == "shared_context" and debate.rollout != 0
    if settings.eta == 0 or unseen:
        return {}
    found = {}
    for turn in range(len(debate.turns) - 1):
        before, after = _grades(debate, turn), _grades(debate, turn + 1)
        seen = {response.agent: set(response.saw) for response in debate.turns[turn + 1]}
        saw = [[(turn, speaker) in seen.get(listener, ()) for speaker in debate.agents] for listener in debate.agents]
        values = influence(
            list(before.values()), list(after.values()), settings.eta, settings.form, settings.source, saw
        )
        found.update(
            {(turn, agent): value for agent, value in zip(debate.agents, values, strict=True) if value is not None}
        )
    return found


# --- the user's own functions ---------------------------------------------------------------------------------------


class RewardFunction:
    """A user's reward: `function(debate, agent, turn) -> float`, or None where it does not apply.

    What raises, returns anything but a finite number or None, or takes longer than its time limit is a fault: counted in
    `faults` by kind, named in the log the first time, and never a reward.
    """

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.name = config.name or config.function.rpartition(":")[2]
        self.weight = config.weight
        self.faults: Counter[str] = Counter()
        self._spec = config.function
        self._time_limit = config.time_limit
        self._function = load_function(config.function, "reward.functions")

    def __call__(self, debate: Debate, agent: str, turn: int) -> tuple[float | None, bool]:
        """(value, failed)."""
        outcome: list[Any] = []

        def call() -> None:
            try:
                outcome.append(self._function(debate, agent, turn))
            except Exception as error:
                outcome.append(error)

        # a thread that hangs cannot be ended: it is left behind, and as a daemon does not keep the process alive
        thread = threading.Thread(target=call, daemon=True, name=f"reward {self.name}")
        thread.start()
        thread.join(self._time_limit)
        where = f"problem {debate.problem.id!r}, agent {agent!r}, turn {turn}"
        if not outcome:
            return self._fault("hung", f"gave nothing in {self._time_limit:g} s ({where})")
        value = outcome[0]
        if value is None:
            return None, False
        if isinstance(value, Exception):
            return self._fault("raised", f"raised {type(value).__name__}: {value} ({where})")
        number = _number(value)
        if number is None:
            return self._fault("not a number", f"returned {value!r:.80} instead of a finite number or None ({where})")
        return number, False

    def _fault(self, kind: str, message: str) -> tuple[None, bool]:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            log.warning(
                "reward function %s %s; the response is left out, further cases are counted", self._spec, message
            )
        return None, True


def _number(value: object) -> float | None:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a numpy or torch scalar
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    return None


def load_functions(config: RewardConfig) -> list[RewardFunction]:
    """The user's functions, imported; a `UserError` names the one that cannot be."""
    return [RewardFunction(entry) for entry in config.functions]


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """Imports `module:function`, also from the working directory. `key` names the setting in messages."""
    module_name, _, name = spec.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"{key}: {spec!r}: module {module_name!r} cannot be imported ({error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key}: {spec!r}: module {module_name!r} has no function {name!r}")
    return function


# --- metrics --------------------------------------------------------------------------------------------------------


def reward_metrics(debates: Iterable[Debate]) -> dict[str, float]:
    """Flat metrics per agent and turn: each part's mean where it applies (`agent/NAME/reward_PART/turn_T`) and how many
    responses have no reward (`agent/NAME/unrewarded/turn_T`); per user's function, its faults so far."""
    parts: dict[str, list[float]] = defaultdict(list)
    missing: Counter[str] = Counter()
    for debate in debates:
        for response in debate.responses():
            missing[f"agent/{response.agent}/unrewarded/turn_{response.turn}"] += response.reward is None
            for name, value in response.parts.items():
                parts[f"agent/{response.agent}/reward_{name}/turn_{response.turn}"].append(value)
    metrics: dict[str, float] = {name: math.fsum(values) / len(values) for name, values in parts.items()}
    metrics.update({name: float(count) for name, count in missing.items()})
    return metrics
