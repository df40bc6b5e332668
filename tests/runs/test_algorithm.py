"""Settings of the algorithm in whole steps: who learns, from what, in how many updates, and what stops a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import tiny_folder

from umad.cli import main
from umad.config import Recipe
from umad.debate.recorded import read_rollouts
from umad.recipe_io import load_recipe

RECIPE = """
name: algorithm
agents:
  - {{name: ada, model: {root}/qwen2}}
  - {{name: bob, model: {root}/qwen3}}
debate: {{style: compact}}
sampling: {{max_tokens: 10}}
reward: {{functions: [{{function: 'making:capitals'}}]}}
training: {{steps: 2, problems_per_step: 4, group_size: 3, learning_rate: 1.0e-3}}
data: {{train: {{path: {root}/train.jsonl}}, eval: {{path: {root}/train.jsonl}}}}
evaluation: {{after: false, accuracy: {{problems: 3}}, decomposition: {{problems: 0}}, bootstrap: 50}}
checkpoints: {{every: 1}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("algorithm")
    tiny_folder(root / "qwen2", "qwen2")
    tiny_folder(root / "qwen3", "qwen3", seed=1)
    rows = [{"id": f"p{i}", "problem": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(12)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    return root


def umad(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def train(root: Path, run: Path, *settings: str, code: int = 0) -> list[dict[str, Any]]:
    assert umad("train", root / "recipe.yaml", f"output={run}", *settings) == code
    return rows_of(run)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, step: int, agent: str) -> torch.Tensor:
    from safetensors.torch import load_file

    found = load_file(run / f"checkpoints/step_{step:06d}/{agent}/model.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


def start_weights(root: Path, kind: str) -> torch.Tensor:
    from safetensors.torch import load_file

    found = load_file(root / kind / "model.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.fixture(scope="module")
def plain(root: Path) -> Path:
    train(root, root / "plain")
    return root / "plain"


# --- who learns -----------------------------------------------------------------------------------------------------


def test_a_frozen_agent_debates_and_stays_as_it_was(root, plain, tmp_path):
    run = tmp_path / "run"
    rows = train(root, run, "agents.1.trainable=false")
    assert "agent/bob/accuracy/turn_0" in rows[0]
    assert "agent/bob/grad_norm" not in rows[0]
    assert rows[1]["agent/ada/updated"] == 1
    # the first step is the same for the one that learns, whoever learns beside it
    assert torch.equal(weights(run, 1, "ada"), weights(plain, 1, "ada"))
    assert not (run / "checkpoints/step_000002/bob").exists()
    said = {r["weight_version"] for r in read_rollouts(run / "rollouts/step_000002.parquet") if r["agent"] == "bob"}
    assert said == {0}
    assert umad("eval", run, "--step", "all") == 0
    assert len(list((run / "eval").glob("step_*/summary.json"))) == 3


def test_agents_take_turns_in_learning(root, tmp_path):
    run = tmp_path / "run"
    rows = train(root, run, "training.agent_schedule=round_robin")
    assert [("agent/ada/updated" in row, "agent/bob/updated" in row) for row in rows] == [(True, False), (False, True)]
    assert torch.equal(weights(run, 1, "bob"), start_weights(root, "qwen3"))
    assert torch.equal(weights(run, 2, "ada"), weights(run, 1, "ada"))
    assert not torch.equal(weights(run, 2, "bob"), weights(run, 1, "bob"))


# --- from what --------------------------------------------------------------------------------------------------------


def test_several_updates_share_a_batch_and_the_old_log_probabilities(root, plain, tmp_path):
    run = tmp_path / "run"
    rows = train(root, run, "training.updates_per_batch=2")
    before = rows_of(plain)
    for name in ("samples", "in_loss"):
        assert rows[0][f"agent/ada/{name}"] == before[0][f"agent/ada/{name}"]
    assert rows[0]["agent/ada/updated"] == 2
    # the second update sees weights that the first one moved, so that the clips have something to act on
    assert before[0]["agent/ada/ratio_max"] == 1.0
    assert rows[0]["agent/ada/ratio_max"] > 1.0 + 1e-6
    assert rows[0]["agent/ada/sampler_ratio_max"] == pytest.approx(1.0, abs=1e-4)  # measured before any update
    assert not torch.equal(weights(run, 1, "ada"), weights(plain, 1, "ada"))


@pytest.mark.parametrize("mode", ["ucas", "edge"])
def test_weights_are_made_from_full_distributions(root, plain, tmp_path, mode):
    run = tmp_path / "run"
    rows = train(root, run, f"advantage.weight.mode={mode}")
    before = rows_of(plain)
    # the same first rollouts and rewards, other weights and so other gradients
    assert rows[0]["agent/ada/reward/turn_0"] == before[0]["agent/ada/reward/turn_0"]
    assert rows[0]["agent/ada/weight_std/turn_0"] > 0
    assert rows[0]["agent/ada/weight_std/turn_0"] != before[0]["agent/ada/weight_std/turn_0"]
    assert not torch.equal(weights(run, 1, "ada"), weights(plain, 1, "ada"))


def test_a_narrow_sampler_is_corrected_and_says_how_far_it_is(root, plain, tmp_path):
    rows = train(root, tmp_path / "run", "engine.dtype=bfloat16")
    assert rows[0]["agent/ada/correction_weight"] == pytest.approx(1.0, abs=0.05)
    assert rows[0]["agent/ada/ess"] < 1.0
    assert rows[0]["agent/ada/mismatch_kl"] > 0.0
    assert rows[0]["agent/ada/ratio_max"] == 1.0
    assert "agent/ada/correction_weight" not in rows_of(plain)[0]
    off = train(root, tmp_path / "off", "engine.dtype=bfloat16", "loss.correction.mode=none")
    assert "agent/ada/correction_weight" not in off[0]
    assert off[0]["agent/ada/mismatch_kl"] == rows[0]["agent/ada/mismatch_kl"]
    assert not torch.equal(weights(tmp_path / "off", 1, "ada"), weights(tmp_path / "run", 1, "ada"))


def rare(debate: Any, agent: str, turn: int) -> float:
    """A reward in which most problems have no signal: only those whose id is divisible by 3 tell rollouts apart."""
    return float(debate.rollout) if int(debate.problem.id[1:]) % 3 == 0 else 0.5


RARE = "reward.functions=[{function: 'runs.test_algorithm:rare'}]"


def test_refilling_draws_problems_until_enough_have_signal(root, tmp_path):
    run = tmp_path / "run"
    rows = train(root, run, RARE, "training.no_signal=refill", "training.problems_per_step=2", "training.steps=3")
    # a third of the problems has signal: two need about six
    assert all(row["debate/problems_kept"] == 2 for row in rows)
    assert all(row["debate/problems_drawn"] > 2 for row in rows)
    assert all(row["agent/ada/in_loss"] == 2 * 3 * 2 for row in rows)
    said = [json.loads(line) for line in (run / "transcripts/step_000001.jsonl").read_text().splitlines()]
    assert len(said) == 3 * rows[0]["debate/problems_drawn"]
    # what a step draws, the next one does not: two whole epochs hold every problem twice
    seen = [
        json.loads(line)["problem_id"]
        for step in (1, 2, 3)
        for line in (run / f"transcripts/step_{step:06d}.jsonl").read_text().splitlines()
    ]
    counts = np.unique(seen, return_counts=True)[1] / 3
    assert counts.max() - counts.min() <= 1


def test_refilling_ends_after_so_many_rounds(root, tmp_path):
    nothing = "reward.functions=[]"
    rows = train(root, tmp_path / "run", nothing, "training.no_signal=refill", "training.refill_rounds=1")
    assert rows[0]["debate/refill_rounds"] == 1
    assert rows[0]["debate/problems_drawn"] == 8
    assert rows[0]["debate/problems_kept"] == 0
    assert rows[0]["agent/ada/updated"] == 0


def test_resuming_goes_on_where_refilling_stopped(root, tmp_path):
    settings = (RARE, "training.no_signal=refill", "training.problems_per_step=2")
    train(root, tmp_path / "whole", *settings, "training.steps=3")
    train(root, tmp_path / "parts", *settings, "training.steps=2")
    assert (
        umad("train", root / "recipe.yaml", f"output={tmp_path / 'parts'}", *settings, "training.steps=3", "--resume")
        == 0
    )
    last = "transcripts/step_000003.jsonl"
    assert (tmp_path / "parts" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
    assert torch.equal(weights(tmp_path / "parts", 3, "bob"), weights(tmp_path / "whole", 3, "bob"))


def test_dropped_groups_leave_the_normaliser(root, tmp_path):
    settings = (
        RARE,
        "training.problems_per_step=12",
        "training.steps=1",
        "reward.correctness=0",
        "reward.influence.eta=0",
    )
    kept = train(root, tmp_path / "kept", *settings)
    dropped = train(root, tmp_path / "dropped", *settings, "training.no_signal=drop")
    assert kept[0]["agent/ada/no_signal/turn_0"] == pytest.approx(2 / 3)
    assert dropped[0]["agent/ada/in_loss"] == kept[0]["agent/ada/in_loss"] / 3
    assert dropped[0]["agent/ada/loss"] == pytest.approx(
        kept[0]["agent/ada/loss"] * kept[0]["agent/ada/loss_tokens"] / dropped[0]["agent/ada/loss_tokens"]
    )
    assert dropped[0]["agent/ada/no_signal/turn_0"] == kept[0]["agent/ada/no_signal/turn_0"]


@pytest.mark.parametrize(
    "setting",
    [
        "loss.type=gspo",
        "loss.type=cispo",
        "loss.type=dr_grpo",
        "loss.entropy.coef=0.1",
        "advantage.weight.logprobs=trainer",
    ],
)
def test_each_of_these_settings_runs_and_is_felt(setting, root, plain, tmp_path):
    run = tmp_path / "run"
    rows = train(root, run, setting, "training.updates_per_batch=2", "training.steps=1")
    assert rows[0]["agent/ada/updated"] == 2
    train(root, tmp_path / "without", "training.updates_per_batch=2", "training.steps=1")
    same = torch.equal(weights(run, 1, "ada"), weights(tmp_path / "without", 1, "ada"))
    # the trainer's log-probabilities differ from the sampler's by rounding, and that must change next to nothing
    if "logprobs" in setting:
        assert float((weights(run, 1, "ada") - weights(tmp_path / "without", 1, "ada")).abs().max()) < 1e-4
        assert "time/score" in rows[0]
    else:
        assert not same


def test_moving_idle_optimiser_states_away_changes_nothing(root, plain, tmp_path, monkeypatch):
    from umad.learning.parallel import LocalParallel

    moves = []
    for name in ("offload", "reload"):
        original = getattr(LocalParallel, name)
        monkeypatch.setattr(LocalParallel, name, lambda self, n=name, o=original: (moves.append(n), o(self))[1])
    train(root, tmp_path / "run", "training.offload_idle=true")
    assert torch.equal(weights(tmp_path / "run", 2, "ada"), weights(plain, 2, "ada"))
    assert moves[:2] == ["offload", "offload"]  # as they are made
    assert moves[2:4] == ["reload", "offload"]  # around an update


# --- what stops or is kept ----------------------------------------------------------------------------------------------


def test_updates_that_are_not_finite_stop_the_run_and_leave_their_samples(root, tmp_path, monkeypatch, capsys):
    from umad.learning.policy import Policy

    original = Policy._pass

    def poisoned(self: Policy, *arguments: Any) -> torch.Tensor:
        loss = original(self, *arguments)
        return loss * float("nan") if self.name == "bob" and self.steps >= 2 else loss

    monkeypatch.setattr(Policy, "_pass", poisoned)
    run = tmp_path / "run"
    rows = train(root, run, "training.steps=6", "training.max_nonfinite=3", "logging.transcripts=0", code=1)
    assert len(rows) == 3
    assert [row["agent/bob/nonfinite"] for row in rows] == [0, 1, 1]
    assert [row["agent/ada/nonfinite"] for row in rows] == [0, 0, 0]
    said = capsys.readouterr().err
    assert "the last 3 updates of agent 'bob'" in said
    assert "step_000004.parquet" in said
    assert "Traceback" not in said
    assert len(read_rollouts(run / "rollouts/step_000004.parquet")) == 4 * 3 * 2 * 2


def test_the_best_checkpoint_is_kept_beside_the_newest(root, tmp_path, monkeypatch):
    from umad.runs import training

    monkeypatch.setattr(training, "best_steps", lambda run: [1])
    settings = ("training.steps=4", "checkpoints.keep=1")
    train(root, tmp_path / "best", *settings, "checkpoints.keep_best=true")
    assert sorted(p.name for p in (tmp_path / "best/checkpoints").iterdir()) == ["step_000001", "step_000004"]
    train(root, tmp_path / "newest", *settings)
    assert sorted(p.name for p in (tmp_path / "newest/checkpoints").iterdir()) == ["step_000004"]


def test_the_best_step_is_that_of_the_highest_accuracy(root, tmp_path):
    from umad.runs.evaluating import best_steps

    assert best_steps(tmp_path) == []
    for step, accuracy in ((0, 0.9), (2, 0.4), (4, 0.7), (6, 0.7)):
        folder = tmp_path / f"eval/step_{step:06d}"
        folder.mkdir(parents=True)
        summary = {"accuracy": {"ada": [0.9, accuracy], "bob": [0.1, accuracy]}}
        (folder / "summary.json").write_text(json.dumps(summary))
    assert best_steps(tmp_path) == []  # none of them can be kept
    for step in (2, 4, 6):
        where = tmp_path / f"checkpoints/step_{step:06d}/_training"
        where.mkdir(parents=True)
        (where / "complete.json").write_text('{"files": {}}')
    assert best_steps(tmp_path) == [6]  # the start was better, and has no checkpoint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["agents.0.trainable=false", "agents.1.trainable=false"], "nothing to train"),
        (["training.updates_per_batch=3"], "3 does not divide problems_per_step .4.; 3 or 6 would do"),
        (["agents.0.base=shared"], "shared needs an adapter"),
        (["agents.0.trainable=false", "agents.0.adapter={}"], "has no use where trainable is false"),
        (["advantage.weight.mode=ucas", "advantage.weight.logprobs=sampler"], "needs full distributions"),
        (
            ["agents.0.adapter={}", "agents.1.adapter={}", "agents.0.base=shared", "agents.1.base=shared"],
            "share a base need one model",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(settings, message, root, tmp_path, capsys):
    train_nothing = umad("train", root / "recipe.yaml", f"output={tmp_path / 'run'}", *settings, "--dry-run")
    assert train_nothing == 2
    import re

    assert re.search(message, capsys.readouterr().err)


def test_every_recipe_setting_has_a_default_that_is_off(root):
    recipe: Recipe = load_recipe(root / "recipe.yaml")
    assert recipe.training is not None
    assert (recipe.training.updates_per_batch, recipe.training.agent_schedule) == (1, "joint")
    assert (recipe.loss.entropy.coef, recipe.loss.correction.mode, recipe.training.no_signal) == (0, "auto", "keep")


# --- what a resume refuses ----------------------------------------------------------------------------------------------


def resumed(root: Path, run: Path, *settings: str) -> int:
    return umad("train", root / "recipe.yaml", f"output={run}", *settings, "training.steps=3", "--resume")


@pytest.mark.parametrize("file", ["ada/model.safetensors", "_training/bob.rank_0.pt", "_training/state.json"])
def test_bytes_that_changed_since_they_were_written_are_found(file, root, plain, tmp_path, capsys):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(plain, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(plain), str(run)))
    path = run / "checkpoints/step_000002" / file
    data = bytearray(path.read_bytes())
    data[-40] ^= 0xFF
    path.write_bytes(data)
    assert resumed(root, run) == 2
    assert f"{file} damaged" in capsys.readouterr().err


def test_a_resume_with_other_problems_or_another_start_model_is_refused(root, plain, tmp_path, capsys):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(plain, run)
    problems = root / "train.jsonl"
    rows = problems.read_text()
    problems.write_text(rows.replace("3+3", "3+4"))
    try:
        assert resumed(root, run) == 2
    finally:
        problems.write_text(rows)
    assert "the problems are not those" in capsys.readouterr().err
    kept = (root / "qwen3").rename(root / "kept")
    tiny_folder(root / "qwen3", "qwen3", seed=5)
    try:
        assert resumed(root, run) == 2
    finally:
        shutil.rmtree(root / "qwen3")
        kept.rename(root / "qwen3")
    assert "the start model of 'bob'" in capsys.readouterr().err
    assert resumed(root, run) == 0


def test_one_process_writes_a_run(root, plain, capsys):
    from umad.runs.folder import claimed

    with claimed(plain):
        assert resumed(root, plain) == 2
    said = capsys.readouterr().err
    assert "another process writes this run" in said
    assert "process " in said
    assert len(rows_of(plain)) == 2
