"""Measuring a team: accuracy with few careful samples, uncertainty with many free ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from umad.config import EvaluationConfig
from umad.evaluation.summary import ACCURACY, DECOMPOSITION, summarise
from umad.records import (
    Debate,
    Problem,
    RunError,
    Sampling,
    UserError,
    atomic_writer,
    read_debates,
    to_json,
    write_jsonl,
)


class DebatesFor(Protocol):
    """Runs debates: `rollouts` of each problem, `turns` long. `label` names the purpose, so each part has its own noise.
    `mode` is `trajectory` or `shared_context`."""

    def __call__(
        self,
        problems: Sequence[Problem],
        rollouts: int,
        turns: int,
        sampling: Sampling,
        mode: str,
        label: str,
    ) -> list[Debate]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """`summary` is the content of `summary.json`; `debates` are those of both parts, marked in `sampling.part`."""

    summary: dict[str, Any]
    debates: list[Debate]


def evaluate(
    debates_for: DebatesFor,
    problems: Sequence[Problem],
    config: EvaluationConfig,
    *,
    turns: int | None = None,
    max_tokens: int | None = None,
    info: Mapping[str, Any] | None = None,
    seed: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Runs the accuracy part and the decomposition part, each on the first problems of the list, and summarises them.

    `turns` and `max_tokens` are the recipe's own, used where the evaluation section has none. `info` (step, protocol,
    checkpoint ...) goes into the summary. `seed` is the bootstrap's, by default the evaluation's. `progress` is told in
    words what starts.

    Raises UserError where there is nothing to measure, RunError where every debate of a part failed.
    """
    n_turns, longest = config.turns or turns, config.max_tokens or max_tokens
    if n_turns is None or longest is None:
        raise ValueError("evaluate needs turns and max_tokens, from the evaluation section or as arguments")
    if not problems:
        raise UserError("data.eval: there is no problem to evaluate on")
    accuracy, decomposition = config.accuracy, config.decomposition
    if not accuracy.problems and not decomposition.problems:
        raise UserError(
            "evaluation: accuracy.problems and decomposition.problems are both 0, so there is nothing to measure"
        )
    say = progress or (lambda text: None)
    debates: list[Debate] = []
    for label, part, mode in (
        (ACCURACY, accuracy, "trajectory"),
        (DECOMPOSITION, decomposition, decomposition.sampling),
    ):
        chosen = list(problems[: part.problems])
        if not chosen:
            continue
        say(f"{label}: {len(chosen)} problems x {part.rollouts} rollouts x {n_turns} turns")
        sampling = Sampling(longest, part.temperature, part.top_p, getattr(part, "top_k", 0))
        found = debates_for(chosen, part.rollouts, n_turns, sampling, mode, label)
        if all(debate.error is not None for debate in found):
            raise RunError(f"evaluation: all {len(found)} debates of the {label} part failed: {_first_error(found)}")
        debates += [_marked(debate, label, mode, sampling) for debate in found]
    say("statistics")
    bootstrap_seed = config.seed if seed is None else seed
    return Evaluation(summarise(debates, info=info, draws=config.bootstrap, seed=bootstrap_seed), debates)


def _first_error(debates: Sequence[Debate]) -> str:
    return next((debate.error for debate in debates if debate.error), "no debate came back")


def _marked(debate: Debate, part: str, mode: str, sampling: Sampling) -> Debate:
    return replace(debate, sampling={"mode": mode, **sampling.to_row(), **debate.sampling, "part": part})


def analyze(debates: Sequence[Debate], *, draws: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """The content of `uncertainty.json`: the decomposition (or `refused` with the reason), flips, agreement and accuracy.

    Debates that are not marked as part of an evaluation serve for both.
    """
    summary = summarise(debates, draws=draws, seed=seed)
    kept = (
        *("protocol", "agents", "turns", "n_problems", "n_debates", "accuracy", "accuracy_ci", "accuracy_n"),
        *(
            "mean_accuracy",
            "mean_accuracy_ci",
            "decision_accuracy",
            "decision_accuracy_ci",
            "agreement",
            "agreement_ci",
        ),
        *("flips", "unparsed", "truncated", "ungraded", "failed", "sampling", "bootstrap"),
    )
    return {"decomposition": summary["uncertainty"], **{key: summary[key] for key in kept}}


def write_evaluation(folder: str | Path, evaluation: Evaluation) -> None:
    """Writes `debates.jsonl`, then `summary.json`: where the summary stands, the evaluation is whole and its own."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)
    write_jsonl(folder / "debates.jsonl", (debate.to_row() for debate in evaluation.debates))
    with atomic_writer(summary) as file:
        file.write(json.dumps(json.loads(to_json(evaluation.summary)), indent=2, ensure_ascii=False) + "\n")


def read_evaluation(folder: str | Path) -> Evaluation:
    """Reads what `write_evaluation` wrote. UserError where it is not there or not whole."""
    folder = Path(folder)
    return Evaluation(read_summary(folder), read_debates(folder / "debates.jsonl"))


def read_summary(folder: str | Path) -> dict[str, Any]:
    """`summary.json` of an evaluation folder."""
    path = Path(folder) / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); is the evaluation finished?") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(summary).__name__}")
    return summary
