from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engines.engine_helpers import drain, prompts, requests, run, tiny_model

from umad.config import AdapterConfig
from umad.engines.adapters import adapter_state, is_adapter_name, plain_name
from umad.engines.models import fingerprint
from umad.engines.transformers import TransformersEngine
from umad.engines.weights import copy_weights
from umad.learning.adapters import add_adapter
from umad.records import Sampling


def test_copied_weights_are_the_givers_to_the_bit() -> None:
    giver, taker = tiny_model(seed=1), tiny_model(seed=2)
    places = {name: tensor.data_ptr() for name, tensor in taker.state_dict().items()}
    assert fingerprint(giver) != fingerprint(taker)
    copy_weights(taker, giver.state_dict().items())
    assert fingerprint(giver) == fingerprint(taker)
    assert places == {name: tensor.data_ptr() for name, tensor in taker.state_dict().items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_one_name_of_a_tied_pair_is_enough(kind: str, tied: bool) -> None:
    giver = tiny_model(kind, seed=1, tie_word_embeddings=tied)
    taker = tiny_model(kind, seed=2, tie_word_embeddings=tied)
    without = [(name, tensor) for name, tensor in giver.state_dict().items() if name != "lm_head.weight"]
    if tied:
        copy_weights(taker, without)
        assert fingerprint(giver) == fingerprint(taker)
        assert taker.lm_head.weight is taker.get_input_embeddings().weight
    else:
        with pytest.raises(ValueError, match=r"lack 'lm_head\.weight'"):
            copy_weights(taker, without)


def test_wrong_weights_are_named() -> None:
    taker = tiny_model()
    good = {name: tensor + 1 for name, tensor in taker.state_dict().items()}
    for message, weights in faults(good).items():
        with pytest.raises(ValueError, match=message):
            copy_weights(taker, weights)


def faults(good: dict[str, torch.Tensor]) -> dict[str, list[tuple[str, torch.Tensor]]]:
    last = "model.norm.weight"
    return {
        f"lack '{last}'": [(n, t) for n, t in good.items() if n != last],
        "'module.x', which": [*good.items(), ("module.x", torch.zeros(1))],
        rf"'{last}' with shape \(3,\)": [(n, torch.zeros(3) if n == last else t) for n, t in good.items()],
        rf"'{last}' with shape \(0,\)": [(n, torch.zeros(0) if n == last else t) for n, t in good.items()],
        f"'{last}' twice": [*good.items(), (last, good[last])],
        "are one tensor": [(n, t + 1 if n == "lm_head.weight" else t) for n, t in good.items()],
    }


def test_an_engine_whose_push_failed_refuses_to_generate_until_one_succeeds() -> None:
    giver = tiny_model(seed=1)
    engine = TransformersEngine(tiny_model(seed=2), (1,))
    asked = requests(prompts(3), Sampling(6, 0.0))
    wanted = run(TransformersEngine(tiny_model(seed=1), (1,)), asked)
    good = dict(giver.state_dict())
    for version, (message, weights) in enumerate(faults(good).items(), 1):
        for request in asked:
            engine.submit(request)
        with pytest.raises(ValueError, match=message):
            engine.push(weights, -version)
        for call in (engine.pump, lambda: engine.submit(asked[0])):
            with pytest.raises(RuntimeError, match="failed push"):
                call()
        assert engine.version != -version
        engine.push(good.items(), version)
        found = drain(engine)
        assert {key: list(g.token_ids) for key, g in found.items()} == {
            key: list(g.token_ids) for key, g in wanted.items()
        }
        assert {g.weight_version for g in found.values()} == {version}


def test_each_tensor_is_copied_before_the_next_is_asked_for() -> None:
    """As under ZeRO-3, where a tensor is whole only until then."""
    giver, taker = tiny_model(seed=1), tiny_model(seed=2)

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in giver.state_dict().items():
            whole = tensor.clone()
            yield name, whole
            whole.fill_(torch.nan)

    copy_weights(taker, one_by_one())
    assert fingerprint(giver) == fingerprint(taker)


def test_a_model_with_an_adapter_takes_its_adapter_and_nothing_else() -> None:
    giver, taker = tiny_model(seed=1), tiny_model(seed=1)
    plain = fingerprint(taker)
    for seed, model in enumerate((giver, taker)):
        add_adapter(model, AdapterConfig(rank=2), seed)
    assert fingerprint(giver) != fingerprint(taker)
    adapter = {name: tensor.clone() for name, tensor in adapter_state(giver).items()}
    copy_weights(taker, adapter.items())
    assert fingerprint(giver) == fingerprint(taker)
    for message, weights in (
        ("frozen base; push the adapter only", giver.state_dict()),
        ("which the engine's model does not have", {"model.x.lora_A.default.weight": torch.zeros(1)}),
        ("lack '.*down_proj.lora_B.default.weight'", dict(list(adapter.items())[:-1])),
        ("with shape", {name: tensor[:1] for name, tensor in adapter.items()}),
    ):
        with pytest.raises(ValueError, match=message):
            copy_weights(taker, weights.items())
    base = {plain_name(n): t for n, t in taker.state_dict().items() if not is_adapter_name(n)}
    assert fingerprint(base) == plain


def test_copying_converts_the_type() -> None:
    giver, taker = tiny_model(seed=1), tiny_model(seed=2).to(torch.bfloat16)
    copy_weights(taker, giver.state_dict().items())
    assert fingerprint(taker) == fingerprint(giver.to(torch.bfloat16))


def test_a_fingerprint_sees_every_value_and_survives_copies() -> None:
    model = tiny_model()
    before = fingerprint(model)
    assert before == fingerprint(model.state_dict())
    assert before == fingerprint({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert before == fingerprint(dict(reversed(model.state_dict().items())))
    with torch.no_grad():
        weight = model.model.layers[1].mlp.down_proj.weight
        for row, column in ((0, 0), (31, 63), (7, 13)):
            old = weight[row, column].clone()
            weight[row, column] = torch.nextafter(old, old + 1)
            assert fingerprint(model) != before
            weight[row, column] = old
        assert fingerprint(model) == before
        weight.copy_(weight.flip(0))
        assert fingerprint(model) != before


def test_a_fingerprint_does_not_depend_on_the_number_of_threads() -> None:
    large = {"w": torch.randn(400_000, generator=torch.Generator().manual_seed(0))}
    threads = torch.get_num_threads()
    try:
        prints = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            prints.add(fingerprint(large))
    finally:
        torch.set_num_threads(threads)
    assert len(prints) == 1
