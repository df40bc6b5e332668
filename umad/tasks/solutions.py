"""Problems with worked solutions, as an agent should have written them: for supervised fine-tuning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from umad.config import SolutionsConfig
from umad.grading.extract import boxes
from umad.records import Problem, UserError
from umad.tasks import arithmetic, load
from umad.tasks.rows import BadRow, Fields, to_problem

_HASHES = re.compile(r"\n?[ \t]*####[ \t]*(?P<answer>.*?)[ \t]*$")
_STATED = re.compile(r"\banswer\s*(?:is|:|=)", re.IGNORECASE)
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")


@dataclass(frozen=True, slots=True)
class Solution:
    """`stated` is the text that ends in the solution's own final answer, None where it names none: only what is stated can
    be compared with the gold. `text` is what an agent should say: like `stated`, the answer in a box."""

    problem: Problem
    text: str
    stated: str | None


def load_solutions(
    source: SolutionsConfig, on_bad_rows: Literal["error", "skip"], check_golds: load.GoldCheck | None = None
) -> tuple[list[Solution], int, list[str]]:
    """(solutions, problems without one, a line for each broken row that was left out), always in the same order.

    Raises:
        UserError: the source cannot be read, or no row has a solution.
    """
    try:
        problems, skipped = load.load_problems(source, "train", on_bad_rows, check_golds)
        texts = {} if source.name == "arithmetic" else _texts(source)
    except UserError as error:
        # these settings have the same names in both places
        raise UserError(str(error).replace("data.train", "sft.data")) from None
    found = []
    for problem in problems:
        text = arithmetic.solution(problem.question) if source.name == "arithmetic" else texts.get(problem.id)
        if text is not None and text.strip():
            found.append(_written(problem, text))
    if not found:
        field = f"a text in the field {source.solution_field!r}" if source.solution_field else "a `solution`"
        raise UserError(
            f"sft.data: none of the {len(problems)} problems of {source.path or source.name} has {field}; name the field "
            "with worked solutions as sft.data.solution_field"
        )
    return found, len(problems) - len(found), skipped


def _texts(source: SolutionsConfig) -> dict[str, str]:
    """Solutions by problem id. Ids and order are those of `load_problems`."""
    fields = Fields(source.question_field, source.answer_field)
    rows, label = load._rows(source, "train")
    texts: dict[str, str] = {}
    for number, (_, row, _fault) in enumerate(rows):
        if row is None:
            continue
        try:
            problem = to_problem(row, fields, source.kind, f"{label}/{number}", label)
        except BadRow:
            continue  # `load_problems` has reported it
        text = _solution(row, source.solution_field)
        if text is not None:
            texts.setdefault(problem.id, text)
    return texts


def _solution(row: Mapping[str, Any], field: str | None) -> str | None:
    if field is not None:
        value = row.get(field)
        return value if isinstance(value, str) else None
    if isinstance(row.get("solution"), str):
        return str(row["solution"])
    answer = row.get("answer")
    # GSM8K's answers are solutions; a bare answer is none
    return answer if isinstance(answer, str) and "\n" in answer.strip() else None


def _written(problem: Problem, text: str) -> Solution:
    """GSM8K's calculator marks go (`<<48/2=24>>`, which nobody should learn to write), and the final answer is boxed, since
    that is what every prompt asks for."""
    text = _CALCULATOR.sub("", text).strip()
    if boxes(text):
        return Solution(problem, text, text)
    match = _HASHES.search(text)
    if match:
        body, answer = text[: match.start()].rstrip(), match["answer"]
        boxed = f"{body}\nThe final answer is \\boxed{{{answer}}}."
        return Solution(problem, boxed, boxed)
    stated = text if _STATED.search(text) else None
    return Solution(problem, f"{text}\nThe final answer is \\boxed{{{problem.gold}}}.", stated)
