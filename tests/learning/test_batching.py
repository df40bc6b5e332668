from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning.learning_helpers import make_sample, ragged_samples, tiny_model

from umad.learning.batching import BATCH_COST, collate, completion_logprobs, is_packable, micro_batches, pack
from umad.records import Sample


def plain_logprobs(model: Any, sample: Sample, temperature: float) -> torch.Tensor:
    """One sequence by itself, the whole logits, nothing sliced and nothing padded."""
    ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.completion_ids]), dtype=torch.int64)
    logits = model(input_ids=ids[None]).logits[0].float() / temperature
    table = torch.log_softmax(logits, dim=-1)
    first = len(sample.prompt_ids)
    return torch.stack([table[i - 1, ids[i]] for i in range(first, len(ids))])


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30), st.integers(1, 100))
def test_micro_batches_hold_every_sample_once_within_the_budget(sizes, budget):
    samples = [make_sample(prompt=p, completion=c) for p, c in sizes]
    batches = micro_batches(samples, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
    for batch in batches:
        width = max(sum(sizes[i]) for i in batch)
        assert len(batch) == 1 or width * len(batch) <= budget
    assert micro_batches(samples, budget) == batches


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30), st.integers(1, 100))
def test_packed_micro_batches_hold_every_sample_once_and_are_filled(sizes, budget):
    samples = [make_sample(prompt=p, completion=c) for p, c in sizes]
    batches = micro_batches(samples, budget, packed=True)
    assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
    totals = [sum(sum(sizes[i]) for i in batch) for batch in batches]
    for batch, total in zip(batches, totals, strict=True):
        assert len(batch) == 1 or total <= budget
    for total, following in zip(totals, batches[1:], strict=False):
        assert total + sum(sizes[following[0]]) > budget


def test_no_samples_make_no_micro_batches():
    assert micro_batches([], 100) == micro_batches([], 100, packed=True) == []


def lognormal_samples(n: int, cap: int, prompt: int) -> list[Sample]:
    """Long-tailed completions: the mean is about a quarter of the cap."""
    rng = np.random.default_rng(n)
    lengths = np.clip(rng.lognormal(np.log(cap / 4) - 0.5, 1.0, n), 1, cap).astype(int)
    assert 0.2 < lengths.mean() / cap < 0.3
    return [make_sample(rng, prompt=prompt, completion=int(length)) for length in lengths]


@pytest.mark.parametrize("budget", [4096, 8192, 16384, 32768, 65536])
@pytest.mark.parametrize("cap", [512, 2048])
@pytest.mark.parametrize("n", [512, 1024, 2048])
def test_less_than_5_percent_of_long_tailed_batches_is_padding(n, cap, budget):
    samples = lognormal_samples(n, cap, prompt=64)
    batches = micro_batches(samples, budget)
    widths = [len(s.prompt_ids) + len(s.completion_ids) for s in samples]
    padded = sum(max(widths[i] for i in batch) * len(batch) for batch in batches)
    assert 1 - sum(widths) / padded < 0.05
    # and not by batches of one row, whose number would cost more than it saves
    assert len(batches) * BATCH_COST < 0.1 * sum(widths)


@pytest.mark.parametrize("budget", [2048, 16384])
def test_micro_batches_are_cut_so_that_little_is_padding(budget):
    rng = np.random.default_rng(0)
    # long-tailed: the mean is a quarter of the cap
    samples = [make_sample(rng, prompt=8, completion=int(min(256, 1 + rng.exponential(60)))) for _ in range(1280)]
    batches = micro_batches(samples, budget)
    real = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    padded = sum(collate([samples[i] for i in batch], 0).padded for batch in batches)
    assert 1 - real / padded < 0.05
    assert len(batches) < 2 * real / budget + 20  # and not by batches of one row
    lengths = [len(samples[i].completion_ids) for batch in batches for i in batch]
    assert lengths == sorted(lengths, reverse=True)


