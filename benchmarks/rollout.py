"""How fast the `transformers` engine generates, beside plain `generate` with the same model, prompts and sampling.

    python benchmarks/rollout.py                     # the quickstart's agent, prompts and lengths; minutes on a CPU
    python benchmarks/rollout.py --model wheel:smollm2 --problems 8 --members 4 --max-tokens 64

Both sides run in turns in one process and the best of `--repeats` counts, since a busy machine only ever makes a run
slower; on one CPU thread (the default), seconds are those of the processor, so that other programs do not count. Tokens
per second are those of the responses, the end-of-sequence token included and padding left out.

* `equal lengths`: different prompts of one length, every response `--max-tokens` long. Nothing to share or to drop.
* `turn 0`: the problems' first prompts, each sampled `--members` times: the prompt is shared by a group.
* `turn 1`: the prompts of the debate's second turn, all different, with the responses of turn 0 in them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from umad.engines.base import Generation, Request
from umad.engines.models import load_model, load_tokenizer, stop_ids
from umad.engines.transformers import TransformersEngine
from umad.records import Problem, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Workload:
    name: str
    prompts: list[np.ndarray]
    stops: tuple[int, ...]
    times: dict[str, list[float]] = field(default_factory=lambda: {"generate": [], "engine": []})
    tokens: dict[str, list[int]] = field(default_factory=lambda: {"generate": [], "engine": []})

    def speed(self, side: str) -> float:
        return max(n / t for n, t in zip(self.tokens[side], self.times[side], strict=True))

    def row(self) -> dict[str, Any]:
        return {
            "workload": self.name,
            "responses": len(self.prompts),
            "prompt_tokens": float(np.mean([len(p) for p in self.prompts])),
            "response_tokens": float(np.mean(self.tokens["engine"])) / len(self.prompts),
            "generate_tokens_per_s": self.speed("generate"),
            "engine_tokens_per_s": self.speed("engine"),
            "ratio": self.speed("engine") / self.speed("generate"),
        }


def with_generate(
    model: PreTrainedModel, prompts: Sequence[np.ndarray], stops: Sequence[int], sampling: Sampling, batch: int
) -> list[list[int]]:
    """Responses by `generate`, in batches, padded on the left as it asks for; cut after the first stop token."""
    out = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        width = max(map(len, part))
        ids = torch.zeros((len(part), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(part):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        greedy = sampling.temperature == 0
        draw = (
            {"do_sample": False}
            if greedy
            else {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        )
        with torch.inference_mode():
            generated = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=sampling.max_tokens,
                eos_token_id=list(stops) or None,
                pad_token_id=0,
                **draw,
            )
        out += [_cut(row, stops) for row in generated[:, width:].tolist()]
    return out


def _cut(ids: list[int], stops: Sequence[int]) -> list[int]:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in stops), ids)


def with_engine(engine: TransformersEngine, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int) -> list[Any]:
    for i, prompt in enumerate(prompts):
        engine.submit(Request((i, 0, 0, "bench", 0), sampling, seed * 10**9 + i, prompt))
    found: dict[int, Generation] = {}
    while finished := engine.pump():
        for request, result in finished:
            if isinstance(result, Exception):
                raise result
            found[request.key[0]] = result
    return [found[i].token_ids for i in range(len(prompts))]


def debate_prompts(
    args: argparse.Namespace, engine: TransformersEngine, tokenizer: Any, sampling: Sampling
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Turn 0: each problem's prompt, once per member. Turn 1: each member reads two responses of its problem."""
    from umad.debate.agents import Agent
    from umad.debate.prompts import Prompts
    from umad.tasks import arithmetic

    agent = Agent("bench", engine, tokenizer)
    prompts = Prompts("compact" if args.model.startswith("tiny:") else "standard")
    problems: list[Problem] = arithmetic.load(1, "test", args.problems, 0)
    first = [agent.encode(prompts.first(problem)) for problem in problems for _ in range(args.members)]
    texts = [agent.decode(ids) for ids in with_engine(engine, first, sampling, seed=99)]
    second = []
    for i in range(len(first)):
        group = i - i % args.members
        peer = group + (i + 1) % args.members
        shown = [(prompts.style.label(0), texts[i]), (prompts.style.label(1), texts[peer])]
        second.append(agent.encode(prompts.debate(problems[i // args.members], shown)))
    return first, second


def measure(work: Workload, args: argparse.Namespace, model: PreTrainedModel, sampling: Sampling) -> None:
    engine = TransformersEngine(copy.deepcopy(model), work.stops, max_batch=args.batch)
    with_engine(engine, work.prompts[: args.batch], Sampling(4, sampling.temperature), seed=0)  # warm up
    with_generate(model, work.prompts[: args.batch], work.stops, Sampling(4, sampling.temperature), args.batch)
    clock = time.process_time if args.threads == 1 and model.device.type == "cpu" else time.perf_counter
    for repeat in range(args.repeats):
        start = clock()
        responses = with_engine(engine, work.prompts, sampling, seed=repeat)
        work.times["engine"].append(clock() - start)
        work.tokens["engine"].append(sum(map(len, responses)))
        start = clock()
        responses = with_generate(model, work.prompts, work.stops, sampling, args.batch)
        work.times["generate"].append(clock() - start)
        work.tokens["generate"].append(sum(map(len, responses)))


def greedy_differences(work: Workload, args: argparse.Namespace, model: PreTrainedModel) -> tuple[int, int]:
    """Responses at temperature 0 that are not the same tokens on both sides, and how many there are."""
    prompts = list({p.tobytes(): p for p in work.prompts}.values())
    greedy = Sampling(args.max_tokens, 0.0)
    engine = TransformersEngine(copy.deepcopy(model), work.stops, max_batch=args.batch)
    ours = with_engine(engine, prompts, greedy, seed=0)
    theirs = with_generate(model, prompts, work.stops, greedy, args.batch)
    return sum(list(a) != b for a, b in zip(ours, theirs, strict=True)), len(prompts)


def source(spec: str) -> str:
    if not spec.startswith("tiny:"):
        return spec
    from umad.learning.tiny import tiny_agent

    return str(tiny_agent(spec, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny:qwen2")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--members", type=int, default=16, help="responses per problem")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=512, help="rows decoded at once, on both sides")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line of JSON per workload instead of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(source(args.model), device=device)
    tokenizer = load_tokenizer(source(args.model))
    stops = stop_ids(model, tokenizer)
    sampling = Sampling(args.max_tokens, args.temperature)
    engine = TransformersEngine(copy.deepcopy(model), stops, max_batch=args.batch)
    first, second = debate_prompts(args, engine, tokenizer, sampling)
    rng = np.random.default_rng(0)
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    equal = list(rng.integers(vocabulary, size=(args.problems * args.members, len(first[0]))).astype(np.int32))
    work = [Workload("equal lengths", equal, ()), Workload("turn 0", first, stops), Workload("turn 1", second, stops)]
    if not args.json:
        print(f"{args.model} on {device}, {args.threads} threads, batch {args.batch}, best of {args.repeats}")
        print(
            f"{'workload':14} {'responses':>9} {'prompt':>7} {'length':>7} {'generate':>10} {'engine':>10} {'ratio':>6}"
        )
    for one in work:
        measure(one, args, model, sampling)
        row = one.row()
        if args.json:
            print(json.dumps(row))
        else:
            print(
                f"{one.name:14} {row['responses']:9} {row['prompt_tokens']:7.1f} {row['response_tokens']:7.1f} "
                f"{row['generate_tokens_per_s']:8.0f}/s {row['engine_tokens_per_s']:8.0f}/s {row['ratio']:6.2f}"
            )
    debates = [sum(min(one.times[side]) for one in work[1:]) for side in ("generate", "engine")]
    if not args.json:
        print(
            f"both turns together: {debates[0]:.2f} s by generate, {debates[1]:.2f} s, ratio {debates[0] / debates[1]:.2f}"
        )
    for one in work[1:]:
        different, count = greedy_differences(one, args, model)
        print(f"greedy, {one.name}: {different} of {count} responses differ from generate's" if not args.json else
              json.dumps({"workload": one.name, "greedy_different": different, "of": count}))  # fmt: skip


if __name__ == "__main__":
    main()
