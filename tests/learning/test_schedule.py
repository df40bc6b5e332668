"""Which problems, which of them are learned from, which agents learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from learning.learning_helpers import make_debate

from umad.config import Recipe, TrainingConfig
from umad.learning.metrics import combined
from umad.learning.schedule import ProblemSampler, active_agents, total_steps, with_signal
from umad.records import Problem

PROBLEMS = [Problem(f"p{i}", "What?", "1") for i in range(7)]


def training(**values: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"steps": 10, **values})


def test_every_epoch_has_every_problem_once_in_an_order_of_its_own():
    sampler = ProblemSampler(PROBLEMS, seed=1)
    epochs = [[p.id for p in sampler.take(7 * epoch, 7)] for epoch in range(3)]
    assert all(sorted(epoch) == [p.id for p in PROBLEMS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_what_lies_at_a_position_depends_on_nothing_else():
    whole = ProblemSampler(PROBLEMS, seed=1).take(0, 40)
    assert ProblemSampler(PROBLEMS, seed=1).take(33, 5) == whole[33:38]
    assert ProblemSampler(PROBLEMS, seed=2).take(0, 40) != whole


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["abc"] * 7),
        ({"agent_schedule": "round_robin"}, list("abcabca")),
        ({"agent_schedule": "alternate", "alternate_every": 2}, list("aabbcca")),
    ],
)
def test_who_learns_when(settings, expected):
    found = ["".join(active_agents(list("abc"), training(**settings), step)) for step in range(1, 8)]
    assert found == expected


def test_a_problem_has_signal_where_any_group_of_any_agent_and_turn_has():
    def debates(instance: int, rewards: list[list[list[float | None]]]) -> list:
        """rewards[rollout][turn][agent]"""
        made = []
        for rollout, turns in enumerate(rewards):
            debate = make_debate([[None] * len(turns[0])] * len(turns), instance=instance, rollout=rollout)
            pairs = [zip(said, row, strict=True) for said, row in zip(debate.turns, turns, strict=True)]
            made.append(replace(debate, turns=tuple(tuple(replace(r, reward=v) for r, v in turn) for turn in pairs)))
        return made

    flat = debates(0, [[[1.0, 0.0], [0.2, 0.0]], [[1.0, 0.0], [0.2, 0.0]]])  # agents and turns differ, siblings don't
    late = debates(1, [[[1.0, 0.0], [0.2, 0.0]], [[1.0, 0.0], [0.2, 1.0]]])
    ungraded = debates(2, [[[1.0, None]], [[None, 0.0]]])
    noise = debates(3, [[[1.0, 0.0]], [[1.0 + 1e-9, 0.0]]])
    assert with_signal([*flat, *late, *ungraded, *noise], ["ada", "bob"]) == {1}
    assert with_signal(late, ["ada"]) == set()  # only the other one's rewards differ


def test_epochs_are_whole_steps():
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "agents": ({"name": "a", "model": "m"},),
            "training": {"epochs": 2, "problems_per_step": 4},
            "data": {"train": {"name": "arithmetic"}},
        }
    )
    assert total_steps(recipe, 7) == 4
    assert total_steps(recipe, 1) == 1


def test_several_updates_make_one_row():
    rows = [
        {"loss": 1.0, "samples": 4.0, "ratio_max": 1.5, "lr": 0.1},
        {"loss": 3.0, "samples": 2.0, "ratio_max": 1.2, "lr": 0.1, "grad_norm": 2.0},
    ]
    assert combined(rows) == {"loss": 2.0, "samples": 6.0, "ratio_max": 1.5, "lr": 0.1, "grad_norm": 2.0}
    assert combined(rows[:1]) == rows[0]
