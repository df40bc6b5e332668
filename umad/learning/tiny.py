"""Tiny agents, trained from scratch on the CPU in well under a minute: what the quickstart debates with.

A warm start must leave room for reinforcement learning, and must do so for every seed. So it ends not after a number of
steps but when the averaged weights would solve a given share of unseen lessons at the temperature that evaluation uses.
That share needs no sampling: there is one right response per problem, and its probability is one forward pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umad.engines.models import umad_cache
from umad.learning.tiny_lessons import Batch, Teacher, collate
from umad.learning.tiny_tokenizers import build_tokenizer
from umad.records import UserError
from umad.tasks import arithmetic

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

VERSION = 1
"""Counts changes of this code that change what comes out; part of the cache key."""

Progress = Callable[[int, int, str], None]
"""Called every few steps with the step, the number of steps it usually takes, and a note on how far the agent is."""

USUAL_STEPS = 200
"""What a warm start takes, give or take a quarter; only progress is measured by it."""

CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class TinySpec:
    """Sizes of a tiny model and what its warm start aims at."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tokenizer: str


SPECS = {
    "tiny:qwen2": TinySpec("qwen2", 64, 3, 4, 2, 192, "digits"),
    "tiny:qwen3": TinySpec("qwen3", 72, 3, 4, 2, 224, "numbers"),
}


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How long and how an agent is taught."""

    target: float = 0.57
    """Share of unseen lessons, half first and half debate turns, that it should solve at `temperature`."""
    temperature: float = 0.6
    debate_every: int = 3
    """One in so many batches is of debate turns, the others of first turns, which are far shorter and teach as much."""
    max_steps: int = 1500
    batch: int = 64
    check_every: int = 5
    check_problems: int = 256
    average: float = 0.95
    """Of the weights, per step. Checked and kept are the averaged weights: their accuracy grows evenly."""
    matrix_lr: float = 0.02
    """For Muon, which moves the layers' matrices; it reaches the target in a fifth of AdamW's time."""
    other_lr: float = 3e-3
    """For AdamW: embeddings and norms."""
    warmup: int = 20


WARM_START = WarmStart()


def tiny_agent(spec: str, seed: int, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of a warm-started tiny agent, made where no cached one exists.

    Args:
        spec: `tiny:qwen2` (one token a digit) or `tiny:qwen3` (one token a two-digit number).
        cache: where agents are kept; `umad_cache()` by default.

    Raises:
        UserError: there is no such agent, or the cache cannot be written.
    """
    if spec not in SPECS:
        raise UserError(f"model {spec!r} is unknown; tiny agents are {' and '.join(SPECS)}")
    folder = (cache or umad_cache()) / "tiny" / f"{spec.partition(':')[2]}-{seed}-{_key(spec, seed)}"
    if (folder / "config.json").is_file():
        return folder
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{part.parent}: cannot be written ({error.strerror}); set UMAD_CACHE to another folder"
        ) from None
    try:
        with _one_thread():
            _make(SPECS[spec], seed, WARM_START, part, progress)
        _put(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _key(spec: str, seed: int) -> str:
    import torch

    decides = [VERSION, spec, seed, asdict(SPECS[spec]), asdict(WARM_START), torch.__version__.partition("+")[0]]
    return hashlib.blake2b(json.dumps(decides).encode(), digest_size=6).hexdigest()


def _put(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was faster, with the same result
            raise


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums split over threads round differently; these models are too small to gain from threads anyway."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make(spec: TinySpec, seed: int, plan: WarmStart, folder: Path, progress: Progress | None) -> None:
    from transformers import GenerationConfig

    tokenizer = build_tokenizer(spec.tokenizer, CONTEXT)
    model = build_model(spec, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, seed)
    report = warm_start(model, tokenizer, seed, plan, progress)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "warm_start.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def build_model(spec: TinySpec, vocabulary: int, pad: int, eos: int, seed: int) -> PreTrainedModel:
    """A model with fresh weights that `seed` decides, whatever the state of torch's generator."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_config(spec, vocabulary, pad, eos))
    return model.float()


def _config(spec: TinySpec, vocabulary: int, pad: int, eos: int) -> PretrainedConfig:
    from transformers import Qwen2Config, Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "pad_token_id": pad,
        "eos_token_id": eos,
        "bos_token_id": None,
    }
    if spec.architecture == "qwen2":
        return Qwen2Config(**sizes)
    return Qwen3Config(head_dim=spec.hidden // spec.heads, **sizes)


def warm_start(
    model: PreTrainedModel, tokenizer: Any, seed: int, plan: WarmStart, progress: Progress | None = None
) -> dict[str, float]:
    """Teaches `model` in place until it solves the planned share of lessons; returns how far it came."""
    import torch

    rng = random.Random(f"tiny/{seed}")
    teacher = Teacher(tokenizer)
    supply = list(arithmetic.problems(1, "train", seed))
    unseen, taught = supply[: plan.check_problems], supply[plan.check_problems :]
    checks = [collate([teacher.lesson(p, debate, rng) for p in unseen]) for debate in (False, True)]
    optimisers = _optimisers(model, plan)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(plan.average)
    )
    solved = 0.0
    model.train()
    for step in range(1, plan.max_steps + 1):
        is_debate = step % plan.debate_every == 0
        batch = collate([teacher.lesson(rng.choice(taught), is_debate, rng) for _ in range(plan.batch)])
        _learn(model, batch, optimisers, min(1.0, step / plan.warmup))
        average.update_parameters(model)
        if step % plan.check_every:
            continue
        first, debate = (share_solved(average.module, check, plan.temperature) for check in checks)
        solved = (first + debate) / 2
        if progress:
            progress(step, max(step, USUAL_STEPS), f"{first:.0%} of first and {debate:.0%} of debate turns right")
        if solved >= plan.target:
            break
    else:
        raise RuntimeError(f"the warm start solves only {solved:.2f} of its lessons after {plan.max_steps} steps")
    model.load_state_dict(average.module.state_dict())
    model.eval()
    return {"steps": step, "first_turns": round(first, 4), "debate_turns": round(debate, 4)}


def _optimisers(model: PreTrainedModel, plan: WarmStart) -> list[tuple[torch.optim.Optimizer, float]]:
    import torch

    matrices = [p for p in model.base_model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        (torch.optim.Muon(matrices, lr=plan.matrix_lr, momentum=0.9, weight_decay=0.1), plan.matrix_lr),
        (torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.98), weight_decay=0.0), plan.other_lr),
    ]


def _learn(
    model: PreTrainedModel, batch: Batch, optimisers: list[tuple[torch.optim.Optimizer, float]], scale: float
) -> None:
    import torch

    logits, tokens = _response_logits(model, batch)
    torch.nn.functional.cross_entropy(logits, tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser, rate in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * scale
        optimiser.step()
    model.zero_grad()


def _response_logits(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, V] that predict the response tokens of a batch, and those tokens [N]. Right padding needs no mask."""
    hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
    wanted = batch.target[:, 1:]
    return model.lm_head(hidden[:, :-1][wanted]), batch.ids[:, 1:][wanted]


def share_solved(model: PreTrainedModel, batch: Batch, temperature: float) -> float:
    """Mean probability of the right response at a temperature: the share of lessons solved, up to lucky detours."""
    import torch

    model.eval()
    with torch.no_grad():
        logits, tokens = _response_logits(model, batch)
        scores = torch.log_softmax(logits / temperature, -1).gather(1, tokens[:, None])[:, 0]
        rows = batch.target[:, 1:].nonzero()[:, 0]
        total = torch.zeros(len(batch.ids)).index_add(0, rows, scores)
    model.train()
    return float(total.exp().mean())
