"""The tree of an answer, and the two ways in which reading one ends early."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


class Unreadable(Exception):
    """This parser does not know the notation."""


class TooLarge(Exception):
    """Beyond a size limit (length, nesting, digits): refused before any work is done on it."""


@dataclass(frozen=True, slots=True)
class Num:
    """A literal. `ulp` is the unit in its last place where it has decimals; `digits` counts significant ones."""

    value: Fraction
    ulp: Fraction | None = None
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Name:
    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """Arithmetic. Names: add mul inv neg pow root fact abs floor ceil binom pm mp deg pct base ratio apply, a function,
    or a set operation (cup cap setminus)."""

    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Bracketed or bare items. `opening` and `closing` are "" for a bare list; `joined` names its connective."""

    opening: str
    closing: str
    items: tuple[Node, ...]
    joined: str = ","


@dataclass(frozen=True, slots=True)
class Grid:
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """`a = b`, `a < b <= c`."""

    args: tuple[Node, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """A value with words behind it: "5 apples"."""

    node: Node
    unit: str


@dataclass(frozen=True, slots=True)
class Builder:
    """`{x | condition}`."""

    variable: Node
    condition: Node


@dataclass(frozen=True, slots=True)
class Words:
    text: str


Node = Num | Name | Op | Group | Grid | Chain | Measure | Builder | Words
