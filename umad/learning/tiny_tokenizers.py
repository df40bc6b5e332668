"""Two tokenizers for the tiny agents, unlike on purpose: other units, other ids, other special tokens, other template.

Both write `\\boxed{` as one token and fall back on single characters of printable ASCII, so any prompt can be encoded
(what lies outside becomes the unknown token) and responses stay short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHARACTERS = ["\n", *map(chr, range(32, 127))]
_BOX = "\\boxed{"

_DIGITS_TEMPLATE = (
    "{%- for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"
)
_NUMBERS_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """`units` are what a word of the vocabulary can be, longest first; `specials` never arise from plain text."""

    pad: str
    eos: str
    unknown: str
    specials: tuple[str, ...]
    words: tuple[str, ...]
    pattern: str
    template: str

    def vocabulary(self) -> dict[str, int]:
        tokens = (self.pad, self.eos, self.unknown, *self.specials, *self.words)
        return {token: number for number, token in enumerate(tokens)}


DIGITS = TokenizerSpec(
    pad="<|pad|>",
    eos="<|end|>",
    unknown="<|unk|>",
    specials=("<|system|>", "<|user|>", "<|assistant|>"),
    words=(*_CHARACTERS, _BOX),
    pattern=r"\\boxed\{|[\s\S]",
    template=_DIGITS_TEMPLATE,
)
"""One token a character."""

NUMBERS = TokenizerSpec(
    pad="<|endoftext|>",
    eos="<|im_end|>",
    unknown="<|unknown|>",
    specials=("<|im_start|>",),
    words=("system", "user", "assistant", _BOX, *(f"{n:02d}" for n in range(100)), *reversed(_CHARACTERS)),
    pattern=r"\\boxed\{|system|user|assistant|[0-9]{2}|[\s\S]",
    template=_NUMBERS_TEMPLATE,
)
"""Two digits are one token, the other way round in the vocabulary, ChatML."""


def build_tokenizer(spec: TokenizerSpec, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose decoding gives back the text that was encoded, for printable ASCII and newlines."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(spec.vocabulary(), unk_token=spec.unknown))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(spec.pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=spec.pad,
        eos_token=spec.eos,
        unk_token=spec.unknown,
        additional_special_tokens=list(spec.specials),
        chat_template=spec.template,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
