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
    places: dict[Path_, str] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise UserError(f"{source}: the recipe is empty")
        _collect_places(node, (), places, source, [])
        data = _Loader("").construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise UserError(f"{where}: not valid YAML ({_why(error)})") from None
    if not isinstance(data, dict):
        raise UserError(f"{source}: a recipe is a mapping of sections, not a {type(data).__name__}")
    return data, places


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return _short(str(getattr(error, "problem", None) or error), 160)


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, as people mean it (YAML 1.1 wants a dot)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)?\.?\d+[eE][-+]?\d+$|^[-+]?\d[\d_]*\.([eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


_MOST_PLACES = 20_000
"""Far more settings than any recipe has: aliases of aliases grow without end."""


def _collect_places(node: yaml.Node, at: Path_, places: dict[Path_, str], source: str, above: list[yaml.Node]) -> None:
    line = node.start_mark.line + 1
    if any(node is one for one in above):
        raise UserError(f"{source}:{line}: {_dotted(at)} contains itself")
    if len(places) > _MOST_PLACES:
        raise UserError(f"{source}:{line}: more than {_MOST_PLACES} settings; are aliases nested in each other?")
    places.setdefault(at, f"{source}:{line}")
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{source}:{line}: a key must be a name, not a list or a mapping")
            if key.value in seen:
                where, first = _dotted((*at, key.value)), seen[key.value]
                raise UserError(f"{source}:{line}: {where} is given twice (first in line {first})")
            seen[key.value] = line
            places[(*at, key.value)] = f"{source}:{line}"
            _collect_places(value, (*at, key.value), places, source, [*above, node])
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _collect_places(value, (*at, i), places, source, [*above, node])


def _override(data: dict[str, Any], places: dict[Path_, str], text: str) -> None:
    key, equals, raw = text.partition("=")
    label = f"override {_short(text, 80)}"
    if not equals or not key.strip():
        raise UserError(f"{label}: expected key=value, for example training.steps=10")
    try:
        value = yaml.load(raw, Loader=_Loader) if raw.strip() else None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{label}: the value is not valid YAML ({_why(error)})") from None
    parts: list[str | int] = [int(p) if p.isascii() and p.isdecimal() else p for p in key.strip().split(".")]
    if "" in parts:
        raise UserError(f"{label}: the key has an empty part")
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


def _short(value: Any, most: int = 60) -> str:
    try:
        text = value if isinstance(value, str) and most > 80 else repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or nested beyond what repr follows
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= most else text[: most - 3] + "..."
