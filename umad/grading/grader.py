"""`Grader`: extraction, equality and class keys for many responses at once, cached, with workers where needed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from umad.grading.cleaning import MAX_LENGTH
from umad.grading.extract import TAIL, boxes, extract, last_segment, stated_text, unbox
from umad.grading.forms import normal_words, read
from umad.grading.keys import NO_ANSWER, class_key
from umad.grading.kinds import check_kind
from umad.grading.options import bare_option
from umad.grading.pool import Pool
from umad.grading.relation import REFUSED, Verdict, decide
from umad.grading.shapes import Opaque

log = logging.getLogger("umad.grading")


@dataclass(frozen=True, slots=True)
class GradeItem:
    """One response to grade.

    `gold`: the right answer, or several that are all required, in any order. `alternatives`: other right answers.
    `kind`: None is the grader's own. `choices`: the options' texts in the order A, B, ..., so that a response which
    gives an option's text instead of its letter can be graded.
    """

    gold: str | tuple[str, ...]
    text: str | None
    kind: str | None = None
    alternatives: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grade:
    """`status`: ok, no_answer, timeout, memory (all of these but ok are wrong) or error (ours: `equal` is None).

    `extracted` is the answer that was found, `key` its class (`NO_ANSWER` where there is none).
    """

    equal: bool | None
    extracted: str | None
    status: str
    key: str


STATUSES = ("ok", "no_answer", "timeout", "memory", "error")
_ERROR = Verdict(None, "error")
_Pair = tuple[str, str, str]  # gold, answer, kind


class _Cache:
    """A bounded dictionary: the oldest tenth goes when it is full."""

    def __init__(self, size: int) -> None:
        self.size, self.entries = size, dict[Any, Any]()

    def put(self, key: Any, value: Any) -> None:
        if len(self.entries) >= self.size:
            for old in list(self.entries)[: max(1, self.size // 10)]:
                del self.entries[old]
        self.entries[key] = value


class Grader:
    """Grades responses. Safe to share between threads; a context manager, `close()` ends its workers.

    `kind` and `require_box` as in `extract`. `time_limit` (seconds) and `memory_limit` (MB) hold for every answer that
    needs math-verify or a user's function; `workers` processes at most for each of the two, started when first needed.
    """

    def __init__(
        self,
        *,
        kind: str = "math",
        require_box: bool = False,
        time_limit: float = 5.0,
        memory_limit: int = 1024,
        workers: int = 2,
        cache_size: int = 200_000,
    ) -> None:
        check_kind(kind)
        self.kind, self.require_box = kind, require_box
        self._pool = Pool(workers, time_limit, memory_limit)
        self._grades, self._verdicts = _Cache(cache_size), _Cache(cache_size)
        self._counts: Counter[str] = Counter()
        self._blamed: set[str] = set()
        self._lock = threading.Lock()

    # -- grading -------------------------------------------------------------------------------------------------------

    def grade(self, items: Iterable[GradeItem]) -> list[Grade]:
        """Grades in the order of the items. Blocks; from asyncio use `grade_async`."""
        items = list(items)
        grades: list[Grade | None] = [None] * len(items)
        marks = [self._mark(item) for item in items]
        open_items: list[tuple[int, str, str]] = []
        pairs: dict[_Pair, None] = {}
        fresh: list[int] = []
        for index, (item, mark) in enumerate(zip(items, marks, strict=True)):
            known = self._grades.entries.get(mark)
            if known is not None:
                grades[index] = known
                continue
            fresh.append(index)
            kind = item.kind or self.kind
            answer = self._extract(item, kind)
            if answer is None:
                grades[index] = Grade(False, None, "no_answer", NO_ANSWER)
                continue
            open_items.append((index, answer, kind))
            for gold in _golds(item, kind):
                pairs[gold, answer, kind] = None
        verdicts = self._decide(list(pairs)) if pairs else {}
        for index, answer, kind in open_items:
            verdict = _any_right([verdicts[gold, answer, kind] for gold in _golds(items[index], kind)])
            grades[index] = Grade(verdict.equal, answer, verdict.status, class_key(answer, kind))
        done = [grade for grade in grades if grade is not None]
        with self._lock:
            for index in fresh:
                if done[index].status != "error":
                    self._grades.put(marks[index], done[index])
            self._counts.update(grade.status for grade in done)
        return done

    async def grade_async(self, items: Iterable[GradeItem]) -> list[Grade]:
        """`grade` without blocking the event loop."""
        return await asyncio.to_thread(self.grade, items)

    def equal(self, gold: str, candidate: str, kind: str | None = None) -> bool:
        """Whether a short answer is right for `gold`. Raises RuntimeError where that can't be told (our failure)."""
        pair = (gold, candidate, kind or self.kind)
        verdict = self._decide([pair])[pair]
        if verdict.equal is None:
            raise RuntimeError(f"could not compare {candidate!r:.80} with {gold!r:.80}")
        return verdict.equal

    def class_keys(self, answers: Sequence[str | None], kind: str | None = None) -> list[str]:
        """The class keys of one group of answers.

        `class_key` of each; those without a canonical form are compared by math-verify, both ways, with the first
        member in sorted order of every class before them, and take the key of the first class that agrees.
        """
        kind = kind or self.kind
        keys = [class_key(answer, kind) for answer in answers]
        loose = sorted({answer for answer, key in zip(answers, keys, strict=True) if answer and _is_loose(key, answer)})
        if kind != "math" or not loose:
            return keys
        heads: dict[str, str] = {}
        for key, answer in sorted(zip(keys, answers, strict=True), key=lambda pair: (pair[0], pair[1] or "")):
            if answer and not _is_loose(key, answer) and key[:2] != "t:" and key != NO_ANSWER:
                heads.setdefault(key, answer)
        merged: dict[str, str] = {}
        for answer in loose:
            merged[answer] = self._merge(answer, kind, heads)
        return [merged.get(answer, key) if answer else key for answer, key in zip(answers, keys, strict=True)]

    def _merge(self, answer: str, kind: str, heads: dict[str, str]) -> str:
        pairs = [pair for head in heads.values() for pair in ((head, answer, kind), (answer, head, kind))]
        verdicts = self._decide(pairs)
        for key, head in heads.items():
            if verdicts[head, answer, kind].equal and verdicts[answer, head, kind].equal:
                return key
        key = class_key(answer, kind)
        heads.setdefault(key, answer)
        return key

    def can_read(self, answers: Sequence[str]) -> list[bool]:
        """Whether math-verify can parse each answer (and finds it equal to itself). Our own failure reads as True."""
        jobs = [{"op": "verify", "gold": _latex(answer), "candidate": _latex(answer)} for answer in answers]
        return [bool(reply.get("equal", reply.get("status") == "error")) for reply in self._pool.run(jobs)]

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _mark(self, item: GradeItem) -> tuple[Any, ...]:
        """What identifies an item in the cache, small whatever the length of the response."""
        text: str | bytes | None = item.text
        if isinstance(text, str) and len(text) > 100:
            text = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return item.kind or self.kind, item.gold, item.alternatives, item.choices, text

    def _extract(self, item: GradeItem, kind: str) -> str | None:
        check_kind(kind)
        answer = extract(item.text, kind, require_box=self.require_box)
        if kind == "choice" and item.choices and not (answer and bare_option(answer)):
            words = answer or (None if self.require_box else stated_text(last_segment(item.text or "")[-TAIL:]))
            return _option_of(words, item.choices) if words else None
        return answer

    def _decide(self, pairs: Sequence[_Pair]) -> dict[_Pair, Verdict]:
        verdicts: dict[_Pair, Verdict] = {}
        jobs: dict[str, list[_Pair]] = {"verify": [], "code": []}
        for pair in dict.fromkeys(pairs):
            known = self._verdicts.entries.get(pair)
            if known is not None:
                verdicts[pair] = known
                continue
            gold, answer, kind = pair
            if kind.startswith("code:"):
                jobs["code"].append(pair)
                continue
            verdict = decide(gold, answer, kind)
            if verdict.equal is None and max(len(gold), len(answer)) > MAX_LENGTH:
                verdict = REFUSED
            if verdict.equal is None:
                jobs["verify"].append(pair)
            verdicts[pair] = verdict
        for mode, waiting in jobs.items():
            if waiting:
                replies = self._pool.run([_job(pair, mode) for pair in waiting], mode)
                for pair, reply in zip(waiting, replies, strict=True):
                    verdicts[pair] = self._judge(pair, reply)
        with self._lock:
            for pair, verdict in verdicts.items():
                if verdict.status != "error" and len(pair[0]) + len(pair[1]) <= 2 * MAX_LENGTH:
                    self._verdicts.put(pair, verdict)
        return verdicts

    def _judge(self, pair: _Pair, reply: dict[str, Any]) -> Verdict:
        if "equal" in reply:
            right = reply["equal"] and (pair[2].startswith("code:") or as_many_answers(pair[0], pair[1]))
            return Verdict(bool(right))
        if reply.get("status") in ("timeout", "memory"):
            return Verdict(False, reply["status"])
        blamed = pair[2] if pair[2].startswith("code:") else "worker"
        with self._lock:
            first = blamed not in self._blamed
            self._blamed.add(blamed)
        if first:
            log.warning("grading by %s failed, the answer is left ungraded: %s", blamed, reply.get("error", "lost"))
        return _ERROR

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """How many items had each status since this grader was made."""
        with self._lock:
            return {status: self._counts[status] for status in STATUSES if self._counts[status]}

    @property
    def workers_started(self) -> int:
        return self._pool.started

    def close(self) -> None:
        """Ends the workers. Grading that needs none goes on working."""
        self._pool.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _golds(item: GradeItem, kind: str) -> tuple[str, ...]:
    if isinstance(item.gold, str):
        return (item.gold, *item.alternatives)
    joined = " and ".join(item.gold) if kind == "text" else ", ".join(item.gold)
    return (joined, *item.alternatives)


