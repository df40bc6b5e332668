"""scripts/gpu_check.sh on a CPU: the same script on small shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if out is not None:
        variables["OUT"] = str(out)
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_two_steps_are_measured_beside_the_plan(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--tiny", "--folder", str(tmp_path / "work"), out=tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert set(found["memory"]) == {"generation", "scoring", "update", "push"}
    for phase in found["memory"].values():
        assert phase["measured_gb"] > 0
        assert abs(phase["deviation"]) <= 0.15
    assert found["updated"] == {"qwen2": 1.0, "qwen3": 1.0}
    assert found["speed"]["generation_tokens_per_second"] > 0
    assert found["speed"]["update_tokens_per_second"] > 0
    assert found["speed"]["mfu"] is None  # of a GPU's peak only
    assert "deviation" in done.stdout
    assert list((tmp_path / "work").iterdir()) == []  # it cleans up


def test_a_gpu_that_is_not_there_is_named() -> None:
    done = run("--device", "cuda")
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
    done = run()
    assert done.returncode == 2
    assert "--tiny" in done.stderr
