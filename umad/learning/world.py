"""The processes that train together: which of them this one is, and what they tell each other.

`torch.distributed` is asked, never Accelerate: under DeepSpeed on the CPU every rank's Accelerator takes itself for the only
one. What is exchanged here are small Python values over gloo, whatever back end moves the gradients, so that a process may wait
for a slower one's debates as long as it takes without running into NCCL's time limit, and sees at once when another has died.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from umad.records import RunError, UserError

T = TypeVar("T")

PATIENCE = timedelta(hours=12)
"""How long a process waits for the others' values: a step of debates may take one of them much longer."""
COLLECTIVE = timedelta(minutes=30)
"""How long a collective of the back end may take, which all ranks enter at about the same time. NCCL's watchdog ends a process
whose peers are gone without a word after this."""


LOCK_SECONDS = 60.0
"""Compiling takes about as long; a lock that is older is probably nobody's."""


@dataclass(frozen=True, eq=False)
class World:
    """This process among `size`. Every method must be called by all of them, in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The gloo group that values travel in; None where there is one process."""

    @property
    def main(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank, on every rank. Values must pickle."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each name's sum over the ranks (exactly rounded); a name that a rank lacks counts as 0 there."""
        if self.size == 1:
            return dict(values)
        rows = self.gather(dict(values))
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: _sum([row.get(name, 0.0) for row in rows]) for name in names}

    def most(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each name's maximum over the ranks that have it."""
        if self.size == 1:
            return dict(values)
        rows = self.gather(dict(values))
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: max(row[name] for row in rows if name in row) for name in names}

    def barrier(self) -> None:
        if self.size > 1:
            self.gather(None)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of `items`: contiguous, so that the ranks' parts one after the other are `items` again."""
        first, last = (len(items) * r // self.size for r in (self.rank, self.rank + 1))
        return items[first:last]

    def agree(self, action: Callable[[], T]) -> T:
        """Runs `action` here; where it fails on any rank, it fails on all: nobody waits for a process that gave up.

        The rank that failed raises its own error, the others a `RunError` (a `UserError` for a `UserError`) that names it.
        """
        if self.size == 1:
            return action()
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        texts = self.gather(None if failure is None else (isinstance(failure, UserError), _text(failure)))
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                kind = UserError if text[0] else RunError
                raise kind(f"process {rank} of this run failed: {text[1]}")
        return result

    def close(self) -> None:
        """Leaves the group, at the end of a run that all ranks reached: it may wait for the others."""
        if self.group is not None:
            import torch.distributed as dist

            dist.destroy_process_group()

    def _call(self, action: Callable[[], None]) -> None:
        try:
            action()
        except RuntimeError as error:
            if any(sign in str(error).lower() for sign in ("connection", "peer", "timed out", "socket")):
                raise RunError(
                    f"process {self.rank}: another process of this run has ended ({str(error).strip().splitlines()[0][:200]}); "
                    "its own message says why. The run goes on from its last checkpoint with --resume"
                ) from error
            raise


def start_world() -> World:
    """Joins the processes that `accelerate launch` (or torchrun) started; alone where nothing did.

    Raises `UserError` for a launch that training cannot use.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    for name, what in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")):
        if os.environ.get(name, "false").lower() == "true":
            raise UserError(
                f"the launch asks for {what}; training runs under DDP and DeepSpeed (recipes/accelerate/*.yaml)"
            )
    if size == 1 and not deepspeed_launch():
        return World()
    if deepspeed_launch():
        _check_deepspeed()
    import torch.distributed as dist
    from accelerate import PartialState

    PartialState(cpu=on_cpu(), timeout=COLLECTIVE)
    if not dist.is_initialized():
        return World()
    size = dist.get_world_size()
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if size > 1 else None
    if size > 1 and threading.current_thread() is threading.main_thread():
        _explain_termination(dist.get_rank())
    return World(dist.get_rank(), size, group)


def _explain_termination(rank: int) -> None:
    """A launcher ends the other processes with SIGTERM when one has failed. They say so before they go, also where the main
    thread waits inside a collective and runs no Python."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # what follows is done by the thread
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            if signal.SIGTERM in os.read(reader, 64):
                text = f"umad: process {rank} was told to stop: another process of this run ended, or the job was cancelled\n"
                os.write(2, text.encode())
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="umad-termination").start()


def on_cpu() -> bool:
    """Whether Accelerate must be told that there is no GPU. DeepSpeed finds out itself."""
    import torch

    return not torch.cuda.is_available() and not deepspeed_launch()


def deepspeed_launch() -> bool:
    """Whether `accelerate launch` was told to use DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _check_deepspeed() -> None:
    import importlib.util

    import torch

    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("the launch asks for DeepSpeed, which is not installed: pip install 'umad[deepspeed]'")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for a GPU
    _look_for_locks()


def _look_for_locks() -> None:
    """DeepSpeed compiles extensions at their first use. A process that was killed meanwhile leaves a lock, for which every
    later one would wait for ever and say nothing."""
    place = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(place) if place else Path.home() / ".cache" / "torch_extensions"
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        if time.time() - lock.stat().st_mtime > LOCK_SECONDS and os.environ.get("LOCAL_RANK", "0") == "0":
            text = "if nothing is being compiled, an earlier process was killed: remove it, or DeepSpeed waits for ever"
            print(f"warning: {lock} is there; {text}", file=sys.stderr, flush=True)


def check_divides(what: str, number: int, divisor: int, why: str) -> None:
    """A `UserError` with the nearest numbers that would do, where `divisor` does not divide `number`."""
    if number % divisor:
        below = number // divisor * divisor
        nearest = f"{below} or {below + divisor}" if below else str(divisor)
        raise UserError(f"{what}: {number} cannot be split into {divisor} equal parts ({why}); {nearest} can")


def _sum(values: Sequence[float]) -> float:
    if all(math.isfinite(value) for value in values):
        return math.fsum(values)
    return float(sum(values))


def _text(error: Exception) -> str:
    return f"{error}" if isinstance(error, (UserError, RunError)) else f"{type(error).__name__}: {error}"
