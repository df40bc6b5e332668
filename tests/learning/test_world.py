"""One process and its place among others; what several really do is in test_ranks.py."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from umad.learning.world import World, check_divides, start_world
from umad.records import RunError, UserError


class Together:
    """Several ranks as threads of this process: `gather` over a barrier."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self.size = size

    def run(self, action: Any) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            world = Rank(rank, self.size, self)
            try:
                results[rank] = action(world)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results


class Rank(World):
    def gather(self, value: Any) -> list[Any]:
        shared = self.group
        shared.values[self.rank] = value
        shared.barrier.wait(10)
        found = list(shared.values)
        shared.barrier.wait(10)
        return found


@pytest.mark.parametrize("n", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_are_contiguous_near_in_size_and_together_everything(n, size):
    parts = [list(World(rank, size).share(range(n))) for rank in range(size)]
    assert [x for part in parts for x in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_sums_and_maxima_are_the_same_on_every_rank():
    rows = [{"a": 0.1, "b": 1.0}, {"a": 0.2}, {"a": 0.3, "c": -2.0}]
    found = Together(3).run(lambda world: (world.sum(rows[world.rank]), world.most(rows[world.rank])))
    assert found == [({"a": 0.6, "b": 1.0, "c": -2.0}, {"a": 0.3, "b": 1.0, "c": -2.0})] * 3


def test_a_sum_with_something_that_is_not_a_number_is_not_one():
    found = Together(2).run(lambda world: world.sum({"loss": math.nan if world.rank else 1.0})["loss"])
    assert all(math.isnan(value) for value in found)
    found = Together(2).run(lambda world: world.sum({"loss": math.inf if world.rank else -math.inf})["loss"])
    assert all(math.isnan(value) for value in found)


def test_where_one_rank_fails_all_do_and_say_which():
    def act(world: World) -> None:
        def action() -> None:
            if world.rank == 1:
                raise UserError("data.train: x.jsonl is not there")

        world.agree(action)

    found = Together(3).run(act)
    assert [type(error) for error in found] == [UserError] * 3
    assert "process 1" in str(found[0])
    assert "x.jsonl is not there" in str(found[2])


def test_a_fault_of_our_own_is_a_run_error_elsewhere():
    def act(world: World) -> None:
        world.agree(lambda: 1 // world.rank)

    found = Together(2).run(act)
    assert isinstance(found[0], ZeroDivisionError)
    assert isinstance(found[1], RunError)
    assert "ZeroDivisionError" in str(found[1])


def test_a_size_that_does_not_divide_is_told_with_the_nearest_that_do():
    check_divides("training.problems_per_step", 8, 4, "one per process")
    with pytest.raises(UserError, match=r"problems_per_step: 10 .* 4 equal parts.*8 or 12"):
        check_divides("training.problems_per_step", 10, 4, "one per process")
    with pytest.raises(UserError, match=r"2 cannot .* 4 equal parts.*; 4 can"):
        check_divides("training.problems_per_step", 2, 4, "one per process")


def test_one_process_is_alone(monkeypatch):
    for name in ("WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    world = start_world()
    assert (world.rank, world.size, world.main) == (0, 1, True)
    assert world.gather("x") == ["x"]


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"])
def test_launches_that_training_cannot_use_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "true")
    with pytest.raises(UserError, match="DDP and DeepSpeed"):
        start_world()
