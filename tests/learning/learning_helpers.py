"""Small debates, samples and random models for the learner's tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umad.records import Debate, Problem, Response, Sample

AGENTS = ("ada", "bob", "cyd", "dee", "eve")


def golden(name: str) -> list[dict[str, Any]]:
    """Reference values computed apart from the project, where they are there."""
    path = Path(__file__).parents[3] / "shared" / "golden" / "equations.json"
    if not path.exists():
        pytest.skip("no ../shared/golden/equations.json beside the checkout")
    return json.loads(path.read_text())[name]


def make_debate(grades: Sequence[Sequence[bool | None]], *, everyone_sees: bool = True, **changes: Any) -> Debate:
    """A debate from grades[turn][agent]. Every response saw all of the turn before it."""
    names = AGENTS[: len(grades[0])]
    turns = []
    for t, row in enumerate(grades):
        saw = tuple((t - 1, name) for name in names) if t and everyone_sees else ()
        turns.append(tuple(make_response(name, t, correct, saw=saw) for name, correct in zip(names, row, strict=True)))
    values: dict[str, Any] = {"sampling": {"mode": "trajectory", "max_tokens": 100}, **changes}
    return Debate(Problem("p", "What?", "1"), "mad", names, tuple(turns), **values)


def make_response(agent: str, turn: int, correct: bool | None, **changes: Any) -> Response:
    values: dict[str, Any] = {"text": "so \\boxed{1}", "answer": "1", "completion_tokens": 10, **changes}
    return Response(agent=agent, turn=turn, correct=correct, **values)


def make_sample(
    rng: np.random.Generator | None = None,
    *,
    agent: str = "ada",
    group: tuple[int, int] = (0, 0),
    prompt: int = 3,
    completion: int = 2,
    vocabulary: int = 40,
    **changes: Any,
) -> Sample:
    rng = rng or np.random.default_rng(0)
    values: dict[str, Any] = {"logprobs": np.full(completion, -1.0, np.float32), "reward": 1.0, **changes}
    return Sample(
        agent=agent,
        group=(group[0], agent, group[1]),
        prompt_ids=rng.integers(0, vocabulary, prompt).astype(np.int32),
        completion_ids=rng.integers(0, vocabulary, completion).astype(np.int32),
        **values,
    )


def ragged_samples(n: int = 16, seed: int = 0, vocabulary: int = 40, **changes: Any) -> list[Sample]:
    """Samples of very different lengths with random advantages, none of them 0."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        prompt, completion = int(rng.integers(1, 12)), int(rng.integers(1, 20))
        values = {"advantage": float(rng.normal()), "logprobs": -rng.random(completion, np.float32), **changes}
        samples.append(
            make_sample(rng, prompt=prompt, completion=completion, vocabulary=vocabulary, group=(i // 4, 0), **values)
        )
    return samples


def tiny_model(kind: str = "qwen2", seed: int = 0, vocabulary: int = 40, **changes: Any) -> Any:
    """A random causal LM of some ten thousand parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # far from uniform, so that faults show
        **changes,
    }
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**{"tie_word_embeddings": True, **sizes}))
    return Qwen3ForCausalLM(Qwen3Config(**{"tie_word_embeddings": False, "head_dim": 8, **sizes}))
