"""Whole runs of agents with adapters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from making import tiny_folder
from safetensors.torch import load_file

from umad.config import Recipe
from umad.engines.adapters import adapter_state, plain_name
from umad.engines.models import load_model
from umad.recipe_io import load_recipe
from umad.records import UserError
from umad.runs import build
from umad.runs.evaluating import eval_command
from umad.runs.training import train

RECIPE = """
name: adapted
agents:
  - {{name: one, model: {root}/base, adapter: {{rank: 4, alpha: 8}}, base: shared}}
  - {{name: two, model: {root}/base, adapter: {{rank: 2, targets: [q_proj, down_proj]}}, base: shared}}
distinct: true
debate: {{style: compact}}
sampling: {{max_tokens: 12}}
reward: {{functions: [{{function: 'making:capitals'}}]}}
loss: {{kl: {{coef: 0.1}}}}
training: {{steps: 3, problems_per_step: 4, group_size: 3, learning_rate: 3.0e-2, schedule: linear}}
data:
  train: {{path: {root}/train.jsonl}}
  eval: {{path: {root}/train.jsonl}}
evaluation: {{after: false, turns: 2, accuracy: {{problems: 2}}, decomposition: {{problems: 2, rollouts: 2}}, bootstrap: 50}}
checkpoints: {{every: 1}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapted")
    tiny_folder(root / "base", "qwen2")
    rows = [{"id": f"p{i}", "problem": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(6)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    return root


def recipe_of(root: Path, *overrides: str) -> Recipe:
    return load_recipe(root / "recipe.yaml", overrides)


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = ("time/", "throughput/", "memory/")
    return [{key: value for key, value in row.items() if not key.startswith(times)} for row in rows]


def weights(run: Path, step: int) -> dict[str, bytes]:
    folder = run / f"checkpoints/step_{step:06d}"
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.slow
def test_two_agents_learn_on_one_base_that_stays_as_it_is_and_resume_as_if_nothing_had_been(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[build.Loaded] = []
    engines: list[Any] = []
    load, make = build.load_agents, build.agents_of

    def load_agents(recipe: Recipe) -> list[build.Loaded]:
        kept[:] = load(recipe)
        return list(kept)

    def agents_of(*args: Any, **kwargs: Any) -> Any:
        agents = make(*args, **kwargs)
        engines[:] = [agent.engine for agent in agents]
        return agents

    monkeypatch.setattr(build, "load_agents", load_agents)
    monkeypatch.setattr(build, "agents_of", agents_of)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(recipe_of(root, f"output={whole}"))

    saved = load_file(root / "base/model.safetensors")
    models = [*(agent.model for agent in kept), *(engine.model for engine in engines)]
    assert len(models) == 4
    places = set()
    for model in models:
        parameters = {n: p for n, p in model.named_parameters() if ".lora_" not in n}
        assert {plain_name(n) for n in parameters} == saved.keys()
        assert all(torch.equal(p, saved[plain_name(n)]) for n, p in parameters.items())
        places.add(tuple(sorted(p.data_ptr() for p in parameters.values())))
    assert len(places) == 1, "trainers and engines, all four, have one base in memory"
    for agent, engine in zip(kept, engines, strict=True):
        assert any(t.abs().max() > 0 for n, t in adapter_state(agent.model).items() if ".lora_B." in n)
        for name, tensor in adapter_state(agent.model).items():
            assert torch.equal(tensor, adapter_state(engine.model)[name])

    kl = [[row[f"agent/{name}/kl"] for row in rows_of(whole)] for name in ("one", "two")]
    for values in kl:
        assert values[0] == 0, "a new adapter changes nothing"
        assert min(values[1:]) > 0, "and then the base is what it was"
    train(recipe_of(root, f"output={parted}"))
    for step in (2, 3):
        shutil.rmtree(parted / f"checkpoints/step_{step:06d}")
    train(recipe_of(root, f"output={parted}"), resume=True)
    for step in (1, 2, 3):
        assert len(weights(whole, step)) >= 4
        assert weights(whole, step) == weights(parted, step)
    assert rows_of(whole) == rows_of(parted)
    assert weights(whole, 2) != weights(whole, 3)


@pytest.mark.slow
def test_checkpoints_are_plain_folders_and_evaluated_as_such(root: Path, tmp_path: Path) -> None:
    recipe = recipe_of(root, f"output={tmp_path}", "training.steps=1")
    train(recipe)
    merged = load_file(tmp_path / "checkpoints/step_000001/one/model.safetensors")
    saved = load_file(root / "base/model.safetensors")
    assert merged.keys() == saved.keys()
    changed = {name for name in saved if not torch.equal(saved[name], merged[name])}
    assert changed == {name for name in saved if name.endswith("_proj.weight")}
    folders = eval_command(str(tmp_path), step="all")
    assert [folder.name for folder in folders] == ["step_000000", "step_000001"]
    text = [(folder / "debates.jsonl").read_bytes() for folder in folders]
    assert text[0] != text[1]


@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
def test_frozen_bases_are_loaded_in_the_precision_of_training(root: Path, tmp_path: Path, engine: str) -> None:
    settings = ["training.precision=bfloat16", f"engine.dtype={engine}", f"output={tmp_path}"]
    recipe = recipe_of(root, *settings, "training.steps=2")
    loaded = build.load_agents(recipe)
    agents = build.agents_of(recipe, loaded, own_copy=True)
    bases = [
        {p.data_ptr() for n, p in model.named_parameters() if ".lora_" not in n}
        for model in (loaded[0].model, loaded[1].model, *(agent.engine.model for agent in agents))  # type: ignore[attr-defined]
    ]
    assert bases[0] == bases[1]
    assert bases[2] == bases[3]
    assert (bases[0] == bases[2]) == (engine == "bfloat16")
    assert loaded[0].model.dtype == torch.bfloat16
    assert {t.dtype for t in adapter_state(loaded[0].model).values()} == {torch.float32}
    assert {p.dtype for p in agents[0].engine.model.parameters()} == {getattr(torch, engine)}  # type: ignore[attr-defined]
    train(recipe)
    merged = load_file(tmp_path / "checkpoints/step_000002/two/model.safetensors")
    assert {t.dtype for t in merged.values()} == {torch.bfloat16}
    adapter = load_file(tmp_path / "checkpoints/step_000002/two/adapter/adapter_model.safetensors")
    assert {t.dtype for t in adapter.values()} == {torch.float32}
    assert any(t.any() for n, t in adapter.items() if "lora_B" in n)


def test_agents_start_apart_and_the_same_each_time(root: Path) -> None:
    own = ["agents.0.base=own", "agents.1.base=own", "agents.1.adapter={rank: 4, alpha: 8}"]
    first, again = (build.load_agents(recipe_of(root, *own)) for _ in range(2))
    other = build.load_agents(recipe_of(root, *own, "seed=1"))
    prints = [agent.fingerprint for agent in first]
    assert len(set(prints)) == 2, "distinct: true is about base and adapter together"
    assert prints == [agent.fingerprint for agent in again]
    assert not set(prints) & {agent.fingerprint for agent in other}
    ids = torch.arange(2, 12)[None]
    plain = load_model(str(root / "base"))
    with torch.no_grad():
        for agent in first:
            assert torch.equal(agent.model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_wrong_targets_are_an_error_with_their_place(root: Path) -> None:
    with pytest.raises(UserError, match=r"agents\[1\]\.adapter\.targets: 'quack' is no module.*down_proj"):
        build.load_agents(recipe_of(root, "agents.1.adapter.targets=[quack]"))


def launched(kind: list[str], *arguments: str) -> None:
    """`umad` in two processes on this machine's CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", *kind]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "-m", "umad.cli", *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (["--multi_gpu"], "shared"),
        (["--use_deepspeed", "--zero_stage", "2", "--zero3_init_flag", "false"], "own"),
        (["--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "false"], "own"),
    ],
    ids=["ddp", "zero2", "zero3"],
)
def test_two_processes_train_and_resume_the_adapters_that_one_does(
    root: Path, tmp_path: Path, kind: list[str], base: str
) -> None:
    if base == "own":
        pytest.importorskip("deepspeed")
    bases = [f"agents.{i}.base={base}" for i in range(2)]
    train(recipe_of(root, f"output={tmp_path / 'alone'}", "training.steps=2", *bases))
    run = tmp_path / "run"
    arguments = ["train", str(root / "recipe.yaml"), f"output={run}", "training.steps=2", *bases]
    launched(kind, *arguments)
    last = run / "checkpoints/step_000002"
    alone, found = adapters(tmp_path / "alone"), adapters(run)
    assert alone.keys() == found.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5)
    saved = load_file(root / "base/model.safetensors")
    merged = load_file(last / "one/model.safetensors")
    assert merged.keys() == saved.keys()
    assert all(torch.equal(merged[n], saved[n]) for n in saved if not n.endswith("_proj.weight"))
    shutil.rmtree(last)
    launched(kind, *arguments, "--resume")
    again = adapters(run)
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def adapters(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "checkpoints/step_000002").glob("*/adapter/*.safetensors"))
    return {f"{file.parts[-3]}/{name}": tensor for file in files for name, tensor in load_file(file).items()}
