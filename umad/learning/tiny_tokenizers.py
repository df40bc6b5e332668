"""Two tokenizers for the tiny agents, unlike on purpose: other units, other ids, other special tokens, other template.

Both are the real thing, folders that `AutoTokenizer` and vLLM load, with the box's opening as one token so that responses
stay short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN_TEMPLATE = (
    "{%- for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"
)
_CHATML_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)


def build_tokenizer(kind: str, max_length: int) -> PreTrainedTokenizerBase:
    """`digits`: one token a byte. `numbers`: one token for two digits. Decoding gives back the text that was encoded, for
    any text (`digits`) or for printable ASCII and newlines (`numbers`)."""
    return _digits(max_length) if kind == "digits" else _numbers(max_length)


def _digits(max_length: int) -> PreTrainedTokenizerBase:
    """Byte-level BPE. transformers gives every Qwen2 model this class, whatever the folder says, so it must be it."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    box = "\\boxed"
    merges = [(box[:n], box[n]) for n in range(1, len(box))]
    specials = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), "<|pad|>", "<|end|>", *specials]
    return Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|pad|>",  # never needed: every byte is known
        extra_special_tokens=specials,
        chat_template=_PLAIN_TEMPLATE,
        model_max_length=max_length,
        padding_side="left",
    )


def _numbers(max_length: int) -> PreTrainedTokenizerBase:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_end|>", "<|unknown|>", "<|im_start|>"]
    words = ["system", "user", "assistant", "\\boxed{", *(f"{n:02d}" for n in range(100))]
    tokens = [*specials, *words, *map(chr, range(126, 31, -1)), "\n"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unknown|>"))
    pattern = Regex(r"\\boxed\{|system|user|assistant|[0-9]{2}|[\s\S]")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|unknown|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=_CHATML_TEMPLATE,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
