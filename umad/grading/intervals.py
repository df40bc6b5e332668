"""Unions of intervals of the real line, with endpoints that are expressions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from umad.grading.nodes import Name, Node, Op, Unreadable
from umad.grading.values import evaluate, inexact, names_in, number_text


@dataclass(frozen=True, slots=True)
class Piece:
    """From `low` to `high`; None is minus or plus infinity."""

    low: Node | None
    low_closed: bool
    high: Node | None
    high_closed: bool


LINE = (Piece(None, False, None, False),)


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """An end of an interval in order along the line: (infinity, value), then just before or just after the point."""

    infinity: int
    value: Any
    text: str
    after: int

    def _same_point(self, other: Edge) -> bool:
        return self.infinity == other.infinity and self.text == other.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edge) and self._same_point(other) and self.after == other.after

    def __lt__(self, other: Edge) -> bool:
        if self._same_point(other):
            return self.after < other.after
        if self.infinity != other.infinity:
            return self.infinity < other.infinity
        return bool(self.value < other.value)


def _infinity(node: Node | None, default: int) -> int:
    if node is None:
        return default
    if isinstance(node, Name) and node.name == "oo":
        return 1
    return -1 if isinstance(node, Op) and node.name == "neg" and node.args[0] == Name("oo") else 0


def _edge(node: Node | None, default: int, after: int) -> Edge:
    infinity = _infinity(node, default)
    if infinity or node is None:
        return Edge(infinity, 0, "", 0)
    if names_in(node):
        raise Unreadable("an interval with a variable end")
    value = evaluate(node)
    text = number_text(value)
    if "i" in text:
        raise Unreadable("an interval with a complex end")
    return Edge(0, inexact(value).real, text, after)


@dataclass(frozen=True, slots=True)
class Span:
    """Which ends of a piece are infinite."""

    from_infinity: bool
    to_infinity: bool

    @classmethod
    def of(cls, piece: Piece) -> Span:
        return cls(_infinity(piece.low, -1) == -1, _infinity(piece.high, 1) == 1)


def _low(piece: Piece) -> Edge:
    return _edge(piece.low, -1, 0 if piece.low_closed else 1)


def _high(piece: Piece) -> Edge:
    return _edge(piece.high, 1, 1 if piece.high_closed else 0)


def merge(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The union, sorted, with touching and overlapping pieces joined and empty ones dropped."""
    parts = sorted(((_low(piece), _high(piece), piece) for piece in pieces), key=lambda part: part[0])
    merged: list[tuple[Edge, Edge, Piece]] = []
    for low, high, piece in parts:
        if not low < high:
            continue
        if merged and low <= merged[-1][1]:
            start, end, last = merged[-1]
            if end < high:
                merged[-1] = (start, high, Piece(last.low, last.low_closed, piece.high, piece.high_closed))
        else:
            merged.append((low, high, piece))
    return tuple(piece for _, _, piece in merged)


def complement(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    result = []
    low: Node | None = None
    closed, open_end = False, False
    for piece in merge(pieces):
        if not Span.of(piece).from_infinity:
            result.append(Piece(low, closed, piece.low, not piece.low_closed))
        low, closed, open_end = piece.high, not piece.high_closed, Span.of(piece).to_infinity
    if not open_end:
        result.append(Piece(low, closed, None, False))
    return merge(tuple(result))


def intersect(left: tuple[Piece, ...], right: tuple[Piece, ...]) -> tuple[Piece, ...]:
    if len(left) * len(right) > 400:
        raise Unreadable("too many intervals")
    result = []
    for a in left:
        for b in right:
            low = a if _low(b) < _low(a) else b
            high = a if _high(a) < _high(b) else b
            result.append(Piece(low.low, low.low_closed, high.high, high.high_closed))
    return merge(tuple(result))
