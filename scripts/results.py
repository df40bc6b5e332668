"""Makes the tables of docs/results.md: tiny agents before and after training with UMAD, with IPPO, and without training.

    python scripts/results.py                       # trains and evaluates what is missing, then prints the tables
    python scripts/results.py --no-run              # only the tables, from the runs that are there
    python scripts/results.py --seeds 0 training.steps=5 evaluation.accuracy.problems=20 --out runs/try

Each run is an ordinary `umad train` or `umad eval` and leaves an ordinary run folder; what is finished is not repeated, and
a run that was stopped goes on. "No training" evaluates the warm start twice with different sampling noise: what it shows
as a gain is chance.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umad.evaluation.compare import compare
from umad.evaluation.evaluate import read_summary
from umad.recipe_io import load_recipe
from umad.records import UserError

TURNS = (2, 5)
"""Debate lengths that the tables show. A debate of five turns holds that of two."""
METHODS = {"UMAD": "tiny_umad", "IPPO": "tiny_ippo"}
NONE = "no training"
OTHER_NOISE = 1_000
"""Added to `evaluation.seed` for the second evaluation without training."""


@dataclass(frozen=True)
class Result:
    """Two evaluation folders of the same problems: before and after."""

    method: str
    seed: int
    before: Path
    after: Path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that replace those of every recipe")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/results"), help="folder of the run folders")
    parser.add_argument("--recipes", type=Path, default=Path("recipes"))
    parser.add_argument("--no-run", action="store_true", help="make the tables from the runs that are there")
    args = parser.parse_args(argv)
    if wrong := [text for text in args.overrides if "=" not in text]:
        parser.error(f"expected KEY=VALUE, not {wrong[0]!r}")
    try:
        results = collect(args.seeds, args.out, args.recipes, args.overrides, run=not args.no_run)
        print(tables(results))
    except UserError as error:
        sys.exit(f"results: {error}")


def collect(
    seeds: Sequence[int], out: Path, recipes: Path, overrides: Sequence[str] = (), *, run: bool = True
) -> list[Result]:
    """Runs what is missing (unless `run` is false) and returns every finished pair of evaluations."""
    results = []
    for method, name in METHODS.items():
        for seed in seeds:
            folder = out / f"{name}_{seed}"
            if run:
                train(recipes / f"{name}.yaml", folder, seed, overrides)
            if done := finished(folder):
                results.append(Result(method, seed, *done))
    for seed in seeds:
        folders = [out / f"none_{seed}", out / f"none_{seed}_again"]
        if run:
            recipe = recipes / f"{METHODS['UMAD']}.yaml"
            noise = load_recipe(recipe, overrides).evaluation.seed + OTHER_NOISE
            evaluate(recipe, folders[0], seed, overrides)
            evaluate(recipe, folders[1], seed, [*overrides, f"evaluation.seed={noise}"])
        places = [folder / "eval" / "step_000000" for folder in folders]
        if all((place / "summary.json").is_file() for place in places):
            results.append(Result(NONE, seed, *places))
    if not results:
        raise UserError(f"{out}: there is no finished run in it; leave out --no-run to make them")
    return results


def train(recipe: Path, folder: Path, seed: int, overrides: Sequence[str]) -> None:
    if finished(folder):
        print(f"{folder} is finished", file=sys.stderr)
        return
    settings = [*overrides, f"seed={seed}", f"output={folder}", "evaluation.before=true", "evaluation.after=true"]
    resume = ["--resume"] if (folder / "config.yaml").is_file() else []
    umad("train", str(recipe), *settings, *resume)


def evaluate(recipe: Path, folder: Path, seed: int, overrides: Sequence[str]) -> None:
    if (folder / "eval" / "step_000000" / "summary.json").is_file():
        print(f"{folder} is finished", file=sys.stderr)
    elif (folder / "config.yaml").is_file():
        umad("eval", str(folder))
    else:
        umad("eval", str(recipe), *overrides, f"seed={seed}", f"output={folder}")


def umad(*arguments: str) -> None:
    print(f"$ umad {' '.join(arguments)}", file=sys.stderr, flush=True)
    code = subprocess.run([sys.executable, "-m", "umad.cli", *arguments], check=False).returncode
    if code:
        raise UserError(
            f"`umad {' '.join(arguments)}` ended with exit code {code}; this script goes on where it stopped"
        )


def finished(folder: Path) -> tuple[Path, Path] | None:
    """The evaluations before the first and after the last training step, once both are on disk."""
    if not (folder / "config.yaml").is_file():
        return None
    training = load_recipe(folder / "config.yaml").training
    if training is None or training.steps is None:
        raise UserError(f"{folder / 'config.yaml'}: training.steps is missing; the tables need a fixed number of steps")
    pair = (folder / "eval" / "step_000000", folder / "eval" / f"step_{training.steps:06d}")
    return pair if all((place / "summary.json").is_file() for place in pair) else None


def tables(results: Sequence[Result]) -> str:
    """Three Markdown tables: accuracy, uncertainty, and UMAD against IPPO; warnings where runs are not comparable."""
    parts = [accuracy_table(results), uncertainty_table(results)]
    if versus := versus_table(results):
        parts.append(versus)
    return "\n\n".join(parts + different_starts(results))


def different_starts(results: Sequence[Result]) -> list[str]:
    """Evaluations before training use one noise, so those of one seed are the same figures unless the models differ."""
    starts: dict[int, list[tuple[str, Any]]] = {}
    for result in results:
        starts.setdefault(result.seed, []).append((result.method, read_summary(result.before)["accuracy"]))
    return [
        f"WARNING: seed {seed}: {method} did not start from the agents that {group[0][0]} started from (other accuracies "
        "before training); delete the older runs and make them again."
        for seed, group in starts.items()
        for method, accuracy in group[1:]
        if accuracy != group[0][1]
    ]


def accuracy_table(results: Sequence[Result]) -> str:
    header = ["method", "seed", "n", "steps"]
    for turns in TURNS:
        header += [
            f"T={turns} before",
            f"T={turns} after",
            f"T={turns} gain [95%]",
            f"T={turns} gain, parsed only [95%]",
        ]
    header += ["T=5 minus T=2, after", "unparsed + truncated, T=2 before", "after"]
    rows = []
    for method, group in _by_method(results).items():
        figures = [_accuracy_figures(result) for result in group]
        rows += [[method, str(result.seed), *row] for result, (row, _) in zip(group, figures, strict=True)]
        if len(group) > 1:
            rows.append(_mean_row(method, [values for _, values in figures]))
    title = "Accuracy (mean of agents, percent; gains in points, paired by problem, 95% bootstrap intervals over n problems)"
    return f"{title}\n\n{markdown(header, rows)}"


def _accuracy_figures(result: Result) -> tuple[list[str], dict[str, float]]:
    before, after = read_summary(result.before), read_summary(result.after)
    paired = compare([result.before, result.after])["comparisons"][0]
    row = [str(paired["n_problems"]), str(after.get("step", "-")) if result.method != NONE else "-"]
    values: dict[str, float] = {}
    for turns in TURNS:
        if turns > min(before["turns"], after["turns"]):
            row += ["-"] * 4
            continue
        gain, parsed = paired["mean"][turns - 1], paired["mean_parsed"][turns - 1]
        row += [_percent(gain["first"]), _percent(gain["second"]), _gain(gain), _gain(parsed)]
        values |= {
            f"before {turns}": gain["first"],
            f"after {turns}": gain["second"],
            f"gain {turns}": gain["difference"],
            f"parsed {turns}": parsed["difference"],
        }
    if len(values) == 8:
        values["longer"] = values["after 5"] - values["after 2"]
    row.append(_points(values.get("longer")))
    for name, summary in (("lost before", before), ("lost after", after)):
        values[name] = _lost(summary, min(TURNS[0], summary["turns"]) - 1)
        row.append(_percent(values[name]))
    return row, values


def _lost(summary: dict[str, Any], turn: int) -> float:
    """Share of unparsed plus share of truncated responses at a turn, mean of agents (a response may be both)."""
    shares = [summary["unparsed"][a][turn] + summary["truncated"][a][turn] for a in summary["agents"]]
    return sum(shares) / len(shares)


def _mean_row(method: str, seeds: Sequence[dict[str, float]]) -> list[str]:
    """Mean over seeds; for gains the range over seeds in brackets."""

    def cell(name: str, *, gain: bool = False) -> str:
        values = [seed[name] for seed in seeds if seed.get(name) is not None]
        if not values:
            return "-"
        mean = sum(values) / len(values)
        return f"{_points(mean)} [{_points(min(values))} to {_points(max(values))}]" if gain else _percent(mean)

    row = [f"**{method}**", f"mean of {len(seeds)}, [range]", "", ""]
    for turns in TURNS:
        row += [cell(f"before {turns}"), cell(f"after {turns}")]
        row += [cell(f"gain {turns}", gain=True), cell(f"parsed {turns}", gain=True)]
    return [*row, cell("longer", gain=True), cell("lost before"), cell("lost after")]


def uncertainty_table(results: Sequence[Result]) -> str:
    header = ["method", "seed", "problems", "K"]
    header += [f"{name} T={turns}, before -> after" for turns in TURNS for name in ("Sys-EU", "Sys-AU", "TU")]
    rows = []
    for method, group in _by_method(results).items():
        for result in group:
            before, after = (read_summary(place)["uncertainty"] for place in (result.before, result.after))
            if "refused" in before or "refused" in after:
                rows.append([method, str(result.seed), *["-"] * (len(header) - 2)])
                continue
            row = [method, str(result.seed), str(max(after["n_problems"])), str(after["K"][0])]
            for turns in TURNS:
                row += [f"{_nats(before, name, turns)} -> {_nats(after, name, turns)}" for name in ("EU", "AU", "TU")]
            rows.append(row)
    title = "Uncertainty (nats, plug-in, mean over problems; 95% intervals by problem are in each summary.json)"
    return f"{title}\n\n{markdown(header, rows)}"


def versus_table(results: Sequence[Result]) -> str | None:
    """UMAD after training against IPPO after training, the same problems and warm start."""
    by_seed = {(result.method, result.seed): result for result in results}
    rows = []
    for seed in dict.fromkeys(result.seed for result in results):
        umad_run, ippo = by_seed.get(("UMAD", seed)), by_seed.get(("IPPO", seed))
        if umad_run is None or ippo is None:
            continue
        entry = compare([ippo.after, umad_run.after])["comparisons"][0]
        cells = [
            f"{_gain(entry['mean'][turns - 1])}, p = {entry['mean'][turns - 1]['p']:.3g}"
            if turns <= len(entry["mean"])
            else "-"
            for turns in TURNS
        ]
        rows.append([str(seed), str(entry["n_problems"]), *cells])
    if not rows:
        return None
    header = ["seed", "n", *(f"T={turns} UMAD minus IPPO [95%]" for turns in TURNS)]
    return f"UMAD against IPPO after training (points, paired by problem)\n\n{markdown(header, rows)}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.method, []).append(result)
    return groups


def _gain(row: dict[str, Any]) -> str:
    low, high = row["ci"]
    return f"{_points(row['difference'])} [{_points(low)}, {_points(high)}]"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{round(100 * value, 1) + 0.0:+.1f}"  # + 0.0: no minus zero


def _nats(split: dict[str, Any], name: str, turns: int) -> str:
    values = split[name]
    value = values[turns - 1] if turns <= len(values) else None
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
