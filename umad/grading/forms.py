"""Answers as structures: a scalar, a list, a tuple, a union of intervals, a matrix, an equation, words.

`read` turns an answer into a `Form`. What has no form here is `Opaque`: it is compared by math-verify in a worker.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from umad.grading.cleaning import MAX_LENGTH, clean
from umad.grading.extract import NUMBER, unbox
from umad.grading.inequalities import between, inequality, is_label
from umad.grading.intervals import LINE, Piece, complement, intersect, merge
from umad.grading.matrices import grid_of
from umad.grading.nodes import Builder, Chain, Grid, Group, Measure, Name, Node, Num, Op, TooLarge, Unreadable, Words
from umad.grading.parser import parse as parse_tree
from umad.grading.shapes import Form, Opaque, Region, Relation, Scalar, Sequence, Table, Text, pieces_of
from umad.grading.trees import expand_signs, pure
from umad.grading.values import Undefined, names_in
from umad.grading.words import UNITS, is_math_word, number_from_words

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][A-Za-z']+")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
_HEDGES = frozenset(
    [
        "therefore",
        "thus",
        "so",
        "just",
        "simply",
        "then",
        "that",
        "about",
        "approximately",
        "roughly",
        "around",
        "total",
        "exactly",
        "only",
        "nearly",
        "is",
        "are",
        "the",
        "answer",
        "approx",
        "almost",
    ]
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
    if words in ("all real numbers", "all reals", "all real values", "any real number"):
        return Region(LINE)
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
    if isinstance(node, Grid) and len(node.rows[0]) == 1 and all(isinstance(row[0], Chain) for row in node.rows):
        return resolve(Group("", "", tuple(row[0] for row in node.rows), "and"))  # a system, one equation a line
    if isinstance(node, Grid):
        return Table(tuple(tuple(pure(cell) for cell in row) for row in node.rows))
    if isinstance(node, Op):
        return _operation(node)
    return Region(LINE) if node == Name("set R") else Scalar(node)


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


def _group(node: Group) -> Form:
    items: list[Form] = []
    for item in node.items:
        form = resolve(item)
        if node.opening in ("", "{") and isinstance(form, Sequence) and form.kind == "list" and not form.label:
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
        return Table(grid_of(node).rows)
    if node.name == "neg" and isinstance(node.args[0], Op) and node.args[0].name in ("pct", "deg", "base"):
        inner = node.args[0]
        return _operation(Op(inner.name, (Op("neg", inner.args[:1]), *inner.args[1:])))
    if node.name in ("pct", "deg"):
        return Scalar(pure(node.args[0]), node.name)
    if node.name == "base" and isinstance(node.args[1], Num):
        return Scalar(node.args[0], f"base{node.args[1].value}")
    return Scalar(pure(node))


# --- relations --------------------------------------------------------------------------------------------------------


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
            return inequality(args[0], ops[0], args[1])
        if len(args) == 3:
            return between(args, ops)
    if ops == ("!=",):
        return inequality(args[0], "!=", args[1])
    raise Unreadable("relation")


def _labelled(form: Form, label: Node) -> Form:
    return form if isinstance(form, (Text, Opaque, Relation)) else replace(form, label=label)


def _has_variables(*sides: Node) -> bool:
    arithmetic = all(isinstance(side, (Op, Name, Num)) for side in sides)
    return arithmetic and any(names_in(side) - {"oo"} for side in sides)


def _equation(args: tuple[Node, ...]) -> Form:
    first, last = args[0], args[-1]
    if len(args) == 2:
        if isinstance(first, Name) and isinstance(last, Name) and is_label(first) and is_label(last):
            return Relation("=", Op("add", (first, Op("neg", (last,)))))
        if not is_label(first) and is_label(last) and not isinstance(last, Group):
            first, last = last, first
        elif _has_variables(first, last) and not is_label(first):
            return Relation("=", Op("add", (pure(first), Op("neg", (pure(last),)))))
    form = resolve(last)
    return _labelled(form, first) if is_label(first) else form


def _builder(node: Builder) -> Form:
    condition = resolve(node.condition)
    if isinstance(condition, (Region, Sequence)) or (isinstance(condition, Scalar) and condition.label):
        return replace(condition, label=None)
    raise Unreadable("set builder")
