"""Checkpoints: all agents of one step or none, written so that a half-written one is never taken for a whole one.

    RUN/checkpoints/step_000010/
        AGENT/                     a plain Hugging Face model folder, for every agent that is trained
        _training/AGENT.rank_0.pt  its optimiser and step (tensors and plain values, loads with weights_only); one per rank
                                   where the ranks have parts of it (DeepSpeed)
        _training/state.json       what the trainer needs beside that, the resolved recipe and the number of ranks among it
        _training/_random.rank_0.pt  every rank's random states
        _training/complete.json    written last: every file with its size and checksum

The folder is made under a hidden name, synced, and renamed by rank 0 when every rank has written its part. An agent's name
can't begin with an underscore.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umad.learning.world import World
from umad.records import UserError

if TYPE_CHECKING:
    from umad.learning.policy import Policy

TRAINING = "_training"
SENTINEL = "complete.json"
RANDOM = "_random"

MAY_CHANGE = (
    *("name", "output", "logging", "checkpoints", "evaluation", "data.eval"),
    *("training.steps", "training.epochs", "training.micro_batch_tokens", "training.gradient_checkpointing"),
    *("training.max_nonfinite", "training.offload_idle", "engine.max_batch", "grading.workers"),
)
"""Settings that may differ on resume: they say how long, where to or how fast, not what is learned."""


def save_checkpoint(
    run: Path,
    step: int,
    policies: Mapping[str, Policy],
    tokenizers: Mapping[str, Any],
    state: Mapping[str, Any],
    keep: int | None = None,
    *,
    protect: Collection[int] = (),
    world: World | None = None,
) -> Path:
    """Saves all agents at `step` and returns the checkpoint's folder. A checkpoint of that step is replaced. Every rank calls.

    policies, tokenizers: by agent name. state: JSON values, handed back by `load_checkpoint`; its `recipe` is compared on
    resume. keep: delete all but the newest so many complete checkpoints afterwards (None: keep all), and those of the steps
    in `protect`.

    Raises `UserError` where the disk is full or not writable; earlier checkpoints are then as they were.
    """
    if not set(policies) <= set(tokenizers):
        raise ValueError(f"policies of {sorted(policies)} but tokenizers of {sorted(tokenizers)}")
    world = world or World()
    folder = _checkpoints(run) / f"step_{step:06d}"
    part = folder.with_name(f".{folder.name}.part")

    def begin() -> None:
        remove_leftovers(run)
        (part / TRAINING).mkdir(parents=True)

    def finish() -> None:
        _seal(part)
        _replace(part, folder)

    try:
        _everywhere(world, begin, folder, main_only=True)
        for name, policy in policies.items():
            # one at a time: what fails on one rank must not leave the others waiting in the next policy's collectives
            _everywhere(world, partial(_write, part, name, policy, tokenizers[name], world), folder)
        facts = {**state, "agents": sorted(policies), **_layout(policies, world)}
        _everywhere(world, lambda: _write_rest(part, facts, world), folder)
        _everywhere(world, finish, folder, main_only=True)
    finally:
        if world.main:
            shutil.rmtree(part, ignore_errors=True)
    if keep is not None and world.main:
        _prune(run, keep, protect)
    return folder


def _everywhere(world: World, action: Callable[[], None], folder: Path, *, main_only: bool = False) -> None:
    """Runs a part of saving on every rank, or on rank 0; where it fails on one, all raise. A full disk is a `UserError`."""

    def guarded() -> None:
        if main_only and not world.main:
            return
        try:
            action()
        except Exception as error:
            if not _is_io_error(error):
                raise
            last = latest_checkpoint(folder.parent.parent)
            kept = f"the last whole one is {last}" if last else "there is no earlier one"
            raise UserError(
                f"{folder}: the checkpoint could not be written ({error}); {kept}. "
                "Make room or choose another output, then go on with --resume"
            ) from error

    world.agree(guarded)


def _layout(policies: Mapping[str, Policy], world: World) -> dict[str, Any]:
    """How the training state lies on the ranks: a checkpoint can be resumed from only where that is the same."""
    kinds = sorted({policy.parallel.kind for policy in policies.values()})
    return {"ranks": world.size, "parallel": kinds}


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Half-written, truncated and unfinished ones are passed over."""
    return next((folder for folder in reversed(checkpoint_folders(run)) if not missing_parts(folder)), None)


