from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umad.records import Debate, Problem, Response
from umad.uncertainty.decomposition import decompose, decompose_answers, decompose_counts, rollout_error
from umad.uncertainty.table import UNPARSED, ResponseTable, tabulate

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden" / "equations.json"
LN2 = math.log(2)


def entropy(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def by_hand(answers):
    """Eq. 3 in plain loops: (TU, AU, EU as mean KL)."""
    ps = [{c: n / len(agent) for c, n in Counter(agent).items()} for agent in answers]
    mean = {c: sum(p.get(c, 0.0) for p in ps) / len(ps) for p in ps for c in p}
    kl = sum(x * math.log(x / mean[c]) for p in ps for c, x in p.items()) / len(ps)
    return entropy(mean.values()), sum(entropy(p.values()) for p in ps) / len(ps), kl


def debates_from(answers_by_problem, agents=("ann", "bob")):
    """answers_by_problem[problem][rollout][turn][agent] -> one debate per rollout; None is no answer."""
    return [
        Debate(
            Problem(f"p{p}", "question", "1"),
            "mad",
            agents,
            tuple(
                tuple(
                    Response(name, t, "", answer=a, key=a or "no-answer", correct=a == "1")
                    for name, a in zip(agents, turn, strict=True)
                )
                for t, turn in enumerate(turns)
            ),
            rollout=k,
        )
        for p, rollouts in enumerate(answers_by_problem)
        for k, turns in enumerate(rollouts)
    ]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([["x"] * 4, ["x"] * 4], (0.0, 0.0, 0.0)),
        ([["x"] * 4, ["y"] * 4], (LN2, 0.0, LN2)),
        ([["x", "y"], ["y", "x", "x", "y"]], (LN2, LN2, 0.0)),
        ([["x", "x", "y", "y"], ["x"]], (entropy([0.75, 0.25]), LN2 / 2, entropy([0.75, 0.25]) - LN2 / 2)),
        ([["x"], ["y"], ["z"]], (math.log(3), 0.0, math.log(3))),
        ([["x", "y", "z", "w"]], (math.log(4), math.log(4), 0.0)),
        # agents count alike, however many rollouts each has
        ([["x"] * 30, ["y"]], (LN2, 0.0, LN2)),
    ],
)
def test_eq_3_on_cases_worked_out_by_hand(answers, expected):
    split = decompose_answers(answers)
    assert (split.tu, split.au, split.eu) == pytest.approx(expected, abs=1e-12)


def test_agrees_with_the_reference_values_where_they_are():
    if not GOLDEN.is_file():
        pytest.skip("no reference values beside this checkout")
    cases = json.loads(GOLDEN.read_text())["decomposition"]
    assert cases
    for case in cases:
        split = decompose_answers(case["answers"])
        assert split.tu == pytest.approx(case["TU"], abs=1e-12)
        assert split.au == pytest.approx(case["AU"], abs=1e-12)
        assert split.eu == pytest.approx(case["EU"], abs=1e-12)


ANSWERS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), min_size=1, max_size=5)


@given(ANSWERS)
def test_laws_of_the_split(answers):
    split = decompose_answers(answers)
    tu, au, eu = by_hand(answers)
    assert (split.tu, split.au) == pytest.approx((tu, au), abs=1e-12)
    assert split.eu == pytest.approx(eu, abs=1e-12)
    assert split.eu == pytest.approx(split.tu - split.au, abs=1e-9)
    assert 0 <= split.eu <= math.log(len(answers)) + 1e-12
    assert split.au + 1e-12 >= 0
    assert split.tu <= math.log(len({a for agent in answers for a in agent})) + 1e-12


@given(ANSWERS, st.permutations("abcd"), st.randoms())
def test_names_of_answers_and_order_of_agents_and_rollouts_do_not_matter(answers, other_names, random):
    renamed = [[other_names["abcd".index(a)] for a in agent] for agent in answers]
    for agent in renamed:
        random.shuffle(agent)
    random.shuffle(renamed)
    split, again = decompose_answers(answers), decompose_answers(renamed)
    assert (split.tu, split.au, split.eu) == pytest.approx((again.tu, again.au, again.eu), abs=1e-12)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), st.integers(1, 6))
def test_identical_agents_have_no_disagreement_and_disjoint_certain_ones_the_most(answers, n):
    assert decompose_answers([answers] * n).eu == pytest.approx(0.0, abs=1e-12)
    certain = [[str(i)] * len(answers) for i in range(n)]
    split = decompose_answers(certain)
    assert split.eu == pytest.approx(math.log(n), abs=1e-12)
    assert split.au == 0


