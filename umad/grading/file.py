"""`umad grade`: the rows of a file, graded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from umad.grading.golds import check_golds
from umad.grading.grader import Grade, GradeItem, Grader
from umad.grading.kinds import KINDS, check_function, check_kind
from umad.records import UserError, atomic_writer, read_jsonl, to_json

BATCH = 512
CANDIDATES = ("candidate", "completion", "response", "text")
LABELS = ("correct", "equivalent")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A row whose grade differs from its label."""

    line: int
    gold: str
    extracted: str | None
    status: str
    labelled: bool
    equal: bool | None

    def __str__(self) -> str:
        return (
            f"line {self.line}: labelled {_word(self.labelled)}, graded {_word(self.equal)} ({self.status}); "
            f"gold {self.gold!r:.60}, answer {self.extracted!r:.60}"
        )


@dataclass(frozen=True, slots=True)
class FileSummary:
    """What came out of a file. `labelled` rows had a `correct` or `equivalent` column; `agreeing` of them agree."""

    rows: int
    right: int
    wrong: int
    ungraded: int
    statuses: dict[str, int]
    seconds: float
    labelled: int = 0
    agreeing: int = 0
    disagreements: tuple[Disagreement, ...] = ()
    unknown_kinds: dict[str, int] = field(default_factory=dict)

    @property
    def rates(self) -> str:
        """One line for the terminal."""
        graded = self.right + self.wrong
        share = f"{self.right / graded:.1%}" if graded else "-"
        statuses = ", ".join(f"{status} {count}" for status, count in sorted(self.statuses.items()))
        speed = self.rows / self.seconds if self.seconds > 0 else 0.0
        return (
            f"{self.rows} rows in {self.seconds:.1f} s ({speed:,.0f}/s): {self.right} right, {self.wrong} wrong, "
            f"{self.ungraded} ungraded; {share} of the graded are right; status {statuses}"
        )

    def lines(self, most: int = 20) -> list[str]:
        """The whole summary, at most so many disagreements."""
        lines = [self.rates]
        if self.labelled:
            share = self.agreeing / self.labelled
            lines.append(f"agreement with the labels: {self.agreeing} of {self.labelled} ({share:.2%})")
            lines += [f"  {one}" for one in self.disagreements[:most]]
            if len(self.disagreements) > most:
                lines.append(f"  and {len(self.disagreements) - most} more")
        if self.unknown_kinds:
            named = ", ".join(f"{kind!r} ({count})" for kind, count in sorted(self.unknown_kinds.items()))
            lines.append(f"note: the rows' `kind` {named} is no answer kind and was ignored")
        return lines


def _word(value: bool | None) -> str:
    return "ungraded" if value is None else "right" if value else "wrong"


