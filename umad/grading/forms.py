"""Answers as structures: a scalar, a list, a tuple, a union of intervals, a matrix, an equation, words.

`read` turns an answer into a `Form`. What has no form here is `Opaque`: it is compared by math-verify in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from umad.grading.cleaning import MAX_LENGTH, clean
from umad.grading.extract import NUMBER, unbox
from umad.grading.intervals import LINE, Piece, Span, complement, intersect, merge
from umad.grading.syntax import Builder, Chain, Grid, Group, Measure, Name, Node, Num, Op, TooLarge, Unreadable, Words
from umad.grading.syntax import parse as parse_tree
from umad.grading.values import Undefined, evaluate, has_operation, names_in, number_text
from umad.grading.words import UNITS, is_math_word, number_from_words


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

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][A-Za-z']+")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
_HEDGES = frozenset(
    "about approximately roughly around total exactly only nearly is are the answer approx almost".split()
)


def plain(text: str) -> str:
    """The answer without boxes and layout: what everything else works on."""
    if "\\boxed" in text or "\\fbox" in text or "\\framebox" in text:
        text = unbox(text) or text
    return clean(text)


def normal_string(text: str) -> str:
    """A cleaned answer with neither spaces nor braces: equal strings are equal answers, whatever they mean."""
    if len(text) > MAX_LENGTH:
        return re.sub(r"\s+", "", text)
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text.replace("\\frac", "\\frac "))  # "1 2" is not 12
    return re.sub(r"[\s{}\"]+", "", text)


def normal_words(text: str) -> str:
    """Words for comparison: case, punctuation, articles, ordinals and layout ignored, number words as digits."""
    text = re.sub(r"\\[A-Za-z]+", " ", text.lower())
    number = number_from_words(text)
    if number is not None:
        return str(number)
    text = _ORDINAL.sub("", re.sub(r"[^\w\s.:/-]|_", " ", text).replace("p.m.", "pm").replace("a.m.", "am"))
    text = re.sub(r"\.(?!\d)|-", " ", text)
    words = _ARTICLES.sub(" ", text).split()
    digits = [number_from_words(word) if len(words) <= 12 else None for word in words]
    return " ".join(str(digit) if digit is not None else word for word, digit in zip(words, digits, strict=True))


@lru_cache(maxsize=8192)
def read(text: str, commas: str = "auto") -> Form:
    """The form of a short answer (boxes and delimiters allowed). Never raises on any text."""
    if len(text) > MAX_LENGTH:
        return Opaque(normal_string(text), size=True)
    cleaned = plain(text)
    if not cleaned:
        return Text("")
    try:
        return resolve(parse_tree(cleaned, commas=commas))
    except TooLarge:
        return Opaque(normal_string(cleaned), size=True)
    except (Unreadable, Undefined):
        return _fallback(cleaned)


def _fallback(cleaned: str) -> Form:
    prose = [word for word in _WORD.findall(cleaned) if not is_math_word(word)]
    if not prose and re.search(r"[\\^_=<>\[\](){}]", cleaned):
        return Opaque(normal_string(cleaned))
    words = normal_words(cleaned)
    as_number = number_from_words(cleaned.replace('"', " "))
    if as_number is not None:
        return Text(words, Num(as_number))
    numbers = [match.group() for match in NUMBER.finditer(cleaned)]
    tokens = words.split()
    if len(numbers) == 1 and (len(tokens) >= 4 or (tokens and tokens[0] in _HEDGES)):
        try:
            tree = parse_tree(clean(numbers[0].rstrip("%\\ ")))
        except (Unreadable, TooLarge):
            return Text(words)
        return Text(words, tree if isinstance(tree, Num) else None)
    return Text(words)


# --- from trees to forms ----------------------------------------------------------------------------------------------


def resolve(node: Node) -> Form:
    if isinstance(node, Words):
        return _words(node.text)
    if isinstance(node, Measure):
        form = resolve(node.node)
        if isinstance(form, Scalar) and not form.unit:
            form = replace(form, unit=unit_name(node.unit))
        elif isinstance(form, Sequence) and form.kind == "list":
            form = replace(form, items=(*form.items[:-1], _with_unit(form.items[-1], node.unit)))
        return form
    expanded = expand_signs(node)
    if len(expanded) > 1:
        return Sequence("list", tuple(resolve(item) for item in expanded))
    if isinstance(node, Group):
        return _group(node)
    if isinstance(node, Chain):
        return _chain(node)
    if isinstance(node, Builder):
        return _builder(node)
    if isinstance(node, Grid):
        return Table(tuple(tuple(_pure(cell) for cell in row) for row in node.rows))
    if isinstance(node, Op):
        return _operation(node)
    return Scalar(node)


def _with_unit(form: Form, unit: str) -> Form:
    return replace(form, unit=unit_name(unit)) if isinstance(form, Scalar) and not form.unit else form


def _words(text: str) -> Form:
    parts = [part for part in re.split(r"\s*(?:,|;|\band\b)\s*", text) if part]
    if len(parts) > 1 and all(len(part.split()) <= 2 for part in parts):
        return Sequence("list", tuple(_words(part) for part in parts))
    if re.fullmatch(r"\(?[A-Za-z]\)?", text):
        return Scalar(Name(text.strip("()")))
    return _fallback(text)


def unit_name(words: str) -> str:
    """The canonical unit that some words name, or "" where it isn't known (and so is ignored)."""
    words = re.sub(r"\^\s*\{?[23]\}?|\b(?:square|cubic|sq|per)\b|[().]", " ", words.lower())
    known = {UNITS[word] for word in re.split(r"[\s/]+", words) if word in UNITS}
    return known.pop() if len(known) == 1 else ""


