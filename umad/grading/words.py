"""Words that may stand in a mathematical answer: functions, constants, units, and numbers written out."""

from __future__ import annotations

import re
from fractions import Fraction

FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "arccot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "coth",
        "log",
        "ln",
        "lg",
        "exp",
        "sqrt",
        "cbrt",
        "abs",
        "floor",
        "ceil",
        "gcd",
        "lcm",
        "min",
        "max",
        "det",
    ]
)
CONSTANTS = {"pi": "pi", "infinity": "oo", "infty": "oo", "inf": "oo", "oo": "oo"}
GREEK = frozenset(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "varepsilon",
        "zeta",
        "eta",
        "theta",
        "vartheta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "varphi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Upsilon",
        "Phi",
        "Psi",
        "Omega",
        "ell",
        "hbar",
    ]
)
CONNECTIVES = frozenset(("and", "or", "for", "all"))

_UNITS = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "mg": "mg milligram milligrams",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "s": "sec secs second seconds",
    "min": "minute minutes mins",
    "h": "h hr hrs hour hours",
    "d": "day days",
    "wk": "week weeks",
    "mo": "month months",
    "yr": "yr yrs year years",
    "l": "liter liters litre litres",
    "ml": "ml milliliter milliliters",
    "gal": "gallon gallons",
    "usd": "dollar dollars usd",
    "cent": "cent cents",
    "eur": "euro euros eur",
    "gbp": "gbp",
    "yuan": "yuan rmb",
    "pct": "percent pct",
    "deg": "degree degrees deg",
    "mph": "mph",
}
UNITS = {word: name for name, words in _UNITS.items() for word in words.split()}
"""Spelling -> canonical unit. Two known units that differ make two answers differ; unknown words are ignored."""

_SMALL_ENGLISH = frozenset(
    [
        "is",
        "of",
        "to",
        "in",
        "at",
        "on",
        "by",
        "it",
        "we",
        "he",
        "so",
        "no",
        "an",
        "as",
        "be",
        "do",
        "go",
        "if",
        "me",
        "my",
        "up",
        "us",
        "am",
        "oh",
        "ok",
        "hi",
        "vs",
        "id",
        "it's",
        "i'm",
        "i'll",
    ]
)

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBER_WORDS = {word: value for value, word in enumerate(_ONES)} | {
    word: 10 * (value + 2) for value, word in enumerate(_TENS)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}


def is_math_word(word: str) -> bool:
    """Whether a bare word can be part of a formula (a function, a unit, a product such as `xy`), not of a sentence."""
    lower = word.lower()
    if lower in FUNCTIONS or lower in CONSTANTS or lower in UNITS or lower in CONNECTIVES or word in GREEK:
        return True
    if len(word) <= 2 and word.isupper():
        return True
    return len(word) == 2 and "'" not in word and lower not in _SMALL_ENGLISH


def number_from_words(text: str) -> Fraction | None:
    """`forty-two` and `two hundred and five` as numbers; None for anything else."""
    words = [word for word in re.split(r"[\s-]+", text.lower().strip(" .")) if word and word != "and"]
    if not words or len(words) > 12 or any(word not in _NUMBER_WORDS and word not in _SCALES for word in words):
        return None
    total, current = 0, 0
    for word in words:
        if word in _NUMBER_WORDS:
            current += _NUMBER_WORDS[word]
        elif word == "hundred":
            current = max(current, 1) * 100
        else:
            total += max(current, 1) * _SCALES[word]
            current = 0
    return Fraction(total + current)
