"""From a problem and the responses that an agent may read to chat messages (UMAD's prompts; DESIGN: one user message)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from umad.grading.extract import boxes
from umad.records import Problem, Response, UserError

Message = dict[str, str]
Shown = tuple[str, str]
"""(label, text) of one response as it is shown."""

_MASK = "?"
_NOTHING = "(no response)"
CUT = " [...] "
"""Stands where the middle of a response was cut out."""


@dataclass(frozen=True)
class Style:
    """How a style names the speakers, and what a response must not contain lest it fake another's label."""

    label: Callable[[int], str]
    forged: re.Pattern[str]
    harmless: str


def _letters(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


STYLES = {
    "standard": Style(lambda i: f"Agent {i + 1}", re.compile(r"<(?=\s*/?\s*response\b)", re.IGNORECASE), "‹"),
    "compact": Style(_letters, re.compile(r"\[(?=[A-Z]+\])"), "[ "),
}


class Prompts:
    """Builds the messages of a style; building changes nothing, and the same input gives the same bytes.

    `templates` is a folder whose `first.jinja` or `debate.jinja` replace the style's own. Templates see `question`,
    `responses` (each with `label` and `text`), `masked` and `turn`.
    """

    def __init__(
        self, style: str = "standard", *, mask_answers: bool = True, templates: str | Path | None = None
    ) -> None:
        self.style = STYLES[style]
        self.mask_answers = mask_answers
        self.specials: tuple[str, ...] = ()
        """What tokenizers would turn into control tokens, such as the end of a message: broken up inside responses."""
        folders = [Path(__file__).parent / "templates" / style]
        if templates is not None:
            if not Path(templates).is_dir():
                raise UserError(f"debate.templates: {templates} is not a folder")
            folders.insert(0, Path(templates))
        self._env = ImmutableSandboxedEnvironment(
            loader=jinja2.FileSystemLoader([str(folder) for folder in folders]),
            undefined=jinja2.StrictUndefined,
            autoescape=False,
            keep_trailing_newline=False,
        )
        self._first = self._template("first.jinja")
        self._debate = self._template("debate.jinja")
        # a template that cannot work should be found before a model is loaded
        problem = Problem("check", "1+1", "2")
        self.first(problem)
        self.debate(problem, [("A", "2")], turn=1)

    def _template(self, name: str) -> jinja2.Template:
        try:
            return self._env.get_template(name)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{error.filename}:{error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, OSError, UnicodeDecodeError) as error:
            raise UserError(f"prompt template {name}: {error}") from None

    def _render(self, template: jinja2.Template, **values: Any) -> list[Message]:
        try:
            text = template.render(**values)
        except jinja2.TemplateError as error:
            raise UserError(f"{template.filename}: {error}") from None
        return [{"role": "user", "content": text.rstrip("\n")}]

    def first(self, problem: Problem) -> list[Message]:
        """Turn 0: the problem and how to answer."""
        return self._render(self._first, question=problem.question, responses=(), masked=False, turn=0)

    def debate(self, problem: Problem, shown: Sequence[Shown], turn: int = 1) -> list[Message]:
        """A later turn: the problem, each shown response under its label, and what to do with them."""
        responses = [{"label": label, "text": text} for label, text in shown]
        return self._render(
            self._debate, question=problem.question, responses=responses, masked=self.mask_answers, turn=turn
        )

    def shown(self, responses: Sequence[Response], order: Sequence[str]) -> list[Shown]:
        """The responses as they may be shown: thinking stripped, answers masked, labels that can't be forged.

        Labels follow `order` (the debate's agents), so that every reader gets the same bytes.
        """
        position = {name: i for i, name in enumerate(order)}
        ordered = sorted(responses, key=lambda r: (position[r.agent], r.turn))
        return [(self.style.label(position[r.agent]), self._text(r)) for r in ordered]

    def _text(self, response: Response) -> str:
        text = strip_thinking(response.text)
        if self.mask_answers:
            text = mask_answer(text, response.answer)
        for special in self.specials:
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return self.style.forged.sub(self.style.harmless, text).strip() or _NOTHING


def special_strings(tokenizer: Any) -> set[str]:
    """The texts that a tokenizer reads as control tokens."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {text for text in added | set(tokenizer.all_special_tokens) if len(text) > 1}


def strip_thinking(text: str) -> str:
    """The text after the last closed thinking block, with no orphan tag left; an unclosed block is cut off."""
    text = text.rpartition("</think>")[2] if "</think>" in text else text
    return text.partition("<think>")[0].strip()


def mask_answer(text: str, answer: str | None) -> str:
    """Hides the final answer: the content of every box; without a box, the last mention of `answer`."""
    found = boxes(text)
    for start, end, _ in reversed(found):
        text = f"{text[:start]}\\boxed{{{_MASK}}}{text[end:]}"
    if not found and answer:
        mentions = list(re.finditer(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", text))
        if mentions:
            text = text[: mentions[-1].start()] + _MASK + text[mentions[-1].end() :]
    return text


def shorten(text: str, keep: int, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> str:
    """Cuts `text` from the middle to about `keep` tokens, the cut marked."""
    ids = encode(text)
    if len(ids) <= keep:
        return text
    head = (keep + 1) // 2
    tail = keep - head
    return decode(ids[:head]) + CUT + (decode(ids[-tail:]) if tail else "")
