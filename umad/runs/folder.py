"""The run folder: where things are, and starting or continuing in one."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from umad.config import Recipe
from umad.debate.recorded import write_rollouts
from umad.recipe_io import dump_recipe, load_recipe
from umad.records import Debate, UserError, atomic_writer, write_jsonl

LOCK = ".lock"


@dataclass(frozen=True)
class RunFolder:
    """`config.yaml, metrics.jsonl, transcripts/, rollouts/, checkpoints/, eval/, summary.json, report.html, log.txt`."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def evaluation(self, step: int) -> Path:
        return self.path / "eval" / f"step_{step:06d}"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:06d}"

    def transcript(self, step: int) -> Path:
        return self.path / "transcripts" / f"step_{step:06d}.jsonl"

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe that this run was started with."""
        return load_recipe(self.config, overrides)

    def write_step(self, step: int, debates: Sequence[Debate]) -> None:
        write_jsonl(self.transcript(step), (debate.to_row() for debate in debates))
        write_rollouts(self.rollouts(step), debates)


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def evaluated_steps(path: Path) -> list[int]:
    """Steps with a finished evaluation, in order."""
    found = (path / "eval").glob("step_*/summary.json") if (path / "eval").is_dir() else ()
    return sorted(int(p.parent.name.removeprefix("step_")) for p in found)


def check_folder(recipe: Recipe, *, again: bool) -> None:
    """Looks whether the recipe's run can go into its folder; nothing is written.

    again: a run that is there already may be gone on with, where its recipe is the same but for settings that may change.

    Raises:
        UserError: it cannot; the message says why and what to do.
    """
    from umad.learning.checkpoint import recipe_differences

    path = recipe.folder
    if path.exists() and not path.is_dir():
        raise UserError(f"output: {path} is a file, not a folder")
    if is_run(path):
        if not again:
            raise UserError(
                f"output: {path} already holds a run; add --resume to go on with it, or choose another folder with output=DIR"
            )
        saved = load_recipe(path / "config.yaml")
        differences = recipe_differences(saved.model_dump(mode="json"), recipe.model_dump(mode="json"))
        if differences:
            raise UserError(
                f"output: {path} holds a run of another recipe:\n  "
                + "\n  ".join(differences)
                + "\nundo these changes, or choose another folder with output=DIR"
            )
    elif path.is_dir() and any(entry.name != LOCK for entry in path.iterdir()):
        raise UserError(f"output: {path} is not empty and holds no run; choose another folder with output=DIR")
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        raise UserError(f"output: {nearest} is not writable; choose another folder with output=DIR")


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Within the block no other process may claim the run folder. The lock ends with the process, however that ends."""
    import fcntl

    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"output: {path} cannot be written ({reason}); choose another with output=DIR") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "it has just started"
            raise UserError(
                f"output: another process writes this run ({who}): {path}; wait for it, stop it, or choose another folder with "
                "output=DIR"
            ) from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def start_folder(recipe: Recipe) -> RunFolder:
    """Makes the run folder, after `check_folder`, and writes the resolved recipe (on resume with what may change)."""
    folder = RunFolder(recipe.folder)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with atomic_writer(folder.config) as file:
            file.write(dump_recipe(recipe))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"output: {folder.path} cannot be written ({reason}); choose another with output=DIR") from None
    return folder


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns "no space left" and its like into one clear message; what was written before stays as it is."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise UserError(
                f"{error.filename or path}: cannot be written ({error.strerror}). The run can go on from its last complete "
                "checkpoint with --resume once there is room"
            ) from None
        raise
