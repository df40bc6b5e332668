"""How much one training step has to do: responses, their lengths, tokens, operations, and from assumed rates the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from umad.config import Recipe
from umad.runs.planning.machines import GB, Gpu, Layout
from umad.runs.planning.shapes import Shape

LABEL_TOKENS = 16
"""Around each response that a prompt shows."""


@dataclass(frozen=True)
class Assumptions:
    """Everything the plan takes for granted; all of it is printed with it."""

    mean_length: float
    """Tokens of a response on average."""
    problem_tokens: int = 256
    """Tokens of a problem with its instruction and the chat template."""
    context_memory: float = 0.6 * GB
    """Bytes of a GPU that the CUDA context and libraries take."""
    fragmentation: float = 0.05
    """Share of what is allocated that PyTorch's allocator holds on top of it."""
    update_mfu: float = 0.35
    """Share of the GPU's peak that the update reaches."""
    forward_mfu: float = 0.4
    """Share of the peak that scoring and prompts reach."""
    bandwidth_use: float = 0.6
    """Share of the memory bandwidth that decoding reaches."""
    layer_seconds: float = 0.0008
    """Time that Python and the driver take for one layer of one decode step of the transformers engine."""
    link: float = 100e9
    """Bytes/s between GPUs, in collectives."""
    cpu_link: float = 20e9
    """Bytes/s between a GPU and CPU memory."""

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, what it is)."""
        return [
            ("mean_length", f"{self.mean_length:g} tokens", "a response on average"),
            ("problem_tokens", f"{self.problem_tokens} tokens", "a problem with instruction and template"),
            ("context_memory", f"{self.context_memory / GB:.2g} GB", "CUDA context and libraries, per GPU"),
            ("fragmentation", f"{self.fragmentation:.0%}", "held by PyTorch's allocator on top of what is allocated"),
            ("update_mfu", f"{self.update_mfu:.0%}", "of the peak that the update reaches"),
            ("forward_mfu", f"{self.forward_mfu:.0%}", "of the peak that scoring and prompts reach"),
            ("bandwidth_use", f"{self.bandwidth_use:.0%}", "of the memory bandwidth that decoding reaches"),
            ("layer_seconds", f"{self.layer_seconds * 1e3:g} ms", "overhead of a layer in a decode step"),
            ("link", f"{self.link / 1e9:g} GB/s", "between GPUs, in collectives"),
            ("cpu_link", f"{self.cpu_link / 1e9:g} GB/s", "between a GPU and CPU memory (offloading)"),
        ]


@dataclass(frozen=True)
class Lengths:
    """Sizes of the debates of one step. Per agent where it says so; `worst` ones are what memory must hold."""

    turns: int
    per_turn: int
    """Responses of an agent to one rollout at each turn (more than one in self-consistency)."""
    prompts: tuple[float, ...]
    """Mean prompt of each turn."""
    mean: float
    longest: int
    worst_prompt: int
    problems: int
    """Of a step; 0 without training."""
    rows: int
    """Most responses of one agent that are wanted at once, on one GPU."""
    most_rows: int
    """The same, evaluations during training included: what the key-value cache must hold."""
    shared: int
    """How many of them have one prompt at turn 0."""

    @property
    def worst(self) -> int:
        return self.worst_prompt + self.longest

    @property
    def samples(self) -> int:
        """Of one agent in a step."""
        return self.problems * self.shared * self.turns if self.problems else 0

    def tokens(self) -> float:
        """Prompts and responses of one agent's samples of a step."""
        return self.problems * self.shared * sum(prompt + self.mean for prompt in self.prompts)


