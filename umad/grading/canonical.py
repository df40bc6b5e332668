"""Texts that are equal for equal forms: what class keys are made of."""

from __future__ import annotations

from umad.grading.intervals import Piece, Span
from umad.grading.nodes import Group, Name, Node, Op
from umad.grading.shapes import Form, Opaque, Region, Relation, Scalar, Sequence, Table, Text, pieces_of
from umad.grading.values import evaluate, has_operation, names_in, number_text


def scalar_text(node: Node) -> str:
    """A text that is equal for equal expressions: the value, or values at fixed points where there are variables."""
    if isinstance(node, Name) and node.name != "pi" and node.name != "e" and node.name != "i":
        return f"v:{node.name}"
    if not names_in(node):
        return "n:" + number_text(evaluate(node))
    points = (0, 1, 2) if has_operation(node, "abs") else (0, 1)
    values = [number_text(evaluate(node, point)) for point in points]
    if values[0] == values[1] and len(values) == 2:
        return "n:" + values[0]  # the variables cancel
    return "f:" + "|".join(values)


def relation_text(form: Relation) -> str:
    values = [evaluate(form.node, point) for point in (0, 1, 2)]
    scale = values[0]
    if number_text(scale) == "0":
        return form.op + ":0"
    if form.op in ("<", "<="):
        scale = abs(scale)
    return form.op + ":" + "|".join(number_text(value / scale) for value in values)


def form_key(form: Form) -> str:
    """The class key of a form. May raise TooLarge, Undefined or Unreadable; the caller falls back on text."""
    if isinstance(form, Scalar):
        return scalar_text(form.node)
    if isinstance(form, Text):
        return "n:" + number_text(form.number.value) if form.number else "t:" + form.text
    if isinstance(form, Opaque):
        return "s:" + form.text
    if isinstance(form, Relation):
        return relation_text(form)
    if isinstance(form, Table):
        if len(form.rows) == 1 or len(form.rows[0]) == 1:
            return "T(" + ",".join(scalar_text(cell) for row in form.rows for cell in row) + ")"
        return "M[" + ";".join(",".join(scalar_text(cell) for cell in row) for row in form.rows) + "]"
    if isinstance(form, Region):
        return "∪".join(map(_piece_key, form.pieces)) or "v:∅"
    return _sequence_key(form)


def _piece_key(piece: Piece) -> str:
    span = Span.of(piece)
    low = scalar_text(piece.low) if piece.low is not None and not span.from_infinity else "-oo"
    high = scalar_text(piece.high) if piece.high is not None and not span.to_infinity else "oo"
    if piece.low_closed and piece.high_closed and low == high:
        return "L{" + low + "}"
    return "T" + "(["[piece.low_closed] + low + "," + high + ")]"[piece.high_closed]


def _sequence_key(form: Sequence) -> str:
    if form.kind == "tuple":
        pieces = pieces_of(form) if len(form.items) == 2 else None
        if pieces:
            return _piece_key(pieces[0])
        return "T(" + ",".join(form_key(item) for item in form.items) + ")"
    labels = [label_text(item.label) for item in form.items]
    if form.kind == "list" and all(labels) and len(set(labels)) == len(labels):
        ordered = sorted(zip(labels, form.items, strict=True), key=lambda pair: pair[0])
        return "T(" + ",".join(form_key(item) for _, item in ordered) + ")"
    keys = sorted({form_key(item) for item in form.items})
    return keys[0] if len(keys) == 1 and form.kind == "list" else "L{" + ",".join(keys) + "}"


def label_text(label: Node | None) -> str:
    if label is None:
        return ""
    if isinstance(label, Name):
        return label.name
    parts: tuple[Node, ...] = label.args if isinstance(label, Op) else label.items if isinstance(label, Group) else ()
    return f"{getattr(label, 'name', '')}({','.join(label_text(part) for part in parts)})"
