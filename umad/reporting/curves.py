"""The parts of a report that come from metrics.jsonl: learning curves, health of the update, time and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from umad.reporting import svg
from umad.reporting.folder import RunFolder, column, mapping, number, turns_of
from umad.reporting.panels import Panel, Section, Table, colour, steps_table, window, words
from umad.reporting.progress import clock
from umad.reporting.svg import Series, percent


def learning(run: RunFolder) -> Section:
    """Reward and accuracy by turn while training, and the figures that tell whether training is healthy."""
    if not run.metrics:
        return Section("learning", "Learning", missing="No training step has been logged.")
    turns = sorted({t for name in run.agents for t in turns_of(run, name, "accuracy")})
    panels = [_metric_panel(run, "Reward", "reward", "free")]
    panels += _turn_panels(run, "Accuracy", "accuracy", turns)
    span = window(run)
    lead = "Means over each step's training problems, sampled as in training."
    if span > 1:
        lead += f" Thin: each step. Bold: mean of the last {span} steps."
    return Section(
        "learning",
        "Learning",
        lead=lead,
        legend=[Series(name, [], colour(run, name)) for name in run.agents],
        panels=[panel for panel in panels if panel is not None],
    )


HEALTH = (
    ("nll", "NLL (nats per token)", "free"),
    ("entropy", "Entropy (nats per token)", "free"),
    ("loss", "Loss", "free"),
    ("grad_norm", "Gradient norm, before clipping", "zero"),
    ("kl", "KL from the start", "zero"),
    ("lr", "Learning rate", "zero"),
    ("length", "Tokens per response", "zero"),
    ("truncated", "Cut off", "share"),
    ("unparsed", "No answer found", "share"),
)
"""Metric, heading, and scale: `free`, from `zero`, or a `share` in percent from zero."""


def health(run: RunFolder) -> Section:
    """Figures of the update and of the responses; what was not logged is left out."""
    turns = sorted({t for name in run.agents for t in turns_of(run, name, "no_signal")})
    panels = [_metric_panel(run, title, key, scale) for key, title, scale in HEALTH]
    panels += _turn_panels(run, "Groups without signal", "no_signal", turns)
    shown = [panel for panel in panels if panel is not None]
    if not shown:
        return Section("health", "Training health", missing="No figures of the update have been logged.")
    lead = "A group without signal has equal rewards, so its members' advantages are 0 and it teaches nothing."
    return Section(
        "health",
        "Training health",
        lead=lead if turns else "",
        legend=[Series(name, [], colour(run, name)) for name in run.agents],
        panels=shown,
    )


def _turn_panels(run: RunFolder, title: str, key: str, turns: Sequence[int]) -> list[Panel | None]:
    """One panel per turn for shares `agent/<name>/<key>/turn_<t>`, all on one scale."""
    points = [p for name in run.agents for t in turns for p in column(run, f"agent/{name}/{key}/turn_{t}")]
    scale = svg.axis(y for _, y in points if y is not None)
    return [_metric_panel(run, f"{title}, turn {t + 1}", f"{key}/turn_{t}", "share", scale) for t in turns]


def _metric_panel(run: RunFolder, title: str, key: str, scale: str, axis: svg.Axis | None = None) -> Panel | None:
    """A panel with one line per agent; None where no agent has a value."""
    columns = {name: column(run, f"agent/{name}/{key}") for name in run.agents}
    columns = {name: points for name, points in columns.items() if any(y is not None for _, y in points)}
    if not columns:
        return None
    span = window(run)
    group = [
        Series(name, svg.smooth(points, span), colour(run, name), faint=points if span > 1 else ())
        for name, points in columns.items()
    ]
    share = scale == "share"
    chart = svg.line_chart(
        title,
        words(group, "step", as_percent=share),
        group,
        x_label="step",
        as_percent=share,
        zero=scale != "free",
        y_axis=axis,
        ident=f"metric-{key.replace('/', '-')}",
    )
    return Panel(title, chart, steps_table(columns, as_percent=share))


PHASES = ("prepare", "generate", "grade", "score", "update", "push", "save", "evaluate")


OUTSIDE = ("save",)
"""Phases with a time of their own in the rows that `time/step` does not hold."""


def time_and_cost(run: RunFolder) -> Section:
    """Share of time per phase, and what training and evaluation generated."""
    sums = {key: sum(number(row.get(f"time/{key}")) or 0.0 for row in run.metrics) for key in _phases(run)}
    sums = {key: value for key, value in sums.items() if value > 0}
    total = sum(number(row.get("time/step")) or 0.0 for row in run.metrics)
    other = total - sum(value for key, value in sums.items() if key not in OUTSIDE)
    if sums and other > 0.005 * total:
        sums["other"] = other
    sums |= {key: value for key, value in _outside(run).items() if value > 0}
    bar = _time_bar(sums) if sums else None
    panels = []
    speed = [(x, y) for x, y in column(run, "throughput/tokens_per_second")]
    if any(y is not None for _, y in speed):
        line = Series("tokens per second", svg.smooth(speed, window(run)), 8, faint=speed)
        chart = svg.line_chart(
            "Tokens per second", words([line], "step"), [line], x_label="step", zero=True, ident="speed"
        )
        panels.append(Panel("Tokens per second", chart, steps_table({"Tokens per second": speed})))
    table = _cost_table(run)
    if bar is None and table is None and not panels:
        return Section("cost", "Time and cost", missing="Neither times nor counts have been logged.")
    lead = f"{len(run.metrics):,} steps in {clock(total or sum(sums.values()))}." if sums else ""
    return Section("cost", "Time and cost", lead=lead, bar=bar, panels=panels, open_table=table)


def _outside(run: RunFolder) -> dict[str, float]:
    """Seconds that no step holds: before the first (models loaded, tiny agents taught) and in evaluations."""
    measured = math.fsum(number(evaluation.raw.get("seconds")) or 0.0 for evaluation in run.evaluations)
    return {"prepare": number(run.state.get("prepared")) or 0.0, "evaluate": measured}


def _phases(run: RunFolder) -> list[str]:
    keys = dict.fromkeys(key[5:] for row in run.metrics for key in row if key.startswith("time/"))
    return sorted((k for k in keys if k != "step"), key=lambda k: PHASES.index(k) if k in PHASES else len(PHASES))


def _time_bar(sums: Mapping[str, float]) -> Panel:
    total = sum(sums.values())
    parts = [(name, value, 0 if name == "other" else i % 8 + 1) for i, (name, value) in enumerate(sums.items())]
    said = ", ".join(f"{name} {percent(value / total)}" for name, value, _ in parts)
    chart = svg.share_bar("Share of time per phase", said, parts, ident="time")
    rows = [[name, clock(value), percent(value / total)] for name, value, _ in parts]
    return Panel(
        "Share of time per phase", chart, Table(["Phase", "Time", "Share"], rows), [hue for _, _, hue in parts]
    )


def _cost_table(run: RunFolder) -> Table | None:
    rows = []
    sums = {
        key: sum(number(row.get(f"debate/{key}")) or 0.0 for row in run.metrics)
        for key in ("calls", "prompt_tokens", "completion_tokens", "failed")
    }
    if sums["calls"] or sums["completion_tokens"]:
        rows.append(
            [
                "Training",
                *(_count(sums[k]) for k in ("calls", "prompt_tokens", "completion_tokens")),
                f"{sums['failed']:.0f}",
            ]
        )
    for one in run.evaluations:
        cost = mapping(one.raw.get("cost"))
        if cost:
            cells = [svg.number(number(cost.get(key)), 0) for key in ("calls", "prompt_tokens", "completion_tokens")]
            failed = number(mapping(one.raw.get("failed")).get("n"))
            name = "Evaluation" if one.step is None else f"Evaluation, step {one.step}"
            rows.append([name, *cells, svg.number(failed, 0)])
    head = ["What", "Calls", "Prompt tokens", "Completion tokens", "Failed debates"]
    return Table(head, rows) if rows else None


def _count(value: float) -> str:
    return svg.number(value, 0) if value else "–"
