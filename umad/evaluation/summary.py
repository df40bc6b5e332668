"""From debates to the figures of `summary.json`. Debate rows are all it needs, whoever wrote them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umad.evaluation.counts import Counts, count
from umad.evaluation.statistics import Bootstrap, bootstrap, bootstrap_mean, ratio
from umad.records import Debate, UserError
from umad.uncertainty.decomposition import decompose, rollout_error
from umad.uncertainty.table import ResponseTable, tabulate

Floats = NDArray[np.float64]

ACCURACY, DECOMPOSITION = "accuracy", "decomposition"
"""The two parts of an evaluation, marked in `sampling.part` of their debates."""


def summarise(
    debates: Sequence[Debate], *, info: Mapping[str, Any] | None = None, draws: int = 10_000, seed: int = 0
) -> dict[str, Any]:
    """The figures of an evaluation, ready for JSON (what is undefined is null; intervals are 95%, by problem).

    Accuracy, flips, agreement and shares come from the debates marked as the accuracy part, the decomposition from those
    marked so; debates without a mark (other tools') serve for both. Failed debates and ungraded responses are counted and
    left out. `info` goes in as it is.

    Raises UserError where there is no debate to summarise or debates of different agents are mixed.
    """
    pool = accuracy_part(debates)
    good = _succeeded(pool)
    table = tabulate(good)
    counts = count(table)
    figures = _figures(table, counts, good, draws, seed)
    return {
        **(info or {}),
        "protocol": _joined(debate.protocol for debate in debates),
        "agents": list(table.agents),
        "turns": table.turns,
        "n_problems": len(table.problems),
        "n_debates": {ACCURACY: len(good), DECOMPOSITION: len(_without_error(decomposition_part(debates)))},
        **figures,
        **_shares(table, counts),
        "uncertainty": uncertainty(debates, draws=draws, seed=seed),
        "cost": _cost(debates, pool),
        "failed": _failed(debates),
        "seeds": sorted({debate.seed for debate in debates}),
        "sampling": {ACCURACY: _sampling(pool), DECOMPOSITION: _sampling(decomposition_part(debates))},
        "bootstrap": {"draws": draws, "seed": seed, "level": 0.95},
    }


def accuracy_part(debates: Sequence[Debate]) -> list[Debate]:
    """All debates where none is marked so: what the decomposition part drew is then the only accuracy there is, and
    `sampling` says how it was drawn."""
    return _marked(debates, ACCURACY) or list(debates)


def decomposition_part(debates: Sequence[Debate]) -> list[Debate]:
    """Empty where an evaluation left the decomposition out: answers drawn for accuracy (cooler, top-p cut) would pass for
    less uncertainty than there is."""
    return _marked(debates, DECOMPOSITION) or [debate for debate in debates if "part" not in debate.sampling]


def _marked(debates: Sequence[Debate], name: str) -> list[Debate]:
    return [debate for debate in debates if debate.sampling.get("part") == name]


def uncertainty(debates: Sequence[Debate], *, draws: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """TU, EU and AU per turn: means over problems with intervals by problem, and what they rest on.

    `TU`, `EU`, `AU`: [T], nats. `*_ci`: [T] of [low, high]. `K`: the fewest and the most rollouts of an agent.
    `n_problems`: [T]. `unparsed_share`: [T], of the responses, the share in the class "no answer". `rollout_se`: the
    mean's standard error from the rollouts alone; `rollout_bias`: how far the plug-in form overstates, by the same draws.
    Problems with fewer than two rollouts of an agent are left out; where none is left, `{"refused": reason}`.
    """
    pool = decomposition_part(debates)
    if debates and not pool:
        return {"refused": "the evaluation left the decomposition out (evaluation.decomposition.problems: 0)"}
    good = _succeeded(pool)
    table = tabulate(good)
    split = decompose(table)
    enough = split.rollouts >= 2
    if not enough.any():
        return {
            "refused": f"each problem has {int(split.rollouts.max(initial=0))} rollout(s) per agent; a distribution over "
            "answers needs at least 2 (16 is usual)"
        }
    values = np.stack([np.where(enough, v, np.nan) for v in (split.tu, split.eu, split.au)])
    n_turns = table.turns
    means = bootstrap_mean(values.transpose(1, 0, 2).reshape(len(table.problems), -1), draws=draws, seed=seed)
    result: dict[str, Any] = {}
    for i, name in enumerate(("TU", "EU", "AU")):
        at = slice(i * n_turns, (i + 1) * n_turns)
        result[name] = plain(means.value[at])
        result[f"{name}_ci"] = intervals(means, at)
    rollouts = split.rollouts[enough]
    result["K"] = [int(rollouts.min()), int(rollouts.max())]
    result["n_problems"] = enough.sum(axis=0).tolist()
    result["unparsed_share"] = plain(ratio(np.where(enough, split.unparsed, 0.0).sum(axis=0), enough.sum(axis=0)))
    if len(good) > len(table.problems):
        error = rollout_error(table, seed=seed)
        result["rollout_se"] = {name: plain(error.mean_se[name]) for name in ("TU", "EU", "AU")}
        result["rollout_bias"] = {
            name: plain(ratio(np.where(enough, error.bias[name], 0.0).sum(axis=0), enough.sum(axis=0)))
            for name in ("TU", "EU", "AU")
        }
    return result


def accuracies(right: Floats, graded: Floats) -> Floats:
    """[..., (N+1) T] from totals [..., N, T]: each agent's accuracy per turn, then their mean over agents per turn."""
    each = ratio(right, graded)
    known = ~np.isnan(each)
    mean = ratio(np.where(known, each, 0.0).sum(axis=-2), known.sum(axis=-2))
    return np.concatenate([each.reshape(*each.shape[:-2], -1), mean], axis=-1)


def decision_columns(debates: Sequence[Debate], problems: Mapping[str, int]) -> Floats:
    """[P, 2]: right and graded team decisions."""
    columns = np.zeros((len(problems), 2))
    for debate in debates:
        if debate.decision is not None and debate.decision.correct is not None:
            columns[problems[debate.problem.id]] += (debate.decision.correct, 1)
    return columns


def _figures(table: ResponseTable, counts: Counts, debates: Sequence[Debate], draws: int, seed: int) -> dict[str, Any]:
    """One bootstrap for all figures, so that they share their draws."""
    n, t = len(table.agents), table.turns
    decisions = decision_columns(debates, {name: i for i, name in enumerate(table.problems)})
    cells = [a.reshape(len(a), -1) for a in (counts.right, counts.graded, counts.parsed_right, counts.parsed)]
    columns = np.hstack([*cells, counts.agreeing, counts.pairs, decisions])
    edges = np.cumsum([0, n * t, n * t, n * t, n * t, t, t])

    def statistic(totals: Floats) -> Floats:
        right, graded, parsed_right, parsed, agreeing, pairs = (totals[..., a:b] for a, b in itertools.pairwise(edges))
        grid = (*totals.shape[:-1], n, t)
        return np.concatenate(
            [
                accuracies(right.reshape(grid), graded.reshape(grid)),
                accuracies(parsed_right.reshape(grid), parsed.reshape(grid)),
                ratio(agreeing, pairs),
                ratio(totals[..., -2:-1], totals[..., -1:]),
            ],
            axis=-1,
        )

    found = bootstrap(columns, statistic, draws=draws, seed=seed)
    size = (n + 1) * t

    def per_agent(start: int, values: Any) -> dict[str, Any]:
        return {name: values(slice(start + i * t, start + (i + 1) * t)) for i, name in enumerate(table.agents)}

    def value(at: slice) -> list[float | None]:
        return plain(found.value[at])

    def bounds(at: slice) -> list[list[float | None]]:
        return intervals(found, at)

    all_mean, parsed_mean = slice(n * t, size), slice(size + n * t, 2 * size)
    agreement, decision = slice(2 * size, 2 * size + t), slice(2 * size + t, None)
    return {
        "accuracy": per_agent(0, value),
        "accuracy_ci": per_agent(0, bounds),
        "accuracy_n": _whole(table, counts.graded.sum(axis=0)),
        "mean_accuracy": value(all_mean),
        "mean_accuracy_ci": bounds(all_mean),
        "accuracy_parsed": per_agent(size, value),
        "accuracy_parsed_ci": per_agent(size, bounds),
        "mean_accuracy_parsed": value(parsed_mean),
        "mean_accuracy_parsed_ci": bounds(parsed_mean),
        "decision_accuracy": value(decision)[0],
        "decision_accuracy_ci": bounds(decision)[0],
        "decision_rule": _joined(debate.decision.rule for debate in debates if debate.decision is not None),
        "agreement": value(agreement),
        "agreement_ci": bounds(agreement),
    }


def _shares(table: ResponseTable, counts: Counts) -> dict[str, Any]:
    responses, known = counts.responses.sum(axis=0), counts.known.sum(axis=0)
    return {
        "unparsed": _by_agent(table, ratio(counts.unparsed.sum(axis=0), known)),
        "truncated": _by_agent(table, ratio(counts.truncated.sum(axis=0), responses)),
        "ungraded": _whole(table, responses - counts.graded.sum(axis=0)),
        "flips": {
            name: {
                "right_to_wrong": counts.right_to_wrong[i].astype(int).tolist(),
                "wrong_to_right": counts.wrong_to_right[i].astype(int).tolist(),
                "n": counts.turned[i].astype(int).tolist(),
            }
            for i, name in enumerate(table.agents)
        },
    }


def _by_agent(table: ResponseTable, values: Floats) -> dict[str, Any]:
    return {name: plain(values[i]) for i, name in enumerate(table.agents)}


def _whole(table: ResponseTable, values: Floats) -> dict[str, list[int]]:
    return {name: values[i].astype(int).tolist() for i, name in enumerate(table.agents)}


def _succeeded(debates: Sequence[Debate]) -> list[Debate]:
    if not debates:
        raise UserError("there is no debate to summarise")
    good = _without_error(debates)
    if not good:
        raise UserError(f"all {len(debates)} debates failed; the first: {debates[0].error}")
    teams = Counter(tuple(sorted(debate.agents)) for debate in good)
    if len(teams) > 1:
        found = "; ".join(f"{', '.join(team)} ({n} debates)" for team, n in teams.most_common(4))
        raise UserError(
            f"debates of {len(teams)} different teams are mixed: {found}. Figures are per agent, so put each team's "
            "debates into a folder of its own"
        )
    return good


def _without_error(debates: Sequence[Debate]) -> list[Debate]:
    return [debate for debate in debates if debate.error is None and any(debate.turns)]


def _failed(debates: Sequence[Debate]) -> dict[str, Any]:
    reasons = Counter(
        debate.error or "no response" for debate in debates if debate.error is not None or not any(debate.turns)
    )
    return {"n": reasons.total(), "reasons": dict(reasons.most_common(5))}


def _cost(debates: Sequence[Debate], pool: Sequence[Debate]) -> dict[str, Any] | None:
    """Totals over all debates; per problem over the accuracy part. Failed debates cost too. None where nobody counted."""
    if not any(debate.cost.calls for debate in debates):
        return None
    summed = ("calls", "prompt_tokens", "completion_tokens", "messages")
    problems = len({debate.problem.id for debate in pool})
    per_problem = {name: sum(getattr(d.cost, name) for d in pool) / problems for name in summed}
    return {
        **{name: sum(getattr(d.cost, name) for d in debates) for name in summed},
        "depth": max(d.cost.depth for d in debates),
        "per_problem": {**per_problem, "depth": sum(d.cost.depth for d in pool) / len(pool)},
    }


def _sampling(debates: Sequence[Debate]) -> dict[str, Any]:
    """The settings that the debates were drawn with (a list where they differ), and rollouts per problem."""
    keys = dict.fromkeys(key for debate in debates for key in debate.sampling if key != "part")
    settings = {key: _common([debate.sampling.get(key) for debate in debates]) for key in keys}
    rollouts = Counter(debate.problem.id for debate in debates)
    return {**settings, "rollouts": max(rollouts.values(), default=0), "problems": len(rollouts)}


def _common(values: Sequence[Any]) -> Any:
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct[0] if len(distinct) == 1 else distinct


def _joined(names: Any) -> str | None:
    found = sorted(set(names))
    return ", ".join(found) if found else None


def plain(values: Floats) -> list[float | None]:
    """For JSON: NaN becomes None."""
    return [None if math.isnan(v) else float(v) for v in np.asarray(values, dtype=np.float64)]


def intervals(found: Bootstrap, at: slice) -> list[list[float | None]]:
    return [plain(np.array(pair)) for pair in zip(found.low[at], found.high[at], strict=True)]
