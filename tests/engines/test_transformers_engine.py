from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from engines.engine_helpers import VOCABULARY, drain, full_pass_logprobs, prompts, requests, run, tiny_model

from umad.engines.base import Generation, GenerationError, Request
from umad.engines.transformers import TransformersEngine
from umad.records import Sampling, UserError

KINDS = ["llama", "qwen2", "qwen3", "gpt2"]
STOPS = (1,)


def same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, result in one.items():
        assert np.array_equal(result.token_ids, other[key].token_ids), key
        assert result.finish_reason == other[key].finish_reason
        assert np.allclose(result.logprobs, other[key].logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_generate(kind: str) -> None:
    model = tiny_model(kind, sharp=2.0, tie_word_embeddings=False)
    stops = list(range(1, 6))
    asked = requests(prompts(12), Sampling(25, 0.0))
    results = run(TransformersEngine(copy.deepcopy(model), stops, max_batch=5), asked)
    assert len({r.completion_tokens for r in results.values()}) > 1
    for request in asked:
        ids = torch.tensor(request.prompt_ids.astype(np.int64))[None]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=25,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=0,
        )
        assert out[0, ids.shape[1] :].tolist() == results[request.key].token_ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass(kind: str, temperature: float) -> None:
    model = tiny_model(kind)
    asked = requests(prompts(20), Sampling(30, temperature), members=3)
    results = run(TransformersEngine(copy.deepcopy(model), STOPS, max_batch=9), asked)
    for request in asked:
        result = results[request.key]
        wanted = full_pass_logprobs(model, request.prompt_ids, result.token_ids, temperature)
        assert result.logprobs.dtype == np.float32
        assert np.abs(result.logprobs - wanted).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_is_the_same_whatever_else_is_in_its_batch(kind: str) -> None:
    model = tiny_model(kind)
    kinds = [Sampling(40, 1.0), Sampling(7, 0.7), Sampling(30, 1.0, 0.9, 20), Sampling(20, 0.0)]
    asked = requests(prompts(30), kinds, members=3)
    results = [run(TransformersEngine(copy.deepcopy(model), STOPS, max_batch=size), asked) for size in (64, 7)]
    few = asked[::7]
    alone = run(TransformersEngine(copy.deepcopy(model), STOPS, max_batch=1), few)
    same(results[0], results[1])
    same(alone, {request.key: results[0][request.key] for request in few})
    late = TransformersEngine(copy.deepcopy(model), STOPS, max_batch=8)
    for request in asked[::-2]:
        late.submit(request)
    mixed = {r.key: g for r, g in late.pump()}
    for request in asked[-2::-2]:
        late.submit(request)
    same(mixed | drain(late), results[0])


def test_members_of_a_group_differ_and_a_seed_repeats() -> None:
    engine = TransformersEngine(tiny_model(sharp=1.0), STOPS)
    asked = requests(prompts(1), Sampling(20), members=8)
    first = run(engine, asked)
    assert len({tuple(r.token_ids) for r in first.values()}) == 8
    same(first, run(engine, asked))


def test_a_shared_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(tiny_model(), STOPS, max_batch=64)
    widths = []
    prefill = type(engine.architecture).prefill

    def spy(self: object, model: object, ids: torch.Tensor) -> object:
        widths.append(tuple(ids.shape))
        return prefill(self, model, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(type(engine.architecture), "prefill", spy)
    prompt = [np.arange(2, 22, dtype=np.int32)]
    results = run(engine, requests(prompt, Sampling(5), members=40))
    assert len(results) == 40
    assert widths == [(1, 19)]


def test_finished_rows_make_room_and_do_not_go_on_computing() -> None:
    model = tiny_model(sharp=1.0)
    engine = TransformersEngine(model, (), max_batch=4)
    rows = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: rows.append(tuple(args[0].shape)))
    lengths = [3, 3, 3, 12, 3, 3]
    run(engine, requests(prompts(6, shortest=1, longest=1), [Sampling(n) for n in lengths]))
    steps = [shape[0] for shape in rows]
    assert sum(steps) == sum(lengths)
    assert max(steps) == 4


def test_finish_reasons() -> None:
    model = tiny_model(sharp=1.0)
    engine = TransformersEngine(model, tuple(range(9)), max_batch=64, max_context=20)
    asked = requests(prompts(60, shortest=2, longest=19), Sampling(6))
    results = run(engine, asked)
    reasons = {}
    for request in asked:
        result, n = results[request.key], len(request.prompt_ids)
        reasons[result.finish_reason] = True
        stopped = result.token_ids < 9
        assert not stopped[:-1].any()
        assert result.completion_tokens == len(result.token_ids)
        assert result.prompt_tokens == n
        if stopped[-1]:
            assert result.finish_reason == "stop"
        elif len(result.token_ids) == 6:
            assert result.finish_reason == "length"
        else:
            assert n + len(result.token_ids) == 20
            assert result.finish_reason == "context"
    assert set(reasons) == {"stop", "length", "context"}


