"""`umad plan`: what a recipe will need on which GPU, and what would make it fit, before anything is run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from umad.config import Recipe
from umad.records import UserError
from umad.runs.planning.machines import GB, Gpu, Layout, find_gpu, read_accelerate
from umad.runs.planning.memory import Phase, phases, stay
from umad.runs.planning.remedies import Fix, fixes
from umad.runs.planning.seats import Seat, needs_scores
from umad.runs.planning.shapes import shape_of
from umad.runs.planning.work import Assumptions, Work, lengths_of, signal_table, work_of

ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Options:
    """What `umad plan` is asked beside the recipe. Memory in GB (10^9 bytes)."""

    gpu: str | None = None
    gpu_memory: float | None = None
    gpus: int | None = None
    zero: int | None = None
    offload: str | None = None
    accelerate: Path | None = None
    accuracy: float | None = None
    mean_length: float | None = None
    problem_tokens: int | None = None

    def layout(self) -> Layout:
        """The launch: what `accelerate` says, single options replacing it."""
        base = Layout() if self.accelerate is None else read_accelerate(self.accelerate)
        zero = base.zero if self.zero is None else self.zero
        kept = base.offload if zero and (base.offload != "all" or zero == 3) else "none"
        return Layout(
            base.gpus if self.gpus is None else self.gpus, zero, kept if self.offload is None else self.offload
        )


def plan(recipe: Recipe, options: Options = Options(), device: str = "cuda") -> dict[str, Any]:
    """Everything that `umad plan --json` prints; docs/plan.md describes it.

    device: the type of device that memory is planned for; `cpu` has smaller buffers.

    Raises:
        UserError: a model's config can't be had, an option is wrong, or the recipe can't run.
    """
    from umad.runs.build import check

    check(recipe)
    layout = options.layout()
    gpu = find_gpu(options.gpu, options.gpu_memory)
    assumed = _assumptions(recipe, options)
    _check(recipe, options, layout)
    seats = seats_of(recipe, assumed, layout)
    found = phases(seats, recipe, layout, device)
    needed = {name: needed_bytes(phase, assumed) for name, phase in found.items()}
    peak = max(needed, key=lambda name: needed[name])
    limit = None if gpu is None else gpu.memory

    def peak_of(changed: Recipe, launch: Layout) -> float:
        return max(
            needed_bytes(p, assumed) for p in phases(seats_of(changed, assumed, launch), changed, launch).values()
        )

    repairs = fixes(recipe, layout, peak_of, limit) if limit is not None and needed[peak] > limit else []
    return {
        "recipe": recipe.name,
        "gpu": None if gpu is None else {"name": gpu.name, "memory_gb": _gb(gpu.memory)},
        "layout": {**asdict(layout), "description": layout.describe()},
        "agents": _agents(seats, recipe, layout),
        "memory": {
            "phases": {
                name: {
                    "allocated_gb": _gb(phase.total),
                    "needed_gb": _gb(needed[name]),
                    "fits": None if limit is None else needed[name] <= limit,
                    "parts_gb": {part: _gb(value) for part, value in phase.parts.items()},
                }
                for name, phase in found.items()
            },
            "peak": {"phase": peak, "needed_gb": _gb(needed[peak])},
        },
        "step": _step(recipe, seats, assumed, layout, gpu),
        "groups": _groups(recipe, options),
        "assumptions": asdict(assumed),
        "fits": None if limit is None else needed[peak] <= limit,
        "warnings": _warnings(recipe, seats, needed, gpu, repairs),
        "fixes": [asdict(fix) for fix in repairs],
    }


def seats_of(recipe: Recipe, assumed: Assumptions, layout: Layout) -> list[Seat]:
    seats = []
    for agent in recipe.agents:
        shape = shape_of(agent.model, agent.revision)
        if shape.context and shape.context <= recipe.sampling.max_tokens:
            raise UserError(
                f"sampling.max_tokens: {recipe.sampling.max_tokens} leaves no room for a prompt in the context of agent "
                f"{agent.name!r} ({shape.context} tokens)"
            )
        seats.append(Seat(agent, shape, lengths_of(recipe, shape, assumed, layout.gpus)))
    return seats


def needed_bytes(phase: Phase, assumed: Assumptions) -> float:
    """What a GPU must have for a phase: what is allocated, what the allocator holds beside it, and CUDA itself."""
    return phase.total * (1 + assumed.fragmentation) + assumed.context_memory


def _assumptions(recipe: Recipe, options: Options) -> Assumptions:
    longest = recipe.sampling.max_tokens
    mean = longest / 2 if options.mean_length is None else options.mean_length
    if not 1 <= mean <= longest:
        raise UserError(f"--mean-length: {mean:g} is not between 1 and sampling.max_tokens ({longest})")
    assumed = Assumptions(mean_length=mean)
    if options.problem_tokens is None:
        return assumed
    if options.problem_tokens < 1:
        raise UserError(f"--problem-tokens: {options.problem_tokens} is no number of tokens")
    return replace(assumed, problem_tokens=options.problem_tokens)


def _check(recipe: Recipe, options: Options, layout: Layout) -> None:
    if options.accuracy is not None and not 0 <= options.accuracy <= 1:
        raise UserError(f"--accuracy: {options.accuracy:g} is not between 0 and 1")
    if layout.deepspeed and any(agent.base == "shared" for agent in recipe.agents):
        raise UserError("--zero: agents with base: shared cannot be trained by DeepSpeed; leave it out")
    training = recipe.training
    if training is not None and training.problems_per_step % layout.gpus:
        from umad.config.recipe import nearest_multiples

        raise UserError(
            f"training.problems_per_step: {training.problems_per_step} cannot be split over {layout.gpus} GPUs; "
            f"{nearest_multiples(training.problems_per_step, layout.gpus)} can"
        )


def _gb(value: float | None) -> float | None:
    return None if value is None else round(value / GB, 3)


def _agents(seats: Sequence[Seat], recipe: Recipe, layout: Layout) -> list[dict[str, Any]]:
    kept = stay(seats, recipe, layout)
    return [
        {
            "name": seat.config.name,
            "model": seat.config.model,
            "architecture": seat.shape.architecture,
            "shape_from": seat.shape.source,
            "parameters": seat.shape.parameters,
            "trained_parameters": seat.trained if recipe.training else 0,
            "resident_gb": {name: _gb(value) for name, value in kept[seat.config.name].items()},
        }
        for seat in seats
    ]


def _step(
    recipe: Recipe, seats: Sequence[Seat], assumed: Assumptions, layout: Layout, gpu: Gpu | None
) -> dict[str, Any] | None:
    if recipe.training is None:
        return None
    scored = needs_scores(recipe)
    works = [
        work_of(
            recipe,
            seat.shape,
            seat.lengths,
            assumed,
            layout,
            gpu,
            trained=seat.trained,
            scores=scored and seat.trained > 0,
            adapter=seat.config.adapter is not None,
        )
        for seat in seats
    ]
    totals = {name: _sum(works, name) for name in _WORK}
    seconds = {name.removesuffix("_seconds"): value for name, value in totals.items() if name.endswith("_seconds")}
    known = [value for value in seconds.values() if value is not None]
    whole = sum(known) if len(known) == len(seconds) else None
    trained = totals["trained_tokens"] or 0.0
    return {
        "samples": sum(seat.lengths.samples for seat in seats),
        "tokens": {name.removesuffix("_tokens"): totals[name] for name in _WORK if name.endswith("_tokens")},
        "flops": {name.removesuffix("_flops"): totals[name] for name in _WORK if name.endswith("_flops")},
        "seconds": seconds | {"step": whole},
        "update_flops_per_token": (totals["update_flops"] or 0.0) / trained if trained else None,
        "agents": {seat.config.name: asdict(work) for seat, work in zip(seats, works, strict=True)},
    }


_WORK = tuple(Work.__dataclass_fields__)


def _sum(works: Sequence[Work], name: str) -> float | None:
    values = [getattr(work, name) for work in works]
    return None if None in values else float(sum(values))


def _groups(recipe: Recipe, options: Options) -> dict[str, Any] | None:
    if recipe.training is None:
        return None
    group = recipe.training.group_size
    asked = [] if options.accuracy is None else [options.accuracy]
    return {"group_size": group, "table": signal_table(group, sorted({*ACCURACIES, *asked})), "asked": options.accuracy}


def _warnings(
    recipe: Recipe, seats: Sequence[Seat], needed: Mapping[str, float], gpu: Gpu | None, repairs: Sequence[Fix]
) -> list[dict[str, Any]]:
    warnings: list[dict[str, Any]] = []
    for name, value in needed.items():
        if gpu is None or gpu.memory is None or value <= gpu.memory:
            continue
        over = value - gpu.memory
        text = f"{name} would need {value / GB:.1f} GB on one GPU, {over / GB:.1f} GB more than {gpu.name} has"
        warnings.append({"kind": "memory", "phase": name, "over_gb": _gb(over), "text": text})
    if any(w["kind"] == "memory" for w in warnings):
        text = "; ".join(fix.text for fix in repairs) or "nothing that was tried fits: more GPUs, or smaller models"
        warnings.append({"kind": "fixes", "text": f"what would do: {text}"})
    half = "bfloat16" in (recipe.engine.dtype, recipe.training.precision if recipe.training else "")
    if gpu is not None and gpu.half != "bfloat16" and half:
        warnings.append({"kind": "precision", "text": f"{gpu.name} has no bfloat16: it is emulated, and slow"})
    for seat in seats:
        if seat.shape.experts:
            text = f"{seat.config.name} is a mixture of experts, planned as if every token went through every expert"
            warnings.append({"kind": "experts", "text": text})
    return warnings


# --- what is printed --------------------------------------------------------------------------------------------------


def plan_command(path: Path, overrides: Sequence[str], options: Options, *, as_json: bool) -> None:
    """Reads the recipe, plans it, prints it."""
    from umad.recipe_io import load_recipe
    from umad.reporting.progress import say

    found = plan(load_recipe(path, overrides), options)
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        print_plan(found)


def print_plan(found: Mapping[str, Any]) -> None:
    from umad.reporting.progress import say, warn

    _print_agents(found)
    _print_phases(found)
    if found["step"] is not None:
        _print_step(found)
        _print_groups(found["groups"])
    else:
        say("The recipe has no training: generation only.")
    assumed = Assumptions(**found["assumptions"])
    say("Assumed: " + "; ".join(f"{name} {value} ({what})" for name, value, what in assumed.rows()))
    memory = [warning["text"] for warning in found["warnings"] if warning["kind"] == "memory"]
    for text in (["; ".join(memory)] if memory else []) + [
        warning["text"] for warning in found["warnings"] if warning["kind"] != "memory"
    ]:
        warn(text)


def _print_agents(found: Mapping[str, Any]) -> None:
    from umad.reporting.progress import table

    agents = found["agents"]
    parts = list(dict.fromkeys(part for agent in agents for part in agent["resident_gb"]))
    rows = [
        [
            agent["name"],
            agent["model"],
            _count(agent["parameters"]),
            _count(agent["trained_parameters"]),
            *(_size(agent["resident_gb"].get(part)) for part in parts),
            agent["shape_from"],
        ]
        for agent in agents
    ]
    table(
        f"{found['recipe']}, {found['layout']['description']}: what stays on each GPU, in GB (10^9 bytes)",
        ["agent", "model", "parameters", "trained", *parts, "shape from"],
        rows,
    )


def _print_phases(found: Mapping[str, Any]) -> None:
    from umad.reporting.progress import table

    gpu = found["gpu"]
    rows = []
    for name, phase in found["memory"]["phases"].items():
        parts = ", ".join(f"{part} {_size(value)}" for part, value in phase["parts_gb"].items() if value)
        verdict = "–" if phase["fits"] is None else "fits" if phase["fits"] else "too much"
        rows.append([name, _size(phase["allocated_gb"]), _size(phase["needed_gb"]), verdict, parts])
    what = "no GPU named (--gpu, --gpu-memory)"
    if gpu is not None:
        what = f"{gpu['name']}, {gpu['memory_gb']:.1f} GB"
    table(
        f"Peak of each phase on one GPU, in GB; {what}",
        ["phase", "allocated", "needed", "verdict", "of which"],
        rows,
    )


def _print_step(found: Mapping[str, Any]) -> None:
    from umad.reporting.progress import clock, table

    step = found["step"]
    tokens, flops, seconds = step["tokens"], step["flops"], step["seconds"]
    work = {
        "generation": tokens["response"],
        "scoring": tokens["trained"] if flops["scoring"] else 0,
        "update": tokens["trained"],
        "push": None,
    }
    rows = []
    for name, count in work.items():
        operations = flops.get(name)
        if not count and name != "push":
            continue
        took = seconds[name]
        rows.append(
            [
                name,
                "–" if count is None else _count(count),
                "–" if operations is None else f"{operations:.2e}",
                "–" if took is None else clock(took),
                "–" if not took or not count else f"{count / took:,.0f}",
            ]
        )
    whole = "name a GPU for times" if seconds["step"] is None else f"about {clock(seconds['step'])} without evaluations"
    table(
        f"One step, all GPUs and agents: {step['samples']} samples; {whole}",
        ["phase", "tokens", "FLOPs", "time", "tokens/s"],
        rows,
    )


def _print_groups(groups: Mapping[str, Any]) -> None:
    from umad.reporting.progress import table

    rows = [[f"{row['accuracy']:g}", f"{row['without_signal']:.3f}"] for row in groups["table"]]
    table(
        f"Groups of {groups['group_size']} in which all are right or all are wrong, so that nothing is learned",
        ["accuracy", "expected share"],
        rows,
    )


def _size(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}"
