from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning.learning_helpers import ragged_samples, tiny_model
from torch import Tensor, nn

from umad.learning import head as head_module
from umad.learning.batching import Batch, collate, pack
from umad.learning.head import FusedOutput, fused_loss, is_plain_head, scores, sequence_loss
from umad.learning.modeling import checkpoint_activations

VOCABULARY = 40


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Whole logits [n, V], by no other way than the model's own."""
    logits = model(**batch.inputs()).logits
    return logits.reshape(-1, logits.shape[-1])[batch.index]


def plain(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    logits = logits_of(model, batch)
    table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    return table.gather(1, batch.targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


class TokenLoss:
    """A clipped policy gradient with an entropy bonus, from random old log-probabilities and advantages per token."""

    def __init__(self, batch: Batch, dtype: torch.dtype, bonus: float, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        n = len(batch.index)
        self.old = torch.randn(n, generator=generator, dtype=dtype) - 3
        self.advantages = torch.randn(n, generator=generator, dtype=dtype)
        self.weights = torch.rand(n, generator=generator, dtype=dtype)
        self.bonus = bonus
        self.seen: list[tuple[int, int]] = []

    def __call__(self, rows: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        self.seen.append((rows.start, rows.stop))
        ratio = (logprobs - self.old[rows]).exp()
        advantages = self.advantages[rows]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if self.bonus:
            loss = loss - self.bonus * entropy
        return (loss * self.weights[rows]).sum()


def per_sequence(batch: Batch, bonus: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that mixes all tokens of a sequence, as GSPO's does."""

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        means = torch.zeros(len(batch.lengths), dtype=logprobs.dtype).index_add(0, batch.sequence, logprobs)
        ratios = ((means + 3) / batch.lengths).exp()
        total = (ratios.clamp(max=1.5) * torch.arange(1.0, len(ratios) + 1).to(ratios)).sum()
        return total - bonus * (entropy**2).mean() if bonus else total

    return loss


@contextmanager
def rows_per_chunk(rows: int, dtype: torch.dtype = torch.float64) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(head_module.CHUNK_BYTES, "cpu", rows * VOCABULARY * 2 * dtype.itemsize)
        yield


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], bound: float) -> None:
    assert any(g is not None for g in expected.values())
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            assert found[name] is not None, name
            assert (found[name] - gradient).abs().max() <= bound * max(1.0, float(gradient.abs().max())), name


def with_bias(model: Any) -> Any:
    old = model.get_output_embeddings()
    new = nn.Linear(old.in_features, old.out_features, bias=True, dtype=old.weight.dtype)
    new.weight = old.weight  # tied where it was
    model.set_output_embeddings(new)
    return model


KINDS = {"tied": ("qwen2", True), "untied": ("qwen3", False)}


def make(kind: str, dtype: torch.dtype = torch.float64, bias: bool = False, frozen: bool = False) -> Any:
    name, tied = KINDS[kind]
    model = tiny_model(name).to(dtype)
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == tied
    if bias:
        model = with_bias(model)
    if frozen:
        model.get_output_embeddings().requires_grad_(False)
    return model


def check(model: Any, batch: Batch, temperature: float, bonus: float, bound: float, by_token: bool = True) -> None:
    """Fused against plain: loss, log-probabilities, entropies, all parameters' gradients, after scaling the loss."""
    dtype = next(model.parameters()).dtype
    token = TokenLoss(batch, dtype, bonus)
    sequence = per_sequence(batch, bonus)
    n = len(batch.index)
    logprobs, entropy = plain(model, batch, temperature)
    expected = token(slice(0, n), logprobs, entropy) if by_token else sequence(logprobs, entropy)
    (0.5 * expected).backward()
    wanted = gradients(model)
    head = model.get_output_embeddings()
    token.seen.clear()
    if by_token:
        output = fused_loss(model, head, batch, temperature, token)
        starts, ends = zip(*token.seen, strict=True)
        assert (0, *ends) == (*starts, n)
    else:
        output = sequence_loss(model, head, batch, temperature, sequence)
    (0.5 * output.loss).backward()
    assert abs(output.loss.item() - expected.item()) <= bound * max(1.0, abs(expected.item()))
    assert (output.logprobs - logprobs).abs().max() <= bound
    assert (output.entropy - entropy).abs().max() <= bound
    assert not output.logprobs.requires_grad
    assert not output.entropy.requires_grad
    assert_same_gradients(gradients(model), wanted, bound)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("bonus", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 7, 10_000])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_fused_loss_is_the_plain_one_in_float64(kind, rows, bonus, by_token):
    with rows_per_chunk(rows):
        check(make(kind), collate(ragged_samples(6), 0), 0.7, bonus, 1e-10, by_token)


@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from([0.3, 1.0, 1.7]), st.booleans())
def test_the_fused_loss_is_the_plain_one_on_random_ragged_batches(seed, rows, temperature, by_token):
    rng = np.random.default_rng(seed)
    samples = ragged_samples(int(rng.integers(1, 6)), seed)
    batch = collate(samples, 0) if seed % 2 else pack(samples)
    with rows_per_chunk(rows):
        check(_TIED, batch, temperature, float(rng.choice([0.0, 0.5])), 1e-10, by_token)


_TIED = make("tied")


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("rows", [1, 9, 10_000])
def test_the_fused_loss_is_the_plain_one_in_float32(rows, by_token):
    with rows_per_chunk(rows, torch.float32):
        check(make("untied", torch.float32), collate(ragged_samples(6), 0), 1.3, 0.2, 2e-5, by_token)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_head_with_a_bias_and_a_frozen_head_work(kind, frozen, by_token):
    with rows_per_chunk(5):
        check(make(kind, bias=True, frozen=frozen), collate(ragged_samples(4), 0), 0.9, 0.1, 1e-10, by_token)


def test_a_frozen_model_under_a_trained_head_works():
    model = make("untied")
    model.model.requires_grad_(False)
    with rows_per_chunk(5):
        check(model, collate(ragged_samples(4), 0), 0.9, 0.1, 1e-10)


def test_the_fused_loss_works_with_gradient_checkpointing():
    model = make("tied")
    checkpoint_activations(model)
    model.train()
    with rows_per_chunk(5):
        check(model, collate(ragged_samples(4), 0), 0.9, 0.1, 1e-10)


@pytest.mark.parametrize("by_token", [True, False])
def test_under_autocast_the_fused_loss_is_near_the_plain_one(by_token):
    model = make("untied", torch.float32)
    batch = collate(ragged_samples(8), 0)
    token, sequence = TokenLoss(batch, torch.float32, 0.1), per_sequence(batch, 0.1)
    exact = plain(copy.deepcopy(model).double(), batch, 0.8)

    def run(fused: bool) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
        with torch.autocast("cpu", torch.bfloat16), rows_per_chunk(9, torch.float32):
            if not fused:
                logprobs, entropy = plain(model, batch, 0.8)
                loss = token(slice(0, len(logprobs)), logprobs, entropy) if by_token else sequence(logprobs, entropy)
                output = FusedOutput(loss, logprobs, entropy)
            elif by_token:
                output = fused_loss(model, model.get_output_embeddings(), batch, 0.8, token)
            else:
                output = sequence_loss(model, model.get_output_embeddings(), batch, 0.8, sequence)
        output.loss.backward()
        assert output.logprobs.dtype == output.entropy.dtype == output.loss.dtype == torch.float32
        return output.loss, output.logprobs, output.entropy, gradients(model)

    ours, theirs = run(True), run(False)
    assert abs(ours[0].item() / theirs[0].item() - 1) < 1e-3
    for mine, other, true in zip(ours[1:3], theirs[1:3], exact, strict=True):
        assert (mine - other).abs().max() < 1e-4  # from the same bfloat16 logits
        assert (mine - true).abs().max() < 0.1
    for name, expected in theirs[3].items():
        found = ours[3][name]
        assert found is not None
        assert expected is not None
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.02 * expected.norm(), name


def test_gradients_of_the_head_add_up_in_float32_whatever_its_weights_are_in():
    torch.manual_seed(0)
    hidden = torch.randn(4096, 8)
    weight = torch.randn(VOCABULARY, 8).bfloat16().requires_grad_()
    targets = torch.randint(VOCABULARY, (4096,))

    def gradient(rows: int) -> Tensor:
        with rows_per_chunk(rows, torch.float32):
            loss, _, _ = head_module._Fused.apply(
                hidden.bfloat16(), weight, None, targets, 1.0, lambda rows, logprobs, entropy: logprobs.sum()
            )
        (found,) = torch.autograd.grad(loss, weight)
        return found.double()

    table = torch.log_softmax(hidden.bfloat16().double() @ weight.detach().double().T, -1).exp()
    onehot = nn.functional.one_hot(targets, VOCABULARY).double()
    exact = (onehot - table).T @ hidden.bfloat16().double()
    assert (gradient(4) - exact).norm() < 0.01 * exact.norm()


# --- scores -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from([0.3, 1.0, 1.7]))
def test_scores_are_those_of_whole_logits(seed, rows, temperature):
    batch = collate(ragged_samples(4, seed), 0)
    with torch.no_grad():
        logits = logits_of(_TIED, batch)
        logprobs, entropy = plain(_TIED, batch, temperature)
    with rows_per_chunk(rows):
        found = scores(_TIED, _TIED.get_output_embeddings(), batch, temperature)
    table = torch.log_softmax(logits / temperature, -1)
    uniform = torch.full_like(table, 1 / VOCABULARY)
    certainty = nn.functional.kl_div(table, uniform, reduction="none").sum(-1)
    assert torch.allclose(found.logprobs, logprobs, rtol=0, atol=1e-10)
    assert torch.allclose(found.entropy, entropy, rtol=0, atol=1e-10)
    assert torch.allclose(found.certainty, certainty, rtol=0, atol=1e-10)
    assert torch.allclose(found.logit, logits.gather(1, batch.targets[:, None])[:, 0], rtol=0, atol=1e-10)
    assert not any(x.requires_grad for x in (found.logprobs, found.entropy, found.certainty, found.logit))


def test_scores_and_losses_have_the_same_logprobs_bit_for_bit():
    model, batch = make("tied", torch.float32), collate(ragged_samples(5), 0)
    head = model.get_output_embeddings()
    with rows_per_chunk(6, torch.float32):
        scored = scores(model, head, batch, 0.8)
        by_token = fused_loss(model, head, batch, 0.8, TokenLoss(batch, torch.float32, 0.0))
        by_sequence = sequence_loss(model, head, batch, 0.8, per_sequence(batch, 0.0))
    assert torch.equal(scored.logprobs, by_token.logprobs)
    assert torch.equal(scored.logprobs, by_sequence.logprobs)
    assert torch.equal(scored.entropy, by_token.entropy)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 5.0])
