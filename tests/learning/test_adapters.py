"""Adapters: a base that never changes, and the parts that do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import tiny_folder
from torch import nn

from umad.config import AdapterConfig
from umad.engines.base import Request
from umad.engines.models import fingerprint, load_model
from umad.engines.transformers import TransformersEngine
from umad.learning.adapters import (
    adapter_state,
    add_adapter,
    is_adapted,
    load_adapter,
    load_adapter_state,
    merged_weights,
    save_adapter,
    share_base,
    without_adapter,
)
from umad.records import Sampling, UserError

KINDS = ("qwen2", "qwen3")
CONFIG = AdapterConfig(rank=4, alpha=6.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {kind: tiny_folder(root / kind, kind) for kind in KINDS}


def base_of(folders: dict[str, Path], kind: str, dtype: Any = "float32") -> Any:
    return load_model(str(folders[kind]), dtype=dtype)


def trained(model: Any, seed: int = 0, config: AdapterConfig = CONFIG) -> Any:
    """With an adapter that does something: B is no longer zero."""
    add_adapter(model, config, seed)
    move(model, seed)
    return model


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter_state(model).values():
        tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype), alpha=0.2)


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2, 26).reshape(2, 12)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def base_bytes(model: nn.Module) -> dict[str, bytes]:
    state = model.state_dict()
    return {n: state[n].view(torch.uint8).numpy().tobytes() for n in state if ".lora_" not in n}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(folders: dict[str, Path], kind: str) -> None:
    plain, model = base_of(folders, kind), base_of(folders, kind)
    assert not is_adapted(model)
    add_adapter(model, CONFIG, 7)
    assert is_adapted(model)
    assert type(model) is type(plain)
    assert torch.equal(logits(model), logits(plain))
    asking = {name for name, p in model.named_parameters() if p.requires_grad}
    assert asking == set(adapter_state(model))
    assert len(asking) == 2 * 7 * 2  # A and B of seven linear layers in two blocks
    assert type(model.get_output_embeddings()) is nn.Linear
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name not in asking)
    with pytest.raises(ValueError, match="already"):
        add_adapter(model, CONFIG, 7)


def test_seeds_decide_the_start_alone(folders: dict[str, Path]) -> None:
    def start(seed: int, noise: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        model = base_of(folders, "qwen2")
        before = torch.get_rng_state()
        add_adapter(model, CONFIG, seed)
        assert torch.equal(torch.get_rng_state(), before), "the run's own random numbers go on as if nothing was drawn"
        return adapter_state(model)

    first, again, other = start(1, 0), start(1, 99), start(2, 0)
    for name, tensor in first.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, again[name])
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert not torch.equal(tensor, other[name])
            assert 0.8 * bound < tensor.abs().max() <= bound
        else:
            assert not tensor.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_its_adapter_a_model_is_its_base_to_the_bit(folders: dict[str, Path], kind: str, dtype: str) -> None:
    plain, model = base_of(folders, kind, dtype), trained(base_of(folders, kind, dtype))
    assert {t.dtype for t in adapter_state(model).values()} == {torch.float32}
    adapted = logits(model)
    assert not torch.equal(adapted, logits(plain))
    asking = [p.requires_grad for p in model.parameters()]
    with without_adapter(model):
        assert torch.equal(logits(model), logits(plain))
        with without_adapter(model):
            pass
        assert torch.equal(logits(model), logits(plain)), "an inner use does not end the outer one"
        assert [p.requires_grad for p in model.parameters()] == asking
    assert torch.equal(logits(model), adapted)
    with pytest.raises(KeyError), without_adapter(model):
        raise KeyError
    assert torch.equal(logits(model), adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_a_plain_model_that_computes_the_same(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    plain, model = base_of(folders, kind), trained(base_of(folders, kind))
    merged = dict(merged_weights(model))
    assert list(merged) == list(plain.state_dict())
    assert {t.dtype for t in merged.values()} == {torch.float32}
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=2e-6)
    model.save_pretrained(tmp_path, state_dict=merged)
    torch.testing.assert_close(logits(load_model(str(tmp_path))), logits(model), rtol=0, atol=2e-6)
    layer = model.model.layers[1].mlp.down_proj
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    closed = layer.base_layer.weight.double() + 6.0 / 4 * (b @ a)
    torch.testing.assert_close(merged["model.layers.1.mlp.down_proj.weight"].double(), closed, rtol=0, atol=1e-6)


def test_a_narrow_base_is_merged_in_float32_and_rounded_once(folders: dict[str, Path]) -> None:
    model = trained(base_of(folders, "qwen2", "bfloat16"))
    layer = model.model.layers[0].self_attn.q_proj
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    wanted = (layer.base_layer.weight.float() + b @ a * 1.5).bfloat16()
    found = dict(merged_weights(model))["model.layers.0.self_attn.q_proj.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)


def test_layers_that_keep_their_weights_turned_around_merge_too() -> None:
    import transformers

    torch.manual_seed(0)
    settings = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).eval()
    plain = share_base(model)
    trained(model)
    wanted = logits(model)
    plain.load_state_dict(dict(merged_weights(model)), assign=True)
    torch.testing.assert_close(logits(plain), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_merges_and_pushes_leave_the_base_as_it_was(folders: dict[str, Path], dtype: Any) -> None:
    model = trained(base_of(folders, "qwen3", dtype))
    before = base_bytes(model)
    engine = TransformersEngine(share_base(model), (0,))
    taker = TransformersEngine(base_of(folders, "qwen3", dtype), (0,))
    for version in range(100):
        move(model, version)
        engine.push(adapter_state(model).items(), version)
        taker.push(merged_weights(model), version)
        with without_adapter(model):
            pass
    assert base_bytes(model) == before
    assert base_bytes(engine.model) == before
    assert torch.equal(logits(engine.model), logits(model))


def text(engine: TransformersEngine, tokens: int = 40) -> list[int]:
    prompt = np.arange(5, 15, dtype=np.int32)
    engine.submit(Request((0, 0, 0, "a", 0), Sampling(tokens, 0.0), 1, prompt))
    ((_, generation),) = engine.pump()
    assert not isinstance(generation, Exception)
    assert generation.token_ids is not None
    return list(generation.token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_a_pushed_adapter_writes_what_the_merged_model_writes(
    folders: dict[str, Path], kind: str
) -> None:
    trainer = trained(base_of(folders, kind), seed=3)
    engine = TransformersEngine(share_base(trainer), (0,))
    plain = base_of(folders, kind)
    unadapted = text(TransformersEngine(base_of(folders, kind), (0,)))
    move(trainer, 4)
    engine.push(adapter_state(trainer).items(), 1)
    plain.load_state_dict(dict(merged_weights(trainer)))
    assert text(engine) == text(TransformersEngine(plain, (0,))) != unadapted


def test_two_agents_write_differently_from_one_base_in_memory(folders: dict[str, Path]) -> None:
    plain = base_of(folders, "qwen2")
    before = fingerprint(plain)
    agents = [trained(share_base(plain), seed) for seed in (1, 2)]
    engines = [TransformersEngine(share_base(model), (0,)) for model in agents]
    places = [{p.data_ptr() for n, p in m.named_parameters() if ".lora_" not in n} for m in (plain, *agents)]
    assert places[0] == places[1] == places[2]
    for engine in engines:
        assert {p.data_ptr() for n, p in engine.model.named_parameters() if ".lora_" not in n} == places[0]
    own = [t.data_ptr() for m in (*agents, *(e.model for e in engines)) for t in adapter_state(m).values()]
    assert len(set(own)) == len(own)
    assert text(engines[0]) != text(engines[1])
    assert fingerprint(plain) == before
    assert fingerprint(agents[0]) != fingerprint(agents[1])


def test_an_engine_in_another_type_has_a_base_of_its_own_that_others_can_share(folders: dict[str, Path]) -> None:
    plain = base_of(folders, "qwen2")
    agents = [
        trained(share_base(plain), 1),
        trained(share_base(plain), 2, AdapterConfig(rank=2, targets=("q_proj",))),
    ]
    first = share_base(agents[0], torch.bfloat16)
    second = share_base(agents[1], torch.bfloat16, first)
    assert {p.dtype for m in (first, second) for p in m.parameters()} == {torch.bfloat16}
    bases = [{p.data_ptr() for n, p in m.named_parameters() if ".lora_" not in n} for m in (plain, first, second)]
    assert bases[1] == bases[2]
    assert not bases[0] & bases[1]
    assert {b.dtype for b in first.buffers()} == {torch.float32}, "rotary frequencies are not rounded"
    torch.testing.assert_close(logits(second).float(), logits(agents[1]), rtol=0.1, atol=0.05)
    assert first.lm_head.weight is first.get_input_embeddings().weight


def test_a_sleeping_engine_leaves_the_shared_base_alone(folders: dict[str, Path]) -> None:
    trainer = trained(base_of(folders, "qwen2"))
    engine = TransformersEngine(share_base(trainer), (0,))
    before, wanted = base_bytes(trainer), text(engine)
    engine.sleep()
    assert sum(t.numel() for t in adapter_state(engine.model).values()) == 0
    assert base_bytes(trainer) == before
    engine.wake()
    with pytest.raises(RuntimeError, match="push"):
        engine.pump()
    engine.push(adapter_state(trainer).items(), 1)
    assert text(engine) == wanted


def test_one_tree_can_be_frozen_or_emptied_without_the_other(folders: dict[str, Path]) -> None:
    trainer = trained(base_of(folders, "qwen2"))
    other = share_base(trainer).requires_grad_(False)
    for parameter in other.parameters():
        parameter.data = parameter.data.new_empty(0)
    assert all(p.requires_grad == (".lora_" in n) for n, p in trainer.named_parameters())
    assert torch.isfinite(logits(trainer)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_is_one_of_peft(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = trained(base_of(folders, kind))
    save_adapter(model, tmp_path / "a", "the/base")
    save_adapter(share_base(model), tmp_path / "b", "the/base")
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["base_model_name_or_path"] == "the/base"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    theirs = PeftModel.from_pretrained(base_of(folders, kind), tmp_path / "a").eval()
    assert torch.equal(logits(theirs), logits(model))
    ours = base_of(folders, kind)
    add_adapter(ours, CONFIG, 99)
    load_adapter(ours, tmp_path / "a")
    assert torch.equal(logits(ours), logits(model))


def test_an_adapter_that_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    model = trained(base_of(folders, "qwen2"))
    save_adapter(model, tmp_path, "base")
    for config, message in (
        (AdapterConfig(rank=2, alpha=6.0), "rank 4, here it is 2"),
        (AdapterConfig(rank=4, alpha=8.0), r"alpha 6\.0, here it is 8\.0"),
        (AdapterConfig(rank=4, alpha=6.0, targets=("q_proj",)), "does not fit"),
    ):
        other = trained(base_of(folders, "qwen2"), config=config)
        before = fingerprint(other)
        with pytest.raises(UserError, match=message):
            load_adapter(other, tmp_path)
        assert fingerprint(other) == before
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        load_adapter(model, tmp_path)
    state = adapter_state(model)
    last = list(state)[-1]
    with pytest.raises(ValueError, match="shape"):
        load_adapter_state(model, state | {last: torch.zeros(1)})
    with pytest.raises(ValueError, match="other names"):
        load_adapter_state(model, {name: t for name, t in state.items() if name != last})


def test_targets_name_linear_layers_of_the_model(folders: dict[str, Path]) -> None:
    def adapted(*targets: str) -> set[str]:
        model = base_of(folders, "qwen2")
        add_adapter(model, AdapterConfig(rank=2, targets=targets), 0)
        return {name.split(".lora_")[0] for name in adapter_state(model)}

    blocks = [f"model.layers.{i}" for i in range(2)]
    assert adapted("q_proj", "mlp.up_proj") == {f"{b}.{n}" for b in blocks for n in ("self_attn.q_proj", "mlp.up_proj")}
    assert adapted("model.layers.1.mlp.up_proj") == {"model.layers.1.mlp.up_proj"}
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    for targets, message in (
        (("q_proj", "quack"), f"'quack' is no module of the model; there are {known}"),
        (("lm_head",), "'lm_head' is not a linear layer that can have an adapter"),
        (("embed_tokens",), "'embed_tokens' is not a linear layer"),
        (("proj",), "'proj' is no module"),
    ):
        with pytest.raises(UserError, match=message):
            adapted(*targets)


def test_a_missing_peft_is_named_before_anything_changes(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base_of(folders, "qwen2")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"needs peft.*umad\[peft\]"):
        add_adapter(model, CONFIG, 0)
    assert not is_adapted(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_merging_asks_for_what_it_reads_and_for_no_more_at_a_time(folders: dict[str, Path]) -> None:
    model = trained(base_of(folders, "qwen2"))
    inside: list[int] = []
    asked: list[int] = []

    @contextmanager
    def whole(parameters: Any) -> Iterator[None]:
        asked.extend(id(p) for p in parameters)
        inside.append(len(parameters))
        yield
        inside.pop()

    for _ in merged_weights(model, whole):
        assert len(inside) == 1
        assert inside[0] in (1, 3)
    assert not inside
    assert set(asked) == {id(p) for p in model.parameters()}
