"""Equality (early version)."""

from __future__ import annotations

import re
from fractions import Fraction


def normal_text(text: str) -> str:
    return re.sub(r"[\s$\\{}]+|left|right|text|boxed|\.$", "", text.lower())


def normal_number(text: str) -> str | None:
    plain = re.sub(r"\\[dt]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?", r"\1/\2", text.strip())
    plain = re.sub(r"\\boxed|[\s$,{}%\\!]", "", plain)
    found = re.fullmatch(r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:/\d{1,30})?", plain)
    if not found or plain.endswith("/0"):
        return None
    try:
        return str(Fraction(plain)) if "." not in plain or "/" not in plain else None
    except (ValueError, ZeroDivisionError):
        return None


def decide(gold: str, candidate: str, kind: str) -> bool:
    a, b = normal_number(gold), normal_number(candidate)
    return a == b if a is not None and b is not None else normal_text(gold) == normal_text(candidate)
