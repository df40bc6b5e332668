"""Faults that graders have shipped, each as a test named after the right behaviour."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from umad.grading import NO_ANSWER, GradeItem, Grader, check_golds, class_key, equal, extract, vote

NEEDS_A_WORKER = GradeItem("\\frac13", "\\boxed{\\int_0^1 x^2\\,dx}")
PLAIN = GradeItem("\\frac13", "so \\boxed{\\frac13}")


@pytest.fixture(scope="module")
def grader():
    with Grader(time_limit=2.0, memory_limit=512, workers=2) as grader:
        yield grader


def _grade_in_a_process(_: int) -> list[bool | None]:
    with Grader(workers=1) as grader:
        return [grade.equal for grade in grader.grade([PLAIN, NEEDS_A_WORKER])]


# 1
def test_grading_works_from_the_main_thread_a_pool_a_task_and_a_spawned_process(grader):
    items = [PLAIN, NEEDS_A_WORKER]
    assert [grade.equal for grade in grader.grade(items)] == [True, True]
    others = [GradeItem("\\frac13", f"\\boxed{{\\int_0^1 x^2\\,dx + {n} - {n}}}") for n in range(1, 9)]
    with ThreadPoolExecutor(4) as threads:
        assert all(grades[0].equal for grades in threads.map(lambda item: grader.grade([item, PLAIN]), others))

    async def tasks():
        more = [GradeItem("\\frac13", f"\\boxed{{\\int_0^1 x^2\\,dx - {n} + {n}}}") for n in range(1, 4)]
        return await asyncio.gather(*(grader.grade_async([PLAIN, item]) for item in more))

    assert all(grade.equal for grades in asyncio.run(tasks()) for grade in grades)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_grade_in_a_process, [0]) == [[True, True]]


# 2
def test_bombs_end_in_bounded_time_are_wrong_and_counted_and_the_next_batch_grades_well():
    product = "".join(f"(x+{k})" for k in range(40))
    bombs = ["9^{9^{9^9}}", "(10^9)!", product, "(" * 200_000 + "1" + ")" * 200_000]
    bombs += [
        "\\sum_{k=1}^{10^9} k!",
        "\\prod_{k=1}^{10^{10}} (k^k)",
        "\\binom{10^9}{5 \\cdot 10^8}",
        "2^{2^{2^{2^{2^2}}}}",
    ]
    with Grader(time_limit=2.0, memory_limit=512, workers=2) as grader:
        start = time.monotonic()
        grades = grader.grade([GradeItem("5", f"\\boxed{{{bomb}}}") for bomb in bombs])
        assert time.monotonic() - start < 2 * (2.0 * len(bombs))
        assert [grade.equal for grade in grades] == [False] * len(bombs)
        assert grader.counts.get("timeout", 0) + grader.counts.get("memory", 0) == len(bombs) - 1
        assert grades[2].status == "ok"  # a product of 40 factors is no bomb for us: it is merely wrong
        assert [grade.equal for grade in grader.grade([PLAIN, NEEDS_A_WORKER])] == [True, True]


@pytest.mark.slow
def test_a_thousand_answers_with_fifty_bombs_end_in_time_and_memory_and_the_rest_is_graded_right():
    made = [
        "9^{9^{9^9}}",
        "(10^9)!",
        "\\sqrt{" * 300 + "2" + "}" * 300,
        "(" * 200_000,
        "\0" * 1000,
        "\ud800\ud801",
        "\u202e5\u202c6",
    ]
    made += ["{" * 100_000 + "}" * 100_000, "1+" * 900 + "1,", "\\boxed{6}" * 10_000, "!" * 1000, "x^" * 900 + "y"]
    made += [f"\\sum_{{k=1}}^{{10^{n}}} k!" for n in range(7, 11)] + [
        f"\\int x^{{x^{n}}}\\sin x\\,dx" for n in range(2, 5)
    ]
    bombs = [GradeItem("5", f"\\boxed{{{made[n % len(made)]} }}") for n in range(50)]
    plain = [GradeItem(str(n % 9), f"\\boxed{{{n % 7}}}") for n in range(950)]
    items = bombs + plain
    random.Random(0).shuffle(items)
    with Grader(time_limit=1.0, memory_limit=400, workers=2) as grader:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.monotonic()
        grades = grader.grade(items)
        assert time.monotonic() - start < 2 * 50 * 1.0
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
        for item, grade in zip(items, grades, strict=True):
            if item in plain:
                assert grade.equal is (item.text == f"\\boxed{{{item.gold}}}")
            else:
                assert grade.equal is False
        assert [grade.equal for grade in grader.grade([PLAIN, NEEDS_A_WORKER])] == [True, True]


# 3
def test_an_answer_that_passes_its_time_limit_is_wrong_not_ungraded(grader):
    grade = grader.grade([GradeItem("5", "\\boxed{\\sum_{k=1}^{10^9} k!}")])[0]
    assert (grade.equal, grade.status) == (False, "timeout")


# 4
def test_the_last_box_counts_not_its_neighbours():
    assert extract("First \\boxed{5}. Wait, that's wrong. \\boxed{3}") == "3"
    assert extract("Agent 1 says \\boxed{5} and agent 2 says \\boxed{3}") == "3"
    assert extract("\\boxed{1} and \\boxed{2}") == "1, 2"


# 5
@pytest.mark.parametrize(
    ("gold", "candidate"), [("2\\sqrt{3}", "2"), ("(-\\infty, 3]", "3"), ("1,2", "1.2"), ("3,5", "3")]
)
def test_a_bare_latex_gold_is_read_whole(gold, candidate):
    assert not equal(gold, candidate)
    assert equal(gold, gold)


# 6
def test_a_gold_that_cannot_be_read_is_reported_and_rewards_nobody():
    golds = [
        ("\\frac{1}{2}", "math"),
        ("", "math"),
        ("1/0", "math"),
        ("???", "math"),
        (None, "math"),
        ("none", "number"),
    ]
    golds += [("\\int_0^1", "math"), ("B", "choice"), ("the third", "choice"), ("5", "maths")]
    assert [fault.index for fault in check_golds(golds)] == [1, 2, 3, 4, 5, 6, 8, 9]
    for gold in ("", "1/0", "???", "\\int_0^1"):
        assert not equal(gold, "5")


# 7
@pytest.mark.parametrize("text", ["5", "\\boxed{5}", "\\boxed{\\boxed{5}}", "$\\boxed{ 5 }$", "\\boxed{$5$}"])
def test_a_box_inside_a_box_or_no_box_means_the_same(text, grader):
    assert grader.grade([GradeItem("5", text)])[0].equal
    assert grader.grade([GradeItem(text, "5")])[0].equal
    assert class_key(extract(text)) == class_key("5")


# 8
def test_braces_inside_a_box_are_balanced_and_unclosed_or_empty_boxes_are_no_answer(grader):
    assert extract("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert extract("\\boxed{\\{1,2\\}}") == "\\{1,2\\}"
    for text in ("the answer is 5 \\boxed{5", "\\boxed{}", "it is 5: \\boxed{ }", "\\boxed"):
        grade = grader.grade([GradeItem("5", text)])[0]
        assert (grade.equal, grade.extracted, grade.status, grade.key) == (False, None, "no_answer", NO_ANSWER)


# 9
@pytest.mark.parametrize(
    ("gold", "candidate"), [("1331 and 1728", "1728"), ("3", "13"), ("13", "3"), ("x+2n+1", "x+1")]
)
def test_a_part_of_the_answer_is_not_the_answer(gold, candidate):
    assert not equal(gold, candidate)


# 10
def test_zero_is_an_answer_and_no_answer_is_not_zero(grader):
    grades = grader.grade([GradeItem("0", "0"), GradeItem("0", "\\boxed{0}"), GradeItem("0", None), GradeItem("0", "")])
    assert [grade.equal for grade in grades] == [True, True, False, False]
    assert [grade.status for grade in grades] == ["ok", "ok", "no_answer", "no_answer"]
    assert class_key("0") != class_key(None) == NO_ANSWER


# 11
def test_equal_is_lenient_and_class_keys_are_transitive():
    assert equal("25%", "25")
    assert equal("25%", "0.25")
    assert not equal("25", "0.25")
    assert class_key("25%") == class_key("25") != class_key("0.25")
    assert equal("x<=3", "(-\\infty,3]")
    assert equal("(-\\infty,3]", "x<=3")
    assert class_key("x<=3") == class_key("(-\\infty,3]")


# 12
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{4}",
        "<think>\\boxed{5}</think>\\boxed{4}",
        "<think>\\boxed{5}</think> then <think>6</think> \\boxed{4}",
        "5 was my guess</think>\\boxed{4}",
        "<think>a thought that never ends \\boxed{4}",
    ],
)
def test_the_last_segment_is_graded_and_no_thinking_tag_is_demanded(text):
    assert extract(text) == "4"
    assert extract("<think>\\boxed{4}</think> I do not know") is None


# 13
def test_votes_elect_classes_no_answer_never_wins_and_order_does_not_matter():
    elected = vote(["1/2", "0.5", "3"], 0)
    assert elected is not None
    assert equal("1/2", elected.answer)
    assert (elected.share, elected.tied) == (2 / 3, False)
    assert vote([None, None, "7"], 0).answer == "7"
    assert vote([None, ""], 0) is None
    assert vote([], 0) is None
    ballots = ["3", "4", "4.0", "5", "3", "5", None]
    for seed in range(20):
        winners = {vote(list(order), seed) for order in itertools.islice(itertools.permutations(ballots), 0, 5040, 97)}
        assert len(winners) == 1
    assert len({vote(ballots, seed).key for seed in range(30)}) == 3  # a tie goes either way, by seed


def test_weighted_votes_sum_weights_whatever_their_order():
    answers, weights = ["1", "2", "1", "3"], [0.1, 0.35, 0.2, 0.35 - 1e-15]
    keys = [class_key(answer) for answer in answers]
    pairs = list(zip(answers, keys, weights, strict=True))
    winners = set()
    for _ in range(24):
        random.shuffle(pairs)
        texts, marks, numbers = zip(*pairs, strict=True)
        winners.add(vote(texts, 3, keys=marks, weights=numbers).key)
    assert len(winners) == 1
    with pytest.raises(ValueError, match="lengths"):
        vote(["1"], 0, weights=[1.0, 2.0])
