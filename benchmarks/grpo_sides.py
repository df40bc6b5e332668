"""What `grpo.py` sets side by side: one GRPO step by umad and by TRL's `GRPOTrainer`, on one model, and the losses of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from umad.config import Recipe
from umad.debate.driver import Driver
from umad.learning.losses import loss_normaliser
from umad.learning.modeling import no_bars
from umad.learning.schedule import ProblemSampler
from umad.learning.tiny_tokenizers import build_tokenizer
from umad.learning.trainer import Trainer
from umad.records import Debate, Sample
from umad.runs import build

AGENT = "agent"
NEVER = 1e-9
"""Probability of the end-of-sequence token where every response shall run to the cap."""
PROMPT_ROOM = 256


@dataclass(frozen=True)
class Setting:
    """One comparison: the model's size, what it is trained on, and what each side may choose for itself."""

    hidden: int = 128
    layers: int = 4
    cap: int = 512
    """Most tokens of a response."""
    end_probability: float = NEVER
    prompts: int = 8
    group: int = 8
    loss: str = "dapo"
    beta: float = 0.01
    temperature: float = 1.0
    learning_rate: float = 1e-5
    steps: int = 6
    seed: int = 0
    micro_batch_tokens: int = 4096
    """Ours."""
    trl_rows: int | None = None
    """Rows of TRL's micro-batches; None: all."""
    trl: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of TRL's `GRPOConfig`."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group


# --- what both sides share ----------------------------------------------------------------------------------------------


def digits(debate: Debate, agent: str, turn: int) -> float:
    """Our reward: how many digits a response has."""
    text = next(r.text for r in debate.turns[turn] if r.agent == agent)
    return float(sum(c in "0123456789" for c in text))


def digits_of_all(completions: list[Any], **_: Any) -> list[float]:
    """The same as TRL asks for it."""
    return [float(sum(c in "0123456789" for c in reply[0]["content"])) for reply in completions]


def make_model(folder: Path, setting: Setting) -> Path:
    """A random model whose end-of-sequence token has nearly `end_probability` at every position, saved to `folder`."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    context = setting.cap + PROMPT_ROOM
    tokenizer = build_tokenizer("digits", context)
    end, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=setting.hidden,
        intermediate_size=3 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
    )
    torch.manual_seed(setting.seed)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        # a part that all hidden states have in common, by which the head can give a token a constant logit
        model.model.embed_tokens.weight += 0.1 * torch.randn(setting.hidden)
        states = model.model(torch.randint(0, len(tokenizer), (16, 64))).last_hidden_state.flatten(0, 1)
        common = states.mean(0)
        direction = common / common.dot(common)
        # TRL takes a response that ends in padding for one that has ended: nobody shall sample it
        model.lm_head.weight[pad] = math.log(NEVER) * direction
        logits = states @ model.lm_head.weight.t()
        logits[:, end] = -math.inf
        rest, odds = float(logits.logsumexp(-1).mean()), setting.end_probability / (1 - setting.end_probability)
        model.lm_head.weight[end] = (math.log(odds) + rest) * direction
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    with no_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# --- our side -----------------------------------------------------------------------------------------------------------


def recipe_for(model: Path, setting: Setting) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "grpo",
            "seed": setting.seed,
            "agents": [{"name": AGENT, "model": str(model)}],
            "debate": {"protocol": "single"},
            "sampling": {"max_tokens": setting.cap, "temperature": setting.temperature},
            "reward": {"correctness": 0.0, "functions": [{"function": f"{__name__}:{digits.__name__}"}]},
            "advantage": {"weight": {"mode": "none"}},
            "loss": {"type": setting.loss, "dual_clip": None, "kl": {"coef": setting.beta}},
            "training": {
                "steps": setting.steps,
                "problems_per_step": setting.prompts,
                "group_size": setting.group,
                "learning_rate": setting.learning_rate,
                "micro_batch_tokens": setting.micro_batch_tokens,
                "attention": "sdpa",
            },
            "engine": {"max_batch": setting.rows},
            "data": {"train": {"name": "arithmetic", "limit": setting.prompts, "seed": setting.seed}},
        }
    )


@contextmanager
def our_trainer(model: Path, setting: Setting) -> Iterator[Trainer]:
    """A trainer as `umad train` builds it, without the run folder."""
    recipe = recipe_for(model, setting)
    problems = build.problems_of(recipe, "train")
    loaded = build.load_agents(recipe)
    agents = build.agents_of(recipe, loaded, own_copy=True)
    with build.grader_of(recipe) as grader:
        driver = Driver(agents, build.prompts_of(recipe, agents), grader)
        policies = build.policies_for(recipe, loaded, driver, setting.steps, build.WORLD)
        sampler = ProblemSampler(problems, recipe.seed)
        trainer = Trainer(recipe, driver, build.protocol_of(recipe), policies, sampler)
        trainer.push(0)
        yield trainer


def encoded(trainer: Trainer) -> Iterator[tuple[Any, Any]]:
    """The problems with their prompts' token ids."""
    agent, first = trainer.driver.agents[0], trainer.driver.prompts.first
    for problem in trainer.sampler.problems:
        yield problem, agent.encode(first(problem))


