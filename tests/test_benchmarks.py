"""Benchmarks run at a small size, and what they compare with computes the same."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("trl", reason="trl is not installed (pip install 'umad[trl]')")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("umad.reporting.progress._silent", True)
    return importlib.import_module("grpo")


@pytest.mark.parametrize(("loss", "tailed"), [("dapo", False), ("dapo", True), ("grpo", True), ("dr_grpo", True)])
def test_loss_and_gradients_are_those_of_trl(grpo: Any, tmp_path: Path, loss: str, tailed: bool) -> None:
    sides = importlib.import_module("grpo_sides")
    setting = sides.Setting(
        hidden=32, layers=2, cap=24, prompts=3, group=4, loss=loss, beta=0.1, micro_batch_tokens=500,
        end_probability=0.15 if tailed else sides.NEVER,
    )  # fmt: skip
    model = sides.make_model(tmp_path / "model", setting)
    with sides.our_trainer(model, setting) as trainer:
        trl = sides.trl_trainer(trainer, model, setting, tmp_path)
        found = sides.compare_losses(trainer, trl, 1)
    # neither is a comparison of nothing with nothing
    assert found["clipped"] > 0.001
    assert found["kl"] > 1e-3
    assert abs(found["our_loss"]) > 1e-4
    assert found["loss_difference"] < 1e-4
    # TRL adds 1e-4 to the rewards' deviation, we 1e-6
    assert found["gradient_difference"] < 1e-3


def test_the_comparison_with_trl_sees_another_loss(grpo: Any, tmp_path: Path) -> None:
    sides = importlib.import_module("grpo_sides")
    setting = sides.Setting(hidden=32, layers=2, cap=24, prompts=3, group=4, end_probability=0.15)
    model = sides.make_model(tmp_path / "model", setting)
    with sides.our_trainer(model, setting) as trainer:
        trl = sides.trl_trainer(trainer, model, setting, tmp_path)
        trl.beta = 0.02
        found = sides.compare_losses(trainer, trl, 1)
    assert found["loss_difference"] > 1e-5


def test_the_benchmark_beside_trl_runs(grpo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = grpo.main(
        ["--hidden", "32", "--layers", "2", "--cap", "32", "--prompts", "4", "--group", "4", "--rounds", "1"]
    )
    assert [row["regime"] for row in rows] == ["equal lengths", "long-tailed"]
    equal, tailed = rows
    assert equal["response_tokens"] == equal["longest"] == 32
    assert tailed["response_tokens"] < 16
    for row in rows:
        assert row["ratio"]["step"] > 0
        for side in ("ours", "trl"):
            seconds = row[side]
            assert min(seconds[part] for part in ("generate", "update", "step")) > 0
            assert sum(seconds[part] for part in ("generate", "update", "push", "other")) == pytest.approx(
                seconds["step"]
            )
    assert "steps/s" in capsys.readouterr().out
