"""The parts of a report: from what a run folder holds to charts, tables and sentences. The template only lays them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umad.reporting import svg
from umad.reporting.folder import Measured, Numbers, RunFolder, column, mapping, number, numbers, turns_of
from umad.reporting.progress import clock
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


def accuracy(run: RunFolder, paired: Mapping[str, Any] | None) -> Section:
    """Accuracy per agent and turn, before and after, with intervals and n."""
    before, after = before_after(run)
    shown = [one for one in (before, after) if one is not None]
    if not shown:
        return Section("accuracy", "Accuracy", missing="There is no evaluation in this run. `umad eval` makes one.")
    lead = (
        "Share of right answers by turn, with 95% intervals by problem. Turn 1 is each agent alone; from turn 2 on it has "
        f"read the others. {_sampling(shown[-1], 'accuracy')}"
    )
    charts = [_accuracy_chart(run, name, before, after) for name in names(run, *shown) if _has(name, shown)]
    if sum(bool(values) for values in shown[-1].accuracy.values()) > 1:
        charts.append(_mean_chart(before, after))
    axis = svg.axis(svg.y_values([s for _, _, group in charts for s in group]))
    panels = [
        Panel(
            title,
            svg.line_chart(
                f"Accuracy by turn: {title}",
                _words(group, "turn", as_percent=True),
                group,
                x_label="turn",
                as_percent=True,
                y_axis=axis,
                ident=f"acc-{i}",
            ),
        )
        for i, (title, _, group) in enumerate(charts)
    ]
    return Section(
        "accuracy",
        "Accuracy",
        lead=lead,
        legend=_before_after_legend(before, after),
        panels=panels,
        open_table=accuracy_table(run, before, after, paired),
    )


def accuracy_table(
    run: RunFolder, before: Measured | None, after: Measured | None, paired: Mapping[str, Any] | None
) -> Table:
    """One row per agent and turn, the mean of agents and the decision after them."""
    both = before is not None and after is not None
    head = ["Agent", "Turn", *(one.label.capitalize() for one in (before, after) if one is not None)]
    head += ["Difference, paired"] if both else []
    head += ["Problems"]
    rows = []
    shown = [one for one in (before, after) if one is not None]
    turns = max(one.turns for one in shown)
    counts = " / ".join(dict.fromkeys(f"{one.n_problems:,}" if one.n_problems else "?" for one in shown))
    groups: list[str | None] = [name for name in names(run, *shown) if _has(name, shown)]
    for name in [*groups, None] if len(groups) > 1 else groups:
        for t in range(turns):
            cells = [_measured_cell(one, name, t) for one in shown]
            change = [_difference(paired, name, t)] if both else []
            rows.append([name or "Mean of agents", str(t + 1), *cells, *change, counts])
    if any(number(one.raw.get("decision_accuracy")) is not None for one in shown):
        cells = [_with_interval(one.raw.get("decision_accuracy"), one.raw.get("decision_accuracy_ci")) for one in shown]
        rule = next((str(one.raw["decision_rule"]) for one in shown if one.raw.get("decision_rule")), "")
        change = [_difference(paired, "", None)] if both else []
        rows.append([f"Decision ({rule})" if rule else "Decision", "end", *cells, *change, counts])
    return Table(head, rows, "Accuracy in percent with 95% bootstrap intervals by problem; differences in points.")


def _has(name: str, shown: Sequence[Measured]) -> bool:
    return any(one.accuracy.get(name) for one in shown)


def _measured_cell(one: Measured, name: str | None, t: int) -> str:
    values = one.mean if name is None else one.accuracy.get(name, ())
    ci = one.mean_ci if name is None else one.accuracy_ci.get(name, ())
    return _with_interval(values[t] if t < len(values) else None, list(ci[t] or ()) if t < len(ci) else None)


def _with_interval(value: Any, ci: Any) -> str:
    known, bounds = number(value), numbers(ci)
    if known is None:
        return "–"
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return percent(known)
    return f"{percent(known)} [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def _difference(paired: Mapping[str, Any] | None, name: str | None, t: int | None) -> str:
    if not paired:
        return "–"
    if t is None:
        row = mapping(paired.get("decision"))
    else:
        rows = paired.get("mean") if name is None else mapping(paired.get("agents")).get(name)
        row = rows[t] if isinstance(rows, list) and t < len(rows) else {}
    value, ci = number(row.get("difference")), numbers(list(row.get("ci") or ()))
    if value is None:
        return "–"
    text = f"{100 * value:+.1f}"
    if len(ci) == 2 and ci[0] is not None and ci[1] is not None:
        text += f" [{100 * ci[0]:+.1f}, {100 * ci[1]:+.1f}]"
    return text.replace("-", "−")


def _turn_points(values: Numbers) -> list[svg.Point]:
    return [(float(t + 1), value) for t, value in enumerate(values)]


def _turn_bounds(ci: Sequence[tuple[float, float] | None]) -> list[tuple[float, float, float]]:
    return [(float(t + 1), *bounds) for t, bounds in enumerate(ci) if bounds is not None]


def _pair(before: Measured | None, after: Measured | None, hue: int, values: Any, bounds: Any) -> list[Series]:
    made = []
    if before is not None and values(before):
        points = _turn_points(values(before))
        made.append(Series(before.label, points, 0, "dashed", "hollow", _turn_bounds(bounds(before))))
    if after is not None and values(after):
        points = _turn_points(values(after))
        made.append(Series(after.label, points, hue, "solid", "filled", _turn_bounds(bounds(after))))
    return made


def _accuracy_chart(
    run: RunFolder, name: str, before: Measured | None, after: Measured | None
) -> tuple[str, str, list[Series]]:
    group = _pair(
        before, after, colour(run, name), lambda one: one.accuracy.get(name), lambda one: one.accuracy_ci.get(name, ())
    )
    return name, name, group


def _mean_chart(before: Measured | None, after: Measured | None) -> tuple[str, str, list[Series]]:
    return "Mean of agents", "", _pair(before, after, 8, lambda one: one.mean, lambda one: one.mean_ci)


def _before_after_legend(before: Measured | None, after: Measured | None) -> list[Series]:
    made = []
    if before is not None:
        made.append(
            Series(f"before ({before.label})" if after is not None else before.label, [], 0, "dashed", "hollow")
        )
    if after is not None:
        made.append(Series(f"after ({after.label})" if before is not None else after.label, [], 1, "solid", "filled"))
    return made


def _sampling(one: Measured, part: str) -> str:
    found = mapping(mapping(one.raw.get("sampling")).get(part))
    words = {"temperature": "temperature", "top_p": "top-p", "rollouts": "rollouts per problem"}
    said = [
        f"{word} {svg.number(number(found[key]))}" for key, word in words.items() if number(found.get(key)) is not None
    ]
    return f"Sampled with {', '.join(said)}." if said else ""


def _words(group: Sequence[Series], x: str, *, as_percent: bool = False) -> str:
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


def learning(run: RunFolder) -> Section:
    """Reward and accuracy by turn while training, and the figures that tell whether training is healthy."""
    if not run.metrics:
        return Section("learning", "Learning", missing="No training step has been logged.")
    panels = [_metric_panel(run, "Reward", "reward", 0)]
    turns = sorted({t for name in run.agents for t in turns_of(run, name, "accuracy")})
    panels += [
        _metric_panel(run, f"Accuracy, turn {t + 1}", f"accuracy/turn_{t}", 1 + t, as_percent=True) for t in turns
    ]
    window = _window(run)
    lead = "Means over each step's training problems, sampled as in training."
    if window > 1:
        lead += f" Thin: each step. Bold: mean of the last {window} steps."
    return Section(
        "learning",
        "Learning",
        lead=lead,
        legend=[Series(name, [], colour(run, name)) for name in run.agents],
        panels=[panel for panel in panels if panel is not None],
    )


HEALTH = (
    ("nll", "Negative log-likelihood (nats per token)", False),
    ("entropy", "Entropy (nats per token)", False),
    ("loss", "Loss", False),
    ("grad_norm", "Gradient norm, before clipping", False),
    ("kl", "KL from the start", False),
    ("lr", "Learning rate", False),
    ("truncated", "Cut off", True),
    ("unparsed", "No answer found", True),
)


def health(run: RunFolder) -> Section:
    """Figures of the update and of the responses; what was not logged is left out."""
    panels = [_metric_panel(run, title, key, 40 + i, as_percent=share) for i, (key, title, share) in enumerate(HEALTH)]
    turns = sorted({t for name in run.agents for t in turns_of(run, name, "no_signal")})
    panels += [
        _metric_panel(run, f"Groups without signal, turn {t + 1}", f"no_signal/turn_{t}", 60 + t, as_percent=True)
        for t in turns
    ]
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


def _metric_panel(run: RunFolder, title: str, key: str, ident: int, *, as_percent: bool = False) -> Panel | None:
    """A panel with one line per agent; None where no agent has a value."""
    columns = {name: column(run, f"agent/{name}/{key}") for name in run.agents}
    columns = {name: points for name, points in columns.items() if any(y is not None for _, y in points)}
    if not columns:
        return None
    window = _window(run)
    group = [
        Series(name, svg.smooth(points, window), colour(run, name), faint=points if window > 1 else ())
        for name, points in columns.items()
    ]
    chart = svg.line_chart(
        title,
        _words(group, "step", as_percent=as_percent),
        group,
        x_label="step",
        as_percent=as_percent,
        ident=f"m-{ident}",
    )
    return Panel(title, chart, steps_table(columns, as_percent=as_percent))


def _window(run: RunFolder) -> int:
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


def over_steps(run: RunFolder) -> Section | None:
    """Evaluations over training, where there are at least three: the last turn's accuracy and uncertainty."""
    series = [one for one in run.evaluations if one.step is not None]
    if len(series) < 3:
        return None
    panels = []
    lines = [
        Series(
            name,
            [(float(one.step or 0), _last(one.accuracy.get(name, ()))) for one in series],
            colour(run, name),
            marks="filled",
            low_high=[
                (float(one.step or 0), *bounds)
                for one in series
                if one.accuracy_ci.get(name) and (bounds := one.accuracy_ci[name][-1]) is not None
            ],
        )
        for name in names(run, *series)
    ]
    lines = [line for line in lines if any(y is not None for _, y in line.points)]
    if lines:
        chart = svg.line_chart(
            "Accuracy at the last turn over training steps",
            _words(lines, "step", as_percent=True),
            lines,
            x_label="step",
            as_percent=True,
            ident="steps-acc",
        )
        table = steps_table({line.name: line.points for line in lines}, as_percent=True)
        panels.append(Panel("Accuracy, last turn", chart, table))
    for i, (key, title) in enumerate(UNCERTAINTY):
        points = [(float(one.step or 0), _last(one.uncertainty.get(key, ()))) for one in series]
        if any(y is not None for _, y in points):
            line = Series(title, points, 8, marks="filled")
            chart = svg.line_chart(
                f"{title} at the last turn over training steps",
                _words([line], "step"),
                [line],
                x_label="step",
                zero=True,
                ident=f"steps-unc-{i}",
            )
            panels.append(Panel(f"{title}, last turn", chart, steps_table({title: points})))
    return Section(
        "steps",
        "Evaluation over training",
        lead="Held-out problems, at the last turn; whiskers are 95% intervals by problem.",
        legend=[Series(line.name, [], line.colour, marks="filled") for line in lines],
        panels=panels,
    )


