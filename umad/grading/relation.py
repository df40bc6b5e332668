"""`equal`: is the candidate right, given the gold? Lenient by the policy table of docs/grading.md; gold first.

`decide` answers in this process, in time linear in the answers' length, wherever both are read by our own parser. Where
one of them is not, it says so (None), and the caller asks math-verify in a worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from umad.grading.canonical import label_text, relation_text, scalar_text
from umad.grading.extract import last_number
from umad.grading.forms import normal_string, normal_words, plain, read
from umad.grading.intervals import Piece, Span
from umad.grading.nodes import Name, Node, Num, Op, TooLarge, Unreadable
from umad.grading.options import option_letter
from umad.grading.shapes import Form, Opaque, Region, Relation, Scalar, Sequence, Table, Text, pieces_of
from umad.grading.values import Undefined, Value, context, evaluate, inexact, literals_in, names_in, number_text

MIN_DIGITS = 4
"""Significant digits from which on a decimal may stand for the irrational or repeating number that it rounds."""
MAX_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """`equal` None: only a worker can tell. `status` is `memory` for what was refused because of its size."""

    equal: bool | None
    status: str = "ok"


RIGHT, WRONG, UNDECIDED, REFUSED = Verdict(True), Verdict(False), Verdict(None), Verdict(False, "memory")

_INTEGER = re.compile(r"-?\d{1,15}")
_LIST_OF_NUMBERS = re.compile(r"[(\[{]?\s*-?\d+(?:,\d{3})*(?:,\d+)+\s*[)\]}]?")
_ONE_COMMA = re.compile(r"-?(?:0,\d{2,}|\d+,\d{2}|\d{4,},\d+)")
_LETTER_GOLD = re.compile(r"(?:\\text|\\mathrm|\\mathbf|\\textbf)?\s*\{?\s*\(?\s*([A-E])\s*\)?\s*\}?")


def decide(gold: str, candidate: str, kind: str) -> Verdict:
    """Whether `candidate` is right for `gold`; both are short answers. Kinds: math, number, choice, text."""
    if kind == "text":
        return RIGHT if exact_text(gold, candidate) else WRONG
    if kind == "choice":
        return RIGHT if same_option(gold, candidate) else WRONG
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(candidate):
        return RIGHT if int(gold) == int(candidate) else WRONG
    return decide_math(gold, candidate, kind)


def exact_text(gold: str, candidate: str) -> bool:
    """The same words; or the same items of a list, in any order (`March and April`)."""
    gold, candidate = plain_text(gold), plain_text(candidate)
    return normal_words(gold) == normal_words(candidate) or (
        len(parts := _listed(gold)) > 1 and parts == _listed(candidate)
    )


def _listed(text: str) -> list[str]:
    return sorted(filter(None, map(normal_words, re.split(r"[,;]|\band\b", text))))


def plain_text(text: str) -> str:
    """Words without boxes, `\\text{}` and delimiters."""
    return plain(text) if "\\" in text else text


def same_option(gold: str, candidate: str) -> bool:
    wanted = option_letter(gold)
    if wanted is None:
        return exact_text(gold, candidate)
    return option_letter(candidate) == wanted


@lru_cache(maxsize=8192)
def readings(text: str) -> tuple[Form, ...]:
    """The readings of an answer: one, but for commas between digits (`1,234`; `2,74`)."""
    bare = text.strip().strip("$ ")
    forms = [read(text)]
    if "," in bare and _LIST_OF_NUMBERS.fullmatch(bare):
        forms.append(read(text, "list"))
    if "," in bare and _ONE_COMMA.fullmatch(bare):
        forms.append(read(text, "decimal"))
    if "\\approx" in bare or "≈" in bare:
        forms.append(read(re.split(r"\\approx|≈", bare)[-1]))
    return tuple(forms)


def decide_math(gold: str, candidate: str, kind: str) -> Verdict:
    golds, candidates = readings(gold), readings(candidate)
    if kind == "number":
        golds, candidates = _numbers(gold, golds), _numbers(candidate, candidates)
    undecided = False
    for one in golds:
        for other in candidates:
            try:
                if same(one, other):
                    return RIGHT
            except Undefined:
                continue
            except TooLarge:
                return _refuse(gold, candidate, one)
            except Unreadable:
                undecided = True
    if normal_string(_plain(gold)) == normal_string(_plain(candidate)):
        return RIGHT
    if kind == "math" and (_same_letter(gold, candidate) or _same_words(gold, candidate)):
        return RIGHT
    if any(isinstance(form, Opaque) and form.size for form in candidates):
        return _refuse(gold, candidate, golds[0])
    return UNDECIDED if undecided else WRONG


def _plain(text: str) -> str:
    return plain(text) if len(text) < 4000 else text


def _numbers(text: str, forms: tuple[Form, ...]) -> tuple[Form, ...]:
    """For kind `number`: what isn't a single value is read as the only number in it, if there is just one."""
    if any(isinstance(form, Scalar) for form in forms):
        return tuple(form for form in forms if isinstance(form, Scalar))
    found = last_number(text.partition("####")[2] or text) if len(text) < 4000 else None
    if found is None or any(isinstance(form, Sequence) for form in forms):
        return forms
    return (*forms, read(found))


