from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning.learning_helpers import make_sample, ragged_samples, tiny_model

from umad.config import LossConfig, TrainingConfig
from umad.learning import policy as policy_module
from umad.learning.losses import loss_normaliser
from umad.learning.policy import Policy, learning_rate_factor
from umad.records import Sample


def make_policy(model: Any = None, *, loss: dict[str, Any] | None = None, temperature: float = 0.8, **training: Any):
    values = {"steps": 10, "learning_rate": 1e-3, "micro_batch_tokens": 100, **training}
    return Policy(
        "ada",
        tiny_model() if model is None else model,
        TrainingConfig.model_validate(values),
        LossConfig.model_validate(loss or {}),
        temperature,
        pad_id=0,
        total_steps=10,
    )


def parameters(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parallel.module.parameters()]).clone()


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def scored(policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
    return [scores.logprobs for scores in policy.score(samples)]


def policy_gradient(policy: Policy, samples: Sequence[Sample], normaliser: float | None = None) -> torch.Tensor:
    if normaliser is None:
        normaliser = loss_normaliser(policy.loss, [len(s.completion_ids) for s in samples], policy.max_tokens)
    policy.parallel.optimizer.zero_grad()
    policy.backward(samples, normaliser)
    return gradient(policy.parallel.module)


def plain_loss(
    model: Any, samples: Sequence[Sample], kind: str, temperature: float, coef: float = 0.0, start: Any = None
) -> torch.Tensor:
    """The loss written down again: sequence by sequence, whole logits, ratio 1, no padding, no micro-batches."""
    per_sequence = []
    for s in samples:
        ids = torch.tensor(np.concatenate([s.prompt_ids, s.completion_ids]), dtype=torch.int64)
        span = slice(len(s.prompt_ids), len(ids))

        def logprobs(m: Any, ids: torch.Tensor = ids, span: slice = span) -> torch.Tensor:
            logits = m(input_ids=ids[None]).logits[0] / temperature
            return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0][span.start - 1 : span.stop - 1]

        lp = logprobs(model)
        tokens = -s.advantage * torch.exp(lp - lp.detach())
        if start is not None:
            with torch.no_grad():
                ref = logprobs(start)
            tokens = tokens + coef * (torch.exp(ref - lp) - (ref - lp) - 1)
        per_sequence.append(tokens)
    if kind == "dapo":
        return torch.cat(per_sequence).mean()
    return torch.stack([tokens.mean() for tokens in per_sequence]).mean()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["dapo", "grpo"])
