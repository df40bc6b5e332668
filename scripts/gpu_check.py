"""Trains two agents with random weights for two steps and puts what it took beside what `umad plan` says.

Run by gpu_check.sh, which sees to PYTHONPATH. Needs no network: models, tokenizer and problems are made here. The models have
the shapes of Qwen2.5-0.5B and Qwen3-0.6B, with their vocabulary of 151,936; nothing they write means anything, so they are
rewarded for capital letters, which gives groups with signal. Random weights don't end their responses, so every length is
known beforehand, and the plan is made with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umad.config import Recipe
    from umad.records import Debate

TOLERANCE = 0.15
"""Most that measured and planned memory may differ by."""
PHASES = {"generate": "generation", "score": "scoring", "update": "update", "push": "push"}
"""Names in the metrics and in the plan."""
PACKAGES = {
    # as imported, and as installed
    **{name: name for name in ("torch", "transformers", "accelerate", "pydantic", "typer", "rich", "numpy", "scipy")},
    **{"jinja2": "jinja2", "pyarrow": "pyarrow", "yaml": "pyyaml", "math_verify": "math-verify[antlr4_13_2]"},
    **{"safetensors": "safetensors", "tokenizers": "tokenizers"},
}
SYLLABLES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def missing_packages() -> list[str]:
    return [package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is None]


def capitals(debate: Debate, agent: str, turn: int) -> float:
    """The recipe's reward: a share of capital letters, coarse enough that some members of a group are alike."""
    text = next(r.text for r in debate.turns[turn] if r.agent == agent)
    return round(20 * sum(c.isupper() for c in text) / max(1, len(text))) / 20


# --- what is trained --------------------------------------------------------------------------------------------------