def test_float32_statistics_over_a_vocabulary_of_151936_are_right_to_1e_5(scale):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 151_936, generator=generator) * scale
    targets = torch.randint(151_936, (24,), generator=generator)
    found = head_module._stats(head_module._Given(logits, targets, 1.0))
    table = torch.log_softmax(logits.double(), -1)
    assert (found.logprobs - table.gather(1, targets[:, None])[:, 0]).abs().max() < 1e-5
    assert (found.entropy + (table.exp() * table).sum(-1)).abs().max() < 1e-5
    assert (found.certainty + table.mean(-1) + np.log(151_936)).abs().max() < 1e-5


# --- models and their heads -------------------------------------------------------------------------------------------


def changed_models() -> dict[str, Any]:
    """Models that do something to their logits after the head, and that say so in their config."""
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
    )

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    return {
        "soft-cap": Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=2.0)),
        "division": GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=4.0)),
        "product": CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.25)),
    }


@pytest.mark.parametrize("kind", ["soft-cap", "division", "product"])
@pytest.mark.parametrize("by_token", [True, False])
def test_models_that_change_their_logits_after_the_head_take_the_whole_path(kind, by_token):
    model = changed_models()[kind].double()
    assert not is_plain_head(model, model.get_output_embeddings())
    batch = collate(ragged_samples(4), 0)
    check_whole = copy.deepcopy(model)
    check(check_whole, batch, 0.7, 0.2, 1e-10, by_token)
    found = scores(model, model.get_output_embeddings(), batch, 0.7)
    with torch.no_grad():
        logprobs, entropy = plain(model, batch, 0.7)
        logits = logits_of(model, batch)
    assert (found.logprobs - logprobs).abs().max() < 1e-10
    assert (found.entropy - entropy).abs().max() < 1e-10
    assert (found.logit - logits.gather(1, batch.targets[:, None])[:, 0]).abs().max() < 1e-10


