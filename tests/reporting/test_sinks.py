from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from umad.config import Recipe
from umad.records import UserError
from umad.reporting import sinks
from umad.reporting.sinks import MetricsLog, Sinks, cut_files, read_metrics


def recipe(**logging: str) -> Recipe:
    return Recipe.model_validate({"name": "t", "agents": [{"name": "a", "model": "m"}], "logging": logging})


def test_rows_can_be_read_while_the_log_is_open(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"agent/a/reward": 0.5})
    assert read_metrics(log.path) == [{"step": 1, "agent/a/reward": 0.5}]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"x": math.nan, "y": math.inf, "z": 1.0})
    text = log.path.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "x": None, "y": None, "z": 1.0}


def test_steps_must_rise_also_over_reopening(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(3, {})
    with pytest.raises(ValueError, match="steps must rise"):
        log.append(3, {})
    log.close()
    with pytest.raises(ValueError, match="steps must rise"):
        MetricsLog(log.path).append(2, {})


def test_nested_metrics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'agent' holds a dict"):
        MetricsLog(tmp_path / "metrics.jsonl").append(1, {"agent": {"a": 1}})


def test_cut_keeps_the_bytes_of_earlier_rows_and_appending_goes_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append(step, {"x": step / 3})
    whole = log.path.read_bytes()
    assert log.cut(3) == 2
    assert log.path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    for step in (4, 5):
        log.append(step, {"x": step / 3})
    assert log.path.read_bytes() == whole


@pytest.mark.parametrize("tail", [b'{"step": 2, "x": 0.', b'{"step": 2, "x": "\xe2\x82', b"\0\0\0"])
def test_a_half_written_last_line_is_dropped_on_opening(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    log = MetricsLog(path)
    log.append(2, {"x": 1})
    assert read_metrics(path) == [{"step": 1}, {"step": 2, "x": 1}]


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    MetricsLog(path).append(3, {})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        MetricsLog(path)


def test_cut_files_removes_what_is_after_the_step_and_leftovers_only(tmp_path: Path) -> None:
    keep = ["transcripts/step_000003.jsonl", "rollouts/step_000003.parquet", "eval/step_000003/summary.json"]
    keep += ["eval/notes.txt", "checkpoints/step_000009/config.json", "transcripts/step_x.jsonl"]
    gone = ["transcripts/step_000004.jsonl", "rollouts/step_000010.parquet", "eval/step_000004/summary.json"]
    gone += ["transcripts/.step_000002.jsonl.77.part"]
    for name in keep + gone:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    cut_files(tmp_path, 3)
    assert [name for name in keep + gone if (tmp_path / name).exists()] == keep
    assert not (tmp_path / "eval/step_000004").exists()


def test_cut_files_of_a_folder_with_nothing_in_it_removes_nothing(tmp_path: Path) -> None:
    assert cut_files(tmp_path, 0) == []


def test_wandb_off_writes_no_wandb_folder(tmp_path: Path) -> None:
    with Sinks(tmp_path, recipe()) as all_sinks:
        all_sinks.log(1, {"x": 1})
    assert not (tmp_path / "wandb").exists()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1}]


def test_the_state_says_which_process_writes_and_when_it_ended(tmp_path: Path) -> None:
    with Sinks(tmp_path, recipe(), steps=7):
        state = json.loads((tmp_path / "state.json").read_text())
        assert state["steps"] == 7
        assert state["ended"] is None
        assert state["environment"]["Python"]
    assert json.loads((tmp_path / "state.json").read_text())["ended"] > 0


@pytest.fixture
def quiet_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb.teardown()  # the client reads the environment once per process


@pytest.mark.usefixtures("quiet_wandb")
def test_offline_runs_hold_rows_and_settings_and_a_resume_keeps_the_id(tmp_path: Path) -> None:
    with Sinks(tmp_path, recipe(wandb="offline", project="mine")) as first:
        first.log(1, {"agent/a/reward": 0.25, "agent/a/kl": None})
        first.log(2, {"agent/a/reward": 0.5})
    with Sinks(tmp_path, recipe(wandb="offline")) as second:
        second.cut(1)
        second.log(2, {"agent/a/reward": 0.75})
    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(runs) == 2
    assert len({path.name for path in runs}) == 1, "both parts have one run id"
    records = list(wandb_records(runs[0]))
    started = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (started.project, started.display_name) == ("mine", "t")
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["logging"]["project"] == "mine"
    assert [h for h, _ in histories(records)] == [1, 2]
    assert [row["agent/a/reward"] for _, row in histories(records)] == [0.25, 0.5]
    assert "agent/a/kl" not in histories(records)[0][1]
    assert histories(list(wandb_records(runs[1]))) == [(2, {"agent/a/reward": 0.75})]


@pytest.mark.usefixtures("quiet_wandb")
def test_environment_variables_win_over_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("WANDB_RUN_ID", "fixed1")
    (tmp_path / "elsewhere").mkdir()
    wandb.teardown()
    with Sinks(tmp_path / "run", recipe(wandb="online", project="mine")) as all_sinks:
        all_sinks.log(1, {"x": 1})
    (path,) = (tmp_path / "elsewhere").glob("wandb/offline-run-*/run-fixed1.wandb")
    run = next(r.run for r in wandb_records(path) if r.WhichOneof("record_type") == "run")
    assert run.project == "theirs"


@pytest.mark.usefixtures("quiet_wandb")
def test_online_without_a_key_warns_once_and_logs_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Sinks(tmp_path, recipe(wandb="online")) as all_sinks:
        all_sinks.log(1, {"x": 1})
        all_sinks.log(2, {"x": 2})
    said = capsys.readouterr().err
    assert said.count("no API key") == 1
    assert "wandb sync" in said
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_wandb")
def test_online_without_network_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    monkeypatch.setattr(sinks, "INIT_TIMEOUT", 2.0)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    with Sinks(tmp_path, recipe(wandb="online")) as all_sinks:
        all_sinks.log(1, {"x": 1})
    assert "logging offline" in capsys.readouterr().err
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1}]


@pytest.mark.usefixtures("quiet_wandb")
def test_a_client_that_fails_halfway_is_given_up_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Sinks(tmp_path, recipe(wandb="offline")) as all_sinks:
        all_sinks.log(1, {"x": 1})
        assert all_sinks._wandb is not None
        all_sinks._wandb._run.finish()
        for step in (2, 3):
            all_sinks.log(step, {"x": step})
    assert capsys.readouterr().err.count("warning: wandb") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def histories(records: list) -> list[tuple[int, dict[str, float]]]:
    """(step, row) of every history record, without the client's own keys."""
    found = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            found.append((record.history.step.num, {k: v for k, v in items.items() if not k.startswith("_")}))
    return found


def wandb_records(path: Path) -> Iterator:
    """Reads a .wandb file: a 7-byte header, then LevelDB's log format (32 KiB blocks of [crc, length, type, data])."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service writes the last records after the run's finish has returned
    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record
