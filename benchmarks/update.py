"""The update's path from hidden states to gradients, whole logits beside chunks of them, in one run.

    OMP_NUM_THREADS=1 python benchmarks/update.py [--hidden 512] [--tokens 4096] [--rounds 3] [--json FILE]

A random Qwen2-shaped model with a vocabulary of 151,936 makes one forward and backward pass over a micro-batch, in float32
on the CPU. Every pass is a process of its own, and the sides take turns: `whole` is `completion_logprobs` and plain
autograd, `chunks` is `fused_loss` and `sequence_loss`. Both give log-probabilities, entropies and the same gradients.

Memory is the highest resident set during the pass less the resident set just before it, when the process holds the model's
weights: logits and all that is made of them, the trunk's activations, and the gradients of all weights. `trunk` is the same
with no head at all, but a tensor for its gradient; no other side can do with much less. Time is processor time of the whole
pass, trunk included, after a pass over a few tokens that is not counted. Linux only: it resets the high-water mark in /proc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umad.learning.batching import Batch, collate, completion_logprobs
from umad.learning.head import fused_loss, scores, sequence_loss
from umad.records import Sample

SIDES = ("trunk", "whole", "whole, no entropies", "chunks", "whole, sequence", "chunks, sequence", "scores")
VOCABULARY = 151_936


def make_model(hidden: int, layers: int, tied: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


def make_batch(tokens: int, rows: int = 8, prompt: int = 128) -> Batch:
    rng = np.random.default_rng(0)

    def ids(n: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, n).astype(np.int32)

    length = tokens // rows
    samples = [
        Sample("bench", (i, "bench", 0), ids(prompt), ids(length), np.zeros(length, np.float32), 1.0)
        for i in range(rows)
    ]
    return collate(samples, 0)


class Loss:
    """Clipped policy gradients, by token and by sequence, near the old log-probabilities of a random model."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.n = batch, len(batch.index)
        generator = torch.Generator().manual_seed(0)
        self.advantages = torch.randn(self.n, generator=generator)
        self.old = float(-np.log(VOCABULARY)) + 0.1 * torch.randn(self.n, generator=generator)

    def by_token(self, rows: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        ratio, advantages = (logprobs - self.old[rows]).exp(), self.advantages[rows]
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / self.n

    def by_sequence(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        sums = torch.zeros(len(self.batch.lengths)).index_add(0, self.batch.sequence, logprobs - self.old)
        ratio = (sums / self.batch.lengths).exp()
        return -(ratio * self.advantages[: len(ratio)]).mean()


def one_pass(side: str, model: Any, batch: Batch) -> float:
    """Forward and backward; returns the loss."""
    head, loss = model.get_output_embeddings(), Loss(batch)
    if side == "scores":
        return float(scores(model, head, batch, 1.0).logprobs.sum())
    if side == "trunk":
        if head.weight.grad is None:
            head.weight.grad = torch.ones_like(head.weight)
        value = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state.sum()
    elif side.startswith("whole"):
        logprobs, entropy = completion_logprobs(model, head, batch, 1.0, entropy=side != "whole, no entropies")
        sequence = side == "whole, sequence"
        h = logprobs if entropy is None else entropy
        value = loss.by_sequence(logprobs, h) if sequence else loss.by_token(slice(0, loss.n), logprobs, h)
    elif side == "chunks":
        value = fused_loss(model, head, batch, 1.0, loss.by_token).loss
    else:
        value = sequence_loss(model, head, batch, 1.0, loss.by_sequence).loss
    value.backward()
    return float(value.detach())


def resident(key: str) -> int:
    """Bytes, from a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def child(side: str, args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.threads)
    model, batch = make_model(args.hidden, args.layers, args.tied), make_batch(args.tokens)
    one_pass(side, model, make_batch(8, 1, 8))
    model.zero_grad(set_to_none=True)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now what is resident
    before = resident("VmHWM")
    start = time.process_time()
    loss = one_pass(side, model, batch)
    seconds = time.process_time() - start
    memory = resident("VmHWM") - before
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
    return {"seconds": seconds, "memory": float(memory), "loss": loss, "grad_norm": norm}


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in args.sides}
    for _ in range(args.rounds):
        for side in args.sides:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", side]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[side].append(json.loads(done.stdout))
    return found


def summarize(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians per side."""
    keys = ("seconds", "memory", "loss", "grad_norm")
    return {side: {key: statistics.median(run[key] for run in runs) for key in keys} for side, runs in found.items()}


def ratios(found: dict[str, list[dict[str, float]]], ours: str, theirs: str) -> str:
    """Time round by round, so that what slows the machine for a while slows both sides."""
    rows = summarize(found)
    time_ratios = [a["seconds"] / b["seconds"] for a, b in zip(found[ours], found[theirs], strict=True)]
    loss, norm = (abs(rows[ours][key] / rows[theirs][key] - 1) for key in ("loss", "grad_norm"))
    return (
        f"{ours} / {theirs}: memory {rows[ours]['memory'] / rows[theirs]['memory']:.3f}, time "
        f"{statistics.median(time_ratios):.2f} ({min(time_ratios):.2f} to {max(time_ratios):.2f}); relative difference of "
        f"loss {loss:.1e}, of gradient norm {norm:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096, help="completion tokens, in 8 sequences")
    parser.add_argument("--tied", action="store_true", help="head and embedding share their weight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args)))
        return
    found = measure(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(f"{'side':22} {'seconds':>8} {'memory':>9}")
    for side, row in summarize(found).items():
        print(f"{side:22} {row['seconds']:8.2f} {row['memory'] / 1e6:6.0f} MB")
    pairs = [("chunks", "whole"), ("chunks", "whole, no entropies"), ("chunks, sequence", "whole, sequence")]
    for ours, theirs in pairs:
        if ours in found and theirs in found:
            print(ratios(found, ours, theirs))


if __name__ == "__main__":
    main()
