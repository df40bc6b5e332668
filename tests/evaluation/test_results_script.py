"""`scripts/results.py`: what it runs, what it does not repeat, and the tables it makes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from evaluation.generated_debates import random_run

from umad.evaluation.evaluate import Evaluation, write_evaluation
from umad.evaluation.summary import summarise
from umad.recipe_io import dump_recipe, parse_recipe
from umad.records import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "results.py"
RECIPE = """
name: tiny
agents: [{name: ann, model: m}, {name: bob, model: m}]
training: {steps: 40}
data: {train: {name: arithmetic}, eval: {name: arithmetic}}
"""


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_script", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["results_script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def evaluation(skill, seed, turns=5):
    single = random_run(40, turns=turns, skill=skill, seed=seed)
    many = random_run(8, turns=turns, skill=skill, seed=seed, rollouts=4)
    parts = (("accuracy", single), ("decomposition", many))
    debates = [replace(d, sampling={"part": name}) for name, part in parts for d in part]
    return Evaluation(summarise(debates, info={"step": 40}, draws=100), debates)


def write_run(folder, before, after=None, step=40):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_recipe(parse_recipe(RECIPE)))
    write_evaluation(folder / "eval" / "step_000000", before)
    if after is not None:
        write_evaluation(folder / "eval" / f"step_{step:06d}", after)


@pytest.fixture
def recipes(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in ("tiny_umad", "tiny_ippo"):
        (folder / f"{name}.yaml").write_text(RECIPE)
    return folder


def test_missing_runs_are_made_stopped_ones_go_on_and_finished_ones_are_left(script, recipes, tmp_path, monkeypatch):
    out = tmp_path / "runs"
    write_run(out / "tiny_umad_0", evaluation(0.5, 1), evaluation(0.7, 2))
    write_run(out / "tiny_umad_1", evaluation(0.5, 1))
    (out / "none_0").mkdir()
    (out / "none_0" / "config.yaml").write_text(RECIPE)
    commands = []

    def record(command, check):
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", record)
    results = script.collect([0, 1], out, recipes, ["training.problems_per_step=4"])
    assert [(r.method, r.seed) for r in results] == [("UMAD", 0)]
    trained = {command[4].removeprefix("output="): command for command in commands if command[0] == "train"}
    assert sorted(Path(folder).name for folder in trained) == ["tiny_ippo_0", "tiny_ippo_1", "tiny_umad_1"]
    going_on = trained[str(out / "tiny_umad_1")]
    assert going_on[-1] == "--resume"
    assert going_on[2:4] == ["training.problems_per_step=4", "seed=1"]
    assert "--resume" not in trained[str(out / "tiny_ippo_0")]
    measured = [command[1:] for command in commands if command[0] == "eval"]
    assert measured[0] == [str(out / "none_0")], "an interrupted evaluation goes on in its folder"
    again = next(command for command in measured if f"output={out / 'none_0_again'}" in command)
    assert "evaluation.seed=1000" in again


def test_a_failed_run_stops_the_script_with_its_command(script, recipes, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(UserError, match=r"umad train .*exit code 1"):
        script.collect([0], tmp_path / "runs", recipes)


def test_the_tables_hold_what_the_evaluations_hold(script, recipes, tmp_path):
    out = tmp_path / "runs"
    before = evaluation(0.4, 1)
    for seed in (0, 1):
        write_run(out / f"tiny_umad_{seed}", before, evaluation(0.9, 2 + seed))
        write_run(out / f"tiny_ippo_{seed}", before, evaluation(0.7, 5 + seed))
        write_run(out / f"none_{seed}", before)
        write_run(out / f"none_{seed}_again", evaluation(0.4, 9))
    results = script.collect([0, 1], out, recipes, run=False)
    assert len(results) == 6
    text = script.tables(results)
    accuracy, uncertainty, versus = text.split("\n\n")[1::2]
    lines = [line.strip("| ").split(" | ") for line in accuracy.splitlines()]
    assert len({len(line) for line in lines}) == 1
    first = dict(zip(lines[0], lines[2], strict=True))
    after = json.loads((out / "tiny_umad_0" / "eval" / "step_000040" / "summary.json").read_text())
    assert (first["method"], first["seed"], first["n"], first["steps"]) == ("UMAD", "0", "40", "40")
    assert first["T=2 before"] == f"{100 * before.summary['mean_accuracy'][1]:.1f}"
    assert first["T=5 after"] == f"{100 * after['mean_accuracy'][4]:.1f}"
    gain = after["mean_accuracy"][1] - before.summary["mean_accuracy"][1]
    assert first["T=2 gain [95%]"].startswith(f"{100 * gain:+.1f} [")
    assert sum(line[0] == "no training" for line in lines) == 2
    assert sum(line[0] == "**UMAD**" for line in lines) == 1
    split = uncertainty.splitlines()[2].strip("| ").split(" | ")
    old, new = before.summary["uncertainty"], after["uncertainty"]
    assert split[:5] == ["UMAD", "0", "8", "4", f"{old['EU'][1]:.3f} -> {new['EU'][1]:.3f}"]
    assert split[-1] == f"{old['TU'][4]:.3f} -> {new['TU'][4]:.3f}"
    assert len(versus.splitlines()) == 4


def test_runs_that_did_not_start_from_the_same_agents_are_called_out(script, recipes, tmp_path):
    out = tmp_path / "runs"
    write_run(out / "tiny_umad_0", evaluation(0.4, 1), evaluation(0.9, 2))
    write_run(out / "tiny_ippo_0", evaluation(0.4, 3), evaluation(0.9, 4))
    results = script.collect([0], out, recipes, run=False)
    assert "WARNING: seed 0: IPPO did not start from the agents that UMAD started from" in script.tables(results)
    assert script.different_starts(results[:1] * 2) == []


def test_without_any_finished_run_there_is_no_table(script, recipes, tmp_path):
    with pytest.raises(UserError, match="no finished run"):
        script.collect([0], tmp_path / "runs", recipes, run=False)
