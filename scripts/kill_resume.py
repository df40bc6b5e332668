"""Kills training runs with SIGKILL at random moments, resumes them, and compares how they end with a run that nobody stopped.

    python scripts/kill_resume.py                            # 20 kills, 6 of them inside a checkpoint's writing
    python scripts/kill_resume.py --kills 4 --in-save 2 --processes 2 --config recipes/accelerate/zero2.yaml

Prints a Markdown table (docs/reliability.md holds one) and fails where any resumed run does not end bit for bit like the
uninterrupted one: weights, optimiser states, random states, the sampler's position, metrics (but for times), transcripts,
rollouts and evaluations are compared. For kills inside a checkpoint's writing the writer is slowed down (every sync of a file
takes longer), and it is looked at afterwards whether the half-written folder was there when the process died.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOW = """
import time, umad.learning.checkpoint as checkpoint
sync = checkpoint._sync
def slow(path):
    time.sleep({delay})
    sync(path)
checkpoint._sync = slow
"""
RUN = "from umad.cli import main\nmain()\n"
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny_umad.yaml"
SETTINGS = (
    *(
        "training.steps=5",
        "training.problems_per_step=6",
        "sampling.max_tokens=48",
        "checkpoints.every=1",
        "checkpoints.keep=3",
    ),
    *(
        "evaluation.every=3",
        "evaluation.before=false",
        "evaluation.accuracy.problems=8",
        "evaluation.decomposition.problems=0",
    ),
    *("evaluation.bootstrap=50", "logging.wandb='off'", "training.updates_per_batch=2", "training.warmup_steps=2"),
)


@dataclass(frozen=True)
class Launch:
    """How the runs are started."""

    processes: int
    config: Path | None
    recipe: Path
    settings: tuple[str, ...]

    def command(self, out: Path, *, resume: bool, delay: float = 0.0) -> list[str]:
        code = (SLOW.format(delay=delay) if delay else "") + RUN
        script = out.with_name(f"{out.name}.py")
        script.write_text(code)
        arguments = ["train", str(self.recipe), f"output={out}", *self.settings, *(["--resume"] if resume else [])]
        if self.processes == 1:
            return [sys.executable, str(script), *arguments]
        return [
            *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(self.processes)),
            *("--main_process_port", "0", "--config_file", str(self.config), str(script), *arguments),
        ]

    def start(self, out: Path, **settings: Any) -> subprocess.Popen[bytes]:
        log = out.with_name(f"{out.name}.log").open("ab")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        command = self.command(out, **settings)
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def finish(process: subprocess.Popen[bytes], out: Path) -> None:
    if process.wait() != 0:
        raise SystemExit(f"{out}: exit code {process.returncode}, see {out.with_name(out.name + '.log')}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and all that it started: nothing gets to clean up."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- what a run left --------------------------------------------------------------------------------------------------


def contents(run: Path) -> dict[str, str]:
    """A hash of everything that a run leaves and that must be the same again, by name."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_dir() or name.split("/")[0] not in (
            "checkpoints",
            "transcripts",
            "rollouts",
            "eval",
            "metrics.jsonl",
        ):
            continue
        found[name] = _digest(path)
    return found


def _digest(path: Path) -> str:
    if path.suffix == ".pt":
        import torch

        return _hash(repr(sorted(_flat(torch.load(path, weights_only=True)))))
    if path.name == "metrics.jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "memory/"))} for row in rows]
        return _hash(json.dumps(kept, sort_keys=True))
    if path.name in ("summary.json", "state.json", "settings.json", "complete.json"):
        value = json.loads(path.read_text())
        value.pop("seconds", None)
        value.pop("files", None)  # sizes: those of pickled tensors depend on nothing that matters
        value.get("recipe", {}).pop("output", None) if isinstance(value.get("recipe"), dict) else None
        return _hash(json.dumps(value, sort_keys=True))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if hasattr(value, "numpy"):
        yield prefix, _hash(value.contiguous().numpy().tobytes() + repr(value.shape).encode())
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}.{key}")
    else:
        yield prefix, repr(value)


def _hash(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


# --- one kill ---------------------------------------------------------------------------------------------------------


def half_written(run: Path) -> list[Path]:
    """Checkpoints that were begun, hold something, and were not renamed."""
    return [part for part in (run / "checkpoints").glob(".step_*.part") if any(p.is_file() for p in part.rglob("*"))]


def complete(run: Path) -> int | None:
    from umad.learning.checkpoint import checkpoint_step, latest_checkpoint

    found = latest_checkpoint(run)
    return None if found is None else checkpoint_step(found)


def wait_for_save(process: subprocess.Popen[bytes], run: Path, number: int) -> bool:
    """Until the `number`-th save (1-based) has written something; False if the run ended before."""
    seen: set[str] = set()
    while process.poll() is None:
        seen |= {part.name for part in half_written(run)}
        if len(seen) >= number:
            return True
        time.sleep(0.005)
    return False


def one(launch: Launch, run: Path, rng: random.Random, whole: float, in_save: bool) -> dict[str, Any]:
    """Starts a run, kills it, looks at what is left, and resumes it to its end."""
    begun = time.perf_counter()
    process = launch.start(run, resume=False, delay=0.15 if in_save else 0.0)
    if in_save:
        if not wait_for_save(process, run, rng.randint(1, 4)):
            raise SystemExit(f"{run}: ended before it could be killed, see its log")
        time.sleep(rng.uniform(0.0, 1.5))
    else:
        time.sleep(rng.uniform(0.3, 0.95) * whole)
    kill(process)
    row = {"after": time.perf_counter() - begun, "half": [p.name for p in half_written(run)], "complete": complete(run)}
    finish(launch.start(run, resume=True), run)
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--in-save", type=int, default=6, help="how many of them inside a checkpoint's writing")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--config", type=Path, default=RECIPE.parent / "accelerate" / "ddp.yaml")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kill_resume"))
    parser.add_argument("settings", nargs="*", help="settings of the recipe, after those of this script")
    return parser.parse_args()


def main() -> None:
    options = parse()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    launch = Launch(options.processes, options.config, options.recipe, (*SETTINGS, *options.settings))
    # the reference is timed without making the warm start, so it is run twice; the two must be the same too
    finish(launch.start(options.out / "first", resume=False), options.out / "first")
    begun = time.perf_counter()
    finish(launch.start(options.out / "reference", resume=False), options.out / "reference")
    whole = time.perf_counter() - begun
    expected = contents(options.out / "reference")
    rng = random.Random(options.seed)
    print("| kill | after, s | half-written checkpoint | newest whole one | differs after resuming |")
    print("|---|---|---|---|---|")
    bad = in_save = 0
    for number in range(-1, options.kills):
        run = options.out / ("first" if number < 0 else f"kill_{number:02d}")
        row = {"after": 0.0, "half": [], "complete": complete(run)} if number < 0 else None
        if row is None:
            row = one(launch, run, rng, whole, number < options.in_save)
            in_save += bool(row["half"])
        found = contents(run)
        differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        bad += bool(differ)
        what = "none (run again)" if number < 0 else str(number + 1)
        half = ", ".join(row["half"]) or "-"
        whole_one = "-" if row["complete"] is None else f"step {row['complete']}"
        result = "nothing" if not differ else f"{len(differ)} files: " + ", ".join(differ[:3])
        print(f"| {what} | {row['after']:.1f} | {half} | {whole_one} | {result} |", flush=True)
        if not differ:
            shutil.rmtree(run)
    print(f"\n{options.kills} kills, {in_save} of them inside a checkpoint's writing; {bad} runs ended otherwise")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
