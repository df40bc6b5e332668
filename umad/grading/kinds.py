"""The kinds of answers, and golds that cannot be graded against."""

from __future__ import annotations

import difflib
import re

from umad.records import UserError

KINDS = ("math", "number", "choice", "text")
_FUNCTION = re.compile(r"code:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_kind(kind: object) -> bool:
    return isinstance(kind, str) and (kind in KINDS or _FUNCTION.fullmatch(kind) is not None)


def check_kind(kind: str) -> None:
    """Raises `UserError` for a kind that does not exist."""
    if kind in KINDS or is_kind(kind):
        return
    if isinstance(kind, str) and kind.startswith("code"):
        raise UserError(f"answer kind {kind!r}: write code:module:function, both importable from Python")
    near = difflib.get_close_matches(str(kind), KINDS, 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"unknown answer kind {kind!r}: one of {', '.join(KINDS)}, code:module:function{hint}")