_ONLY_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z\s,.;!?'\"-]+")


def _same_words(gold: str, candidate: str) -> bool:
    """Sentences without any mathematics, whatever commas they hold."""
    texts = [_plain(text) for text in (gold, candidate)]
    return all(map(_ONLY_WORDS.fullmatch, texts)) and normal_words(texts[0]) == normal_words(texts[1])


def _same_letter(gold: str, candidate: str) -> bool:
    """A gold that is one option letter accepts `(B) 12` and `B. because`."""
    letter = _LETTER_GOLD.fullmatch(gold.strip().strip("$"))
    if letter is None or len(candidate) > 200:
        return False
    if candidate.strip(" ()$.") == letter.group(1).lower():
        return True
    found = re.match(
        r"\W*(?:\\text|\\mathrm|\\mathbf|\\textbf)?\s*\{?\s*(?:\(\s*([A-E])\s*\)|([A-E])\s*(?:[).:]|$))",
        candidate.strip(),
    )
    return found is not None and (found.group(1) or found.group(2)) == letter.group(1)


def _refuse(gold: str, candidate: str, form: Form) -> Verdict:
    """A number too large to evaluate is wrong unless it is written as the gold; a gold that large needs a worker."""
    if normal_string(_plain(gold)) == normal_string(_plain(candidate)):
        return RIGHT
    try:
        if isinstance(form, Scalar):
            evaluate(form.node)
        elif isinstance(form, Opaque) and form.size:
            return UNDECIDED if len(gold) < 2000 and len(candidate) < 2000 else REFUSED
    except TooLarge:
        return UNDECIDED
    except (Undefined, Unreadable):
        return REFUSED
    return REFUSED


# --- two forms --------------------------------------------------------------------------------------------------------


def same(gold: Form, candidate: Form) -> bool:
    """Whether two forms agree. Raises Unreadable where only a worker can tell."""
    if isinstance(gold, Text) or isinstance(candidate, Text):
        return _same_text(gold, candidate)
    if isinstance(gold, Opaque) or isinstance(candidate, Opaque):
        if isinstance(gold, Opaque) and isinstance(candidate, Opaque) and gold.text == candidate.text:
            return True
        if isinstance(candidate, Opaque) and candidate.size:
            raise TooLarge("size")
        raise Unreadable("opaque")
    if _labels_differ(gold, candidate):
        return False
    if isinstance(gold, Scalar) and isinstance(candidate, Scalar):
        return _same_scalar(gold, candidate)
    if isinstance(gold, Relation) or isinstance(candidate, Relation):
        return _same_relation(gold, candidate)
    if isinstance(gold, Table) or isinstance(candidate, Table):
        return _same_table(gold, candidate)
    if isinstance(gold, Region) or isinstance(candidate, Region):
        return _same_region(gold, candidate)
    return _same_sequence(_as_sequence(gold), _as_sequence(candidate))


def _labels_differ(gold: Form, candidate: Form) -> bool:
    """`x = 5` against `y = 5`: two bare names that differ, for a plain value."""
    if not isinstance(gold.label, Name) or not isinstance(candidate.label, Name):
        return False
    if not isinstance(gold, Scalar) or names_in(gold.node):
        return False
    return gold.label.name != candidate.label.name


def _same_text(gold: Form, candidate: Form) -> bool:
    if isinstance(gold, Text) and isinstance(candidate, Text):
        if gold.number is not None and candidate.number is not None:  # two sentences, or a sentence and a number word
            return gold.number.value == candidate.number.value
        return gold.text == candidate.text or _same_time(gold.text, candidate.text)
    text, other = (gold, candidate) if isinstance(gold, Text) else (candidate, gold)
    if isinstance(text, Text) and isinstance(other, Scalar):
        if text.number is not None:
            number = Scalar(text.number)
            return _same_scalar(number, other) if isinstance(gold, Text) else _same_scalar(other, number)
        if isinstance(other.node, Op) and other.node.name == "ratio":
            hour, minute = (str(arg.value) if isinstance(arg, Num) else "?" for arg in other.node.args[:2])
            return _same_time(text.text, f"{hour}:{minute.zfill(2)}")
    return False


