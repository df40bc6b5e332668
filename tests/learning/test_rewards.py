from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning.learning_helpers import AGENTS, golden, make_debate, make_response

from umad.config import RewardConfig
from umad.learning.rewards import (
    RewardFunction,
    influence,
    load_functions,
    overlong_penalty,
    reward_debate,
    reward_metrics,
)
from umad.records import Debate, Problem, UserError


def rewards(debate: Debate) -> list[list[float | None]]:
    return [[r.reward for r in turn] for turn in debate.turns]


def part(debate: Debate, name: str) -> list[list[float | None]]:
    return [[r.parts.get(name) for r in turn] for turn in debate.turns]


def config(**values: Any) -> RewardConfig:
    return RewardConfig.model_validate({"influence": {"eta": 0}, **values})


# --- influence (Eq. 5) ------------------------------------------------------------------------------------------------


def test_influence_matches_the_reference_values():
    for case in golden("influence"):
        found = influence(case["correct_t"], case["correct_t1"], case["eta"])
        for value, expected in zip(found, case["influence"], strict=True):
            assert (value is None) == (expected is None)
            assert expected is None or value == pytest.approx(expected, abs=1e-12)


def test_influence_counts_peers_and_not_the_speaker():
    # bob improved, ada did not change: ada is rewarded, bob is not for his own improvement
    assert influence([1, 0], [1, 1], 0.2) == [pytest.approx(0.2), 0.0]
    # of two peers one got worse
    assert influence([1, 1, 0], [1, 0, 0], 0.2) == [pytest.approx(-0.1), 0.0, pytest.approx(-0.1)]


def test_an_ungraded_peer_leaves_the_sum_and_the_count():
    assert influence([0, 1, None], [1, None, 0], 0.2) == [None, pytest.approx(0.2), pytest.approx(0.2)]
    # cyd ungraded: ada's only counted peer is bob, so his improvement is not halved
    assert influence([0, 0, None], [0, 1, 1], 0.2)[0] == pytest.approx(0.2)


def test_influence_of_a_single_agent_does_not_apply():
    assert influence([0], [1], 0.2) == [None]
    assert influence([0], [1], 0.2, source="team") == [None]


def test_only_peers_that_saw_the_response_count():
    saw = [[True, True, True], [False, True, True], [True, True, True]]  # bob did not see ada
    found = influence([0, 0, 0], [0, 1, 0], 0.3, saw=saw)
    assert found == [0.0, 0.0, pytest.approx(0.15)]
    nobody = [[True, False], [False, True]]
    assert influence([0, 0], [1, 1], 0.2, saw=nobody) == [None, None]


def test_sign_and_team_forms():
    assert influence([0, 0, 0, 1], [0, 1, 1, 0], 0.2, "sign") == [
        pytest.approx(0.2),
        0.0,
        0.0,
        pytest.approx(0.2),
    ]
    # the speaker's own change counts for the team: ada alone improved
    assert influence([0, 0], [1, 0], 0.2, "linear", "team") == [pytest.approx(0.1), pytest.approx(0.1)]
    assert influence([0, 0], [1, 0], 0.2, "sign", "team") == [pytest.approx(0.2), pytest.approx(0.2)]


grades = st.sampled_from([0, 1, None])


@given(st.lists(st.tuples(grades, grades), min_size=1, max_size=6), st.sampled_from(["linear", "sign"]))
def test_influence_is_bounded_antisymmetric_in_time_and_independent_of_the_agents_order(pairs, form):
    before, after = [p[0] for p in pairs], [p[1] for p in pairs]
    found = influence(before, after, 0.2, form)
    assert all(v is None or abs(v) <= 0.2 + 1e-12 for v in found)
    backwards = influence(after, before, 0.2, form)
    assert all(v is None if w is None else v == -w for v, w in zip(found, backwards, strict=True))
    assert influence(before[::-1], after[::-1], 0.2, form) == found[::-1]


@given(st.lists(st.tuples(grades, grades), min_size=2, max_size=6))
def test_influence_ignores_the_speakers_own_grades(pairs):
    before, after = [p[0] for p in pairs], [p[1] for p in pairs]
    found = influence(before, after, 0.2)[0]
    for own in [(0, 1), (1, 0), (None, None)]:
        assert influence([own[0], *before[1:]], [own[1], *after[1:]], 0.2)[0] == found