@pytest.mark.parametrize("coef", [0.0, 0.1])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_gradient_is_that_of_the_plain_formula(dtype, kind, coef, architecture):
    model = tiny_model(architecture).to(dtype)
    start = tiny_model(architecture, seed=1).to(dtype) if coef else None
    policy = make_policy(copy.deepcopy(start or model), loss={"type": kind, "kl": {"coef": coef}})
    policy.parallel.module.load_state_dict(model.state_dict())  # away from the reference
    samples = ragged_samples()
    found = policy_gradient(policy, samples)
    plain_loss(model, samples, kind, 0.8, coef, start).backward()
    assert float(found.norm()) > 0.01
    assert relative(found, gradient(model)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_the_split_into_micro_batches_changes_no_gradient(dtype, kind, monkeypatch):
    policy = make_policy(tiny_model().to(dtype), loss={"type": kind, "kl": {"coef": 0.05}}, learning_rate=5e-3)
    samples = ragged_samples()
    before = parameters(policy)
    for _ in range(5):
        policy.update(samples)
    moved = relative(parameters(policy), before)
    assert moved > 1000 * TOLERANCE[dtype]
    found = []
    for size in (16, 4, 1):
        splits = [list(range(i, i + size)) for i in range(0, 16, size)]
        monkeypatch.setattr(policy_module, "micro_batches", lambda samples, budget, packed, splits=splits: splits)
        found.append(policy_gradient(policy, samples))
    for other in found[1:]:
        assert relative(other, found[0]) < TOLERANCE[dtype]
    # the check can fail: one micro-batch left out is far outside
    monkeypatch.setattr(policy_module, "micro_batches", lambda samples, budget, packed: [[i] for i in range(15)])
    assert relative(policy_gradient(policy, samples), found[0]) > 1000 * TOLERANCE[dtype]


def test_old_logprobs_give_the_clipped_gradient():
    model = tiny_model()
    policy = make_policy(copy.deepcopy(model), temperature=1.0)
    samples = ragged_samples()
    rng = np.random.default_rng(0)
    old = [lp + rng.normal(0, 0.5, len(lp)).astype(np.float32) for lp in scored(policy, samples)]
    normaliser = loss_normaliser(policy.loss, [len(s.completion_ids) for s in samples], policy.max_tokens)
    metrics = policy.backward(samples, normaliser, old)
    losses = []
    for s, before in zip(samples, old, strict=True):
        ids = torch.tensor(np.concatenate([s.prompt_ids, s.completion_ids]), dtype=torch.int64)
        table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for place in range(len(before)):
            at = len(s.prompt_ids) + place
            ratio = (table[at - 1, ids[at]] - float(before[place])).exp()
            loss = torch.max(-s.advantage * ratio, -s.advantage * ratio.clamp(0.8, 1.2))
            if s.advantage < 0:
                loss = torch.clamp(loss, max=-3.0 * s.advantage)
            losses.append(loss)
    torch.stack(losses).mean().backward()
    assert relative(gradient(policy.parallel.module), gradient(model)) < 1e-5
    assert metrics["clipped_high"] > 0
    assert metrics["ratio"] != pytest.approx(1.0)


def test_without_old_logprobs_every_ratio_is_exactly_1():
    metrics = make_policy().update(ragged_samples())
    assert metrics["ratio"] == metrics["ratio_max"] == 1.0
    assert metrics["clipped_high"] == metrics["clipped_low"] == 0.0


def test_one_update_is_one_adamw_step_with_the_clipped_gradient():
    model = tiny_model()
    policy = make_policy(copy.deepcopy(model), max_grad_norm=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    samples = ragged_samples()
    norm = policy.update(samples)["grad_norm"]
    plain_loss(model, samples, "dapo", 0.8).backward()
    assert norm == pytest.approx(float(gradient(model).norm()), rel=1e-5)  # before clipping
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9)).step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((parameters(policy) - expected).abs().max()) < 2e-6


# --- what is left out -------------------------------------------------------------------------------------------------


def test_samples_with_advantage_0_are_not_computed_and_stay_in_the_normaliser():
    samples = ragged_samples(8)
    zeroed = [replace(s, advantage=0.0) if i % 2 else s for i, s in enumerate(samples)]
    model = tiny_model()
    policy = make_policy(copy.deepcopy(model), max_grad_norm=0)
    metrics = policy.update(zeroed)
    assert metrics["skipped"] == 4
    assert metrics["loss_tokens"] == sum(len(s.completion_ids) for s in samples)
    assert metrics["computed_tokens"] == sum(len(s.prompt_ids) + len(s.completion_ids) for s in zeroed[::2])
    plain_loss(model, zeroed, "dapo", 0.8).backward()
    assert metrics["grad_norm"] == pytest.approx(float(gradient(model).norm()), rel=1e-5)


def test_with_a_kl_term_samples_with_advantage_0_are_computed():
    samples = [replace(s, advantage=0.0) for s in ragged_samples(8)]
    policy = make_policy(tiny_model(seed=1), loss={"kl": {"coef": 0.1}})
    policy.parallel.module.load_state_dict(tiny_model().state_dict())
    metrics = policy.update(samples)
    assert metrics["skipped"] == 0
    assert metrics["kl"] > 0
    assert metrics["updated"] == 1


def test_what_is_not_in_the_loss_is_not_in_its_normaliser_either():
    samples = ragged_samples(8)
    masked = [replace(s, in_loss=i < 5) for i, s in enumerate(samples)]
    first, second = make_policy(), make_policy()
    a, b = first.update(masked), second.update(samples[:5])
    assert torch.equal(parameters(first), parameters(second))
    assert a["loss"] == b["loss"]
    assert (a["in_loss"], a["samples"]) == (5, 8)


