"""`umad eval`: agents from a recipe, or a run's checkpoints, measured on the recipe's evaluation problems."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umad.config import AgentConfig, Recipe
from umad.debate.driver import Driver
from umad.evaluation.evaluate import Evaluation, evaluate, read_summary, write_evaluation
from umad.learning.world import World
from umad.records import Problem, UserError, atomic_writer
from umad.reporting.progress import logged
from umad.runs import build
from umad.runs.folder import RunFolder, check_folder, disk_errors, evaluated_steps, is_run, start_folder

START = 0
"""The step of the models as a run starts."""


def measure(
    recipe: Recipe, driver: Driver, problems: Sequence[Problem], step: int, where: Path, world: World | None = None
) -> Evaluation:
    """Evaluates the agents as they are now, over all ranks; rank 0 writes the evaluation folder `where`."""
    world = world or World()
    from umad.reporting.progress import say

    turns = recipe.evaluation.turns or getattr(build.protocol_of(recipe).settings, "turns", 1)
    start = time.perf_counter()
    evaluation = evaluate(
        build.Debater(recipe, driver, world),
        problems,
        recipe.evaluation,
        turns=turns,
        max_tokens=recipe.sampling.max_tokens,
        info={"step": step, "recipe": recipe.name, "seed": recipe.seed},
        progress=say,
    )
    evaluation.summary["seconds"] = round(time.perf_counter() - start, 3)
    with disk_errors(where):
        world.agree(lambda: write_evaluation(where, evaluation) if world.main else None)
    return evaluation


def best_steps(run: Path) -> list[int]:
    """The step with the best evaluation of those that have a checkpoint, if any: by the mean accuracy of all agents at the last
    turn, the newest of equals."""
    from umad.learning.checkpoint import missing_parts

    steps = [step for step in evaluated_steps(run) if not missing_parts(RunFolder(run).checkpoint(step))]
    scores = {step: _score(read_summary(RunFolder(run).evaluation(step))) for step in steps}
    return [max(scores, key=lambda step: (scores[step], step))] if scores else []


def _score(summary: dict[str, Any]) -> float:
    last = [turns[-1] for turns in summary["accuracy"].values() if turns and turns[-1] is not None]
    return sum(last) / len(last) if last else -1.0


def eval_command(target: str, overrides: Sequence[str] = (), step: str | None = None) -> list[Path]:
    """Evaluates a recipe's agents, or checkpoints of a run (`step`: a number, "all", or None for the newest).

    Returns the evaluation folders. Evaluations that are on disk already are not done again.
    """
    if is_run(Path(target)):
        return _eval_run(RunFolder(Path(target)), overrides, step)
    if step is not None:
        raise UserError(f"--step: {target} is not a run folder, so it has no checkpoints")
    from umad.recipe_io import load_recipe

    recipe = load_recipe(target, overrides)
    build.check(recipe)
    problems = build.problems_of(recipe, "eval")
    check_folder(recipe, again=True)
    where = RunFolder(recipe.folder).evaluation(START)
    if not _is_done(where, recipe):
        _evaluate_models(recipe, problems, START, where)
        note_settings(where, recipe)
    copy_summary(RunFolder(recipe.folder))
    return [where]


def _eval_run(folder: RunFolder, overrides: Sequence[str], step: str | None) -> list[Path]:
    from umad.learning.checkpoint import checkpoint_folders, checkpoint_step, missing_parts

    recipe = folder.recipe(overrides)
    build.check(recipe)
    saved = [checkpoint_step(where) for where in checkpoint_folders(folder.path) if not missing_parts(where)]
    if step == "all":
        steps = [START, *saved]
    elif step is None:
        steps = saved[-1:] or [START]
    elif step.isascii() and step.isdecimal() and (int(step) in saved or int(step) == START):
        steps = [int(step)]
    else:
        known = ", ".join(map(str, [START, *saved]))
        raise UserError(f"--step: {folder.path} has no checkpoint {step!r}; there are {known} (or 'all')")
    problems = build.problems_of(recipe, "eval")
    done = []
    for number in steps:
        where = folder.evaluation(number)
        if not _is_done(where, recipe):
            _evaluate_models(_with_checkpoint(recipe, folder, number), problems, number, where)
            note_settings(where, recipe)
        done.append(where)
    copy_summary(folder)
    return done


def _is_done(where: Path, recipe: Recipe) -> bool:
    """Whether the evaluation is on disk, made with the same settings."""
    from umad.reporting.progress import say

    note = where / "settings.json"
    if not (where / "summary.json").is_file() or not note.is_file():
        return False
    if json.loads(note.read_text(encoding="utf-8")) != _settings(recipe):
        return False
    say(f"{where} is there already")
    return True


def _settings(recipe: Recipe) -> dict[str, Any]:
    settings: dict[str, Any] = recipe.model_dump(
        mode="json", include={"agents", "engine", "evaluation", "debate", "grading", "data", "sampling"}
    )
    return settings


def note_settings(where: Path, recipe: Recipe) -> None:
    """Remembers what an evaluation was made with, so that it is repeated when that changes."""
    with atomic_writer(where / "settings.json") as file:
        json.dump(_settings(recipe), file)


def _with_checkpoint(recipe: Recipe, folder: RunFolder, step: int) -> Recipe:
    """The recipe whose agents are those of a checkpoint, with their tokenizers; those that are not trained are not in it and
    are what they were."""
    if step == START:
        return recipe
    where = folder.checkpoint(step)
    agents = [
        AgentConfig(name=a.name, model=str(where / a.name), chat_template=a.chat_template) if a.trainable else a
        for a in recipe.agents
    ]
    return recipe.model_copy(update={"agents": tuple(agents)})


def _evaluate_models(recipe: Recipe, problems: Sequence[Problem], step: int, where: Path) -> None:
    loaded = [] if recipe.engine.backend == "scripted" else build.load_agents(recipe)
    agents = build.agents_of(recipe, loaded, own_copy=False)
    prompts = build.prompts_of(recipe, agents)
    build.check_prompts(agents, prompts, problems, "eval")
    if recipe.folder == where.parent.parent and not is_run(recipe.folder):
        start_folder(recipe)
    with logged(RunFolder(where.parent.parent).log), build.grader_of(recipe) as grader:
        measure(recipe, Driver(agents, prompts, grader), problems, step, where)


def copy_summary(folder: RunFolder) -> None:
    """The run's `summary.json` is that of its highest step that is evaluated."""
    last = evaluated_steps(folder.path)[-1]
    summary = read_summary(folder.evaluation(last))
    with disk_errors(folder.summary), atomic_writer(folder.summary) as file:
        file.write(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
