"""Where a run is: read from its folder alone, so it works from another shell and after the fact."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umad.reporting.folder import mapping, number, read_run
from umad.reporting.sinks import process_birth

RECENT = 20
"""Steps whose times the forecast rests on."""


def status(run_folder: str | Path) -> dict[str, Any]:
    """Where a run stands.

    `state`: running | finished | stopped | unknown (its process is on another machine, or the run names none).
    `step`, `steps`: done and in all, None where not known. `seconds_per_step`: median of the last steps. `seconds_left`:
    None unless the run may be going on. `idle`: seconds since something was written. `last`: the newest metrics row.
    `evaluations`, `checkpoints`: steps. `notes`: what could not be read.

    Raises UserError where the folder is no run.
    """
    run = read_run(run_folder)
    last = run.metrics[-1] if run.metrics else {}
    step = int(last["step"]) if last else 0
    steps = _steps(run.recipe, run.state)
    times = [seconds for row in run.metrics[-RECENT:] if (seconds := number(row.get("time/step"))) is not None]
    pace = statistics.median(times) if times else None
    written = _last_write(run.path)
    state = _state(run.state, step, steps)
    left = None
    if state in ("running", "unknown") and pace is not None and steps is not None:
        begun = max(0.0, time.time() - (run.path / "metrics.jsonl").stat().st_mtime)
        left = max(0.0, (steps - step) * pace - min(begun, pace))
    return {
        "run": run.name,
        "folder": str(run.path),
        "state": state,
        "step": step,
        "steps": steps,
        "seconds_per_step": pace,
        "seconds_left": left,
        "idle": None if written is None else max(0.0, time.time() - written),
        "agents": list(run.agents),
        "last": dict(last),
        "evaluations": [one.step for one in run.evaluations if one.step is not None],
        "checkpoints": _checkpoints(run.path),
        "notes": run.notes,
    }


def _steps(recipe: Mapping[str, Any], state: Mapping[str, Any]) -> int | None:
    """What the process that wrote last set out to do (its epochs are steps, and a resume may have changed them), else the
    recipe's."""
    for value in (state.get("steps"), mapping(recipe.get("training")).get("steps")):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _state(state: Mapping[str, Any], step: int, steps: int | None) -> str:
    if state.get("ended") is None and isinstance(state.get("pid"), int):
        if state.get("host") != socket.gethostname():
            return "finished" if steps is not None and step >= steps else "unknown"
        if _alive(state["pid"], state.get("born")):
            return "running"
    elif not state and (steps is None or step < steps):
        return "unknown"
    return "finished" if steps is not None and step >= steps else "stopped"


def _alive(pid: int, born: Any) -> bool:
    """Whether this very process lives: a number may have been given to another one since."""
    birth = process_birth(pid)
    if birth is not None:
        return born is None or birth == born
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return born is None


def _last_write(run: Path) -> float | None:
    """Newest change of the files that a run writes as it goes."""
    names = ("metrics.jsonl", "log.txt", "transcripts", "eval", "checkpoints", "state.json")
    return max(((run / name).stat().st_mtime for name in names if (run / name).exists()), default=None)


def _checkpoints(run: Path) -> list[int]:
    folder = run / "checkpoints"
    found = [path.name[5:] for path in folder.glob("step_*") if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in found if name.isdecimal())
