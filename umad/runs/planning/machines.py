"""GPUs by name, and how training is spread over them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from umad.records import UserError

GB = 1e9
"""All figures are in these, as the metrics `memory/...` are. A card sold as 80 GB has 2**30 * 80 bytes, 86 of them."""


@dataclass(frozen=True)
class Gpu:
    """memory: bytes that CUDA programs can have (None: unknown). bf16, float32: dense peak in FLOP/s; bandwidth: of its
    memory, bytes/s (None: unknown, and so are times)."""

    name: str
    memory: float | None
    bf16: float | None = None
    float32: float | None = None
    bandwidth: float | None = None
    half: str = "bfloat16"
    """The 16-bit type its peak is for: cards before Ampere have no bfloat16."""


def _gpu(name: str, memory: float, bf16: float, float32: float, bandwidth: float, half: str = "bfloat16") -> Gpu:
    return Gpu(name, memory * 2**30, bf16 * 1e12, float32 * 1e12, bandwidth * 1e9, half)


# GiB as torch.cuda reports them (a little under the nominal size), dense 16-bit tensor TFLOPS with float32 accumulation (no
# sparsity), float32 TFLOPS outside the tensor cores, GB/s. From NVIDIA's data sheets: A100 (2021), H100 SXM (2023), H200
# (2024), HGX B200 (2025), L40S (2023); white papers of GA102 (RTX A6000, 3090), AD102 (RTX 4090), GV100, TU104 (T4).
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40", 39.4, 312, 19.5, 1555),
        _gpu("A100-80", 79.2, 312, 19.5, 2039),
        _gpu("H100", 79.1, 989, 67, 3350),
        _gpu("H200", 139.8, 989, 67, 4800),
        _gpu("B200", 178.3, 2250, 75, 7700),
        _gpu("L40S", 44.4, 362, 91.6, 864),
        _gpu("A6000", 47.4, 155, 38.7, 768),
        _gpu("4090", 23.5, 165, 82.6, 1008),
        _gpu("3090", 23.6, 71, 35.6, 936),
        _gpu("V100", 31.7, 125, 15.7, 900, "float16"),
        _gpu("T4", 14.6, 65, 8.1, 320, "float16"),
    )
}


def find_gpu(name: str | None, memory: float | None) -> Gpu | None:
    """The GPU called `name` (case and a leading maker's name don't matter), with `memory` GB in place of its own if given.

    Raises:
        UserError: there is none of that name, or the memory is no amount.
    """
    if memory is not None and not 0 < memory < 1e6:
        raise UserError(f"--gpu-memory: {memory:g} is no amount of memory; give GB, such as 80")
    if name is None:
        return None if memory is None else Gpu(f"a GPU of {memory:g} GB", memory * GB)
    known = {_plain(key): gpu for key, gpu in GPUS.items()}
    found = known.get(_plain(name))
    if found is None:
        near = difflib.get_close_matches(_plain(name), known, n=1)
        hint = f"; did you mean {known[near[0]].name}?" if near else ""
        raise UserError(
            f"--gpu: {name!r} is not known{hint}; there are {', '.join(GPUS)} (or give --gpu-memory GB alone)"
        )
    if memory is None:
        return found
    return Gpu(f"{found.name} with {memory:g} GB", memory * GB, found.bf16, found.float32, found.bandwidth, found.half)


def _plain(name: str) -> str:
    text = name.lower()
    for word in ("nvidia", "geforce", "rtx", "tesla", "gb", "-", "_", " "):
        text = text.replace(word, "")
    return text


@dataclass(frozen=True)
class Layout:
    """How training is launched. gpus: processes, each with one GPU and a share of every agent's problems. zero: DeepSpeed's
    stage, 0 without DeepSpeed. offload: what of it lies in CPU memory: `none`, `optimizer`, `all` (weights too)."""

    gpus: int = 1
    zero: int = 0
    offload: str = "none"

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UserError(f"--gpus: {self.gpus} is no number of GPUs; give at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"--zero: {self.zero} is no ZeRO stage; there are 0 (no DeepSpeed), 1, 2, 3")
        if self.offload not in ("none", "optimizer", "all"):
            raise UserError(f"--offload: {self.offload!r} is not known; there are none, optimizer, all")
        if self.offload != "none" and self.zero == 0:
            raise UserError("--offload: only DeepSpeed offloads; give --zero 1, 2 or 3 too")
        if self.offload == "all" and self.zero != 3:
            raise UserError("--offload all: weights can be offloaded under --zero 3 only")

    @property
    def deepspeed(self) -> bool:
        return self.zero > 0

    def describe(self) -> str:
        if not self.deepspeed:
            return "one process" if self.gpus == 1 else f"DDP over {self.gpus} GPUs"
        offloaded = {"none": "", "optimizer": ", optimiser offloaded", "all": ", optimiser and weights offloaded"}
        return f"ZeRO-{self.zero} over {self.gpus} GPU{'s' if self.gpus > 1 else ''}{offloaded[self.offload]}"


def read_accelerate(path: Path) -> Layout:
    """The layout that an Accelerate configuration (as `accelerate launch --config_file` takes) asks for."""
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--accelerate: {path} cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"--accelerate: {path} is not valid YAML ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(found, dict):
        raise UserError(f"--accelerate: {path} is no Accelerate configuration")
    kind = found.get("distributed_type", "NO")
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED"):
        raise UserError(f"--accelerate: {path}: distributed_type {kind!r} is not supported; use MULTI_GPU or DEEPSPEED")
    deepspeed = found.get("deepspeed_config") or {}
    if not isinstance(deepspeed, dict):
        raise UserError(f"--accelerate: {path}: deepspeed_config is no mapping")
    try:
        gpus = int(found.get("num_processes") or 1)
        zero = int(deepspeed.get("zero_stage") or 0) if kind == "DEEPSPEED" else 0
    except (TypeError, ValueError):
        raise UserError(f"--accelerate: {path}: num_processes and zero_stage must be whole numbers") from None
    offload = "none"
    if kind == "DEEPSPEED":
        weights = deepspeed.get("offload_param_device", "none") not in (None, "none")
        optimizer = deepspeed.get("offload_optimizer_device", "none") not in (None, "none")
        offload = "all" if weights else "optimizer" if optimizer else "none"
    return Layout(gpus, zero, offload)
