"""The policy table of docs/grading.md: each row is a test, by the name that the table gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from umad.grading import equal

# name: (pairs that are right, pairs that are wrong); gold first
POLICY: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "whole numbers are exact": (
        [("18", "18.0"), ("18", "+18"), ("007", "7"), ("1000000", "10^6"), ("0", "-0")],
        [("10000", "9999.857"), ("3", "3.0001"), ("99999999999999999999", "99999999999999999998"), ("12", "1 2")],
    ),
    "fractions and terminating decimals are exact": (
        [("1/2", "0.5"), ("\\frac{1}{2}", "\\frac{2}{4}"), (".35625", "0.35625"), ("1.25", "1\\frac{1}{4}")],
        [("1.5", "1.54"), ("\\frac{17}{16}", "1.06"), ("0.125", "0.13")],
    ),
    "rounding: four significant digits stand for an irrational or repeating number": (
        [
            ("\\frac13", "0.3333"),
            ("\\sqrt3", "1.732"),
            ("40\\pi", "125.66"),
            ("125.663", "40\\pi"),
            ("\\frac83", "2.6667"),
        ],
        [("\\frac13", "0.333"), ("\\pi", "3.14"), ("\\frac13", "0.3334"), ("\\sqrt2", "1.415")],
    ),
    "long decimals: 12 digits, or 6 of two decimals": (
        [("\\frac{1}{12}", "0.0833333333333333"), ("2.66667", "2.6666667"), ("4", "4.0000000000001")],
        [("2.667", "2.66667"), ("4", "4.000001")],
    ),
    "repeating decimals": (
        [("1/3", "0.\\overline{3}"), ("1/6", "0.1\\overline{6}"), ("1/3", "0.333...")],
        [("1/3", "0.3...")],
    ),
    "thousands separators": (
        [
            ("1,234,567", "1234567"),
            ("10{,}000", "10000"),
            ("11,\\! 111", "11111"),
            ("1000", "1 000"),
            ("10\\,000", "10,000"),
        ],
        [("1,000", "1"), ("1,000", "1.000")],
    ),
    "comma decimals: two or more decimals after 0 or four digits, or exactly two": (
        [("2.74", "2,74"), ("1000.99", "1000,99"), ("0.111", "0,111")],
        [("1.2", "1,2"), ("0.1", "0,1"), ("1,2", "1.2")],
    ),
    "percent: p% is p and is p/100": (
        [("25\\%", "25"), ("25\\%", "0.25"), ("0.1", "10%"), ("20", "20\\%"), ("25\\%", "25%")],
        [("25", "0.25"), ("25\\%", "0.25%"), ("25\\%", "2500")],
    ),
    "units: ignored where one side has none or one is unknown; two known ones must agree": (
        [
            ("12 \\text{ cm}", "12"),
            ("180", "180 miles"),
            ("\\$12.50", "12.5 dollars"),
            ("5", "5 apples"),
            ("12\\text{ cm}^2", "12 square centimeters"),
            ("5\\text{ hours}", "5 hrs"),
        ],
        [("5 cm", "5 m"), ("3 \\text{ hours}", "3 minutes")],
    ),
    "degrees: a unit, and a multiple of pi": (
        [("45^\\circ", "45"), ("45", "45°"), ("60^\\circ", "\\frac{\\pi}{3}"), ("\\frac12", "\\sin 30^\\circ")],
        [("60^\\circ", "\\frac{\\pi}{6}"), ("\\pi", "180")],
    ),
    "bases: the digits count, and the base where both name it": (
        [("4210_7", "4210_{7}"), ("4210_7", "4210")],
        [("1011_2", "1011_3"), ("1011_2", "11")],
    ),
    "labels on the left are dropped": (
        [
            ("5", "x = 5"),
            ("y = 2x+3", "2x+3"),
            ("f(x) = x^2", "x^2"),
            ("1", "|AB| = 1"),
            ("1", "A:B = 1"),
            ("60", "\\angle A = 60^\\circ"),
        ],
        [("x = 5", "y = 5"), ("5", "x = 6")],
    ),
    "chains: the last part counts, before an approximation": (
        [
            ("2", "\\sqrt{4} = 2"),
            ("8", "10 - 2 = 8"),
            ("\\frac23", "\\frac{2}{3} \\approx 0.67"),
            ("0.67", "\\frac{2}{3} \\approx 0.67"),
        ],
        [("10", "10 - 2 = 8")],
    ),
    "bare lists have no order, and every item counts": (
        [
            ("1, 2, 3", "3, 1, 2"),
            ("-5,-2,7", "7, -2, \\text{ and } -5"),
            ("1331 and 1728", "1728, 1331"),
            ("x=2 \\text{ or } x=3", "2, 3"),
        ],
        [
            ("1331 and 1728", "1728"),
            ("1, 2", "1, 2, 3"),
            ("\\frac{2}{5},3", "\\frac25"),
            ("2, 2, 3", "2, 3, 3"),
            ("5", "3, 5"),
        ],
    ),
    "named values are paired by name": (
        [
            ("x=1, y=2", "y=2, x=1"),
            ("(x, y) = (1, 2)", "x=1, y=2"),
            ("1, 2, 3", "x = 1, y = 2, z = 3"),
            ("x_1=3, x_2=5", "5, 3"),
        ],
        [("x=1, y=2", "x=2, y=1")],
    ),
    "tuples are ordered": (
        [
            ("(1, 2)", "(1,2)"),
            ("(1,2,3)", "\\langle 1,2,3 \\rangle"),
            ("(2,3),(4,5)", "(4,5),(2,3)"),
            ("(7, 5)", "\\begin{pmatrix}7\\\\5\\end{pmatrix}"),
        ],
        [("(2, 1)", "(1, 2)"), ("(1, 3, 2)", "[1, 2, 3]"), ("(1,2,3)", "(1,2)")],
    ),
    "sets have no order and no repetitions": (
        [("\\{1,2,3\\}", "{3,2,1}"), ("\\{1,2\\}", "\\{1,2,2\\}"), ("\\{1,2\\}", "2, 1"), ("\\{5\\}", "5")],
        [("\\{1,2\\}", "\\{1,2,3\\}")],
    ),
    "intervals: ends and brackets": (
        [
            ("[0,1)", "[0, 1)"),
            ("(1,\\frac92)", "(1,4.5)"),
            ("(-\\infty,3]", "(-\\infty, 3]"),
            ("(1,2)\\cup(3,4)", "(3,4)\\cup(1,2)"),
        ],
        [("[0,1)", "[0,1]"), ("[0,9)", "[0,1)"), ("(-\\infty,3]", "3"), ("1", "-[0,1)"), ("(0,1)", "[0,1]")],
    ),
    "inequalities are intervals": (
        [
            ("(-\\infty,3]", "x \\le 3"),
            ("x \\le 3", "(-\\infty,3]"),
            ("-793 < a < 10", "(-793, 10)"),
            ("x \\in [-2,7]", "[-2,7]"),
            ("-1\\le x\\le 1", "|x| \\le 1"),
            ("x \\ne 0", "(-\\infty,0)\\cup(0,\\infty)"),
            ("\\{x \\mid x > 3\\}", "(3,\\infty)"),
            ("x>2", "4 < 2x"),
        ],
        [("x > 3", "x \\ge 3"), ("x > 3", "x < 3")],
    ),
    "equations: the same up to a factor": (
        [
            ("2x+4y=6", "x+2y=3"),
            ("34x+45y-20z+100=0", "-34x-45y+20z-100=0"),
            ("y=2x+1", "2x-y+1=0"),
            ("x^2+y^2=4", "4=x^2+y^2"),
        ],
        [("x+y=2", "x+y=3"), ("x+y=2", "2")],
    ),
    "expressions: equal as functions": (
        [
            ("(a+b)^2", "a^2+2ab+b^2"),
            ("\\tan^2(y)+1", "\\sec^2(y)"),
            ("2\\sqrt3", "\\sqrt{12}"),
            ("3+4i", "4i+3"),
            ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac27"),
            ("5!", "120"),
            ("\\binom52", "10"),
        ],
        [
            ("2\\sqrt{3}", "2"),
            ("2x", "2y"),
            ("x^2", "x^3"),
            ("(a+5)(b+2)", "(+5)(b+2)"),
            ("|x|", "x"),
            ("3+4i", "3-4i"),
        ],
    ),
    "plus-minus is two values": (
        [("2, -2", "\\pm 2"), ("x = 1 \\pm \\sqrt2", "1-\\sqrt2, 1+\\sqrt2")],
        [("\\pm 5", "5"), ("5", "\\pm 5")],
    ),
    "matrices: entry by entry": (
        [
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1 & 2 \\\\ 3 & 4\\end{bmatrix}"),
            (
                "\\begin{pmatrix}6 & 8\\end{pmatrix}",
                "\\begin{pmatrix}1 & 2\\end{pmatrix}+\\begin{pmatrix}5 & 6\\end{pmatrix}",
            ),
        ],
        [
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}"),
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2&3&4\\end{pmatrix}"),
        ],
    ),
    "ratios are quotients": ([("3:4", "\\frac34"), ("3:4", "6:8"), ("1:2:3", "2:4:6")], [("3:4", "4:3")]),
    "words: case, articles and punctuation ignored; number words are numbers": (
        [
            ("\\text{Evelyn}", "evelyn"),
            ("\\text{even}", "Even."),
            ("\\mbox{four}", "4"),
            ("42", "\\text{forty-two}"),
            ("\\text{no solution}", "No solution"),
        ],
        [("\\text{even}", "odd"), ("world", "hello"), ("4", "four score")],
    ),
    "a sentence with one number is that number": (
        [("17", "James took 17 hours"), ("5", "about 5")],
        [("5", "between 4 and 6 hours"), ("140", "Andy plants 130 flowers")],
    ),
    "option letters, alone or before their text": (
        [("\\text{(B)}", "B"), ("B", "(B) Paris"), ("B", "b"), ("D", "\\textbf{(D)}\\ 12")],
        [("A", "B"), ("A", "B, because A is wrong")],
    ),
    "times of day": (
        [("4:30 \\text{ p.m.}", "4:30"), ("5:00", "05:00")],
        [("4:30 \\text{ p.m.}", "4:30 a.m."), ("10:30", "10:45")],
    ),
    "boxes and delimiters mean nothing": (
        [
            ("5", "\\boxed{5}"),
            ("5", "\\boxed{\\boxed{5}}"),
            ("$5$", "\\(5\\)"),
            ("\\boxed{1} papers and \\boxed{2} bins", "1, 2"),
            ("\\frac12", "\x0crac{1}{2}"),
            ("\\sqrt5", "\\\\sqrt{5}"),
        ],
        [("5", "\\boxed{6}")],
    ),
    "no value is equal to nothing": (
        [],
        [("1", "1/0"), ("0", "\\emptyset"), ("5", "9^{9^{9^9}}"), ("\\infty", "-\\infty")],
    ),
}

CASES = [(name, *pair, True) for name, (right, _) in POLICY.items() for pair in right]
CASES += [(name, *pair, False) for name, (_, wrong) in POLICY.items() for pair in wrong]


@pytest.mark.parametrize(("name", "gold", "candidate", "expected"), CASES)
def test_policy_row(name: str, gold: str, candidate: str, expected: bool) -> None:
    assert equal(gold, candidate) is expected, name


def test_the_policy_table_of_the_docs_names_exactly_these_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "grading.md").read_text(encoding="utf-8")
    table = page.partition("<!-- policy table -->")[2].partition("<!-- end of policy table -->")[0]
    names = [re.split(r"(?<!\\)\|", line)[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert names == list(POLICY)
