"""Reads a run folder for reports and status, whatever state it is in: what is missing or broken becomes a note."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from umad.records import UserError
from umad.reporting.sinks import read_json

Numbers = tuple[float | None, ...]
Intervals = tuple[tuple[float, float] | None, ...]

MARKS = ("config.yaml", "metrics.jsonl", "summary.json", "eval", "transcripts", "debates.jsonl")
"""A folder with any of these is a run, or was going to be one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One evaluation's `summary.json`, with values of unexpected types left out. Tuples are per turn.

    `step` is None for an evaluation that stands alone. `raw` is the file's whole content.
    """

    step: int | None
    folder: Path
    raw: Mapping[str, Any]
    agents: tuple[str, ...]
    accuracy: Mapping[str, Numbers]
    accuracy_ci: Mapping[str, Intervals]
    mean: Numbers
    mean_ci: Intervals
    n_problems: int | None
    uncertainty: Mapping[str, Numbers]
    uncertainty_ci: Mapping[str, Intervals]

    @property
    def turns(self) -> int:
        return max((len(values) for values in self.accuracy.values()), default=0)

    @property
    def label(self) -> str:
        return "evaluation" if self.step is None else f"step {self.step}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What a report needs. `notes` are sentences on what was missing or could not be read."""

    path: Path
    name: str
    recipe: Mapping[str, Any]
    recipe_text: str
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Measured]
    transcripts: Sequence[tuple[int, Path]]
    state: Mapping[str, Any]
    agents: tuple[str, ...]
    notes: list[str] = field(default_factory=list)


def read_run(path: str | Path) -> RunFolder:
    """Raises UserError where `path` is no run folder; every lesser fault is a note."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder")
    if not any((path / mark).exists() for mark in MARKS):
        raise UserError(f"{path}: not a run folder (it has none of {', '.join(MARKS)})")
    notes: list[str] = []
    recipe, text = _recipe(path / "config.yaml", notes)
    metrics = _metrics(path / "metrics.jsonl", notes)
    evaluations = _evaluations(path, notes)
    transcripts = [(step, file) for step, file in _numbered(path / "transcripts") if file.suffix == ".jsonl"]
    return RunFolder(
        path=path,
        name=str(recipe.get("name") or path.resolve().name),
        recipe=recipe,
        recipe_text=text,
        metrics=metrics,
        evaluations=evaluations,
        transcripts=transcripts,
        state=read_json(path / "state.json") or {},
        agents=_agents(recipe, metrics, evaluations),
        notes=notes,
    )


def number(value: Any) -> float | None:
    """A finite number, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def numbers(value: Any) -> Numbers:
    return tuple(number(item) for item in value) if isinstance(value, list) else ()


def intervals(value: Any) -> Intervals:
    return tuple(_interval(item) for item in value) if isinstance(value, list) else ()


