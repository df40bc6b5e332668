"""Counts per problem, agent and turn: what every figure of a summary is a ratio of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from umad.uncertainty.table import UNPARSED, ResponseTable

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Arrays are [P, N, T] (problems, agents, turns) unless said otherwise."""

    responses: Floats
    graded: Floats
    right: Floats
    parsed: Floats
    """Graded responses with an answer."""
    parsed_right: Floats
    known: Floats
    """Responses of which it is known whether they have an answer."""
    unparsed: Floats
    truncated: Floats
    pairs: Floats
    """[P, T]: pairs of responses of one debate and turn."""
    agreeing: Floats
    """[P, T]: such pairs with answers of one class; no answer agrees with nothing."""
    turned: Floats
    """[N, T-1]: an agent's graded responses at one turn and the next."""
    right_to_wrong: Floats
    wrong_to_right: Floats
    """[N, T-1] as `turned`."""


def count(table: ResponseTable) -> Counts:
    known = table.label >= 0
    pairs, agreeing = _agreement(table, known)
    turned, right_to_wrong, wrong_to_right = _flips(table)
    return Counts(
        responses=_sums(table, np.ones(len(known))),
        graded=_sums(table, table.graded),
        right=_sums(table, table.correct),
        parsed=_sums(table, table.graded & table.parsed),
        parsed_right=_sums(table, table.correct & table.parsed),
        known=_sums(table, known),
        unparsed=_sums(table, table.label == UNPARSED),
        truncated=_sums(table, table.truncated),
        pairs=pairs,
        agreeing=agreeing,
        turned=turned,
        right_to_wrong=right_to_wrong,
        wrong_to_right=wrong_to_right,
    )


def _sums(table: ResponseTable, values: NDArray[np.generic]) -> Floats:
    shape = (len(table.problems), len(table.agents), table.turns)
    at = (table.problem * shape[1] + table.agent) * shape[2] + table.turn
    return _total(at, values, shape)


def _total(at: NDArray[np.int64], values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    """Adds up `values` by their flat place `at` in an array of `shape`."""
    return np.bincount(at, np.asarray(values, dtype=np.float64), math.prod(shape)).astype(np.float64).reshape(shape)


def _agreement(table: ResponseTable, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    shape = (len(table.problems), table.turns)
    spot_of_turn = table.debate_problem[:, None] * table.turns + np.arange(table.turns)
    turn = table.debate * table.turns + table.turn
    present = np.bincount(turn[known], minlength=spot_of_turn.size)
    pairs = _total(spot_of_turn.ravel(), present * (present - 1) / 2, shape)
    n_labels = int(table.label.max(initial=0)) + 1
    votes, size = np.unique(turn[table.parsed] * n_labels + table.label[table.parsed], return_counts=True)
    return pairs, _total(spot_of_turn.ravel()[votes // n_labels], size * (size - 1) / 2, shape)


def _flips(table: ResponseTable) -> tuple[Floats, Floats, Floats]:
    order = np.lexsort((table.turn, table.agent, table.debate))
    before, after = order[:-1], order[1:]
    next_turn = (
        (table.debate[before] == table.debate[after])
        & (table.agent[before] == table.agent[after])
        & (table.turn[before] + 1 == table.turn[after])
        & table.graded[before]
        & table.graded[after]
    )
    before, after = before[next_turn], after[next_turn]
    steps = max(0, table.turns - 1)
    at = table.agent[before] * steps + table.turn[before]
    shape = (len(table.agents), steps)
    was, now = table.correct[before], table.correct[after]
    return _total(at, np.ones(len(at)), shape), _total(at, was & ~now, shape), _total(at, ~was & now, shape)
