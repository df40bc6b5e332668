"""The parts of a report that come from evaluations: accuracy, uncertainty, flips, and how they moved over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from umad.reporting import svg
from umad.reporting.folder import Measured, Numbers, RunFolder, mapping, number, numbers
from umad.reporting.panels import Panel, Section, Table, before_after, colour, names, steps_table, words
from umad.reporting.svg import Series, percent


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
                words(group, "turn", as_percent=True),
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
        legend=_before_after_legend(before, after, 0),
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
    made: list[Series] = []
    side = 3.0 if before is not None and after is not None else 0.0
    if before is not None and values(before):
        points = _turn_points(values(before))
        made.append(Series(before.label, points, 0, "dashed", "hollow", _turn_bounds(bounds(before)), dodge=-side))
    if after is not None and values(after):
        points = _turn_points(values(after))
        made.append(Series(after.label, points, hue, "solid", "filled", _turn_bounds(bounds(after)), dodge=side))
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


def _before_after_legend(before: Measured | None, after: Measured | None, hue: int) -> list[Series]:
    made = []
    if before is not None:
        made.append(
            Series(f"before ({before.label})" if after is not None else before.label, [], 0, "dashed", "hollow")
        )
    if after is not None:
        made.append(Series(f"after ({after.label})" if before is not None else after.label, [], hue, "solid", "filled"))
    return made


def _sampling(one: Measured, part: str) -> str:
    found = mapping(mapping(one.raw.get("sampling")).get(part))
    words = {"temperature": "temperature", "top_p": "top-p", "rollouts": "rollouts per problem"}
    said = [f"{word} {number(found[key]):g}" for key, word in words.items() if number(found.get(key)) is not None]
    return f"Sampled with {', '.join(said)}." if said else ""


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
            low_high=_last_bounds(series, lambda one, name=name: one.accuracy_ci.get(name)),
        )
        for name in names(run, *series)
    ]
    lines = [line for line in lines if any(y is not None for _, y in line.points)]
    if lines:
        chart = svg.line_chart(
            "Accuracy at the last turn over training steps",
            words(lines, "step", as_percent=True),
            lines,
            x_label="step",
            as_percent=True,
            ident="steps-acc",
        )
        table = steps_table({line.name: line.points for line in lines}, as_percent=True)
        panels.append(Panel("Accuracy, last turn", chart, table))
    for i, key in enumerate(("TU", "EU", "AU")):
        title = key if key == "TU" else f"Sys-{key}"
        points = [(float(one.step or 0), _last(one.uncertainty.get(key, ()))) for one in series]
        if any(y is not None for _, y in points):
            bounds = _last_bounds(series, lambda one, key=key: one.uncertainty_ci.get(key))
            line = Series(title, points, 8, marks="filled", low_high=bounds)
            chart = svg.line_chart(
                f"{title} at the last turn over training steps",
                words([line], "step"),
                [line],
                x_label="step",
                zero=True,
                ident=f"steps-unc-{i}",
            )
            panels.append(Panel(f"{title} (nats), last turn", chart, steps_table({title: points})))
    return Section(
        "steps",
        "Evaluation over training",
        lead="Held-out problems, at the last turn; whiskers are 95% intervals by problem.",
        legend=[Series(line.name, [], line.colour, marks="filled") for line in lines],
        panels=panels,
    )


def _last_bounds(series: Sequence[Measured], intervals: Any) -> list[tuple[float, float, float]]:
    """(step, low, high) of the last turn, where an evaluation has an interval there."""
    found = [(float(one.step or 0), intervals(one)) for one in series]
    return [(step, *ci[-1]) for step, ci in found if ci and ci[-1] is not None]


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
                f"{name} by turn", words(group, "turn"), group, x_label="turn", y_axis=axis, ident=f"unc-{i}"
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
    return Section("uncertainty", title, lead=lead, legend=_before_after_legend(before, after, 1), panels=panels)


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
