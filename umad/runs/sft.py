"""`umad sft`: TRL's SFTTrainer for one agent after the other, in a run folder like that of training.

Steps count through all agents: the first agent's, then the second's. A checkpoint holds all of them as they are at its step,
so that `umad eval` and reinforcement learning take it as it is; one is saved whenever an agent is done, and `--resume` goes on
with the next agent.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from umad.config import Recipe, SFTConfig, TrainingConfig
from umad.debate.agents import Agent
from umad.engines import models
from umad.learning.checkpoint import (
    TRAINING,
    checkpoint_folders,
    checkpoint_step,
    load_checkpoint,
    missing_parts,
    recipe_differences,
    remove_leftovers,
    save_checkpoint,
)
from umad.learning.world import World, check_divides, deepspeed_launch, start_world
from umad.records import RunError, UserError
from umad.reporting.progress import logged, progress, say, silence
from umad.reporting.report import write_report
from umad.reporting.sinks import Sinks
from umad.runs import build
from umad.runs.folder import RunFolder, check_folder, disk_errors, start_folder
from umad.runs.sft_rows import Example, debate_files, examples_for, read_source

KIND = "sft"
"""What stands in a checkpoint for the way its training state lies on the ranks: there is none."""


@dataclass(frozen=True)
class Stage:
    """One agent's part: what it learns from, and its steps within the run."""

    agent: build.Loaded
    examples: Sequence[Example]
    first: int
    """Steps of the run before it."""
    steps: int

    @property
    def name(self) -> str:
        return self.agent.config.name


@dataclass(frozen=True)
class _Run:
    recipe: Recipe
    folder: RunFolder
    stages: Sequence[Stage]
    sinks: Sinks | None
    world: World
    bar: Any


def check(recipe: Recipe) -> SFTConfig:
    """What can be checked without loading a model or data."""
    if recipe.sft is None:
        raise UserError("sft: is missing; say what to imitate, e.g. sft: {data: {name: gsm8k}, epochs: 1}")
    if not any(agent.trainable for agent in recipe.agents):
        raise UserError("agents: none of them is trainable, so there is nothing to train")
    for module in ("trl", "peft"):
        if importlib.util.find_spec(module) is None and (module == "trl" or any(a.adapter for a in recipe.agents)):
            raise UserError(f"umad sft needs {module}, which is not installed: pip install 'umad[{module}]'")
    if deepspeed_launch():
        raise UserError(
            "umad sft does not run under DeepSpeed; launch it alone or with recipes/accelerate/ddp.yaml (adapters and "
            "training.gradient_checkpointing save memory)"
        )
    build.check(recipe)
    if recipe.sft.debates is not None:
        debate_files(Path(recipe.sft.debates))
    elif recipe.sft.data is not None and recipe.sft.data.path is not None and not Path(recipe.sft.data.path).exists():
        raise UserError(f"sft.data.path: {recipe.sft.data.path} does not exist")
    return recipe.sft


def sft(recipe: Recipe, *, resume: bool = False) -> RunFolder:
    """Fine-tunes every agent that is trainable and returns the run folder. Under `accelerate launch` every process calls it.

    Raises:
        UserError: recipe, data, models or the output folder cannot be used. Nothing is half-written then.
    """
    world = start_world()
    if not world.main:
        silence()
    try:
        return _sft(recipe, resume, world)
    finally:
        world.close()


def _sft(recipe: Recipe, resume: bool, world: World) -> RunFolder:
    def checked() -> SFTConfig:
        config = check(recipe)
        check_folder(recipe, again=resume)
        check_divides("sft.batch_size", config.batch_size, world.size, "one for each process")
        return config

    config = world.agree(checked)
    start = time.perf_counter()
    with build.grader_of(recipe) as grader:
        source = world.agree(lambda: read_source(recipe, grader))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        build.prepare_sources(recipe)
    world.barrier()
    loaded = build.load_agents(recipe)
    stages, notes = _stages(recipe, config, loaded, source)
    steps = stages[-1].first + stages[-1].steps
    prepared = time.perf_counter() - start
    folder = RunFolder(recipe.folder)
    world.agree(lambda: start_folder(recipe) if world.main else None)
    with ExitStack() as stack:
        stack.enter_context(disk_errors(folder.path))
        sinks = None
        if world.main:
            stack.enter_context(logged(folder.log))
            sinks = stack.enter_context(Sinks(folder.path, recipe, steps=steps, prepared=prepared))
        for note in notes:
            say(note)
        done = _begin(recipe, folder, stages, sinks, resume, world)
        bar = stack.enter_context(progress("fine-tuning", total=steps, unit="steps", done=done))
        run = _Run(recipe, folder, stages, sinks, world, bar)
        for stage in stages:
            if stage.first + stage.steps > done:
                _train(run, stage, config)
        if world.main:
            say(f"report: {write_report(folder.path)}")
    return folder