def _pure(node: Node) -> Node:
    """Arithmetic only: numbers, names and operations on them."""
    if isinstance(node, Op):
        for arg in node.args:
            _pure(arg)
    elif not isinstance(node, (Num, Name)):
        raise Unreadable(type(node).__name__)
    return node


def expand_signs(node: Node) -> list[Node]:
    """`a \\pm b` as its two values; all the signs of one expression are taken together."""
    if not _has_signs(node):
        return [node]
    if isinstance(node, Group) and not node.opening:
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


def _group(node: Group) -> Form:
    items: list[Form] = []
    for item in node.items:
        form = resolve(item)
        if not node.opening and isinstance(form, Sequence) and form.kind == "list" and not form.label:
            items += form.items
        else:
            items.append(form)
    if not node.opening:
        if all(isinstance(item, Region) for item in items):
            return _join_regions([item for item in items if isinstance(item, Region)], node.joined)
        return Sequence("list", tuple(items))
    if node.opening == "{":
        return Sequence("set", tuple(items))
    if len(items) == 2 and {node.opening, node.closing} & {"["} and node.closing == ")":
        return _interval(node, items)
    if len(items) == 2 and node.opening == "(" and node.closing == "]":
        return _interval(node, items)
    if node.opening + node.closing not in ("()", "[]"):
        raise Unreadable("brackets")
    return Sequence("tuple", tuple(items), node.opening + node.closing)


def _interval(node: Group, items: list[Form]) -> Form:
    ends = [item.node for item in items if isinstance(item, Scalar)]
    if len(ends) != 2:
        raise Unreadable("interval")
    return Region((Piece(ends[0], node.opening == "[", ends[1], node.closing == "]"),))


def _join_regions(regions: list[Region], joined: str) -> Form:
    sets = [region.pieces for region in regions]
    if joined == "and":
        result = sets[0]
        for pieces in sets[1:]:
            result = intersect(result, pieces)
        return Region(result)
    return Region(merge(tuple(piece for pieces in sets for piece in pieces)))


def _operation(node: Op) -> Form:
    if node.name in ("cup", "cap", "setminus"):
        left, right = pieces_of(resolve(node.args[0])), pieces_of(resolve(node.args[1]))
        if left is None or right is None:
            raise Unreadable("a set operation")
        if node.name == "cup":
            return Region(merge((*left, *right)))
        return Region(intersect(left, right if node.name == "cap" else complement(right)))
    if node.name == "ratio" and len(node.args) > 2:
        first = node.args[0]
        return Sequence("tuple", tuple(Scalar(Op("ratio", (arg, first))) for arg in node.args), "()")
    if node.name == "ratio" and isinstance(node.args[1], Num) and node.args[1].value == 0:
        hour = node.args[0].value if isinstance(node.args[0], Num) else "?"
        return Text(f"{hour}:00")  # no ratio has a second part of 0, but a time of day has
    if any(isinstance(arg, Grid) for arg in node.args):
        return Table(_grid(node).rows)
    if node.name == "neg" and isinstance(node.args[0], Op) and node.args[0].name in ("pct", "deg", "base"):
        inner = node.args[0]
        return _operation(Op(inner.name, (Op("neg", inner.args[:1]), *inner.args[1:])))
    if node.name in ("pct", "deg"):
        return Scalar(_pure(node.args[0]), node.name)
    if node.name == "base" and isinstance(node.args[1], Num):
        return Scalar(node.args[0], f"base{node.args[1].value}")
    return Scalar(_pure(node))


def _grid(node: Node) -> Grid:
    """Sums, multiples and products of matrices, entry by entry."""
    if isinstance(node, Grid):
        return node
    if not isinstance(node, Op) or node.name not in ("add", "mul", "neg"):
        raise Unreadable("matrix")
    if node.name == "neg":
        grid = _grid(node.args[0])
        return Grid(tuple(tuple(Op("neg", (cell,)) for cell in row) for row in grid.rows))
    result: Node = node.args[0]
    for arg in node.args[1:]:
        result = _grid_pair(node.name, result, arg)
    return _grid(result)


