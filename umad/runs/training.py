"""`umad train`: builds the parts, runs the steps, writes the run folder, saves and resumes."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from umad.config import Recipe, TrainingConfig
from umad.debate.driver import Driver
from umad.learning.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
    seed_random_states,
)
from umad.learning.rewards import load_functions
from umad.learning.schedule import ProblemSampler, total_steps
from umad.learning.trainer import NonFiniteError, StepResult, Trainer
from umad.learning.world import World, check_divides, deepspeed_launch, start_world
from umad.records import Problem, RunError, UserError
from umad.reporting.progress import logged, progress, say, silence, warn
from umad.reporting.report import write_report
from umad.reporting.sinks import Sinks
from umad.runs import build
from umad.runs.evaluating import START, best_steps, copy_summary, measure, note_settings
from umad.runs.folder import RunFolder, check_folder, claimed, disk_errors, start_folder

UNPARSED_STEPS = 3
"""So many steps in a row without one parsable answer are worth a loud warning."""


@dataclass(eq=False)
class _Run:
    recipe: Recipe
    folder: RunFolder
    trainer: Trainer
    tokenizers: Mapping[str, Any]
    sinks: Sinks | None
    """Of rank 0; the others log nothing."""
    problems: Sequence[Problem]
    """For evaluation."""
    steps: int
    world: World
    start: Mapping[str, Any]
    """What training started from: hashes of the problems and of every agent's weights."""


def train(recipe: Recipe, *, resume: bool = False) -> RunFolder:
    """Trains to the recipe's last step and returns the run folder. Under `accelerate launch` every process calls it.

    Raises:
        UserError: the recipe, data, models or the output folder cannot be used. Nothing is half-written then.
    """
    if recipe.training is None:
        raise UserError("training: is missing; this recipe only evaluates (umad eval)")
    world = start_world()
    if not world.main:
        silence()
    try:
        folder = _train(recipe, recipe.training, resume, world)
    except (UserError, RunError, KeyboardInterrupt):
        raise  # the command says it
    except Exception:
        if world.size == 1:
            raise
        # at once: leaving in the ordinary way could wait for ranks that wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    world.close()
    return folder


def _train(recipe: Recipe, training: TrainingConfig, resume: bool, world: World) -> RunFolder:
    problems, held_out = world.agree(lambda: _checked(recipe, training, resume, world))
    steps = total_steps(recipe, len(problems))
    start = time.perf_counter()
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        build.prepare_sources(recipe)
    world.barrier()
    loaded = build.load_agents(recipe)
    agents = build.agents_of(recipe, loaded, own_copy=True)
    prompts = build.prompts_of(recipe, agents)
    build.check_prompts(agents, prompts, problems, "train")
    build.check_prompts(agents, prompts, held_out, "eval")
    with build.grader_of(recipe) as grader:
        driver = Driver(agents, prompts, grader)
        policies = build.policies_for(recipe, loaded, driver, steps, world)
        prepared = time.perf_counter() - start
        sampler = ProblemSampler(problems, recipe.seed)
        trainer = Trainer(recipe, driver, build.protocol_of(recipe), policies, sampler, world)
        with ExitStack() as stack:
            world.agree(lambda: stack.enter_context(claimed(recipe.folder)) if world.main else None)
            folder = _started(recipe, world)
            stack.enter_context(disk_errors(folder.path))
            sinks = None
            if world.main:
                stack.enter_context(logged(folder.log))
                sinks = stack.enter_context(Sinks(folder.path, recipe, steps=steps, prepared=prepared))
                if resume:
                    remove_leftovers(folder.path)
            tokenizers = {a.config.name: a.tokenizer for a in loaded}
            start_facts = {
                "problems": _hash_of(problems),
                "models": {a.config.name: a.fingerprint for a in loaded},
            }
            run = _Run(recipe, folder, trainer, tokenizers, sinks, held_out, steps, world, start_facts)
            first = _begin(run, resume)
            with progress("training", total=steps, unit="steps", done=first - 1) as bar:
                _steps(run, first, bar)
            if world.main:
                say(f"report: {write_report(folder.path)}")
    return folder


def _checked(
    recipe: Recipe, training: TrainingConfig, resume: bool, world: World
) -> tuple[list[Problem], list[Problem]]:
    """What can be checked before anything heavy is loaded; the problems to train and to evaluate on."""
    build.check(recipe)
    check_folder(recipe, again=resume)
    load_functions(recipe.reward)
    if world.size > 1:
        why = "one for each process, whole groups kept together"
        check_divides("training.problems_per_step", training.problems_per_step, world.size, why)
        if training.problems_per_step // world.size < training.updates_per_batch:
            warn(
                f"training.updates_per_batch is {training.updates_per_batch} but a process has "
                f"{training.problems_per_step // world.size} problems in a step: in every update some have nothing to compute"
            )
    shared = [agent.name for agent in recipe.agents if agent.base == "shared"]
    if shared and deepspeed_launch():
        raise UserError(
            f"agents: {', '.join(shared)} have base: shared, which DeepSpeed cannot train: it takes over a model's tensors, "
            "and here several agents have them in common. Launch without DeepSpeed, or give each its own base"
        )
    evaluation = recipe.evaluation
    measures = evaluation.before or evaluation.after or evaluation.every
    problems = build.problems_of(recipe, "train")
    if training.problems_per_step > len(problems):
        warn(
            f"training.problems_per_step is {training.problems_per_step} but there are {len(problems)} problems: "
            "a step sees some more than once"
        )
    return problems, build.problems_of(recipe, "eval") if measures and recipe.data.eval is not None else []