def _interval(value: Any) -> tuple[float, float] | None:
    bounds = numbers(value)
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return None
    return bounds[0], bounds[1]


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def rows_of(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a JSON lines file, one at a time; lines that are none are left out and noted."""
    broken: list[int] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line_number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    yield row
                else:
                    broken.append(line_number)
    except OSError as error:
        notes.append(f"{path.name} could not be read ({error.strerror or error}).")
    if broken:
        which = f"line {broken[0]}" if len(broken) == 1 else f"{len(broken)} lines (first: {broken[0]})"
        notes.append(f"{path.parent.name}/{path.name}: {which} held no JSON object and was left out.")


def column(run: RunFolder, key: str) -> list[tuple[float, float | None]]:
    """A metric over steps; rows that do not have it are left out, nulls are gaps."""
    return [(float(row["step"]), number(row[key])) for row in run.metrics if key in row]


def turns_of(run: RunFolder, agent: str, name: str) -> list[int]:
    """The turns t for which `agent/<agent>/<name>/turn_<t>` was logged."""
    pattern = re.compile(rf"agent/{re.escape(agent)}/{re.escape(name)}/turn_(\d+)$")
    keys = {key for row in (*run.metrics[:1], *run.metrics[-1:]) for key in row}
    return sorted(int(match[1]) for key in keys if (match := pattern.match(key)))


def _recipe(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        recipe = yaml.safe_load(text)
    except FileNotFoundError:
        notes.append("There is no config.yaml, so the recipe is not known.")
        return {}, ""
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        notes.append("config.yaml could not be read, so the recipe is not known.")
        return {}, ""
    return (recipe if isinstance(recipe, dict) else {}), text


def _metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        notes.append("There is no metrics.jsonl: no training step has been logged.")
        return []
    merged: dict[int, dict[str, Any]] = {}
    odd = 0
    for row in rows_of(path, notes):
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            merged[step] = {**merged.get(step, {}), **row}
        else:
            odd += 1
    if odd:
        notes.append(f"metrics.jsonl: {odd} rows without a whole-number step were left out.")
    if not merged:
        notes.append("metrics.jsonl is empty: no training step has been logged.")
    return [merged[step] for step in sorted(merged)]


def _evaluations(path: Path, notes: list[str]) -> list[Measured]:
    found: list[Measured] = []
    for step, folder in _numbered(path / "eval"):
        summary = read_json(folder / "summary.json") if folder.is_dir() else None
        if summary is None:
            notes.append(f"eval/{folder.name} has no readable summary.json: that evaluation is not whole.")
        else:
            found.append(measured(summary, folder, step))
    if not found:
        # an evaluation of its own lies in the folder itself; a training run's summary has no accuracy at its top
        for folder in (path, path / "eval"):
            summary = read_json(folder / "summary.json")
            if summary is not None and mapping(summary.get("accuracy")):
                found.append(measured(summary, folder, None))
                break
    if not found:
        notes.append("There is no evaluation.")
    return found


def measured(summary: Mapping[str, Any], folder: Path, step: int | None) -> Measured:
    accuracy = {str(name): numbers(values) for name, values in mapping(summary.get("accuracy")).items()}
    uncertainty = mapping(summary.get("uncertainty"))
    mean = numbers(summary.get("mean_accuracy"))
    n = number(summary.get("n_problems"))
    return Measured(
        step=step,
        folder=folder,
        raw=summary,
        agents=tuple(accuracy),
        accuracy=accuracy,
        accuracy_ci={str(name): intervals(v) for name, v in mapping(summary.get("accuracy_ci")).items()},
        mean=mean or _mean(list(accuracy.values())),
        mean_ci=intervals(summary.get("mean_accuracy_ci")),
        n_problems=None if n is None else int(n),
        uncertainty={name: numbers(uncertainty.get(name)) for name in ("TU", "EU", "AU")},
        uncertainty_ci={name: intervals(uncertainty.get(f"{name}_ci")) for name in ("TU", "EU", "AU")},
    )


def _mean(columns: Sequence[Numbers]) -> Numbers:
    turns = max(map(len, columns), default=0)
    made: list[float | None] = []
    for t in range(turns):
        known = [values[t] for values in columns if t < len(values)]
        whole = [value for value in known if value is not None]
        made.append(sum(whole) / len(whole) if whole else None)
    return tuple(made)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of step_NNNNNN entries, in order."""
    if not folder.is_dir():
        return []
    found = [(re.match(r"step_(\d+)(?:\.\w+)?$", path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def _agents(
    recipe: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Measured]
) -> tuple[str, ...]:
    """Agent names in the recipe's order, else in the order of the files."""
    listed = recipe.get("agents")
    names = [str(mapping(agent).get("name")) for agent in listed] if isinstance(listed, list) else []
    names += [name for evaluation in evaluations for name in evaluation.agents]
    names += [key.split("/")[1] for row in (*metrics[:1], *metrics[-1:]) for key in row if key.startswith("agent/")]
    return tuple(dict.fromkeys(name for name in names if name and name != "None"))
