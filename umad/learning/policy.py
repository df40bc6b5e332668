"""One agent's policy: its model, optimiser and schedule, and what can be done with them. It knows samples only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from umad.config import LossConfig, TrainingConfig
from umad.learning.batching import Batch, collate, is_packable, micro_batches, pack
from umad.learning.head import fused_loss, scores, sequence_loss
from umad.learning.losses import correction_mode, is_token_level, loss_metrics, loss_normaliser, total_loss
from umad.learning.modeling import (
    checkpoint_activations,
    choose_attention,
    frozen_copy,
    halve_linear,
    make_savable,
    no_bars,
    no_dropout,
    vocabulary,
    widen,
)
from umad.learning.parallel import buckets, parallel
from umad.learning.world import World
from umad.records import Sample, Scores


def learning_rate_factor(schedule: str, step: int, warmup: int, total: int) -> float:
    """What the peak learning rate is multiplied with at `step` (0-based) of `total`.

    The first `warmup` steps rise in a straight line, the last of them reaching 1; then `constant` stays, `linear` and
    `cosine` fall towards 0 (reached one step after the last).
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class Policy:
    """A causal language model that learns from samples.

    model: any Hugging Face causal LM, with or without an adapter (`umad.learning.adapters`); what of it is trained becomes
    float32 master weights (wider ones stay), with `training.precision: bfloat16` its passes run under autocast. With a KL
    coefficient the reference is the base without its adapter, or a frozen copy of the model as given here: so give the start
    model, also on resume, and load the resumed weights with `load_model`.
    temperature: of the rollouts; log-probabilities are those of softmax(logits / temperature). pad_id: any valid token.
    total_steps: training steps in the whole run, for the schedule. learning_rate: its peak. max_tokens: longest response.
    exact: whether samples' log-probabilities are this policy's own (else `loss.correction: auto` corrects for it).
    world: the ranks that train together; each brings its own samples, and every call must be made on all of them.
    shared_base: the model has tensors in common with other policies'.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        training: TrainingConfig,
        loss: LossConfig,
        temperature: float,
        pad_id: int,
        total_steps: int,
        learning_rate: float | None = None,
        *,
        max_tokens: int = 1024,
        exact: bool = True,
        world: World | None = None,
        shared_base: bool = False,
    ) -> None:
        from umad.learning.adapters import is_adapted

        self.name = name
        self.training, self.loss = training, loss
        self.temperature, self.pad_id = temperature, pad_id
        self.total_steps = total_steps
        self.learning_rate = training.learning_rate if learning_rate is None else learning_rate
        self.max_tokens = max_tokens
        self.correction = correction_mode(loss.correction, exact)
        self.world = world or World()
        self.steps = 0
        """`update` calls so far, those included that could not move the weights."""
        self.failures = 0
        """Updates in a row, the last ones, that were not finite."""
        self.adapted = is_adapted(model)
        choose_attention(model, training.attention, training.precision)
        self.packed = is_packable(model)
        widen(model)
        no_dropout(model)
        make_savable(model)
        self.vocabulary = vocabulary(model)
        start = None if self.adapted or loss.kl.coef == 0 else frozen_copy(model, next(model.parameters()).device)
        if training.gradient_checkpointing:
            checkpoint_activations(model)
        model.train(training.gradient_checkpointing)  # models checkpoint in training mode only; dropout is off in both
        self.parallel = parallel(model, training, self.learning_rate, self.world, manual=shared_base)
        self.autocast = training.precision == "bfloat16" and self.parallel.kind in ("plain", "ddp")
        self.reference = None if start is None else self._prepared(start)
        self.compares = loss.kl.coef > 0
        if training.offload_idle:
            self.parallel.offload()

    def _prepared(self, reference: nn.Module) -> nn.Module:
        """The reference computes as the policy does: under autocast, or in DeepSpeed's bfloat16."""
        if self.autocast:
            halve_linear(reference)
        elif self.training.precision == "bfloat16":
            for parameter in reference.parameters():  # no buffers: rotary frequencies stay as they are
                parameter.data = parameter.data.to(torch.bfloat16)
        return reference.to(self.parallel.device)

    # --- scoring ----------------------------------------------------------------------------------------------------

    def score(self, samples: Sequence[Sample]) -> list[Scores]:
        """What the current weights say about every sample's completion tokens."""
        self._check(samples)
        result: dict[int, Scores] = {}
        module = self.parallel.module
        for members in self._in_step(micro_batches(samples, self.training.micro_batch_tokens, self.packed)):
            rows = [samples[i] for i in members] if members else [self._idle()]
            batch = self._collate(rows)
            with torch.no_grad(), self._precision():
                stats = scores(module, module.get_output_embeddings(), batch, self.temperature)
            lengths = batch.lengths.tolist()
            columns = [getattr(stats, f.name).float().cpu().split(lengths) for f in fields(Scores)]
            for row, i in enumerate(members):
                result[i] = Scores(*(column[row].numpy().copy() for column in columns))
        return [result[i] for i in range(len(samples))]

    def _in_step(self, batches: list[list[int]]) -> list[list[int]]:
        """The batches, padded with empty ones to the most that any rank has: all must make the same number of passes."""
        most = int(self.world.most({"batches": len(batches)})["batches"])
        return batches + [[] for _ in range(most - len(batches))]

    def _idle(self) -> Sample:
        """What a rank computes that has nothing left while others have."""
        ids = np.full(1, self.pad_id, np.int32)
        return Sample(self.name, (0, self.name, 0), ids, ids, np.zeros(1, np.float32), None, in_loss=False)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.parallel.device.type, torch.bfloat16, enabled=self.autocast)

    def _collate(self, samples: Sequence[Sample]) -> Batch:
        if self.packed:
            return pack(samples, self.parallel.device)
        return collate(samples, self.pad_id, self.parallel.device)

    def _check(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.agent != self.name:
                raise ValueError(f"policy {self.name!r} was given a sample of {sample.agent!r}")
            for ids in (sample.prompt_ids, sample.completion_ids):
                if ids.min() < 0 or ids.max() >= self.vocabulary:
                    raise ValueError(
                        f"a sample of {self.name!r} has token id {ids.max() if ids.min() >= 0 else ids.min()}, outside "
                        f"its model's {self.vocabulary}; is it from another tokenizer?"
                    )

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(
        self, samples: Sequence[Sample], old: Sequence[np.ndarray] | None = None, step: int | None = None
    ) -> dict[str, float]:
        """One optimiser step on the samples, of all ranks, that are in the loss; returns metrics of all ranks.

        old: log-probabilities [C] of each sample's completion before this iteration's first update. None: the current
        ones, which they are when a batch is used once (every ratio is then 1).
        step: the run's training step (1-based), which the learning rate follows; by default the number of this update.

        Samples with advantage 0 and no term beside the policy's have no gradient: they count in the normaliser and are not
        computed. When nothing has a gradient the optimiser is left alone (its momentum would still move the weights). A
        loss or gradient norm that isn't finite leaves weights and optimiser as they were, and is counted as `nonfinite`.
        """
        if old is not None and len(old) != len(samples):
            raise ValueError(f"{len(samples)} samples but old log-probabilities of {len(old)}")
        in_loss = [i for i, s in enumerate(samples) if s.in_loss]
        everything = self.compares or self.loss.entropy.coef > 0
        computed = [i for i in in_loss if everything or _pushes(samples[i])]
        lengths = [len(samples[i].completion_ids) for i in in_loss]
        chosen = [samples[i] for i in computed]
        self._check(chosen)
        counts = self.world.sum(
            {
                "samples": float(len(samples)),
                "in_loss": float(len(in_loss)),
                "skipped": float(len(in_loss) - len(computed)),
                "loss_tokens": float(sum(lengths)),
                "normaliser": loss_normaliser(self.loss, lengths, self.max_tokens),
            }
        )
        normaliser = counts.pop("normaliser")
        metrics = {
            "lr": self._set_learning_rate(self.steps if step is None else step - 1),
            **counts,
            "nonfinite": 0.0,
            "updated": 0.0,
        }
        self.steps += 1
        if counts["in_loss"] == counts["skipped"]:
            return metrics
        with self._awake():
            measured = self.backward(chosen, normaliser, None if old is None else [old[i] for i in computed])
            norm = self.parallel.step()
        finite = math.isfinite(norm)
        self.failures = 0 if finite else self.failures + 1
        return metrics | measured | {"grad_norm": norm, "nonfinite": float(not finite), "updated": float(finite)}

    def backward(
        self, samples: Sequence[Sample], normaliser: float, old: Sequence[np.ndarray] | None = None
    ) -> dict[str, float]:
        """Adds the gradient of the loss of `samples`, all taken as in the loss, to the parameters; returns metrics.

        `normaliser` divides the sum over all micro-batches and ranks (`loss_normaliser` of the whole optimiser step's
        samples). Where the whole loss isn't finite, neither is the gradient.
        """
        tally = _Tally()
        batches = self._in_step(micro_batches(samples, self.training.micro_batch_tokens, self.packed))
        for number, members in enumerate(batches):
            last = number == len(batches) - 1
            with self.parallel.accumulate(last):
                if members:
                    before = None if old is None else [old[i] for i in members]
                    loss = self._loss([samples[i] for i in members], normaliser, before, tally)
                else:
                    loss = self._idle_loss()
                if last and not math.isfinite(self.world.sum({"loss": tally.sums["loss"]})["loss"]):
                    loss = loss * math.nan
                # DDP and DeepSpeed divide by the number of ranks; the normaliser is already that of all
                self.parallel.backward(loss * self.world.size, last)
        return self._metrics(tally, normaliser)

    def _loss(
        self, rows: Sequence[Sample], normaliser: float, old: Sequence[np.ndarray] | None, tally: _Tally
    ) -> Tensor:
        batch = self._collate(rows)
        reference = self._reference(batch)

        def tensor(arrays: Sequence[np.ndarray]) -> Tensor:
            flat = torch.from_numpy(np.concatenate(arrays))
            return flat.to(self.parallel.device, torch.promote_types(flat.dtype, torch.float32))

        sampler = tensor([s.logprobs for s in rows])
        before = None if old is None else tensor(old)
        advantages = tensor([_token_advantages(s) for s in rows])

        def evaluate(part: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
            """The loss of some of the batch's tokens: of all, or of a chunk where each token's stands for itself."""
            output = total_loss(
                self.loss,
                logprobs,
                None if before is None else before[part].to(logprobs.dtype),
                advantages[part].to(logprobs.dtype),
                batch.sequence[part],
                batch.lengths,
                normaliser,
                reference=None if reference is None else reference[part],
                entropy=entropy,
                sampler=sampler[part].to(logprobs.dtype),
                correction=self.correction,
            )
            tally.add(output.sums | {"loss": float(output.loss.detach())}, output.maxima)
            return output.loss

        tally.add(
            {"tokens": float(batch.tokens), "padded": float(batch.padded), "micro_batches": 1.0},
            {},
        )
        return self._pass(batch, evaluate)

    def _pass(self, batch: Batch, evaluate: Callable[[slice, Tensor, Tensor], Tensor]) -> Tensor:
        model, head = self.parallel.model, self.parallel.module.get_output_embeddings()
        with self._precision():
            if is_token_level(self.loss, self.correction):
                return fused_loss(model, head, batch, self.temperature, evaluate).loss
            everything = slice(0, len(batch.index))
            return sequence_loss(model, head, batch, self.temperature, partial(evaluate, everything)).loss

    def _reference(self, batch: Batch) -> Tensor | None:
        if not self.compares:
            return None
        from umad.learning.adapters import without_adapter

        model: Any = self.parallel.module if self.reference is None else self.reference
        context = without_adapter(model) if self.reference is None else nullcontext()
        with torch.no_grad(), self._precision(), context:
            return scores(model, model.get_output_embeddings(), batch, self.temperature).logprobs

    def _idle_loss(self) -> Tensor:
        """A pass that changes nothing, with as many calls of the models as any other."""
        batch = self._collate([self._idle()])
        self._reference(batch)
        return self._pass(batch, lambda _, logprobs, entropy: (logprobs + entropy).sum() * 0.0)

    def _metrics(self, tally: _Tally, normaliser: float) -> dict[str, float]:
        sums = self.world.sum(tally.sums)
        metrics = {"loss": sums.pop("loss"), "policy_loss": sums.pop("policy_loss") / normaliser}
        tokens, padded, batches = (sums.pop(name) for name in ("tokens", "padded", "micro_batches"))
        metrics |= loss_metrics(sums, self.world.most(tally.maxima))
        return metrics | {"computed_tokens": tokens, "padding": 1.0 - tokens / padded, "micro_batches": batches}

    def _set_learning_rate(self, step: int) -> float:
        factor = learning_rate_factor(self.training.schedule, step, self.training.warmup_steps, self.total_steps)
        self.parallel.set_learning_rate(self.learning_rate * factor)
        return self.learning_rate * factor

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The optimiser's state is where it is needed."""
        if not self.training.offload_idle:
            yield
            return
        self.parallel.reload()
        try:
            yield
        finally:
            self.parallel.offload()

    # --- weights and state ------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what training changes: the model's state dict, or its adapter's part of it. Detached, sharing
        memory with the weights: copy to keep, and before asking for the next one (under ZeRO-3 they are whole only then).
        """
        from umad.learning.adapters import adapter_state

        module = self.parallel.module
        tensors: dict[str, Any] = {**dict(module.named_parameters(remove_duplicate=False))}
        tensors |= dict(module.named_buffers(remove_duplicate=False))
        names = list(adapter_state(module)) if self.adapted else list(module.state_dict())
        for part in buckets(names, tensors):
            with self.parallel.whole([tensors[name] for name in part if isinstance(tensors[name], nn.Parameter)]):
                for name in part:
                    yield name, tensors[name].detach()

    def finite(self) -> bool:
        """Whether every weight that is trained is a finite number, on all ranks."""
        return all(self.world.gather(self.parallel.finite()))

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """Writes a plain Hugging Face folder: config, safetensors with the weights, tokenizer and template. With an adapter
        the weights are merged (the base stays as it is) and the adapter lies in `adapter/`. All ranks call, rank 0 writes.
        """
        from umad.learning.adapters import merged_weights, save_adapter

        module = self.parallel.module
        pairs = merged_weights(module, self.parallel.whole) if self.adapted else self.weights()
        # of tied tensors one is enough: as copies they would no longer be seen to be one, and both be written
        tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(
            dict(module.named_parameters())
        )
        whole = None
        if self.adapted or self.parallel.kind == "zero3":
            kept = ((name, tensor) for name, tensor in pairs if self.world.main and name not in tied)
            whole = {name: tensor.to("cpu", copy=True) for name, tensor in kept}
        adapter = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights()} if self.adapted else {}
        if not self.world.main:
            return
        with no_bars():
            module.save_pretrained(folder, state_dict=whole)
        tokenizer.save_pretrained(folder)
        if self.adapted:
            save_adapter(module, folder / "adapter", module.config.name_or_path, adapter)

    def load_model(self, folder: Path) -> None:
        """Takes the weights of a folder that `save_model` wrote. The reference stays what it was."""
        from umad.learning.adapters import load_adapter

        module = self.parallel.module
        if self.parallel.kind == "zero3":
            return  # `load_training_state` makes the weights from the float32 masters of all ranks
        if self.adapted:
            load_adapter(module, folder / "adapter")
            return
        with no_bars():
            dtype = next(module.parameters()).dtype
            loaded = type(module).from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.parallel.load_weights(loaded.state_dict())

    def training_state(self) -> dict[str, Any]:
        """What resuming needs beside the model: optimiser state and step (tensors and plain values only); of this rank's
        part where `parallel.sharded`."""
        with self._awake():
            return {"optimizer": self.parallel.state(), "steps": self.steps, "failures": self.failures}

    def load_training_state(self, state: dict[str, Any]) -> None:
        with self._awake():
            self.parallel.load_state(state["optimizer"])
        self.steps, self.failures = int(state["steps"]), int(state["failures"])


class _Tally:
    """What an update's micro-batches add up to."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.maxima: dict[str, float] = {}

    def add(self, sums: dict[str, float], maxima: dict[str, float]) -> None:
        for name, value in sums.items():
            self.sums[name] += value
        for name, value in maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)


def _token_advantages(sample: Sample) -> np.ndarray:
    if sample.token_advantages is not None:
        return sample.token_advantages
    return np.full(len(sample.completion_ids), sample.advantage)


def _pushes(sample: Sample) -> bool:
    """Whether its policy term has a gradient."""
    return sample.advantage != 0 or (sample.token_advantages is not None and bool(sample.token_advantages.any()))