def test_bad_requests_fail_alone() -> None:
    engine = TransformersEngine(tiny_model(), STOPS, max_batch=4, max_context=32)
    good = requests(prompts(6), Sampling(5))
    bad = [
        Request((90, 0, 0, "a", 0), Sampling(5), 1, np.zeros(0, dtype=np.int32)),
        Request((91, 0, 0, "a", 0), Sampling(5), 1, None),
        Request((92, 0, 0, "a", 0), Sampling(5), 1, np.full(32, 3, dtype=np.int32)),
        Request((93, 0, 0, "a", 0), Sampling(5), 1, np.array([5, VOCABULARY], dtype=np.int32)),
        Request((94, 0, 0, "a", 0), Sampling(5), 1, np.array([-1, 5], dtype=np.int32)),
    ]
    results = run(engine, [*bad[:2], *good, *bad[2:]])
    assert all(isinstance(results[r.key], Generation) for r in good)
    assert all(isinstance(results[r.key], GenerationError) for r in bad)
    assert "empty" in str(results[bad[0].key])
    assert "context of 32" in str(results[bad[2].key])
    assert f"token id {VOCABULARY}" in str(results[bad[3].key])
    assert engine.pump() == []


def test_a_checkpoints_generation_config_changes_nothing() -> None:
    asked = requests(prompts(10), [Sampling(20, 1.0), Sampling(20, 0.0)])
    plain = run(TransformersEngine(tiny_model(), STOPS), asked)
    model = tiny_model()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.2, top_p=0.1, top_k=2, repetition_penalty=5.0, max_new_tokens=2, min_new_tokens=2
    )
    same(run(TransformersEngine(model, STOPS), asked), plain)


def test_a_push_changes_what_is_generated_and_is_stamped() -> None:
    trainer = tiny_model(seed=1)
    engine = TransformersEngine(tiny_model(seed=0), STOPS)
    asked = requests(prompts(10), Sampling(20))
    before = run(engine, asked)
    assert {r.weight_version for r in before.values()} == {0}
    engine.push(trainer.state_dict().items(), 7)
    after = run(engine, asked)
    assert {r.weight_version for r in after.values()} == {7}
    same(after, run(TransformersEngine(copy.deepcopy(trainer), STOPS), asked))
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.zero_()
    same(run(engine, asked), after)


def test_a_push_amid_generation_starts_open_responses_again() -> None:
    trainer = tiny_model(seed=1)
    engine = TransformersEngine(tiny_model(seed=0), STOPS, max_batch=4)
    asked = requests(prompts(12), Sampling(20))
    for request in asked:
        engine.submit(request)
    early = {r.key: g for r, g in engine.pump()}
    engine.push(trainer.state_dict().items(), 1)
    late = drain(engine)
    assert early.keys() | late.keys() == {r.key for r in asked}
    wanted = run(TransformersEngine(trainer, STOPS), asked)
    same(late, {key: wanted[key] for key in late})
    assert {g.weight_version for g in late.values()} == {1}


def test_sleep_gives_up_weights_and_only_a_push_brings_them_back() -> None:
    model = tiny_model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = TransformersEngine(model, STOPS)
    asked = requests(prompts(5), Sampling(10))
    before = run(engine, asked)
    engine.sleep()
    assert sum(p.numel() for p in model.parameters()) == 0
    for call in (engine.pump, lambda: engine.submit(asked[0])):
        with pytest.raises(RuntimeError, match="asleep"):
            call()
    with pytest.raises(RuntimeError, match="wake"):
        engine.push(weights.items(), 1)
    engine.wake()
    for call in (engine.pump, lambda: engine.submit(asked[0])):
        with pytest.raises(RuntimeError, match="push"):
            call()
    engine.push(weights.items(), 1)
    same(run(engine, asked), before)


def test_requests_survive_sleep() -> None:
    model = tiny_model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = TransformersEngine(model, STOPS, max_batch=3)
    asked = requests(prompts(9), Sampling(10))
    wanted = run(engine, asked)
    for request in asked:
        engine.submit(request)
    early = {r.key: g for r, g in engine.pump()}
    engine.sleep()
    engine.wake()
    engine.push(weights.items(), 0)
    same(early | drain(engine), wanted)


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_an_interrupt_loses_no_request_and_changes_no_response(at: int) -> None:
    model = tiny_model()
    engine = TransformersEngine(model, STOPS, max_batch=4)
    asked = requests(prompts(8), Sampling(12), members=2)
    wanted = run(engine, asked)
    calls = 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt

    handle = model.get_input_embeddings().register_forward_pre_hook(interrupt)
    for request in asked:
        engine.submit(request)
    results = {}
    interrupted = False
    while not interrupted:
        try:
            results |= {r.key: g for r, g in engine.pump()}
        except KeyboardInterrupt:
            interrupted = True
    handle.remove()
    same(results | drain(engine), wanted)


