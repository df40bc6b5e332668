from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evaluation.generated_debates import AGENTS, debate, problems, random_debate, random_run, response

from umad.config import EvaluationConfig
from umad.evaluation.evaluate import analyze, evaluate, read_evaluation, read_summary, write_evaluation
from umad.evaluation.summary import summarise
from umad.records import Debate, Decision, UserError, read_debates, to_json, write_jsonl
from umad.uncertainty.decomposition import decompose_answers

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "debate_traces_gsm8k.jsonl"


def config(**changes):
    values = {
        "accuracy": {"problems": 12},
        "decomposition": {"problems": 5, "rollouts": 4},
        "bootstrap": 200,
        **changes,
    }
    return EvaluationConfig.model_validate(values)


class Runner:
    """Stands in for the driver: remembers what was asked, answers with made-up debates."""

    def __init__(self, skill=0.6, fail=lambda label, k: False):
        self.calls = []
        self.rng = np.random.default_rng(0)
        self.skill = skill
        self.fail = fail

    def __call__(self, problems, rollouts, turns, sampling, mode, label):
        self.calls.append((len(problems), rollouts, turns, sampling.to_row(), mode, label))
        found = []
        for problem in problems:
            for k in range(rollouts):
                made = random_debate(self.rng, problem, k, turns, self.skill, sampling=sampling.to_row())
                failed = self.fail(label, len(found))
                found.append(replace(made, turns=made.turns[:1], error="engine: out of memory") if failed else made)
        return found


def test_both_parts_are_run_as_the_recipe_says():
    runner, told = Runner(), []
    evaluate(runner, problems(20), config(), turns=3, max_tokens=64, progress=told.append)
    neutral = {"top_k": 0, "max_tokens": 64}
    assert runner.calls == [
        (12, 1, 3, {"temperature": 0.6, "top_p": 0.95, **neutral}, "trajectory", "accuracy"),
        (5, 4, 3, {"temperature": 1.0, "top_p": 1.0, **neutral}, "trajectory", "decomposition"),
    ]
    assert "12 problems x 1 rollouts x 3 turns" in told[0]

    runner = Runner()
    changed = config(
        turns=2,
        max_tokens=9,
        accuracy={"problems": 3, "rollouts": 2, "temperature": 0.0, "top_p": 1.0, "top_k": 5},
        decomposition={"problems": 2, "rollouts": 3, "temperature": 0.7, "top_p": 0.9, "sampling": "shared_context"},
    )
    evaluate(runner, problems(20), changed, turns=5, max_tokens=64)
    assert runner.calls == [
        (3, 2, 2, {"temperature": 0.0, "top_p": 1.0, "top_k": 5, "max_tokens": 9}, "trajectory", "accuracy"),
        (2, 3, 2, {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "max_tokens": 9}, "shared_context", "decomposition"),
    ]


def test_a_part_of_no_problems_is_left_out_and_two_such_parts_are_an_error():
    runner = Runner()
    several = config(accuracy={"problems": 12, "rollouts": 4}, decomposition={"problems": 0})
    found = evaluate(runner, problems(20), several, turns=2, max_tokens=64)
    assert [call[-1] for call in runner.calls] == ["accuracy"]
    # 4 rollouts would do for a split, but these were drawn at accuracy's temperature
    assert "decomposition.problems: 0" in found.summary["uncertainty"]["refused"]
    assert found.summary["n_debates"] == {"accuracy": 48, "decomposition": 0}
    assert found.summary["sampling"]["decomposition"]["problems"] == 0

    found = evaluate(Runner(), problems(20), config(accuracy={"problems": 0}), turns=2, max_tokens=64)
    assert found.summary["sampling"]["accuracy"]["temperature"] == 1.0
    assert found.summary["n_problems"] == 5

    nothing = config(accuracy={"problems": 0}, decomposition={"problems": 0})
    with pytest.raises(UserError, match="nothing to measure"):
        evaluate(Runner(), problems(3), nothing, turns=2, max_tokens=64)
    with pytest.raises(UserError, match="no problem to evaluate"):
        evaluate(Runner(), [], config(), turns=2, max_tokens=64)


