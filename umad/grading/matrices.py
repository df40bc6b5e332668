"""Sums, multiples and products of matrices, as trees."""

from __future__ import annotations

from umad.grading.nodes import Grid, Node, Op, Unreadable
from umad.grading.trees import pure


def grid_of(node: Node) -> Grid:
    """Sums, multiples and products of matrices, entry by entry."""
    if isinstance(node, Grid):
        return node
    if not isinstance(node, Op) or node.name not in ("add", "mul", "neg"):
        raise Unreadable("matrix")
    if node.name == "neg":
        grid = grid_of(node.args[0])
        return Grid(tuple(tuple(Op("neg", (cell,)) for cell in row) for row in grid.rows))
    result: Node = node.args[0]
    for arg in node.args[1:]:
        result = _grid_pair(node.name, result, arg)
    return grid_of(result)


def _grid_pair(name: str, left: Node, right: Node) -> Node:
    if not isinstance(left, Grid) and not isinstance(right, Grid):
        return Op(name, (pure(left), pure(right)))
    if name == "add":
        a, b = grid_of(left), grid_of(right)
        if (len(a.rows), len(a.rows[0])) != (len(b.rows), len(b.rows[0])):
            raise Unreadable("shapes")
        return Grid(
            tuple(
                tuple(Op("add", pair) for pair in zip(x, y, strict=True)) for x, y in zip(a.rows, b.rows, strict=True)
            )
        )
    if isinstance(left, Grid) and isinstance(right, Grid):
        if len(left.rows[0]) != len(right.rows) or len(left.rows) * len(right.rows) * len(right.rows[0]) > 512:
            raise Unreadable("shapes")
        columns = list(zip(*right.rows, strict=True))
        return Grid(
            tuple(
                tuple(Op("add", tuple(Op("mul", pair) for pair in zip(row, column, strict=True))) for column in columns)
                for row in left.rows
            )
        )
    grid, factor = (left, right) if isinstance(left, Grid) else (right, left)
    assert isinstance(grid, Grid)
    return Grid(tuple(tuple(Op("mul", (pure(factor), cell)) for cell in row) for row in grid.rows))