def test_logits_that_are_not_finite_fail_their_request_and_no_other() -> None:
    model = tiny_model()
    engine = TransformersEngine(model, STOPS, max_batch=4)
    asked = requests(prompts(12, shortest=3), Sampling(15))
    wanted = run(engine, asked)
    poison = asked[3].prompt_ids
    with torch.no_grad():
        # a token that occurs in some prompts only, and can be sampled by any response
        model.get_input_embeddings().weight[int(poison[1])] = torch.nan
    results = run(engine, asked)
    # tied embeddings: every row's logits have a NaN now, so all fail, none is filled in
    assert all(isinstance(r, GenerationError) and "not finite" in str(r) for r in results.values())
    untied = tiny_model(tie_word_embeddings=False)
    engine = TransformersEngine(untied, STOPS, max_batch=4)
    wanted = run(engine, asked)
    with torch.no_grad():
        untied.get_input_embeddings().weight[int(poison[1])] = torch.nan
    results = run(engine, asked)
    touched = {r.key for r in asked if int(poison[1]) in r.prompt_ids or int(poison[1]) in wanted[r.key].token_ids[:-1]}
    assert 0 < len(touched) < len(asked)
    for key, result in results.items():
        if key in touched:
            assert isinstance(result, GenerationError)
        else:
            assert np.array_equal(result.token_ids, wanted[key].token_ids)


@pytest.mark.parametrize("window", [6, 300])
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "qwen2"])
def test_sliding_windows_are_kept(kind: str, window: int) -> None:
    settings = {"sliding_window": window}
    if kind == "qwen2":
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
    if kind == "gemma3":
        settings |= {"layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model(kind, sharp=2.0, **settings)
    engine = TransformersEngine(copy.deepcopy(model), STOPS, max_batch=6)
    asked = requests(prompts(10), Sampling(20), members=2)
    for key, result in run(engine, asked).items():
        prompt = asked[key[0] * 2].prompt_ids
        assert np.abs(result.logprobs - full_pass_logprobs(model, prompt, result.token_ids)).max() < 1e-5


def test_eager_attention_gives_the_same() -> None:
    asked = requests(prompts(10), Sampling(20), members=2)
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    same(run(TransformersEngine(eager, STOPS), asked), run(TransformersEngine(tiny_model(), STOPS), asked))


def test_a_model_with_a_recurrent_state_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UserError, match="MambaForCausalLM"):
        TransformersEngine(transformers.MambaForCausalLM(config), STOPS)


def test_a_model_that_steps_differently_is_refused() -> None:
    class Odd(transformers.Qwen2ForCausalLM):
        def forward(self, input_ids=None, position_ids=None, cache=None, past_key_values=None, **kwargs):  # type: ignore[no-untyped-def]
            given = {"cache": cache, "past_key_values": past_key_values}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return super().forward(input_ids=input_ids, **kwargs)  # its own idea of positions

    with pytest.raises(UserError, match=r"step by step|does not fill"):
        TransformersEngine(Odd(tiny_model().config), STOPS)


def test_weights_that_are_not_finite_are_refused_at_load() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        TransformersEngine(model, STOPS)


def test_bfloat16_logprobs_are_float32_of_what_was_sampled() -> None:
    model = tiny_model(sharp=1.0).to(torch.bfloat16)
    engine = TransformersEngine(copy.deepcopy(model), STOPS)
    assert not engine.exact_logprobs
    asked = requests(prompts(6), Sampling(10))
    for key, result in run(engine, asked).items():
        wanted = full_pass_logprobs(model, asked[key[0]].prompt_ids, result.token_ids)
        assert result.logprobs.dtype == np.float32
        assert np.abs(result.logprobs - wanted).max() < 0.1


def test_trained_parameters_of_the_caller_are_never_touched_by_generation() -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(TransformersEngine(model, STOPS), requests(prompts(5), Sampling(10)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_closing_ends_everything() -> None:
    engine = TransformersEngine(tiny_model(), STOPS)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.pump()


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_batch"):
        TransformersEngine(tiny_model(), STOPS, max_batch=0)
    with pytest.raises(ValueError, match="stop ids"):
        TransformersEngine(tiny_model(), (VOCABULARY,))
