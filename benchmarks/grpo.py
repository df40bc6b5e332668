"""One single-agent GRPO step beside TRL's `GRPOTrainer`: steps per second, and whether both compute the same loss.

    OMP_NUM_THREADS=1 python benchmarks/grpo.py [--hidden 128] [--layers 4] [--cap 512] [--rounds 5] [--json FILE]

Both sides train the same random Qwen2-shaped model (one token a byte) on the same prompts with the same reward, group size,
loss (with a k3 KL term against the start), clipping, optimiser and one update per batch, in float32. Ours is `Trainer.step`
with protocol `single`: engine, driver, grader, rewards, advantages, update, push. TRL's is its training loop from the end of
one step to the end of the next. They take turns step by step in one process. The first steps are not counted; seconds are
medians over the others, ratios the medians of the rounds' ratios.

* `equal lengths`: the end-of-sequence token has next to no probability, so every response runs to the cap.
* `long-tailed`: it has one probability at every position, so lengths are geometric with a mean of a quarter of the cap.

`generate`: everything in the engine, or in `generate`. `update`: reference, forward and backward passes, optimiser. `other`:
the rest. With one thread, seconds are those of the processor, so that other programs do not count; wall time stands beside
them. Last, what our engine sampled goes through TRL's own loss, and losses and gradients are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from grpo_sides import AGENT, NEVER, Setting, compare_losses, encoded, make_model, our_trainer, trl_trainer

from umad.learning.trainer import Trainer
from umad.reporting.progress import silence

PARTS = ("generate", "update", "push", "other", "step")


class Clock:
    """Seconds of the parts of one side's steps: of the processor where one thread runs, and of the wall.

    A part's seconds leave out those of parts that are timed inside it.
    """

    def __init__(self, threads: int) -> None:
        self.read = (time.process_time if threads == 1 else time.perf_counter, time.perf_counter)
        self.rows: list[dict[str, tuple[float, float]]] = []
        self._step: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._inside: list[list[float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = [read() for read in self.read]
        self._inside.append([0.0, 0.0])
        try:
            yield
        finally:
            inside = self._inside.pop()
            for i, (read, start) in enumerate(zip(self.read, begun, strict=True)):
                spent = read() - start
                self._step[name][i] += spent - inside[i]
                if self._inside:
                    self._inside[-1][i] += spent

    def wrap(self, target: Any, method: str, name: str) -> None:
        """Times every call of `target.method` as part `name`."""
        function = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        setattr(target, method, timed)

    def end_step(self) -> None:
        row = {name: (own[0], own[1]) for name, own in self._step.items()}
        row["step"] = (sum(own[0] for own in row.values()), sum(own[1] for own in row.values()))
        self.rows.append(row)
        self._step.clear()

    def of(self, part: str, which: int) -> list[float]:
        """Seconds of every step; which: 0 the processor's, 1 the wall's."""
        return [row.get(part, (0.0, 0.0))[which] for row in self.rows]


def measure(trainer: Trainer, trl: Any, warmup: int, threads: int) -> tuple[Clock, Clock, list[int]]:
    """Runs both sides' steps in turns; returns our clock, TRL's, and the lengths of our responses."""
    from transformers import TrainerCallback

    ours, theirs = Clock(threads), Clock(threads)
    ours.wrap(trainer.driver.agents[0].engine, "pump", "generate")
    ours.wrap(trainer.policies[AGENT], "update", "update")
    ours.wrap(trainer, "push", "push")
    theirs.wrap(trl, "_generate_single_turn", "generate")
    theirs.wrap(
        trl, "_get_per_token_logps_and_entropies", "update"
    )  # the reference's; the policy's is in `compute_loss`
    theirs.wrap(trl, "compute_loss", "update")
    theirs.wrap(trl.accelerator, "backward", "update")
    lengths: list[int] = []

    class TakeTurns(TrainerCallback):
        """Runs our step between two of TRL's."""

        step: Any
        optimizer: Any

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.step = theirs.part("other")
            self.step.__enter__()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.optimizer = theirs.part("update")
            self.optimizer.__enter__()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.optimizer.__exit__(None, None, None)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            self.step.__exit__(None, None, None)
            theirs.end_step()
            with ours.part("other"):
                result = trainer.step(state.global_step)
            ours.end_step()
            if state.global_step > warmup:
                lengths.extend(r.completion_tokens for d in result.debates for r in d.responses())
            self.on_train_begin()

    trl.add_callback(TakeTurns())
    trl.train()
    del ours.rows[:warmup], theirs.rows[:warmup]
    return ours, theirs, lengths


