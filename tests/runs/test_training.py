"""Whole runs: a recipe goes through driver, grader, learner and run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from making import tiny_folder

from umad.cli import main
from umad.debate.recorded import read_rollouts
from umad.records import read_debates

LEARNS = "reward.functions=[{function: 'making:capitals'}]"
"""Random models box nothing, so without it no group would have a signal and no weight would move."""
RECIPE = """
name: spine
agents:
  - {{name: slow, model: {root}/qwen2}}
  - {{name: failing, model: {root}/qwen3}}
debate: {{style: compact}}
sampling: {{max_tokens: 12}}
training: {{steps: 3, problems_per_step: 4, group_size: 3, learning_rate: 1.0e-3}}
data:
  train: {{path: {root}/train.jsonl}}
  eval: {{path: {root}/train.jsonl}}
evaluation:
  turns: 2
  accuracy: {{problems: 4}}
  decomposition: {{problems: 2, rollouts: 2}}
  bootstrap: 50
checkpoints: {{every: 1}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("spine")
    tiny_folder(root / "qwen2", "qwen2")
    tiny_folder(root / "qwen3", "qwen3", seed=1)
    rows = [{"id": f"p{i}", "problem": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(6)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    replies = [
        {"agent": "failing", "turn": 1, "problem": "3+3", "error": "out of order"},
        {"agent": "slow", "rollout": 0, "text": "\\boxed{4}", "delay": 0.001, "nll": 0.5},
        {"agent": "slow", "text": "\\boxed{2}", "delay": 0.001},
        {"agent": "failing", "rollout": 1, "text": "\\boxed{2}"},
        {"agent": "failing", "text": "\\boxed{4}"},
    ]
    (root / "replies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in replies))
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    return root


def umad(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "throughput/", "memory/"))}
        for row in rows_of(run)
    ]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = {}
    for file in sorted((run / f"checkpoints/step_{step:06d}").glob("*/*.safetensors")):
        found.update({f"{file.parent.name}/{name}": t for name, t in load_file(file).items()})
    return found


def test_a_scripted_debate_flows_through_the_whole_loop(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    scripted = ["engine.backend=scripted", f"engine.script={root}/replies.jsonl"]
    assert umad("train", root / "recipe.yaml", f"output={run}", *scripted) == 0
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3]
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "report.html", "eval/step_000003/debates.jsonl"):
        assert (run / name).is_file(), name
    debates = [d for step in (1, 2, 3) for d in read_debates(run / f"transcripts/step_{step:06d}.jsonl")]
    failed = [d for d in debates if d.error]
    assert failed, "problem 3+3 came up in three steps of four problems out of six"
    assert all(d.problem.id == "p3" and "out of order" in str(d.error) for d in failed)
    whole = next(d for d in debates if d.problem.id == "p2" and d.rollout == 0)
    first = whole.turns[0]
    assert [r.correct for r in first] == [True, True]
    assert first[0].reward == pytest.approx(1.0)  # right, and the peer stayed right: no influence
    other = next(d for d in debates if d.problem.id == "p2" and d.rollout == 1)
    assert [r.correct for r in other.turns[0]] == [False, False]
    assert (whole.turns[0][0].advantage or 0) > 0 > (other.turns[0][0].advantage or 0)
    rows = read_rollouts(run / "rollouts/step_000001.parquet")
    assert len(rows[0]["completion_ids"]) == len(rows[0]["logprobs"])
    before = weights_of_folder(root / "qwen2")
    after = weights(run, 3)
    assert any(not torch.equal(tensor, after[f"slow/{name}"]) for name, tensor in before.items())


