"""The process that does what may hang or blow up: `python -m umad.grading.worker`.

It reads one JSON job per line on stdin and writes one JSON reply per line on stdout, until stdin ends. The parent kills
it when a job takes too long; so does the kernel (an alarm that nothing catches), should the parent be gone. Memory is
limited by the kernel too. Jobs:

    {"op": "verify", "gold": LaTeX, "candidate": LaTeX}       -> {"equal": bool}
    {"op": "code", "function": "module:name", "gold": ..., "candidate": ...} -> {"equal": bool} or {"error": message}

A worker for `verify` first takes every way out from itself: no sockets, no processes, no files but the interpreter's
own modules. A user's own function runs in a worker of another mode, which has only the limits.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

MEGABYTE = 1024 * 1024


def main(argv: list[str]) -> int:
    mode, time_limit, memory_limit = argv[0], float(argv[1]), int(argv[2])
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a user's function prints must not reach the parent's pipe
    jobs = sys.stdin.buffer
    verify = _load_verify() if mode == "verify" else None
    sys.setrecursionlimit(5_000)
    _limit_memory(memory_limit)
    if mode == "verify":
        _seal()
    _serve(jobs, replies, time_limit, verify)
    return 0


def _serve(jobs: BinaryIO, replies: Any, time_limit: float, verify: Callable[[str, str], bool] | None) -> None:
    replies.write(b"ready\n")
    hang_up = getattr(signal, "setitimer", None)
    for line in jobs:
        if hang_up is not None:
            signal.setitimer(signal.ITIMER_REAL, 1.5 * time_limit + 1)  # unhandled: the kernel ends this process
        reply, exhausted = _answer(json.loads(line), verify)
        if hang_up is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        if exhausted:
            return  # after a MemoryError the heap is fragmented: the next job gets a fresh process


def _answer(job: dict[str, Any], verify: Callable[[str, str], bool] | None) -> tuple[dict[str, Any], bool]:
    try:
        if job["op"] == "code":
            return _run_code(job), False
        assert verify is not None
        return {"equal": verify(job["gold"], job["candidate"])}, False
    except (MemoryError, RecursionError, OverflowError):
        return {"status": "memory"}, True


def _load_verify() -> Callable[[str, str], bool]:
    import logging

    import math_verify
    from math_verify import LatexExtractionConfig

    logging.disable(logging.CRITICAL)
    configuration = [LatexExtractionConfig(boxed_match_priority=-1)]

    def parse(text: str) -> list[Any]:
        return math_verify.parse(
            f"${text}$", configuration, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
        )

    def verify(gold: str, candidate: str) -> bool:
        # Broad, because sympy raises nearly anything on input it does not understand; that is "not equal". What the
        # limits raise passes through to the caller.
        try:
            left, right = parse(gold), parse(candidate)
            if not left or not right:
                return False
            return bool(math_verify.verify(left, right, timeout_seconds=None, raise_on_error=True))
        except (MemoryError, RecursionError, OverflowError):
            raise
        except Exception:
            return False

    verify("\\frac{1}{2}", "0.5")  # loads what is imported late, before the doors are closed
    verify("\\int_0^1 x\\,dx", "\\sum_{k=1}^{2} k + (1,2]")
    verify("x^2+1=0", "\\begin{pmatrix}1\\\\2\\end{pmatrix}")
    return verify


def _limit_memory(megabytes: int) -> None:
    """The given memory on top of what the imports took. Unix only; elsewhere the time limit alone holds."""
    try:
        import resource
    except ImportError:
        return
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + megabytes * MEGABYTE
    with contextlib.suppress(ValueError, OSError):  # some systems refuse; the time limit still holds
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


_FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.",
    "shutil.",
    "ctypes.",
    "urllib.",
    "ftplib.",
    "http.",
    "webbrowser.",
    "pty.",
)
_HARMLESS = ("os.listdir", "os.scandir", "os.putenv")  # the import system looks into folders


def _seal() -> None:
    """Forbids files, sockets and processes for the rest of this process's life."""
    allowed = tuple({os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path})

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode = args[0], args[1]
            reading = mode is None or not any(letter in str(mode) for letter in "wax+")
            if not reading or not isinstance(path, (str, bytes)) or not _inside(os.fsdecode(path), allowed):
                raise PermissionError("a grading worker opens no files")
        elif event.startswith(_FORBIDDEN) and event not in _HARMLESS:
            raise PermissionError(f"a grading worker may not do {event}")

    sys.addaudithook(watch)


def _inside(path: str, folders: tuple[str, ...]) -> bool:
    return path.endswith((".py", ".pyc", ".so", ".pyd")) and os.path.realpath(path).startswith(folders)


def _run_code(job: dict[str, Any]) -> dict[str, Any]:
    """Calls a user's function. Its failures are reported, never turned into a grade."""
    module, _, name = job["function"].partition(":")
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        result = function(job["gold"], job["candidate"])  # type: ignore[operator]
    except MemoryError:
        raise
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    if hasattr(result, "item") and not isinstance(result, (bool, int, float)):
        result = result.item()
    if isinstance(result, (bool, int, float)) and result in (0, 1):
        return {"equal": bool(result)}
    return {"error": f"returned {result!r:.200}, not True or False"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
