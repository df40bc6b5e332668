"""An agent: a named model with its tokenizer, its engine and its way of being asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from umad.debate.prompts import Message, Prompts, Shown, shorten
from umad.engines.base import Engine, GenerationError
from umad.records import Problem

if TYPE_CHECKING:
    import numpy as np

_CACHE = 8192
"""Most encoded prompts kept: the G siblings of a group and all agents of a turn share theirs."""


@dataclass(eq=False)
class Agent:
    """`tokenizer` is None for engines that take messages and give text. `max_prompt_tokens` bounds what is sent."""

    name: str
    engine: Engine
    tokenizer: Any = None
    max_prompt_tokens: int | None = None
    _encoded: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    def encode(self, messages: Sequence[Message]) -> np.ndarray | None:
        """Token ids (int32 [P]) of the messages under the chat template, the cue for the reply included.

        The template writes every special token itself; the tokenizer adds none on top.
        """
        if self.tokenizer is None:
            return None
        import numpy as np

        key = "\x1e".join(f"{m['role']}\x1f{m['content']}" for m in messages)
        ids = self._encoded.get(key)
        if ids is None:
            listed = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            ids = np.asarray(listed, dtype=np.int32)
            ids.setflags(write=False)
            if len(self._encoded) >= _CACHE:
                self._encoded.clear()
            self._encoded[key] = ids
        return ids

    def decode(self, token_ids: Any) -> str:
        """The text of a completion, special tokens left out. Only for reading: training uses the ids."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: tuple[Mapping[str, str], ...]
    ids: np.ndarray | None
    shortened: int = 0
    """Tokens that were cut from shown responses."""


def fit_prompt(agent: Agent, prompts: Prompts, problem: Problem, shown: Sequence[Shown], turn: int) -> Prompt:
    """The prompt of a turn, within the agent's limit.

    When it would not fit, the shown responses are cut from the middle, evenly: all down to one common length, the
    longest first. The problem, the instruction and the template are never cut.

    Raises:
        GenerationError: the prompt does not fit even with nothing shown.
    """

    def build(texts: Sequence[Shown]) -> Prompt:
        messages = prompts.debate(problem, texts, turn) if shown else prompts.first(problem)
        return Prompt(tuple(messages), agent.encode(messages))

    whole = build(shown)
    limit = agent.max_prompt_tokens
    if whole.ids is None or limit is None or len(whole.ids) <= limit:
        return whole

    def encode(text: str) -> list[int]:
        return list(agent.tokenizer.encode(text, add_special_tokens=False))

    lengths = [len(encode(text)) for _, text in shown]

    def cut(keep: int) -> Prompt:
        return build([(label, shorten(text, keep, encode, agent.decode)) for label, text in shown])

    low, high = 0, max(lengths, default=0)  # `low` fits once it is checked, `high` does not
    best = cut(0)
    if best.ids is not None and len(best.ids) > limit:
        raise GenerationError(
            f"the prompt of problem {problem.id!r} has {len(best.ids)} tokens without any response shown; "
            f"agent {agent.name!r} takes {limit}"
        )
    while high - low > 1:
        middle = (low + high) // 2
        prompt = cut(middle)
        if prompt.ids is not None and len(prompt.ids) <= limit:
            low, best = middle, prompt
        else:
            high = middle
    removed = sum(max(0, length - low) for length in lengths)
    return Prompt(best.messages, best.ids, removed)
