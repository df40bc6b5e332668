"""The shipped recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from umad.recipe_io import dump_recipe, load_recipe, parse_recipe
from umad.runs.build import check

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
QUICKSTART = Path(__file__).parent.parent / "umad" / "runs" / "quickstart.yaml"


def test_there_are_recipes() -> None:
    assert {"tiny_umad", "tiny_ippo", "smollm2_gsm8k", "umad_math_hetero"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", [*RECIPES, QUICKSTART], ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_survives_being_written_out(path: Path) -> None:
    recipe = load_recipe(path)
    check(recipe)
    assert recipe.name == path.stem
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_ippo_differs_from_umad_only_in_the_two_equations() -> None:
    for family in ("tiny", "math_hetero"):
        names = [f"{a}_{family}" if family == "math_hetero" else f"{family}_{a}" for a in ("umad", "ippo")]
        umad, ippo = (load_recipe(RECIPES[0].parent / f"{name}.yaml") for name in names)
        same = umad.model_copy(update={"name": ippo.name, "reward": ippo.reward, "advantage": ippo.advantage})
        assert same == ippo
        assert (umad.reward.influence.eta, umad.advantage.weight.mode) == (0.2, "nll")
        assert (ippo.reward.influence.eta, ippo.advantage.weight.mode) == (0.0, "none")


def test_the_paper_setting() -> None:
    recipe = load_recipe(RECIPES[0].parent / "umad_math_hetero.yaml")
    training = recipe.training
    assert training is not None
    assert (training.group_size, training.problems_per_step, training.learning_rate, training.epochs) == (
        5,
        128,
        1e-6,
        2,
    )
    assert (recipe.sampling.temperature, recipe.sampling.top_p, recipe.loss.kl.coef) == (0.8, 1.0, 0.001)
