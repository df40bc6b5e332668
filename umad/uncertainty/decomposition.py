"""Splitting the uncertainty of a system of agents into disagreement and noise (UMAD, arXiv 2603.01221, Eq. 3, Prop. 3.2).

Per problem and turn, p_i is agent i's empirical distribution over answer classes from its K rollouts:

    TU = H(mean_i p_i)      Sys-AU = mean_i H(p_i)      Sys-EU = TU - Sys-AU = mean_i KL(p_i || mean_j p_j)

All in nats, plug-in (no correction for small K). Responses without an answer form one class of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from umad.uncertainty.table import UNPARSED, Ints, ResponseTable

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""How far the two forms of Sys-EU may differ."""


@dataclass(frozen=True, slots=True)
class Split:
    """TU, AU and EU of one problem at one turn, nats."""

    tu: float
    au: float
    eu: float


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """All arrays are [P, T], nats; NaN where a problem has no response at a turn."""

    problems: tuple[str, ...]
    tu: Floats
    au: Floats
    eu: Floats
    unparsed: Floats
    """Share of responses without an answer."""
    rollouts: Ints
    """The smallest number of rollouts that any agent's distribution rests on."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutError:
    """The plug-in estimator's own error, by resampling rollouts within problems. Indexed by `TU`, `AU`, `EU`.

    se, bias: [P, T], the standard deviation over draws, and the draws' mean minus the estimate (positive where the
    plug-in form overstates). mean_se: [T], the standard deviation of the mean over problems.
    """

    se: dict[str, Floats]
    bias: dict[str, Floats]
    mean_se: dict[str, Floats]


def decompose_counts(counts: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """TU, AU, EU (each [...]) from class counts [..., N, C]: the rows of one agent need not sum to another's.

    Agents without a response are left out; NaN where no agent has one. Raises ArithmeticError if the two forms of EU
    differ by more than `TOLERANCE`.
    """
    n = np.asarray(counts, dtype=np.float64)
    if n.ndim < 2 or (n < 0).any():
        raise ValueError(f"expected non-negative counts of shape [..., agents, classes], not {list(n.shape)}")
    rollouts = n.sum(axis=-1, keepdims=True)
    p = np.divide(n, rollouts, out=np.zeros_like(n), where=rollouts > 0)
    present = (rollouts > 0).sum(axis=(-2, -1))
    agents = np.where(present > 0, present, np.nan)
    mean = p.sum(axis=-2) / agents[..., None]
    total = 0.0 - _xlogx(mean).sum(axis=-1)
    aleatoric = (0.0 - _xlogx(p).sum(axis=(-2, -1))) / agents
    kl = (_xlogx(p) - p * _log(mean)[..., None, :]).sum(axis=(-2, -1)) / agents
    return total, aleatoric, _checked(total, aleatoric, kl)


def decompose_answers(answers: Sequence[Sequence[Hashable]]) -> Split:
    """The split for one problem and turn: answers[i] are the answer classes of agent i's rollouts."""
    classes = {label: c for c, label in enumerate(dict.fromkeys(a for agent in answers for a in agent))}
    counts = np.zeros((len(answers), max(1, len(classes))))
    for i, agent in enumerate(answers):
        for label in agent:
            counts[i, classes[label]] += 1
    return Split(*(float(value) for value in decompose_counts(counts)))


def decompose(table: ResponseTable) -> Decomposition:
    """The split for every problem and turn of a table, in time and memory linear in the number of responses."""
    cells = _Cells.of(table)
    total, aleatoric, epistemic = cells.entropies(cells.weights)
    shape = (len(table.problems), table.turns)
    known = cells.weights > 0
    n = np.bincount(cells.spot, known, cells.spots)
    unparsed = np.bincount(cells.spot, known & (table.label == UNPARSED), cells.spots)
    return Decomposition(
        problems=table.problems,
        tu=total.reshape(shape),
        au=aleatoric.reshape(shape),
        eu=epistemic.reshape(shape),
        unparsed=np.divide(unparsed, n, out=np.full(cells.spots, np.nan), where=n > 0).reshape(shape),
        rollouts=cells.fewest_rollouts().reshape(shape),
    )


