"""Recipes: errors that name the place, overrides, and what cannot be combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from umad.recipe_io import dump_recipe, load_recipe, parse_recipe
from umad.records import UserError

GOOD = """\
name: test
agents:
  - name: a
    model: some/model
  - {name: b, model: other/model, learning_rate: 1e-5}
training:
  steps: 10
  learning_rate: 2e-6
data:
  train: {name: arithmetic}
"""


def error(text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_recipe(text, "r.yaml", overrides)
    return str(caught.value)


def test_a_recipe_resolves_with_defaults_and_reads_1e_6_as_a_number() -> None:
    recipe = parse_recipe(GOOD)
    assert recipe.training is not None
    assert recipe.training.learning_rate == 2e-6
    assert recipe.agents[1].learning_rate == 1e-5
    assert recipe.advantage.weight.alpha == 0.25
    assert recipe.reward.influence.eta == 0.2


def test_the_resolved_recipe_loads_as_the_same_recipe() -> None:
    recipe = parse_recipe(GOOD, overrides=["debate.mask_answers=false", "loss.dual_clip=null"])
    assert parse_recipe(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    ("line", "place", "hint"),
    [
        ("sampling: {temprature: 1}", "r.yaml:11: sampling.temprature", "'temperature'"),
        ("sampling: {lr: 1}", "r.yaml:11: sampling.lr", "learning_rate'"),
        ("sampling: {qqq: 1}", "r.yaml:11: sampling.qqq", "valid here"),
        ("samplng: {}", "r.yaml:11: samplng", "'sampling'"),
        ("sampling: {max_tokens: many}", "r.yaml:11: sampling.max_tokens", "number"),
        ("sampling: {max_tokens: true}", "r.yaml:11: sampling.max_tokens", "number"),
        ("sampling: {max_tokens: 0}", "r.yaml:11: sampling.max_tokens", "greater than or equal to 1"),
        ("sampling: {top_p: 0.9}", "r.yaml:11: sampling.top_p", "inexact"),
        ("sampling: {top_k: 20}", "r.yaml:11: sampling.top_k", "inexact"),
        ("sampling: {temperature: 0}", "r.yaml:11: sampling.temperature", "alike"),
        ("loss: {type: ppo}", "r.yaml:11: loss.type", "'dapo'"),
        ("engine: {backend: scripted}", "r.yaml:11: engine", "script"),
        ("debate: {protocol: single, grouping: shared_context}", "r.yaml:11: debate.grouping", "mad"),
        ("sampling: [1]", "r.yaml:11: sampling", "dictionary"),
    ],
)
def test_a_fault_names_file_line_key_and_the_way_out(line: str, place: str, hint: str) -> None:
    message = error(GOOD + line + "\n")
    assert message.startswith(place), message
    assert hint in message


def test_all_faults_are_named_at_once() -> None:
    message = error("name: x\nagents: []\ntraining: {group_size: 1, steps: 2, epochs: 3}\n")
    assert "r.yaml:2: agents" in message
    assert "r.yaml:3: training.group_size" in message


def test_group_of_one_and_no_length_are_refused() -> None:
    assert "baseline" in error(GOOD, "training.group_size=1")
    assert "steps or epochs" in error(GOOD, "training.steps=null")
    assert "steps or epochs" in error(GOOD, "training.epochs=1")


def test_agents_need_different_names() -> None:
    assert "'a'" in error(GOOD, "agents.1.name=a")


def test_overrides_reach_into_lists_and_make_sections() -> None:
    recipe = parse_recipe(GOOD, overrides=["agents.0.model=x/y", "loss.kl.coef=0.1", "agents.2={name: c, model: z}"])
    assert recipe.agents[0].model == "x/y"
    assert recipe.loss.kl.coef == 0.1
    assert [a.name for a in recipe.agents] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("agents.7.model=x", "list of 2"),
        ("agents.first.model=x", "list of 2"),
        ("training.steps", "key=value"),
        ("training.stps=3", "'steps'"),
        ("name.x=3", "plain value"),
        ("training.steps={", "YAML"),
    ],
)
def test_a_wrong_override_is_quoted(override: str, hint: str) -> None:
    message = error(GOOD, override)
    assert override in message
    assert hint in message


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    assert "twice" in error("name: x\nname: y\n")
    assert "empty" in error("")
    assert "mapping" in error("- 1\n")
    assert "r.yaml:2" in error("name: x\n  bad: [\n")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            load_recipe(path)


def test_control_characters_in_a_recipe_are_an_error_not_a_traceback() -> None:
    assert "YAML" in error("name: \x00\n")


@pytest.mark.parametrize(
    "text",
    [
        "x: !!python/object/apply:os.system [ls]\n",
        "x: !foo bar\n",
        "<<: 3\n",
        "seed: 2020-13-45\n",
        "seed: " + "9" * 6000 + "\n",
        "agents: &a [*a]\n",
        "debate: &d {settings: *d}\n",
        "agents: " + "[" * 3000 + "\n",
        "? [a, b]\n: 2\n",
        "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1'}]\n" for i in range(10)),
    ],
    ids=["python", "tag", "merge", "date", "digits", "itself", "map-itself", "deep", "list-key", "aliases"],
)
def test_yaml_that_no_recipe_needs_is_one_error_with_its_line(text: str) -> None:
    message = error(text)
    assert message.startswith("r.yaml")
    assert len(message) < 500


@pytest.mark.parametrize("value", ["2020-99-99", "!!int abc", "9" * 5000, "[" * 3000])
def test_an_override_whose_value_cannot_be_read_is_quoted(value: str) -> None:
    assert error(GOOD, f"seed={value}").startswith("override 'seed=") or "override seed=" in error(
        GOOD, f"seed={value}"
    )


def test_overrides_take_only_plain_digits_as_places() -> None:
    assert "list of 2" in error(GOOD, "agents.\u0660.name=x")
    assert "empty part" in error(GOOD, "training..steps=3")


@pytest.mark.parametrize(
    "override",
    [
        "training.learning_rate=.inf",
        "reward.influence.eta=.inf",
        "advantage.weight.alpha=.nan",
        "sampling.temperature=.inf",
        "training.betas=[2, -1]",
        "engine.max_batch=99999999999999999999",
    ],
)
def test_numbers_that_would_fail_later_are_refused_at_once(override: str) -> None:
    assert override.partition("=")[0] in error(GOOD, override)
