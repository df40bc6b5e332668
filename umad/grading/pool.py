"""Worker processes with hard limits, for the few answers that need them.

There is no thread and no loop of its own: whoever calls `run` borrows idle workers, feeds them and waits on their pipes.
So it works from any thread, from asyncio (through a thread), and under any launcher. Workers start on first need, as
`python -m umad.grading.worker` with pipes, which needs nothing of the parent's `__main__`; they end with their stdin.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("umad.grading")
START_LIMIT = 120.0
"""Seconds in which a worker has to have imported sympy."""


class WorkerLost(Exception):
    """A worker could not be started or ended by itself: our failure, or a job's that took the process with it."""


@dataclass(eq=False)
class _Worker:
    """One process; `ready` once it has imported what it needs."""

    process: subprocess.Popen[bytes]
    mode: str
    ready: bool = False
    started: float = field(default_factory=time.monotonic)
    buffer: bytes = b""
    job: int | None = None
    deadline: float = 0.0

    @property
    def pipe(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        rest = memoryview(json.dumps(job).encode() + b"\n")
        while rest:  # unbuffered: a write may be partial
            rest = rest[self.process.stdin.write(rest) :]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Pool:
    """Runs jobs in at most `size` workers per mode ("verify", "code").

    `time_limit`: seconds per job, then the worker is killed. `memory_limit`: MB per worker on top of its imports.
    """

    def __init__(self, size: int, time_limit: float, memory_limit: int) -> None:
        if size < 1 or not time_limit > 0 or memory_limit < 1:
            raise ValueError(
                f"workers {size}, time limit {time_limit} and memory limit {memory_limit} must be positive"
            )
        self.size, self.time_limit, self.memory_limit = size, time_limit, memory_limit
        self.started = 0
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._idle: dict[str, list[_Worker]] = {"verify": [], "code": []}
        self._out: dict[str, int] = {"verify": 0, "code": 0}
        self._alive: set[_Worker] = set()
        self._closed = False

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def run(self, jobs: Sequence[dict[str, Any]], mode: str = "verify") -> list[dict[str, Any]]:
        """Replies in the order of the jobs: the worker's, or {"status": "timeout" | "memory" | "error"}."""
        results: list[dict[str, Any] | None] = [None] * len(jobs)
        waiting = list(range(len(jobs)))[::-1]
        lost: set[int] = set()
        held: list[_Worker] = []
        try:
            while waiting or any(worker.job is not None for worker in held):
                self._staff(held, mode, len(waiting))
                self._feed(held, jobs, waiting)
                self._collect(held, results, waiting, lost)
        except WorkerLost as error:
            log.error("no grading worker: %s", error)
            return [result or {"status": "error", "error": str(error)} for result in results]
        finally:
            self._give_back(held, mode)
        return [result or {"status": "error"} for result in results]

    def _staff(self, held: list[_Worker], mode: str, waiting: int) -> None:
        """Borrows workers: at least one (waiting for it), more while there are idle ones and work for them."""
        while len(held) < 1 or sum(worker.job is None for worker in held) < waiting:
            with self._changed:
                if self._closed:
                    raise WorkerLost("the grader is closed")
                while self._out[mode] >= self.size:
                    if held:
                        return
                    self._changed.wait(1.0)
                    if self._closed:
                        raise WorkerLost("the grader is closed")
                self._out[mode] += 1
                worker = self._idle[mode].pop() if self._idle[mode] else None
            if worker is None:
                try:
                    worker = self._start(mode)
                except BaseException:
                    with self._changed:
                        self._out[mode] -= 1
                        self._changed.notify()
                    raise
            held.append(worker)

    def _feed(self, held: list[_Worker], jobs: Sequence[dict[str, Any]], waiting: list[int]) -> None:
        for worker in held:
            if worker.ready and worker.job is None and waiting:
                index = waiting.pop()
                worker.job, worker.deadline = index, time.monotonic() + self.time_limit
                with contextlib.suppress(BrokenPipeError):  # it ended while idle: _collect sees the end of its pipe
                    worker.send(jobs[index])

    def _collect(
        self, held: list[_Worker], results: list[dict[str, Any] | None], waiting: list[int], lost: set[int]
    ) -> None:
        """Waits until a worker replies, ends, or passes its limit, and settles that."""
        now = time.monotonic()
        busy = [worker for worker in held if worker.job is not None or not worker.ready]
        if not busy:
            return
        ends = [worker.deadline if worker.ready else worker.started + START_LIMIT for worker in busy]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
            events = selector.select(max(0.0, min(ends) - now))
        for key, _ in events:
            self._read(key.data, held, results, waiting, lost)
        now = time.monotonic()
        for worker in [worker for worker in busy if worker in held]:
            if worker.ready and worker.job is not None and now >= worker.deadline:
                results[worker.job] = {"status": "timeout"}
                self._drop(worker, held)
            elif not worker.ready and now >= worker.started + START_LIMIT:
                self._drop(worker, held)
                raise WorkerLost(f"it was not ready after {START_LIMIT:.0f} s")

    def _read(
        self,
        worker: _Worker,
        held: list[_Worker],
        results: list[dict[str, Any] | None],
        waiting: list[int],
        lost: set[int],
    ) -> None:
        chunk = os.read(worker.pipe, 65536)
        worker.buffer += chunk
        *lines, worker.buffer = worker.buffer.split(b"\n")
        for line in lines:
            if line == b"ready":
                worker.ready = True
            elif worker.job is not None:
                results[worker.job] = json.loads(line)
                worker.job = None
        if chunk:
            return
        index, ready = worker.job, worker.ready
        self._drop(worker, held)
        if not ready:
            raise WorkerLost(f"it ended while starting (exit code {worker.process.returncode})")
        if index is None:
            return
        # A worker that died on a job gets a second chance; a job that kills two is at fault, and is not ungraded.
        if index in lost:
            results[index] = {"status": "memory"}
        else:
            lost.add(index)
            waiting.append(index)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self, mode: str) -> _Worker:
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
            environment[name] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment.pop("PYTHONSTARTUP", None)
        limits = [mode, repr(self.time_limit), str(self.memory_limit)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "umad.grading.worker", *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the parent, which ends its workers itself
            )
        except OSError as error:
            raise WorkerLost(str(error)) from error
        worker = _Worker(process, mode)
        with self._changed:
            self._alive.add(worker)
            self.started += 1
        return worker

    def _drop(self, worker: _Worker, held: list[_Worker]) -> None:
        held.remove(worker)
        worker.kill()
        with self._changed:
            self._alive.discard(worker)
            self._out[worker.mode] -= 1
            self._changed.notify()

    def _give_back(self, held: list[_Worker], mode: str) -> None:
        for worker in list(held):
            if worker.job is not None:  # interrupted in the middle of a job
                self._drop(worker, held)
                continue
            with self._changed:
                self._out[mode] -= 1
                closed = self._closed
                if not closed:
                    self._idle[mode].append(worker)
                else:
                    self._alive.discard(worker)
                self._changed.notify()
            if closed:
                worker.kill()

    def close(self) -> None:
        """Ends all workers. Calls that are under way end with status `error`."""
        with self._changed:
            self._closed = True
            idle = [worker for workers in self._idle.values() for worker in workers]
            busy = self._alive.difference(idle)
            self._idle = {"verify": [], "code": []}
            self._alive.difference_update(idle)
            self._changed.notify_all()
        for worker in idle:
            worker.kill()
        for worker in busy:  # whoever waits on its pipe sees the end of it, and cleans up
            worker.process.kill()

    def forget(self) -> None:
        """In a forked child: the workers belong to the parent. Closes the inherited pipes and starts afresh."""
        for worker in self._alive:
            for pipe in (worker.process.stdin, worker.process.stdout):
                if pipe is not None:
                    pipe.close()
            worker.process.returncode = 0  # so that nothing here waits for, or warns about, the parent's child
        self._reset()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


def _forget_all() -> None:
    for pool in list(_POOLS):
        pool.forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
