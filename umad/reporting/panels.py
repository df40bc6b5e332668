"""What the parts of a report are made of; the template only lays them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from umad.reporting import svg
from umad.reporting.folder import Measured, RunFolder
from umad.reporting.svg import Series, percent

TABLE_ROWS = 40
"""Rows of a table under a chart; longer ones show every so-manieth step."""
SMOOTH_FROM = 12
"""Steps from which on curves are smoothed, over a tenth of the run."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text and escaped by the template. The first column holds row labels."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart with its heading; `chart` is SVG markup of our own making."""

    title: str
    chart: str
    table: Table | None = None
    hues: Sequence[int] = ()
    """Colours of the table's rows, where it is the chart's legend."""


@dataclass(frozen=True, slots=True)
class Section:
    """`missing` says why a section is empty; `open_table` is shown outright, the panels' tables when asked for."""

    id: str
    title: str
    lead: str = ""
    legend: Sequence[Series] = ()
    panels: Sequence[Panel] = ()
    open_table: Table | None = None
    missing: str = ""
    bar: Panel | None = None
    notes: Sequence[str] = field(default_factory=tuple)


def before_after(run: RunFolder) -> tuple[Measured | None, Measured | None]:
    """The evaluation before training (step 0) and the newest; either may be missing."""
    if not run.evaluations:
        return None, None
    first, last = run.evaluations[0], run.evaluations[-1]
    if first is last:
        return (None, last) if first.step != 0 or not run.metrics else (first, None)
    return first, last


def names(run: RunFolder, *evaluations: Measured | None) -> tuple[str, ...]:
    """The run's agents, and after them any that only an evaluation knows."""
    extra = [name for one in evaluations if one is not None for name in one.agents]
    return tuple(dict.fromkeys((*run.agents, *extra)))


def colour(run: RunFolder, agent: str) -> int:
    """1 to 8, by the agent's place."""
    known = names(run, *run.evaluations)
    return known.index(agent) % 8 + 1 if agent in known else 0


def words(group: Sequence[Series], x: str, *, as_percent: bool = False) -> str:
    """A chart in words, for those who do not see it: where each line starts and ends."""
    style = percent if as_percent else svg.number
    said = []
    for s in group:
        known = [(at, value) for at, value in s.points if value is not None]
        if known:
            (a, first), (b, last) = known[0], known[-1]
            end = "" if len(known) == 1 else f", {style(last)} at {x} {svg.number(b)}"
            said.append(f"{s.name}: {style(first)} at {x} {svg.number(a)}{end}.")
    return " ".join(said) or "No values."


def window(run: RunFolder) -> int:
    steps = len(run.metrics)
    return 1 if steps < SMOOTH_FROM else max(3, steps // 10)


def steps_table(columns: Mapping[str, Sequence[svg.Point]], *, as_percent: bool = False) -> Table:
    """The numbers of curves over steps; of many steps evenly spaced ones, the last included."""
    style = percent if as_percent else svg.number
    steps = sorted({x for points in columns.values() for x, _ in points})
    kept = (
        steps
        if len(steps) <= TABLE_ROWS
        else [steps[i * (len(steps) - 1) // (TABLE_ROWS - 1)] for i in range(TABLE_ROWS)]
    )
    lookup = {name: dict(points) for name, points in columns.items()}
    rows = [[f"{step:.0f}", *(style(values.get(step)) for values in lookup.values())] for step in kept]
    caption = f"{len(kept)} of {len(steps)} steps." if len(kept) < len(steps) else ""
    return Table(["Step", *columns], rows, caption)
