"""Inequalities as parts of the real line."""

from __future__ import annotations

from fractions import Fraction

from umad.grading.intervals import Piece, complement, intersect, merge
from umad.grading.nodes import Group, Name, Node, Num, Op, Unreadable
from umad.grading.shapes import Form, Region, Relation
from umad.grading.trees import pure, substitute
from umad.grading.values import evaluate, names_in, number_text


def is_label(node: Node) -> bool:
    """Whether the left side only names what is computed: `x`, `f(x)`, `|AB|`, `A:B`, `(x, y)`, `\\angle ABC`."""
    if isinstance(node, Name):
        return node.name not in ("pi", "e", "i", "oo")
    if isinstance(node, Group):
        return all(is_label(item) for item in node.items)
    if not isinstance(node, Op):
        return False
    if node.name == "mul":
        return all(isinstance(arg, Name) and arg.name[0].isupper() for arg in node.args)
    if node.name in ("ratio", "abs"):
        return all(is_label(arg) for arg in node.args)
    if node.name == "pow":
        return isinstance(node.args[0], Op) and node.args[0].name == "apply"
    return node.name == "apply"


def _difference(left: Node, right: Node) -> Node:
    return Op("add", (pure(left), Op("neg", (pure(right),))))


def _root_of(node: Node, name: str) -> tuple[Node, int] | None:
    """Where an expression that is affine in `name` is zero, and the sign of its slope; None if it isn't affine."""
    at = [substitute(node, name, Num(Fraction(x))) for x in (0, 1, 3)]
    if any(names_in(value) for value in at):
        return None
    slope = Op("add", (at[1], Op("neg", (at[0],))))
    bend = Op("add", (at[2], Op("mul", (Num(Fraction(-3)), at[1])), Op("mul", (Num(Fraction(2)), at[0]))))
    value = evaluate(slope)
    if (
        number_text(evaluate(bend)) != "0"
        or number_text(value) == "0"
        or (not isinstance(value, Fraction) and value.imag)
    ):
        return None
    return Op("mul", (Op("neg", (at[0],)), Op("inv", (slope,)))), 1 if value.real > 0 else -1


def inequality(left: Node, op: str, right: Node) -> Form:
    """`left < right` (or <=, !=): a part of the line where it has one variable and is affine in it."""
    closed = op == "<="
    bounded = _absolute_bound(left, op, right)
    if bounded:
        return bounded
    if is_label(left) and not isinstance(left, Group) and not (names_in(right) & names_in(left)):
        if op == "!=":
            return Region(complement((Piece(pure(right), True, right, True),)), left)
        return Region((Piece(None, False, pure(right), closed),), left)
    if is_label(right) and not isinstance(right, Group) and not (names_in(right) & names_in(left)):
        if op == "!=":
            return Region(complement((Piece(pure(left), True, left, True),)), right)
        return Region((Piece(pure(left), closed, None, False),), right)
    node = _difference(left, right)
    names = names_in(node)
    if len(names) == 1 and "oo" not in names:
        name = names.pop()
        found = _root_of(node, name)
        if found:
            root, slope = found
            if op == "!=":
                return Region(complement((Piece(root, True, root, True),)), Name(name))
            piece = Piece(None, False, root, closed) if slope > 0 else Piece(root, closed, None, False)
            return Region((piece,), Name(name))
    return Relation(op, node)


def _absolute_bound(left: Node, op: str, right: Node) -> Form | None:
    """`|g| < r` and `r < |g|`, for a number r and g affine in one variable."""
    inside = isinstance(left, Op) and left.name == "abs" and not names_in(right)
    outside = isinstance(right, Op) and right.name == "abs" and not names_in(left)
    if op == "!=" or inside == outside:
        return None
    absolute, bound = (left, right) if inside else (right, left)
    assert isinstance(absolute, Op)
    inner, negative = absolute.args[0], Op("neg", (pure(bound),))
    first = inequality(negative, op, inner) if inside else inequality(inner, op, negative)
    second = inequality(inner, op, bound) if inside else inequality(bound, op, inner)
    if not isinstance(first, Region) or not isinstance(second, Region):
        return None
    join = intersect(first.pieces, second.pieces) if inside else merge((*first.pieces, *second.pieces))
    return Region(join, first.label)


def between(args: tuple[Node, ...], ops: tuple[str, ...]) -> Form:
    lower, upper = inequality(args[0], ops[0], args[1]), inequality(args[1], ops[1], args[2])
    if not isinstance(lower, Region) or not isinstance(upper, Region):
        raise Unreadable("a double inequality")
    if is_label(args[1]):
        return Region((Piece(args[0], ops[0] == "<=", args[2], ops[1] == "<="),), args[1])
    return Region(intersect(lower.pieces, upper.pieces), upper.label)
