"""Settings that would make a run fit, each tried in the plan itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from umad.config import AdapterConfig, Recipe
from umad.config.base import Section
from umad.runs.planning.machines import GB, Layout

Peak = Callable[[Recipe, Layout], float]
"""Bytes that the worst phase needs."""

LEAST_TOKENS = 2048
LEAST_ROWS = 8
"""Smaller micro-batches and batches of responses are not proposed."""


@dataclass(frozen=True)
class Fix:
    """settings: overrides and options as one would type them."""

    settings: tuple[str, ...]
    needed_gb: float
    fits: bool
    text: str


@dataclass(frozen=True)
class _Change:
    kind: str
    """Of several changes of a kind the last one counts."""
    setting: str
    recipe: Recipe
    layout: Layout


def fixes(recipe: Recipe, layout: Layout, peak: Peak, memory: float) -> list[Fix]:
    """Single changes that make the run fit, the mildest of each kind. Where there are none, combinations: of settings of the
    recipe alone, with another launch, with offloading and adapters too. Empty if everything together is not enough."""
    found: dict[str, Fix] = {}
    for change in _changes(recipe, layout, offload=True):
        needed = peak(change.recipe, change.layout)
        if needed <= memory:
            found.setdefault(change.kind, _fix((change.setting,), needed, memory))
    if found:
        return list(found.values())
    together = (
        _together(recipe, layout, peak, memory, launch=launch, offload=offload)
        for launch, offload in ((False, False), (True, False), (True, True))
    )
    return list({fix.settings: fix for fix in together if fix is not None}.values())


def _fix(settings: tuple[str, ...], needed: float, memory: float) -> Fix:
    text = f"{' '.join(settings)}: {needed / GB:.1f} GB, fits"
    return Fix(settings, round(needed / GB, 3), needed <= memory, text)


def _together(recipe: Recipe, layout: Layout, peak: Peak, memory: float, *, launch: bool, offload: bool) -> Fix | None:
    """Takes the step that helps most, again and again."""
    settings: dict[str, str] = {}
    needed = peak(recipe, layout)
    while needed > memory:
        options: dict[str, tuple[float, _Change]] = {}
        for change in _changes(recipe, layout, launch=launch, offload=offload):
            less = peak(change.recipe, change.layout)
            if change.kind not in options and less < needed * 0.9999:
                options[change.kind] = (less, change)  # the mildest that helps
        if not options:
            return None
        needed, change = min(options.values(), key=lambda option: option[0])
        recipe, layout = change.recipe, change.layout
        settings[change.kind] = change.setting
    return _fix(tuple(settings.values()), needed, memory)


def _changes(recipe: Recipe, layout: Layout, *, launch: bool = True, offload: bool = False) -> Iterator[_Change]:
    """The next changes of every kind, the mildest first."""
    for kind, setting, changed in _recipes(recipe, adapters=offload):
        yield _Change(kind, setting, changed, layout)
    if launch and recipe.training is not None and all(agent.base == "own" for agent in recipe.agents):
        yield from _launches(recipe, layout, offload)


def _recipes(recipe: Recipe, *, adapters: bool) -> Iterator[tuple[str, str, Recipe]]:
    training = recipe.training
    if training is not None:
        if not training.gradient_checkpointing:
            yield _set(recipe, "training", "gradient_checkpointing", True)
        for tokens in _halves(training.micro_batch_tokens, LEAST_TOKENS):
            yield _set(recipe, "training", "micro_batch_tokens", tokens)
        if training.precision == "float32":
            yield _set(recipe, "training", "precision", "bfloat16")
        if not training.offload_idle and len(recipe.agents) > 1:
            yield _set(recipe, "training", "offload_idle", True)
    if recipe.engine.backend != "scripted":
        for rows in _halves(recipe.engine.max_batch, LEAST_ROWS):
            yield _set(recipe, "engine", "max_batch", rows)
        if recipe.engine.dtype == "float32":
            yield _set(recipe, "engine", "dtype", "bfloat16")
    if adapters and training is not None and all(agent.adapter is None and agent.trainable for agent in recipe.agents):
        agents = tuple(agent.model_copy(update={"adapter": AdapterConfig()}) for agent in recipe.agents)
        names = " ".join(f"agents.{i}.adapter.rank={AdapterConfig().rank}" for i in range(len(agents)))
        yield "adapter", names, recipe.model_copy(update={"agents": agents})


def _set(recipe: Recipe, section: str, name: str, value: object) -> tuple[str, str, Recipe]:
    old: Section = getattr(recipe, section)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    changed = recipe.model_copy(update={section: old.model_copy(update={name: value})})
    return f"{section}.{name}", f"{section}.{name}={text}", changed


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _launches(recipe: Recipe, layout: Layout, offload: bool) -> Iterator[_Change]:
    """Higher ZeRO stages, eight GPUs where the recipe's problems can be split over them, offloading."""
    problems = recipe.training.problems_per_step if recipe.training else 1
    counts = [layout.gpus] + ([8] if layout.gpus < 8 and problems % 8 == 0 else [])
    idle = recipe.training is not None and recipe.training.offload_idle  # refused under ZeRO-3
    options = [Layout(n, zero) for n in counts for zero in (2, 3) if n > 1 and zero >= layout.zero]
    if offload:
        options += [Layout(layout.gpus, max(2, layout.zero), "optimizer"), Layout(layout.gpus, 3, "all")]
    for option in options:
        if option == layout or (idle and option.zero == 3):
            continue
        text = f"--zero {option.zero}" + (f" --offload {option.offload}" if option.offload != "none" else "")
        yield _Change(
            f"launch on {option.gpus}", text + (f" --gpus {option.gpus}" * (option.gpus != layout.gpus)), recipe, option
        )
