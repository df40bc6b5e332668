"""Run by several processes under `accelerate launch`: updates policies on recorded rollouts, each rank with its own samples.

python ranks.py TASK.json     see `Task` for what it does; rank 0 writes weights and metrics to its folder
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Task:
    out: str
    models: dict[str, str]
    """Folder of each agent's model."""
    rollouts: str
    """A file as `umad train` records it."""
    updates: int = 3
    training: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    shares: list[float] | None = None
    """Each rank's share of the samples; equal ones by default. 0: it has none."""
    deaf: int | None = None
    """The rank whose gradient is thrown away."""
    poison: int | None = None
    """The update in which rank 1's loss is not a number."""
    old: bool = False
    """Give old log-probabilities, scored before the first update."""
    dtype: str = "float32"
    save: bool = False
    """Save a checkpoint after the second update, and go on from it with fresh policies."""

    def write(self) -> Path:
        path = Path(self.out) / "task.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return path


def samples_of_file(path: str) -> list[Any]:
    from umad.debate.recorded import read_rollouts
    from umad.records import Sample

    rng = np.random.default_rng(0)
    samples = []
    for row in read_rollouts(Path(path)):
        advantage = float(rng.normal()) if rng.random() > 0.2 else 0.0
        samples.append(
            Sample(
                agent=row["agent"],
                group=(row["instance"], row["agent"], row["turn"]),
                prompt_ids=np.array(row["prompt_ids"], np.int32),
                completion_ids=np.array(row["completion_ids"], np.int32),
                logprobs=np.array(row["logprobs"], np.float32),
                reward=1.0,
                advantage=advantage,
                in_loss=bool(rng.random() > 0.1),
            )
        )
    return samples


def part(samples: list[Any], shares: list[float] | None, rank: int, size: int) -> list[Any]:
    weights = np.array(shares if shares is not None else [1.0] * size, float)
    ends = np.round(np.cumsum(weights) / weights.sum() * len(samples)).astype(int)
    return samples[([0, *ends])[rank] : ends[rank]]


def main(task: Task, world: Any = None) -> None:
    import torch
    from safetensors.torch import save_file

    from umad.config import LossConfig, TrainingConfig
    from umad.engines.models import load_model, load_tokenizer
    from umad.learning.checkpoint import load_checkpoint, save_checkpoint
    from umad.learning.policy import Policy
    from umad.learning.world import World

    world = world or World()
    training = TrainingConfig.model_validate({"steps": task.updates, "micro_batch_tokens": 600, **task.training})
    loss = LossConfig.model_validate(task.loss)
    every = samples_of_file(task.rollouts)

    def fresh() -> dict[str, Policy]:
        policies = {}
        for name, folder in task.models.items():
            model = load_model(folder).to(getattr(torch, task.dtype))
            policies[name] = Policy(
                name, model, training, loss, 0.8, 0, task.updates, world=world, exact=task.exact, max_tokens=64
            )
        return policies

    policies = fresh()
    own = {name: part([s for s in every if s.agent == name], task.shares, world.rank, world.size) for name in policies}
    old = {name: [s.logprobs for s in p.score(own[name])] for name, p in policies.items()} if task.old else {}
    rows = []
    for update in range(task.updates):
        row: dict[str, float] = {}
        for name, policy in policies.items():
            backward = policy.parallel.backward
            if world.rank == task.deaf:
                policy.parallel.backward = lambda value, last, run=backward: run(value * 0.0, last)
            elif update == task.poison and world.rank == world.size - 1:
                policy.parallel.backward = lambda value, last, run=backward: run(value * float("nan"), last)
            metrics = policy.update(own[name], old.get(name))
            policy.parallel.backward = backward
            assert policy.finite()
            row |= {f"{name}/{key}": value for key, value in metrics.items()}
        rows.append(row)
        if task.save and update == 1:
            tokenizers = {name: load_tokenizer(folder) for name, folder in task.models.items()}
            where = save_checkpoint(Path(task.out), update, policies, tokenizers, {"x": 1}, world=world)
            policies = fresh()
            assert load_checkpoint(where, policies, world=world)["x"] == 1
    weights = {f"{name}/{key}": tensor.clone() for name, policy in policies.items() for key, tensor in policy.weights()}
    scores = {name: [s.logprobs.tolist() for s in policy.score(own[name])] for name, policy in policies.items()}
    everything = world.gather(scores)
    if world.main:
        save_file(weights, Path(task.out) / "weights.safetensors")
        together = {name: [row for part in everything for row in part[name]] for name in scores}
        kinds = sorted({policy.parallel.kind for policy in policies.values()})
        engines = [getattr(policy.parallel, "engine", None) for policy in policies.values()]
        clips = [[engine.gradient_clipping(), engine.optimizer.clip_grad] for engine in engines if engine is not None]
        modules = [policy.parallel.module for policy in policies.values()]
        buffers = sorted({str(b.dtype) for module in modules for _, b in module.named_buffers()})
        found = {"buffers": buffers, "rows": rows, "scores": together, "kinds": kinds, "clips": clips}
        (Path(task.out) / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    from umad.learning.world import start_world

    ranks = start_world()
    for argument in sys.argv[1:]:
        main(Task(**json.loads(Path(argument).read_text())), ranks)
    ranks.close()