def checkpoint_folders(run: Path) -> list[Path]:
    """All checkpoint folders of a run by step, complete or not."""
    found = [path for path in _checkpoints(run).glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def missing_parts(folder: Path) -> list[str]:
    """What makes a checkpoint incomplete: files that its sentinel names and that are missing or of another size."""
    try:
        files = json.loads((folder / TRAINING / SENTINEL).read_text(encoding="utf-8"))["files"]
        return [name for name, size in files.items() if _size(folder / name) != size]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{TRAINING}/{SENTINEL}"]


def load_checkpoint(
    folder: Path,
    policies: Mapping[str, Policy],
    recipe: Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
) -> dict[str, Any]:
    """Loads weights, optimisers and random states of a checkpoint into `policies`, and returns its `state`. Every rank calls.

    recipe: the resolved recipe that is to go on (`model_dump(mode="json")`). Raises `UserError` where the checkpoint is
    incomplete or damaged, holds other agents, was saved by another number of ranks or under another way of sharing the
    training state, or comes from another recipe (each difference is named).
    """

    world = world or World()
    missing = missing_parts(folder)
    if missing:
        raise UserError(f"{folder}: not a complete checkpoint: {_some(missing)} missing or cut short")
    state = _read_state(folder)
    if state["agents"] != sorted(policies):
        raise UserError(f"{folder}: holds the agents {', '.join(state['agents'])}, not {', '.join(sorted(policies))}")
    if recipe is not None:
        differences = recipe_differences(state.get("recipe", {}), recipe)
        if differences:
            raise UserError(
                f"{folder}: comes from another recipe:\n  "
                + "\n  ".join(differences)
                + "\nUndo these changes, or start a new run with another output"
            )
    layout = _layout(policies, world)
    if {key: state[key] for key in layout} != layout:
        raise UserError(
            f"{folder}: was saved by {_launch(state)}, and this launch is {_launch(layout)}. Launch it as before, or start a "
            f"new run from the model folders in {folder}"
        )

    def load() -> None:
        try:
            for name, policy in policies.items():
                policy.load_model(folder / name)
                policy.load_training_state(_load(folder / TRAINING / _part_name(name, policy, world)))
            _set_random_states(_load(folder / TRAINING / f"{RANDOM}.rank_{world.rank}.pt"))
        except Exception as error:
            raise UserError(f"{folder}: cannot be loaded ({error}); remove it to resume from the one before") from error

    world.agree(load)
    return {key: value for key, value in state.items() if key not in ("agents", *layout)}


def _read_state(folder: Path) -> dict[str, Any]:
    """state.json, after all files' checksums were compared with the sentinel's."""
    files = json.loads((folder / TRAINING / SENTINEL).read_text(encoding="utf-8"))
    damaged = [name for name, expected in files.get("checksums", {}).items() if _checksum(folder / name) != expected]
    if damaged:
        raise UserError(
            f"{folder}: {_some(damaged)} damaged: not what was written; remove {folder} to resume from the one before"
        )
    state: dict[str, Any] = json.loads((folder / TRAINING / "state.json").read_text(encoding="utf-8"))
    return state


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _load(path: Path) -> Any:
    """To the CPU: what was saved from the first GPU must not go there on every rank. Optimisers take it to their device."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _launch(layout: Mapping[str, Any]) -> str:
    ranks = layout["ranks"]
    return f"{ranks} process{'' if ranks == 1 else 'es'} ({', '.join(layout['parallel'])})"


def _part_name(name: str, policy: Policy, world: World) -> str:
    return f"{name}.rank_{world.rank if policy.parallel.sharded else 0}.pt"


def recipe_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Each setting that differs, as `key: saved -> now`, but for those in `MAY_CHANGE`."""
    before, now = dict(_flat(_with_defaults(saved))), dict(_flat(current))
    changed = [key for key in (before | now) if before.get(key, _ABSENT) != now.get(key, _ABSENT)]
    return [
        f"{key}: {before.get(key, _ABSENT)!r} -> {now.get(key, _ABSENT)!r}"
        for key in changed
        if not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
    ]


def _with_defaults(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recipe that an earlier version saved, with the defaults of settings that have come since."""
    from pydantic import ValidationError

    from umad.config import Recipe

    try:
        return Recipe.model_validate(saved).model_dump(mode="json")
    except ValidationError:
        return saved


def remove_leftovers(run: Path) -> list[Path]:
    """Deletes what killed saves left behind and returns it; call it before `latest_checkpoint` on resume. Only for the
    process that writes this run. A whole checkpoint that was being replaced when its successor was lost comes back."""
    leftovers = sorted(_checkpoints(run).glob(".step_*"))
    for path in leftovers:
        folder = path.with_name(path.stem.removeprefix("."))
        if path.suffix == ".old" and not folder.exists() and not missing_parts(path):
            os.rename(path, folder)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return leftovers


# --- writing ----------------------------------------------------------------------------------------------------------


def _write(part: Path, name: str, policy: Policy, tokenizer: Any, world: World) -> None:
    """One agent's folder and this rank's part of its training state."""
    import torch

    policy.save_model(part / name, tokenizer)
    state = policy.training_state()
    if world.main or policy.parallel.sharded:
        path = part / TRAINING / _part_name(name, policy, world)
        torch.save(state, path)
        _sync(path)


def _write_rest(part: Path, state: Mapping[str, Any], world: World) -> None:
    import torch

    path = part / TRAINING / f"{RANDOM}.rank_{world.rank}.pt"
    torch.save(_random_states(), path)
    _sync(path)
    if world.main:
        (part / TRAINING / "state.json").write_text(json.dumps(state, allow_nan=False), encoding="utf-8")


def _seal(part: Path) -> None:
    """Syncs everything and writes the sentinel that makes a whole checkpoint of it."""
    files = {str(path.relative_to(part)): path.stat().st_size for path in sorted(part.rglob("*")) if path.is_file()}
    for name in files:
        _sync(part / name)
    sentinel = part / TRAINING / SENTINEL
    checksums = {name: _checksum(part / name) for name in files}
    sentinel.write_text(json.dumps({"files": files, "checksums": checksums}), encoding="utf-8")
    _sync(sentinel)
    for path in [*(p for p in part.rglob("*") if p.is_dir()), part]:
        _sync(path)


def _replace(part: Path, folder: Path) -> None:
    """Renames `part` to `folder`; a folder of that name is moved out of the way first and deleted afterwards."""
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(part, folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _prune(run: Path, keep: int, protect: Collection[int]) -> None:
    complete = [folder for folder in checkpoint_folders(run) if not missing_parts(folder)]
    for folder in complete[:-keep]:
        if checkpoint_step(folder) in protect:
            continue
        # hidden first: a folder that is half deleted must not look like a checkpoint
        hidden = folder.with_name(f".{folder.name}.old")
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_io_error(error: Exception) -> bool:
    """Whether writing failed. torch and safetensors report a full disk with types of their own."""
    texts = ("I/O error", "PytorchStreamWriter", "No space left", "file write", "unexpected pos")
    return isinstance(error, OSError) or any(text in str(error) for text in texts)


# --- random states ----------------------------------------------------------------------------------------------------


def seed_random_states(seed: int, rank: int) -> None:
    """Sets the global generators of a run that begins, each rank's to its own: what a user's function draws can be repeated."""
    import numpy as np
    import torch

    first, second, third = (int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3))
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


def _random_states() -> dict[str, Any]:
    """Python's, numpy's and torch's global states. Training draws nothing from them; a user's reward function may."""
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [[int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    import numpy as np
    import torch

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# --- small things -----------------------------------------------------------------------------------------------------


class _Absent:
    def __repr__(self) -> str:
        return "(not there)"


_ABSENT = _Absent()


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, inner in items:
        yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))


def _checkpoints(run: Path) -> Path:
    return run / "checkpoints"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
