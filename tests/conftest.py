"""Shared by all tests: one thread per process, no network."""

from __future__ import annotations

import os
import signal
import threading

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # a shell that starts the tests in the background hands down an ignored Ctrl-C; tests of Ctrl-C need it back
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402 (after the number of threads is set)

settings.register_profile("umad", deadline=None)  # two tests at once on a busy machine take any time
settings.load_profile("umad")


def pytest_configure() -> None:
    """`UMAD_REQUIRE` names packages whose tests must not be skipped here."""
    import importlib.util

    required = filter(None, os.environ.get("UMAD_REQUIRE", "").split(","))
    missing = [name for name in required if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(
            f"UMAD_REQUIRE: {', '.join(missing)} cannot be imported, so their tests would be skipped"
        )
