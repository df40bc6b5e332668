"""Paired comparison of evaluations on the same problems."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umad.evaluation.statistics import Bootstrap, bootstrap, holm, mcnemar, ratio, two_sided_p
from umad.evaluation.summary import accuracies, accuracy_part, intervals, plain
from umad.records import Debate, UserError, atomic_writer, read_debates, to_json
from umad.uncertainty.table import tabulate

Floats = NDArray[np.float64]
Key = tuple[str, int]
"""(problem id, rollout): what pairs a debate of one run with one of another."""


def compare(folders: Sequence[str | Path], *, draws: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Compares evaluations, each with the first, debate by debate; the content of `comparison.json`.

    A folder holds `debates.jsonl`, or is a run whose newest evaluation is meant. Debates are paired by problem and
    rollout; the rest is counted and left out. Per turn: the difference (second minus first) of the mean over agents, the
    same on parsed answers alone, each agent (where the names agree) and the team's decision, with 95% intervals by problem
    and a bootstrap p-value, and the exact McNemar test where each problem has one pair. Holm's correction runs over all
    turns and runs of one kind of figure (over agents too).

    Raises UserError where a folder holds no evaluation, nothing can be paired, or a debate occurs twice.
    """
    if len(folders) < 2:
        raise UserError("a comparison needs at least two folders")
    places = [find_evaluation(folder) for folder in folders]
    runs = [_load(place) for place in places]
    names = _labels(folders)
    comparisons = [_pairwise(runs[0], run, draws, seed) for run in runs[1:]]
    _adjust(comparisons)
    return {
        "runs": names,
        "folders": [str(place) for place in places],
        "baseline": names[0],
        "bootstrap": {"draws": draws, "seed": seed, "level": 0.95},
        "comparisons": [{"run": name, **found} for name, found in zip(names[1:], comparisons, strict=True)],
    }


def compare_debates(
    first: Sequence[Debate], second: Sequence[Debate], *, draws: int = 10_000, seed: int = 0
) -> dict[str, Any]:
    """One entry of `compare`, from debates in memory."""
    found = _pairwise(_Run.of(first, "the first run"), _Run.of(second, "the second run"), draws, seed)
    _adjust([found])
    return found


def write_comparison(path: str | Path, comparison: Mapping[str, Any]) -> None:
    """Writes `comparison.json`."""
    with atomic_writer(Path(path)) as file:
        file.write(json.dumps(json.loads(to_json(comparison)), indent=2, ensure_ascii=False) + "\n")


HEADER = ("run", "figure", "turn", "first", "second", "difference", "95% interval", "p", "p (Holm)", "n")


