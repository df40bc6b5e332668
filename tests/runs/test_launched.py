"""Whole runs under `accelerate launch`, and what happens when a process of one fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from making import tiny_folder

CONFIGS = Path(__file__).parents[2] / "recipes" / "accelerate"
RECIPE = """
name: launched
agents:
  - {{name: ada, model: {root}/qwen2}}
  - {{name: bob, model: {root}/qwen3}}
debate: {{style: compact}}
sampling: {{max_tokens: 12}}
reward: {{functions: [{{function: 'making:capitals'}}]}}
loss: {{kl: {{coef: 0.01}}}}
training: {{steps: 2, problems_per_step: 4, group_size: 3, learning_rate: 1.0e-3}}
data:
  train: {{path: {root}/train.jsonl}}
  eval: {{path: {root}/train.jsonl}}
evaluation:
  turns: 2
  accuracy: {{problems: 3}}
  decomposition: {{problems: 2, rollouts: 2}}
  bootstrap: 50
checkpoints: {{every: 1}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("launched")
    tiny_folder(root / "qwen2", "qwen2")
    tiny_folder(root / "qwen3", "qwen3", seed=1)
    rows = [{"id": f"p{i}", "problem": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(6)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    return root


def command(root: Path, out: Path, config: str | None, *arguments: str, module: str = "umad.cli") -> list[str]:
    train = [module, "train", str(root / "recipe.yaml"), f"output={out}", *arguments]
    if config is None:
        return [sys.executable, "-m", *train]
    launch = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", "2", "--main_process_port", "0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *launch, "-m", *train]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def start(*arguments: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, **settings), env=environment(), capture_output=True, text=True, timeout=280
    )


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(root: Path) -> Path:
    out = root / "alone"
    done = start(root, out, None)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("config", ["ddp", "zero3", pytest.param("zero3_offload", marks=pytest.mark.nightly)])
def test_a_launched_run_is_that_of_one_process(config, root, alone, tmp_path):
    if config != "ddp":
        pytest.importorskip("deepspeed")
    run = tmp_path / "run"
    done = start(root, run, config)
    assert done.returncode == 0, done.stderr[-3000:]
    # what the agents say does not depend on which process they say it in
    first = "transcripts/step_000001.jsonl"
    assert [debate(line) for line in lines(run / first)] == [debate(line) for line in lines(alone / first)]
    for ours, theirs in zip(rows_of(run), rows_of(alone), strict=True):
        assert {key for key in theirs if not key.startswith("time/")} <= ours.keys()
        for name, value in theirs.items():
            if name.startswith(("time/", "throughput/", "memory/")) or re.search("micro_batches|padding", name):
                continue
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    for part in ("n_problems", "accuracy", "uncertainty", "cost"):
        assert (
            json.loads((run / "summary.json").read_text())[part]
            == json.loads((alone / "summary.json").read_text())[part]
        )
    assert (run / "report.html").stat().st_size > 10_000
    assert done.stdout.count("report:") == 1  # one process speaks
    plain_folders(run / "checkpoints/step_000002", alone / "checkpoints/step_000002")

    # and it goes on only as it began
    other = start(root, run, None, "--resume", "training.steps=3")
    assert other.returncode == 2
    assert "was saved by 2 processes" in other.stderr
    assert "this launch is 1 process (plain)" in other.stderr
    again = start(root, run, config, "--resume", "training.steps=3")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resuming after step 2" in again.stdout
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def debate(line: str) -> Any:
    """A transcript's row without what rounding may move in its last digits."""
    row = json.loads(line)
    for turn in row["turns"]:
        for response in turn:
            for name in ("nll", "advantage", "weight"):
                response[name] = round(response.get(name) or 0.0, 4)
    return row


def plain_folders(found: Path, expected: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    for agent in ("ada", "bob"):
        ours, theirs = (AutoModelForCausalLM.from_pretrained(where / agent) for where in (found, expected))
        a, b = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (ours, theirs))
        # by norm: AdamW makes steps of equal size of the smallest gradients, whose last digits are rounding
        assert float((a - b).norm() / b.norm()) < 1e-4


def test_what_does_not_divide_is_told_with_what_would(root, tmp_path):
    done = start(root, tmp_path / "run", "ddp", "training.problems_per_step=5")
    assert done.returncode != 0
    assert "training.problems_per_step: 5 cannot be split into 2 equal parts" in done.stderr
    assert "4 or 6 can" in done.stderr
    assert not (tmp_path / "run").exists()


NIGHTLY = (("ddp", "memory"), ("zero2", "killed"))
FAULTY = """
import os, signal, sys
from umad.learning.policy import Policy
update = Policy.update
def faulty(self, *arguments):
    if os.environ["RANK"] == "1" and self.steps == 1:
        if sys.argv[-1] == "fault=killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return update(self, *arguments)
Policy.update = faulty
from umad.cli import main
main(sys.argv[1:-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "fault"),
    [("ddp", "killed"), ("zero2", "memory"), *(pytest.param(*x, marks=pytest.mark.nightly) for x in NIGHTLY)],
)
def test_where_one_process_ends_the_others_end_soon_with_a_message(config, fault, root, tmp_path):
    if config != "ddp":
        pytest.importorskip("deepspeed")
    (tmp_path / "faulty_umad.py").write_text(FAULTY)
    arguments = command(root, tmp_path / "run", config, f"fault={fault}", module="faulty_umad")
    settings = environment()
    settings["PYTHONPATH"] += os.pathsep + str(tmp_path)
    process = subprocess.Popen(arguments, env=settings, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    begun = time.monotonic()
    while not (metrics.exists() and metrics.read_text().count("\n") == 1) and time.monotonic() < begun + 200:
        time.sleep(0.05)
    reached = time.monotonic()
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        pytest.fail("still there after a minute")
    assert process.returncode != 0
    assert time.monotonic() - reached < 60
    if fault == "memory":
        assert "CUDA out of memory" in said
    assert re.search("umad.*process 0.*another process of this run", said), said[-3000:]
    # the checkpoint of the step before is whole
    assert (tmp_path / "run/checkpoints/step_000001/_training/complete.json").exists()
