"""Tiny random models, requests, and a way to run an engine dry. For tests of engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from umad.engines.base import Engine, Generation, Request
from umad.records import Sampling

VOCABULARY = 61


def tiny_model(kind: str = "qwen2", seed: int = 0, sharp: float = 4.0, **settings: Any) -> transformers.PreTrainedModel:
    """A random model. `sharp` scales its weights up, so that its distributions are far from even."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            eos_token_id=1,
            bos_token_id=0,
            **settings,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": True,
        }  # fmt: skip
        config_class, model_class = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
            "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
            "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        }[kind]
        if kind in ("qwen3", "gemma3"):
            sizes["head_dim"] = 8
        model = model_class(config_class(**{**sizes, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(sharp)
    return model.eval()


def prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 30) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(2, VOCABULARY, size=rng.integers(shortest, longest + 1)).astype(np.int32) for _ in range(count)
    ]


def requests(
    prompts: Sequence[np.ndarray], sampling: Sampling | Sequence[Sampling], members: int = 1, seed: int = 0
) -> list[Request]:
    """`members` requests per prompt, each with a seed of its own."""
    out = []
    for i, prompt in enumerate(prompts):
        for g in range(members):
            asked = sampling if isinstance(sampling, Sampling) else sampling[(i * members + g) % len(sampling)]
            out.append(Request((i, g, 0, "a", 0), asked, (seed << 40) + i * 1000 + g, prompt))
    return out


def drain(engine: Engine) -> dict[tuple[int, int, int, str, int], Generation | Exception]:
    results: dict[tuple[int, int, int, str, int], Generation | Exception] = {}
    while finished := engine.pump():
        for request, result in finished:
            assert request.key not in results
            results[request.key] = result
    return results


def run(engine: Engine, asked: Iterable[Request]) -> dict[tuple[int, int, int, str, int], Any]:
    for request in asked:
        engine.submit(request)
    return drain(engine)


def full_pass_logprobs(
    model: transformers.PreTrainedModel, prompt: np.ndarray, completion: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """float64 [C], from one plain forward pass over the whole sequence."""
    ids = torch.tensor(np.concatenate([prompt, completion]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / (temperature or 1.0)
    chosen = torch.tensor(completion.astype(np.int64))[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
