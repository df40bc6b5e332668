"""Memory of the engines while they generate: caches of keys and values, and what computes on top of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from umad.config import Recipe
from umad.runs.planning.activations import forward_bytes
from umad.runs.planning.seats import Seat, engine_size
from umad.runs.planning.shapes import Shape
from umad.runs.planning.work import evaluates, kv_elements

COLUMNS = 64
"""Room for keys and values grows by at least so many tokens, and by half (`umad.engines.kv`)."""


def kv_columns(prompt: int, longest: int) -> int:
    """Tokens that the cache has room for in each row when a prompt's longest response is finished."""
    have = _ceil(prompt + COLUMNS)
    while have < prompt + longest:
        have = _ceil(max(have + 1, have + have // 2))
    return have


def _ceil(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS


@dataclass(frozen=True)
class Generation:
    """Bytes of one engine. cache: keys and values with all rows at their longest. start: as they are when prompts have been
    computed. prompts: most that a pass over prompts takes. step: most that one decode step takes on top of the cache."""

    cache: float
    start: float
    prompts: float
    step: float


def generation(seat: Seat, recipe: Recipe) -> Generation:
    from umad.engines.transformers import PREFILL_TOKENS

    shape, size, lengths = seat.shape, engine_size(recipe), seat.lengths
    rows = min(recipe.engine.max_batch, lengths.most_rows)
    prompt, longest = lengths.worst_prompt, max(lengths.longest, recipe.evaluation.max_tokens or 0)
    per_token = float(size * kv_elements(shape))
    cache = per_token * rows * kv_columns(prompt, longest)
    start = per_token * rows * _ceil(prompt + COLUMNS)
    passes = max(1, math.ceil(rows * prompt / PREFILL_TOKENS))
    tokens = max(prompt, rows * prompt / passes)
    prefix = tokens * per_token
    adapter = seat.config.adapter is not None
    computing = tokens * forward_bytes(shape, "float32" if size == 4 else "bfloat16", adapter=adapter)
    before = start * (passes - 1) / passes  # the cache holds the rows of earlier passes
    sampling = _sampling_bytes(rows * shape.vocabulary, shape, recipe)
    growing = cache / shape.layers * 2 / 3  # a layer's cache grows by half into new memory
    return Generation(cache, start, max(prefix + computing + before, prefix + start), max(sampling, growing))


def _sampling_bytes(numbers: int, shape: Shape, recipe: Recipe) -> float:
    """Logits of all rows, `numbers` of them, and their float32 copy. Then a block of them at a time: scaled (where the
    temperature isn't 1), exponentiated, and summed up in float64; all of them, in float64, where top-k or top-p cut."""
    from umad.engines.sampling import _BLOCK

    wide = 4 + (2 if engine_size(recipe) == 2 else 0)
    block = min(numbers, max(_BLOCK, shape.vocabulary)) * (12 if recipe.sampling.temperature == 1 else 16)
    settings = recipe.evaluation.accuracy
    evaluated = recipe.training is None or evaluates(recipe)
    cut = evaluated and settings.problems and (settings.top_p < 1 or settings.top_k)
    return float(numbers * wide + max(block, 20 * numbers if cut else 0))


def generation_parts(seats: Sequence[Seat], recipe: Recipe) -> dict[str, float]:
    """All engines decode side by side; one of them at a time computes: a step, or its prompts while the others wait with
    their caches full."""
    found = [generation(seat, recipe) for seat in seats]
    everything = sum(g.cache for g in found)
    moments = [{"key-value cache": everything, "decoding": max(g.step for g in found)}]
    moments += [{"key-value cache": everything - g.cache, "prompts": g.prompts} for g in found]
    return max(moments, key=lambda parts: sum(parts.values()))
