"""Arithmetic problems made on the spot: any number of them, with worked solutions, right or flawed.

A question is a whole number in mixed radix (operands and operators), so a level is a finite, known space. Each question
belongs to `train` or `test` for good, whatever the seed: a hash of its terms decides, and reordered sums share it.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from umad.records import Problem, UserError

SPLITS = ("train", "test")
_TEST_SHARE = 0.2
_SYMBOLS = re.compile(r"\d+|[-+*]")
_DEFAULT_LIMITS = {"train": 10_000, "test": 1_000}


@dataclass(frozen=True, slots=True)
class Level:
    """How many operands, from 0 up to but not including `below`, joined by which operators."""

    terms: int
    below: int
    operators: str

    @property
    def size(self) -> int:
        """Number of questions, both splits together."""
        return self.below**self.terms * len(self.operators) ** (self.terms - 1)


LEVELS = {
    1: Level(3, 20, "+"),
    2: Level(3, 100, "+-"),
    3: Level(4, 100, "+-"),
    4: Level(3, 20, "+-*"),
    5: Level(5, 100, "+-*"),
}


def level_of(number: int) -> Level:
    if number not in LEVELS:
        raise UserError(f"arithmetic level {number} does not exist; there are {min(LEVELS)} to {max(LEVELS)}")
    return LEVELS[number]


def problems(level: int = 1, split: str = "train", seed: int = 0) -> Iterator[Problem]:
    """Every problem of a level's split once, in an order that `seed` decides. Only level 1 is small enough to end soon."""
    shape = level_of(level)
    rng = random.Random(f"arithmetic/{level}/{seed}")
    seen: set[int] = set()
    while len(seen) < shape.size:
        number = rng.randrange(shape.size)
        if number in seen:
            continue
        seen.add(number)
        expression = _expression(number, shape)
        if split_of(expression) == split:
            yield Problem(
                id=f"arithmetic/{level}/{expression}",
                question=f"{expression}=?",
                gold=str(_steps(expression)[-1].result),
                kind="math",
                source=f"arithmetic/{level}/{split}",
            )


def load(level: int, split: str, limit: int | None, seed: int) -> list[Problem]:
    """The first `limit` problems; without one 10,000 to train or 1,000 to test on, as far as the level has them."""
    if split not in SPLITS:
        raise UserError(f"arithmetic has the splits train and test, not {split!r}")
    supply = problems(level, split, seed)
    found = [problem for problem, _ in zip(supply, range(limit or _DEFAULT_LIMITS[split]), strict=False)]
    if limit is not None and len(found) < limit:
        raise UserError(
            f"arithmetic level {level} has only {len(found)} {split} problems, not {limit}; "
            "lower limit or choose a higher level"
        )
    return found


def split_of(expression: str) -> str:
    """`train` or `test`. Reordered sums (7+12 and 12+7) fall on one side, so no test sum was trained on in disguise."""
    key = "+".join(sorted(expression.split("+")))
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < _TEST_SHARE * 2**64 else "train"


def solution(expression: str) -> str:
    """A correct worked solution: one operation a line, products first, then the boxed result."""
    return _written(_steps(expression))


def flawed_solution(expression: str, rng: random.Random) -> str:
    """A solution with one slip (a digit off, an operand misread) that is carried on; its final answer is wrong."""
    right = _steps(expression)
    while True:
        steps = _steps(expression, slip_at=rng.randrange(len(right)), rng=rng)
        if steps[-1].result != right[-1].result:
            return _written(steps)


@dataclass(frozen=True, slots=True)
class _Step:
    text: str
    result: int


def _expression(number: int, shape: Level) -> str:
    parts = []
    for term in range(shape.terms):
        if term:
            number, choice = divmod(number, len(shape.operators))
            parts.append(shape.operators[choice])
        number, operand = divmod(number, shape.below)
        parts.append(str(operand))
    return "".join(parts)


def _steps(expression: str, slip_at: int | None = None, rng: random.Random | None = None) -> list[_Step]:
    tokens = _SYMBOLS.findall(expression)
    values, operators = [int(token) for token in tokens[::2]], tokens[1::2]
    steps: list[_Step] = []
    while operators:
        at = operators.index("*") if "*" in operators else 0
        a, b, operator = values[at], values[at + 1], operators[at]
        result = _apply(a, b, operator)
        if len(steps) == slip_at and rng is not None:
            result = _slip(a, b, operator, rng)
        steps.append(_Step(f"{a}{operator}{b}={result}", result))
        values[at : at + 2] = [result]
        del operators[at]
    return steps


def _apply(a: int, b: int, operator: str) -> int:
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def _slip(a: int, b: int, operator: str, rng: random.Random) -> int:
    off = rng.choice((-10, -2, -1, 1, 2, 10))
    misread = rng.random() < 0.5
    slipped = _apply(a, b + off, operator) if misread else _apply(a, b, operator) + off
    # without a minus sign in the question, a negative result would not pass for a slip
    return slipped if slipped >= 0 or operator == "-" else _apply(a, b, operator) + abs(off)


def _written(steps: list[_Step]) -> str:
    return "\n".join([*(step.text for step in steps), f"\\boxed{{{steps[-1].result}}}"])
