"""Answers as structures: a scalar, a list, a tuple, a union of intervals, a matrix, a relation, words."""

from __future__ import annotations

from dataclasses import dataclass

from umad.grading.intervals import LINE, Piece, merge
from umad.grading.nodes import Name, Node, Num


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value. `unit` is a canonical unit, "pct", "base7", or "" for none that is known."""

    node: Node
    unit: str = ""
    label: Node | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """`kind` is "list" (bare, any order), "set" or "tuple" (ordered, with its brackets)."""

    kind: str
    items: tuple[Form, ...]
    brackets: str = ""
    label: Node | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """A union of disjoint intervals of the real line, in order."""

    pieces: tuple[Piece, ...]
    label: Node | None = None


@dataclass(frozen=True, slots=True)
class Table:
    rows: tuple[tuple[Node, ...], ...]
    label: Node | None = None


@dataclass(frozen=True, slots=True)
class Relation:
    """`node op 0` with op one of = < <= != ; equal up to a factor (a positive one for < and <=)."""

    op: str
    node: Node
    label: None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Words. `number` is the only number in a sentence, where there is exactly one."""

    text: str
    number: Num | None = None
    label: None = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """Mathematics that this parser doesn't read. `size` says that a limit was passed."""

    text: str
    size: bool = False
    label: None = None


Form = Scalar | Sequence | Region | Table | Relation | Text | Opaque


def pieces_of(form: Form) -> tuple[Piece, ...] | None:
    """A form as a part of the real line, where it can be one."""
    if isinstance(form, Region):
        return form.pieces
    if isinstance(form, Sequence) and form.kind == "tuple" and len(form.items) == 2:
        low, high = form.items
        if isinstance(low, Scalar) and isinstance(high, Scalar):
            closed = form.brackets == "[]"
            return (Piece(low.node, closed, high.node, closed),)
    if isinstance(form, Sequence) and form.kind == "set":
        points = [item.node for item in form.items if isinstance(item, Scalar)]
        if len(points) == len(form.items):
            return merge(tuple(Piece(point, True, point, True) for point in points))
    if isinstance(form, Scalar) and isinstance(form.node, Name):
        if form.node.name == "set R":
            return LINE
        if form.node.name == "∅":
            return ()
    return None
