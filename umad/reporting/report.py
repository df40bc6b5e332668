"""One self-contained HTML page about a run: `write_report`.

The page needs no network and holds no script; all text that a model or a file brought is escaped by the template engine,
and a content security policy forbids what escaping might ever miss.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import umad
from umad.records import UserError, atomic_writer
from umad.reporting import curves, measured, panels, svg
from umad.reporting.environment import environment
from umad.reporting.examples import OUTCOMES, Example, agents_of, choose
from umad.reporting.folder import Measured, RunFolder, mapping, number, read_run, rows_of
from umad.reporting.progress import clock, printable, progress
from umad.reporting.svg import percent

EXAMPLES = 12
"""Debates on the page."""
PAIRED_LIMIT = 300 << 20
"""Bytes of debates.jsonl above which the paired comparison is left to `umad compare`."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One key figure: a number, what it is, and what it rests on."""

    value: str
    name: str
    detail: str = ""


def write_report(run_folder: str | Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    Raises UserError where the folder is no run or cannot be written. Whatever else is missing, the page says so.
    """
    with progress("report"):
        run = read_run(run_folder)
        page = render(run)
        path = run.path / "report.html"
        try:
            with atomic_writer(path) as file:
                file.write(page)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def render(run: RunFolder) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("umad.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals["swatch"] = svg.swatch
    before, after = panels.before_after(run)
    paired = compared(run, before, after)
    sections = [
        measured.accuracy(run, paired),
        measured.over_steps(run),
        measured.uncertainty(run),
        measured.flips(run),
        curves.learning(run),
        curves.health(run),
        curves.time_and_cost(run),
    ]
    examples = pick_examples(run)
    hues = {name: panels.colour(run, name) for name in (*run.agents, *agents_of(examples))}
    recorded = mapping(run.state.get("environment"))
    page = templates.get_template("report.html").render(
        run=run,
        subtitle=subtitle(run),
        verdict=verdict(run, before, after, paired),
        facts=facts(run, before, after),
        sections=[section for section in sections if section is not None],
        examples=examples,
        outcomes=OUTCOMES,
        hues=hues,
        environment=recorded or environment(),
        environment_recorded=bool(recorded),
        scripted=mapping(run.recipe.get("engine")).get("backend") == "scripted",
        version=umad.__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=(Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8"),
        notes=list(dict.fromkeys(run.notes)),
    )
    return printable(page)


def compared(run: RunFolder, before: Measured | None, after: Measured | None) -> Mapping[str, Any] | None:
    """The paired comparison of the two evaluations (an entry of `umad.evaluation.compare`), None where there is none."""
    from umad.evaluation.compare import compare

    if before is None or after is None:
        return None
    files = [one.folder / "debates.jsonl" for one in (before, after)]
    if not all(file.is_file() for file in files):
        run.notes.append("An evaluation has no debates.jsonl, so differences are not given in pairs.")
        return None
    if sum(file.stat().st_size for file in files) > PAIRED_LIMIT:
        run.notes.append("The evaluations are too large to be paired here; `umad compare` does it.")
        return None
    try:
        entry: Mapping[str, Any] = compare([before.folder, after.folder])["comparisons"][0]
    # rows of other tools or of a half-written file; the rest of the report does not need them
    except (UserError, ValueError, KeyError, TypeError, RecursionError) as error:
        run.notes.append(f"Differences are not given in pairs: {error}")
        return None
    run.notes.extend(f"Paired differences: {note}." for note in entry.get("notes", ()))
    return entry


def subtitle(run: RunFolder) -> str:
    """What the recipe says in one line."""
    debate, training = mapping(run.recipe.get("debate")), mapping(run.recipe.get("training"))
    weight = mapping(mapping(run.recipe.get("advantage")).get("weight"))
    influence = mapping(mapping(run.recipe.get("reward")).get("influence"))
    parts = [
        f"{len(run.agents)} agent{'s' * (len(run.agents) != 1)}" if run.agents else "",
        f"protocol {debate['protocol']}" if debate.get("protocol") else "",
        f"{debate['turns']} turn{'s' * (debate['turns'] != 1)}" if debate.get("turns") else "",
        f"groups of {training['group_size']}" if training.get("group_size") else "",
        f"weight {weight['mode']}" if training and weight.get("mode") else "",
        f"influence η = {influence['eta']}" if training and influence.get("eta") is not None else "",
        f"seed {run.recipe['seed']}" if run.recipe.get("seed") is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def verdict(run: RunFolder, before: Measured | None, after: Measured | None, paired: Mapping[str, Any] | None) -> str:
    """The result in one or two sentences, as far as there is one."""
    newest = after or before
    if newest is None or not newest.mean or newest.mean[-1] is None:
        return "This run has not been evaluated."
    n = f"{newest.n_problems:,} problems" if newest.n_problems else "an unknown number of problems"
    who = "the agents' mean accuracy" if len(newest.agents) > 1 else "accuracy"
    where = f"after {newest.turns} turns" if newest.turns > 1 else "without debate"
    if before is None or after is None or not before.mean or before.mean[-1] is None:
        return f"{who[0].upper()}{who[1:]} {where} is {percent(newest.mean[-1])} ({n})."
    gain = _gain(paired)
    return (
        f"{who[0].upper()}{who[1:]} {where} went from {percent(before.mean[-1])} ({before.label}) to "
        f"{percent(after.mean[-1])} ({after.label}) on {n}{gain}."
    )


def _gain(paired: Mapping[str, Any] | None) -> str:
    rows = (paired or {}).get("mean") or []
    ci = rows[-1].get("ci") if rows else None
    if not ci or number(ci[0]) is None or number(ci[1]) is None:
        return ""
    low, high = ci
    kind = "a gain" if low > 0 else "a loss" if high < 0 else "no clear change"
    bounds = f"{100 * low:+.1f} to {100 * high:+.1f}".replace("-", "−")
    return f": {kind} (paired difference, 95% interval: {bounds} points)"


def facts(run: RunFolder, before: Measured | None, after: Measured | None) -> list[Fact]:
    """The key figures at the top."""
    made = []
    newest = after or before
    if newest is not None and newest.mean and newest.mean[-1] is not None:
        bounds = _bounds(list(newest.mean_ci[-1] or ()) if newest.mean_ci else [], percent)
        n = f"n = {newest.n_problems:,}" if newest.n_problems else "n unknown"
        who = "mean accuracy" if len(newest.agents) > 1 else "accuracy"
        detail = ", ".join(filter(None, [bounds, n]))
        made.append(Fact(percent(newest.mean[-1]), f"{who}, turn {newest.turns}", detail))
    decision = number(newest.raw.get("decision_accuracy")) if newest is not None else None
    if newest is not None and decision is not None:
        bounds = _bounds(list(newest.raw.get("decision_accuracy_ci") or ()), percent)
        made.append(Fact(percent(decision), "accuracy of the team's decision", bounds))
    eu = newest.uncertainty.get("EU", ()) if newest is not None else ()
    if newest is not None and eu and eu[-1] is not None:
        ci = newest.uncertainty_ci["EU"]
        said = [_bounds(list(ci[-1] or ()) if ci else [], svg.number)]
        said += [f"{svg.number(eu[0])} at turn 1"] if len(eu) > 1 else []
        made.append(Fact(svg.number(eu[-1]), f"Sys-EU in nats, turn {len(eu)}", ", ".join(filter(None, said))))
    if run.metrics:
        seconds = sum(number(row.get("time/step")) or 0.0 for row in run.metrics)
        steps = mapping(run.recipe.get("training")).get("steps") or run.state.get("steps")
        of = f" of {steps}" if isinstance(steps, int) and steps > run.metrics[-1]["step"] else ""
        made.append(
            Fact(f"{run.metrics[-1]['step']:,}{of}", "training steps", f"in {clock(seconds)}" if seconds else "")
        )
    return made


def _bounds(ci: Sequence[Any], style: Callable[[float | None], str]) -> str:
    known = [number(value) for value in ci]
    return f"95% interval {style(known[0])} to {style(known[1])}" if len(known) == 2 and None not in known else ""


def pick_examples(run: RunFolder) -> list[Example]:
    """A dozen debates: from the newest evaluation and from the first and the last training transcript."""
    newest = next((one for one in reversed(run.evaluations) if (one.folder / "debates.jsonl").is_file()), None)
    training = dict.fromkeys([*run.transcripts[:1], *run.transcripts[-1:]])
    sources: list[tuple[str, Iterator[Mapping[str, Any]]]] = [
        (f"training, step {step}", rows_of(path, run.notes)) for step, path in training
    ]
    if newest is not None:
        where = "evaluation" if newest.step is None else f"evaluation, step {newest.step}"
        sources.append((where, rows_of(newest.folder / "debates.jsonl", run.notes)))
    found = [choose(rows, EXAMPLES, where) for where, rows in sources]
    shares = share_out(EXAMPLES, [len(examples) for examples in found])
    return list(chain.from_iterable(choose_spread(examples, n) for examples, n in zip(found, shares, strict=True)))


def share_out(total: int, available: Sequence[int]) -> list[int]:
    """`total` places over sources, as evenly as their sizes allow."""
    taken = [0] * len(available)
    while sum(taken) < min(total, sum(available)):
        at = min((i for i, n in enumerate(available) if taken[i] < n), key=lambda i: taken[i])
        taken[at] += 1
    return taken


def choose_spread(examples: Sequence[Example], count: int) -> list[Example]:
    """`count` of them, spread over the kinds, which stand one after another."""
    return [examples[i * len(examples) // count] for i in range(count)]