def rollout_error(table: ResponseTable, *, draws: int = 200, seed: int = 0) -> RolloutError:
    """Bootstrap over rollouts: every draw takes, within each problem, as many of its debates with replacement.

    A rollout is drawn with all its agents and turns, for they belong to one debate.
    """
    if draws < 2:
        raise ValueError(f"a bootstrap needs at least 2 draws, not {draws}")
    cells = _Cells.of(table)
    shape = (len(table.problems), table.turns)
    estimate = np.stack(cells.entropies(cells.weights))
    rng = np.random.default_rng(seed)
    by_problem = np.argsort(table.debate_problem, kind="stable")
    per_problem = np.bincount(table.debate_problem, minlength=len(table.problems))
    first = np.repeat(np.cumsum(per_problem) - per_problem, per_problem)
    size = np.repeat(per_problem, per_problem)
    sums, squares = np.zeros_like(estimate), np.zeros_like(estimate)
    means = np.empty((draws, 3, table.turns))
    for draw in range(draws):
        picked = by_problem[first + (rng.random(table.debates) * size).astype(np.int64)]
        copies = np.bincount(picked, minlength=table.debates)
        # an agent that failed in every drawn rollout leaves no distribution; the estimate stands in, so no draw is lost
        values = np.stack(cells.entropies(cells.weights * copies[table.debate]))
        values = np.where(np.isnan(values), estimate, values)
        sums += values - estimate
        squares += (values - estimate) ** 2
        means[draw] = _nanmean(values.reshape(3, *shape), axis=1)
    bias = sums / draws
    se = np.sqrt(np.maximum(squares - draws * bias**2, 0.0) / (draws - 1))
    names = ("TU", "AU", "EU")
    return RolloutError(
        se={name: se[i].reshape(shape) for i, name in enumerate(names)},
        bias={name: bias[i].reshape(shape) for i, name in enumerate(names)},
        mean_se={name: means[:, i].std(axis=0, ddof=1) for i, name in enumerate(names)},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Where each response counts. A spot is (problem, turn), a voice (spot, agent), a class (spot, label), a cell (voice,
    label). Only what occurs is numbered, so one problem with many answers costs the others nothing."""

    spots: int
    weights: Floats
    """[R]: 1, or 0 where the answer is not known."""
    spot: Ints
    """[R]"""
    cell: Ints
    """[R]"""
    cell_voice: Ints
    cell_class: Ints
    voice_spot: Ints
    class_spot: Ints

    @classmethod
    def of(cls, table: ResponseTable) -> _Cells:
        spot = table.problem * table.turns + table.turn
        n_labels = int(table.label.max(initial=0)) + 2
        voice_of, voice = np.unique(spot * len(table.agents) + table.agent, return_inverse=True)
        class_of, kind = np.unique(spot * n_labels + table.label + 1, return_inverse=True)
        cell_of, cell = np.unique(voice * max(1, len(class_of)) + kind, return_inverse=True)
        return cls(
            spots=len(table.problems) * table.turns,
            weights=(table.label >= 0).astype(np.float64),
            spot=spot,
            cell=cell,
            cell_voice=cell_of // max(1, len(class_of)),
            cell_class=cell_of % max(1, len(class_of)),
            voice_spot=voice_of // max(1, len(table.agents)),
            class_spot=class_of // n_labels,
        )

    def entropies(self, weights: Floats) -> tuple[Floats, Floats, Floats]:
        """TU, AU, EU, each [spots], where response r counts weights[r] times."""
        n = np.bincount(self.cell, weights, len(self.cell_voice))
        rollouts = np.bincount(self.cell_voice, n, len(self.voice_spot))
        agents = np.bincount(self.voice_spot, rollouts > 0, self.spots)
        agents[agents == 0] = np.nan
        p = np.divide(n, rollouts[self.cell_voice], out=np.zeros_like(n), where=n > 0)
        mean = np.bincount(self.cell_class, p, len(self.class_spot)) / agents[self.class_spot]
        cell_spot = self.voice_spot[self.cell_voice]
        plogp = _xlogx(p)
        total = np.where(np.isnan(agents), np.nan, 0.0 - np.bincount(self.class_spot, _xlogx(mean), self.spots))
        aleatoric = (0.0 - np.bincount(cell_spot, plogp, self.spots)) / agents
        kl = np.bincount(cell_spot, plogp - p * _log(mean)[self.cell_class], self.spots) / agents
        return total, aleatoric, _checked(total, aleatoric, kl)

    def fewest_rollouts(self) -> Ints:
        """[spots]: the fewest rollouts of an agent that has any; 0 where none has."""
        n = np.bincount(self.cell, self.weights, len(self.cell_voice))
        rollouts = np.bincount(self.cell_voice, n, len(self.voice_spot)).astype(np.int64)
        out = np.full(self.spots, np.iinfo(np.int64).max)
        np.minimum.at(out, self.voice_spot[rollouts > 0], rollouts[rollouts > 0])
        return np.where(out == np.iinfo(np.int64).max, 0, out)


def _checked(total: Floats, aleatoric: Floats, kl: Floats) -> Floats:
    gaps = np.abs(total - aleatoric - kl)
    gap = np.max(gaps, where=~np.isnan(gaps), initial=0.0)
    if gap > TOLERANCE:
        raise ArithmeticError(f"Sys-EU as TU - AU and as mean KL differ by {gap:.3g} (more than {TOLERANCE:g})")
    return np.maximum(kl, 0.0)


def _log(x: Floats) -> Floats:
    """log x, and 0 where x is 0 (it is then only ever multiplied by 0) or NaN."""
    return np.log(x, out=np.zeros_like(x), where=x > 0)


def _xlogx(x: Floats) -> Floats:
    return x * _log(x)


def _nanmean(values: Floats, axis: int) -> Floats:
    n = (~np.isnan(values)).sum(axis=axis)
    return np.divide(np.nansum(values, axis=axis), n, out=np.full(n.shape, np.nan), where=n > 0)
