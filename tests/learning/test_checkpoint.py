from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning.learning_helpers import ragged_samples, tiny_model

from umad.config import LossConfig, TrainingConfig
from umad.learning import checkpoint as checkpoint_module
from umad.learning.checkpoint import (
    checkpoint_folders,
    checkpoint_step,
    latest_checkpoint,
    load_checkpoint,
    missing_parts,
    recipe_differences,
    remove_leftovers,
    save_checkpoint,
)
from umad.learning.policy import Policy
from umad.records import UserError

KINDS = {"ada": "qwen2", "bob": "qwen3"}


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


TOKENIZERS = {name: Tokenizer() for name in KINDS}


def make_policies() -> dict[str, Policy]:
    training = TrainingConfig(steps=10, learning_rate=1e-3)
    return {name: Policy(name, tiny_model(kind), training, LossConfig(), 1.0, 0, 10) for name, kind in KINDS.items()}


def learn(policies: dict[str, Policy], steps: range) -> None:
    for step in steps:
        for name, policy in policies.items():
            policy.update([_of(name, s) for s in ragged_samples(4, step)])


def _of(name: str, sample: Any) -> Any:
    from dataclasses import replace

    return replace(sample, agent=name)


def everything(policies: dict[str, Policy]) -> list[torch.Tensor]:
    tensors = [t.clone() for p in policies.values() for _, t in p.weights()]
    for policy in policies.values():
        for state in policy.parallel.optimizer.state_dict()["state"].values():
            tensors += [torch.as_tensor(value) for value in state.values()]
    return tensors


def save(run: Path, step: int, policies: dict[str, Policy], keep: int | None = None, **state: Any) -> Path:
    return save_checkpoint(run, step, policies, TOKENIZERS, {"step": step, **state}, keep)


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    found = make_policies()
    learn(found, range(2))
    return found


def test_resuming_equals_not_stopping_bit_for_bit_for_all_agents(tmp_path):
    whole = make_policies()
    learn(whole, range(6))
    first = make_policies()
    learn(first, range(3))
    save(tmp_path, 3, first)
    second = make_policies()
    assert load_checkpoint(tmp_path / "checkpoints" / "step_000003", second) == {"step": 3}
    learn(second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(everything(second), everything(whole), strict=True))


def test_a_checkpoint_has_a_plain_model_folder_per_agent_and_weights_only_state(tmp_path, policies):
    from transformers import AutoModelForCausalLM

    folder = save(tmp_path, 7, policies)
    assert folder == tmp_path / "checkpoints" / "step_000007"
    assert checkpoint_step(folder) == 7
    assert {path.name for path in folder.iterdir()} == {"ada", "bob", "_training"}
    for name in KINDS:
        loaded = AutoModelForCausalLM.from_pretrained(folder / name)
        assert all(torch.equal(loaded.state_dict()[key], value) for key, value in policies[name].weights())
        torch.load(folder / "_training" / f"{name}.rank_0.pt", weights_only=True)
    assert not missing_parts(folder)


def test_random_states_come_back(tmp_path, policies):
    folder = save(tmp_path, 1, policies)

    def draw() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))

    expected = draw()
    assert draw() != expected
    load_checkpoint(folder, policies)
    assert draw() == expected


def test_the_newest_complete_checkpoint_is_found_whatever_stands_around(tmp_path, policies):
    assert latest_checkpoint(tmp_path) is None
    for step in (2, 10, 100):
        save(tmp_path, step, policies)
    places = tmp_path / "checkpoints"
    newest = places / "step_000100"
    (places / "step_999999").mkdir()
    (places / ".step_000200.part").mkdir()
    (places / "step_notes").mkdir()
    (places / "step_000300").write_text("a file")
    assert latest_checkpoint(tmp_path) == newest
    shutil.copytree(newest, places / "step_1000000")  # seven digits sort as numbers
    assert latest_checkpoint(tmp_path) == places / "step_1000000"
    assert [checkpoint_step(f) for f in checkpoint_folders(tmp_path)] == [2, 10, 100, 999999, 1000000]


@pytest.mark.parametrize("damage", ["sentinel", "agent", "cut model", "cut state", "no state"])
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(damage, tmp_path, policies):
    good, bad = save(tmp_path, 1, policies), save(tmp_path, 2, policies)
    if damage == "sentinel":
        (bad / "_training" / "complete.json").unlink()
    elif damage == "agent":
        shutil.rmtree(bad / "bob")
    elif damage == "no state":
        (bad / "_training" / "bob.rank_0.pt").unlink()
    else:
        path = bad / "bob" / "model.safetensors" if damage == "cut model" else bad / "_training" / "ada.rank_0.pt"
        path.write_bytes(path.read_bytes()[:-10])
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(UserError, match="step_000002: not a complete checkpoint"):
        load_checkpoint(bad, policies)


