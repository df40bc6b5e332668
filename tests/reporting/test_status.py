from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from umad.records import UserError
from umad.reporting.sinks import Sinks, process_birth, this_process
from umad.reporting.status import status

MakeRun = Callable[..., Path]


def note(run: Path, **state: object) -> None:
    (run / "state.json").write_text(json.dumps({**this_process(), "ended": None, **state}))


def test_a_run_at_its_last_step_is_finished(make_run: MakeRun) -> None:
    run = make_run()
    note(run, ended=time.time())
    found = status(run)
    assert (found["state"], found["step"], found["steps"]) == ("finished", 40, 40)
    assert found["seconds_left"] is None
    assert found["evaluations"] == [0, 40]
    assert found["last"]["step"] == 40


def test_a_run_whose_process_lives_is_running_and_its_time_left_follows_its_pace(make_run: MakeRun) -> None:
    run = make_run(steps=30, evaluated=(0,))
    note(run)
    found = status(run)
    assert found["state"] == "running"
    pace = found["seconds_per_step"]
    assert 9 * pace <= found["seconds_left"] <= 10 * pace


def test_a_run_whose_process_was_killed_is_stopped(make_run: MakeRun) -> None:
    run = make_run(steps=30)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note(run, pid=process.pid, born=process_birth(process.pid))
    assert status(run)["state"] == "running"
    process.kill()
    while process_birth(process.pid) is not None:
        time.sleep(0.01)
    assert status(run)["state"] == "stopped", "a process that has ended but was not waited for does not run"
    process.wait()
    assert status(run)["state"] == "stopped"


def test_a_reused_process_number_is_not_taken_for_the_run(make_run: MakeRun) -> None:
    run = make_run(steps=30)
    note(run, pid=os.getpid(), born=-1)
    assert status(run)["state"] == "stopped"


def test_a_run_on_another_machine_is_unknown(make_run: MakeRun) -> None:
    run = make_run(steps=30)
    note(run, host="elsewhere.example")
    found = status(run)
    assert found["state"] == "unknown"
    assert found["seconds_left"] is not None


def test_the_number_of_steps_of_epochs_comes_from_the_run_itself(make_run: MakeRun) -> None:
    run = make_run(steps=30)
    (run / "config.yaml").write_text("name: r\ntraining: {epochs: 2}\n")
    note(run, steps=60)
    assert status(run)["steps"] == 60


def test_a_run_that_was_resumed_for_longer_and_killed_is_not_finished(make_run: MakeRun) -> None:
    run = make_run(steps=30)
    (run / "config.yaml").write_text("name: r\ntraining: {steps: 30}\n")
    note(run, steps=60, ended=time.time())
    found = status(run)
    assert (found["state"], found["step"], found["steps"]) == ("stopped", 30, 60)


def test_sinks_mark_a_run_as_running_and_then_as_stopped(tmp_path: Path, make_run: MakeRun) -> None:
    from umad.recipe_io import load_recipe

    run = make_run(steps=30)
    with Sinks(run, load_recipe(run / "config.yaml"), steps=40):
        assert status(run)["state"] == "running"
    assert status(run)["state"] == "stopped"


def test_a_run_that_has_only_begun_has_a_status(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: r\n")
    found = status(tmp_path)
    assert (found["state"], found["step"], found["steps"], found["last"]) == ("unknown", 0, None, {})
    json.dumps(found, allow_nan=False)


def test_a_folder_that_is_no_run_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        status(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        status(tmp_path / "nowhere")


def test_a_folder_whose_digits_are_no_number_is_no_checkpoint(make_run: MakeRun) -> None:
    run = make_run()
    (run / "checkpoints" / "step_²").mkdir(parents=True)
    assert all(isinstance(step, int) for step in status(run)["checkpoints"])