_TIME = re.compile(r"(\d{1,2}):(\d{2})\s*([ap]m)?")


def _same_time(gold: str, candidate: str) -> bool:
    """`4:30 p.m.` and `4:30`; the half of the day counts where both name it."""
    one, two = _TIME.fullmatch(gold), _TIME.fullmatch(candidate)
    if not one or not two or int(one.group(1)) != int(two.group(1)) or one.group(2) != two.group(2):
        return False
    return one.group(3) == two.group(3) or not (one.group(3) and two.group(3))


def _same_scalar(gold: Scalar, candidate: Scalar) -> bool:
    units = {gold.unit, candidate.unit}
    if gold.unit and candidate.unit and len(units) > 1:
        return False
    if same_node(gold.node, candidate.node):
        return True
    if "pct" in units and len(units) > 1:  # 25% is 25 and is 0.25
        if gold.unit == "pct":
            return same_node(Op("pct", (gold.node,)), candidate.node)
        return same_node(gold.node, Op("pct", (candidate.node,)))
    if "deg" in units and len(units) > 1:
        degrees, other = (gold, candidate) if gold.unit == "deg" else (candidate, gold)
        turn = Op("mul", (degrees.node, Name("pi"), Op("inv", (Num(Fraction(180)),))))
        return _mentions_pi(other.node) and same_node(turn, other.node)
    return False


def _mentions_pi(node: Node) -> bool:
    return node == Name("pi") or (isinstance(node, Op) and any(_mentions_pi(arg) for arg in node.args))


def same_node(gold: Node, candidate: Node) -> bool:
    """Equal values (at fixed points where there are variables), or a decimal that rounds the other."""
    if isinstance(gold, Num) and isinstance(candidate, Num) and gold.value == candidate.value:
        return True
    if _float_noise(gold, candidate) or _float_noise(candidate, gold):
        return True
    if scalar_text(gold) == scalar_text(candidate):
        return True
    if names_in(gold) != names_in(candidate):
        return False
    return approximates(candidate, gold) or approximates(gold, candidate)


def _float_noise(literal: Node, other: Node) -> bool:
    """A decimal of 12 digits and more, as programs print them: 0.30000000000000004 is 0.3."""
    literals = literals_in(literal)
    if not _is_literal(literal) or literals[0].ulp is None or literals[0].digits < 12 or names_in(other):
        return False
    value, true = inexact(evaluate(literal)), inexact(evaluate(other))
    return bool(abs(value - true) <= abs(true) * context().mpf(10) ** -12)


def approximates(rounded: Node, exact: Node) -> bool:
    """Whether the decimals in `rounded` are what rounding or cutting off `exact` gives.

    Only decimals with at least 4 significant digits, and only for values that no short decimal equals: irrational or
    repeating ones. A terminating decimal has to be met exactly.
    """
    literals = [literal for literal in literals_in(rounded) if literal.ulp is not None]
    if not literals or any(literal.digits < MIN_DIGITS for literal in literals):
        return False
    finer = [literal for literal in literals_in(exact) if literal.ulp is not None]
    if finer and not _finer(literals, finer):
        return False
    points = (0, 1) if names_in(exact) else (0,)
    for point in points:
        value, true = evaluate(rounded, point), evaluate(exact, point)
        if not finer and isinstance(true, Fraction) and _terminates(true):
            return False
        allowed = abs(inexact(evaluate(rounded, point, bump=True)) - inexact(value))
        error = inexact(value) - inexact(true)
        if not abs(error) < allowed:
            return False
        if _is_literal(rounded) and not error.imag:  # cut off towards zero, or rounded to the nearest
            towards_zero = (error.real <= 0) == (inexact(value).real >= 0)
            if not towards_zero and 2 * abs(error) > allowed:
                return False
    return True


def _is_literal(node: Node) -> bool:
    return isinstance(node, Num) or (isinstance(node, Op) and node.name == "neg" and isinstance(node.args[0], Num))


def _finer(literals: list[Num], finer: list[Num]) -> bool:
    """Two decimals: the longer may round to the shorter where that has 6 significant digits."""
    if len(literals) != 1 or len(finer) != 1:
        return False
    short, long = literals[0].ulp, finer[0].ulp
    return short is not None and long is not None and long < short and literals[0].digits >= 6


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _same_relation(gold: Form, candidate: Form) -> bool:
    one, two = _as_relation(gold), _as_relation(candidate)
    return one is not None and two is not None and one.op == two.op and relation_text(one) == relation_text(two)


