"""Protocols: who speaks, who sees whom, when it ends, how the final answer is chosen.

Each is one file with a pydantic model `Settings` and a coroutine
`debate(problem, seats, table, settings) -> list[Outcome]` (one outcome per rollout of the table). A protocol is found by
its file's name, or as `module:package.module` for a user's own.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from umad.config import Section
from umad.records import UserError

if TYPE_CHECKING:
    from umad.debate.table import Outcome, Table

Debate = Callable[..., Awaitable["list[Outcome]"]]


@dataclass(frozen=True)
class Protocol:
    name: str
    settings: Section
    run: Callable[[Table], Awaitable[list[Outcome]]]


def protocol_names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load_protocol(name: str, turns: int | None = None, settings: Mapping[str, Any] | None = None) -> Protocol:
    """Finds a protocol and validates its settings. `turns` is one of them where the protocol has turns.

    Raises:
        UserError: no such protocol, an unknown or wrong setting, more than one turn where there is one.
    """
    module = _module(name)
    values = dict(settings or {})
    if turns is not None:
        if "turns" in module.Settings.model_fields:
            if "turns" in values:
                raise UserError("debate.settings.turns: debate.turns is given too; give one of them")
            values["turns"] = turns
        elif turns != 1:
            raise UserError(f"debate.turns: protocol {name!r} has one turn, not {turns}")
    try:
        checked = module.Settings.model_validate(values)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            key = ".".join(str(p) for p in detail["loc"])
            valid = ", ".join(module.Settings.model_fields) or "none"
            why = f"unknown setting; valid: {valid}" if detail["type"] == "extra_forbidden" else detail["msg"]
            where = "debate.turns" if key == "turns" else f"debate.settings.{key}"
            lines.append(f"{where}: {why} (protocol {name!r})")
        raise UserError("\n".join(lines)) from None

    def run(table: Table) -> Awaitable[list[Outcome]]:
        result: Awaitable[list[Outcome]] = module.debate(table.problem, table.seats(), table, checked)
        return result

    return Protocol(name, checked, run)


def _module(name: str) -> Any:
    if name.startswith("module:"):
        try:
            module = importlib.import_module(name.removeprefix("module:"))
        except ImportError as error:
            raise UserError(f"debate.protocol: {name!r} cannot be imported ({error})") from None
        if not (hasattr(module, "Settings") and hasattr(module, "debate")):
            raise UserError(f"debate.protocol: {name!r} needs a model `Settings` and a coroutine `debate`")
        return module
    known = protocol_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise UserError(f"debate.protocol: no protocol {name!r}; {hint}")
    return importlib.import_module(f"{__name__}.{name}")
