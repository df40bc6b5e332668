"""What the commands print of runs, evaluations and comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from umad.records import UserError, atomic_writer, read_debates, to_json
from umad.reporting.progress import say, table
from umad.runs.folder import RunFolder, evaluated_steps


def percent(value: float | None, interval: Sequence[float | None] | None = None) -> str:
    """`0.734 [0.701, 0.765]`; a dash where nothing is known."""
    if value is None:
        return "–"
    if interval is None or interval[0] is None or interval[1] is None:
        return f"{value:.3f}"
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def print_evaluation(folder: Path, title: str | None = None) -> None:
    """One evaluation: a row per turn."""
    from umad.evaluation.evaluate import read_summary

    summary = read_summary(folder)
    turns = range(summary["turns"])
    agents = summary["agents"]
    accuracy, intervals = summary["accuracy"], summary["accuracy_ci"]
    split = summary["uncertainty"]
    rows = []
    for t in turns:
        row = [t + 1, *(percent(accuracy[a][t], intervals[a][t]) for a in agents)]
        row.append(percent(summary["mean_accuracy"][t], summary["mean_accuracy_ci"][t]))
        row += [_number(split.get(name), t) for name in ("EU", "AU", "TU")]
        row += [_mean_share(summary[name], agents, t) for name in ("unparsed", "truncated")]
        rows.append(row)
    table(
        title or f"{folder}: accuracy with 95% intervals by problem, n = {summary['n_problems']} problems",
        ["turns", *agents, "mean of agents", "Sys-EU", "Sys-AU", "TU", "unparsed", "truncated"],
        rows,
    )
    say(_fine_print(summary))


def _fine_print(summary: Mapping[str, Any]) -> str:
    parts = [f"team decision {percent(summary['decision_accuracy'], summary['decision_accuracy_ci'])}"]
    sampling = summary["sampling"]["accuracy"]
    if isinstance(sampling, Mapping):
        parts.append(f"accuracy at temperature {sampling.get('temperature')}, top-p {sampling.get('top_p')}")
    split = summary["uncertainty"]
    if "refused" in split:
        parts.append(f"no decomposition: {split['refused']}")
    else:
        low, high = split["K"]
        k = str(low) if low == high else f"{low}-{high}"
        parts.append(f"uncertainty in nats from {max(split['n_problems'])} problems with K = {k}")
    if any(summary["failed"].values()) if isinstance(summary["failed"], Mapping) else summary["failed"]:
        parts.append(f"failed debates: {summary['failed']}")
    return "; ".join(parts)


def _number(values: Sequence[float | None] | None, t: int) -> str:
    return "–" if values is None or values[t] is None else f"{values[t]:.3f}"


def _mean_share(shares: Mapping[str, Sequence[float | None]], agents: Sequence[str], t: int) -> str:
    known = [value for a in agents if (value := shares[a][t]) is not None]
    return f"{sum(known) / len(known):.3f}" if known else "–"


def print_run(path: Path) -> None:
    """A finished run: accuracy per agent and turn before and after, with intervals and n, and what to type next."""
    folder = RunFolder(path)
    steps = evaluated_steps(path)
    if len(steps) >= 2:
        print_before_after(folder.evaluation(steps[0]), folder.evaluation(steps[-1]), steps[0], steps[-1])
    elif steps:
        print_evaluation(folder.evaluation(steps[0]))
    say(f"next: umad eval {path} --step all · open {path / 'report.html'}")


def print_before_after(before: Path, after: Path, first: int, last: int) -> None:
    """Accuracy per agent and turn at two steps, and the paired difference of the mean over agents."""
    from umad.evaluation.compare import compare
    from umad.evaluation.evaluate import read_summary

    old, new = read_summary(before), read_summary(after)
    difference = compare([before, after])["comparisons"][0]
    agents = new["agents"]
    rows: list[list[object]] = []
    for t in range(min(old["turns"], new["turns"])):
        for name in agents:
            cells = [percent(s["accuracy"][name][t], s["accuracy_ci"][name][t]) for s in (old, new)]
            own = difference["agents"].get(name)
            rows.append([t + 1, name, *cells, _signed(own[t]) if own else "–"])
        cells = [percent(s["mean_accuracy"][t], s["mean_accuracy_ci"][t]) for s in (old, new)]
        gain = difference["mean"][t]
        rows.append([t + 1, "mean of agents", *cells, _signed(gain)])
    table(
        f"Accuracy before (step {first}) and after (step {last}): n = {new['n_problems']} problems, 95% intervals by problem",
        ["turns", "agent", "before", "after", "paired difference"],
        rows,
    )
    rows = []
    for name in ("EU", "AU", "TU"):
        for label, summary in (("before", old), ("after", new)):
            values = summary["uncertainty"].get(name)
            if values is not None:
                rows.append(
                    [f"Sys-{name}" if name != "TU" else "TU", label, *(_number(values, t) for t in range(len(values)))]
                )
    if rows:
        count = max(new["uncertainty"]["n_problems"])
        k = new["uncertainty"]["K"][0]
        width = max(len(row) for row in rows) - 2
        rows = [row + [""] * (width + 2 - len(row)) for row in rows]
        table(
            f"Uncertainty in nats by number of turns: {count} problems, K = {k}",
            ["", "", *(str(t + 1) for t in range(width))],
            rows,
        )


def _signed(gain: Mapping[str, Any]) -> str:
    value, interval = gain.get("difference"), gain.get("ci")
    if value is None:
        return "–"
    if not interval or interval[0] is None:
        return f"{value:+.3f}"
    return f"{value:+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]"


def print_status(found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        say(f"{key}: {json.dumps(value, default=str) if isinstance(value, (dict, list)) else value}")


def analyze_command(folder: Path, *, as_json: bool) -> None:
    """Analyses recorded debates and writes `uncertainty.json` beside them."""
    from umad.evaluation.evaluate import analyze

    source = folder if folder.is_file() else folder / "debates.jsonl"
    if not source.is_file():
        inside = sorted(str(place.parent) for place in folder.glob("eval/step_*/debates.jsonl"))
        hint = f"give one of {', '.join(inside)}" if inside else "give an evaluation folder or a file of debate rows"
        raise UserError(f"{folder}: holds no debates.jsonl; {hint}")
    found = analyze(read_debates(source))
    out = source.parent / "uncertainty.json"
    _write_json(out, found)
    if as_json:
        say(json.dumps(found, indent=2))
        return
    split = found["decomposition"]
    agents = found["agents"]
    rows = [
        [t + 1, *(percent(found["accuracy"][a][t], found["accuracy_ci"][a][t]) for a in agents)]
        + [_number(split.get(name), t) for name in ("EU", "AU", "TU")]
        for t in range(found["turns"])
    ]
    table(
        f"{source}: {found['n_problems']} problems, 95% intervals by problem",
        ["turns", *agents, "Sys-EU", "Sys-AU", "TU"],
        rows,
    )
    if "refused" in split:
        say(f"no decomposition: {split['refused']}")
    say(f"written: {out}")


def compare_command(folders: Sequence[Path], out: Path | None, *, as_json: bool) -> None:
    """Compares evaluations with the first; `comparison.json` goes to `out` (a folder) or the last evaluation's folder."""
    from umad.evaluation.compare import HEADER, compare, comparison_rows, find_evaluation, write_comparison

    found = compare(folders)
    place = (out or find_evaluation(folders[-1])) / "comparison.json"
    with _writable(place):
        write_comparison(place, found)
    if as_json:
        say(json.dumps(found, indent=2))
        return
    table(
        f"compared with {found['baseline']}, in points; 95% intervals by problem", list(HEADER), comparison_rows(found)
    )
    for entry in found["comparisons"]:
        for note in entry["notes"]:
            say(f"note: {note}")
    say(f"written: {place}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with _writable(path), atomic_writer(path) as file:
        file.write(json.dumps(json.loads(to_json(content)), indent=2) + "\n")


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
