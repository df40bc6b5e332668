"""From hidden states to log-probabilities, entropies and their gradient, a few rows of logits at a time.

With n completion tokens and a vocabulary of V, the plain path (`completion_logprobs`, then backward) holds several float32
tensors [n, V]: 2.5 GB each for 4,096 tokens of Qwen's vocabulary. Here logits are made for a chunk of rows, turned in place
into what the loss needs of them and into the loss's gradient, multiplied into the gradients of hidden states and head, and
overwritten by the next chunk: the same three matrix products, and never more than `CHUNK_BYTES` of [n, V].

The work is done by the head module's own `forward`, replaced for one call of the model. So wrappers and hooks see their
modules called as ever, which DDP needs, and ZeRO-3, where a weight is whole only inside its module's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from umad.learning.batching import Batch, completion_logits, unwrapped

CHUNK_BYTES = {"cpu": 2**28}
"""What the buffers of one chunk take together, by device type. More rows make better use of each pass over the head's
gradient, which every chunk reads and writes."""
CHUNK_BYTES_ELSEWHERE = 2**30

TokenLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""Called with (rows, logprobs [c], entropy [c]), the two with gradient; returns those rows' scalar share of the loss."""
SequenceLoss = Callable[[Tensor, Tensor], Tensor]
"""Called once with (logprobs [n], entropy [n]), both with gradient; returns the scalar loss."""


@dataclass(frozen=True, eq=False)
class Stats:
    """Of each completion token, [n], at least float32, no gradient. All but `logit` are those of softmax(logits / temperature).

    logprobs: of the token, nats. entropy: of its distribution, nats. certainty: KL(uniform || distribution) =
    -log V - mean over the vocabulary of log p (arXiv 2502.18581). logit: the token's, as the model gives it.
    """

    logprobs: Tensor
    entropy: Tensor
    certainty: Tensor
    logit: Tensor


@dataclass(frozen=True, eq=False)
class FusedOutput:
    """`loss`: the scalar to differentiate, once. logprobs, entropy: [n], detached, for metrics."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor


_AFTER_HEAD = {
    # how configs of transformers' models name what is done to logits after the head, and the value that does nothing
    "final_logit_softcapping": None,  # Gemma, NanoChat, Inkling
    "logits_soft_cap": None,  # RecurrentGemma
    "output_logit_soft_cap": None,  # xLSTM
    "unpadded_vocab_size": None,  # Inkling
    "logit_scale": 1.0,  # Cohere
    "logits_scaling": 1.0,  # Granite, HyperCLOVA X
    "lm_head_multiplier": 1.0,  # Falcon-H1
}


def is_plain_head(model: nn.Module, head: nn.Module) -> bool:
    """Whether logits are exactly what a plain linear `head` gives, so that they can be made in pieces.

    Nothing is run: the head must be an `nn.Linear` itself (no adapter around it, no `forward` put in its place), and the
    config must not name a soft-cap, a scale or a cut of the logits that comes after it. A model that changes its logits in a
    way that no config tells is found at its first loss, which raises.
    """
    config = unwrapped(model).config.get_text_config(decoder=True)
    linear = type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return linear and all(getattr(config, name, None) in (None, idle) for name, idle in _AFTER_HEAD.items())


@torch.no_grad()
def scores(model: nn.Module, head: nn.Module, batch: Batch, temperature: float) -> Stats:
    """What the model says about the batch's completion tokens, without gradient.

    `model` may be wrapped; `head` is the module inside it that makes logits. Where the head is not plain, the logits are
    made whole.
    """
    if not is_plain_head(model, head):
        logits = completion_logits(model, head, batch)
        return _stats(_Given(logits, batch.targets, temperature))
    linear: Any = head
    found: list[Stats] = []

    def read(hidden: Tensor) -> Tensor:
        found.append(_stats(_Head(hidden, linear.weight, linear.bias, batch.targets, temperature)))
        return hidden.new_zeros((), dtype=torch.float32)

    _call(model, head, batch, read)
    return found[0]


def fused_loss(
    model: nn.Module, head: nn.Module, batch: Batch, temperature: float, token_loss: TokenLoss
) -> FusedOutput:
    """A loss that is a sum over tokens: log-probabilities, entropies and gradients in one pass over the logits.

    `token_loss` is called for consecutive slices of the n completion tokens, during the model's forward pass; the loss is
    the sum of what it returns. How the tokens are cut is not its business. `backward` of the loss must be called at most once.
    """
    linear: Any = head

    def fuse(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _Fused.apply(hidden, linear.weight, linear.bias, batch.targets, temperature, token_loss)

    if not is_plain_head(model, head):
        return _whole(model, head, batch, temperature, lambda logprobs, h: token_loss(slice(0, len(h)), logprobs, h))
    return _fused(model, head, batch, fuse)


def sequence_loss(
    model: nn.Module, head: nn.Module, batch: Batch, temperature: float, loss: SequenceLoss
) -> FusedOutput:
    """Any loss of all log-probabilities and entropies of the batch, as those that look at whole sequences (GSPO).

    Two passes over the logits: the first for the values, from which `loss` gives its gradient with respect to them, and
    the second, with that gradient, as in `fused_loss`. One matrix product of four is made twice.
    """
    linear: Any = head

    def fuse(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            stats = _stats(_Head(hidden, linear.weight, linear.bias, batch.targets, temperature))
        value, by_logprob, by_entropy = _differentiate(loss, stats.logprobs, stats.entropy)

        def weighted(rows: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
            total = (by_logprob[rows] * logprobs).sum()
            return total if by_entropy is None else total + (by_entropy[rows] * entropy).sum()

        carried, logprobs, entropy = _Fused.apply(
            hidden, linear.weight, linear.bias, batch.targets, temperature, weighted
        )
        return carried + (value - carried.detach()), logprobs, entropy

    if not is_plain_head(model, head):
        return _whole(model, head, batch, temperature, loss)
    return _fused(model, head, batch, fuse)


def _fused(
    model: nn.Module, head: nn.Module, batch: Batch, fuse: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
) -> FusedOutput:
    found: list[tuple[Tensor, Tensor]] = []

    def read(hidden: Tensor) -> Tensor:
        loss, logprobs, entropy = fuse(hidden)
        found.append((logprobs, entropy))
        return loss

    return FusedOutput(_call(model, head, batch, read), *found[0])


def _whole(model: nn.Module, head: nn.Module, batch: Batch, temperature: float, loss: SequenceLoss) -> FusedOutput:
    """The same by plain autograd on whole logits."""
    logits = completion_logits(model, head, batch)
    table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
    logprobs = table.gather(-1, batch.targets[:, None]).squeeze(-1)
    entropy = -(table.exp() * table).sum(-1)
    return FusedOutput(loss(logprobs, entropy), logprobs.detach(), entropy.detach())


# --- the head's forward pass, replaced for one call -------------------------------------------------------------------


def _call(model: nn.Module, head: nn.Module, batch: Batch, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs the model with `read` in its head's place, on the hidden states [n, H] of the completion positions; returns the
    scalar that `read` returned, by way of the model's and its wrappers' outputs."""

    def forward(hidden: Tensor) -> Tensor:
        value = read(hidden.reshape(-1, hidden.shape[-1])[batch.index])
        # in the place of logits [1, 1, V]; the second one shows if the model does something to its logits
        return torch.stack([value, torch.ones_like(value)]).reshape(1, 1, 2)

    with _replaced(head, forward):
        output = model(**batch.inputs()).logits
    if output.shape != (1, 1, 2) or float(output.detach()[0, 0, 1]) != 1.0:
        raise RuntimeError(
            f"{type(unwrapped(model)).__name__} changes its logits after its head, in a way that its config does not tell; "
            "umad.learning.head has to know by which setting (_AFTER_HEAD)"
        )
    return output[0, 0, 0]


