"""Class keys, and laws that hold for any text."""

from __future__ import annotations

import itertools
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umad.grading import NO_ANSWER, Grader, class_key, equal, extract, token_f1
from umad.grading.relation import decide

SAME = [
    ["1/2", "0.5", "\\frac12", "\\dfrac{1}{2}", ".50", "2^{-1}", "\\sin 30^\\circ"],
    ["2\\sqrt3", "\\sqrt{12}", "\\frac{6}{\\sqrt3}"],
    ["1, 2, 3", "3,2,1", "\\{1,2,3\\}", "x=1 \\text{ or } x=2 \\text{ or } x=3"],
    ["(1, 2)", "x=1, y=2", "(x,y)=(1,2)", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"],
    ["x \\le 3", "(-\\infty, 3]", "x\\in(-\\infty,3]", "3 \\ge x"],
    ["25%", "25", "25.0", "25 \\text{ cm}", "$25", "\\boxed{25}"],
    ["(x+1)^2", "x^2+2x+1"],
    ["2x+4y=6", "x+2y-3=0"],
    ["\\text{Evelyn}", "evelyn", "Evelyn."],
]


@pytest.mark.parametrize("group", SAME)
def test_ways_of_writing_one_answer_have_one_key(group):
    assert len({class_key(text) for text in group}) == 1


def test_different_answers_have_different_keys():
    keys = [class_key(group[0]) for group in SAME]
    assert len(set(keys)) == len(keys)
    for one, two in [
        ("1", "2"),
        ("x", "y"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("\\sqrt2", "1.414"),
        ("Evelyn", "Eve"),
    ]:
        assert class_key(one) != class_key(two)


def test_no_answer_has_its_own_key():
    assert class_key(None) == class_key("") == class_key("  ") == class_key("$$") == NO_ANSWER


def test_kinds_have_their_own_keys():
    assert class_key("(b)", "choice") == class_key("B. Paris", "choice")
    assert class_key("The Beatles", "text") == class_key("beatles", "text")
    assert class_key("36 eggs", "number") == class_key("36", "number")
    assert class_key("a  b", "code:m:f") == class_key("a b", "code:m:f")


def test_what_has_no_canonical_form_joins_its_class_by_math_verify_whatever_the_order():
    answers = ["\\int_0^1 x\\,dx", "1/2", "\\int_0^1 (1-x)\\,dx", "\\int_0^1 x^2\\,dx", None, "\\sum_{k=1}^{3} k", "6"]
    with Grader(workers=1) as grader:
        keys = grader.class_keys(answers)
        assert keys[0] == keys[1] == keys[2] == class_key("1/2")
        assert keys[5] == keys[6]
        assert len(set(keys)) == 4
        for order in itertools.islice(itertools.permutations(range(7)), 0, 5040, 501):
            assert grader.class_keys([answers[n] for n in order]) == [keys[n] for n in order]


def test_token_f1_is_the_shared_words():
    assert token_f1("The Beatles", "beatles") == 1.0
    assert token_f1("from 1986 to 2013", "1986 to 2013") == pytest.approx(6 / 7)
    assert token_f1("yes", "yes, he did") == 0.0
    assert token_f1("Paris", None) == 0.0


PIECES = st.sampled_from(
    [
        "\\boxed{",
        "}",
        "{",
        "\\frac",
        "\\sqrt",
        "^",
        "_",
        "(",
        ")",
        "[",
        "]",
        ",",
        "1",
        "23",
        "0.5",
        "x",
        "y",
        "\\pi",
        "=",
        "<",
        "\\le",
        " ",
        "+",
        "-",
        "*",
        "/",
        "!",
        "%",
        "|",
        "\\pm",
        "\\cup",
        "\\infty",
        "\\text{and}",
        "and",
        "or",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
        "\\\\",
        "\\{",
        "\\}",
        "$",
        "\\int",
        "\\sum",
        "cm",
        "answer is ",
        "\n",
        "**",
        "</think>",
        "\\sin",
        "\\log_",
        ":",
        ";",
        ".",
        "e",
        "i",
        "\x00",
        "\ud800",
        "٣",
        "²",
    ]
)
HOSTILE = st.one_of(
    st.lists(PIECES, max_size=25).map("".join), st.text(max_size=60), st.text(string.printable, max_size=60)
)
FUZZ = settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(HOSTILE, st.sampled_from(["math", "number", "choice", "text"]))
def test_no_text_raises_or_takes_long_and_an_extraction_equals_itself(text, kind):
    answer = extract(text, kind)
    assert class_key(answer, kind) == class_key(answer, kind)
    if answer is not None:
        assert decide(answer, answer, kind).equal is True
        decide("\\frac{1}{2}", answer, kind)
        decide(answer, "3", kind)


@FUZZ
@given(HOSTILE, HOSTILE)
def test_equal_keys_of_canonical_forms_are_equal_answers(one, two):
    key = class_key(one)
    if key == class_key(two) and key[:2] in ("n:", "f:") and decide(one, two, "math").equal is not None:
        readings = decide(one, two, "math").equal or decide(two, one, "math").equal
        if not any(mark in one + two for mark in "%_°") and "cm" not in one + two and "=" not in one + two:
            assert readings


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6), st.integers(1, 50))
def test_fractions_equal_their_multiples_and_nothing_else(top, bottom, factor):
    gold = f"\\frac{{{top}}}{{{bottom}}}"
    assert equal(gold, f"{top * factor}/{bottom * factor}")
    assert class_key(gold) == class_key(f"{top * factor}/{bottom * factor}")
    assert not equal(gold, f"\\frac{{{top + 1}}}{{{bottom}}}")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms())
def test_lists_ignore_order_and_tuples_do_not(numbers, random):
    shuffled = numbers[:]
    random.shuffle(shuffled)
    assert equal(", ".join(map(str, numbers)), ", ".join(map(str, shuffled)))
    tuples = f"({', '.join(map(str, numbers))})", f"({', '.join(map(str, shuffled))})"
    assert equal(*tuples) == (numbers == shuffled)