def test_the_summary_equals_plain_loops():
    found = evaluate(Runner(), problems(20), config(), turns=3, max_tokens=64, info={"step": 40})
    summary = found.summary
    single = [d for d in found.debates if d.sampling["part"] == "accuracy"]
    many = [d for d in found.debates if d.sampling["part"] == "decomposition"]
    assert (len(single), len(many)) == (12, 20)
    assert (summary["step"], summary["n_problems"], summary["agents"]) == (40, 12, list(AGENTS))
    assert summary["n_debates"] == {"accuracy": 12, "decomposition": 20}
    for t in range(3):
        said = {name: [next(r for r in d.turns[t] if r.agent == name) for d in single] for name in AGENTS}
        for name in AGENTS:
            right = [r.correct for r in said[name]]
            parsed = [r.correct for r in said[name] if r.answer is not None]
            assert summary["accuracy"][name][t] == pytest.approx(sum(right) / 12)
            assert summary["accuracy_parsed"][name][t] == pytest.approx(sum(parsed) / len(parsed))
            assert summary["unparsed"][name][t] == pytest.approx(1 - len(parsed) / 12)
            low, high = summary["accuracy_ci"][name][t]
            assert low <= summary["accuracy"][name][t] <= high
        means = [summary["accuracy"][name][t] for name in AGENTS]
        assert summary["mean_accuracy"][t] == pytest.approx(sum(means) / 2)
        alike = [a.answer == b.answer is not None for a, b in zip(said["ann"], said["bob"], strict=True)]
        assert summary["agreement"][t] == pytest.approx(sum(alike) / 12)
        splits = [
            decompose_answers(
                [
                    [next(r.key for r in d.turns[t] if r.agent == name) for d in many if d.problem.id == p.id]
                    for name in AGENTS
                ]
            )
            for p in problems(5)
        ]
        for name in ("TU", "AU", "EU"):
            mean = sum(getattr(s, name.lower()) for s in splits) / 5
            assert summary["uncertainty"][name][t] == pytest.approx(mean)
            low, high = summary["uncertainty"][f"{name}_ci"][t]
            assert low <= mean <= high
    assert summary["decision_accuracy"] == pytest.approx(sum(d.decision.correct for d in single) / 12)
    assert summary["uncertainty"]["K"] == [4, 4]
    assert summary["uncertainty"]["n_problems"] == [5, 5, 5]
    assert summary["cost"]["calls"] == 32 * 6
    assert summary["cost"]["per_problem"]["calls"] == 6
    assert summary["seeds"] == [7]
    assert summary["sampling"]["decomposition"]["temperature"] == 1.0
    assert summary["sampling"]["decomposition"]["rollouts"] == 4


def test_flips_are_counted_per_agent_and_step():
    p = problems(3)
    found = summarise(
        [
            debate(p[0], [["0", "1"], ["1", "0"], ["1", "0"]]),
            debate(p[1], [["0", "0"], ["0", None], ["0", "0"]]),
            debate(p[2], [["2", "2"], ["0", "2"], ["2", "2"]]),
        ],
        draws=20,
    )["flips"]
    assert found["ann"] == {"right_to_wrong": [1, 1], "wrong_to_right": [1, 0], "n": [3, 3]}
    assert found["bob"] == {"right_to_wrong": [1, 0], "wrong_to_right": [1, 1], "n": [3, 3]}


def test_ungraded_responses_are_counted_and_left_out_of_every_rate():
    p = problems(4)
    debates = [debate(x, [["0", "0"], ["0", "1"]]) for x in p[:3]]
    lost = debate(p[3], [["0", "0"], ["0", "1"]])
    bob = replace(lost.turns[1][1], correct=None, answer=None, key="")
    lost = replace(lost, turns=(lost.turns[0], (lost.turns[1][0], bob)), decision=Decision("0", None, "vote"))
    found = summarise([*debates, lost], draws=20)
    assert found["accuracy"]["bob"] == [1.0, 0.0]
    assert found["accuracy_n"]["bob"] == [4, 3]
    assert found["ungraded"] == {"ann": [0, 0], "bob": [0, 1]}
    assert found["unparsed"]["bob"] == [0.0, 0.0]
    assert found["flips"]["bob"]["n"] == [3]
    assert found["decision_accuracy"] == 1.0


def test_truncated_responses_are_reported_as_a_share():
    p = problems(2)
    cut = Debate(p[0], "mad", ("ann",), ((response("ann", 0, None, finish="length"),),))
    whole = Debate(p[1], "mad", ("ann",), ((response("ann", 0, "0"),),))
    found = summarise([cut, whole], draws=20)
    assert found["truncated"] == {"ann": [0.5]}
    assert found["unparsed"] == {"ann": [0.5]}
    assert found["accuracy"] == {"ann": [0.5]}
    assert found["accuracy_parsed"] == {"ann": [1.0]}


