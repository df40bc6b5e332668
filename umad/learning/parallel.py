"""How one policy's weights, gradients and optimiser lie on the ranks: plain and DDP, or DeepSpeed ZeRO.

Both are driven alike: for every micro-batch `accumulate(last)` around its forward pass and `backward`, then one `step`. All
ranks must bring the same number of micro-batches. A rank's loss is its samples' part of the whole, times the number of ranks,
because DDP and DeepSpeed average gradients.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    # wherever DeepSpeed is installed Accelerate imports it, and it would say on stdout that it found no GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from accelerate import Accelerator

from umad.config import TrainingConfig
from umad.learning.world import World, deepspeed_launch, on_cpu
from umad.records import UserError

GATHER_ELEMENTS = 2**27
"""Parameters that are made whole at once where ZeRO-3 has them in parts."""


BUCKET_ELEMENTS = 5 * 10**7
"""Of DeepSpeed's communication buffers, which every agent has of its own; DeepSpeed's default, ten times that, would keep 2 GB
for each."""


class Parallel(Protocol):
    """What `Policy` needs of either."""

    kind: str
    """`plain`, `ddp`, `zero1`, `zero2` or `zero3`."""
    model: nn.Module
    """What the training passes call: wrapped."""
    module: Any
    """The Hugging Face model in it."""
    sharded: bool
    """Whether every rank has a part of the training state (and of the weights, under `zero3`)."""

    @property
    def device(self) -> torch.device: ...
    def set_learning_rate(self, rate: float) -> None: ...
    def accumulate(self, last: bool) -> AbstractContextManager[Any]: ...
    def backward(self, loss: Tensor, last: bool) -> None: ...
    def step(self) -> float:
        """Clips, updates where the gradients are finite, forgets them. Returns their global norm before clipping (NaN or
        infinite: nothing was updated)."""
        ...

    def whole(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """Within it `parameters` are whole on every rank; changes are lost under `zero3`."""
        ...

    def finite(self) -> bool:
        """Whether this rank's part of the weights is finite."""
        ...

    def state(self) -> dict[str, Any]:
        """This rank's training state: tensors and plain values only."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...
    def load_weights(self, weights: dict[str, Tensor]) -> None: ...
    def offload(self) -> None: ...
    def reload(self) -> None: ...


def parallel(
    model: nn.Module, training: TrainingConfig, rate: float, world: World, *, manual: bool = False
) -> Parallel:
    """Prepares `model` (its parameters that require gradients) for training as the launch says.

    rate: the peak learning rate. manual: gradients are summed over the ranks by us, for modules that share tensors with
    others, which neither DDP nor DeepSpeed can wrap.
    """
    if deepspeed_launch():
        return DeepSpeedParallel(model, training, rate, world)
    return LocalParallel(model, training, rate, world, manual=manual)


class LocalParallel:
    """One process, or DDP: every rank has everything."""

    sharded = False

    def __init__(
        self, model: nn.Module, training: TrainingConfig, rate: float, world: World, *, manual: bool = False
    ) -> None:
        self.kind = "ddp" if world.size > 1 else "plain"
        self.world, self.limit = world, training.max_grad_norm
        self.manual = manual and world.size > 1
        self.accelerator = Accelerator(cpu=on_cpu(), mixed_precision="no", kwargs_handlers=_ddp_settings(world))
        self.module = model
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, training.weight_decay),
            lr=rate,
            betas=training.betas,
            fused=True if self.device.type == "cuda" else None,
        )
        self.model: nn.Module = model if self.manual else self.accelerator.prepare_model(model)

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if last or self.manual:
            return nullcontext()
        context: AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return context

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self) -> float:
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.manual:
            self._average(trained)
        gradients = [p.grad for p in trained if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            if self.limit > 0:
                torch.nn.utils.clip_grads_with_norm_(trained, self.limit, torch.tensor(norm, device=self.device))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _average(self, trained: Sequence[nn.Parameter]) -> None:
        import torch.distributed as dist

        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.world.size)

    def whole(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()

    def finite(self) -> bool:
        return _all_finite(p for p in self.module.parameters() if p.requires_grad)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.module.load_state_dict(weights)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                # AdamW's step counter stays where torch wants it
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = value.to(device)


class DeepSpeedParallel:
    """ZeRO-1, -2 or -3, with a configuration of our own: no accumulation by DeepSpeed (we set its boundaries), clipping as the
    recipe says, 0 meaning off. Stage and offloading are the launch's."""

    sharded = True

    def __init__(self, model: nn.Module, training: TrainingConfig, rate: float, world: World) -> None:
        settings = deepspeed_settings(training)
        self.stage = int(settings["zero_optimization"]["stage"])
        self.kind = f"zero{self.stage}"
        self.world = world
        if self.stage not in (1, 2, 3):
            raise UserError(
                f"deepspeed_config.zero_stage: {self.stage} is not supported; use 1, 2 or 3, or launch without it"
            )
        if self.stage == 1 and training.precision == "bfloat16":
            raise UserError(
                "training.precision: bfloat16 runs under ZeRO-2 and ZeRO-3, not under ZeRO-1, for which DeepSpeed has another "
                "optimiser; set zero_stage: 2, which needs less memory for the same communication"
            )
        self.offloads = settings["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
        self.accelerator = _deepspeed_accelerator(settings)
        optimizer = torch.optim.AdamW(parameter_groups(model, training.weight_decay), lr=rate, betas=training.betas)
        exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
        engine, wrapped = self.accelerator.prepare(model, optimizer)
        for name, buffer in engine.module.named_buffers():
            # DeepSpeed's bfloat16 takes the rotary frequencies along, whose rounding turns far positions by whole radians
            buffer.data = exact[name].to(buffer.device)
        self.engine: Any = engine
        self.optimizer: Any = wrapped.optimizer
        self.model: nn.Module = engine
        self.module: Any = engine.module
        if float(engine.gradient_clipping()) != training.max_grad_norm:
            raise RuntimeError(f"DeepSpeed clips at {engine.gradient_clipping()}, not at {training.max_grad_norm}")
        if training.offload_idle and self.stage == 3:
            raise UserError(
                "training.offload_idle: under ZeRO-3 only DeepSpeed's own optimisers could be moved; set it to false, or "
                "launch with offload_optimizer_device: cpu, which keeps them all in CPU memory"
            )

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.device)

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.backward(loss)

    def step(self) -> float:
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None and not self.optimizer.overflow else math.inf

    def whole(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        if self.stage != 3:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters))
        return context

    def finite(self) -> bool:
        return _all_finite(self._masters())

    def _masters(self) -> list[Tensor]:
        """This rank's float32 weights."""
        groups = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        masters: list[Tensor] = list(getattr(self.optimizer, groups))
        return masters

    def state(self) -> dict[str, Any]:
        # DeepSpeed's own files hold pickled objects; these are their tensors only
        whole = self.optimizer.state_dict()
        masters, inner = self._keys()
        return {"masters": [tensor.detach().clone() for tensor in whole[masters]], "optimizer": whole[inner]}

    def load_state(self, state: dict[str, Any]) -> None:
        masters, inner = self._keys()
        whole = self.optimizer.state_dict() | {masters: state["masters"], inner: state["optimizer"]}
        states: list[Any] = [None] * self.world.size
        states[self.world.rank] = whole
        self.optimizer.load_state_dict(states, load_optimizer_states=True, load_from_fp32_weights=True)

    def _keys(self) -> tuple[str, str]:
        from deepspeed.checkpoint import constants

        if self.stage == 3:
            return constants.FP32_FLAT_GROUPS, constants.OPTIMIZER_STATE_DICT
        return constants.SINGLE_PARTITION_OF_FP32_GROUPS, constants.BASE_OPTIMIZER_STATE

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.module.load_state_dict(weights)

    def offload(self) -> None:
        if not self.offloads:
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

            # not the weights that passes compute with: scoring needs them too
            kinds = [Kind.hp_params, Kind.optim_states]
            self.engine.offload_states(include=kinds, pin_memory=self.device.type == "cuda")

    def reload(self) -> None:
        if not self.offloads:
            self.engine.reload_states()