def _grid_pair(name: str, left: Node, right: Node) -> Node:
    if not isinstance(left, Grid) and not isinstance(right, Grid):
        return Op(name, (_pure(left), _pure(right)))
    if name == "add":
        a, b = _grid(left), _grid(right)
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
    return Grid(tuple(tuple(Op("mul", (_pure(factor), cell)) for cell in row) for row in grid.rows))


# --- relations --------------------------------------------------------------------------------------------------------


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


def _chain(node: Chain) -> Form:
    args, ops = node.args, node.ops
    if "~" in ops:  # `2/3 ~ 0.67`: the exact side counts (`readings` tries the other one too)
        at = ops.index("~")
        if at == 0 and is_label(args[0]):
            ops = ("=", *ops[1:])
        else:
            args, ops = args[: at + 1], ops[:at]
            if not ops:
                return resolve(args[0])
        return _chain(Chain(args, ops))
    if all(op == "=" for op in ops):
        return _equation(args)
    if ops == ("in",) or ops == ("notin",):
        if ops == ("in",) and is_label(args[0]):
            return _labelled(resolve(args[1]), args[0])
        raise Unreadable("membership")
    if all(op in ("<", "<=") for op in ops) or all(op in (">", ">=") for op in ops):
        if ops[0] in (">", ">="):
            args, ops = args[::-1], tuple(op.replace(">", "<") for op in ops[::-1])
        if len(args) == 2:
            return _inequality(args[0], ops[0], args[1])
        if len(args) == 3:
            return _between(args, ops)
    if ops == ("!=",):
        return _inequality(args[0], "!=", args[1])
    raise Unreadable("relation")


def _labelled(form: Form, label: Node) -> Form:
    return form if isinstance(form, (Text, Opaque, Relation)) else replace(form, label=label)


def _equation(args: tuple[Node, ...]) -> Form:
    first, last = args[0], args[-1]
    if len(args) == 2:
        if isinstance(first, Name) and isinstance(last, Name) and is_label(first) and is_label(last):
            return Relation("=", Op("add", (first, Op("neg", (last,)))))
        if not is_label(first) and is_label(last) and not isinstance(last, Group):
            first, last = last, first
        elif not is_label(first) and isinstance(first, (Op, Name, Num)) and isinstance(last, (Op, Name, Num)):
            if names_in(first) - {"oo"} or (names_in(last) - {"oo"}):
                return Relation("=", Op("add", (_pure(first), Op("neg", (_pure(last),)))))
    form = resolve(last)
    return _labelled(form, first) if is_label(first) else form


def _difference(left: Node, right: Node) -> Node:
    return Op("add", (_pure(left), Op("neg", (_pure(right),))))


def substitute(node: Node, name: str, value: Node) -> Node:
    if isinstance(node, Name):
        return value if node.name == name else node
    return Op(node.name, tuple(substitute(arg, name, value) for arg in node.args)) if isinstance(node, Op) else node


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


def _inequality(left: Node, op: str, right: Node) -> Form:
    """`left < right` (or <=, !=): a part of the line where it has one variable and is affine in it."""
    closed = op == "<="
    bounded = _absolute_bound(left, op, right)
    if bounded:
        return bounded
    if is_label(left) and not isinstance(left, Group) and not (names_in(right) & names_in(left)):
        if op == "!=":
            return Region(complement((Piece(_pure(right), True, right, True),)), left)
        return Region((Piece(None, False, _pure(right), closed),), left)
    if is_label(right) and not isinstance(right, Group) and not (names_in(right) & names_in(left)):
        if op == "!=":
            return Region(complement((Piece(_pure(left), True, left, True),)), right)
        return Region((Piece(_pure(left), closed, None, False),), right)
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
    inner, negative = absolute.args[0], Op("neg", (_pure(bound),))
    first = _inequality(negative, op, inner) if inside else _inequality(inner, op, negative)
    second = _inequality(inner, op, bound) if inside else _inequality(bound, op, inner)
    if not isinstance(first, Region) or not isinstance(second, Region):
        return None
    join = intersect(first.pieces, second.pieces) if inside else merge((*first.pieces, *second.pieces))
    return Region(join, first.label)


def _between(args: tuple[Node, ...], ops: tuple[str, ...]) -> Form:
    lower, upper = _inequality(args[0], ops[0], args[1]), _inequality(args[1], ops[1], args[2])
    if not isinstance(lower, Region) or not isinstance(upper, Region):
        raise Unreadable("a double inequality")
    if is_label(args[1]):
        return Region((Piece(args[0], ops[0] == "<=", args[2], ops[1] == "<="),), args[1])
    return Region(intersect(lower.pieces, upper.pieces), upper.label)


def _builder(node: Builder) -> Form:
    condition = resolve(node.condition)
    if isinstance(condition, (Region, Sequence)) or (isinstance(condition, Scalar) and condition.label):
        return replace(condition, label=None)
    raise Unreadable("set builder")


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


# --- keys of forms ----------------------------------------------------------------------------------------------------


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


Reader = Callable[[str, str], Form]