# --- TRL's side ---------------------------------------------------------------------------------------------------------


def trl_trainer(trainer: Trainer, model: Path, setting: Setting, folder: Path) -> Any:
    """TRL's trainer for the same steps; `trainer`, ours, gives the prompts. What is chosen, and why: docs/performance.md."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.set_verbosity_error()
    first = trainer.driver.prompts.first
    rows = setting.trl_rows or setting.rows
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        seed=setting.seed,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=setting.rows // rows,
        num_generations=setting.group,
        max_completion_length=setting.cap,
        temperature=setting.temperature,
        beta=setting.beta,
        use_bias_correction_kl=False,  # k3 as it is, as ours
        loss_type=setting.loss,
        epsilon=0.2,
        num_iterations=1,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=setting.steps,
        gradient_checkpointing=False,
        disable_dropout=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **setting.trl,
    )
    with no_bars():
        trl = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=digits_of_all,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": first(problem)} for problem in trainer.sampler.problems]),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
    trl.remove_callback(PrinterCallback)
    return trl


# --- equal losses -------------------------------------------------------------------------------------------------------

Gradients = dict[str, torch.Tensor]


def our_loss(trainer: Trainer, samples: Sequence[Sample]) -> tuple[dict[str, float], Gradients]:
    """Metrics (`loss` among them) and gradients of all samples at the policy's current weights, which stay as they are.
    Ratios are against the sampler's log-probabilities."""
    policy = trainer.policies[AGENT]
    normaliser = loss_normaliser(policy.loss, [len(s.completion_ids) for s in samples], policy.max_tokens)
    metrics = policy.backward(samples, normaliser, [s.logprobs for s in samples])
    return metrics, _gradients(policy.parallel.module)


def trl_loss(trainer: Trainer, trl: Any, samples: Sequence[Sample]) -> tuple[float, Gradients]:
    """The same by TRL, at our weights: it is handed the completions as if its own sampler had drawn them, and makes rewards,
    advantages, the reference's log-probabilities and the loss of them. Samples must be whole groups, one after the other."""
    prompts = {ids.tobytes(): trainer.driver.prompts.first(problem) for problem, ids in encoded(trainer)}

    def recorded(prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        if [list(ids) for ids in prompt_ids] != [s.prompt_ids.tolist() for s in samples]:
            raise RuntimeError("the two sides do not encode the prompts alike")
        return [s.completion_ids.tolist() for s in samples], None

    trl.model.load_state_dict(trainer.policies[AGENT].parallel.module.state_dict())
    trl.model.train()
    trl.current_gradient_accumulation_steps = trl.args.steps_per_generation = 1  # all rows in one batch
    sampler, trl._generate_single_turn = trl._generate_single_turn, recorded
    try:
        inputs = trl._generate_and_score_completions([{"prompt": prompts[s.prompt_ids.tobytes()]} for s in samples])
    finally:
        trl._generate_single_turn = sampler
    old = [torch.from_numpy(s.logprobs) for s in samples]
    inputs["old_per_token_logps"] = torch.nn.utils.rnn.pad_sequence(old, batch_first=True)
    loss = trl.compute_loss(trl.model, inputs)
    loss.backward()
    return float(loss.detach()), _gradients(trl.model)


def _gradients(module: torch.nn.Module) -> Gradients:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def relative_difference(ours: Gradients, theirs: Gradients) -> float:
    """Norm of the difference of all gradients over the norm of TRL's."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of different parameters: {sorted(ours.keys() ^ theirs.keys())}")
    difference = math.fsum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    return math.sqrt(difference / math.fsum(float(g.double().square().sum()) for g in theirs.values()))


def move(model: torch.nn.Module, size: float) -> None:
    """Adds noise of `size` times its own root mean square to every parameter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=float(size * parameter.square().mean().sqrt()))


def compare_losses(trainer: Trainer, trl: Any, step: int) -> dict[str, float]:
    """Both sides' loss of what our engine samples now, at weights that are moved in between: so ratios are not 1 (`clipped`:
    the share of tokens whose gradient the clip takes away), and the KL term is not 0."""
    samples = trainer.samples(trainer.draw(step, [AGENT]), AGENT).samples
    move(trainer.policies[AGENT].parallel.module, 0.3)
    metrics, gradients = our_loss(trainer, samples)
    loss, others = trl_loss(trainer, trl, samples)
    return {
        "our_loss": metrics["loss"],
        "trl_loss": loss,
        "loss_difference": abs(metrics["loss"] - loss),
        "gradient_difference": relative_difference(gradients, others),
        "kl": metrics["kl"],
        "clipped": metrics["clipped_high"] + metrics["clipped_low"],
    }
