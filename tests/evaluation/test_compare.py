from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from evaluation.generated_debates import debate, problems, random_run

from umad.evaluation.compare import (
    HEADER,
    compare,
    compare_debates,
    comparison_rows,
    find_evaluation,
    write_comparison,
)
from umad.evaluation.statistics import holm
from umad.records import UserError, write_jsonl


def save(folder, debates):
    write_jsonl(folder / "debates.jsonl", (d.to_row() for d in debates))
    return folder


def correct(debates, agent, turn):
    return np.array([next(r.correct for r in d.turns[turn] if r.agent == agent) for d in debates])


def test_differences_intervals_and_tests_per_turn():
    a, b = random_run(300, skill=0.4, seed=1), random_run(300, skill=0.6, seed=2)
    found = compare_debates(a, b, draws=2_000)
    assert (found["n_problems"], found["n_pairs"], found["unpaired"]) == (300, 300, [0, 0])
    for t in range(2):
        x = {n: correct(a, n, t) for n in ("ann", "bob")}
        y = {n: correct(b, n, t) for n in ("ann", "bob")}
        row = found["mean"][t]
        assert row["turn"] == t
        assert row["first"] == pytest.approx(np.mean([v.mean() for v in x.values()]))
        assert row["difference"] == pytest.approx(row["second"] - row["first"])
        each = (y["ann"].astype(float) + y["bob"] - x["ann"] - x["bob"]) / 2
        half = 1.96 * each.std() / np.sqrt(300)
        assert row["ci"] == pytest.approx([each.mean() - half, each.mean() + half], abs=0.012)
        assert row["p"] < 0.01
        for name in ("ann", "bob"):
            test = found["agents"][name][t]["mcnemar"]
            assert test["only_first"] == (x[name] & ~y[name]).sum()
            assert test["only_second"] == (~x[name] & y[name]).sum()
            n = test["only_first"] + test["only_second"]
            assert test["p"] == pytest.approx(scipy.stats.binomtest(test["only_first"], n).pvalue)
    raw = [row["mcnemar"]["p"] for rows in found["agents"].values() for row in rows]
    assert [row["p_holm"] for rows in found["agents"].values() for row in rows] == pytest.approx(holm(raw))


def test_pairing_makes_the_interval_narrower_than_independent_runs():
    base = random_run(200, skill=0.5, seed=1)
    same = [d if i % 20 else replace(d, turns=random_run(1, seed=i)[0].turns) for i, d in enumerate(base)]
    paired = compare_debates(base, same, draws=1_000)["mean"][0]
    apart = compare_debates(base, random_run(200, skill=0.5, seed=9), draws=1_000)["mean"][0]
    assert np.diff(paired["ci"])[0] < 0.5 * np.diff(apart["ci"])[0]


def test_a_run_against_itself_differs_by_nothing():
    run = random_run(40)
    found = compare_debates(run, run, draws=200)
    for row in [*found["mean"], *found["mean_parsed"], *found["agents"]["ann"], found["decision"]]:
        assert row["difference"] == 0
        assert row["ci"] == [0, 0]
        assert row["p"] == row["p_holm"] == 1


def test_parsed_answers_alone_tell_a_gain_in_format_from_a_gain_in_skill():
    p = problems(20)
    before = [debate(x, [[None if i < 10 else "0", None if i < 10 else "1"]]) for i, x in enumerate(p)]
    after = [debate(x, [["0", "1"]]) for x in p]
    found = compare_debates(before, after, draws=200)
    assert found["mean"][0]["difference"] == pytest.approx(0.25)
    assert found["mean_parsed"][0]["difference"] == pytest.approx(0.0)


def test_debates_are_paired_by_problem_and_rollout_whatever_their_order():
    a, b = random_run(30, seed=1, rollouts=2), random_run(30, seed=2, rollouts=2)
    shuffled = [b[i] for i in np.random.default_rng(0).permutation(len(b))]
    assert compare_debates(a, shuffled, draws=200) == compare_debates(a, b, draws=200)
    found = compare_debates(a[:50], b[10:], draws=200)
    assert (found["n_pairs"], found["n_problems"], found["unpaired"]) == (40, 20, [10, 10])


