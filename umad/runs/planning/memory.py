"""GPU memory of a run, from the shapes of its models: what stays, and what each phase adds at its peak."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from umad.config import Recipe, TrainingConfig
from umad.runs.planning.activations import forward_bytes, head_chunk_bytes, kept_scores, layer_bytes, stream_bytes
from umad.runs.planning.generating import generation_parts
from umad.runs.planning.machines import Layout
from umad.runs.planning.seats import Mode, Seat, engine_size, mode_of, needs_scores
from umad.runs.planning.shapes import Shape

PHASES = ("generation", "scoring", "update", "push", "idle")

BUCKET = 5e8
"""Numbers in a bucket of gradients that DeepSpeed reduces at once (its default)."""
LIVE = 1e9
"""Parameters that ZeRO-3 keeps whole at most (its default)."""


@dataclass
class Phase:
    """Bytes on one GPU: `parts` by name; what stays between the phases is one of them."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


# --- what stays -------------------------------------------------------------------------------------------------------


def resident(seat: Seat, recipe: Recipe, layout: Layout, *, base: bool = True) -> dict[str, float]:
    """Bytes that an agent has on each GPU throughout. base: whether a shared base is counted with this agent."""
    shape, training, trained = seat.shape, recipe.training, seat.trained
    parts: dict[str, float] = {}
    adapter = seat.config.adapter is not None
    shared = 0.0  # bytes of a frozen base that the engine has in common with the trainer
    if training is not None:
        mode = mode_of(seat, training, layout)
        n = layout.gpus
        size = 2 if mode == "bfloat16" else 4
        shares = n if layout.zero == 3 else 1
        frozen = shape.parameters * base if adapter or not trained else 0
        wide = 2 if layout.deepspeed and mode == "bfloat16" else 4  # an adapter in one process is float32
        if layout.offload != "all":
            parts["weights"] = (wide if adapter else size) * trained / shares + size * frozen / shares
        if layout.deepspeed and trained and layout.offload == "none":
            parts["master weights"] = 4 * trained / n
        if trained and layout.offload == "none":
            parts["optimiser"] = 8 * trained / (n if layout.deepspeed else 1)
        if trained:
            parts |= _resident_gradients(trained, layout, mode)
        if recipe.loss.kl.coef > 0 and trained and not adapter:
            parts["reference"] = reference_bytes(shape, mode)
        if adapter and size == engine_size(recipe) and layout.zero < 3:
            shared = float(size * frozen)
    if recipe.engine.backend != "scripted":
        own = shape.parameters * (base if adapter else 1) + (trained if adapter else 0)
        parts["engine"] = engine_size(recipe) * own - shared
    return {name: value for name, value in parts.items() if value}


def reference_bytes(shape: Shape, mode: Mode) -> float:
    """Under autocast linear layers are kept in bfloat16; embeddings, a head tied to them, and norms are not."""
    if mode == "autocast":
        narrow = shape.linear_parameters + (0 if shape.tied else shape.head_parameters)
        return 2.0 * narrow + 4 * (shape.parameters - narrow)
    return float((4 if mode == "float32" else 2) * shape.parameters)


# --- the trainer's passes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A micro-batch: tokens, those of completions, length of its rows, and how many micro-batches an update has on one GPU."""

    tokens: float
    completion: float
    width: float
    count: int


