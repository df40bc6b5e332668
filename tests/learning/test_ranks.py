"""Two processes under `accelerate launch` learn what one does: DDP, ZeRO-1, -2 and -3, on ragged samples of different ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from learning.ranks import Task, main

RANKS = Path(__file__).with_name("ranks.py")
TOLERANCE = 1e-5
LAUNCHES = ("ddp", pytest.param("zero1", marks=pytest.mark.nightly), "zero2", "zero3")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quickstart's two agents, untaught, and debates of theirs as a run records them."""
    from umad.cli import main as umad
    from umad.learning.tiny import CONTEXT, SPECS, build_model
    from umad.learning.tiny_tokenizers import build_tokenizer

    root = tmp_path_factory.mktemp("ranks")
    for name, spec in SPECS.items():
        tokenizer = build_tokenizer(spec.tokenizer, CONTEXT)
        model = build_model(spec, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, seed=3)
        # so that some responses end early and lengths are ragged
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(root / name[5:])
        tokenizer.save_pretrained(root / name[5:])
    with pytest.raises(SystemExit) as end:
        umad(["train", str(recipe(root)), f"output={root / 'run'}", "evaluation.after=false"])
    assert end.value.code == 0
    return {
        "models": {"a": str(root / "qwen2"), "b": str(root / "qwen3")},
        "rollouts": str(root / "run/rollouts/step_000001.parquet"),
    }


def recipe(root: Path) -> Path:
    path = root / "recipe.yaml"
    path.write_text(f"""
name: ranks
agents: [{{name: a, model: {root}/qwen2}}, {{name: b, model: {root}/qwen3}}]
debate: {{style: compact}}
sampling: {{max_tokens: 40}}
training: {{steps: 1, problems_per_step: 4, group_size: 3}}
data: {{train: {{name: arithmetic, limit: 20}}}}
""")
    return path


