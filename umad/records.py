"""The records that every part shares: problems, responses, debates, and their JSON rows.

Records are frozen. A later stage that knows more (a reward, an advantage) makes a copy with `dataclasses.replace`;
nothing is ever written into a record that somebody else holds, so a prompt built twice from one debate is the same
bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    import numpy as np


class UserError(Exception):
    """The user's input is wrong. The message names the file, line or key and the way out; the command exits with 2."""


class RunError(RuntimeError):
    """A run cannot go on, and its message says it all: the command exits with 1 and no traceback."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its reference answer.

    `gold` is None where no answer is known: such problems can be debated and analysed, never graded or trained on.
    `alternatives` are further accepted answers; `required` are needed beside `gold`, in any order. `kind` names how
    answers are compared (see `umad.grading`), `choices` are the options' texts in the order A, B, ...
    """

    id: str
    question: str
    gold: str | None
    kind: str = "math"
    alternatives: tuple[str, ...] = ()
    source: str = ""
    required: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a problem needs an id")
        if not self.question.strip():
            raise ValueError(f"problem {self.id!r} has an empty question")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is drawn. What stands here is what runs: no engine inherits a checkpoint's generation config."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be a finite number >= 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (no limit) or more, not {self.top_k}")

    def to_row(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """What one agent said at one turn, graded.

    `token_ids`, `logprobs` and `prompt_ids` are exactly what the engine was given and sampled (int32, float32 and int32
    arrays; None where an engine does not know them). `logprobs` are natural logarithms under the distribution that was
    sampled from. `nll` is minus their mean, the end-of-sequence token included (U of Eq. 4).
    """

    agent: str
    turn: int
    text: str
    answer: str | None = None
    key: str = ""
    """Class of the answer (`umad.grading.class_key`); equality of keys is agreement."""
    correct: bool | None = None
    """None: ungraded, a failure of ours or no gold; never a wrong answer."""
    status: str = "ok"
    finish_reason: str = "stop"
    """`stop`: the model ended its turn. `length`: cut at `max_tokens`. `context`: no room left in the context."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    nll: float | None = None
    weight_version: int = 0
    role: str | None = None
    saw: tuple[tuple[int, str], ...] = ()
    """(turn, agent) of every response that its prompt showed, the agent's own included."""
    shortened: int = 0
    """Tokens cut from shown responses so that the prompt would fit."""
    reward: float | None = None
    advantage: float | None = None
    weight: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's parts by name."""
    prompt_ids: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    """The chat messages that were shown."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "context")

    def to_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "agent": self.agent,
            "text": self.text,
            "answer": self.answer,
            "key": self.key,
            "correct": self.correct,
            "status": self.status,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "nll": self.nll,
            "weight_version": self.weight_version,
        }
        if self.role is not None:
            row["role"] = self.role
        row["saw"] = [list(pair) for pair in self.saw]
        if self.shortened:
            row["shortened"] = self.shortened
        for name in ("reward", "advantage", "weight"):
            value = getattr(self, name)
            if value is not None:
                row[name] = value
        if self.parts:
            row["parts"] = dict(self.parts)
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any], turn: int) -> Response:
        """Reads a row of `turns`. Only `agent` is required, so debates that other tools wrote can be read too."""
        known = {name: row[name] for name in _RESPONSE_FIELDS if row.get(name) is not None}
        if "agent" not in known:
            raise ValueError(f"a response of turn {turn} has no 'agent'")
        known["agent"] = str(known["agent"])
        for name, kinds in _RESPONSE_KINDS.items():
            if not isinstance(known.get(name, kinds[0]()), kinds):
                raise ValueError(
                    f"{name!r} of agent {known['agent']!r} at turn {turn} is a {type(known[name]).__name__}"
                )
        if not isinstance(row.get("correct"), (bool, type(None))):
            raise ValueError(f"'correct' of agent {known['agent']!r} at turn {turn} is neither true, false nor null")
        known["correct"] = row.get("correct")
        if "answer" in known:
            known["answer"] = str(known["answer"])
        known["saw"] = tuple((int(t), str(a)) for t, a in row.get("saw", ()))
        known.setdefault("text", "")
        return cls(turn=turn, **known)


_RESPONSE_FIELDS = (
    *("agent", "text", "answer", "key", "status", "finish_reason", "prompt_tokens", "completion_tokens", "nll"),
    *("weight_version", "role", "shortened", "reward", "advantage", "weight", "parts"),
)


_RESPONSE_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("text", "key", "status", "finish_reason", "role"), (str,)),
    **dict.fromkeys(("nll", "reward", "advantage", "weight"), (float, int)),
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "weight_version", "shortened"), (int,)),
    "answer": (str, int, float),
    "parts": (dict,),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a debate cost, counted by the driver for every protocol alike.

    `messages` are responses shown to another agent, `depth` the longest chain of calls that had to wait for each other.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    messages: int = 0
    depth: int = 0

    def to_row(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Decision:
    """A debate's final answer and the rule that chose it."""

    answer: str | None
    correct: bool | None
    rule: str
    key: str = ""

    def to_row(self) -> dict[str, Any]:
        return {"answer": self.answer, "correct": self.correct, "rule": self.rule}


_PROBLEM_LISTS = ("alternatives", "required", "choices")


@dataclass(frozen=True, slots=True, eq=False)
class Debate:
    """One debate of one problem. `error` says why it ended early; its turns up to there are kept."""

    problem: Problem
    protocol: str
    agents: tuple[str, ...]
    turns: tuple[tuple[Response, ...], ...]
    rollout: int = 0
    instance: int = 0
    """Position of the problem in its batch: the group key's first part, so a problem drawn twice makes two groups."""
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    decision: Decision | None = None
    cost: Cost = field(default_factory=Cost)
    error: str | None = None

    def __post_init__(self) -> None:
        if len(set(self.agents)) != len(self.agents):
            raise ValueError(f"agent names must differ: {', '.join(self.agents)}")

    def responses(self) -> Iterator[Response]:
        for turn in self.turns:
            yield from turn

    def to_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "problem_id": self.problem.id,
            "question": self.problem.question,
            "gold": self.problem.gold,
            "kind": self.problem.kind,
            "protocol": self.protocol,
            "rollout": self.rollout,
            "instance": self.instance,
            "seed": self.seed,
            "sampling": dict(self.sampling),
            "agents": list(self.agents),
            "turns": [[response.to_row() for response in turn] for turn in self.turns],
            "decision": self.decision.to_row() if self.decision else None,
            "cost": self.cost.to_row(),
        }
        for name in _PROBLEM_LISTS:
            if values := getattr(self.problem, name):
                row[name] = list(values)
        if self.error is not None:
            row["error"] = self.error
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Debate:
        """Reads a debate row; `problem_id`, `agents` and `turns` are required."""
        for name in ("problem_id", "agents", "turns"):
            if name not in row:
                raise ValueError(f"a debate row needs {name!r}")
        for name in ("sampling", "cost", "decision"):
            if not isinstance(row.get(name) or {}, Mapping):
                raise ValueError(f"{name!r} is not an object but a {type(row[name]).__name__}")
        turns = tuple(tuple(Response.from_row(r, t) for r in turn) for t, turn in enumerate(row["turns"]))
        decision = row.get("decision")
        gold = row.get("gold")
        return cls(
            problem=Problem(
                id=str(row["problem_id"]),
                question=str(row.get("question") or "?"),
                gold=None if gold is None else str(gold),
                kind=row.get("kind", "math"),
                alternatives=tuple(map(str, row.get("alternatives") or ())),
                required=tuple(map(str, row.get("required") or ())),
                choices=tuple(map(str, row.get("choices") or ())),
            ),
            protocol=str(row.get("protocol", "unknown")),
            agents=tuple(str(a) for a in row["agents"]),
            turns=turns,
            rollout=int(row.get("rollout", 0)),
            instance=int(row.get("instance", 0)),
            seed=int(row.get("seed", 0)),
            sampling=row.get("sampling") or {},
            decision=Decision(decision.get("answer"), decision.get("correct"), decision.get("rule", "unknown"))
            if decision
            else None,
            cost=Cost(**{name: int(count) for name, count in (row.get("cost") or {}).items()}),
            error=row.get("error"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What the trainer's own forward pass says about one completion: float32 [C] each, nats, logits divided by the
    rollout temperature but for `logit`."""

    logprobs: np.ndarray
    """Of the completion's tokens."""
    entropy: np.ndarray
    """Of the full next-token distributions."""
    certainty: np.ndarray
    """KL(uniform || policy) over the vocabulary: how far each distribution is from knowing nothing (arXiv 2502.18581)."""
    logit: np.ndarray
    """The tokens' logits as the model gives them."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What reaches the learner: one response as token ids, and nothing of the debate that it came from.

    prompt_ids, completion_ids: int32 [P], [C], exactly as sampled. logprobs: float32 [C], the sampler's.
    `group` is (problem instance, agent, turn), never prompt text. `reward` is None where it is ungraded.
    """

    agent: str
    group: tuple[int, str, int]
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray
    reward: float | None
    truncated: bool = False
    weight_version: int = 0
    nll: float | None = None
    advantage: float = 0.0
    """Eq. 4's A' after normalisation and weighting."""
    weight: float = 1.0
    token_advantages: np.ndarray | None = None
    """float32 [C]: what each token's loss is multiplied with, where a weight mode tells tokens apart; then `advantage` is
    their mean."""
    scores: Scores | None = None
    """Where the trainer scored it before this iteration's first update."""
    in_loss: bool = True
    """False: counts neither in the loss nor in its normaliser (ungraded, masked)."""

    def __post_init__(self) -> None:
        n = len(self.completion_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"{n} completion tokens but {len(self.logprobs)} log-probabilities")
        if n == 0 or len(self.prompt_ids) == 0:
            raise ValueError(f"a sample needs prompt and completion tokens, not {len(self.prompt_ids)} and {n}")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes rows as JSON lines, all or nothing (a temporary file that is renamed); returns how many."""
    n = 0
    with atomic_writer(path) as file:
        for row in rows:
            file.write(to_json(row) + "\n")
            n += 1
    return n


def to_json(row: Mapping[str, Any]) -> str:
    """One line of strict JSON. Numbers that JSON does not have become null; lone surrogates stay escaped."""
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace").decode()


_DEEPEST = 100
"""Levels of nesting that rows may have; ours have six."""


def _finite(value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise UserError(f"a row is nested more than {_DEEPEST} levels deep and cannot be written")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v, depth + 1) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _finite(value.item(), depth)
    return value


@contextmanager
def atomic_writer(path: Path) -> Iterator[TextIO]:
    """Opens a temporary neighbour of `path` and puts it in place, synced, only when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_jsonl(
    path: Path, *, last_line: Literal["strict", "lenient"] = "strict"
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, row) from a JSON lines file; blank lines are passed over.

    With `last_line="lenient"` an incomplete last line (a writer was killed) ends the file; elsewhere, and by default
    there too, a line that is no JSON object is a `UserError` with file and line.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    with file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if last_line == "lenient" and not line.endswith("\n"):
                        return
                    raise UserError(f"{path}:{number}: not a line of JSON ({error})") from None
                if not isinstance(row, dict):
                    raise UserError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
                yield number, row
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number + 1}: not UTF-8 text ({error.reason})") from None


def read_debates(path: Path) -> list[Debate]:
    """Reads a `debates.jsonl` (or transcript) file; a broken row is a `UserError` with file and line."""
    debates = []
    for number, row in read_jsonl(path, last_line="lenient"):
        try:
            debates.append(Debate.from_row(row))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise UserError(f"{path}:{number}: not a debate row ({error})") from None
    return debates