def lengths_of(recipe: Recipe, shape: Shape, assumed: Assumptions, gpus: int) -> Lengths:
    """What the recipe makes of a step's debates for an agent of this shape."""
    from umad.runs.build import protocol_of

    settings = protocol_of(recipe).settings
    turns = int(getattr(settings, "turns", 1))
    per_turn = int(getattr(settings, "samples", 1))
    longest = recipe.sampling.max_tokens
    room = shape.context - longest if shape.context else None
    limit = recipe.sampling.max_prompt_tokens or room
    most = math.inf if limit is None else max(1, limit)
    shown = len(recipe.agents) * (assumed.mean_length + LABEL_TOKENS)
    prompts = [min(most, float(assumed.problem_tokens))]
    prompts += [min(most, assumed.problem_tokens + shown)] * (turns - 1)
    worst = min(most, assumed.problem_tokens + len(recipe.agents) * (longest + LABEL_TOKENS) * (turns > 1))
    training = recipe.training
    problems = training.problems_per_step if training else 0
    share = -(-problems // gpus) if training else 0
    group = training.group_size * per_turn if training else 1
    evaluated = _evaluated(recipe, gpus) * per_turn
    rows = share * group if training else evaluated
    return Lengths(
        turns=turns,
        per_turn=per_turn,
        prompts=tuple(prompts),
        mean=assumed.mean_length,
        longest=longest,
        worst_prompt=math.ceil(worst),
        problems=problems,
        rows=rows,
        most_rows=max(rows, evaluated),
        shared=group,
    )


def _evaluated(recipe: Recipe, gpus: int) -> int:
    """Most debates of an evaluation at once on one GPU; 0 where a training run makes none."""
    if recipe.training is not None and not evaluates(recipe):
        return 0
    accuracy, split = recipe.evaluation.accuracy, recipe.evaluation.decomposition
    return max(1, -(-max(accuracy.problems * accuracy.rollouts, split.problems * split.rollouts) // gpus))


def evaluates(recipe: Recipe) -> bool:
    """Whether training evaluates at some step."""
    settings = recipe.evaluation
    return recipe.data.eval is not None and bool(settings.before or settings.every or settings.after)


@dataclass(frozen=True)
class Work:
    """One agent's part of a step, over all GPUs. Operations are multiplications and additions, 2 per multiply-add."""

    prompt_tokens: float
    response_tokens: float
    trained_tokens: float
    """Prompts and responses that one update passes through the model."""
    generation_flops: float
    scoring_flops: float
    update_flops: float
    generation_seconds: float | None
    scoring_seconds: float | None
    update_seconds: float | None
    push_seconds: float | None


def attention_flops(shape: Shape, length: float) -> float:
    """Forward pass of causal attention over one sequence: scores and weighted sum, 2 each per pair of tokens and element
    of a head's size, half of the pairs."""
    return 2.0 * shape.layers * shape.heads * shape.head_dim * length**2


def forward_flops(shape: Shape, prompt: float, response: float) -> float:
    """One sequence: 2 per weight and token (every token through the layers, response tokens through the head), attention."""
    total = prompt + response
    return 2 * (shape.linear_parameters * total + shape.head_parameters * response) + attention_flops(shape, total)


def update_flops(shape: Shape, prompt: float, response: float, *, checkpointing: bool, adapter: bool) -> float:
    """Forward and backward of one sequence: 3 times the forward pass (6 per weight and token), 4 times where layers are
    computed again (8; the head isn't). With an adapter the base needs no gradient of its weights: once less."""
    layers = 2 * shape.linear_parameters * (prompt + response) + attention_flops(shape, prompt + response)
    head = 2 * shape.head_parameters * response
    passes = 2 if adapter else 3
    return passes * (layers + head) + (layers if checkpointing else 0)


def work_of(
    recipe: Recipe,
    shape: Shape,
    lengths: Lengths,
    assumed: Assumptions,
    layout: Layout,
    gpu: Gpu | None,
    *,
    trained: int,
    scores: bool,
    adapter: bool,
) -> Work:
    """trained: parameters that are updated (0: none). scores: whether samples are scored before the update."""
    training = recipe.training
    per_turn = lengths.problems * lengths.shared
    sequences = [(prompt, lengths.mean) for prompt in lengths.prompts]
    # a group's prompt is computed once at turn 0; later on every rollout has its own
    computed = [lengths.problems * sequences[0][0], *(per_turn * prompt for prompt, _ in sequences[1:])]
    prefill = sum(
        count / prompt * forward_flops(shape, prompt, 0) for count, (prompt, _) in zip(computed, sequences, strict=True)
    )
    decode = sum(per_turn * (forward_flops(shape, p, r) - forward_flops(shape, p, 0)) for p, r in sequences)
    samples = sum(per_turn * forward_flops(shape, p, r) for p, r in sequences)
    update = 0.0
    if training and trained:
        checkpointing = training.gradient_checkpointing
        update = sum(
            per_turn * update_flops(shape, p, r, checkpointing=checkpointing, adapter=adapter) for p, r in sequences
        )
        update += samples if recipe.loss.kl.coef > 0 else 0.0
    scoring = samples if scores else 0.0
    half = training is not None and training.precision == "bfloat16"
    peak = None if gpu is None else gpu.bf16 if half else gpu.float32
    each = None if peak is None else peak * layout.gpus
    updates = training.updates_per_batch if training else 1
    return Work(
        prompt_tokens=per_turn * sum(p for p, _ in sequences),
        response_tokens=per_turn * sum(r for _, r in sequences),
        trained_tokens=lengths.tokens() if trained else 0.0,
        generation_flops=prefill + decode,
        scoring_flops=scoring,
        update_flops=update,
        generation_seconds=_generation_seconds(recipe, shape, lengths, assumed, layout, gpu, prefill),
        scoring_seconds=None if each is None else scoring / (each * assumed.forward_mfu),
        update_seconds=None
        if each is None
        else update / (each * assumed.update_mfu) + updates * _exchange_seconds(trained, layout, assumed, half),
        push_seconds=_push_seconds(recipe, shape, trained, gpu, assumed),
    )


def _generation_seconds(
    recipe: Recipe,
    shape: Shape,
    lengths: Lengths,
    assumed: Assumptions,
    layout: Layout,
    gpu: Gpu | None,
    prefill: float,
) -> float | None:
    """Decoding reads all weights and the cache once per step; steps go on until the longest response is done."""
    half = recipe.engine.dtype == "bfloat16"
    peak = None if gpu is None else gpu.bf16 if half else gpu.float32
    if gpu is None or peak is None or gpu.bandwidth is None:
        return None
    seconds = prefill / (peak * assumed.forward_mfu * layout.gpus)
    if not lengths.problems:
        return seconds
    size = 2 if half else 4
    slots = min(recipe.engine.max_batch, lengths.rows)
    steps = max(float(lengths.longest), lengths.rows * lengths.mean / slots)
    rows = lengths.rows * lengths.mean / steps
    for prompt in lengths.prompts:
        read = size * (shape.parameters + rows * (prompt + lengths.mean / 2) * kv_elements(shape))
        step = max(
            shape.layers * assumed.layer_seconds,
            read / (gpu.bandwidth * assumed.bandwidth_use),
            rows * 2 * (shape.linear_parameters + shape.head_parameters) / (peak * assumed.forward_mfu),
        )
        seconds += steps * step
    return seconds


def kv_elements(shape: Shape) -> int:
    """Numbers that one token has in the key-value cache."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def _exchange_seconds(trained: int, layout: Layout, assumed: Assumptions, half: bool) -> float:
    """Gradients (float32) and, under ZeRO, weights between GPUs for one update; and to CPU memory and back."""
    n = layout.gpus
    seconds = 0.0
    if n > 1:
        rounds = {0: 2 * 4, 1: 4 + (2 if half else 4), 2: 4 + (2 if half else 4), 3: 4 + 3 * (2 if half else 4)}
        seconds += rounds[layout.zero] * trained * (n - 1) / n / assumed.link
    if layout.offload != "none":
        moved = 4 + (2 if half else 4) + (2 * (2 if half else 4) if layout.offload == "all" else 0)
        seconds += moved * trained / n / assumed.cpu_link
    return seconds


def _push_seconds(recipe: Recipe, shape: Shape, trained: int, gpu: Gpu | None, assumed: Assumptions) -> float | None:
    if gpu is None or gpu.bandwidth is None:
        return None
    return (4 + (2 if recipe.engine.dtype == "bfloat16" else 4)) * trained / (gpu.bandwidth * assumed.bandwidth_use)


def without_signal(accuracy: float, group: int) -> float:
    """Expected share of groups whose members are all right or all wrong: p^G + (1 - p)^G."""
    return accuracy**group + (1 - accuracy) ** group


def signal_table(group: int, accuracies: Sequence[float]) -> list[dict[str, float]]:
    return [{"accuracy": p, "without_signal": without_signal(p, group)} for p in accuracies]
