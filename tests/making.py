"""What tests make for themselves: tiny random models with tokenizers and chat templates, as plain folders."""

from __future__ import annotations

from pathlib import Path

from umad.records import Debate

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def capitals(debate: Debate, agent: str, turn: int) -> float:
    """A reward that random models get in different amounts, so that there is something to learn from."""
    text = next(r.text for r in debate.turns[turn] if r.agent == agent)
    return sum(c.isupper() for c in text) / 10


def tiny_folder(path: Path, kind: str = "qwen2", seed: int = 0, context: int = 256) -> Path:
    """A random model of about 20k parameters with a character tokenizer, saved to `path`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    specials = ["<e>", "<pad>", "<u>", "<a>", "<unk>"]
    characters = sorted(set("0123456789+-*=?\\{}[]()ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz.,:'\n<>/"))
    if kind == "qwen3":
        characters.reverse()
    vocabulary = {token: i for i, token in enumerate(specials + characters)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<e>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<u>", "<a>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    names = {"qwen2": ("Qwen2Config", "Qwen2ForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}
    config_name, model_name = names[kind]
    settings = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "eos_token_id": vocabulary["<e>"],
        "pad_token_id": vocabulary["<pad>"],
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    if kind == "qwen3":
        settings["head_dim"] = 16
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