def _stages(
    recipe: Recipe, config: SFTConfig, loaded: Sequence[build.Loaded], source: Any
) -> tuple[list[Stage], list[str]]:
    """Each trained agent with its examples and steps, and a line that says what it learns from."""
    # what is only encoded for needs no engine
    agents = {
        a.config.name: Agent(a.config.name, cast(Any, None), a.tokenizer, _prompt_limit(recipe, a)) for a in loaded
    }
    prompts = build.prompts_of(recipe, list(agents.values()))
    stages: list[Stage] = []
    notes = []
    for one in loaded:
        name = one.config.name
        if not one.config.trainable:
            continue
        context = models.context_length(one.model)
        examples, tally = examples_for(recipe, agents[name], prompts, source, one.stop_ids, context)
        notes.append(f"agent {name}: {tally.describe(len(examples), source.what)}")
        epoch = math.ceil(len(examples) / config.batch_size)
        first = stages[-1].first + stages[-1].steps if stages else 0
        stages.append(Stage(one, examples, first, config.steps or epoch * (config.epochs or 1)))
    return stages, notes


def _prompt_limit(recipe: Recipe, agent: build.Loaded) -> int:
    """As in a debate, where the response must find room too; a context that is shorter than that is no fault here."""
    context = models.context_length(agent.model)
    room = context - recipe.sampling.max_tokens
    limit = room if room > 0 else context
    return min(recipe.sampling.max_prompt_tokens or limit, limit)


def _begin(
    recipe: Recipe, folder: RunFolder, stages: Sequence[Stage], sinks: Sinks | None, resume: bool, world: World
) -> int:
    """The steps that are done: on resume the newest checkpoint at which an agent was finished is loaded."""
    done, found = 0, None
    if resume and world.main:
        remove_leftovers(folder.path)
        ends = {stage.first + stage.steps for stage in stages}
        whole = [where for where in checkpoint_folders(folder.path) if checkpoint_step(where) in ends]
        found = next((where for where in reversed(whole) if not missing_parts(where)), None)
    found = world.gather(found)[0]
    if found is not None:
        _load(found, recipe, stages, world)
        done = checkpoint_step(found)
        say(f"resuming after step {done} ({found})")
    elif resume:
        say(f"{folder.path} has no checkpoint of a finished agent; starting from the first step")
    if sinks is not None:
        sinks.cut(done)
    return done


def _load(where: Path, recipe: Recipe, stages: Sequence[Stage], world: World) -> None:
    state = json.loads((where / TRAINING / "state.json").read_text(encoding="utf-8"))
    if state.get("parallel") != [KIND]:
        raise UserError(f"{where}: was not saved by umad sft; choose another folder with output=DIR")
    if differences := recipe_differences(state.get("recipe", {}), recipe.model_dump(mode="json")):
        raise UserError(f"{where}: comes from another recipe:\n  " + "\n  ".join(differences))
    load_checkpoint(where, _saved(stages, world), world=world)


# --- one agent --------------------------------------------------------------------------------------------------------


def _train(run: _Run, stage: Stage, config: SFTConfig) -> None:
    """Trains one agent with TRL, logs every step, saves a checkpoint of all at its end (and where the recipe says)."""
    from umad.learning.modeling import checkpoint_activations, choose_attention, make_savable, widen

    settings = run.recipe.training or TrainingConfig(steps=1)
    model = stage.agent.model
    choose_attention(model, settings.attention, settings.precision)
    widen(model)
    make_savable(model)
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    every = run.recipe.checkpoints.every
    began = time.perf_counter()

    def tell(step: int, logs: Mapping[str, float]) -> None:
        nonlocal began
        now = time.perf_counter()
        row = {f"agent/{stage.name}/{ours}": logs[theirs] for theirs, ours in _METRICS.items() if theirs in logs}
        if run.sinks is not None:
            run.sinks.log(stage.first + step, {**row, "time/step": now - began})
        run.bar.advance()
        began = now
        for key in ("loss", "grad_norm"):
            if not math.isfinite(logs.get(key, 0.0)):
                raise RunError(
                    f"step {stage.first + step}: the {key} of agent {stage.name!r} is not finite; nothing of it was saved. "
                    "Lower sft.learning_rate, and go on with --resume"
                )
        if every and (stage.first + step) % every == 0 and step < stage.steps:
            _save(run, stage.first + step)
            began = time.perf_counter()

    say(f"agent {stage.name}: {stage.steps} steps of {config.batch_size} of its {len(stage.examples)} responses")
    with _as_it_was(model):
        trainer = _trainer(run, stage, config, settings, tell)
        trainer.train()
        del trainer
        model.zero_grad(set_to_none=True)
    model.eval()
    _save(run, stage.first + stage.steps)


_METRICS = {
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "mean_token_accuracy": "token_accuracy",
    "num_tokens": "tokens",
    "epoch": "epoch",
}
"""What TRL calls what we log: `loss` is the mean over the step's completion tokens, `tokens` are all so far, prompts too."""