def test_failed_debates_are_counted_and_left_out_and_all_failed_is_an_error():
    runner = Runner(fail=lambda label, k: k == 3)
    found = evaluate(runner, problems(20), config(), turns=3, max_tokens=64)
    assert found.summary["failed"] == {"n": 2, "reasons": {"engine: out of memory": 2}}
    assert found.summary["n_problems"] == 11
    assert found.summary["accuracy_n"]["ann"] == [11, 11, 11]
    assert len(found.debates) == 32, "the rows are kept"

    runner = Runner(fail=lambda label, k: label == "decomposition")
    with pytest.raises(RuntimeError, match="all 20 debates of the decomposition part failed: engine: out of memory"):
        evaluate(runner, problems(20), config(), turns=3, max_tokens=64)


def test_without_gold_there_is_no_accuracy_but_the_rest_is_computed():
    rows = [replace(r, problem=replace(r.problem, gold=None), decision=None) for r in random_run(6, rollouts=3)]
    ungraded = [
        replace(d, turns=tuple(tuple(replace(r, correct=None) for r in turn) for turn in d.turns)) for d in rows
    ]
    found = summarise(ungraded, draws=50)
    assert found["accuracy"]["ann"] == [None, None]
    assert found["mean_accuracy_ci"] == [[None, None], [None, None]]
    assert found["decision_accuracy"] is None
    assert found["uncertainty"]["K"] == [3, 3]
    assert found["agreement"][0] is not None
    json.loads(to_json(found))


def test_problems_with_a_single_rollout_left_are_not_decomposed():
    debates = random_run(3, rollouts=4, seed=1)
    thin = [d for d in debates if d.problem.id != "p2" or d.rollout == 0]
    found = summarise(thin, draws=50)["uncertainty"]
    full = summarise([d for d in debates if d.problem.id != "p2"], draws=50)["uncertainty"]
    assert found["n_problems"] == [2, 2]
    assert found["TU"] == pytest.approx(full["TU"])
    assert found["K"] == [4, 4]


def test_self_consistency_counts_every_sample_of_an_agent():
    turn = tuple(response("ann", 0, a) for a in ("0", "0", "1", None))
    made = [Debate(p, "consistency", ("ann",), (turn,), decision=Decision("0", True, "vote")) for p in problems(2)]
    found = summarise(made, draws=20)
    assert found["accuracy"] == {"ann": [0.5]}
    assert found["uncertainty"]["K"] == [4, 4]
    assert found["agreement"] == [pytest.approx(1 / 6)]
    assert "rollout_se" not in found["uncertainty"]


def test_teams_are_never_mixed():
    mixed = [*random_run(3), *random_run(3, agents=("cy", "dan"))]
    with pytest.raises(UserError, match=r"2 different teams are mixed: ann, bob \(3 debates\); cy, dan"):
        summarise(mixed)
    with pytest.raises(UserError, match="no debate"):
        summarise([])


def test_an_agent_keeps_its_figures_whatever_its_place():
    debates = random_run(8, seed=3)
    turned = [
        replace(d, agents=d.agents[::-1], turns=tuple(t[::-1] for t in d.turns)) if i % 2 else d
        for i, d in enumerate(debates)
    ]
    a, b = summarise(debates, draws=50), summarise(turned, draws=50)
    for key in ("accuracy", "accuracy_ci", "flips", "unparsed", "mean_accuracy", "agreement"):
        assert a[key] == b[key]


def test_the_bootstrap_follows_the_recipe():
    def bounds(**changes):
        return evaluate(Runner(), problems(20), config(**changes), turns=2, max_tokens=64).summary

    base, again = bounds(), bounds()
    assert base == again
    assert bounds(seed=1)["mean_accuracy_ci"] != base["mean_accuracy_ci"]
    assert bounds(bootstrap=50)["bootstrap"]["draws"] == 50
    assert bounds(seed=1)["mean_accuracy"] == base["mean_accuracy"]