def grade_file(
    path: Path,
    out: Path | None = None,
    kind: str = "math",
    *,
    require_box: bool = False,
    grader: Grader | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FileSummary:
    """Grades the rows of a JSON lines file and writes them to `out`, all or nothing, with `equal`, `extracted`,
    `status` and `key`.

    A row has `gold` (text, a number, or a list of required answers) and `candidate` (or `completion`, `response`,
    `text`), and may have `alternatives`, `choices`, and a `kind` of its own (never a `code:` kind: data names no code to
    run). `progress(done, total)` is called after every batch. A broken row is a `UserError` with file and line.
    """
    check_kind(kind)
    check_function(kind)
    path, unknown = Path(path), Counter[str]()
    started = time.monotonic()
    rows = [(number, row, _item(path, number, row, kind, unknown)) for number, row in read_jsonl(path)]
    if not rows:
        raise UserError(f"{path}: no rows")
    own = grader is None
    grader = grader or Grader(kind=kind, require_box=require_box)
    try:
        _check(path, rows, kind, grader)
        grades: list[Grade] = []
        for at in range(0, len(rows), BATCH):
            grades += grader.grade([item for _, _, item in rows[at : at + BATCH]])
            if progress is not None:
                progress(len(grades), len(rows))
    finally:
        if own:
            grader.close()
    if out is not None:
        with _writer(Path(out)) as file:
            for (_, row, _), grade in zip(rows, grades, strict=True):
                result = {"equal": grade.equal, "extracted": grade.extracted, "status": grade.status, "key": grade.key}
                file.write(to_json({**row, **result}) + "\n")
    return _summary(rows, grades, time.monotonic() - started, dict(unknown))


def _writer(out: Path) -> Any:
    if out.is_dir():
        raise UserError(f"{out}: is a folder, give the name of a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            raise UserError(f"{out}: not a file")
        (out.parent / f".{out.name}.probe").touch()
        (out.parent / f".{out.name}.probe").unlink()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None
    return atomic_writer(out)


def _item(path: Path, number: int, row: dict[str, Any], kind: str, unknown: Counter[str]) -> GradeItem:
    where = f"{path}:{number}"
    if "gold" not in row:
        raise UserError(f"{where}: the row has no 'gold' (it has {', '.join(sorted(row)) or 'nothing'})")
    name = next((name for name in CANDIDATES if name in row), None)
    if name is None:
        raise UserError(f"{where}: the row has no 'candidate' (it has {', '.join(sorted(row))})")
    text = row[name]
    if text is not None and not isinstance(text, str):
        if isinstance(text, bool) or not isinstance(text, (int, float)):
            raise UserError(f"{where}: {name!r} is {type(text).__name__}, not text")
        text = str(text)
    own = row.get("kind")
    if own is not None and own not in KINDS:
        if isinstance(own, str) and own.startswith("code:") and own != kind:
            raise UserError(f"{where}: kind {own!r}: a row may not name code to run; pass it with --kind")
        if own != kind:
            unknown[str(own)] += 1
        own = None
    gold = row["gold"]
    if gold == []:
        raise UserError(f"{where}: 'gold' is an empty list")
    return GradeItem(
        gold=tuple(_text(one, where, "gold") for one in gold) if isinstance(gold, list) else _text(gold, where, "gold"),
        text=text,
        kind=own or kind,
        alternatives=tuple(_text(one, where, "alternatives") for one in _listed(row, "alternatives", where)),
        choices=tuple(_text(one, where, "choices") for one in _listed(row, "choices", where)),
    )


def _listed(row: dict[str, Any], name: str, where: str) -> list[Any]:
    value = row.get(name)
    if value is None:
        return []
    if isinstance(value, dict) and name == "choices":
        return [value[letter] for letter in sorted(value)]
    if not isinstance(value, list):
        raise UserError(f"{where}: {name!r} is {type(value).__name__}, not a list")
    return value


def _text(value: Any, where: str, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: {name!r} is {type(value).__name__}, not text or a number")
    return value if isinstance(value, str) else str(value)


def _check(path: Path, rows: list[tuple[int, dict[str, Any], GradeItem]], kind: str, grader: Grader) -> None:
    golds = [(one, item.kind or kind, number) for number, _, item in rows for one in _each(item)]
    faults = check_golds([(gold, kind) for gold, kind, _ in golds], grader)
    if faults:
        first = faults[0]
        more = f" (and {len(faults) - 1} more rows)" if len(faults) > 1 else ""
        raise UserError(f"{path}:{golds[first.index][2]}: {first.reason}{more}")


def _each(item: GradeItem) -> tuple[str, ...]:
    return ((item.gold,) if isinstance(item.gold, str) else item.gold) + item.alternatives


def _summary(
    rows: list[tuple[int, dict[str, Any], GradeItem]], grades: list[Grade], seconds: float, unknown: dict[str, int]
) -> FileSummary:
    labelled, disagreements = 0, []
    for (number, row, item), grade in zip(rows, grades, strict=True):
        label = next((row[name] for name in LABELS if isinstance(row.get(name), bool)), None)
        if label is None:
            continue
        labelled += 1
        if grade.equal is not label:
            gold = item.gold if isinstance(item.gold, str) else ", ".join(item.gold)
            disagreements.append(Disagreement(number, gold, grade.extracted, grade.status, label, grade.equal))
    return FileSummary(
        rows=len(rows),
        right=sum(grade.equal is True for grade in grades),
        wrong=sum(grade.equal is False for grade in grades),
        ungraded=sum(grade.equal is None for grade in grades),
        statuses=dict(Counter(grade.status for grade in grades)),
        seconds=seconds,
        labelled=labelled,
        agreeing=labelled - len(disagreements),
        disagreements=tuple(disagreements),
        unknown_kinds=unknown,
    )
