"""Problems for a recipe's `data.train` or `data.eval`: generated, from a local file, or from the Hub."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from umad.config import SourceConfig
from umad.records import Problem, UserError
from umad.tasks import arithmetic
from umad.tasks.rows import BadRow, Fields, to_problem
from umad.tasks.sets import resolve

Role = Literal["train", "eval"]
GoldCheck = Callable[[Sequence[Problem]], Sequence[str | None]]
"""For each problem what is wrong with its gold, or None."""

_SHOWN = 10
_CHUNK = 512


class Problems(NamedTuple):
    """What was loaded, and a line for each row that was left out (`on_bad_rows: skip`)."""

    problems: list[Problem]
    skipped: list[str]


class _Row(NamedTuple):
    where: str
    row: dict[str, Any] | None
    fault: str = ""


def load_problems(
    source: SourceConfig,
    role: Role,
    on_bad_rows: Literal["error", "skip"] = "error",
    check_golds: GoldCheck | None = None,
) -> Problems:
    """Loads the problems of a source, the same ones in the same order every time.

    A row that can't be used (no JSON, no question, no answer where the others have one, an answer that `check_golds`
    refuses, an id that was there before) is a `UserError` with file and line, or is left out and reported. Only the
    problems that are used are put to `check_golds`, which can be slow.
    """
    if source.name == "arithmetic":
        return Problems(_arithmetic(source, role), [])
    if source.level is not None:
        raise UserError(f"data.{role}.level: only arithmetic has levels")
    faults: list[str] = []
    found = _parse(source, role, faults)
    if on_bad_rows == "error":
        _refuse(faults)
    found = _labelled(found, role, faults)
    if on_bad_rows == "error":
        _refuse(faults)
    if source.seed is not None:
        random.Random(f"problems/{source.seed}").shuffle(found)
    problems = _checked(found, source.limit, check_golds, faults, stop_at_fault=on_bad_rows == "error")
    if on_bad_rows == "error":
        _refuse(faults)
    if not problems:
        first = f"; all {len(faults)} were skipped, the first: {faults[0]}" if faults else ""
        raise UserError(f"{source.path or source.name}: no problem could be used{first}")
    return Problems(problems, faults)


def _arithmetic(source: SourceConfig, role: Role) -> list[Problem]:
    for key in ("path", "question_field", "answer_field"):
        if getattr(source, key) is not None:
            raise UserError(f"data.{role}.{key}: arithmetic is generated; remove it, or remove name: arithmetic")
    if source.kind not in (None, "math"):
        raise UserError(f"data.{role}.kind: arithmetic is compared as math, not {source.kind}")
    split = source.split or ("train" if role == "train" else "test")
    return arithmetic.load(source.level or 1, split, source.limit, source.seed or 0)


def _refuse(faults: Sequence[str]) -> None:
    if not faults:
        return
    more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    listed = "\n  ".join(faults[:_SHOWN]) + more
    raise UserError(f"{listed}\nmend these rows, or set data.on_bad_rows: skip to leave them out")


def _parse(source: SourceConfig, role: Role, faults: list[str]) -> list[tuple[str, Problem]]:
    """(where, problem) for each row; ids are unique."""
    fields = Fields(source.question_field, source.answer_field)
    rows, label = _rows(source, role)
    found: list[tuple[str, Problem]] = []
    places: dict[str, str] = {}
    number = 0
    for number, (where, row, fault) in enumerate(rows, 1):
        if row is None:
            faults.append(f"{where}: {fault}")
            continue
        try:
            problem = to_problem(row, fields, source.kind, f"{label}/{number - 1}", label)
        except BadRow as error:
            faults.append(f"{where}: {error}")
            continue
        if problem.id in places:
            faults.append(f"{where}: the id {problem.id!r} was already used at {places[problem.id]}")
            continue
        places[problem.id] = where
        found.append((where, problem))
    if number == 0:
        raise UserError(f"{source.path or source.name}: there is no row in it; give a file with one problem a line")
    return found


def _labelled(found: list[tuple[str, Problem]], role: Role, faults: list[str]) -> list[tuple[str, Problem]]:
    """Takes out rows without an answer, unless the whole set has none and is only to be debated."""
    if all(problem.gold is None for _, problem in found):
        if found and role == "train":
            raise UserError(f"{found[0][0]}: the answer is null, here and everywhere; training needs answers")
        return found
    faults.extend(f"{where}: the answer is null" for where, problem in found if problem.gold is None)
    return [(where, problem) for where, problem in found if problem.gold is not None]


def _checked(
    found: list[tuple[str, Problem]],
    limit: int | None,
    check: GoldCheck | None,
    faults: list[str],
    stop_at_fault: bool,
) -> list[Problem]:
    """The first `limit` problems whose golds can be graded."""
    wanted = len(found) if limit is None else limit
    good: list[Problem] = []
    at = 0
    while at < len(found) and len(good) < wanted:
        part = found[at : at + min(_CHUNK, wanted - len(good))]
        at += len(part)
        wrong = check([problem for _, problem in part]) if check else [None] * len(part)
        for (where, problem), reason in zip(part, wrong, strict=True):
            if problem.gold is None or reason is None:
                good.append(problem)
            else:
                faults.append(f"{where}: the answer {problem.gold!r} can't be used ({reason})")
        if faults and stop_at_fault:
            break
    return good


# --- where rows come from ---------------------------------------------------------------------------------------------


def _rows(source: SourceConfig, role: Role) -> tuple[Iterator[_Row], str]:
    """The rows, and the name that stands in for missing ids."""
    if source.path is None:
        assert source.name is not None
        repository, config, split = resolve(source.name, role, source.split)
        return _hub_rows(repository, config, split, role), f"{source.name}/{split}"
    path = Path(source.path)
    if source.name is not None and "/" not in source.name:
        resolve(source.name, role, source.split or "any")  # a misspelt name is an error here too
    elif source.name is None and source.split is not None:
        raise UserError(f"data.{role}.split: a local file has no splits; remove it")
    if not path.exists():
        raise UserError(f"data.{role}.path: {path} does not exist")
    if path.is_dir():
        raise UserError(f"data.{role}.path: {path} is a folder; give a .jsonl or .parquet file")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    return rows, source.name or path.stem


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            yield _Row(where, None, f"not a line of JSON ({error})")
            continue
        if isinstance(row, dict):
            yield _Row(where, row)
        else:
            yield _Row(where, None, f"expected a JSON object, found {type(row).__name__}")


def _parquet_rows(path: Path) -> Iterator[_Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as parquet ({error})") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield _Row(f"{path}: row {number}", row)


def _hub_rows(repository: str, config: str | None, split: str, role: Role) -> Iterator[_Row]:
    import datasets

    # what the library raises for no network, an unknown name, a gated set, a wrong configuration or a wrong split
    expected = (OSError, ValueError, datasets.exceptions.DatasetsError)
    try:
        data = datasets.load_dataset(repository, config, split=split)
    except expected as error:
        raise UserError(
            f"data.{role}.name: {repository} (split {split}) could not be loaded from the Hub: {error}\n"
            f"without a network, download it elsewhere and give data.{role}.path=FILE (.jsonl or .parquet)"
        ) from None
    for number, row in enumerate(data, 1):
        yield _Row(f"{repository} ({split}), row {number}", dict(row))