@pytest.mark.parametrize("changes", [{"in_loss": False}, {"advantage": 0.0}])
def test_a_batch_without_any_gradient_moves_nothing_and_gives_no_nan(changes):
    policy = make_policy(weight_decay=0.1)
    policy.update(ragged_samples())  # momentum that could move the weights
    before, state = parameters(policy), copy.deepcopy(policy.training_state()["optimizer"]["state"])
    metrics = policy.update([replace(s, **changes) for s in ragged_samples()])
    assert torch.equal(parameters(policy), before)
    assert all(
        torch.equal(state[i]["exp_avg"], s["exp_avg"])
        for i, s in policy.parallel.optimizer.state_dict()["state"].items()
    )
    assert metrics["updated"] == 0
    assert all(math.isfinite(v) for v in metrics.values())
    assert policy.steps == 2  # the schedule follows the training step
    assert policy.update([])["updated"] == 0


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_loss_that_is_not_finite_leaves_weights_and_optimizer_alone_and_is_counted(max_grad_norm):
    policy = make_policy(max_grad_norm=max_grad_norm)
    policy.update(ragged_samples())
    before = parameters(policy)
    state = copy.deepcopy(policy.training_state()["optimizer"]["state"])
    samples = ragged_samples()
    samples[3] = replace(samples[3], advantage=math.inf)
    metrics = policy.update(samples)
    assert (metrics["nonfinite"], metrics["updated"]) == (1, 0)
    assert torch.equal(parameters(policy), before)
    for i, s in policy.parallel.optimizer.state_dict()["state"].items():
        assert all(torch.equal(s[name], state[i][name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    good = policy.update(ragged_samples())
    assert (good["nonfinite"], good["updated"]) == (0, 1)


def test_a_gradient_that_is_not_finite_is_caught_where_the_loss_is_finite():
    policy = make_policy()
    weight = policy.parallel.module.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda grad: grad * math.nan)
    before = parameters(policy)
    metrics = policy.update(ragged_samples())
    assert math.isfinite(metrics["loss"])
    assert metrics["nonfinite"] == 1
    assert torch.equal(parameters(policy), before)


# --- scoring ----------------------------------------------------------------------------------------------------------


def test_scores_come_in_the_samples_order_whatever_the_micro_batches():
    policy, samples = make_policy(micro_batch_tokens=60), ragged_samples()
    together = scored(policy, samples)
    for sample, found in zip(samples, together, strict=True):
        assert found.dtype == np.float32
        assert found.shape == sample.completion_ids.shape
        assert np.abs(found - scored(policy, [sample])[0]).max() < 1e-5
    assert scored(policy, []) == []


def test_scores_are_those_of_the_current_weights_at_the_rollouts_temperature():
    model = tiny_model()
    policy, samples = make_policy(copy.deepcopy(model), temperature=1.7), ragged_samples(3)
    before = scored(policy, samples)
    sample = samples[0]
    ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.completion_ids]), dtype=torch.int64)
    with torch.no_grad():
        table = (model(input_ids=ids[None]).logits[0] / 1.7).log_softmax(-1)
    at = torch.arange(len(sample.prompt_ids), len(ids))
    assert np.abs(before[0] - table[at - 1, ids[at]].numpy()).max() < 1e-5
    policy.update(samples)
    assert not np.array_equal(scored(policy, samples)[0], before[0])


def test_a_good_sample_becomes_likelier_and_a_bad_one_less_likely():
    rng = np.random.default_rng(0)
    good, bad = make_sample(rng, completion=6, advantage=1.0), make_sample(rng, completion=6, advantage=-1.0)
    policy = make_policy()
    before = scored(policy, [good, bad])
    for _ in range(3):
        policy.update([good, bad])
    after = scored(policy, [good, bad])
    assert after[0].sum() > before[0].sum() + 0.1
    assert after[1].sum() < before[1].sum() - 0.1


def test_a_model_trained_with_dropout_scores_and_updates_without_it():
    policy = make_policy(tiny_model(attention_dropout=0.5), gradient_checkpointing=True)
    samples = ragged_samples()
    assert all(np.array_equal(a, b) for a, b in zip(scored(policy, samples), scored(policy, samples), strict=True))
    assert policy.update(samples)["ratio_max"] == 1.0
    assert policy.parallel.module.config.attention_dropout == 0.5  # the model's own setting is not rewritten
    plain = make_policy(tiny_model(attention_dropout=0.0))
    assert torch.allclose(
        policy_gradient(make_policy(tiny_model(attention_dropout=0.5)), samples), policy_gradient(plain, samples)
    )


