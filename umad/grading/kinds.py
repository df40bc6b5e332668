"""The kinds of answers, and golds that cannot be graded against."""

from __future__ import annotations

import difflib
import importlib
import re

from umad.records import UserError

KINDS = ("math", "number", "choice", "text")
_FUNCTION = re.compile(r"code:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_kind(kind: object) -> bool:
    return isinstance(kind, str) and (kind in KINDS or _FUNCTION.fullmatch(kind) is not None)


def check_function(kind: str) -> None:
    """Raises `UserError` where the function of a `code:` kind cannot be imported. Imports it: only for the user's own kinds,
    never for one that data names."""
    if not kind.startswith("code:"):
        return
    _, module, name = kind.split(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # a user's module may fail in any way
        raise UserError(f"answer kind {kind!r}: {module} cannot be imported ({error})") from error
    if not callable(found):
        raise UserError(f"answer kind {kind!r}: {module} has no function {name!r}")


def check_kind(kind: str) -> None:
    """Raises `UserError` for a kind that does not exist."""
    if kind in KINDS or is_kind(kind):
        return
    if isinstance(kind, str) and kind.startswith("code"):
        raise UserError(f"answer kind {kind!r}: write code:module:function, both importable from Python")
    near = difflib.get_close_matches(str(kind), KINDS, 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"unknown answer kind {kind!r}: one of {', '.join(KINDS)}, code:module:function{hint}")
