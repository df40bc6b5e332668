"""Model folders out of runs: what is in them, what the card says, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from making import tiny_folder

from umad.cli import main
from umad.records import UserError
from umad.runs import export as module
from umad.runs.export import export, licence_of, origin

RECIPE = """
name: small
seed: 3
agents:
  - {{name: a, model: {root}/qwen2}}
  - {{name: frozen, model: {root}/qwen3, trainable: false}}
debate: {{style: compact}}
sampling: {{max_tokens: 8}}
training: {{steps: 2, problems_per_step: 1, group_size: 2}}
data: {{train: {{path: {root}/train.jsonl}}}}
checkpoints: {{every: 1}}
"""


def umad(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    tiny_folder(root / "qwen2", "qwen2")
    tiny_folder(root / "qwen3", "qwen3", seed=1)
    (root / "qwen2/README.md").write_text("---\nlicense: mit\n---\n# A base\n")
    (root / "train.jsonl").write_text(json.dumps({"id": "p", "problem": "1+1=?", "answer": "2"}) + "\n")
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    assert umad("train", root / "recipe.yaml", f"output={root}/run") == 0
    return root / "run"


def evaluation(run: Path, step: int, right: float) -> None:
    """The part of a summary that the card and `best` read."""
    folder = run / f"eval/step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "agents": ["a", "frozen"],
        "n_problems": 40,
        "accuracy": {"a": [0.25, right], "frozen": [0.1, 0.1]},
        "accuracy_ci": {"a": [[0.125, 0.375], [right - 0.1, right + 0.1]], "frozen": [[0, 0.2], [0, 0.2]]},
        "decision_accuracy": right,
        "decision_accuracy_ci": [right - 0.1, right + 0.1],
        "sampling": {"accuracy": {"temperature": 0.6, "top_p": 0.95}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def front_matter(folder: Path) -> dict[str, Any]:
    head: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    return head


def test_the_folder_loads_and_its_card_says_what_it_is(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    to = tmp_path / "deep" / "model"
    assert umad("export", run, "--agent", "a", "--to", to) == 0
    source = run / "checkpoints/step_000002/a"
    assert (to / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    AutoModelForCausalLM.from_pretrained(to)
    assert AutoTokenizer.from_pretrained(to).chat_template
    assert [path.name for path in to.parent.iterdir()] == ["model"], "nothing else is left behind"
    head = front_matter(to)
    assert head["license"] == "mit"
    assert "base_model" not in head, "a folder here is no name on the Hub"
    assert {"umad", "reinforcement-learning"} <= set(head["tags"])
    text = (to / "README.md").read_text()
    assert "| seed | 3 |" in text
    assert "| steps | 2 |" in text
    assert "a debate with frozen" in text
    assert "Step 2 was not evaluated." in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].removesuffix("```\n"))
    assert recipe["training"]["group_size"] == 2


def test_the_step_is_chosen_and_its_own_figures_are_shown(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    evaluation(copied, 1, 0.75)
    evaluation(copied, 2, 0.5)
    assert export(copied, "a", str(tmp_path / "best"), "best") == str(tmp_path / "best")
    text = (tmp_path / "best/README.md").read_text()
    assert "| steps | 1 |" in text
    assert "Accuracy on 40 problems, with 95% intervals" in text
    assert "| 2 | 0.750 [0.650, 0.850] |" in text
    export(copied, "a", str(tmp_path / "two"), "2")
    assert "| 2 | 0.500 [0.400, 0.600] |" in (tmp_path / "two/README.md").read_text()
    evaluation(copied, 0, 0.9)
    export(copied, "a", str(tmp_path / "again"), "best")  # the start was better, and has no checkpoint
    assert "0.900" not in (tmp_path / "again/README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", "zoe"], "there is no agent 'zoe' in this run, only a, frozen"),
        (["--agent", "frozen"], "'frozen' was not trained here (trainable: false)"),
        (["--agent", "a", "--step", "7"], "has no checkpoint '7'; there are 1, 2 (or 'best')"),
        (["--agent", "a", "--step", "best"], "has no evaluation"),
    ],
)
def test_what_is_not_there_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert umad("export", run, "--to", tmp_path / "x", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_run_and_no_complete_checkpoint_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        export(tmp_path, "a", str(tmp_path / "x"))
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    for folder in (copied / "checkpoints").iterdir():
        (folder / "a/model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="no complete checkpoint"):
        export(copied, "a", str(tmp_path / "x"))


def test_a_folder_that_is_taken_is_left_alone_unless_forced(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "taken"
    to.mkdir()
    export(run, "a", str(to))  # empty is free
    (to / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty.*--force"):
        export(run, "a", str(to))
    assert (to / "mine.txt").exists()
    export(run, "a", str(to), force=True)
    assert not (to / "mine.txt").exists()
    assert (to / "README.md").is_file()
    with pytest.raises(UserError, match="is a file"):
        export(run, "a", str(to / "README.md"), force=True)


def test_a_copy_that_fails_leaves_what_was_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "taken"
    export(run, "a", str(to))
    (to / "mine.txt").write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.shutil, "copytree", full)
    with pytest.raises(UserError, match="No space left"):
        export(run, "a", str(to), force=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_force_deletes_nothing_but_an_exported_model(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    for to in (copied, tmp_path, copied / "checkpoints", tmp_path / "home"):
        with pytest.raises(UserError, match="does not delete"):
            export(copied, "a", str(to), force=True)
    assert (copied / "config.yaml").exists()
    assert (tmp_path / "home" / "thesis.txt").exists()


class Hub:
    """Stands in for the Hub: keeps what it is given, or fails as the Hub does."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}

    def create_repo(self, repo_id: str, **settings: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.made = {"repo_id": repo_id, **settings}
        return type("Url", (), {"repo_id": f"me/{repo_id}"})

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.made |= {"uploaded": repo_id, "message": commit_message}
        root = Path(folder_path)
        self.files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_repository_gets_the_folder_and_the_card(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    assert export(run, "a", "hub:small-a", "1") == "https://huggingface.co/me/small-a"
    assert hub.made["private"] is True
    assert hub.made["exist_ok"] is False
    assert hub.made["uploaded"] == "me/small-a"
    source = run / "checkpoints/step_000001/a"
    for path in source.iterdir():
        assert hub.files[path.name] == path.read_bytes()
    assert b"| steps | 1 |" in hub.files["README.md"]
    assert not (source / "README.md").exists()
    with pytest.raises(UserError, match="no name on the Hub"):
        export(run, "a", "hub:a/b/c")


def http_error(status: int) -> Exception:
    from types import SimpleNamespace

    from huggingface_hub.errors import HfHubHTTPError

    error = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(error, f"{status} from the Hub")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
    return error


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [(401, 2, "hf auth login"), (403, 2, "may not write"), (409, 2, "is there already"), (500, 1, "the Hub refused")],
)
def test_what_the_hub_refuses_is_said(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: int,
    message: str,
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(http_error(status)))
    assert umad("export", run, "--agent", "a", "--to", "hub:me/x") == code
    assert message in capsys.readouterr().err


def test_no_network_and_no_login_are_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalTokenNotFoundError

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(LocalTokenNotFoundError("no token")))
    assert umad("export", run, "--agent", "a", "--to", "hub:me/x") == 2
    assert "not logged in" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(ConnectionError("nobody there")))
    assert umad("export", run, "--agent", "a", "--to", "hub:me/x") == 1
    assert "cannot be reached (nobody there)" in capsys.readouterr().err


def test_the_base_is_found_through_checkpoints_of_other_runs(run: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    start = run / "checkpoints/step_000002/a"
    (later / "config.yaml").write_text(f"name: later\nagents: [{{name: a, model: {start}}}]\n")
    assert origin(str(later / "checkpoints/step_000001/a")) == str(run.parent / "qwen2")
    assert origin("some/name") == "some/name"


def test_licences_are_told_or_said_to_be_unknown(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert licence_of(str(run.parent / "qwen2")) == "mit"
    assert licence_of(str(run.parent / "qwen3")) == "unknown"
    assert licence_of("tiny:qwen2") == "apache-2.0"
    assert licence_of("nobody/nothing") == "unknown"  # no network here
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert licence_of(str(tmp_path)) == "unknown"
