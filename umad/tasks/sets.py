"""The problem sets that are known by name: where the Hub has them, and what a row looks like there.

Fields were looked up on the Hub; a row may also have the plain form `id, problem, answer` (local copies often do).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from umad.records import UserError

QUESTION_FIELDS = ("problem", "question")
ANSWER_FIELDS = ("answer",)
ID_FIELDS = ("id", "unique_id")


@dataclass(frozen=True, slots=True)
class KnownSet:
    """`splits` by role; a role that is missing has no split of its own. `config` is the Hub's configuration name."""

    repository: str
    splits: dict[str, str]
    config: str | None = None


KNOWN = {
    # question, answer (a solution that ends in "#### 18")
    "gsm8k": KnownSet("openai/gsm8k", {"train": "train", "eval": "test"}, "main"),
    # problem, level, type, solution (the gold is its last box)
    "math": KnownSet("DigitalLearningGmbH/MATH-lighteval", {"train": "train", "eval": "test"}),
    # problem, solution, answer, subject, level, unique_id
    "math500": KnownSet("HuggingFaceH4/MATH-500", {"eval": "test"}),
    # id, question, answer
    "amc23": KnownSet("math-ai/amc23", {"eval": "test"}),
    # id, problem, solution (the gold, boxed), url
    "aime24": KnownSet("math-ai/aime24", {"eval": "test"}),
    # id, problem, answer
    "aime25": KnownSet("math-ai/aime25", {"eval": "test"}),
}


def resolve(name: str, role: str, split: str | None) -> tuple[str, str | None, str]:
    """(repository, configuration, split) of a known set or of any `org/dataset` on the Hub."""
    known = KNOWN.get(name)
    if known is None:
        if "/" not in name:
            options = [*KNOWN, "arithmetic"]
            near = difflib.get_close_matches(name, options, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(options)};"
            raise UserError(f"data.{role}.name: no set is called {name!r}; {hint} a Hub name has the form org/dataset")
        return name, None, split or ("train" if role == "train" else "test")
    if split is None:
        if role not in known.splits:
            raise UserError(
                f"data.{role}.name: {name} has no {role} split, only {', '.join(known.splits.values())}; "
                "choose another set, or give split to use it all the same"
            )
        split = known.splits[role]
    return known.repository, known.config, split