@given(st.lists(st.integers(2, 300), min_size=1, max_size=7), st.integers(50, 900))
def test_the_cuts_of_micro_batches_are_the_cheapest(lengths, budget):
    samples = [make_sample(prompt=1, completion=n - 1) for n in lengths]
    widths = sorted(lengths, reverse=True)

    def price(sizes: Iterable[int]) -> float:
        total, at = 0, 0
        for size in sizes:
            if size > 1 and widths[at] * size > budget:
                return math.inf
            total += widths[at] * size + BATCH_COST
            at += size
        return total

    found = price(len(batch) for batch in micro_batches(samples, budget))
    cuts = itertools.product([False, True], repeat=len(widths) - 1)
    assert found == min(price(len(list(run)) for run in _runs(cut)) for cut in cuts)


def _runs(cut: Sequence[bool]) -> list[list[int]]:
    runs = [[0]]
    for i, here in enumerate(cut, 1):
        if here:
            runs.append([i])
        else:
            runs[-1].append(i)
    return runs


def test_a_batch_knows_padding_by_position_and_not_by_id():
    pad = 7  # also the end-of-sequence token, which both rows really end with
    ids = np.array([7, 3, 7], np.int32)
    short = Sample("a", (0, "a", 0), ids[:1], np.array([5, 7], np.int32), np.zeros(2, np.float32), 1.0)
    long = Sample("a", (0, "a", 0), ids, np.array([4, 4, 7], np.int32), np.zeros(3, np.float32), 1.0)
    batch = collate([short, long], pad)
    assert batch.input_ids.tolist() == [[7, 5, 7, 7, 7, 7], [7, 3, 7, 4, 4, 7]]
    assert batch.targets.tolist() == [5, 7, 4, 4, 7]
    assert batch.index.tolist() == [0, 1, 8, 9, 10]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]
    assert batch.lengths.tolist() == [2, 3]
    assert (batch.tokens, batch.padded) == (9, 12)


def test_a_packed_batch_is_all_sequences_one_after_the_other():
    ids = np.array([9, 3, 7], np.int32)
    short = Sample("a", (0, "a", 0), ids[:1], np.array([5, 7], np.int32), np.zeros(2, np.float32), 1.0)
    long = Sample("a", (0, "a", 0), ids, np.array([4, 4, 7], np.int32), np.zeros(3, np.float32), 1.0)
    batch = pack([short, long])
    assert batch.input_ids.tolist() == [[9, 5, 7, 9, 3, 7, 4, 4, 7]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert batch.targets.tolist() == [5, 7, 4, 4, 7]
    assert batch.index.tolist() == [0, 1, 5, 6, 7]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]
    assert batch.lengths.tolist() == [2, 3]
    assert (batch.tokens, batch.padded) == (9, 9)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "sliding"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_padded_batches_have_the_same_logprobs_and_gradients(kind, attention):
    # with these two, transformers masks what belongs to another sequence; the flash ones start anew with each
    if kind == "sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
        model = tiny_model("qwen2", attn_implementation=attention, **sliding)
        assert set(model.config.layer_types) == {"sliding_attention"}
    else:
        model = tiny_model(kind, attn_implementation=attention)
    model = model.double()
    samples = ragged_samples(7)
    found = []
    for batch in (collate(samples, 0), pack(samples)):
        logprobs, entropy = completion_logprobs(model, model.get_output_embeddings(), batch, 0.8, entropy=True)
        assert entropy is not None
        weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
        gradients = torch.autograd.grad((weights * logprobs).sum(), list(model.parameters()))
        found.append((logprobs.detach(), entropy, gradients))
    (a, b) = found
    assert (a[0] - b[0]).abs().max() < 1e-10
    assert (a[1] - b[1]).abs().max() < 1e-10
    for x, y in zip(a[2], b[2], strict=True):
        assert (x - y).abs().max() < (1e-5 if attention == "eager" else 1e-9)  # eager's softmax is in float32
    # and neighbours would be seen if position ids did not tell
    together = dataclasses.replace(pack(samples), position_ids=None)
    with torch.no_grad():
        wrong, _ = completion_logprobs(model, model.get_output_embeddings(), together, 0.8)
    assert (wrong - a[0]).abs().max() > 1e-3


