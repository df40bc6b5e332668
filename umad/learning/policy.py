"""One agent's policy: its model, optimiser and schedule, and what can be done with them. It knows samples only."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from umad.config import LossConfig, TrainingConfig
from umad.learning.batching import Batch, collate, completion_logprobs, micro_batches
from umad.learning.losses import loss_normaliser, total_loss
from umad.records import Sample


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

    model: any Hugging Face causal LM; its weights become float32 master weights (wider ones stay), with
    `training.precision: bfloat16` its passes run under autocast. With a KL coefficient a frozen copy of the model as given
    here is the reference, so give the start model, also on resume, and load the resumed weights with `load_model`.
    temperature: of the rollouts; log-probabilities are those of softmax(logits / temperature). pad_id: any valid token.
    total_steps: number of `update` calls in the whole training, for the schedule. learning_rate: its peak.
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
    ) -> None:
        self.name = name
        self.training, self.loss = training, loss
        self.temperature, self.pad_id = temperature, pad_id
        self.total_steps = total_steps
        self.learning_rate = training.learning_rate if learning_rate is None else learning_rate
        self.steps = 0
        """`update` calls so far, those included that could not move the weights: the schedule follows the training step."""
        self.accelerator = Accelerator(mixed_precision="no")  # precision is ours: see `_passes`
        _widen(model)
        _no_dropout(model)
        _make_savable(model)
        self.vocabulary = _vocabulary(model)
        self.reference = _frozen_copy(model, self.accelerator.device) if loss.kl.coef > 0 else None
        if training.gradient_checkpointing:
            _checkpoint_activations(model)
        model.train(training.gradient_checkpointing)  # models checkpoint in training mode only; dropout is off in both
        optimizer = torch.optim.AdamW(
            _parameter_groups(model, training.weight_decay), lr=self.learning_rate, betas=training.betas
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    # --- scoring ----------------------------------------------------------------------------------------------------

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities (float32 [C], nats) of every sample's completion tokens under the current weights."""
        self._check(samples)
        result: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for members in micro_batches(samples, self.training.micro_batch_tokens):
            batch = self._collate([samples[i] for i in members])
            with torch.no_grad():
                logprobs, _ = self._passes(self.model, batch)
            rows = logprobs.float().cpu().split(batch.lengths.tolist())
            for i, row in zip(members, rows, strict=True):
                result[i] = row.numpy().copy()
        return result

    def _passes(self, model: nn.Module, batch: Batch, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        unwrapped: Any = self.accelerator.unwrap_model(model)
        bf16 = self.training.precision == "bfloat16"
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=bf16):
            return completion_logprobs(model, unwrapped.get_output_embeddings(), batch, self.temperature, entropy)

    def _collate(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, self.pad_id, self.accelerator.device)

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

    def update(self, samples: Sequence[Sample], old: Sequence[np.ndarray] | None = None) -> dict[str, float]:
        """One optimiser step on the samples that are in the loss; returns metrics.

        old: log-probabilities [C] of each sample's completion before this iteration's first update. None: the current
        ones, which they are when a batch is used once and the sampler's are exact (every ratio is then 1).

        Samples with advantage 0 and no KL term have no gradient: they count in the normaliser and are not computed. When
        nothing has a gradient the optimiser is left alone (its momentum would still move the weights). A loss or gradient
        norm that isn't finite leaves weights and optimiser as they were, and is counted as `nonfinite`.
        """
        if old is not None and len(old) != len(samples):
            raise ValueError(f"{len(samples)} samples but old log-probabilities of {len(old)}")
        in_loss = [i for i, s in enumerate(samples) if s.in_loss]
        computed = [i for i in in_loss if samples[i].advantage != 0 or self.reference is not None]
        rate = self._set_learning_rate()
        self.steps += 1
        metrics = {
            "lr": rate,
            "samples": float(len(samples)),
            "in_loss": float(len(in_loss)),
            "skipped": float(len(in_loss) - len(computed)),
            "loss_tokens": float(sum(len(samples[i].completion_ids) for i in in_loss)),
            "nonfinite": 0.0,
            "updated": 0.0,
        }
        if not computed:
            return metrics
        chosen = [samples[i] for i in computed]
        self._check(chosen)
        self.optimizer.zero_grad(set_to_none=True)
        normaliser = loss_normaliser(self.loss.type, [len(samples[i].completion_ids) for i in in_loss])
        measured = self.backward(chosen, normaliser, None if old is None else [old[i] for i in computed])
        norm = self._clip() if math.isfinite(measured["loss"]) else math.nan
        metrics |= measured | {"grad_norm": norm}
        if math.isfinite(norm):
            self.optimizer.step()
            metrics["updated"] = 1.0
        else:
            metrics["nonfinite"] = 1.0
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def backward(
        self, samples: Sequence[Sample], normaliser: float, old: Sequence[np.ndarray] | None = None
    ) -> dict[str, float]:
        """Adds the gradient of the loss of `samples`, all taken as in the loss, to the parameters; returns metrics.

        `normaliser` divides the sum over all micro-batches (`loss_normaliser` of the whole optimiser step's samples).
        """
        sums: defaultdict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        for members in micro_batches(samples, self.training.micro_batch_tokens):
            rows = [samples[i] for i in members]
            before = None if old is None else [old[i] for i in members]
            self._backward_batch(rows, normaliser, before, sums, maxima)
        tokens = sums["completion_tokens"]
        metrics = {"loss": sums["loss"], "policy_loss": sums["policy_loss"] / normaliser}
        per_token = ("kl", "entropy", "ratio", "sampler_gap", "clipped_high", "clipped_low", "clipped_dual")
        metrics |= {name: sums[name] / tokens for name in per_token if name in sums}
        metrics |= maxima
        metrics["computed_tokens"] = float(sums["tokens"])
        metrics["padding"] = 1.0 - sums["tokens"] / sums["padded"]
        metrics["micro_batches"] = float(sums["micro_batches"])
        return metrics

    def _backward_batch(
        self,
        rows: Sequence[Sample],
        normaliser: float,
        old: Sequence[np.ndarray] | None,
        sums: defaultdict[str, float],
        maxima: dict[str, float],
    ) -> None:
        batch = self._collate(rows)
        logprobs, entropy = self._passes(self.model, batch, entropy=True)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self._passes(self.reference, batch)
        advantages = logprobs.new_tensor([s.advantage for s in rows])[batch.sequence]
        current = logprobs.detach()
        before = current if old is None else torch.from_numpy(np.concatenate(old)).to(current)
        output = total_loss(
            self.loss, logprobs, before, advantages, batch.sequence, batch.lengths, normaliser, reference
        )
        self.accelerator.backward(output.loss)
        gap = (torch.from_numpy(np.concatenate([s.logprobs for s in rows])).to(current) - current).abs()
        assert entropy is not None
        added = {
            **output.sums,
            "loss": float(output.loss.detach()),
            "entropy": float(entropy.sum()),
            # between the sampler's log-probabilities and the trainer's: no clipping, no correction
            "sampler_gap": float(gap.sum()),
            "completion_tokens": len(current),
            "tokens": batch.tokens,
            "padded": batch.padded,
            "micro_batches": 1,
        }
        for name, value in added.items():
            sums[name] += value
        for name, value in {**output.maxima, "sampler_gap_max": float(gap.max())}.items():
            maxima[name] = max(maxima.get(name, value), value)

    def _clip(self) -> float:
        """The gradient's global norm before clipping; clips where `max_grad_norm` is not 0."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.training.max_grad_norm
        if limit > 0:
            return float(self.accelerator.clip_grad_norm_(parameters, limit))
        return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def _set_learning_rate(self) -> float:
        factor = learning_rate_factor(self.training.schedule, self.steps, self.training.warmup_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor
        return self.learning_rate * factor

    # --- weights and state ------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the model's state dict, detached, sharing memory with the master weights: copy to keep."""
        for name, tensor in self.accelerator.unwrap_model(self.model).state_dict().items():
            yield name, tensor.detach()

    def finite(self) -> bool:
        """Whether every weight is a finite number."""
        return all(bool(torch.isfinite(tensor.sum(dtype=torch.float64))) for _, tensor in self.weights())

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """Writes a plain Hugging Face folder: config, safetensors with the master weights, tokenizer and template."""
        with _no_bars():
            self.accelerator.unwrap_model(self.model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def load_model(self, folder: Path) -> None:
        """Takes the weights of a folder that `save_model` wrote. The reference stays what it was."""
        model: Any = self.accelerator.unwrap_model(self.model)
        with _no_bars():
            loaded = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype, local_files_only=True)
        model.load_state_dict(loaded.state_dict())

    def training_state(self) -> dict[str, Any]:
        """What resuming needs beside the model: optimiser state and step (tensors and plain values only)."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_training_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])


def _widen(model: nn.Module) -> None:
    """Floating weights narrower than float32 become float32."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _no_dropout(model: nn.Module) -> None:
    """Turns dropout off in every mode, so that updating and scoring are the same function. The config keeps its value."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _make_savable(model: Any) -> None:
    """transformers loads generation configs that contradict themselves (temperature without do_sample, as Llama 2's) and
    refuses to save them: found out here, not after hours of training. Only the special tokens of such a one are kept."""
    from transformers import GenerationConfig

    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**special)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keeps transformers' progress bars out of the run's own output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _checkpoint_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # transformers >= 5.24's name for it
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _frozen_copy(model: nn.Module, device: torch.device) -> nn.Module:
    reference = copy.deepcopy(model).to(device).eval()
    return reference.requires_grad_(False)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) don't."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
