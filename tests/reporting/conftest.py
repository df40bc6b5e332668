"""An invented run folder, written through the project's own records and evaluation so that it has their exact form."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from umad.evaluation.evaluate import Evaluation, write_evaluation
from umad.evaluation.summary import summarise
from umad.recipe_io import dump_recipe, parse_recipe
from umad.records import Cost, Debate, Decision, Problem, Response, to_json, write_jsonl

AGENTS = ("ada", "ben")
RECIPE = """
name: invented
seed: 3
agents: [{name: ada, model: tiny:qwen2}, {name: ben, model: tiny:qwen3}]
debate: {turns: 3}
training: {steps: 40, group_size: 5}
data: {train: {name: arithmetic}}
"""


def debate(i: int, skill: float, rng: random.Random, *, part: str = "accuracy", rollout: int = 0) -> Debate:
    """One debate about a sum: agents are right by chance, more often at later turns."""
    a, b = 3 + i % 17, 5 + i % 11
    turns = []
    for t in range(3):
        turn = []
        for name in AGENTS:
            right = rng.random() < min(0.97, skill + 0.09 * t)
            answer = str(a + b if right else a + b + rng.randint(1, 3))
            turn.append(
                Response(
                    agent=name,
                    turn=t,
                    text=f"We add {a} and {b}.\n{a} + {b} = {answer}, so the answer is \\boxed{{{answer}}}.",
                    answer=answer,
                    key=answer,
                    correct=right,
                    prompt_tokens=30 + 20 * t,
                    completion_tokens=rng.randint(18, 40),
                    nll=round(rng.uniform(0.05, 0.9), 3),
                    reward=float(right) if part == "training" else None,
                    advantage=round(rng.gauss(0, 1), 3) if part == "training" else None,
                    weight=round(rng.uniform(0.6, 1.6), 3) if part == "training" else None,
                )
            )
        turns.append(tuple(turn))
    last = turns[-1][0]
    return Debate(
        problem=Problem(f"sum/{i}", f"What is {a} + {b}?", str(a + b)),
        protocol="mad",
        agents=AGENTS,
        turns=tuple(turns),
        rollout=rollout,
        sampling={"temperature": 0.6 if part == "accuracy" else 1.0, "top_p": 0.95, "part": part},
        decision=Decision(last.answer, last.correct, "majority"),
        cost=Cost(6, 300, 170, 12, 3),
    )


def evaluation(skill: float, seed: int) -> Evaluation:
    rng = random.Random(seed)
    debates = [debate(i, skill, rng) for i in range(60)]
    debates += [debate(i, skill, rng, part="decomposition", rollout=k) for i in range(8) for k in range(6)]
    return Evaluation(summarise(debates, draws=200), debates)


def metrics_row(step: int, rng: random.Random) -> dict[str, float]:
    row: dict[str, float] = {"step": step}
    gain = 1 - math.exp(-step / 15)
    for i, name in enumerate(AGENTS):
        row[f"agent/{name}/reward"] = 0.5 + 0.05 * i + 0.25 * gain + rng.gauss(0, 0.04)
        for t in range(3):
            row[f"agent/{name}/accuracy/turn_{t}"] = 0.45 + 0.05 * i + 0.07 * t + 0.25 * gain + rng.gauss(0, 0.05)
            row[f"agent/{name}/no_signal/turn_{t}"] = min(1, max(0, 0.3 + 0.2 * gain + rng.gauss(0, 0.05)))
        row[f"agent/{name}/loss"] = rng.gauss(0, 0.01)
        row[f"agent/{name}/grad_norm"] = abs(rng.gauss(0.4, 0.1))
        row[f"agent/{name}/lr"] = 5e-5
        row[f"agent/{name}/nll"] = 0.4 - 0.15 * gain + rng.gauss(0, 0.01)
        row[f"agent/{name}/truncated"] = 0.01
        row[f"agent/{name}/unparsed"] = 0.02
    phases = {"generate": 1.4, "grade": 0.05, "score": 0.1, "update": 0.7, "push": 0.02, "save": 0.01}
    row |= {f"time/{key}": value * rng.uniform(0.9, 1.2) for key, value in phases.items()}
    row["time/step"] = sum(row[f"time/{key}"] for key in phases) + 0.02
    row |= {"debate/calls": 240, "debate/completion_tokens": 6800, "debate/failed": 0}
    row["throughput/tokens_per_second"] = 6800 / row["time/step"]
    return row


@pytest.fixture(scope="session")
def invented(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[int, ...]], Path]:
    """Invented run folders, each made once; tests get copies."""

    @cache
    def build(steps: int, evaluated: tuple[int, ...]) -> Path:
        run = tmp_path_factory.mktemp("invented") / "run"
        (run / "transcripts").mkdir(parents=True)
        (run / "config.yaml").write_text(dump_recipe(parse_recipe(RECIPE)))
        rng = random.Random(1)
        (run / "metrics.jsonl").write_text(
            "".join(to_json(metrics_row(step, rng)) + "\n" for step in range(1, steps + 1))
        )
        for step in (1, steps):
            rows = [debate(i, 0.4 + step / 100, rng, part="training", rollout=i % 5).to_row() for i in range(20)]
            write_jsonl(run / "transcripts" / f"step_{step:06d}.jsonl", rows)
        for step in evaluated:
            write_evaluation(run / "eval" / f"step_{step:06d}", evaluation(0.45 + step / 200, step))
        return run

    return build


@pytest.fixture
def make_run(tmp_path: Path, invented: Callable[[int, tuple[int, ...]], Path]) -> Callable[..., Path]:
    """Writes an invented run folder; `steps` metrics rows, evaluations at the named steps."""

    def make(*, steps: int = 40, evaluated: tuple[int, ...] = (0, 40), name: str = "run") -> Path:
        return Path(shutil.copytree(invented(steps, evaluated), tmp_path / name))

    return make
