"""Option letters in the many ways models write them."""

from __future__ import annotations

import re
from collections import deque

_WRAPPERS = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|mbox|textit|boldsymbol|rm|bf)\b\s*|[{}$*`\"]|\\[()\[\],;! ]|\\quad"
)
_LISTED = re.compile(r"\(?([A-Ja-j])\)?(?:\s*(?:,|and|&|\s)\s*\(?([A-Ja-j])\)?)*\.?")
_NAMED = re.compile(
    r"\b(?:option|choice|letter|answer)\s*(?:is\s*)?[:\s]*\**(?:option\s+)?"
    r"(?:\(([A-Ja-j])\)|([A-J])(?=[\s.,:;)*]|$)|([a-j])(?=[.,:;)*]|\s*$))",
    re.M,
)
_LEADING = re.compile(r"\s*(?:\(\s*([A-Ja-j])\s*\)|([A-Ja-j])\s*(?:[).:]|$)|([A-J])\s*[-–,]\s)")
_PARENTHESISED = re.compile(r"[(\[]\s*([A-Ja-j])\s*[)\]]")
_LONE = re.compile(
    r"(?<![\w'’.\\])(?:([B-HJ])|([AI])(?=\s+(?:is|seems|because|looks|would|fits)\b(?!\s+an?\b))"
    r"|(A)(?!\s+[a-z]))(?![\w'’])"
)


def _letter(match: re.Match[str]) -> str:
    return str(next(group for group in match.groups() if group)).upper()


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = last_match(pattern, text)
    return _letter(found) if found else None


def bare_option(text: str) -> str | None:
    """The option where nothing else is written: `B`, `(b)`, `\\text{(B)}`, `**B**`, `B and C` (as "B,C")."""
    plain = _WRAPPERS.sub(" ", text).strip()
    if len(plain) > 60 or not _LISTED.fullmatch(plain):
        return None
    letters = [letter.upper() for letter in re.findall(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])", plain)]
    return ",".join(sorted(set(letters)))


def option_letter(text: str) -> str | None:
    """The option that a short answer names, alone or before its text (`B. Paris`), or None."""
    if bare := bare_option(text):
        return bare
    plain = _WRAPPERS.sub(" ", text[:2000]).strip()
    leading = _LEADING.match(plain)
    if leading:
        return _letter(leading)
    return _last(_NAMED, plain) or _last(_PARENTHESISED, plain) or _last(_LONE, plain)


def named_options(text: str) -> list[str]:
    """Letters that a text calls an option, or puts in brackets, in order."""
    for pattern in (_NAMED, _PARENTHESISED):
        found = [_letter(match) for match in pattern.finditer(text)]
        if found:
            return found
    return []


def last_lone_letter(text: str) -> str | None:
    return _last(_LONE, text)
