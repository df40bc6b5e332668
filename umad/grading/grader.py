"""The grader (early version: no workers yet)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from umad.grading.extract import extract
from umad.grading.keys import NO_ANSWER, class_key
from umad.grading.relation import decide


@dataclass(frozen=True, slots=True)
class GradeItem:
    """One response to grade. `gold` may be several required answers; any of `alternatives` is right as well."""

    gold: str | tuple[str, ...]
    text: str | None
    kind: str | None = None
    alternatives: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grade:
    equal: bool | None
    extracted: str | None
    status: str
    key: str


class Grader:
    def __init__(
        self,
        *,
        kind: str = "math",
        require_box: bool = False,
        time_limit: float = 5.0,
        memory_limit: int = 1024,
        workers: int = 2,
    ) -> None:
        self.kind, self.require_box = kind, require_box
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        return [self._one(item) for item in items]

    async def grade_async(self, items: Sequence[GradeItem]) -> list[Grade]:
        return await asyncio.to_thread(self.grade, items)

    def _one(self, item: GradeItem) -> Grade:
        kind = item.kind or self.kind
        answer = extract(item.text, kind, require_box=self.require_box)
        status = "ok" if answer is not None else "no_answer"
        with self._lock:
            self._counts[status] += 1
        if answer is None:
            return Grade(False, None, "no_answer", NO_ANSWER)
        golds = [item.gold if isinstance(item.gold, str) else ", ".join(item.gold), *item.alternatives]
        return Grade(any(decide(gold, answer, kind).equal for gold in golds), answer, "ok", class_key(answer, kind))

    @property
    def counts(self) -> dict[str, int]:
        """How many items had each status since the grader was made."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        pass

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