def sizes(tiny: bool) -> dict[str, dict[str, Any]]:
    """The two configurations, by model type. tiny: so small that a CPU trains them in seconds."""
    if tiny:
        common = {"vocab_size": 4000, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        common |= {"num_key_value_heads": 2, "max_position_embeddings": 2048}
        return {
            "qwen2": {**common, "intermediate_size": 640},
            "qwen3": {**common, "intermediate_size": 384, "head_dim": 32},
        }
    return {  # Qwen2.5-0.5B and Qwen3-0.6B
        "qwen2": {
            **{"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
            **{"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768},
        },
        "qwen3": {
            **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960},
        },
    }


def make_agent(folder: Path, kind: str, settings: dict[str, Any], device: str) -> None:
    """A model folder with random weights in bfloat16 and a tokenizer, as any other."""
    import torch
    import transformers

    tokenizer = make_tokenizer(settings["vocab_size"])
    tokenizer.save_pretrained(folder)
    config_class = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[kind]
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = config_class(tie_word_embeddings=True, **ids, **settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(folder)


def make_tokenizer(vocabulary: int) -> Any:
    """Byte-level BPE without merges whose vocabulary is filled up with short words, so that any id that is sampled is text."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES)
    longer = (a + b + c + d for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES for d in SYLLABLES)
    tokens = [*alphabet, *specials]
    for source in (words, longer):
        tokens += [word for word, _ in zip(source, range(vocabulary - len(tokens)), strict=False)]
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        padding_side="left",
    )


def recipe_of(folder: Path, tiny: bool, rows: int = 8) -> Recipe:
    """rows: of the longest sequences in a micro-batch."""
    from umad.recipe_io import parse_recipe

    response, prompt, problems, group = (48, 144, 4, 4) if tiny else (256, 768, 16, 4)
    return parse_recipe(f"""
name: gpu_check
output: {folder / "run"}
agents:
  - {{name: qwen2, model: {folder / "qwen2"}}}
  - {{name: qwen3, model: {folder / "qwen3"}}}
distinct: true
debate: {{protocol: mad, turns: 2, style: compact}}
sampling: {{temperature: 1.0, max_tokens: {response}, max_prompt_tokens: {prompt}}}
reward:
  correctness: 0.0
  influence: {{eta: 0.0}}
  functions: [{{function: "gpu_check:capitals", time_limit: 60}}]
training:
  steps: 2
  problems_per_step: {problems}
  group_size: {group}
  learning_rate: 1.0e-6
  precision: bfloat16
  micro_batch_tokens: {rows * (prompt + response)}
engine: {{max_batch: {problems * group}, dtype: bfloat16}}
data: {{train: {{name: arithmetic, level: 1}}}}
evaluation: {{before: false, after: false}}
logging: {{transcripts: 0}}
""")


def prompt_tokens(recipe: Recipe) -> int:
    """The longest prompt of a first turn."""
    from umad.engines.models import load_tokenizer
    from umad.runs import build

    prompts = build.prompts_of(recipe)
    tokenizer = load_tokenizer(recipe.agents[0].model)
    texts = (prompts.first(problem) for problem in build.problems_of(recipe, "train"))
    return max(
        len(tokenizer.apply_chat_template(text, tokenize=True, add_generation_prompt=True, return_dict=False))
        for text, _ in zip(texts, range(200), strict=False)
    )


# --- measuring on a CPU -----------------------------------------------------------------------------------------------


def live_tensors(known: Any = ()) -> Any:
    """A mode that counts the bytes of all tensors that operations take and return: `live` now, `peak` at most."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Live(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live = self.peak = 0
            self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in tree_iter((args, kwargs, result)):
                if isinstance(tensor, torch.Tensor):
                    self._add(tensor.untyped_storage())
            return result

        def _add(self, storage: Any) -> None:
            key, size = storage._cdata, storage.nbytes()
            if key in self.sizes or not size:
                return
            self.sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key)

        def _drop(self, key: int) -> None:
            self.live -= self.sizes.pop(key, 0)

    return Live()


@contextmanager
def measured_on_cpu() -> Iterator[None]:
    """The trainer's metrics `memory/...`, which it takes from CUDA, from counting tensors instead."""
    from umad.learning.trainer import Trainer

    live = live_tensors()

    @contextmanager
    def measured(self: Any, name: str) -> Iterator[None]:
        live.peak = live.live
        yield
        self.memory[name] = max(self.memory.get(name, 0.0), live.peak / 1e9)

    original = Trainer._measured
    Trainer._measured = measured  # type: ignore[method-assign]
    try:
        with live:
            yield
    finally:
        Trainer._measured = original  # type: ignore[method-assign]


# --- the check --------------------------------------------------------------------------------------------------------


def check(folder: Path, device: str, tiny: bool) -> dict[str, Any]:
    """Plans, trains, compares. Returns everything that is printed."""
    import torch

    from umad.runs.plan import Options, plan
    from umad.runs.training import train

    begun = time.perf_counter()
    for kind, settings in sizes(tiny).items():
        make_agent(folder / kind, kind, settings, device)
    gpu = gpu_name() if device == "cuda" else None
    has = torch.cuda.get_device_properties(0).total_memory / 1e9 if device == "cuda" else None
    for most in (8, 4, 2, 1):  # smaller micro-batches on smaller cards
        recipe = recipe_of(folder, tiny, most)
        longest, problem = recipe.sampling.max_tokens, prompt_tokens(recipe)
        planned = plan(recipe, Options(gpu, has, mean_length=longest, problem_tokens=problem), device)
        if planned["fits"] is not False:
            break
    made = time.perf_counter() - begun
    if device == "cuda":
        torch.cuda.empty_cache()
        train(recipe)
    else:
        with measured_on_cpu():
            train(recipe)
    rows = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    row = rows[-1]  # the first step has no optimiser states before its update
    memory = compare(row, planned)
    return {
        "machine": machine(device),
        "seconds": {"models": made, "all": time.perf_counter() - begun},
        "shapes": "tiny" if tiny else "Qwen2.5-0.5B and Qwen3-0.6B",
        "generation": {"transformers": True, "vllm": "not run"},
        "memory": memory,
        "within": all(abs(found["deviation"]) <= TOLERANCE for found in memory.values()),
        "speed": speed(row, planned, gpu),
        "steps": [{k: v for k, v in r.items() if k.startswith(("time/", "memory/", "throughput/"))} for r in rows],
        "updated": {a.name: row[f"agent/{a.name}/updated"] for a in recipe.agents},
        "plan": planned,
    }


def compare(row: dict[str, Any], planned: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Measured and planned peak of each phase in GB, and how far the plan is off."""
    found = {}
    for name, phase in PHASES.items():
        measured, expected = row.get(f"memory/{name}_gb"), planned["memory"]["phases"].get(phase)
        if measured is not None and expected is not None:
            whole = sum(expected["parts_gb"].values())
            found[phase] = {"measured_gb": measured, "plan_gb": whole, "deviation": whole / measured - 1}
    if not found:
        raise SystemExit("gpu_check: the run's metrics.jsonl has no memory/..._gb")
    return found


def speed(row: dict[str, Any], planned: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """Of the last step. MFU: the update's operations, as the plan counts them per token, over the GPU's dense bfloat16 peak."""
    from umad.runs.planning.machines import GPUS

    trained = sum(value for name, value in row.items() if name.endswith("/computed_tokens"))
    seconds = row["time/update"]
    flops = trained * planned["step"]["update_flops_per_token"]
    peak = GPUS[gpu].bf16 if gpu else None
    expected = planned["step"]["seconds"]
    return {
        "generation_tokens_per_second": row["throughput/tokens_per_second"],
        "update_tokens_per_second": trained / seconds,
        "update_flops_per_second": flops / seconds,
        "mfu": flops / seconds / peak if peak else None,
        "seconds": {PHASES[n]: row[f"time/{n}"] for n in PHASES if f"time/{n}" in row},
        "plan_seconds": {name: expected[name] for name in PHASES.values()},
    }


def gpu_name() -> str | None:
    """The table's name for this machine's GPU, where it is one of those."""
    import torch

    from umad.runs.planning.machines import GPUS

    name = torch.cuda.get_device_name(0)
    gib = torch.cuda.get_device_properties(0).total_memory
    likely = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0].lower() in name.lower().replace(" ", "")]
    return min(likely, key=lambda gpu: abs((gpu.memory or 0) - gib)).name if likely else None


def machine(device: str) -> dict[str, Any]:
    import torch
    import transformers

    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_gb": properties.total_memory / 1e9, "cuda": torch.version.cuda}
    return found


def show(found: dict[str, Any]) -> None:
    from umad.reporting.progress import say, table

    table(
        f"{found['shapes']} on {found['machine'].get('gpu', found['machine']['device'])}: peak memory, GB (10^9 bytes)",
        ["phase", "measured", "umad plan", "deviation"],
        [
            [name, f"{m['measured_gb']:.3f}", f"{m['plan_gb']:.3f}", f"{m['deviation']:+.1%}"]
            for name, m in found["memory"].items()
        ],
    )
    fast = found["speed"]
    mfu = "–" if fast["mfu"] is None else f"{fast['mfu']:.1%}"
    table(
        "Step 2, both agents",
        ["phase", "seconds", "umad plan", "tokens/s", "MFU"],
        [
            [
                name,
                f"{seconds:.2f}",
                "–" if fast["plan_seconds"][name] is None else f"{fast['plan_seconds'][name]:.2f}",
                {
                    "generation": f"{fast['generation_tokens_per_second']:,.0f}",
                    "update": f"{fast['update_tokens_per_second']:,.0f}",
                }.get(name, ""),
                mfu if name == "update" else "",
            ]
            for name, seconds in fast["seconds"].items()
        ],
    )
    say(f"vLLM: {found['generation']['vllm']} · {found['seconds']['all']:.0f} s in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--folder", type=Path, help="where models and the run go (15 GB); removed afterwards")
    parser.add_argument("--missing", action="store_true", help="print the packages that are not installed, and stop")
    given = parser.parse_args()
    if given.missing:
        print(" ".join(missing_packages()))
        return 0
    import torch

    cuda = torch.cuda.is_available()
    device = given.device if given.device != "auto" else "cuda" if cuda else "cpu"
    if device == "cuda" and not cuda:
        print("gpu_check: torch sees no GPU here", file=sys.stderr)
        return 2
    if device == "cpu" and (not given.tiny or cuda):
        why = "hide the GPU from it (CUDA_VISIBLE_DEVICES=)" if cuda else "add --tiny"
        print(
            f"gpu_check: {'a GPU is here' if cuda else 'no GPU is here'}; for a check on the CPU {why}", file=sys.stderr
        )
        return 2
    parent = given.folder
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gpu_check_", dir=parent))
    try:
        found = check(folder, device, given.tiny)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(found)
    out = os.environ.get("OUT")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "gpu_check.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if not found["within"]:
        print(f"gpu_check: the plan is off by more than {TOLERANCE:.0%}", file=sys.stderr)
        return 1
    if not all(found["updated"].values()):
        print(f"gpu_check: an agent learned nothing in the last step: {found['updated']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