def batches(seat: Seat, training: TrainingConfig, layout: Layout) -> list[Batch]:
    """The micro-batches that may take most: one of the longest rows, and one of first turns, whose rows have short prompts,
    so more of it goes through the head."""
    lengths = seat.lengths
    share = max(1, -(-lengths.samples // layout.gpus) // training.updates_per_batch)
    expected = lengths.tokens() / layout.gpus / training.updates_per_batch
    kinds = [(lengths.worst, share)]
    if lengths.turns > 1:
        first = min(lengths.worst_prompt, math.ceil(lengths.prompts[0])) + lengths.longest
        kinds.append((first, max(1, share // lengths.turns)))
    found = []
    for width, rows in kinds:
        rows = min(rows, max(1, training.micro_batch_tokens // width))
        tokens = rows * width
        found.append(Batch(tokens, rows * lengths.longest, width, max(1, math.ceil(expected / tokens))))
    return found


def scoring_parts(seat: Seat, recipe: Recipe, layout: Layout, device: str = "cuda") -> dict[str, float]:
    training, shape = recipe.training, seat.shape
    assert training is not None
    mode = mode_of(seat, training, layout)
    options = [_scoring(seat, recipe, batch, mode, device) for batch in batches(seat, training, layout)]
    parts = max(options, key=lambda found: sum(found.values()))
    if mode == "autocast" and seat.config.adapter is None:
        parts["bfloat16 copies of weights"] = 2.0 * shape.linear_parameters  # autocast keeps them to the pass's end
    return parts | _gathered(shape, layout, mode)


def _scoring(seat: Seat, recipe: Recipe, batch: Batch, mode: Mode, device: str) -> dict[str, float]:
    shape, tokens = seat.shape, batch.tokens
    scores = kept_scores(recipe, mode, batch.width, device)
    layer = (
        forward_bytes(shape, mode, adapter=seat.config.adapter is not None)
        + 2 * (4 if mode == "float32" else 6) * shape.heads * scores
    )
    head = head_chunk_bytes(batch.completion, shape, mode, device)
    head += (2 if mode == "autocast" else 0) * shape.head_parameters + batch.completion * shape.hidden * 6
    moments = [
        {"activations": tokens * layer},
        {"activations": tokens * stream_bytes(shape, mode), "head": head},
    ]
    return max(moments, key=lambda found: sum(found.values()))


def update_parts(seat: Seat, recipe: Recipe, layout: Layout, device: str = "cuda") -> dict[str, float]:
    """What the update of one agent adds, at the worst of three moments: at the head, where the backward pass begins, and at
    its end."""
    training, shape = recipe.training, seat.shape
    assert training is not None
    mode = mode_of(seat, training, layout)
    gradients = gradient_bytes(seat, layout, mode)
    moments: list[dict[str, float]] = []
    for batch in batches(seat, training, layout):
        several = batch.count > 1  # the first micro-batch finds no gradients yet
        moments += [
            {"gradients": gradients * several, **_at_head(seat, recipe, batch, mode, device)},
            {"gradients": gradients * several, **_in_backward(seat, recipe, batch, mode, device)},
            {
                "gradients": gradients,
                "activations": batch.tokens * stream_bytes(shape, mode) * 2,
                **_at_end(seat, mode),
            },
        ]
    return max(moments, key=lambda parts: sum(parts.values())) | _gathered(shape, layout, mode)


def _resident_gradients(trained: int, layout: Layout, mode: Mode) -> dict[str, float]:
    """What DeepSpeed makes room for once: float32 gradients (ZeRO-1 in bfloat16, ZeRO-3), and ZeRO-3's bucket of gradients on
    their way, in float32."""
    if layout.zero == 1 and mode == "bfloat16":
        return {"gradients": 4.0 * trained}
    if layout.zero == 3:
        share = 0.0 if layout.offload != "none" else 4.0 * trained / layout.gpus
        return {"gradients": share, "gradient bucket": 4 * BUCKET}
    return {}


def gradient_bytes(seat: Seat, layout: Layout, mode: Mode) -> float:
    """What gradients add during an update. In one process and under DDP all of them, in float32. DeepSpeed's ZeRO-1 all of
    them in the weights' type; ZeRO-2 a share in float32; where it reduces them in buckets, one of those."""
    trained = seat.trained
    size = 2 if mode == "bfloat16" else 4
    if layout.zero == 0:
        return 4.0 * trained
    if layout.zero == 1:
        return float(size * trained) + (4 * BUCKET if size == 4 else 0)
    share = 0.0 if layout.zero == 3 or layout.offload != "none" else 4.0 * trained / layout.gpus
    return share + (size * BUCKET if layout.zero == 2 else 0)


def _weight_copies(seat: Seat, mode: Mode, layers: float) -> dict[str, float]:
    if mode != "autocast":
        return {}
    return {"bfloat16 copies of weights": 2.0 * seat.shape.linear_parameters * layers / seat.shape.layers}


def _saved(seat: Seat, recipe: Recipe, batch: Batch, mode: Mode, device: str) -> tuple[float, float]:
    """(bytes that all layers have kept when the head is reached, what one layer keeps)."""
    assert recipe.training is not None
    shape = seat.shape
    scores = kept_scores(recipe, mode, batch.width, device)
    layer = batch.tokens * layer_bytes(shape, mode, scores, seat.config.adapter)
    stream = batch.tokens * stream_bytes(shape, mode)
    if recipe.training.gradient_checkpointing:
        return (shape.layers + 1) * stream, layer
    return shape.layers * layer + stream, layer


def _at_head(seat: Seat, recipe: Recipe, batch: Batch, mode: Mode, device: str) -> dict[str, float]:
    shape = seat.shape
    saved, _ = _saved(seat, recipe, batch, mode, device)
    stream = batch.tokens * stream_bytes(shape, mode)
    trains_head = seat.config.adapter is None
    # the last norm: what it normalised, in float32, and what it gave
    activations = saved + batch.tokens * 4 * shape.hidden + stream
    hidden = batch.completion * shape.hidden
    head = head_chunk_bytes(batch.completion, shape, mode, device) + hidden * (8 if mode == "float32" else 12)
    if mode == "autocast":
        head += 2.0 * shape.head_parameters  # the head's weight in bfloat16
    if trains_head:
        head += (4.0 if mode == "float32" else 6.0) * shape.head_parameters  # its gradient, and one chunk's part of it
    return {"activations": activations, "head": head} | _weight_copies(seat, mode, shape.layers)


def _in_backward(seat: Seat, recipe: Recipe, batch: Batch, mode: Mode, device: str) -> dict[str, float]:
    assert recipe.training is not None
    shape, training = seat.shape, recipe.training
    saved, layer = _saved(seat, recipe, batch, mode, device)
    stream = batch.tokens * stream_bytes(shape, mode)
    hidden, intermediate = batch.tokens * shape.hidden, batch.tokens * shape.intermediate
    feed_forward = (8 if mode == "float32" else 4) * intermediate
    if training.gradient_checkpointing:
        # one layer is computed again, its feed-forward part goes back first
        activations = saved + layer + stream + feed_forward
        if seat.config.adapter is not None and mode == "bfloat16":
            activations += 6 * hidden + 2 * intermediate  # inputs of adapters in float32
        copies = 1.0
    else:
        # the last norm, in float32, or the last layer's feed-forward part
        activations = saved + max((22 if mode == "bfloat16" else 20) * hidden, 2 * stream + feed_forward)
        copies = float(shape.layers)
    head = 4.0 * shape.head_parameters if shape.tied and seat.config.adapter is None else 0.0
    return {"activations": activations, "head": head} | _weight_copies(seat, mode, copies)


def _at_end(seat: Seat, mode: Mode) -> dict[str, float]:
    """The embedding's gradient comes whole, beside the head's where they are tied."""
    shape = seat.shape
    if seat.config.adapter is not None:
        return {"head": 0.0}
    size = 2 if mode == "bfloat16" else 4
    return {"head": (size + (4.0 if shape.tied else 0.0)) * shape.head_parameters}


def _gathered(shape: Shape, layout: Layout, mode: Mode) -> dict[str, float]:
    """Weights that ZeRO-3 has made whole."""
    if layout.zero < 3:
        return {}
    return {"gathered weights": (2.0 if mode == "bfloat16" else 4.0) * min(LIVE, shape.parameters)}


# --- all agents -------------------------------------------------------------------------------------------------------


def phases(seats: Sequence[Seat], recipe: Recipe, layout: Layout, device: str = "cuda") -> dict[str, Phase]:
    """Peak of every phase on one GPU, all agents together: their weights, optimisers and engines live on the same GPU, their
    engines decode side by side, and they are scored and updated one after the other."""
    stays = stay(seats, recipe, layout)
    kept = sum(sum(parts.values()) for parts in stays.values())
    moved = _idle_optimisers(stays, recipe, layout)
    base = kept - sum(moved.values())
    found = {"idle": Phase({"resident": base})}
    if recipe.engine.backend != "scripted":
        found["generation"] = Phase({"resident": base, **generation_parts(seats, recipe)})
    trained = [seat for seat in seats if seat.trained]
    if recipe.training is not None and trained:
        if needs_scores(recipe):
            found["scoring"] = _worst(base, [scoring_parts(seat, recipe, layout, device) for seat in trained])
        updates = []
        for seat in trained:
            parts = update_parts(seat, recipe, layout, device)
            own = moved.get(seat.config.name, 0.0)
            updates.append(parts | ({"optimiser, back for the update": own} if own else {}))
        found["update"] = _worst(base, updates)
        # tensors are copied one by one, straight into the engine's
        found["push"] = Phase({"resident": base})
    return {name: found[name] for name in PHASES if name in found}


def stay(seats: Sequence[Seat], recipe: Recipe, layout: Layout) -> dict[str, dict[str, float]]:
    """`resident` of every agent; a shared base counts with the first that has it."""
    result = {}
    bases = 0
    for seat in seats:
        shared = seat.config.base == "shared"
        result[seat.config.name] = resident(seat, recipe, layout, base=not (shared and bases))
        bases += shared
    return result


def _idle_optimisers(stays: Mapping[str, Mapping[str, float]], recipe: Recipe, layout: Layout) -> dict[str, float]:
    """What `training.offload_idle` keeps in CPU memory between updates, by agent."""
    if recipe.training is None or not recipe.training.offload_idle:
        return {}
    return {name: parts.get("optimiser", 0.0) for name, parts in stays.items()}


def _worst(base: float, options: Sequence[Mapping[str, float]]) -> Phase:
    worst = max(options, key=lambda parts: sum(parts.values()))
    return Phase({"resident": base, **{name: value for name, value in worst.items() if value}})