def run_regime(name: str, setting: Setting, warmup: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", setting)
        with our_trainer(model, setting) as trainer:
            trl = trl_trainer(trainer, model, setting, Path(folder))
            before = copy.deepcopy(trl.model.state_dict())
            ours, theirs, lengths = measure(trainer, trl, warmup, threads)
            sides = {"TRL": trl.model, "umad": trainer.policies[AGENT].parallel.module}
            for side, trained in sides.items():
                if all(torch.equal(before[n], tensor) for n, tensor in trained.state_dict().items()):
                    raise RuntimeError(f"the steps of {side} changed nothing")
            losses = compare_losses(trainer, trl, setting.steps + 1)
            prompts = [len(ids) for _, ids in encoded(trainer)]
    return {
        "regime": name,
        "parameters": sum(p.numel() for p in trl.model.parameters()),
        "prompt_tokens": statistics.mean(prompts),
        "response_tokens": statistics.mean(lengths),
        "longest": max(lengths),
        "ours": {part: statistics.median(ours.of(part, 0)) for part in PARTS},
        "trl": {part: statistics.median(theirs.of(part, 0)) for part in PARTS},
        "wall": {side: statistics.median(clock.of("step", 1)) for side, clock in (("ours", ours), ("trl", theirs))},
        "ratio": {part: ratio(theirs.of(part, 0), ours.of(part, 0)) for part in ("generate", "update", "step")},
        "wall_ratio": ratio(theirs.of("step", 1), ours.of("step", 1)),
        **losses,
    }


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def show(row: dict[str, Any]) -> None:
    print(
        f"\n{row['regime']}: {row['parameters'] / 1e6:.2f}M parameters, prompts of {row['prompt_tokens']:.0f} tokens, "
        f"responses of {row['response_tokens']:.0f} (longest {row['longest']})"
    )
    print(f"{'seconds':8}" + "".join(f"{part:>10}" for part in PARTS) + "   steps/s   wall s/step")
    for side in ("ours", "trl"):
        cells = "".join(f"{row[side][part]:10.3f}" for part in PARTS)
        print(f"{side:8}{cells}{1 / row[side]['step']:10.3f}{row['wall'][side]:14.3f}")
    found = row["ratio"]
    print(f"{'ratio':8}{found['generate']:10.2f}{found['update']:10.2f}{found['step']:30.2f}{row['wall_ratio']:24.2f}")
    print(
        f"loss of the same completions: {row['our_loss']:.7f} and {row['trl_loss']:.7f}, {row['loss_difference']:.1e} apart; "
        f"gradients {row['gradient_difference']:.1e} of their norm (KL {row['kl']:.2g}, {row['clipped']:.1%} clipped)"
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    usual = Setting()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=usual.hidden)
    parser.add_argument("--layers", type=int, default=usual.layers)
    parser.add_argument("--cap", type=int, default=usual.cap, help="most tokens of a response")
    parser.add_argument("--prompts", type=int, default=usual.prompts)
    parser.add_argument("--group", type=int, default=usual.group, help="responses per prompt")
    parser.add_argument("--loss", choices=("dapo", "grpo", "dr_grpo"), default=usual.loss)
    parser.add_argument("--beta", type=float, default=usual.beta, help="coefficient of the KL term")
    parser.add_argument("--micro-batch-tokens", type=int, default=usual.micro_batch_tokens, help="our micro-batches")
    parser.add_argument("--trl-rows", type=int, help="rows of TRL's micro-batches; all of them by default")
    parser.add_argument(
        "--trl", type=json.loads, default={}, metavar="JSON", help="further settings of TRL's GRPOConfig"
    )
    parser.add_argument("--regime", choices=("equal", "tail", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side that count")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = vars(parser.parse_args(arguments))
    rounds, warmup, threads, regime, file = (args.pop(k) for k in ("rounds", "warmup", "threads", "regime", "json"))
    torch.set_num_threads(threads)
    silence()
    warnings.filterwarnings("ignore", module=r"(trl|transformers|torch|accelerate)\.")
    setting = Setting(**args, steps=rounds + warmup)
    regimes = {"equal": ("equal lengths", NEVER), "tail": ("long-tailed", 4 / setting.cap)}
    rows = []
    for name, end_probability in [regimes[regime]] if regime in regimes else regimes.values():
        rows.append(run_regime(name, replace(setting, end_probability=end_probability), warmup, threads))
        show(rows[-1])
    if file:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