def test_bytes_that_changed_in_place_are_refused_and_not_loaded(tmp_path, policies):
    folder = save(tmp_path, 1, policies)
    path = folder / "_training" / "ada.rank_0.pt"
    path.write_bytes(b"\x00" * path.stat().st_size)
    with pytest.raises(UserError, match="damaged: not what was written"):
        load_checkpoint(folder, policies)


def test_other_agents_are_refused(tmp_path, policies):
    folder = save(tmp_path, 1, policies)
    with pytest.raises(UserError, match="holds the agents ada, bob, not ada"):
        load_checkpoint(folder, {"ada": policies["ada"]})
    with pytest.raises(ValueError, match="tokenizers"):
        save_checkpoint(tmp_path, 2, policies, {"ada": Tokenizer()}, {})


def test_a_save_that_fails_for_one_agent_leaves_no_agent_and_no_trace(tmp_path, policies, monkeypatch):
    good = save(tmp_path, 1, policies)
    monkeypatch.setattr(policies["bob"], "save_model", _raise(RuntimeError("bob broke")))
    with pytest.raises(RuntimeError, match="bob broke"):
        save(tmp_path, 2, policies)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    monkeypatch.setattr(policies["bob"], "save_model", _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, policies)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert latest_checkpoint(tmp_path) == good


def _raise(error: BaseException) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        raise error

    return call


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_one_clear_error(tmp_path, policies):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match=r"could not be written.*no earlier one"):
            save(tmp_path, 1, policies)
    finally:
        tmp_path.chmod(0o700)


def test_a_run_folder_that_is_a_file_is_one_clear_error(tmp_path, policies):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match=r"could not be written.*no earlier one.*--resume"):
        save(tmp_path, 1, policies)


@pytest.mark.parametrize("limit", [600, 3_000, 30_000, 70_000])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_which(limit, tmp_path, policies):
    good = save(tmp_path, 1, policies)
    before = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing past the limit then fails as on a full disk
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
        with pytest.raises(UserError, match="could not be written") as caught:
            save(tmp_path, 2, policies)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(good) in str(caught.value)
    assert {path: path.read_bytes() for path in good.rglob("*") if path.is_file()} == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_only_the_newest_are_kept(tmp_path, policies):
    for step in range(1, 6):
        save(tmp_path, step, policies, keep=2)
    assert [checkpoint_step(f) for f in checkpoint_folders(tmp_path)] == [4, 5]
    save(tmp_path, 6, policies)
    assert [checkpoint_step(f) for f in checkpoint_folders(tmp_path)] == [4, 5, 6]


def test_incomplete_ones_do_not_count_as_kept(tmp_path, policies):
    save(tmp_path, 1, policies)
    (tmp_path / "checkpoints" / "step_000009").mkdir()
    save(tmp_path, 2, policies, keep=2)
    assert latest_checkpoint(tmp_path) is not None
    assert [checkpoint_step(f) for f in checkpoint_folders(tmp_path)] == [1, 2, 9]


def test_saving_a_step_again_replaces_it(tmp_path, policies):
    save(tmp_path, 1, policies, note="first")
    (tmp_path / "checkpoints" / "step_000001" / "ada" / "stray").write_text("old")
    folder = save(tmp_path, 1, policies, note="second")
    assert load_checkpoint(folder, policies)["note"] == "second"
    assert not (folder / "ada" / "stray").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_leftovers_of_killed_saves_are_removed_by_the_next_one(tmp_path, policies):
    save(tmp_path, 1, policies)
    places = tmp_path / "checkpoints"
    (places / ".step_000002.part" / "ada").mkdir(parents=True)
    shutil.copytree(places / "step_000001", places / ".step_000001.old")
    save(tmp_path, 3, policies)
    assert sorted(path.name for path in places.iterdir()) == ["step_000001", "step_000003"]


def test_a_whole_checkpoint_that_was_being_replaced_comes_back(tmp_path, policies):
    folder = save(tmp_path, 1, policies)
    hidden = folder.with_name(".step_000001.old")
    folder.rename(hidden)
    assert remove_leftovers(tmp_path) == [hidden]
    assert latest_checkpoint(tmp_path) == folder
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_killed_at_any_point_of_saving_the_newest_whole_one_loads(tmp_path, policies, monkeypatch):
    """Every sync and rename of a save is a place to be killed at: what is on disk there must resume."""
    save(tmp_path, 1, policies)
    snapshots = []

    def photograph(path: Path) -> None:
        snapshots.append(tmp_path.parent / f"{tmp_path.name}_{len(snapshots)}")
        shutil.copytree(tmp_path, snapshots[-1])

    def rename(source: Path, target: Path) -> None:
        photograph(source)
        os.replace(source, target)
        photograph(target)

    monkeypatch.setattr(checkpoint_module, "_sync", photograph)
    monkeypatch.setattr(checkpoint_module.os, "rename", rename)
    save(tmp_path, 2, policies, keep=1)
    assert len(snapshots) > 10
    seen = set()
    for run in snapshots:
        remove_leftovers(run)
        found = latest_checkpoint(run)
        assert found is not None
        assert load_checkpoint(found, policies)["step"] == checkpoint_step(found)
        seen.add(checkpoint_step(found))
    assert seen == {1, 2}


