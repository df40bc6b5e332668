"""Stopping a run at any moment: Ctrl-C, a kill, a full disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import making
import psutil
import pytest
from making import tiny_folder

from umad.learning.checkpoint import checkpoint_step, latest_checkpoint
from umad.records import UserError
from umad.runs.folder import disk_errors

RECIPE = """
name: stopping
agents: [{{name: a, model: {root}/model}}, {{name: b, model: {root}/model}}]
debate: {{style: compact}}
sampling: {{max_tokens: 12}}
training: {{steps: 40, problems_per_step: 4, group_size: 3, learning_rate: 1.0e-3}}
data: {{train: {{name: arithmetic, limit: 50}}}}
checkpoints: {{every: 2, keep: 2}}
reward: {{functions: [{{function: "making:capitals"}}]}}
"""


def start(root: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "umad.cli", "train", str(root / "recipe.yaml"), f"output={run}", *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(making.__file__).parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, how: signal.Signals) -> None:
    tiny_folder(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(root=tmp_path))
    run, whole = tmp_path / "run", tmp_path / "whole"
    process = start(tmp_path, run)
    wait_for(run / "checkpoints/step_000004", process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    _, error = process.communicate(timeout=120)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "--resume" in error
        assert "Traceback" not in error
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, "a grading worker outlived its run"
    last = latest_checkpoint(run)
    assert last is not None
    end = checkpoint_step(last) + 3
    short = f"training.steps={end}"
    assert start(tmp_path, run, short, "--resume").wait(240) == 0
    assert start(tmp_path, whole, short).wait(240) == 0

    def rows(folder: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in r.items() if not k.startswith(("time/", "throughput/"))} for r in found]

    assert [row["step"] for row in rows(run)] == list(range(1, end + 1))
    assert rows(run) == rows(whole)
    for name in ("a", "b"):
        file = f"checkpoints/step_{end:06d}/{name}/model.safetensors"
        assert (run / file).read_bytes() == (whole / file).read_bytes()


def test_a_full_disk_is_one_clear_message() -> None:
    with pytest.raises(UserError, match="--resume"), disk_errors(Path("/somewhere")):
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/metrics.jsonl")
    with pytest.raises(OSError, match="odd"), disk_errors(Path("/somewhere")):
        raise OSError(errno.EIO, "odd")
