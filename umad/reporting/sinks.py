"""Where metrics go: `metrics.jsonl` in the run folder always, Weights & Biases when the recipe asks for it.

`state.json` beside it says which process writes the run, so that `umad status` can tell a running run from a stopped
one, and keeps the wandb run id for a resume.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from umad.config import LoggingConfig, Recipe
from umad.records import UserError, atomic_writer, read_jsonl, to_json
from umad.reporting.environment import environment
from umad.reporting.progress import warn

STEP_NAME = re.compile(r"^\.?step_(\d{6,})(\.|$)")
"""Names of per-step files and folders, and of their temporary neighbours."""
INIT_TIMEOUT = 30.0
FINISH_TIMEOUT = 120.0
"""Seconds that wandb may hold up the start and the end of a run."""


class MetricsLog:
    """`metrics.jsonl`: one flat row per step, each flushed as it is written.

    A last line that a killed writer left incomplete is dropped on opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_broken_tail(path)
        self.last_step = max((row["step"] for row in read_metrics(path)), default=-1)
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: int, row: Mapping[str, Any]) -> None:
        """Writes the row of `step`. Steps must rise: there is one row per step, in order.

        Numbers that JSON does not have (NaN, infinities) become null.
        """
        if step <= self.last_step:
            raise ValueError(f"metrics of step {step} after those of step {self.last_step}: steps must rise")
        nested = [key for key, value in row.items() if isinstance(value, (Mapping, list, tuple))]
        if nested:
            raise ValueError(f"metrics rows are flat: {nested[0]!r} holds a {type(row[nested[0]]).__name__}")
        self._file.write(to_json({"step": step, **row}) + "\n")
        self._file.flush()
        self.last_step = step

    def cut(self, after_step: int) -> int:
        """Removes the rows after `after_step` (all or nothing); returns how many. Used on resume."""
        self._file.close()
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.strip() and json.loads(line)["step"] <= after_step]
        with atomic_writer(self.path) as file:
            file.writelines(line.decode("utf-8") for line in kept)
        self._file = self.path.open("a", encoding="utf-8")
        self.last_step = json.loads(kept[-1])["step"] if kept else -1
        return len(lines) - len(kept)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, empty where there is none; a row without a whole `step` is a `UserError`."""
    if not path.exists():
        return []
    rows = []
    for number, row in read_jsonl(path, last_line="lenient"):
        if isinstance(row.get("step"), bool) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number}: a metrics row needs a whole number 'step', not {row.get('step')!r}")
        rows.append(row)
    return rows


def cut_files(run: Path, after_step: int) -> list[Path]:
    """Removes per-step files that were written after `after_step`, and leftovers of writers that were killed.

    These are transcripts/step_NNNNNN.jsonl, rollouts/step_NNNNNN.* and eval/step_NNNNNN. Returns what was removed.
    """
    removed = []
    for folder in ("transcripts", "rollouts", "eval"):
        for path in sorted((run / folder).glob("*")) if (run / folder).is_dir() else ():
            match = STEP_NAME.match(path.name)
            leftover = path.name.startswith(".") and path.name.endswith(".part")
            if not leftover and not (match and int(match[1]) > after_step):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path)
    return removed


class Sinks:
    """Everything that metrics go to, for the one process of a run that logs.

    `steps` is the number of the run's last step, for `umad status`; `prepared` the seconds that loading took, which add
    up over resumes. Resuming: call `cut(step)` before the first `log`.
    """

    def __init__(self, run: Path, recipe: Recipe, *, steps: int | None = None, prepared: float = 0.0) -> None:
        self.run = run
        self.metrics = MetricsLog(run / "metrics.jsonl")
        self._state = _State(run / "state.json")
        self._state.write(**this_process(), steps=steps, ended=None, environment=environment())
        self._wandb: WandbSink | None = None
        if recipe.logging.wandb != "off":
            config = recipe.model_dump(mode="json")
            self._wandb = WandbSink(
                run, recipe.logging, config, name=recipe.name, run_id=self._state.read().get("wandb")
            )
            if self._wandb.id:
                self._state.write(wandb=self._wandb.id)

    @property
    def wandb_id(self) -> str | None:
        """The id of the wandb run, where there is one."""
        found = self._state.read().get("wandb")
        return None if found is None else str(found)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Writes one flat row for `step`; steps must rise."""
        self.metrics.append(step, row)
        if self._wandb:
            self._wandb.log(step, row)

    def cut(self, after_step: int) -> None:
        """Forgets everything after `after_step`: rows, transcripts, rollouts, evaluations."""
        self.metrics.cut(after_step)
        cut_files(self.run, after_step)

    def finish(self, *, failed: bool = False) -> None:
        """Closes all sinks; further calls do nothing. `failed` marks the wandb run as failed."""
        # a full disk must not hide the error that ends the run
        with suppress(OSError):
            if self._state.read().get("ended") is None:
                self._state.write(ended=time.time())
        self.metrics.close()
        if self._wandb:
            self._wandb.finish(failed=failed)
            self._wandb = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(failed=kind is not None)