@pytest.mark.slow
def test_killed_while_saving_the_half_written_one_is_never_loaded(tmp_path):
    script = textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]!r}
        from pathlib import Path
        from learning import test_checkpoint as t
        from umad.learning import checkpoint
        run, policies = Path({str(tmp_path)!r}), t.make_policies()
        slow = checkpoint._sync
        checkpoint._sync = lambda path: (time.sleep(0.02), slow(path))
        for step in range(1, 1000):
            t.save(run, step, policies, keep=2)
            print(step, flush=True)
    """)
    for attempt in range(3):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        saved = int(process.stdout.readline())
        # the second save is under way: kill it in its middle
        _wait_for(tmp_path / "checkpoints" / ".step_000002.part" / "ada", process, 0.05 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        remove_leftovers(tmp_path)
        found = latest_checkpoint(tmp_path)
        assert found is not None
        assert checkpoint_step(found) >= saved
        assert load_checkpoint(found, make_policies())["step"] == checkpoint_step(found)
        assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]
        shutil.rmtree(tmp_path / "checkpoints")


def _wait_for(path: Path, process: subprocess.Popen[str], more: float) -> None:
    import time

    while not path.exists():
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(more)


RECIPE = {
    "seed": 0,
    "output": "runs/x",
    "agents": [{"name": "ada", "learning_rate": None}],
    "training": {"steps": 3, "learning_rate": 1e-6, "betas": [0.9, 0.999]},
    "logging": {"wandb": "off"},
}


def changed(**sections: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(RECIPE)), **sections}


def test_a_checkpoint_of_another_recipe_is_refused_with_the_differences(tmp_path, policies):
    folder = save(tmp_path, 1, policies, recipe=RECIPE)
    other = changed(seed=1, agents=[{"name": "ada", "learning_rate": 1e-5}], extra={"new": True})
    other["training"]["betas"] = [0.9, 0.95]
    with pytest.raises(UserError) as caught:
        load_checkpoint(folder, policies, other)
    message = str(caught.value)
    for part in ("seed: 0 -> 1", "agents.0.learning_rate: None -> 1e-05", "training.betas.1: 0.999 -> 0.95"):
        assert part in message
    assert "extra.new: (not there) -> True" in message
    assert load_checkpoint(folder, policies, RECIPE)["recipe"] == RECIPE


def test_how_long_where_to_and_how_fast_may_change_on_resume():
    other = changed(output="elsewhere", logging={"wandb": "online"})
    other["training"] |= {"steps": 6, "micro_batch_tokens": 100}
    assert recipe_differences(RECIPE, other) == []
    assert recipe_differences(RECIPE, changed(name="x")) == []
    assert recipe_differences(RECIPE, changed(names="x")) != []


def test_a_real_recipe_equals_itself():
    from umad.recipe_io import parse_recipe

    text = "{name: x, agents: [{name: a, model: m}], training: {steps: 3}, data: {train: {name: gsm8k}}}"
    recipe = parse_recipe(text).model_dump(mode="json")
    assert recipe_differences(json.loads(json.dumps(recipe)), recipe) == []


@pytest.mark.parametrize("content", ['{"files": [1]}', '{"files": 3}', "[]"])
def test_a_sentinel_of_another_shape_marks_an_incomplete_checkpoint(content, tmp_path):
    folder = tmp_path / "checkpoints" / "step_000001"
    (folder / "_training").mkdir(parents=True)
    (folder / "_training" / "complete.json").write_text(content)
    (tmp_path / "checkpoints" / "step_²").mkdir()  # str.isdigit says yes, int() says no
    assert missing_parts(folder)
    assert checkpoint_folders(tmp_path) == [folder]
    assert latest_checkpoint(tmp_path) is None


def test_a_setting_that_came_after_the_checkpoint_counts_as_its_default():
    from umad.config import Recipe
    from umad.learning.checkpoint import recipe_differences

    agents = ({"name": "a", "model": "m"},)
    now = Recipe.model_validate({"name": "x", "agents": agents, "loss": {"type": "grpo"}}).model_dump(mode="json")
    saved = {key: value for key, value in now.items() if key != "debate"}
    saved["loss"] = {key: value for key, value in now["loss"].items() if key != "entropy"}
    assert recipe_differences(saved, now) == []
    saved["loss"]["clip_low"] = 0.1
    assert recipe_differences(saved, now) == ["loss.clip_low: 0.1 -> 0.2"]