def _any_right(verdicts: Sequence[Verdict]) -> Verdict:
    """One gold that accepts is enough; otherwise a failure of ours leaves it open, and a limit names the status."""
    for verdict in verdicts:
        if verdict.equal:
            return verdict
    return max(verdicts, key=lambda verdict: STATUSES.index(verdict.status))


def _is_loose(key: str, answer: str) -> bool:
    """Mathematics without a canonical form, small enough for a worker."""
    if not key.startswith("s:") or len(answer) > MAX_LENGTH:
        return False
    form = read(answer)
    return isinstance(form, Opaque) and not form.size


def _option_of(answer: str, choices: Sequence[str]) -> str:
    """The letter of the option that a response names by letter or by its text."""
    letters = "ABCDEFGHIJ"[: len(choices)]
    words = normal_words(answer)
    texts = [normal_words(choice) for choice in choices]
    if words in texts:
        return letters[texts.index(words)]
    inside = [letter for letter, text in zip(letters, texts, strict=False) if text and f" {text} " in f" {words} "]
    return inside[0] if len(inside) == 1 else answer


@lru_cache(maxsize=4096)
def _latex(answer: str) -> str:
    """An answer as the bare LaTeX that goes between the delimiters we put around it."""
    if "boxed" in answer and boxes(answer):
        answer = unbox(answer) or answer
    answer = re.sub(r"(?<!\\)\$|\\[()\[\]](?![A-Za-z])", " ", answer).replace("\\$", "")
    return answer.replace("\n", " ").strip()


def _job(pair: _Pair, mode: str) -> dict[str, Any]:
    gold, answer, kind = pair
    if mode == "code":
        return {"op": "code", "function": kind.removeprefix("code:"), "gold": gold, "candidate": answer}
    return {"op": "verify", "gold": _latex(gold), "candidate": _latex(answer)}


def as_many_answers(gold: str, candidate: str) -> bool:
    """Whether both name equally many answers at the top level: math-verify takes a part for the whole."""
    return _top_level_commas(_latex(gold)) == _top_level_commas(_latex(candidate))


def _top_level_commas(text: str) -> int:
    depth = commas = 0
    for character in re.sub(r"(?<=\d),(?=\d{3}(?!\d))|\\,|\{,\}", "", text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character in ",;" and depth == 0:
            commas += 1
    return commas