def test_influence_reaches_the_debate_for_all_turns_but_the_last():
    debate = reward_debate(make_debate([[True, False], [True, True], [False, True]]), RewardConfig())
    assert part(debate, "influence") == [[pytest.approx(0.2), 0.0], [0.0, pytest.approx(-0.2)], [None, None]]
    assert rewards(debate) == [[pytest.approx(1.2), 0.0], [1.0, pytest.approx(0.8)], [0.0, 1.0]]


def test_influence_follows_what_each_response_saw():
    debate = make_debate([[True, False], [True, True]], everyone_sees=False)
    assert part(reward_debate(debate, RewardConfig()), "influence") == [[None, None], [None, None]]


@pytest.mark.parametrize("eta", [0.2, 0.5])
def test_eta_form_and_source_reach_the_debate(eta):
    debate = make_debate([[True, False, False], [False, True, False]])
    values = {"eta": eta, "form": "sign", "source": "team"}
    found = reward_debate(debate, config(influence=values))
    assert part(found, "influence")[0] == [0.0, 0.0, 0.0]  # the team as a whole did not change
    found = reward_debate(debate, config(influence={"eta": eta}))
    assert part(found, "influence")[0] == [pytest.approx(eta / 2), pytest.approx(-eta / 2), 0.0]


def test_with_a_shared_context_only_the_rollout_that_went_on_has_influence():
    shared = {"mode": "shared_context", "max_tokens": 100}
    grades = [[True, False], [True, True]]
    first = reward_debate(make_debate(grades, sampling=shared, rollout=0), RewardConfig())
    other = reward_debate(make_debate(grades, sampling=shared, rollout=3), RewardConfig())
    assert part(first, "influence")[0] == [pytest.approx(0.2), 0.0]
    assert part(other, "influence") == [[None, None], [None, None]]
    assert rewards(other) == [[1.0, 0.0], [1.0, 1.0]]


def test_eta_0_changes_no_bit():
    debate = make_debate([[True, False], [True, True]])
    plain = reward_debate(debate, config())
    assert rewards(plain) == [[1.0, 0.0], [1.0, 1.0]]
    assert all(set(r.parts) == {"correct"} for r in plain.responses())