def _as_relation(form: Form) -> Relation | None:
    if isinstance(form, Relation):
        return form
    if isinstance(form, Scalar) and isinstance(form.label, Name):
        return Relation("=", Op("add", (form.label, Op("neg", (form.node,)))))
    return None


def _same_table(gold: Form, candidate: Form) -> bool:
    one, two = _cells(gold), _cells(candidate)
    if one is None or two is None or len(one) != len(two):
        return False
    rows = {len(form.rows) for form in (gold, candidate) if isinstance(form, Table)}
    return len(rows) == 1 and all(same_node(a, b) for a, b in zip(one, two, strict=True))


def _cells(form: Form) -> list[Node] | None:
    if isinstance(form, Table):
        return [cell for row in form.rows for cell in row]
    if isinstance(form, Sequence) and form.kind == "tuple":
        cells = [item.node for item in form.items if isinstance(item, Scalar)]
        return cells if len(cells) == len(form.items) else None
    if isinstance(form, Scalar):
        return [form.node]
    return None


def _same_region(gold: Form, candidate: Form) -> bool:
    one, two = pieces_of(gold), pieces_of(candidate)
    if one is None or two is None or len(one) != len(two):
        return False
    return all(_same_piece(a, b) for a, b in zip(one, two, strict=True))


def _same_piece(gold: Piece, candidate: Piece) -> bool:
    if Span.of(gold) != Span.of(candidate):
        return False
    span = Span.of(gold)
    ends = [(gold.low, gold.low_closed, candidate.low, candidate.low_closed)] if not span.from_infinity else []
    if not span.to_infinity:
        ends.append((gold.high, gold.high_closed, candidate.high, candidate.high_closed))
    return all(a and b and a_open == b_open and same_node(a, b) for a, a_open, b, b_open in ends)


# --- lists, sets, tuples ----------------------------------------------------------------------------------------------


def _as_sequence(form: Form) -> Sequence:
    return form if isinstance(form, Sequence) else Sequence("list", (form,))


def _same_sequence(gold: Sequence, candidate: Sequence) -> bool:
    one, two = gold.items, candidate.items
    if max(len(one), len(two)) > MAX_ITEMS:
        raise TooLarge("too many items")
    if "set" in (gold.kind, candidate.kind):
        one, two = _distinct(one), _distinct(two)
    if len(one) != len(two):
        return False
    if gold.kind == "tuple" and candidate.kind == "tuple":
        if len(one) == 2 and gold.brackets != candidate.brackets:
            return False
        return _in_order(one, two)
    if gold.kind == "tuple":
        if gold.brackets == "[]" and len(one) == 2:  # a closed interval, not a list in brackets
            return False
        return candidate.kind == "list" and _in_order(_by_label(one), _by_label(two))
    labels, other = [label_text(item.label) for item in one], [label_text(item.label) for item in two]
    if _named(labels) and _named(other) and set(labels) == set(other):
        return _in_order(_by_label(one), _by_label(two))
    if (_named(labels) and _bases_differ(labels)) or (_named(other) and _bases_differ(other)):
        return _in_order(one, two) or _in_order(_by_label(one), _by_label(two))
    return _any_order(one, two)


def _named(labels: list[str]) -> bool:
    return len(labels) > 1 and all(labels) and len(set(labels)) == len(labels)


def _bases_differ(labels: list[str]) -> bool:
    """`x, y` name two quantities; `x_1, x_2` are two values of one."""
    return len({label.partition("_")[0] for label in labels}) > 1


def _by_label(items: tuple[Form, ...]) -> tuple[Form, ...]:
    if not _named([label_text(item.label) for item in items]):
        return items
    return tuple(sorted(items, key=lambda item: label_text(item.label)))


def _distinct(items: tuple[Form, ...]) -> tuple[Form, ...]:
    kept: list[Form] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _in_order(one: tuple[Form, ...], two: tuple[Form, ...]) -> bool:
    return len(one) == len(two) and all(same(_unlabelled(a), _unlabelled(b)) for a, b in zip(one, two, strict=True))


def _unlabelled(form: Form) -> Form:
    return Scalar(form.node, form.unit) if isinstance(form, Scalar) and form.label is not None else form


def _any_order(one: tuple[Form, ...], two: tuple[Form, ...]) -> bool:
    left = list(two)
    for item in one:
        match = next((other for other in left if same(_unlabelled(item), _unlabelled(other))), None)
        if match is None:
            return False
        left.remove(match)
    return True


__all__ = ["Value", "Verdict", "decide", "number_text", "readings", "same"]