def test_scores_leave_whole_logits_of_the_model_alone():
    logits = torch.randn(5, VOCABULARY)
    before = logits.clone()
    head_module._stats(head_module._Given(logits, torch.zeros(5, dtype=torch.int64), 0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["soft-cap", "division", "product"])
def test_a_change_of_the_logits_that_no_config_tells_raises(kind, monkeypatch):
    model, batch = changed_models()[kind], collate(ragged_samples(3), 0)
    monkeypatch.setattr(head_module, "_AFTER_HEAD", {})
    head = model.get_output_embeddings()
    assert is_plain_head(model, head)
    with pytest.raises(RuntimeError, match="changes its logits after its head"):
        fused_loss(model, head, batch, 1.0, TokenLoss(batch, torch.float32, 0.0))
    with pytest.raises(RuntimeError, match="changes its logits after its head"):
        scores(model, head, batch, 1.0)


def test_settings_that_change_nothing_leave_a_head_plain():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            final_logit_softcapping=None,
        )
    )
    assert is_plain_head(model, model.get_output_embeddings())


def test_a_head_inside_an_adapter_is_not_plain():
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = make("untied")
    assert is_plain_head(model, model.get_output_embeddings())
    assert is_plain_head(Wrapper(model), model.get_output_embeddings())
    model.set_output_embeddings(Adapted(32, VOCABULARY, bias=False).double())
    head = model.get_output_embeddings()
    assert not is_plain_head(model, head)
    batch = collate(ragged_samples(3), 0)
    check(model, batch, 1.0, 0.0, 1e-10)