CELL = st.one_of(st.none(), st.sampled_from("123"))
PROBLEMS = st.integers(1, 3).flatmap(
    lambda turns: st.lists(
        st.lists(st.lists(st.tuples(CELL, CELL), min_size=turns, max_size=turns), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)


@given(PROBLEMS)
@settings(max_examples=60)
def test_the_fast_form_equals_plain_loops_per_problem_and_turn(problems):
    found = decompose(tabulate(debates_from(problems)))
    for p, rollouts in enumerate(problems):
        for t in range(len(rollouts[0])):
            answers = [[turns[t][i] or "none" for turns in rollouts] for i in range(2)]
            assert (found.tu[p, t], found.au[p, t], found.eu[p, t]) == pytest.approx(by_hand(answers), abs=1e-12)
            flat = [a for agent in answers for a in agent]
            assert found.unparsed[p, t] == pytest.approx(flat.count("none") / len(flat))
            assert found.rollouts[p, t] == len(rollouts)


def test_an_array_of_counts_gives_the_same_as_one_by_one():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, size=(7, 3, 2, 4))
    total, aleatoric, epistemic = decompose_counts(counts)
    assert total.shape == aleatoric.shape == epistemic.shape == (7, 3)
    one = decompose_counts(counts[4, 2])
    assert (total[4, 2], aleatoric[4, 2], epistemic[4, 2]) == pytest.approx(one)


def test_counts_of_nobody_are_undefined_and_negative_ones_an_error():
    assert all(math.isnan(value) for value in decompose_counts(np.zeros((2, 3))))
    with pytest.raises(ValueError, match="non-negative"):
        decompose_counts([[1, -1], [0, 2]])


def test_answers_that_nobody_knows_are_left_out_and_no_answer_is_a_class():
    lost = Response("bob", 0, "", answer=None, correct=None)
    failed = Response("ann", 0, "", finish_reason="error")
    silent = Response("bob", 0, "", answer=None, key="no-answer", correct=False)
    one = Response("ann", 0, "", answer="1", key="1", correct=True)
    problem = Problem("p", "question", "1")
    debates = [
        Debate(problem, "mad", ("ann", "bob"), ((a, b),), rollout=k)
        for k, (a, b) in enumerate([(one, lost), (failed, silent), (one, silent)])
    ]
    table = tabulate(debates)
    assert table.label.tolist() == [1, -1, -1, UNPARSED, 1, UNPARSED]
    found = decompose(table)
    assert found.eu[0, 0] == pytest.approx(LN2)
    assert found.rollouts[0, 0] == 2
    assert found.unparsed[0, 0] == pytest.approx(0.5)


def test_without_a_gold_answer_a_response_without_answer_is_still_a_class():
    silent = Response("ann", 0, "", answer=None, correct=None)
    assert tabulate([Debate(Problem("p", "q", None), "mad", ("ann",), ((silent,),))]).label.tolist() == [UNPARSED]


def test_rows_without_a_key_are_classed_by_the_grader():
    said = [Response("ann", 0, "", answer=a, correct=True) for a in ("0.5", "1/2", "3")]
    table = tabulate(
        [Debate(Problem("p", "q", "1/2"), "mad", ("ann",), ((r,),), rollout=k) for k, r in enumerate(said)]
    )
    assert table.label[0] == table.label[1] != table.label[2]


def test_a_problem_without_a_turn_is_undefined_there():
    short = debates_from([[[("1", "1")]] * 2])
    long = debates_from([[], [[("1", "2"), ("1", "1")]] * 2])
    found = decompose(tabulate(short + long))
    assert found.problems == ("p0", "p1")
    assert np.isnan(found.tu[0, 1])
    assert found.rollouts.tolist() == [[2, 0], [2, 2]]


def test_the_rollout_bootstrap_matches_every_resample_enumerated():
    answers = ["1", "2", "2"]
    table = tabulate(debates_from([[[(a,)] for a in answers]], agents=("ann",)))
    every = [decompose_answers([list(pick)]).tu for pick in itertools.product(answers, repeat=3)]
    error = rollout_error(table, draws=20_000, seed=3)
    assert error.se["TU"][0, 0] == pytest.approx(np.std(every), rel=0.03)
    assert error.bias["TU"][0, 0] == pytest.approx(np.mean(every) - decompose_answers([answers]).tu, rel=0.05)
    assert error.mean_se["TU"][0] == pytest.approx(error.se["TU"][0, 0], rel=1e-3)


def test_the_rollout_bootstrap_draws_whole_debates():
    # both agents always answer alike within a debate: no resample of debates can make them differ
    debates = debates_from([[[(a, a)] for a in "12341234"]])
    error = rollout_error(tabulate(debates), draws=50, seed=0)
    assert error.se["EU"][0, 0] == 0
    assert error.se["AU"][0, 0] > 0


def test_the_rollout_bootstrap_repeats_by_seed_and_takes_uneven_problems():
    debates = debates_from([[[(a, "2")] for a in "1212"], [[(a, a)] for a in "12"]])
    table = tabulate(debates)
    first, again, other = (rollout_error(table, draws=30, seed=s).mean_se["TU"] for s in (1, 1, 2))
    assert first == again
    assert first != other
    with pytest.raises(ValueError, match="at least 2 draws"):
        rollout_error(table, draws=1)


def generated_table(problems, turns=5, agents=2, rollouts=16, classes=6):
    rng = np.random.default_rng(0)
    shape = (problems, rollouts, turns, agents)
    p, k, t, a = (x.ravel() for x in np.indices(shape))
    label = np.minimum(rng.geometric(0.5, size=shape), classes).ravel() - 1
    return ResponseTable(
        problems=tuple(map(str, range(problems))),
        agents=tuple(map(str, range(agents))),
        turns=turns,
        debates=problems * rollouts,
        problem=p,
        debate=p * rollouts + k,
        turn=t,
        agent=a,
        label=label,
        graded=np.ones(label.shape, dtype=bool),
        correct=label == 1,
        parsed=label > 0,
        truncated=np.zeros(label.shape, dtype=bool),
        debate_problem=np.repeat(np.arange(problems), rollouts),
    )


def test_ten_thousand_problems_are_decomposed_in_seconds():
    table = generated_table(10_000)
    start = time.perf_counter()
    found = decompose(table)
    assert time.perf_counter() - start < 15
    assert found.tu.shape == (10_000, 5)
    assert np.isfinite(found.eu).all()
