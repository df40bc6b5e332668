from __future__ import annotations

import itertools
import random
import re

import pytest

from umad.records import UserError
from umad.tasks import arithmetic


def first(n, **kwargs):
    return list(itertools.islice(arithmetic.problems(**kwargs), n))


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_golds_and_worked_solutions_are_right(level):
    for problem in first(200, level=level):
        expression = problem.question.removesuffix("=?")
        assert problem.gold == str(eval(expression))
        *steps, box = arithmetic.solution(expression).split("\n")
        assert box == f"\\boxed{{{problem.gold}}}"
        assert len(steps) == len(re.findall(r"\d+", expression)) - 1
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right)


def test_a_solution_reads_like_this():
    assert arithmetic.solution("7+12+5") == "7+12=19\n19+5=24\n\\boxed{24}"
    assert arithmetic.solution("3-12+2*4") == "2*4=8\n3-12=-9\n-9+8=-1\n\\boxed{-1}"


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_a_flawed_solution_has_one_wrong_step_that_is_carried_on(level):
    rng = random.Random(0)
    for problem in first(200, level=level):
        expression = problem.question.removesuffix("=?")
        *steps, box = arithmetic.flawed_solution(expression, rng).split("\n")
        wrong = [step for step in steps if eval(step.split("=")[0]) != int(step.split("=")[1])]
        assert len(wrong) == 1
        assert box != f"\\boxed{{{problem.gold}}}"
        assert box == f"\\boxed{{{steps[-1].split('=')[1]}}}"


def test_level_1_is_sums_of_three_numbers_below_20():
    for problem in first(500, level=1):
        operands = re.fullmatch(r"(\d+)\+(\d+)\+(\d+)=\?", problem.question).groups()
        assert all(int(operand) < 20 for operand in operands)


def test_train_and_test_part_the_space_whatever_the_seed():
    train = {p.id for p in arithmetic.problems(1, "train", seed=0)}
    test = {p.id for p in arithmetic.problems(1, "test", seed=1)}
    assert not train & test
    assert len(train | test) == len(train) + len(test) == 20**3
    assert 0.15 < len(test) / 20**3 < 0.25


def test_reordered_sums_stay_on_one_side():
    for operands in itertools.combinations(range(0, 20, 3), 3):
        sides = {arithmetic.split_of("+".join(map(str, order))) for order in itertools.permutations(operands)}
        assert len(sides) == 1


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert first(50, level=5, seed=3) == first(50, level=5, seed=3)
    assert first(50, level=5, seed=3) != first(50, level=5, seed=4)


def test_no_problem_comes_twice():
    problems = first(3000, level=4)
    assert len({p.id for p in problems}) == len({p.question for p in problems}) == 3000


def test_more_problems_than_a_level_has_are_refused():
    with pytest.raises(UserError, match=r"level 1 has only \d+ test problems, not 5000"):
        arithmetic.load(1, "test", 5000, 0)


def test_unknown_levels_and_splits_are_refused():
    with pytest.raises(UserError, match="level 9 does not exist"):
        arithmetic.load(9, "train", 1, 0)
    with pytest.raises(UserError, match="'dev'"):
        arithmetic.load(1, "dev", 1, 0)