def test_what_is_written_is_read_back_and_summarised_alike(tmp_path):
    found = evaluate(Runner(), problems(20), config(), turns=3, max_tokens=64, info={"step": 3})
    write_evaluation(tmp_path / "step_000003", found)
    back = read_evaluation(tmp_path / "step_000003")
    assert back.summary == json.loads(to_json(found.summary))
    again = summarise(back.debates, info={"step": 3}, draws=200, seed=0)
    assert json.loads(to_json(again)) == back.summary
    assert sorted(path.name for path in (tmp_path / "step_000003").iterdir()) == ["debates.jsonl", "summary.json"]


def test_a_summary_never_stands_beside_debates_of_another_evaluation(tmp_path, monkeypatch):
    found = evaluate(Runner(), problems(20), config(), turns=3, max_tokens=64)
    write_evaluation(tmp_path, found)

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("umad.evaluation.evaluate.write_jsonl", full)
    with pytest.raises(OSError, match="no space"):
        write_evaluation(tmp_path, found)
    assert not (tmp_path / "summary.json").exists()
    with pytest.raises(UserError, match="is the evaluation finished"):
        read_evaluation(tmp_path)


def test_a_broken_summary_is_the_users_error(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json: not valid JSON"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object"):
        read_summary(tmp_path)


def test_rows_of_other_tools_with_few_fields_are_analysed(tmp_path):
    rows = [
        {
            "problem_id": f"p{i}",
            "gold": "4",
            "agents": ["a", "b"],
            "rollout": k,
            "turns": [
                [{"agent": "a", "answer": "4", "correct": True}, {"agent": "b", "answer": "5", "correct": False}]
            ],
        }
        for i in range(3)
        for k in range(2)
    ]
    write_jsonl(tmp_path / "debates.jsonl", rows)
    found = analyze(read_debates(tmp_path / "debates.jsonl"), draws=50)
    assert found["accuracy"] == {"a": [1.0], "b": [0.0]}
    assert found["decomposition"]["EU"] == [pytest.approx(np.log(2))]
    assert found["n_problems"] == 3
    assert found["decision_accuracy"] is None


def test_analysis_of_single_rollouts_refuses_the_decomposition_and_does_the_rest():
    found = analyze(random_run(6), draws=50)
    assert "1 rollout(s) per agent" in found["decomposition"]["refused"]
    assert found["flips"]["ann"]["n"] == [6]
    assert found["mean_accuracy"][0] is not None


def traces():
    """The recorded debates as rows: (configuration, debate)."""
    for line in TRACES.read_text().splitlines():
        row = json.loads(line)
        rounds = range(row["n_rounds"])
        turns = [
            [
                {"agent": f"agent{a['agent']}", "text": r["response"], "answer": r["answer"], "correct": r["correct"]}
                for a in row["agents"]
                for r in [a["rounds"][t]]
            ]
            for t in rounds
        ]
        yield (
            row["id"].rsplit("/", 1)[0],
            Debate.from_row(
                {
                    "problem_id": row["problem_id"],
                    "question": row["problem"],
                    "gold": row["gold"],
                    "agents": [f"agent{a['agent']}" for a in row["agents"]],
                    "turns": turns,
                    "decision": {
                        "answer": row["majority_per_round"][-1],
                        "correct": row["majority_correct_per_round"][-1],
                    },
                }
            ),
        )


def test_real_debates_recorded_by_another_tool():
    if not TRACES.is_file():
        pytest.skip("no recorded debates beside this checkout")
    by_team: dict[tuple[int, int], list[Debate]] = {}
    for _, made in traces():
        team = by_team.setdefault((len(made.agents), len(made.turns)), [])
        team.append(replace(made, rollout=sum(d.problem.id == made.problem.id for d in team)))
    assert sum(map(len, by_team.values())) == 263
    for (agents, turns), team in by_team.items():
        found = summarise(team, draws=300)
        assert found["n_problems"] == len({d.problem.id for d in team})
        for t in range(turns):
            right = Counter()
            for d in team:
                for r in d.turns[t]:
                    right[r.agent] += r.correct
            for name in found["agents"]:
                assert found["accuracy"][name][t] == pytest.approx(right[name] / len(team))
        flips = found["flips"]["agent0"]
        gained = np.array(flips["wrong_to_right"]) - np.array(flips["right_to_wrong"])
        assert gained == pytest.approx(np.diff(found["accuracy"]["agent0"]) * len(team))
        low, high = found["decision_accuracy_ci"]
        assert found["n_problems"] == 1 or low <= found["decision_accuracy"] <= high
        if "refused" not in found["uncertainty"]:
            assert all(0 <= value <= np.log(agents) for value in found["uncertainty"]["EU"])