def deepspeed_settings(training: TrainingConfig) -> dict[str, Any]:
    """DeepSpeed's configuration: the launch's ZeRO section, everything else from the recipe."""
    from accelerate.utils import DeepSpeedPlugin

    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file:
        zero = json.loads(Path(file).read_text(encoding="utf-8")).get("zero_optimization", {})
    else:
        zero = dict(DeepSpeedPlugin().deepspeed_config["zero_optimization"])
    zero = {key: value for key, value in zero.items() if value != "auto"}
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device", "none") == "none":
            zero.pop(key, None)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        zero.setdefault(key, BUCKET_ELEMENTS)
    if int(zero.get("stage", 0)) == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    bf16 = training.precision == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,  # how many samples a micro-batch has is ours; DeepSpeed only wants a number
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True, "check_grad_overflow": True} if bf16 else {"enabled": False},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    }


def _deepspeed_accelerator(settings: dict[str, Any]) -> Accelerator:
    """The first Accelerator of a process brings the configuration; the further ones (one per agent) share it."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if AcceleratorState._shared_state:
        return Accelerator()
    # the fields of the launch's file are in the configuration by now; Accelerate would refuse to have both
    os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ""
    mixed = "bf16" if settings["bf16"]["enabled"] else "no"
    accelerator = Accelerator(mixed_precision=mixed, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    # else every model that is loaded later, an engine's say, would come split over the ranks
    unset_hf_deepspeed_config()
    return accelerator


def _ddp_settings(world: World) -> list[Any]:
    if world.size == 1:
        return []
    from accelerate import DistributedDataParallelKwargs

    return [DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) don't. Only what requires a gradient is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def buckets(names: Sequence[str], parameters: dict[str, Tensor], most: int = GATHER_ELEMENTS) -> Iterator[list[str]]:
    """Splits `names` in order so that each part has at most `most` elements, or one tensor."""
    part: list[str] = []
    size = 0
    for name in names:
        parameter: Any = parameters[name]
        n = getattr(parameter, "ds_numel", parameter.numel())
        if part and size + n > most:
            yield part
            part, size = [], 0
        part.append(name)
        size += n
    if part:
        yield part


def _all_finite(tensors: Any) -> bool:
    return all(bool(torch.isfinite(tensor.detach().sum())) for tensor in tensors)
