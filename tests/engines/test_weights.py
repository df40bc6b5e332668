from __future__ import annotations

import pytest
import torch
from engines.engine_helpers import tiny_model

from umad.engines.models import fingerprint
from umad.engines.weights import copy_weights


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


def test_wrong_weights_are_named_and_nothing_is_written() -> None:
    taker = tiny_model()
    before = fingerprint(taker)
    good = {name: tensor + 1 for name, tensor in taker.state_dict().items()}
    last = "model.norm.weight"
    faults = {
        f"lack '{last}'": [(n, t) for n, t in good.items() if n != last],
        "'module.x', which": [*good.items(), ("module.x", torch.zeros(1))],
        rf"'{last}' with shape \(3,\)": [(n, torch.zeros(3) if n == last else t) for n, t in good.items()],
        rf"'{last}' with shape \(0,\)": [(n, torch.zeros(0) if n == last else t) for n, t in good.items()],
        f"'{last}' twice": [*good.items(), (last, good[last])],
        "are one tensor": [(n, t + 1 if n == "lm_head.weight" else t) for n, t in good.items()],
    }
    for message, weights in faults.items():
        with pytest.raises(ValueError, match=message):
            copy_weights(taker, weights)
        assert fingerprint(taker) == before


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