def test_several_rollouts_leave_the_bootstrap_and_drop_mcnemar():
    found = compare_debates(random_run(30, seed=1, rollouts=3), random_run(30, seed=2, rollouts=3), draws=200)
    assert any("McNemar" in note for note in found["notes"])
    assert "mcnemar" not in found["agents"]["ann"][0]
    assert "mcnemar" not in found["decision"]
    assert found["agents"]["ann"][0]["p_holm"] is not None


def test_only_pairs_graded_in_both_runs_count():
    p = problems(4)
    a = [debate(x, [["0", "0"]]) for x in p]
    b = [debate(x, [["1", "0"]]) for x in p]
    lost = replace(b[0].turns[0][0], correct=None)
    b[0] = replace(b[0], turns=((lost, b[0].turns[0][1]),))
    test = compare_debates(a, b, draws=50)["agents"]["ann"][0]
    assert test["mcnemar"]["only_first"] == 3
    assert test["first"] == 1.0
    assert test["second"] == 0.0


def test_failed_debates_are_counted_and_not_paired():
    a, b = random_run(10, seed=1), random_run(10, seed=2)
    b[4] = replace(b[4], error="engine: lost", turns=b[4].turns[:1])
    found = compare_debates(a, b, draws=50)
    assert found["failed"] == [0, 1]
    assert found["n_pairs"] == 9


def test_other_agents_or_turns_are_said_and_the_common_part_compared():
    a = random_run(20, turns=3, seed=1)
    b = random_run(20, turns=2, seed=2, agents=("solo",))
    found = compare_debates(a, b, draws=50)
    assert found["agents"] == {}
    assert len(found["mean"]) == 2
    assert found["mean"][1]["second"] == pytest.approx(correct(b, "solo", 1).mean())
    assert any("agents differ" in note for note in found["notes"])
    assert any("3 turns, the second 2" in note for note in found["notes"])


def test_folders_runs_and_what_is_left_of_them(tmp_path):
    first = save(tmp_path / "base" / "eval" / "step_000000", random_run(30, seed=1))
    save(tmp_path / "tuned" / "eval" / "step_000000", random_run(30, seed=1))
    last = save(tmp_path / "tuned" / "eval" / "step_000100", random_run(30, skill=0.9, seed=2))
    other = save(tmp_path / "other", random_run(30, skill=0.9, seed=3))
    assert find_evaluation(tmp_path / "tuned") == last
    found = compare([tmp_path / "base", tmp_path / "tuned", other], draws=300)
    assert found["runs"] == ["base", "tuned", "other"]
    assert found["folders"] == [str(first), str(last), str(other)]
    assert [entry["run"] for entry in found["comparisons"]] == ["tuned", "other"]
    raw = [row["p"] for entry in found["comparisons"] for row in entry["mean"]]
    adjusted = [row["p_holm"] for entry in found["comparisons"] for row in entry["mean"]]
    assert adjusted == pytest.approx(holm(raw))
    write_comparison(tmp_path / "comparison.json", found)
    assert json.loads((tmp_path / "comparison.json").read_text()) == found
    rows = comparison_rows(found)
    assert all(len(row) == len(HEADER) for row in rows)
    assert rows[0][:3] == ("tuned", "mean of agents", "1")
    assert rows[0][-1] == "30"


def test_what_cannot_be_compared_is_the_users_error(tmp_path):
    run = save(tmp_path / "run", random_run(4))
    with pytest.raises(UserError, match="at least two folders"):
        compare([run])
    with pytest.raises(UserError, match=r"no debates\.jsonl"):
        compare([run, tmp_path / "nowhere"])
    elsewhere = [replace(d, problem=replace(d.problem, id="x" + d.problem.id)) for d in random_run(4)]
    with pytest.raises(UserError, match="share no problem"):
        compare([run, save(tmp_path / "elsewhere", elsewhere)])
    with pytest.raises(UserError, match="twice"):
        compare([run, save(tmp_path / "twice", random_run(4) * 2)])


def test_two_evaluations_of_equal_skill_rarely_look_different():
    rng = np.random.default_rng(0)
    repeats, hits = 300, 0
    p = problems(120)
    skill = rng.beta(2, 2, size=len(p))
    for repeat in range(repeats):
        a, b = (
            [debate(x, [["0" if rng.random() < s else "1"]], agents=("ann",)) for x, s in zip(p, skill, strict=True)]
            for _ in range(2)
        )
        hits += compare_debates(a, b, draws=400, seed=repeat)["mean"][0]["p"] < 0.05
    assert hits / repeats < 0.09  # 0.05 plus three standard errors of 300 repeats
