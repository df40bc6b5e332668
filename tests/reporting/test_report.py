from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from umad.records import UserError
from umad.reporting import report
from umad.reporting.examples import OUTCOMES, choose, outcome
from umad.reporting.folder import read_run
from umad.reporting.report import share_out, write_report
from umad.reporting.svg import percent

MakeRun = Callable[..., Path]
VOID = {"meta", "br", "hr", "img", "link", "input", "path", "line", "circle", "rect"}


class Page(HTMLParser):
    """Tags, attributes and text of a page, its tags' balance checked on the way."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]


def page_of(run: Path) -> Page:
    return Page(write_report(run))


def test_a_whole_run_shows_its_figures_as_they_stand_in_the_files(make_run: MakeRun) -> None:
    run = make_run()
    words = page_of(run).words
    for step in (0, 40):
        summary = json.loads((run / f"eval/step_{step:06d}/summary.json").read_text())
        for name in ("ada", "ben"):
            for value, (low, high) in zip(summary["accuracy"][name], summary["accuracy_ci"][name], strict=True):
                assert f"{percent(value)} [{100 * low:.1f}, {100 * high:.1f}]" in words
        assert f"{percent(summary['decision_accuracy'])} [" in words
        flips = summary["flips"]["ada"]
        assert f"1 → 2 {flips['wrong_to_right'][0]} {flips['right_to_wrong'][0]}" in words
    assert "n = 60" in words
    assert "95% interval" in words
    assert "What this report could not show" not in words
    for title in ("Accuracy", "Uncertainty", "Flips", "Learning", "Training health", "Time and cost", "Debates"):
        assert title in words


def test_the_paired_difference_is_that_of_the_comparison(make_run: MakeRun) -> None:
    from umad.evaluation.compare import compare

    run = make_run()
    row = compare([run / "eval/step_000000", run / "eval/step_000040"])["comparisons"][0]["mean"][-1]
    low, high = row["ci"]
    assert low > 0
    words = page_of(run).words
    assert f"a gain (paired difference, 95% interval: {100 * low:+.1f} to {100 * high:+.1f} points)" in words
    assert f"{100 * row['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]" in words


def test_the_page_holds_no_script_and_loads_nothing(make_run: MakeRun) -> None:
    page = page_of(make_run(evaluated=(0, 10, 20, 40)))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "use", "image")
        assert not any(key.startswith("on") or key in ("src", "srcset", "style") for key in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in page.source
    assert "@import" not in page.source
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_charts_and_regions_are_labelled_and_ids_are_unique(make_run: MakeRun) -> None:
    page = page_of(make_run(evaluated=(0, 10, 20, 40)))
    ids = Counter(page.ids())
    assert max(ids.values()) == 1
    for tag, attributes in page.tags:
        for label in attributes.get("aria-labelledby", "").split():
            assert label in ids
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes.get("role") == "img"
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids
    charts = [a for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    assert len(charts) >= 15
    figures = page.source.split("<figure>")[1:]
    assert figures
    accuracy_panels = [f for f in figures if 'id="acc-' in f]
    # the accuracy charts share the open table under them, all others bring their own
    assert all("<table>" in figure.split("</figure>")[0] for figure in figures if figure not in accuracy_panels)


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}\x1b[31m\"'</pre></details>\udc80"


def test_hostile_text_in_every_field_stays_text(make_run: MakeRun) -> None:
    run = make_run()
    clean = Counter(tag for tag, _ in page_of(run).tags)
    for path in run.rglob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(_poisoned(row)) + "\n" for row in rows))
    for path in run.rglob("summary.json"):
        path.write_text(json.dumps(_poisoned(json.loads(path.read_text()))))
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"note: {json.dumps(HOSTILE)}\n")
    (run / "state.json").write_text(json.dumps({"environment": {HOSTILE: HOSTILE}}))
    page = page_of(run)
    assert {tag for tag, _ in page.tags} <= set(clean) | {"p", "aside"}
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in page.words
    assert "{{ 7*7 }}" in page.words
    assert "\x1b" not in page.source


def _poisoned(value: Any, key: str = "") -> Any:
    """All strings but those that link records together get hostile text at their end."""
    if isinstance(value, dict):
        return {k: _poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_poisoned(v, key) for v in value]
    return value + HOSTILE if isinstance(value, str) and key not in ("part", "agent", "agents") else value


def test_an_agent_with_a_hostile_name_is_shown_as_text(make_run: MakeRun) -> None:
    run = make_run()
    for path in [*run.rglob("*.jsonl"), *run.rglob("summary.json"), run / "config.yaml"]:
        path.write_text(path.read_text().replace('"ada', '"<i>ada').replace("name: ada", "name: <i>ada"))
        path.write_text(path.read_text().replace("agent/ada/", "agent/<i>ada/"))
    page = page_of(run)
    assert "i" not in {tag for tag, _ in page.tags}
    assert "<i>ada" in page.words


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("eval", "There is no evaluation"),
        ("metrics.jsonl", "no training step has been logged"),
        ("config.yaml", "There is no config.yaml"),
        ("eval/step_000040/summary.json", "eval/step_000040 has no readable summary.json"),
        ("eval/step_000000/debates.jsonl", "An evaluation has no debates.jsonl"),
        ("transcripts", "evaluation, step 40"),
    ],
)
def test_what_is_missing_is_said(make_run: MakeRun, gone: str, said: str) -> None:
    run = make_run()
    path = run / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert said in page_of(run).words


def test_without_any_debates_the_page_says_so(make_run: MakeRun) -> None:
    run = make_run()
    shutil.rmtree(run / "transcripts")
    for path in run.rglob("debates.jsonl"):
        path.unlink()
    assert "There are no transcripts in this run folder" in page_of(run).words


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "debates.jsonl", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "binary", "list", "deep"])
def test_damaged_files_give_a_report_not_an_exception(make_run: MakeRun, name: str, damage: str) -> None:
    run = make_run()
    (run / "state.json").write_text("{}")
    for path in list(run.rglob(name)) + list(run.rglob("step_*.jsonl")):
        data = path.read_bytes()
        made = {
            "cut": data[: len(data) // 2 + 7],
            "empty": b"",
            "binary": b"\x00\xff\xfe" * 50,
            "list": b"[1, 2]\n",
            "deep": b"[" * 100_000,
        }
        path.write_bytes(made[damage])
    page_of(run)


def test_values_of_the_wrong_type_are_left_out(make_run: MakeRun) -> None:
    run = make_run()
    path = run / "eval/step_000040/summary.json"
    summary = json.loads(path.read_text())
    summary |= {"accuracy": {"ada": ["x", None, True], "ben": 3}, "flips": 1, "cost": "much", "uncertainty": []}
    summary |= {"n_problems": "many", "sampling": None, "mean_accuracy": None, "decision_accuracy": {}}
    path.write_text(json.dumps(summary))
    row = {"problem_id": 1, "agents": 2, "turns": [[3, {"agent": None, "text": 5, "reward": "x"}], None], "cost": 1}
    (run / "eval/step_000040/debates.jsonl").write_text(json.dumps(row) + "\n")
    page_of(run)


def test_nan_metrics_are_gaps(make_run: MakeRun) -> None:
    run = make_run()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({k: v if k == "step" else float("nan") for k, v in row.items()}) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    words = page_of(run).words
    assert "nan" not in words.lower()
    assert "No figures of the update have been logged" in words


def test_an_evaluation_alone_is_a_run_too(make_run: MakeRun, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(make_run() / "eval/step_000040", alone)
    words = page_of(alone).words
    assert "mean accuracy" in words
    assert "is " + percent(json.loads((alone / "summary.json").read_text())["mean_accuracy"][-1]) in words


def test_a_refused_decomposition_gives_its_reason(make_run: MakeRun) -> None:
    run = make_run()
    for path in run.rglob("summary.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "uncertainty": {"refused": "one rollout only"}}))
    assert "Not measured: one rollout only" in page_of(run).words


def test_a_scripted_engine_is_named_at_the_top(make_run: MakeRun) -> None:
    run = make_run()
    text = (run / "config.yaml").read_text()
    assert "Scripted engine" not in page_of(run).words
    (run / "config.yaml").write_text(text.replace("backend: transformers", "backend: scripted"))
    assert "Scripted engine" in page_of(run).words


def test_evaluations_over_training_appear_from_three_on(make_run: MakeRun) -> None:
    assert "Evaluation over training" not in page_of(make_run(name="two")).words
    assert "Evaluation over training" in page_of(make_run(name="three", evaluated=(0, 20, 40))).words


def test_folders_that_are_no_run_are_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "notes.txt")


def test_a_report_replaces_the_old_one_and_leaves_no_leftovers(make_run: MakeRun) -> None:
    run = make_run()
    (run / "report.html").write_text("old")
    assert write_report(run) == run / "report.html"
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert not list(run.glob(".*"))


def test_long_runs_and_long_texts_stay_small_and_fast(make_run: MakeRun) -> None:
    run = make_run(steps=1000, evaluated=(0, 1000))
    path = run / "transcripts/step_001000.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row["turns"][0][0]["text"] = "x" * 5_000_000
    path.write_text(json.dumps(row) + "\n")
    start = time.monotonic()
    page = page_of(run)
    assert time.monotonic() - start < 20
    assert len(page.source) < 1_500_000
    assert "4,996,000 characters left out" in page.words


def test_examples_show_every_kind_before_any_kind_twice() -> None:
    rows = [
        _row(first, last)
        for first, last in [("11", "11")] * 5 + [("00", "11"), ("11", "00"), ("01", "01"), ("00", "00")]
    ]
    kinds = [one.outcome for one in choose(rows, 5, "here")]
    assert sorted(kinds) == sorted(OUTCOMES[kind] for kind in ("corrected", "spoiled", "split", "right", "wrong"))
    assert [one.outcome for one in choose(rows, 7, "here")].count(OUTCOMES["right"]) == 3


def _row(first: str, last: str) -> dict[str, Any]:
    turns = [[{"agent": str(i), "correct": ok == "1"} for i, ok in enumerate(turn)] for turn in (first, last)]
    return {"problem_id": "p", "agents": ["0", "1"], "turns": turns}


def test_ungraded_and_failed_debates_are_of_no_kind() -> None:
    ungraded = _row("11", "11")
    ungraded["turns"][1][0]["correct"] = None
    assert outcome(ungraded) == "other"
    assert outcome({**_row("11", "11"), "error": "broke"}) == "other"
    assert outcome({"turns": []}) == "other"


def test_places_are_shared_evenly_as_far_as_sizes_allow() -> None:
    assert share_out(12, [20, 20, 20]) == [4, 4, 4]
    assert share_out(12, [2, 20, 20]) == [2, 5, 5]
    assert share_out(12, [3, 1]) == [3, 1]
    assert share_out(12, []) == []


def test_a_run_is_read_with_its_agents_in_the_recipes_order(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert run.agents == ("ada", "ben")
    assert run.notes == []
    assert [one.step for one in run.evaluations] == [0, 40]


def test_colours_contrast_in_light_and_dark() -> None:
    css = (Path(report.__file__).parent / "templates/report.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")[:2]
    for block in (light, dark):
        hue = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        pairs = [("ink", "paper", 7), ("quiet", "paper", 4.5), ("quiet", "sheet", 4.5), ("quiet", "grid", 4.5)]
        pairs += [("link", "paper", 4.5), ("good", "good-bg", 4.5), ("bad", "bad-bg", 4.5), ("note", "note-bg", 4.5)]
        pairs += [(f"c{i}", "paper", 3) for i in range(9)]
        for front, back, least in pairs:
            assert _contrast(hue[front], hue[back]) >= least, (front, back)


def _contrast(a: str, b: str) -> float:
    """WCAG 2.1 contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)
