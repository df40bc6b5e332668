"""`umad train`: builds the parts, runs the steps, writes the run folder, saves and resumes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umad.config import Recipe
from umad.debate.driver import Driver
from umad.learning.rewards import load_functions
from umad.learning.trainer import ProblemSampler, StepResult, Trainer, total_steps
from umad.records import Problem, UserError
from umad.reporting.progress import logged, progress, say, warn
from umad.reporting.sinks import Sinks
from umad.runs import build
from umad.runs.evaluating import START, copy_summary, measure, note_settings
from umad.runs.folder import RunFolder, check_folder, disk_errors, start_folder

UNPARSED_STEPS = 3
"""So many steps in a row without one parsable answer are worth a loud warning."""


@dataclass(eq=False)
class _Run:
    recipe: Recipe
    folder: RunFolder
    trainer: Trainer
    tokenizers: Mapping[str, Any]
    sinks: Sinks
    problems: Sequence[Problem]
    """For evaluation."""
    steps: int


def train(recipe: Recipe, *, resume: bool = False) -> RunFolder:
    """Trains to the recipe's last step and returns the run folder.

    Raises:
        UserError: the recipe, data, models or the output folder cannot be used. Nothing is half-written then.
    """
    from umad.learning.checkpoint import latest_checkpoint, remove_leftovers

    if recipe.training is None:
        raise UserError("training: is missing; this recipe only evaluates (umad eval)")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("training runs in one process so far; launch it with --num_processes 1, or as umad train")
    build.check(recipe)
    check_folder(recipe, again=resume)
    load_functions(recipe.reward)
    problems = build.problems_of(recipe, "train")
    evaluation = recipe.evaluation
    measures = evaluation.before or evaluation.after or evaluation.every
    if recipe.training.problems_per_step > len(problems):
        warn(
            f"training.problems_per_step is {recipe.training.problems_per_step} but there are {len(problems)} problems: "
            "a step sees some more than once"
        )
    held_out = build.problems_of(recipe, "eval") if measures and recipe.data.eval is not None else []
    steps = total_steps(recipe, len(problems))
    start = time.perf_counter()
    loaded = build.load_agents(recipe)
    agents = build.agents_of(recipe, loaded, own_copy=True)
    prompts = build.prompts_of(recipe, agents)
    build.check_prompts(agents, prompts, problems, "train")
    build.check_prompts(agents, prompts, held_out, "eval")
    policies = {agent.config.name: build.policy_for(recipe, agent, steps) for agent in loaded}
    prepared = time.perf_counter() - start
    folder = start_folder(recipe)
    if resume:
        remove_leftovers(folder.path)
    checkpoint = latest_checkpoint(folder.path) if resume else None
    with (
        disk_errors(folder.path),
        logged(folder.log),
        build.grader_of(recipe) as grader,
        Sinks(folder.path, recipe, steps=steps, prepared=prepared) as sinks,
    ):
        driver = Driver(agents, prompts, grader)
        sampler = ProblemSampler(problems, recipe.training.problems_per_step, recipe.seed)
        trainer = Trainer(recipe, driver, build.protocol_of(recipe), policies, sampler)
        run = _Run(recipe, folder, trainer, {a.config.name: a.tokenizer for a in loaded}, sinks, held_out, steps)
        first = _begin(run, checkpoint, resume)
        with progress("training", total=steps, unit="steps", done=first - 1) as bar:
            _steps(run, first, bar)
        _finish(run)
    return folder


def _begin(run: _Run, checkpoint: Any, resume: bool) -> int:
    """Loads the checkpoint if there is one, pushes the weights, evaluates the start; returns the first step to run."""
    done = START
    if checkpoint is not None:
        from umad.learning.checkpoint import load_checkpoint

        done = int(load_checkpoint(checkpoint, run.trainer.policies, run.recipe.model_dump(mode="json"))["step"])
        say(f"resuming after step {done} ({checkpoint})")
        if done >= run.steps:
            say(
                f"nothing is left to train: step {done} of {run.steps} is done (training.steps or epochs makes it longer)"
            )
    elif resume:
        say(f"{run.folder.path} has no complete checkpoint; starting from the first step")
    run.sinks.cut(done)
    run.trainer.push(done)
    _evaluate_if_due(run, done)
    return done + 1


def _steps(run: _Run, first: int, bar: Any) -> None:
    silent = 0
    saving: dict[str, float] = {}
    for step in range(first, run.steps + 1):
        result = run.trainer.step(step)
        silent = silent + 1 if _no_answer(result) else 0
        if _due(run.recipe.logging.transcripts, step):
            run.folder.write_step(step, result.debates)
        if silent == UNPARSED_STEPS:
            warn(_SILENT.format(n=UNPARSED_STEPS, where=run.folder.path / "transcripts"))
        # the row comes before the checkpoint: on resume rows after it are cut, none can be missing. So the time that
        # saving took stands in the next step's row
        run.sinks.log(step, result.metrics | saving)
        saving = {}
        if _due(run.recipe.checkpoints.every, step) or step == run.steps:
            begun = time.perf_counter()
            _save(run, step)
            saving = {"time/save": time.perf_counter() - begun}
        bar.advance()
        _evaluate_if_due(run, step)


_SILENT = (
    "no response of the last {n} steps had an answer that could be found, so nothing is learned. Look at {where}: do the "
    "agents see how to box their answer, and is sampling.max_tokens long enough?"
)


def _no_answer(result: StepResult) -> bool:
    responses = [r for debate in result.debates for r in debate.responses()]
    return bool(responses) and all(r.answer is None for r in responses)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _save(run: _Run, step: int) -> None:
    from umad.learning.checkpoint import save_checkpoint

    save_checkpoint(
        run.folder.path,
        step,
        run.trainer.policies,
        run.tokenizers,
        {"step": step, "recipe": run.recipe.model_dump(mode="json")},
        keep=run.recipe.checkpoints.keep,
    )


def _evaluate_if_due(run: _Run, step: int) -> None:
    """Evaluates where the recipe says so and it is not on disk: after a kill during an evaluation, resuming makes it."""
    settings = run.recipe.evaluation
    if step == START:
        due = settings.before
    elif step == run.steps:
        due = settings.after
    else:
        due = _due(settings.every, step)
    where = run.folder.evaluation(step)
    if not due or not run.problems or (where / "summary.json").exists():
        return
    measure(run.recipe, run.trainer.driver, run.problems, step, where)
    note_settings(where, run.recipe)
    copy_summary(run.folder)


def _finish(run: _Run) -> None:
    from umad.reporting.report import write_report

    say(f"report: {write_report(run.folder.path)}")
