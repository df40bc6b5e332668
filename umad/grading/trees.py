"""Trees rewritten: variables put in, plus-minus signs taken apart."""

from __future__ import annotations

from dataclasses import replace

from umad.grading.nodes import Chain, Group, Measure, Name, Node, Num, Op, Unreadable


def pure(node: Node) -> Node:
    """Arithmetic only: numbers, names and operations on them."""
    if isinstance(node, Op):
        for arg in node.args:
            pure(arg)
    elif not isinstance(node, (Num, Name)):
        raise Unreadable(type(node).__name__)
    return node


def expand_signs(node: Node) -> list[Node]:
    """`a \\pm b` as its two values; all the signs of one expression are taken together."""
    if not _has_signs(node):
        return [node]
    if isinstance(node, Group) and node.opening in ("", "{"):
        return [node]  # each item expands on its own
    return [_choose_sign(node, +1), _choose_sign(node, -1)]


def _has_signs(node: Node) -> bool:
    if isinstance(node, Op):
        return node.name in ("pm", "mp") or any(_has_signs(arg) for arg in node.args)
    if isinstance(node, Group):
        return any(_has_signs(item) for item in node.items)
    if isinstance(node, Chain):
        return any(_has_signs(arg) for arg in node.args)
    return isinstance(node, Measure) and _has_signs(node.node)


def _choose_sign(node: Node, sign: int) -> Node:
    if isinstance(node, Op):
        args = tuple(_choose_sign(arg, sign) for arg in node.args)
        if node.name in ("pm", "mp"):
            plus = (node.name == "pm") == (sign > 0)
            return Op("add", (args[0], args[1] if plus else Op("neg", (args[1],))))
        return Op(node.name, args)
    if isinstance(node, Group):
        return replace(node, items=tuple(_choose_sign(item, sign) for item in node.items))
    if isinstance(node, Chain):
        return replace(node, args=tuple(_choose_sign(arg, sign) for arg in node.args))
    if isinstance(node, Measure):
        return replace(node, node=_choose_sign(node.node, sign))
    return node


def substitute(node: Node, name: str, value: Node) -> Node:
    if isinstance(node, Name):
        return value if node.name == name else node
    return Op(node.name, tuple(substitute(arg, name, value) for arg in node.args)) if isinstance(node, Op) else node