def comparison_rows(comparison: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The comparison as rows of text under `HEADER`; turns are counted from 1, differences are points of accuracy."""
    rows: list[tuple[str, ...]] = []
    for entry in comparison["comparisons"]:
        figures = [("mean of agents", entry["mean"]), ("mean, parsed only", entry["mean_parsed"])]
        figures += list(entry["agents"].items())
        figures += [("decision", [entry["decision"]])] if entry["decision"] else []
        for name, turns in figures:
            for at in turns:
                low, high = at["ci"]
                turn = "" if at["turn"] is None else str(at["turn"] + 1)
                p = at["mcnemar"]["p"] if at.get("mcnemar") else at["p"]
                rows.append(
                    (
                        *(entry["run"], name, turn, _percent(at["first"]), _percent(at["second"])),
                        *(_points(at["difference"]), f"{_points(low)} to {_points(high)}"),
                        *(_p(p), _p(at.get("p_holm")), str(entry["n_problems"])),
                    )
                )
    return rows


def find_evaluation(folder: str | Path) -> Path:
    """The folder with `debates.jsonl`: itself, or the newest `eval/step_*` of a run."""
    folder = Path(folder)
    if (folder / "debates.jsonl").is_file():
        return folder
    steps = sorted(place.parent for place in folder.glob("eval/step_*/debates.jsonl"))
    if not steps:
        raise UserError(f"{folder}: no debates.jsonl here and none under eval/step_*; `umad eval` makes one")
    return steps[-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    debates: dict[Key, Debate]
    agents: tuple[str, ...]
    turns: int
    failed: int

    @classmethod
    def of(cls, debates: Sequence[Debate], source: str) -> _Run:
        by_key: dict[Key, Debate] = {}
        failed = 0
        for debate in accuracy_part(debates):
            key = (debate.problem.id, debate.rollout)
            if key in by_key:
                raise UserError(f"{source}: problem {key[0]!r}, rollout {key[1]} occurs twice, so it cannot be paired")
            by_key[key] = debate
            failed += debate.error is not None
        good = {key: debate for key, debate in by_key.items() if debate.error is None and any(debate.turns)}
        if not good:
            raise UserError(f"{source}: no debate to compare")
        agents = tuple(dict.fromkeys(name for debate in good.values() for name in debate.agents))
        return cls(good, agents, max(len(debate.turns) for debate in good.values()), failed)


def _load(place: Path) -> _Run:
    return _Run.of(read_debates(place / "debates.jsonl"), str(place))


def _labels(folders: Sequence[str | Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    parts = [Path(folder).resolve().parts for folder in folders]
    for n in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(p[-n:]) for p in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{i + 1}: {folder}" for i, folder in enumerate(folders)]


def _pairwise(a: _Run, b: _Run, draws: int, seed: int) -> dict[str, Any]:
    keys = [key for key in a.debates if key in b.debates]
    if not keys:
        raise UserError(
            "the two runs share no problem and rollout, so they cannot be compared in pairs; evaluate both on the same "
            "problems (data.eval and its seed)"
        )
    problems = {problem: i for i, problem in enumerate(dict.fromkeys(problem for problem, _ in keys))}
    place = np.array([problems[problem] for problem, _ in keys])
    turns = min(a.turns, b.turns)
    same_agents = set(a.agents) == set(b.agents)
    grids = [
        _grid([run.debates[key] for key in keys], a.agents if same_agents else run.agents, turns) for run in (a, b)
    ]
    if same_agents:
        grids = _graded_in_both(*grids)
    single = len(keys) == len(problems) and all(grid.graded.max() <= 1 for grid in grids)
    sums = [grid.by_problem(place, len(problems)) for grid in grids]
    return {
        "n_problems": len(problems),
        "n_pairs": len(keys),
        "unpaired": [len(a.debates) - len(keys), len(b.debates) - len(keys)],
        "failed": [a.failed, b.failed],
        "notes": _notes(same_agents, single, a, b),
        "mean": _mean_rows([(s.right, s.graded) for s in sums], draws, seed),
        "mean_parsed": _mean_rows([(s.parsed_right, s.parsed) for s in sums], draws, seed),
        "agents": {
            name: _agent_rows([s.agent(i) for s in sums], [g.agent(i) for g in grids] if single else None, draws, seed)
            for i, name in enumerate(a.agents if same_agents else ())
        },
        "decision": _decision_row(a, b, keys, problems, single, draws, seed),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Counts of responses, each [D, N, T] (debates, or problems once summed)."""

    right: Floats
    graded: Floats
    parsed_right: Floats
    parsed: Floats

    def map(self, change: Callable[[Floats], Floats]) -> _Grid:
        return _Grid(change(self.right), change(self.graded), change(self.parsed_right), change(self.parsed))

    def agent(self, i: int) -> _Grid:
        return self.map(lambda x: x[:, i])

    def by_problem(self, place: NDArray[np.int64], problems: int) -> _Grid:
        def add(x: Floats) -> Floats:
            out = np.zeros((problems, *x.shape[1:]))
            np.add.at(out, place, x)
            return out

        return self.map(add)


def _grid(debates: Sequence[Debate], agents: Sequence[str], turns: int) -> _Grid:
    table = tabulate(debates)
    order = np.array([agents.index(name) for name in table.agents])
    shape = (len(debates), len(agents), turns)
    kept = table.turn < turns
    at = (table.debate * shape[1] + order[table.agent]) * turns + table.turn

    def total(values: NDArray[np.bool_]) -> Floats:
        weights = values[kept].astype(np.float64)
        return np.bincount(at[kept], weights, math.prod(shape)).astype(np.float64).reshape(shape)

    parsed = table.graded & table.parsed
    return _Grid(total(table.correct), total(table.graded), total(table.correct & parsed), total(parsed))


def _graded_in_both(a: _Grid, b: _Grid) -> list[_Grid]:
    both = (a.graded > 0) & (b.graded > 0)
    return [grid.map(lambda x: x * both) for grid in (a, b)]


def _notes(same_agents: bool, single: bool, a: _Run, b: _Run) -> list[str]:
    notes = []
    if not same_agents:
        notes.append(
            f"the agents differ ({', '.join(a.agents)} and {', '.join(b.agents)}), so only their mean and the decision are "
            "compared"
        )
    if not single:
        notes.append(
            "problems have several rollouts, which are not independent, so McNemar's test is left out; the bootstrap is by "
            "problem"
        )
    if a.turns != b.turns:
        notes.append(f"the first run has {a.turns} turns, the second {b.turns}; common turns are compared")
    return notes


def _difference(columns: Sequence[Floats], figure: Callable[[Floats], Floats], draws: int, seed: int) -> Bootstrap:
    """Bootstrap of [first, second, second - first] of `figure`, over the same resampled problems. columns: two [P, M]."""
    m = columns[0].shape[1]

    def statistic(totals: Floats) -> Floats:
        first, second = figure(totals[..., :m]), figure(totals[..., m:])
        return np.concatenate([first, second, second - first], axis=-1)

    return bootstrap(np.hstack(columns), statistic, draws=draws, seed=seed)


def _rows(found: Bootstrap, turns: Sequence[int | None]) -> list[dict[str, Any]]:
    n = len(turns)
    first, second, difference = plain(found.value[:n]), plain(found.value[n : 2 * n]), plain(found.value[2 * n :])
    bounds = intervals(found, slice(2 * n, None))
    p = plain(two_sided_p(found.draws[:, 2 * n :]))
    return [
        {"turn": t, "first": a, "second": b, "difference": d, "ci": ci, "p": q}
        for t, a, b, d, ci, q in zip(turns, first, second, difference, bounds, p, strict=True)
    ]


def _mean_rows(tables: Sequence[tuple[Floats, Floats]], draws: int, seed: int) -> list[dict[str, Any]]:
    """Mean over agents. The runs may have different numbers of agents, so each brings its own means' columns."""
    turns = tables[0][0].shape[2]
    columns = [np.hstack([right.reshape(len(right), -1), n.reshape(len(n), -1)]) for right, n in tables]
    sizes = [right.shape[1:] for right, _ in tables]
    m = columns[0].shape[1]

    def mean(totals: Floats, size: tuple[int, ...]) -> Floats:
        right, graded = np.split(totals, 2, axis=-1)
        grid = (*totals.shape[:-1], *size)
        return accuracies(right.reshape(grid), graded.reshape(grid))[..., -turns:]

    def statistic(totals: Floats) -> Floats:
        first, second = mean(totals[..., :m], sizes[0]), mean(totals[..., m:], sizes[1])
        return np.concatenate([first, second, second - first], axis=-1)

    return _rows(bootstrap(np.hstack(columns), statistic, draws=draws, seed=seed), range(turns))


def _agent_rows(sums: Sequence[_Grid], pairs: Sequence[_Grid] | None, draws: int, seed: int) -> list[dict[str, Any]]:
    """One agent, arrays [P, T]; `pairs` where each problem has one response per run, so that McNemar's test holds."""
    columns = [np.hstack([s.right, s.graded]) for s in sums]
    found = _difference(columns, lambda totals: ratio(*np.split(totals, 2, axis=-1)), draws, seed)
    rows = _rows(found, range(sums[0].right.shape[1]))
    if pairs is not None:
        for t, row in enumerate(rows):
            graded = pairs[0].graded[:, t] > 0
            row["mcnemar"] = _mcnemar(pairs[0].right[graded, t] > 0, pairs[1].right[graded, t] > 0)
    return rows


def _decision_row(
    a: _Run, b: _Run, keys: Sequence[Key], problems: Mapping[str, int], single: bool, draws: int, seed: int
) -> dict[str, Any] | None:
    pairs = []
    for key in keys:
        decisions = (a.debates[key].decision, b.debates[key].decision)
        verdicts = [None if decision is None else decision.correct for decision in decisions]
        if None not in verdicts:
            pairs.append((problems[key[0]], *verdicts))
    if not pairs:
        return None
    at, first, second = (np.array(column) for column in zip(*pairs, strict=True))
    n = np.bincount(at, minlength=len(problems)).astype(np.float64)
    columns = [np.stack([np.bincount(at, verdict, len(problems)), n], axis=1) for verdict in (first, second)]
    found = _difference(columns, lambda totals: ratio(totals[..., :1], totals[..., 1:]), draws, seed)
    row = _rows(found, [None])[0]
    if single:
        row["mcnemar"] = _mcnemar(first.astype(bool), second.astype(bool))
    return row


def _mcnemar(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> dict[str, Any]:
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    return {"only_first": only_first, "only_second": only_second, "p": mcnemar(only_first, only_second)}


def _adjust(comparisons: Sequence[dict[str, Any]]) -> None:
    """Adds `p_holm` to every row: McNemar's p where there is one, else the bootstrap's."""
    families = [
        [row for entry in comparisons for row in entry["mean"]],
        [row for entry in comparisons for row in entry["mean_parsed"]],
        [row for entry in comparisons for rows in entry["agents"].values() for row in rows],
        [entry["decision"] for entry in comparisons if entry["decision"]],
    ]
    for family in families:
        raw = [row["mcnemar"]["p"] if "mcnemar" in row else row["p"] for row in family]
        for row, p in zip(family, holm(raw), strict=True):
            row["p_holm"] = p


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}"


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
