"""What tokens take while they are in a model: kept for a backward pass, passing through, in the head.

The formulas for activations count the tensors that PyTorch keeps for the backward pass of a decoder layer as transformers
writes it: two RMS norms, attention that doesn't keep its scores (flash or sdpa), a gated feed-forward part. With H hidden,
I intermediate, A = heads * head size, K = key-value heads * head size, bytes per token and layer:

    float32            24 H + 16 I + 8 A + 8 K + 4 heads + 8
    bfloat16 autocast  26 H +  8 I + 4 A + 4 K + 4 heads + 8    (float32 weights and residual stream)
    bfloat16           16 H +  8 I + 4 A + 4 K + 4 heads + 8    (bfloat16 weights: DeepSpeed)

Normalised queries and keys add 8 (A + K) + 4 heads + 4 kv_heads (float32) or 6 (A + K) + ... (bfloat16). A test compares
them with what a real model holds.
"""

from __future__ import annotations

from umad.config import AdapterConfig, Recipe
from umad.runs.planning.seats import Mode
from umad.runs.planning.shapes import Shape


def layer_bytes(shape: Shape, mode: Mode, scores: float = 0.0, adapter: AdapterConfig | None = None) -> float:
    """What one token leaves in a layer for the backward pass. scores: tokens that a query's attention scores are kept of.

    With an adapter norms are frozen, so what they normalised need not be kept; but in bfloat16 every adapted layer keeps an
    input of its own, since the adapter is float32. Every adapted layer adds its rank.
    """
    wide = shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    full = mode == "float32"
    per_hidden = {"float32": 24, "autocast": 26, "bfloat16": 16}[mode]
    feed_forward = (16 if full else 8) if shape.gated else (8 if full else 4)
    if adapter is not None:
        per_hidden += -8 if full else 2
    kept = float(per_hidden * shape.hidden) + feed_forward * shape.intermediate + 8
    kept += (8 if full else 4) * (wide + narrow) + 4 * shape.heads
    if shape.qk_norm:
        per_size = (8 if full else 6) - (0 if adapter is None else 4 if full else 2)
        kept += per_size * (wide + narrow) + 4 * (shape.heads + shape.kv_heads)
    if adapter is not None:
        kept += 0 if full else 2 * wide
        kept += (4 if full else 2) * adapter.rank * shape.adapted(adapter.targets) / shape.layers
    return kept + (4 if full else 6) * shape.heads * scores


def stream_bytes(shape: Shape, mode: Mode) -> int:
    """One token's hidden state between layers."""
    return (2 if mode == "bfloat16" else 4) * shape.hidden


def forward_bytes(shape: Shape, mode: Mode, *, adapter: bool = False) -> float:
    """Most that one token takes in a pass that keeps nothing for a backward pass."""
    full = mode == "float32"
    per_hidden = (8 + 4 * adapter) if mode == "bfloat16" else 16
    feed_forward = ((12 if full else 6) + (4 if full else 2) * adapter) * shape.intermediate
    wide = shape.heads * shape.head_dim + shape.kv_heads * shape.head_dim
    return float(per_hidden * shape.hidden + max(feed_forward, (12 if full else 8) * wide))


def head_chunk_bytes(completion: float, shape: Shape, mode: Mode, device: str = "cuda") -> float:
    """Buffers of the fused head: two float32 ones and one in bfloat16 where it computes in that, for a chunk of rows."""
    from umad.learning.head import CHUNK_BYTES, CHUNK_BYTES_ELSEWHERE

    row = shape.vocabulary * (8 if mode == "float32" else 10)
    return min(completion, max(1, CHUNK_BYTES.get(device, CHUNK_BYTES_ELSEWHERE) // row)) * float(row)


def kept_scores(recipe: Recipe, mode: Mode, width: float, device: str) -> float:
    """Eager attention keeps its scores, and so does sdpa in float32 on a GPU, where neither of its kernels that don't takes
    grouped queries."""
    attention = recipe.training.attention if recipe.training else "auto"
    if attention == "eager" or (mode == "float32" and device == "cuda" and attention in ("auto", "sdpa")):
        return width
    return 0.0