def _trainer(
    run: _Run,
    stage: Stage,
    config: SFTConfig,
    settings: TrainingConfig,
    tell: Callable[[int, Mapping[str, float]], None],
) -> Any:
    """TRL's trainer of this agent; after every step it calls `tell` with the agent's step and what TRL logs."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig as Arguments
    from trl import SFTTrainer

    from umad.learning.policy import learning_rate_factor

    class Trainer(SFTTrainer):
        """TRL's, with the recipe's schedule: in transformers' own the first step of a warm-up has a rate of 0."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            def factor(step: int) -> float:
                return learning_rate_factor(settings.schedule, step, settings.warmup_steps, num_training_steps)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            return self.lr_scheduler

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                tell(state.global_step, logs)

    rows, parts = _micro_batch(stage, config, settings, run.world)
    with warnings.catch_warnings():
        # TRL sets gradient_checkpointing by its old name, so that taking it back warns
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
        arguments = Arguments(
            output_dir=str(run.folder.path),
            max_steps=stage.steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=parts,
            learning_rate=stage.agent.config.learning_rate or config.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            max_grad_norm=settings.max_grad_norm,
            bf16=settings.precision == "bfloat16",
            gradient_checkpointing=False,  # `checkpoint_activations` did it, under whatever name transformers has for it
            seed=run.recipe.seed,
            use_cpu=not torch.cuda.is_available(),
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
    trainer = Trainer(
        model=stage.agent.model,
        args=arguments,
        train_dataset=Dataset.from_list([example.row() for example in stage.examples]),
        processing_class=copy.deepcopy(stage.agent.tokenizer),  # TRL gives it a padding token where it has none
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _micro_batch(stage: Stage, config: SFTConfig, settings: TrainingConfig, world: World) -> tuple[int, int]:
    """(responses in one forward pass of one process, passes in a step): as many as `training.micro_batch_tokens` allows if
    all were as long as the longest."""
    own = config.batch_size // world.size
    longest = max(len(e.prompt_ids) + len(e.completion_ids) for e in stage.examples)
    most = max(1, settings.micro_batch_tokens // longest)
    rows = max(n for n in range(1, own + 1) if own % n == 0 and n <= most)
    return rows, own // rows


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """TRL writes special tokens into the model's configs; what generation stops at is not its business."""
    kept = {name: copy.deepcopy(vars(getattr(model, name))) for name in ("config", "generation_config")}
    try:
        yield
    finally:
        for name, values in kept.items():
            vars(getattr(model, name)).update(values)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class _Saved:
    """What `save_checkpoint` and `load_checkpoint` need of a policy: here there is a model and no training state."""

    parallel = SimpleNamespace(kind=KIND, sharded=False)

    def __init__(self, model: Any, world: World) -> None:
        self.model, self.world = model, world

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """A plain Hugging Face folder; with an adapter the weights are merged out of place and it lies in `adapter/`."""
        from umad.learning.adapters import is_adapted, merged_weights, save_adapter
        from umad.learning.modeling import no_bars

        if not self.world.main:
            return
        weights = None
        if is_adapted(self.model):
            # of tied tensors one is enough: as copies they would no longer be seen to be one
            single = dict(self.model.named_parameters())
            tied = set(dict(self.model.named_parameters(remove_duplicate=False))) - set(single)
            weights = {n: t.to("cpu", copy=True) for n, t in merged_weights(self.model) if n not in tied}
        with no_bars():
            self.model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        if weights is not None:
            save_adapter(self.model, folder / "adapter", self.model.config.name_or_path)

    def load_model(self, folder: Path) -> None:
        from umad.learning.adapters import is_adapted, load_adapter
        from umad.learning.modeling import no_bars, widen

        if is_adapted(self.model):
            load_adapter(self.model, folder / "adapter")
            return
        with no_bars():
            loaded = models.load_model(str(folder))
        widen(self.model)
        self.model.load_state_dict(loaded.state_dict())

    def training_state(self) -> dict[str, Any]:
        return {}

    def load_training_state(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError("there is training state in the checkpoint")


def _saved(stages: Sequence[Stage], world: World) -> dict[str, Any]:
    return {stage.name: _Saved(stage.agent.model, world) for stage in stages}


def _save(run: _Run, step: int) -> None:
    """All agents as they are now. The last checkpoint at which an agent was done is what a resume needs: it is kept."""
    ends = [stage.first + stage.steps for stage in run.stages]
    save_checkpoint(
        run.folder.path,
        step,
        _saved(run.stages, run.world),
        {stage.name: stage.agent.tokenizer for stage in run.stages},
        {
            "step": step,
            "recipe": run.recipe.model_dump(mode="json"),
            "wandb": None if run.sinks is None else run.sinks.wandb_id,
        },
        keep=run.recipe.checkpoints.keep,
        protect=[max(ended)] if (ended := [end for end in ends if end <= step]) else (),
        world=run.world,
    )