# --- correctness, team and credit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("team", "expected"),
    [
        ("own", [[1, 0, 0], [1, 1, 0]]),
        ("sum", [[1, 1, 1], [2, 2, 2]]),
        ("mean", [[1 / 3] * 3, [2 / 3] * 3]),
        ("max", [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_team_modes(team, expected):
    debate = make_debate([[True, False, False], [True, True, False]])
    assert rewards(reward_debate(debate, config(team=team))) == expected


@pytest.mark.parametrize(
    ("credit", "expected"),
    [("dense", [[1, 0], [1, 1], [0, 1]]), ("final", [[0, 1]] * 3), ("accumulated", [[2, 2], [1, 2], [0, 1]])],
)
def test_credit_modes(credit, expected):
    debate = make_debate([[True, False], [True, True], [False, True]])
    assert rewards(reward_debate(debate, config(credit=credit))) == expected


def test_team_and_credit_combine():
    debate = make_debate([[True, False], [True, True]])
    assert rewards(reward_debate(debate, config(team="sum", credit="accumulated"))) == [[3, 3], [2, 2]]


def test_an_ungraded_response_has_no_reward_and_no_parts():
    debate = reward_debate(make_debate([[True, None], [None, False]]), RewardConfig())
    assert rewards(debate) == [[1.0, None], [None, 0.0]]
    assert debate.turns[0][1].parts == {}


@pytest.mark.parametrize(("team", "expected"), [("sum", [None, None]), ("mean", [None, None]), ("max", [1.0, None])])
def test_a_missing_grade_is_not_counted_as_wrong_in_a_team(team, expected):
    assert rewards(reward_debate(make_debate([[True, None]]), config(team=team))) == [expected]
    assert rewards(reward_debate(make_debate([[False, None]]), config(team=team))) == [[None, None]]


@pytest.mark.parametrize("credit", ["final", "accumulated"])
def test_credit_from_turns_that_are_missing_is_unknown(credit):
    ungraded_end = make_debate([[True, True], [None, False]])
    assert rewards(reward_debate(ungraded_end, config(credit=credit)))[0] == [None, 0.0 if credit == "final" else 1.0]
    broken = make_debate([[True, True]], error="the engine died")
    assert rewards(reward_debate(broken, config(credit=credit))) == [[None, None]]
    assert rewards(reward_debate(broken, config())) == [[1.0, 1.0]]


def test_several_responses_of_one_agent_at_a_turn_are_each_paid_for_themselves():
    turn = tuple(make_response("ada", 0, correct) for correct in (True, False, None))
    debate = Debate(Problem("p", "What?", "1"), "consistency", ("ada",), (turn,))
    assert rewards(reward_debate(debate, RewardConfig())) == [[1.0, 0.0, None]]


@given(
    st.lists(st.lists(st.sampled_from([True, False, None]), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["own", "sum", "mean", "max"]),
    st.sampled_from(["dense", "final", "accumulated"]),
)
def test_rewards_are_the_sum_of_their_parts_and_the_debate_itself_is_not_changed(rows, team, credit):
    debate = make_debate(rows)
    before = debate.to_row()
    found = reward_debate(debate, RewardConfig(team=team, credit=credit))
    for old, new in zip(debate.responses(), found.responses(), strict=True):
        if old.correct is None:
            assert new.reward is None
        if new.reward is not None:
            assert new.reward == math.fsum(new.parts.values())
    assert debate.to_row() == before


# --- format, overlong, weights ----------------------------------------------------------------------------------------


def single(**changes: Any) -> Debate:
    response = make_response("ada", 0, True, **changes)
    return Debate(Problem("p", "What?", "1"), "single", ("ada",), ((response,),), sampling={"max_tokens": 100})


def test_format_reward_asks_for_a_closed_box_and_an_ended_response():
    def value(text: str, reason: str = "stop") -> float | None:
        found = reward_debate(single(text=text, finish_reason=reason), config(format=0.1))
        return found.turns[0][0].parts["format"]

    assert value("thus \\boxed{1}") == pytest.approx(0.1)
    assert value("thus \\boxed{\\frac{1}{2}}") == pytest.approx(0.1)
    assert value("thus \\boxed{1") == 0
    assert value("the answer is 1") == 0
    assert value("thus \\boxed{1}", "length") == 0
    assert "format" not in reward_debate(single(), config()).turns[0][0].parts


def test_overlong_penalty_falls_in_a_straight_line_over_the_buffer():
    assert [overlong_penalty(n, 100, 20) for n in (1, 80, 85, 90, 100, 120)] == [0, 0, -0.25, -0.5, -1, -1]


def test_overlong_penalty_reaches_the_reward():
    settings = {"weight": 0.5, "buffer": 20}
    assert rewards(reward_debate(single(completion_tokens=90), config(overlong=settings))) == [[0.75]]
    assert rewards(reward_debate(single(completion_tokens=80), config(overlong=settings))) == [[1.0]]
    with pytest.raises(ValueError, match="max_tokens"):
        reward_debate(make_debate([[True]], sampling={}), config(overlong=settings))


def test_correctness_has_a_weight():
    assert rewards(reward_debate(make_debate([[True, False]]), config(correctness=0.5))) == [[0.5, 0.0]]


# --- the user's own functions -----------------------------------------------------------------------------------------


def brief(debate: Debate, agent: str, turn: int) -> float:
    """Rewards short texts; tests name it as a user would."""
    response = next(r for r in debate.turns[turn] if r.agent == agent)
    return 1.0 if len(response.text) < 20 else 0.0


def only_at_turn_1(debate: Debate, agent: str, turn: int) -> float | None:
    return 2.0 if turn == 1 else None


def raises(debate: Debate, agent: str, turn: int) -> float:
    if agent == "ada":
        raise KeyError("no such thing")
    return 0.5


def not_a_number(debate: Debate, agent: str, turn: int) -> float:
    return math.nan


def a_text(debate: Debate, agent: str, turn: int) -> Any:
    return "1.0"


def hangs(debate: Debate, agent: str, turn: int) -> float:
    time.sleep(5)
    return 1.0


def functions(*called: Callable[..., Any], **values: Any) -> RewardConfig:
    return config(functions=[{"function": f"{f.__module__}:{f.__name__}", **values} for f in called])


def test_a_users_function_adds_its_weighted_value_and_none_is_not_0():
    debate = make_debate([[True, False], [True, True]])
    found = reward_debate(debate, functions(brief, only_at_turn_1, weight=0.25))
    assert part(found, "brief") == [[0.25, 0.25], [0.25, 0.25]]
    assert part(found, "only_at_turn_1") == [[None, None], [0.5, 0.5]]
    assert rewards(found) == [[1.25, 0.25], [1.75, 1.75]]
    named = reward_debate(debate, functions(brief, name="short"))
    assert part(named, "short")[0] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "kind"), [(raises, "raised"), (not_a_number, "not a number"), (a_text, "not a number")]
)
def test_a_users_function_that_fails_is_counted_named_once_and_never_a_reward(function, kind, caplog):
    settings = functions(function)
    loaded = load_functions(settings)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = reward_debate(make_debate([[True, True]]), settings, loaded)
            assert found.turns[0][0].reward is None
            assert found.turns[0][0].parts == {}
    assert found.turns[0][1].reward == (1.5 if function is raises else None)
    assert loaded[0].faults == {kind: 3 if function is raises else 6}
    assert len(caplog.records) == 1
    assert function.__name__ in caplog.text
    assert "'ada'" in caplog.text


def test_a_users_function_that_hangs_is_a_fault_after_its_time_limit():
    settings = functions(hangs, time_limit=0.05)
    loaded = load_functions(settings)
    start = time.perf_counter()
    found = reward_debate(make_debate([[True]]), settings, loaded)
    assert time.perf_counter() - start < 2
    assert rewards(found) == [[None]]
    assert loaded[0].faults == {"hung": 1}


@pytest.mark.parametrize(
    "spec", ["no_such_module:f", "learning.learning_helpers:no_such_function", "learning.learning_helpers:AGENTS"]
)
def test_a_function_that_cannot_be_imported_is_the_users_error(spec):
    with pytest.raises(UserError, match=spec.split(":")[1]):
        load_functions(config(functions=[{"function": spec}]))


def test_a_function_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_own_reward.py").write_text("def f(debate, agent, turn):\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    entry = load_functions(config(functions=[{"function": "my_own_reward:f"}]))[0]
    assert entry(make_debate([[True]]), "ada", 0) == (3.0, False)
    assert isinstance(entry, RewardFunction)


@pytest.mark.parametrize(
    "values",
    [
        {"functions": [{"function": "module.function"}]},
        {"functions": [{"function": "a:f"}, {"function": "b:f"}]},
        {"functions": [{"function": "a:influence"}]},
        {"functions": [{"function": "a:f", "time_limit": 0}]},
        {"correctness": -1},
        {"format": -0.1},
        {"overlong": {"buffer": 0}},
        {"influence": {"eta": -0.2}},
    ],
)
def test_impossible_reward_settings_are_refused(values):
    with pytest.raises(ValueError):
        RewardConfig.model_validate(values)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_each_part_is_logged_per_agent_and_turn_where_it_applies():
    settings = config(influence={"eta": 0.2}, functions=[{"function": f"{__name__}:raises"}])
    loaded = load_functions(settings)
    debates = [
        reward_debate(make_debate(g), config(influence={"eta": 0.2}))
        for g in ([[True, False], [True, True]], [[False, None], [False, False]])
    ]
    loaded[0](debates[0], "ada", 0)
    metrics = reward_metrics(debates)
    assert metrics["agent/ada/reward_correct/turn_0"] == 0.5
    assert metrics["agent/bob/reward_correct/turn_0"] == 0.0
    assert metrics["agent/ada/reward_influence/turn_0"] == pytest.approx(0.2)  # the second debate's does not apply
    assert "agent/ada/reward_influence/turn_1" not in metrics
    assert metrics["agent/bob/unrewarded/turn_0"] == 1
    assert loaded[0].faults.total() == 1
    assert set(AGENTS[:2]) == {name.split("/")[1] for name in metrics if name.startswith("agent/")}


def test_an_overlong_buffer_longer_than_a_response_may_be_is_refused_by_key():
    from umad.recipe_io import parse_recipe

    text = """
    {name: x, agents: [{name: a, model: m}], sampling: {max_tokens: 50}, reward: {overlong: {weight: 1, buffer: 60}}}
    """
    with pytest.raises(UserError, match=r"reward\.overlong\.buffer.*60.*50"):
        parse_recipe(text)
    parse_recipe(text.replace("weight: 1", "weight: 0"))