@contextmanager
def _replaced(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


# --- chunks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Chunk:
    """What is known of c rows. With z = logits / T - max: `p` [c, V] is exp(z), `pz` [c, V] is exp(z) z, both in buffers
    that the next chunk overwrites; `total` [c] is the sum of exp(z). Statistics [c] as in `Stats`."""

    rows: slice
    targets: Tensor
    p: Tensor
    pz: Tensor
    total: Tensor
    logprobs: Tensor
    entropy: Tensor
    certainty: Tensor | None
    logit: Tensor

    def gradient(self, by_logprob: Tensor, by_entropy: Tensor | None, temperature: float) -> Tensor:
        """dL/dlogits [c, V] from dL/dlogprob [c] and dL/dentropy [c], in the memory of `p`.

        dlogprob/dz_j = [j = target] - q_j and dentropy/dz_j = -q_j (log q_j + entropy), with q = p / total.
        """
        scale = temperature * self.total
        weight = -by_logprob
        if by_entropy is not None:
            weight = weight - by_entropy * (self.entropy - self.total.log())
        gradient = self.p.mul_((weight / scale)[:, None])
        if by_entropy is not None:
            gradient.addcmul_(self.pz, (-by_entropy / scale)[:, None])
        return gradient.scatter_add_(1, self.targets, (by_logprob / temperature)[:, None])


class _Chunks:
    """Cuts n rows of logits into chunks that fit `CHUNK_BYTES`, in buffers that are made once.

    narrow: the type that logits are made in; wide: that of all that is done with them.
    """

    def __init__(self, n: int, vocabulary: int, targets: Tensor, temperature: float, narrow: torch.dtype) -> None:
        self.targets, self.temperature = targets, temperature
        self.narrow, self.wide = narrow, torch.promote_types(narrow, torch.float32)
        bytes_per_row = vocabulary * (2 * self.wide.itemsize + (narrow.itemsize if narrow != self.wide else 0))
        limit = CHUNK_BYTES.get(targets.device.type, CHUNK_BYTES_ELSEWHERE)
        size = max(1, min(n, limit // bytes_per_row))
        # equal parts: a last chunk of a few rows would pay for a whole pass over the head's gradient
        size = -(-n // -(-n // size))
        self.slices = [slice(first, min(first + size, n)) for first in range(0, n, size)]
        self._z = torch.empty((size, vocabulary), dtype=self.wide, device=targets.device)
        self._p = torch.empty_like(self._z)
        self.made = self._z if narrow == self.wide else torch.empty_like(self._z, dtype=narrow)
        """[size, V], free for logits as they are made, and for their gradient as it goes back into the head."""

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """The rows' logits [c, V] before any temperature, written to `out` [c, V] of type `narrow`."""
        raise NotImplementedError

    def read(self, certainty: bool = False) -> Iterator[_Chunk]:
        for rows in self.slices:
            c = rows.stop - rows.start
            targets = self.targets[rows, None]
            z = self._z[:c]
            made = self.logits(rows, self.made[:c])
            if made.dtype != self.wide:
                z.copy_(made)
            logit = z.gather(1, targets).squeeze(1)
            if self.temperature != 1.0:
                z.div_(self.temperature)
            z.sub_(z.amax(-1, keepdim=True))
            p = torch.exp(z, out=self._p[:c])
            # plain sums over V: torch adds in a tree, so float32 is good to 1e-6 (a dot product would not be)
            total = p.sum(-1)
            log_total = total.log()
            logprobs = z.gather(1, targets).squeeze(1) - log_total
            sure = log_total - z.mean(-1) - torch.log(log_total.new_tensor(z.shape[1])) if certainty else None
            pz = z.mul_(p)
            entropy = log_total - pz.sum(-1) / total
            yield _Chunk(rows, targets, p, pz, total, logprobs, entropy, sure, logit)


class _Given(_Chunks):
    """Logits [n, V] that are there already."""

    def __init__(self, logits: Tensor, targets: Tensor, temperature: float) -> None:
        super().__init__(len(logits), logits.shape[1], targets, temperature, logits.dtype)
        self.whole = logits

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        return out.copy_(self.whole[rows])


class _Head(_Chunks):
    """Logits from hidden states [n, H] and a linear head's weight [V, H] and bias [V]. Under autocast, products are made in
    its type, as the head would make them."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> None:
        device = hidden.device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        super().__init__(len(hidden), len(weight), targets, temperature, narrow)
        self.hidden, self.weight = hidden.detach().to(narrow), weight.detach().to(narrow)
        self.bias = None if bias is None else bias.detach().to(narrow)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(self.hidden[rows], self.weight.t(), out=out)
        return torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=out)


def _stats(chunks: _Chunks) -> Stats:
    found = [(c.logprobs, c.entropy, c.certainty, c.logit) for c in chunks.read(certainty=True)]
    return Stats(*(torch.cat(column) for column in zip(*found, strict=True)))


def _differentiate(
    loss: Callable[[Tensor, Tensor], Tensor], logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss's value and its gradients with respect to log-probabilities and entropies; None for entropies if unused."""
    with torch.enable_grad():
        leaves = [logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()]
        value = loss(*leaves)
        if not value.requires_grad:  # it looks at neither
            return value, torch.zeros_like(logprobs), None
        by_logprob, by_entropy = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach(), torch.zeros_like(logprobs) if by_logprob is None else by_logprob, by_entropy


class _Fused(torch.autograd.Function):
    """(hidden [n, H], weight [V, H], bias [V] or None, ...) -> (loss, logprobs [n], entropy [n]), and the gradients with it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        token_loss: TokenLoss,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunks = _Head(hidden, weight, bias, targets, temperature)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # weight and bias add up over chunks, for which narrow types are too coarse
        by_hidden = torch.zeros_like(hidden, dtype=chunks.narrow) if need_hidden else None
        by_weight = torch.zeros_like(weight, dtype=chunks.wide) if need_weight else None
        by_bias = torch.zeros_like(bias, dtype=chunks.wide) if bias is not None and need_bias else None
        total = torch.zeros((), dtype=chunks.wide, device=hidden.device)
        logprobs, entropy = (torch.empty(len(hidden), dtype=chunks.wide, device=hidden.device) for _ in range(2))
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in chunks.read():
                rows = chunk.rows
                logprobs[rows], entropy[rows] = chunk.logprobs, chunk.entropy
                loss, by_logprob, by_entropy = _differentiate(partial(token_loss, rows), chunk.logprobs, chunk.entropy)
                total += loss
                gradient = chunk.gradient(by_logprob, by_entropy, temperature)
                if by_bias is not None:
                    by_bias += gradient.sum(0)
                if chunks.narrow != chunks.wide:
                    gradient = chunks.made[: len(gradient)].copy_(gradient)
                if by_hidden is not None:
                    torch.mm(gradient, chunks.weight, out=by_hidden[rows])
                if by_weight is not None:
                    _add_product(by_weight, gradient.t(), chunks.hidden[rows])
        made = ((by_hidden, hidden), (by_weight, weight), (by_bias, bias))
        ctx.gradients = [None if g is None or x is None else g.to(x.dtype) for g, x in made]
        ctx.mark_non_differentiable(logprobs, entropy)
        return total, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "a fused loss can be differentiated only once: its gradients are made with it and given away"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*(g if g is None else g.mul_(by_loss) for g in gradients), None, None, None)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where the total may be of a wider type."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