def test_models_are_packable_if_all_their_layers_are_flash_attention():
    model = tiny_model("qwen2")
    assert not is_packable(model)  # sdpa
    for name in ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"):
        model.config._attn_implementation_internal = name  # setting it the public way asks for the library
        assert is_packable(model)
        wrapped = torch.nn.Module()
        wrapped.module = model
        assert is_packable(wrapped)
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert not is_packable(model)
    del model.config.layer_types
    assert is_packable(model)
    model.model.layers[0]._is_stateful = True
    assert not is_packable(model)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sample_in_a_padded_batch_has_the_logprobs_it_has_alone(kind, attention):
    model = tiny_model(kind, attn_implementation=attention).eval()
    samples = ragged_samples()
    with torch.no_grad():
        together, _ = completion_logprobs(model, model.get_output_embeddings(), collate(samples, 0), 0.8)
        for sample, row in zip(samples, together.split([len(s.completion_ids) for s in samples]), strict=True):
            assert (row - plain_logprobs(model, sample, 0.8)).abs().max() < 1e-5


def test_the_pad_token_changes_nothing():
    model = tiny_model().eval()
    head, samples = model.get_output_embeddings(), ragged_samples()
    with torch.no_grad():
        a, _ = completion_logprobs(model, head, collate(samples, 0), 1.0)
        b, _ = completion_logprobs(model, head, collate(samples, 39), 1.0)
    assert torch.equal(a, b)


@given(st.integers(0, 10_000))
def test_slicing_before_the_head_equals_the_full_logits_on_ragged_batches(seed):
    rng = np.random.default_rng(seed)
    samples = ragged_samples(int(rng.integers(1, 5)), seed)
    model = _MODEL
    batch = collate(samples, 0)
    with torch.no_grad():
        found, entropy = completion_logprobs(model, model.get_output_embeddings(), batch, 1.3, entropy=True)
        logits = model(input_ids=batch.input_ids).logits.reshape(-1, 40)[batch.index] / 1.3
    table = torch.log_softmax(logits, -1)
    assert torch.allclose(found, table.gather(-1, batch.targets[:, None])[:, 0], atol=1e-5)
    assert entropy is not None
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5)


_MODEL = tiny_model("qwen3").eval()


def test_only_completion_positions_pass_through_the_head():
    model = tiny_model().eval()
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    samples = ragged_samples(5)
    completion_logprobs(model, model.get_output_embeddings(), collate(samples, 0), 1.0)
    assert seen == [(sum(len(s.completion_ids) for s in samples), 40)]
    # and the model is as it was
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 40)


def test_what_a_model_does_after_its_head_is_kept():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=2.0,
        initializer_range=0.3,
        sliding_window=8,
    )
    model = Gemma2ForCausalLM(config).eval()
    samples = ragged_samples(4)
    with torch.no_grad():
        found, _ = completion_logprobs(model, model.get_output_embeddings(), collate(samples, 0), 0.7)
        plain = torch.cat([plain_logprobs(model, s, 0.7) for s in samples])
    assert (found - plain).abs().max() < 1e-5


def test_the_distribution_is_divided_by_the_temperature():
    model = tiny_model().eval()
    head, batch = model.get_output_embeddings(), collate(ragged_samples(3), 0)
    with torch.no_grad():
        hot, hot_entropy = completion_logprobs(model, head, batch, 2.0, entropy=True)
        cold, cold_entropy = completion_logprobs(model, head, batch, 0.5, entropy=True)
    assert not torch.allclose(hot, cold)
    assert hot_entropy is not None
    assert cold_entropy is not None
    assert (hot_entropy > cold_entropy).all()


def test_logprobs_are_float32_for_narrower_models_and_float64_for_wider_ones():
    batch = collate(ragged_samples(3), 0)
    for given_type, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        model = copy.deepcopy(_MODEL).to(given_type)
        with torch.no_grad():
            found, _ = completion_logprobs(model, model.get_output_embeddings(), batch, 1.0)
        assert found.dtype == expected