class Wrapper(nn.Module):
    """As DDP and DeepSpeed do it: the model is `module`, and its config isn't reachable from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, **inputs: Any) -> Any:
        self.calls += 1
        return self.module(**inputs)


def test_wrappers_and_module_hooks_see_their_forward():
    model = make("untied")
    head, batch = model.get_output_embeddings(), collate(ragged_samples(3), 0)
    wrapped = Wrapper(model)
    seen = []
    head.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    fused_loss(wrapped, head, batch, 1.0, TokenLoss(batch, torch.float64, 0.0)).loss.backward()
    assert wrapped.calls == 1
    assert seen == [(*batch.input_ids.shape, 32), (1, 1, 2)]
    assert head.weight.grad is not None


def test_a_weight_that_is_whole_only_inside_its_forward_is_enough():
    model = make("untied")
    head, batch = model.get_output_embeddings(), collate(ragged_samples(3), 0)
    loss = TokenLoss(batch, torch.float64, 0.1)
    expected = fused_loss(model, head, batch, 1.0, loss)
    expected.loss.backward()
    wanted = gradients(model)
    whole, empty = head.weight.data, head.weight.data.new_empty(0)
    head.weight.data = empty  # as ZeRO-3 leaves it
    head.register_forward_pre_hook(lambda module, args: setattr(module.weight, "data", whole))
    head.register_forward_hook(lambda module, args, output: setattr(module.weight, "data", empty))
    found = fused_loss(model, head, batch, 1.0, loss)
    scored = scores(model, head, batch, 1.0)
    head.weight.data = whole
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(scored.logprobs, expected.logprobs)
    assert_same_gradients(gradients(model), wanted, 0.0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was_afterwards(fails):
    model = make("untied")
    head, batch = model.get_output_embeddings(), collate(ragged_samples(3), 0)

    def loss(rows: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        if fails:
            raise ZeroDivisionError
        return logprobs.sum()

    try:
        fused_loss(model, head, batch, 1.0, loss)
    except ZeroDivisionError:
        assert fails
    assert "forward" not in vars(head)
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, VOCABULARY)


def test_a_loss_without_gradient_gives_zero_gradients():
    model, batch = make("untied"), collate(ragged_samples(3), 0)
    output = fused_loss(model, model.get_output_embeddings(), batch, 1.0, lambda rows, a, b: torch.tensor(2.0))
    output.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_second_backward_raises():
    model, batch = make("untied"), collate(ragged_samples(3), 0)
    loss = fused_loss(model, model.get_output_embeddings(), batch, 1.0, TokenLoss(batch, torch.float64, 0.0)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_no_tensor_of_all_tokens_times_the_vocabulary_is_made():
    model, batch = make("untied", torch.float32), collate(ragged_samples(60), 0)  # n, B and T are not V
    n = len(batch.index)
    assert n > 300
    head = model.get_output_embeddings()
    with rows_per_chunk(16, torch.float32), Largest(VOCABULARY) as seen:
        scores(model, head, batch, 1.0)
        fused_loss(model, head, batch, 1.0, TokenLoss(batch, torch.float32, 0.1)).loss.backward()
        sequence_loss(model, head, batch, 1.0, per_sequence(batch, 0.1)).loss.backward()
    assert seen.rows == 32  # the weight's gradient is [40, 32]; chunks have at most 16 rows
    with Largest(VOCABULARY) as seen:
        plain(model, batch, 1.0)
    assert seen.rows >= n


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most rows that any tensor made has beside a dimension of `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.rows = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and self.size in tensor.shape:
                self.rows = max(self.rows, tensor.numel() // self.size)
        return result
