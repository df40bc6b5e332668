"""Reading recipes: YAML with line numbers, dotted overrides, and errors that name the place and the nearest key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from umad.config import KeyedError, Recipe, Section
from umad.records import UserError

Path_ = tuple[str | int, ...]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a YAML recipe, applies `key=value` overrides (values are YAML, `agents.0.model=...` reaches into lists).

    Every fault of the file or an override raises one `UserError` that lists all of them with file, line, key, and the
    nearest valid key where one is unknown.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the recipe cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the recipe is not UTF-8 text ({error.reason})") from None
    return parse_recipe(text, str(path), overrides)


def parse_recipe(text: str, source: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """`load_recipe` for text that is already read; `source` names it in messages."""
    data, places = _read_yaml(text, source)
    for override in overrides:
        _override(data, places, override)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        details = error.errors()
        inner = {detail["loc"][:n] for detail in details for n in range(1, len(detail["loc"]))}
        # a list whose members are wrong is also reported as too short: the members' own faults say it all
        faults = [_describe(detail, places, source) for detail in details if detail["loc"] not in inner]
        raise UserError("\n".join(dict.fromkeys(faults))) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every setting with the value that is in force. It loads as the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _read_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[Path_, str]]:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise UserError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    if node is None:
        raise UserError(f"{source}: the recipe is empty")
    places: dict[Path_, str] = {}
    _collect_places(node, (), places, source)
    data = _Loader("").construct_document(node)
    if not isinstance(data, dict):
        raise UserError(f"{source}: a recipe is a mapping of sections, not a {type(data).__name__}")
    return data, places


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, as people mean it (YAML 1.1 wants a dot)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)?\.?\d+[eE][-+]?\d+$|^[-+]?\d[\d_]*\.([eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


def _collect_places(node: yaml.Node, at: Path_, places: dict[Path_, str], source: str) -> None:
    places.setdefault(at, f"{source}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise UserError(
                    f"{source}:{line}: {_dotted((*at, key.value))} is given twice (first in line {seen[key.value]})"
                )
            seen[key.value] = line
            places[(*at, key.value)] = f"{source}:{line}"
            _collect_places(value, (*at, key.value), places, source)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _collect_places(value, (*at, i), places, source)


def _override(data: dict[str, Any], places: dict[Path_, str], text: str) -> None:
    key, equals, raw = text.partition("=")
    label = f"override {text!r}"
    if not equals or not key.strip():
        raise UserError(f"{label}: expected key=value, for example training.steps=10")
    try:
        value = yaml.load(raw, Loader=_Loader) if raw.strip() else None
    except yaml.YAMLError as error:
        raise UserError(f"{label}: the value is not valid YAML ({getattr(error, 'problem', error)})") from None
    parts: list[str | int] = [int(p) if p.isdigit() else p for p in key.strip().split(".")]
    target: Any = data
    for depth, part in enumerate(parts):
        done = _dotted(tuple(parts[:depth])) or "the recipe"
        last = depth == len(parts) - 1
        if isinstance(target, list):
            if not isinstance(part, int) or part > len(target) or (part == len(target) and not last):
                raise UserError(f"{label}: {done} is a list of {len(target)}; there is no {part!r} in it")
            if part == len(target):
                target.append(None)
        elif isinstance(target, dict):
            part = str(part)
            if not last and target.get(part) is None:
                target[part] = {}
        else:
            raise UserError(f"{label}: {done} holds a plain value, it has no {part!r}")
        if last:
            target[part] = value
        else:
            target = target[part]
    changed = tuple(parts)
    for at in [at for at in places if at[: len(changed)] == changed]:
        del places[at]
    places[changed] = label


def _describe(detail: Mapping[str, Any], places: Mapping[Path_, str], source: str) -> str:
    at: Path_ = tuple(part for part in detail["loc"])
    message = str(detail["msg"])
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, KeyedError):
        at, message = tuple(cause.key.split(".")), str(cause)
    elif cause is not None:
        message = str(cause)
    elif detail["type"] == "extra_forbidden":
        message = _unknown_key(at)
    elif detail["type"] == "missing":
        message = "is missing"
    else:
        message = f"{message[:1].lower()}{message[1:]}, not {_short(detail.get('input'))}"
    return f"{_place(at, places, source)}: {_dotted(at) or 'recipe'}: {message}"


def _place(at: Path_, places: Mapping[Path_, str], source: str) -> str:
    for end in range(len(at), -1, -1):
        if at[:end] in places:
            return places[at[:end]]
    return source


_SYNONYMS = {
    "lr": "learning_rate",
    "batch_size": "problems_per_step",
    "num_generations": "group_size",
    "n": "rollouts",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "beta": "coef",
    "kl_coef": "kl",
    "rounds": "turns",
    "gradient_clipping": "max_grad_norm",
    "model_name": "model",
}
"""What other tools call our settings."""


def _unknown_key(at: Path_) -> str:
    section = _section(at[:-1])
    valid = list(section.model_fields) if section else []
    if _SYNONYMS.get(str(at[-1])) in valid:
        return f"unknown key; did you mean {_SYNONYMS[str(at[-1])]!r}?"
    near = difflib.get_close_matches(str(at[-1]), valid, n=1, cutoff=0.5)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    meant = _SYNONYMS.get(str(at[-1]), str(at[-1]))
    elsewhere = [path for path in _all_keys(Recipe, "") if path.rsplit(".", 1)[-1] == meant]
    if elsewhere:
        return f"unknown key here; did you mean {elsewhere[0]!r}?"
    return f"unknown key; valid here: {', '.join(valid)}"


def _section(at: Path_) -> type[Section] | None:
    current: type[Section] | None = Recipe
    for part in at:
        if isinstance(part, int):
            continue
        if current is None or part not in current.model_fields:
            return None
        current = _inner(current.model_fields[part].annotation)
    return current


def _inner(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _inner(arg))), None)


def _all_keys(section: type[Section], prefix: str) -> list[str]:
    keys = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        inner = _inner(info.annotation)
        if inner:
            keys += _all_keys(inner, f"{prefix}{name}.")
    return keys


def _dotted(at: Path_) -> str:
    return ".".join(str(part) for part in at)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