def _started(recipe: Recipe, world: World) -> RunFolder:
    """The run folder, made by rank 0 and seen by all."""
    world.agree(lambda: start_folder(recipe) if world.main else None)
    folder = RunFolder(recipe.folder)

    def look() -> None:
        if not folder.config.exists():
            raise UserError(
                f"output: {folder.path} is not on a file system that all nodes share; choose one with output=DIR"
            )

    world.agree(look)
    return folder


def _begin(run: _Run, resume: bool) -> int:
    """Loads the checkpoint if there is one, pushes the weights, evaluates the start; returns the first step to run."""
    done, world = START, run.world
    seed_random_states(run.recipe.seed, world.rank)
    checkpoint = world.gather(latest_checkpoint(run.folder.path) if resume and world.main else None)[0]
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, run.trainer.policies, run.recipe.model_dump(mode="json"), world=world)
        _check_start(run, checkpoint, state["start"])
        done = int(state["step"])
        run.trainer.load_state(state["trainer"])
        say(f"resuming after step {done} ({checkpoint})")
        _warn_of_another_length(run, state["recipe"]["training"])
        if done >= run.steps:
            say(
                f"nothing is left to train: step {done} of {run.steps} is done (training.steps or epochs makes it longer)"
            )
    elif resume:
        say(f"{run.folder.path} has no complete checkpoint; starting from the first step")
    if run.sinks is not None:
        run.sinks.cut(done)
    world.barrier()
    run.trainer.push(done)
    _evaluate_if_due(run, done)
    return done + 1


def _hash_of(problems: Sequence[Problem]) -> str:
    import hashlib

    text = repr([(p.id, p.question, p.gold, p.kind, p.alternatives, p.required, p.choices) for p in problems])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _check_start(run: _Run, checkpoint: Any, before: Mapping[str, Any]) -> None:
    """A run goes on only with the problems and the start models that it began with: its place in the data, references and
    frozen agents would mean something else."""
    if before["problems"] != run.start["problems"]:
        raise UserError(
            f"data.train: the problems are not those that {checkpoint} was trained on; start a new run with output=DIR"
        )
    for name, found in run.start["models"].items():
        if before["models"].get(name) != found:
            raise UserError(
                f"agents: the start model of {name!r} has weights {found}, and had {before['models'].get(name)} when the run "
                f"began ({checkpoint}); start a new run with output=DIR"
            )


def _warn_of_another_length(run: _Run, before: Mapping[str, Any]) -> None:
    now = run.trainer.training
    if now.schedule != "constant" and (before["steps"], before["epochs"]) != (now.steps, now.epochs):
        warn(
            f"training.{'steps' if now.steps else 'epochs'} has changed, and with training.schedule: {now.schedule} the "
            "learning rate of every further step with it"
        )


def _steps(run: _Run, first: int, bar: Any) -> None:
    silent = 0
    saving: dict[str, float] = {}
    for step in range(first, run.steps + 1):
        result = _step(run, step)
        if run.sinks is not None:
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


def _step(run: _Run, step: int) -> StepResult:
    try:
        return run.trainer.step(step)
    except NonFiniteError as error:
        # together: a rank that left now would have the launcher end the one that writes
        debates = error.debates
        run.world.agree(lambda: run.folder.write_step(step, debates) if run.world.main else None)
        raise RunError(
            f"step {step}: {error}; training.max_nonfinite allows no more. The samples of this step are in "
            f"{run.folder.rollouts(step)}. Look at them, lower training.learning_rate, and go on with --resume"
        ) from error


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
    save_checkpoint(
        run.folder.path,
        step,
        run.trainer.policies,
        run.tokenizers,
        {
            "step": step,
            "recipe": run.recipe.model_dump(mode="json"),
            "trainer": run.trainer.state(),
            "start": dict(run.start),
            "versions": {agent.name: agent.engine.version for agent in run.trainer.driver.agents},
            "wandb": None if run.sinks is None else run.sinks.wandb_id,
        },
        keep=run.recipe.checkpoints.keep,
        protect=best_steps(run.folder.path) if run.recipe.checkpoints.keep_best else (),
        world=run.world,
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
    if not due or not run.problems or run.world.gather((where / "summary.json").exists())[0]:
        return
    measure(run.recipe, run.trainer.driver, run.problems, step, where, run.world)
    if run.world.main:
        note_settings(where, run.recipe)
        copy_summary(run.folder)
