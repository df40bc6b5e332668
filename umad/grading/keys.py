"""Class keys (early version)."""

from __future__ import annotations

from umad.grading.relation import normal_number, normal_text

NO_ANSWER = "no-answer"


def class_key(answer: str | None, kind: str = "math") -> str:
    if answer is None or not answer.strip():
        return NO_ANSWER
    number = normal_number(answer)
    return f"n:{number}" if number is not None and kind in ("math", "number") else f"t:{normal_text(answer)}"