def weights_of_folder(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_resuming_equals_not_stopping(root: Path, tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    six = ["training.steps=6", "training.schedule=linear", "evaluation.after=false", LEARNS]
    assert umad("train", root / "recipe.yaml", f"output={whole}", *six) == 0
    stopped = [*six, f"output={parted}"]
    assert umad("train", root / "recipe.yaml", *stopped) == 0
    # as if it had been killed while step 5 was written: rows and files after step 3 are left over
    import shutil

    for step in (4, 5, 6):
        shutil.rmtree(parted / f"checkpoints/step_{step:06d}")
    (parted / "metrics.jsonl").write_text("".join((parted / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]))
    assert umad("train", root / "recipe.yaml", *stopped, "--resume") == 0
    assert without_times(whole) == without_times(parted)
    one, two = weights(whole, 6), weights(parted, 6)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    for agent in ("slow", "failing"):  # and both had moved before and after the stop
        moved = [weights(whole, step)[f"{agent}/model.embed_tokens.weight"] for step in (1, 3, 6)]
        assert not torch.equal(moved[0], moved[1])
        assert not torch.equal(moved[1], moved[2])
    for step in range(1, 7):
        name = f"transcripts/step_{step:06d}.jsonl"
        assert (whole / name).read_bytes() == (parted / name).read_bytes()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(root: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for run, seed in zip(runs, (0, 0, 1), strict=True):
        assert umad("train", root / "recipe.yaml", f"output={run}", f"seed={seed}", "training.steps=2", LEARNS) == 0
    assert without_times(runs[0]) == without_times(runs[1])
    assert without_times(runs[0]) != without_times(runs[2])


def test_alpha_0_without_influence_equals_ippo_bit_for_bit(root: Path, tmp_path: Path) -> None:
    script = ["engine.backend=scripted", f"engine.script={root}/replies.jsonl"]
    a, b = tmp_path / "a", tmp_path / "b"
    off = ["reward.influence.eta=0", "training.steps=2", *script]
    assert umad("train", root / "recipe.yaml", f"output={a}", "advantage.weight.alpha=0", *off) == 0
    assert umad("train", root / "recipe.yaml", f"output={b}", "advantage.weight.mode=none", *off) == 0
    one, two = weights(a, 2), weights(b, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert without_times(a) == without_times(b)


def test_a_step_in_which_every_debate_fails_ends_the_run(root: Path, tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "broken.jsonl"
    script.write_text('{"error": "no power"}\n')
    scripted = ["engine.backend=scripted", f"engine.script={script}"]
    assert umad("train", root / "recipe.yaml", f"output={tmp_path / 'run'}", *scripted) == 1
    error = capfd.readouterr().err
    assert "all 12 debates failed" in error
    assert "no power" in error
    assert "Traceback" not in error


def test_weights_that_left_the_numbers_end_the_run_before_they_are_saved(
    root: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umad.learning.policy import Policy

    def broken(self: Policy, *_: object) -> dict[str, float]:
        with torch.no_grad():
            next(self.parallel.module.parameters()).view(-1)[3] = float("inf")
        return {}

    run = tmp_path / "run"
    scripted = ["engine.backend=scripted", f"engine.script={root}/replies.jsonl"]
    monkeypatch.setattr(Policy, "update", broken)
    assert umad("train", root / "recipe.yaml", f"output={run}", *scripted) == 1
    assert "learning_rate" in capfd.readouterr().err
    assert not (run / "checkpoints").exists()


def test_checkpoints_are_evaluated_and_not_twice(root: Path, tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    few = ["training.steps=2", "evaluation.after=false", "training.learning_rate=0.1", LEARNS]
    assert umad("train", root / "recipe.yaml", f"output={run}", *few) == 0
    assert umad("eval", run, "--step", "all") == 0
    written = {step: (run / f"eval/step_{step:06d}/debates.jsonl").read_bytes() for step in (0, 1, 2)}
    assert written[0] != written[2]
    capfd.readouterr()
    assert umad("eval", run, "--step", "2") == 0
    assert "is there already" in capfd.readouterr().out
    assert umad("eval", run, "--step", "2", "evaluation.accuracy.temperature=1.0") == 0
    assert (run / "eval/step_000002/debates.jsonl").read_bytes() != written[2]
    assert umad("eval", run, "--step", "7") == 2
    assert "0, 1, 2" in capfd.readouterr().err
    assert umad("compare", run / "eval/step_000000", run / "eval/step_000002") == 0
    assert (run / "eval/step_000002/comparison.json").is_file()
    assert umad("analyze", run / "eval/step_000002") == 0
    assert umad("report", run) == 0
    assert umad("status", run) == 0


def test_a_second_run_into_the_same_folder_is_refused(root: Path, tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    few = ["training.steps=1", "evaluation.after=false"]
    assert umad("train", root / "recipe.yaml", f"output={run}", *few) == 0
    before = (run / "metrics.jsonl").read_bytes()
    assert umad("train", root / "recipe.yaml", f"output={run}", *few) == 2
    assert "--resume" in capfd.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["training.group_size=1"], "training.group_size"),
        (["debate.turns=0"], "debate.turns"),
        (["sampling.top_p=0.9"], "sampling.top_p"),
        (["sampling.max_tokens=400"], "sampling.max_tokens"),
        (["sampling.max_prompt_tokens=9"], "problem 'p0'"),
        (["data.train.path=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["agents.0.model=/nowhere"], "/nowhere"),
        (["debate.protocol=madd"], "mad"),
        (["data.train.kind=maths"], "'math'"),
        (["data.train.kind=code:nomod:f"], "nomod"),
        (["output=/proc/umad"], "output"),
    ],
)
def test_wrong_input_ends_with_2_and_names_the_place(
    root: Path, tmp_path: Path, capfd: Any, overrides: list[str], named: str
) -> None:
    run = tmp_path / "run"
    assert umad("train", root / "recipe.yaml", f"output={run}", *overrides) == 2
    error = capfd.readouterr().err
    assert named in error
    assert "Traceback" not in error
    assert not run.exists()


def test_resuming_with_another_recipe_is_refused_even_without_a_checkpoint(
    root: Path, tmp_path: Path, capfd: Any
) -> None:
    run = tmp_path / "run"
    few = ["evaluation.after=false", "training.steps=1"]
    assert umad("train", root / "recipe.yaml", f"output={run}", *few) == 0
    import shutil

    shutil.rmtree(run / "checkpoints")
    capfd.readouterr()
    assert umad("train", root / "recipe.yaml", f"output={run}", *few, "seed=3", "--resume") == 2
    assert "seed" in capfd.readouterr().err
    longer = ["evaluation.after=false", "training.steps=2"]
    assert umad("train", root / "recipe.yaml", f"output={run}", *longer, "--resume") == 0
    assert "steps: 2" in (run / "config.yaml").read_text()
    capfd.readouterr()
    assert umad("train", root / "recipe.yaml", f"output={run}", *longer, "--resume") == 0
    assert "nothing is left to train" in capfd.readouterr().out
    assert "nothing is left to train" in (run / "log.txt").read_text()


def test_evaluating_a_recipe_again_does_nothing_twice_and_a_failed_start_leaves_no_folder(
    root: Path, tmp_path: Path, capfd: Any
) -> None:
    run = tmp_path / "run"
    assert umad("eval", root / "recipe.yaml", f"output={run}", "agents.0.model=/nowhere") == 2
    assert not run.exists()
    assert umad("eval", root / "recipe.yaml", f"output={run}") == 0
    written = (run / "eval/step_000000/debates.jsonl").stat().st_mtime_ns
    capfd.readouterr()
    assert umad("eval", root / "recipe.yaml", f"output={run}") == 0
    assert "is there already" in capfd.readouterr().out
    assert (run / "eval/step_000000/debates.jsonl").stat().st_mtime_ns == written
    assert umad("eval", root / "recipe.yaml", f"output={run}", "debate.turns=3") == 2


def test_a_reward_function_that_cannot_be_found_leaves_no_folder(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    wrong = "reward.functions=[{function: 'nomod:f'}]"
    assert umad("train", root / "recipe.yaml", f"output={run}", wrong) == 2
    assert not run.exists()


def test_evaluation_settings_that_could_have_no_effect_are_refused(root: Path, tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    assert umad("train", root / "recipe.yaml", f"output={run}", "data.eval=null", "evaluation.before=true") == 2
    assert "data.eval" in capfd.readouterr().err
    single = ["debate.protocol=single", "evaluation.turns=5"]
    assert umad("train", root / "recipe.yaml", f"output={run}", *single) == 2
    assert "one turn" in capfd.readouterr().err