class WandbSink:
    """The real wandb client, kept from ever stopping a run: the first problem is one warning, then logging goes on
    offline where that can be, else without wandb.

    `WANDB_*` variables win over the recipe: `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_DIR`, `WANDB_NAME`, `WANDB_RUN_ID`;
    the client itself reads all others. Steps that the resumed run already holds on the server are not sent again.
    """

    def __init__(
        self, run: Path, logging: LoggingConfig, config: Mapping[str, Any], *, name: str, run_id: str | None
    ) -> None:
        self._run: Any = None
        self._first = 0
        mode = os.environ.get("WANDB_MODE") or logging.wandb
        options = {
            "project": None if "WANDB_PROJECT" in os.environ else logging.project,
            "dir": None if "WANDB_DIR" in os.environ else str(run),
            "name": None if "WANDB_NAME" in os.environ else name,
            "id": os.environ.get("WANDB_RUN_ID") or run_id,
            "config": dict(config),
            "resume": "allow",
        }
        if mode in ("online", "run"):
            self._run = self._start(options, "online", then="logging offline")
        if self._run is None:
            fallback = mode if mode not in ("online", "run") else "offline"
            self._run = self._start(options, fallback, then="this run goes on without wandb")
            if self._run is not None and fallback != mode:
                warn(f"send the offline run later with: wandb sync {Path(self._run.dir).parent}")
        self.id: str | None = None if self._run is None or self._run.disabled else self._run.id

    def _start(self, options: Mapping[str, Any], mode: str, *, then: str) -> Any:
        try:
            import wandb

            # asked first, because init would wait for an answer to its prompt
            if mode == "online" and not wandb.login(prompt=False):
                raise RuntimeError("no API key: run `wandb login`, or set WANDB_API_KEY")
            settings = {"finish_timeout": FINISH_TIMEOUT, "init_timeout": INIT_TIMEOUT, "console": "off"}
            unset = {key: value for key, value in settings.items() if f"WANDB_{key.upper()}" not in os.environ}
            run = wandb.init(**options, mode=cast(Any, mode), settings=wandb.Settings(**unset))
            # asked once, because the answer takes a round trip to the client's service
            self._first = run.step
            return run
        # the client raises errors of many unrelated kinds, and none of them is worth a run
        except Exception as error:
            warn(f"wandb: {_first_line(error)}; {then}")
            return None

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        if self._run is None or step < self._first:
            return
        try:
            self._run.log({key: value for key, value in row.items() if value is not None}, step=step)
        except Exception as error:
            self._give_up(error)

    def finish(self, *, failed: bool = False) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=1 if failed else 0)
        except Exception as error:
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        warn(f"wandb: {_first_line(error)}; the run goes on without wandb (metrics.jsonl has every row)")
        self._run = None


def this_process() -> dict[str, Any]:
    """What identifies this process on this machine, as far as can be: a number alone may be used again later."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "born": process_birth(os.getpid()),
        "started": time.time(),
    }


def process_birth(pid: int) -> int | None:
    """Start time of a process in the kernel's ticks; None where /proc does not tell, and for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else int(fields[19])


class _State:
    """state.json, rewritten whole at every change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        return read_json(self.path) or {}

    def write(self, **changes: Any) -> None:
        state = {**self.read(), **changes}
        with atomic_writer(self.path) as file:
            file.write(json.dumps(state, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None where the file is missing, cut off, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _drop_broken_tail(path: Path) -> None:
    """Cuts a last line without its newline, unless it is a whole row, which then gets its newline."""
    if not path.exists():
        return
    data = path.read_bytes()
    if not data or data.endswith(b"\n"):
        return
    tail = data[data.rfind(b"\n") + 1 :]
    try:
        json.loads(tail)
    except ValueError:
        kept = data[: len(data) - len(tail)]
    else:
        kept = data + b"\n"
    with atomic_writer(path) as file:
        file.write(kept.decode("utf-8"))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