def _last(values: Numbers) -> float | None:
    return values[-1] if values else None


UNCERTAINTY = (
    ("TU", "Total (TU)"),
    ("EU", "Disagreement between agents (Sys-EU)"),
    ("AU", "Noise within agents (Sys-AU)"),
)


def uncertainty(run: RunFolder) -> Section:
    """TU, Sys-EU and Sys-AU by turn, before and after, on one scale."""
    before, after = before_after(run)
    shown = [one for one in (before, after) if one is not None]
    title = "Uncertainty"
    known = [one for one in shown if any(one.uncertainty.values())]
    if not known:
        refused = next((mapping(one.raw.get("uncertainty")).get("refused") for one in shown), None)
        return Section("uncertainty", title, missing=f"Not measured: {refused or 'no evaluation has a decomposition'}.")
    groups = [
        (
            name,
            _pair(
                before,
                after,
                1,
                lambda one, key=key: one.uncertainty.get(key),
                lambda one, key=key: one.uncertainty_ci.get(key, ()),
            ),
        )
        for key, name in UNCERTAINTY
    ]
    axis = svg.axis(svg.y_values([s for _, group in groups for s in group]), zero=True)
    panels = [
        Panel(
            name,
            svg.line_chart(
                f"{name} by turn", _words(group, "turn"), group, x_label="turn", y_axis=axis, ident=f"unc-{i}"
            ),
            _uncertainty_table(group),
        )
        for i, (name, group) in enumerate(groups)
    ]
    details = mapping(known[-1].raw.get("uncertainty"))
    n = next((int(v) for v in numbers(details.get("n_problems")) if v is not None), known[-1].n_problems)
    lead = (
        "In nats, over the distribution of answers. Total uncertainty is what agents disagree on (Sys-EU) plus what each is "
        f"unsure of by itself (Sys-AU). {n or '?'} problems. {_sampling(known[-1], 'decomposition')}"
    )
    return Section("uncertainty", title, lead=lead, legend=_before_after_legend(before, after), panels=panels)