def test_ids_outside_the_vocabulary_are_refused_with_the_agents_name():
    policy = make_policy()
    other = make_sample(vocabulary=40)
    for ids in (np.array([40], np.int32), np.array([-1], np.int32)):
        with pytest.raises(ValueError, match=r"'ada'.*another tokenizer"):
            scored(policy, [replace(other, prompt_ids=ids)])
    with pytest.raises(ValueError, match="'bob'"):
        scored(policy, [make_sample(agent="bob")])


def test_the_gap_between_sampler_and_trainer_is_measured_as_it_is():
    policy, samples = make_policy(), ragged_samples()
    exact = [replace(s, logprobs=lp) for s, lp in zip(samples, scored(policy, samples), strict=True)]
    assert policy.update(exact)["sampler_gap_max"] < 1e-5
    policy = make_policy()
    off = [replace(s, logprobs=s.logprobs - 0.5) for s in exact]
    assert policy.update(off)["sampler_gap"] == pytest.approx(0.5, abs=1e-5)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_schedules_in_closed_form():
    warm = [learning_rate_factor("constant", step, 4, 10) for step in range(6)]
    assert warm == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = [learning_rate_factor("linear", step, 2, 12) for step in range(2, 12)]
    assert linear == pytest.approx([1 - i / 10 for i in range(10)])
    cosine = [learning_rate_factor("cosine", step, 0, 10) for step in range(11)]
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 10)) for i in range(11)])
    assert [learning_rate_factor("linear", step, 3, 3) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_schedule_and_warm_up_reach_the_optimizer(schedule):
    policy = make_policy(schedule=schedule, warmup_steps=2)
    rates = [policy.update(ragged_samples(2))["lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-3 * learning_rate_factor(schedule, i, 2, 10) for i in range(4)])
    assert policy.parallel.optimizer.param_groups[0]["lr"] == rates[-1]


def test_an_agents_own_learning_rate_wins():
    training = TrainingConfig(steps=1, learning_rate=1e-3)
    policy = Policy("ada", tiny_model(), training, LossConfig(), 1.0, 0, 1, learning_rate=5e-4)
    assert policy.update(ragged_samples(2))["lr"] == 5e-4


def test_max_grad_norm_0_is_off():
    samples = [replace(s, advantage=s.advantage * 100) for s in ragged_samples()]
    sgd = {"learning_rate": 1e-3}
    moved = {}
    for limit in (0.0, 0.5):
        policy = make_policy(max_grad_norm=limit, **sgd)
        assert policy.update(samples)["grad_norm"] > 10
        moved[limit] = policy.parallel.optimizer.state_dict()["state"][0]["exp_avg"].norm()
    assert float(moved[0.0]) > 20 * float(moved[0.5])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("weight_decay", 0.5), ("betas", (0.1, 0.2)), ("learning_rate", 2e-3), ("max_grad_norm", 0.01)],
)
def test_each_optimizer_setting_changes_the_result(setting, value):
    plain, other = make_policy(), make_policy(**{setting: value})
    for policy in (plain, other):
        for scale in (1, 3):  # AdamW's first step does not see the gradient's size
            policy.update([replace(s, advantage=s.advantage * scale) for s in ragged_samples(seed=scale)])
    assert not torch.equal(parameters(plain), parameters(other))


def test_gradient_checkpointing_recomputes_and_changes_no_gradient():
    samples = ragged_samples()
    plain, saving = make_policy(), make_policy(gradient_checkpointing=True)
    calls = {"plain": 0, "saving": 0}
    for name, policy in (("plain", plain), ("saving", saving)):

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        policy.parallel.module.model.layers[0].mlp.register_forward_pre_hook(count)
    assert torch.equal(policy_gradient(plain, samples), policy_gradient(saving, samples))
    assert calls["saving"] == 2 * calls["plain"] > 0


def test_bfloat16_computes_narrow_and_keeps_float32_master_weights():
    samples = ragged_samples()
    policy = make_policy(tiny_model().to(torch.bfloat16), precision="bfloat16")
    assert {p.dtype for p in policy.parallel.module.parameters()} == {torch.float32}
    exact = make_policy(tiny_model().to(torch.bfloat16))
    gap = max(float(np.abs(a - b).max()) for a, b in zip(scored(policy, samples), scored(exact, samples), strict=True))
    assert 1e-5 < gap < 0.3
    assert policy.update(samples)["ratio_max"] == 1.0
    # a step far below bfloat16's resolution is not lost
    small = make_policy(tiny_model(), precision="bfloat16", learning_rate=1e-6)
    before = parameters(small)
    small.update(samples)
    assert not torch.equal(parameters(small), before)
    assert torch.equal(parameters(small).bfloat16(), before.bfloat16()) or relative(parameters(small), before) < 1e-3


def test_micro_batch_tokens_bounds_every_pass():
    policy = make_policy(micro_batch_tokens=64)
    shapes: list[int] = []
    policy.parallel.module.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    metrics = policy.update(ragged_samples())
    assert max(shapes) <= 64
    assert len(shapes) == metrics["micro_batches"] > 2
    assert metrics["padding"] == pytest.approx(1 - metrics["computed_tokens"] / sum(shapes))


# --- weights and state ------------------------------------------------------------------------------------------------


def test_weights_have_the_names_of_the_state_dict():
    model = tiny_model()
    names = set(model.state_dict())
    policy = make_policy(model)
    weights = dict(policy.weights())
    assert set(weights) == names
    assert not any(t.requires_grad for t in weights.values())
    other = tiny_model(seed=5)
    other.load_state_dict({name: t.clone() for name, t in weights.items()})
    assert scored(make_policy(other), ragged_samples(2))[0].tolist() == scored(policy, ragged_samples(2))[0].tolist()


class Tokenizer:
    """Stands in where only the saving of a tokenizer's own files is asked for."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_saved_model_is_a_plain_folder_that_loads_as_it_is(architecture, tmp_path):
    from transformers import AutoModelForCausalLM

    policy, samples = make_policy(tiny_model(architecture)), ragged_samples()
    policy.update(samples)
    policy.save_model(tmp_path / "m", Tokenizer())
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    for name, tensor in policy.weights():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert scored(make_policy(loaded), samples)[0].tolist() == scored(policy, samples)[0].tolist()


def test_a_model_whose_generation_config_contradicts_itself_can_be_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model()
    model.generation_config.temperature = 0.5  # without do_sample, as some published models have it
    model.generation_config.eos_token_id = 3
    with pytest.raises(ValueError, match="GenerationConfig"):
        model.save_pretrained(tmp_path / "refused")
    make_policy(model).save_model(tmp_path / "m", Tokenizer())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").generation_config.eos_token_id == 3


def test_saving_and_loading_print_nothing(tmp_path, capfd):
    policy = make_policy()
    policy.save_model(tmp_path / "m", Tokenizer())
    policy.load_model(tmp_path / "m")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("coef", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_going_on_from_saved_state_equals_not_stopping_bit_for_bit(coef, schedule, tmp_path):
    batches = [ragged_samples(8, seed) for seed in range(6)]
    settings: dict[str, Any] = {"loss": {"kl": {"coef": coef}}, "schedule": schedule, "warmup_steps": 2}
    whole = make_policy(**settings)
    expected = [whole.update(batch) for batch in batches]
    first = make_policy(**settings)
    for batch in batches[:3]:
        first.update(batch)
    first.save_model(tmp_path / "m", Tokenizer())
    torch.save(first.training_state(), tmp_path / "state.pt")

    second = make_policy(**settings)  # begins at the start model again, which the reference is a copy of
    second.load_model(tmp_path / "m")
    second.load_training_state(torch.load(tmp_path / "state.pt", weights_only=True))
    found = [second.update(batch) for batch in batches[3:]]
    assert found == expected[3:]
    assert torch.equal(parameters(second), parameters(whole))
    if coef:
        assert found[0]["kl"] > 0  # against the start, not against what was loaded


def test_two_policies_in_one_process_are_the_same_as_each_alone():
    samples = ragged_samples()
    alone = make_policy(tiny_model("qwen2"))
    expected = [alone.update(samples) for _ in range(2)]
    a, b = make_policy(tiny_model("qwen2")), make_policy(tiny_model("qwen3"))
    found = []
    for _ in range(2):
        found.append(a.update(samples))
        b.update(samples)
    assert found == expected


def test_a_wide_model_is_not_narrowed():
    policy = make_policy(tiny_model().double())
    assert {p.dtype for p in policy.parallel.module.parameters()} == {torch.float64}
    assert policy.update(ragged_samples())["updated"] == 1