def launch(kind: str, script: list[str], processes: int = 2, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` on this machine's CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    if kind == "ddp":
        command += ["--multi_gpu"]
    else:
        command += ["--use_deepspeed", "--zero_stage", kind.removeprefix("zero"), "--zero3_init_flag", "false"]
    tests = Path(__file__).parents[1]
    paths = [str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=timeout)


def result(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from safetensors.torch import load_file

    return load_file(out / "weights.safetensors"), json.loads((out / "result.json").read_text())


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative norm of the difference."""
    assert a.keys() == b.keys()
    whole = torch.cat([t.double().flatten() for t in a.values()])
    return float((whole - torch.cat([b[k].double().flatten() for k in a])).norm() / whole.norm())


def starting_weights(recorded: dict[str, Any]) -> dict[str, torch.Tensor]:
    from umad.engines.models import load_model

    models = {name: load_model(folder).state_dict() for name, folder in recorded["models"].items()}
    return {f"{name}/{key}": tensor for name, state in models.items() for key, tensor in state.items()}


TRAINING = {"learning_rate": 5e-3, "max_grad_norm": 0.5}
TASKS: dict[str, dict[str, Any]] = {
    "ragged": {"loss": {"kl": {"coef": 0.01}, "entropy": {"coef": 0.01}}, "shares": [0.7, 0.3]},
    "old": {"loss": {"type": "grpo"}, "old": True, "exact": False},
    "sequences": {"loss": {"type": "gspo"}, "shares": [0.4, 0.6]},
    "nothing": {"shares": [1.0, 0.0]},
    "deaf": {"shares": [0.7, 0.3], "deaf": 1},
    "poison": {"poison": 1},
    "saved": {"save": True, "shares": [0.2, 0.8]},
    "offloaded": {"training": {"offload_idle": True}, "shares": [0.6, 0.4], "old": True},
    "wide": {"dtype": "float64", "shares": [0.6, 0.4]},
}
ONLY = {"offloaded": ("ddp", "zero1", "zero2"), "wide": ("ddp",)}
"""DeepSpeed has no float64, and can't move its states under ZeRO-3."""


def settings_of(name: str) -> dict[str, Any]:
    return {**TASKS[name], "training": TRAINING | TASKS[name].get("training", {})}


@pytest.fixture(scope="module")
def alone(recorded: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process makes of every task."""
    found = {}
    for name in TASKS:
        settings = settings_of(name)
        out = tmp_path_factory.mktemp(f"alone_{name}")
        ours = {key: value for key, value in settings.items() if key not in ("deaf", "shares")}
        main(Task(out=str(out), **recorded, **ours))
        found[name] = result(out)
    return found


@pytest.fixture(scope="module", params=LAUNCHES)
def together(request: Any, recorded: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes make of them, all in one launch."""
    if request.param != "ddp":
        pytest.importorskip("deepspeed")
    root = tmp_path_factory.mktemp(request.param)
    names = [name for name in TASKS if request.param in ONLY.get(name, (request.param,))]
    tasks = [Task(out=str(root / name), **recorded, **settings_of(name)).write() for name in names]
    done = launch(request.param, [str(RANKS), *map(str, tasks)])
    assert done.returncode == 0, done.stderr[-6000:]
    return {"kind": request.param, **{name: result(root / name) for name in names}}


@pytest.mark.parametrize("task", ["ragged", "old", "sequences", "nothing", "saved", "offloaded", "wide"])
def test_two_processes_learn_what_one_does(task, recorded, alone, together):
    expected, before = alone[task]
    if task not in together:
        assert together["kind"] not in ONLY[task]
        return
    found, after = together[task]
    assert after["kinds"] == [together["kind"]]
    assert distance(expected, starting_weights(recorded)) > 1000 * TOLERANCE
    # in float64 gradients agree to 1e-10; AdamW divides the smallest of them by themselves, so parameters agree to less
    assert distance(expected, found) < (1e-8 if task == "wide" else TOLERANCE)
    if task == "wide":
        for name in ("a", "b"):
            norms = [[row[f"{name}/grad_norm"] for row in rows["rows"]] for rows in (before, after)]
            assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-10)
            assert norms[1] == pytest.approx(norms[0], rel=1e-8)
    for a, b in zip(before["rows"], after["rows"], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if name.split("/")[1] in ("micro_batches", "padding"):
                continue  # how samples fall into batches differs, what is computed does not
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=1e-5), name
    for name, rows in before["scores"].items():
        for one, two in zip(rows, after["scores"][name], strict=True):
            assert two == pytest.approx(one, abs=1e-3)


def test_a_gradient_that_is_lost_on_one_rank_shows(alone, together):
    assert distance(alone["deaf"][0], together["deaf"][0]) > 100 * TOLERANCE


def test_a_loss_that_is_not_a_number_on_one_rank_skips_the_update_on_all(alone, together):
    weights, after = together["poison"]
    assert [row["a/nonfinite"] for row in after["rows"]] == [0, 1, 0]
    assert [row["b/updated"] for row in after["rows"]] == [1, 0, 1]
    assert all(bool(torch.isfinite(t).all()) for t in weights.values())
    assert distance(alone["poison"][0], weights) < TOLERANCE


def test_bfloat16_and_no_clipping_reach_deepspeed_as_meant(recorded, tmp_path):
    pytest.importorskip("deepspeed")
    training = {"max_grad_norm": 0, "learning_rate": 5e-3, "precision": "bfloat16"}
    kl = {"kl": {"coef": 0.01}}
    task = Task(out=str(tmp_path), training=training, loss=kl, updates=2, save=True, **recorded).write()
    done = launch("zero2", [str(RANKS), str(task)], processes=1)
    assert done.returncode == 0, done.stderr[-4000:]
    weights, found = result(tmp_path)
    assert found["clips"] == [[0.0, 0.0]] * 2
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    assert found["buffers"] == ["torch.float32"]  # rotary frequencies are never rounded
    # at the start the policy is the reference, bit for bit
    assert found["rows"][0]["a/kl"] == 0
    assert found["rows"][1]["a/kl"] > 0
    assert found["rows"][1]["a/updated"] == 1


def test_deepspeeds_configuration_is_the_recipes(monkeypatch):
    from umad.config import TrainingConfig
    from umad.learning.parallel import deepspeed_settings

    pytest.importorskip("deepspeed")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    for limit, precision in ((0.0, "float32"), (0.7, "bfloat16")):
        training = TrainingConfig.model_validate({"steps": 1, "max_grad_norm": limit, "precision": precision})
        settings = deepspeed_settings(training)
        assert settings["gradient_clipping"] == limit
        assert settings["gradient_accumulation_steps"] == 1
        assert settings["bf16"]["enabled"] == (precision == "bfloat16")
        assert settings["zero_optimization"]["stage"] == 3
        assert "offload_optimizer" not in settings["zero_optimization"]
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    assert deepspeed_settings(training)["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