def _uncertainty_table(group: Sequence[Series]) -> Table:
    turns = max((len(s.points) for s in group), default=0)
    rows = []
    for t in range(turns):
        cells = []
        for s in group:
            bounds = {at: (low, high) for at, low, high in s.low_high}.get(float(t + 1))
            value = svg.number(s.points[t][1]) if t < len(s.points) else "–"
            cells.append(f"{value} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else value)
        rows.append([str(t + 1), *cells])
    return Table(["Turn", *(s.name for s in group)], rows)


def flips(run: RunFolder) -> Section:
    """How often agents change a wrong answer into a right one between turns, and the other way round."""
    shown = [one for one in before_after(run) if one is not None]
    rows = []
    for one in shown:
        for name, raw in mapping(one.raw.get("flips")).items():
            found = mapping(raw)
            better, worse = numbers(found.get("wrong_to_right")), numbers(found.get("right_to_wrong"))
            for t, (up, down, n) in enumerate(zip(better, worse, numbers(found.get("n")), strict=False)):
                if up is None or down is None or not n:
                    continue
                net = f"{100 * (up - down) / n:+.1f}%".replace("-", "−")
                rows.append([name, one.label, f"{t + 1} → {t + 2}", f"{up:.0f}", f"{down:.0f}", net, f"{n:,.0f}"])
    if not rows:
        return Section("flips", "Flips", missing="Not measured: there is no evaluation with at least two turns.")
    head = ["Agent", "When", "Turns", "Wrong to right", "Right to wrong", "Net", "Responses"]
    order = {name: i for i, name in enumerate(names(run, *shown))}
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    return Section(
        "flips",
        "Flips",
        lead="What reading the others did to an agent's answer, from one turn to the next.",
        open_table=Table(head, rows, "Net: wrong to right minus right to wrong, as a share of the responses."),
    )


PHASES = ("generate", "grade", "score", "update", "push", "save", "evaluate")


def time_and_cost(run: RunFolder) -> Section:
    """Share of time per phase, and what training and evaluation generated."""
    sums = {key: sum(number(row.get(f"time/{key}")) or 0.0 for row in run.metrics) for key in _phases(run)}
    sums = {key: value for key, value in sums.items() if value > 0}
    total = sum(number(row.get("time/step")) or 0.0 for row in run.metrics)
    other = total - sum(sums.values())
    if sums and other > 0.005 * total:
        sums["other"] = other
    bar = _time_bar(sums) if sums else None
    panels = []
    speed = [(x, y) for x, y in column(run, "throughput/tokens_per_second")]
    if any(y is not None for _, y in speed):
        line = Series("tokens per second", svg.smooth(speed, _window(run)), 8, faint=speed)
        chart = svg.line_chart(
            "Tokens per second", _words([line], "step"), [line], x_label="step", zero=True, ident="speed"
        )
        panels.append(Panel("Tokens per second", chart, steps_table({"Tokens per second": speed})))
    table = _cost_table(run)
    if bar is None and table is None and not panels:
        return Section("cost", "Time and cost", missing="Neither times nor counts have been logged.")
    lead = f"{len(run.metrics):,} steps in {clock(total or sum(sums.values()))}." if sums else ""
    return Section("cost", "Time and cost", lead=lead, bar=bar, panels=panels, open_table=table)


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
