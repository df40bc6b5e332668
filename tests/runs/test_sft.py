"""Supervised fine-tuning: what is imitated, to the token, and whole runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import tiny_folder

pytest.importorskip("trl", reason="umad sft needs trl: pip install 'umad[trl]'")

from umad.cli import main
from umad.config import Recipe
from umad.debate.agents import Agent
from umad.debate.prompts import Prompts
from umad.debate.recorded import read_rollouts
from umad.engines import models
from umad.grading import Grader
from umad.learning.checkpoint import latest_checkpoint, missing_parts
from umad.records import UserError, read_debates
from umad.runs import build, sft
from umad.runs.sft_rows import Candidate, Example, Source, Tally, end_of_turn, examples_for, read_source
from umad.tasks.arithmetic import solution

RECIPE = """
name: warm
agents:
  - {{name: a, model: {root}/qwen2}}
  - {{name: b, model: {root}/qwen3}}
debate: {{style: compact}}
sampling: {{max_tokens: 40}}
sft: {{data: {{path: {root}/solved.jsonl}}, steps: 3, batch_size: 6, learning_rate: 5.0e-3}}
"""
SOLVED = [
    {
        "id": f"p{i}",
        "problem": f"{i}+{i}=?",
        "answer": str(2 * i),
        "solution": f"so {i}+{i}={2 * i}\n\\boxed{{{2 * i}}}",
    }
    for i in range(6)
]


def umad(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sft")
    tiny_folder(root / "qwen2", "qwen2")
    tiny_folder(root / "qwen3", "qwen3", seed=1)
    write(root / "solved.jsonl", SOLVED)
    (root / "warm.yaml").write_text(RECIPE.format(root=root))
    return root


@pytest.fixture(scope="module")
def recorded(root: Path) -> Path:
    """A run whose agents say what a script says; with models, so that token ids are recorded too."""
    replies = [
        {"agent": "a", "turn": 0, "rollout": 0, "text": "easy:\\boxed{4}"},
        {"agent": "a", "turn": 1, "text": "so\\boxed{4}"},
        {"agent": "a", "text": "hm\\boxed{9}"},
        {"agent": "b", "turn": 0, "text": "Isay\\boxed{4}"},
        {"agent": "b", "text": "no\\boxed{2}"},
    ]
    write(root / "replies.jsonl", replies)
    write(root / "two.jsonl", [{"id": "four", "problem": "2+2=?", "answer": "4"}])
    (root / "record.yaml").write_text(
        RECIPE.format(root=root).partition("sft:")[0]
        + f"engine: {{backend: scripted, script: {root}/replies.jsonl}}\n"
        + "training: {steps: 1, problems_per_step: 1, group_size: 3}\n"
        + f"data: {{train: {{path: {root}/two.jsonl}}}}\n"
    )
    run = root / "recorded"
    assert umad("train", root / "record.yaml", f"output={run}") == 0
    return run


def recipe_of(root: Path, **changes: Any) -> Recipe:
    settings = {"epochs": 1, **changes}
    return Recipe.model_validate(
        {
            "name": "warm",
            "agents": [{"name": "a", "model": str(root / "qwen2")}, {"name": "b", "model": str(root / "qwen3")}],
            "debate": {"style": "compact"},
            "sft": settings,
        }
    )


def agent_of(root: Path, name: str = "a", kind: str = "qwen2") -> Agent:
    return Agent(name, None, models.load_tokenizer(str(root / kind)))  # type: ignore[arg-type]


def examples(root: Path, name: str = "a", kind: str = "qwen2", **changes: Any) -> tuple[list[Example], Any, Agent]:
    recipe = recipe_of(root, **changes)
    agent = agent_of(root, name, kind)
    with Grader(workers=1) as grader:
        source = read_source(recipe, grader)
    found, tally = examples_for(recipe, agent, Prompts("compact"), source, [agent.tokenizer.eos_token_id], 256)
    return found, tally, agent


def tight(text: str) -> str:
    """Without white space: the tiny tokenizer's loader drops it."""
    return "".join(text.split())


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# --- rows -------------------------------------------------------------------------------------------------------------


def test_only_the_completion_and_its_end_are_learned(root: Path) -> None:
    found, _, agent = examples(root, data={"path": str(root / "solved.jsonl")})
    tokenizer = agent.tokenizer
    for example, row in zip(found, SOLVED, strict=True):
        made = example.row()
        prompt = tokenizer.apply_chat_template(
            Prompts("compact").first(build.Problem(row["id"], row["problem"], row["answer"])),
            add_generation_prompt=True,
            return_dict=False,
        )
        n = len(prompt)
        assert made["input_ids"][:n] == prompt
        assert made["labels"][:n] == [-100] * n
        assert made["labels"][n:] == made["input_ids"][n:]
        assert tokenizer.decode(made["labels"][n:-1]) == tight(row["solution"])
        ends = [label for label in made["labels"] if label == tokenizer.eos_token_id]
        assert ends == made["labels"][-1:], "the end of the turn is learned, once"


def test_a_tokenizer_that_adds_a_bos_adds_none_here(root: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    agent = agent_of(root)
    start = agent.tokenizer.convert_tokens_to_ids("<pad>")
    agent.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", pair=None, special_tokens=[("<pad>", start)]
    )
    assert agent.tokenizer.encode("1")[0] == start
    recipe = recipe_of(root, data={"path": str(root / "solved.jsonl")})
    with Grader(workers=1) as grader:
        found, _ = examples_for(recipe, agent, Prompts("compact"), read_source(recipe, grader), [0], 256)
    assert all(start not in example.row()["input_ids"] for example in found)


def test_the_turn_ends_as_the_template_ends_it(root: Path) -> None:
    tokenizer = agent_of(root).tokenizer
    pad = tokenizer.convert_tokens_to_ids("<pad>")
    assert end_of_turn(tokenizer, [0, pad]) == 0
    tokenizer.chat_template = tokenizer.chat_template.replace("<e>", "<pad>")
    assert end_of_turn(tokenizer, [0, pad]) == pad
    assert end_of_turn(tokenizer, [0]) == 0, "what does not stop generation cannot end a turn"


def test_worked_solutions_of_every_form_end_in_the_boxed_gold(root: Path, tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "48/2 = <<48/2=24>>24 clips\n#### 1,024"},
        {"problem": "b", "solution": "thus x = \\boxed{7} holds"},
        {"problem": "c", "answer": "3", "solution": "one and two make three"},
        {"problem": "d", "answer": "3", "solution": "thus \\boxed{4}"},
        {"problem": "e", "answer": "3", "solution": "The answer is 5."},
        {"problem": "f", "answer": "3"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    found, tally, agent = examples(root, data={"path": str(path)})
    texts = [agent.decode(example.completion_ids) for example in found]
    assert texts == [
        "48/2=24clips" + tight("The final answer is \\boxed{1,024}."),
        "thusx=\\boxed{7}holds",
        "oneandtwomakethree" + tight("The final answer is \\boxed{3}."),
    ]
    assert tally.read == 6
    assert tally.left_out == {"whose answer is not the gold": 2, "without a solution": 1}


def test_a_field_that_is_named_is_the_one_that_is_read(root: Path, tmp_path: Path) -> None:
    row = {"problem": "1+1", "answer": "2", "solution": "no", "worked": "yes \\boxed{2}"}
    path = write(tmp_path / "rows.jsonl", [row])
    found, _, agent = examples(root, data={"path": str(path), "solution_field": "worked"})
    assert [agent.decode(e.completion_ids) for e in found] == ["yes\\boxed{2}"]


def test_arithmetic_brings_its_own_solutions(root: Path) -> None:
    found, tally, agent = examples(root, data={"name": "arithmetic", "limit": 4})
    assert len(found) == tally.read == 4
    for example in found:
        assert tight(agent.decode(example.completion_ids)) == tight(solution(example.problem_id.rpartition("/")[2]))


def test_right_responses_are_learned_as_they_were_sampled(root: Path, recorded: Path) -> None:
    found, tally, agent = examples(root, debates=str(recorded))
    rows = read_rollouts(recorded / "rollouts/step_000001.parquet")
    own = [r for r in rows if r["agent"] == "a"]
    # of equal texts the first is kept
    by_text = {(r["turn"], agent.decode(r["completion_ids"])): r for r in reversed(own)}
    assert [(e.turn, agent.decode(e.completion_ids)) for e in found] == [(0, "easy:\\boxed{4}"), (1, "so\\boxed{4}")]
    for example in found:
        row = by_text[example.turn, agent.decode(example.completion_ids)]
        assert example.prompt_ids.tolist() == row["prompt_ids"]
        assert example.completion_ids.tolist() == row["completion_ids"]
        assert example.completion_ids[-1] == agent.tokenizer.eos_token_id
    # 3 rollouts of 2 agents and 2 turns; the script lets b be right at its first turn
    assert tally.read == 12
    assert tally.left_out == {"wrong": 5, "of other agents": 3, "with a text that was there before": 2}


def test_ids_that_encoding_would_not_give_are_kept_and_those_of_another_tokenizer_are_not(root: Path) -> None:
    agent = agent_of(root)
    problem = build.Problem("p", "1+1=?", "2")
    messages = [{"role": "user", "content": "1+1=?"}]
    asked = agent.encode(messages)
    assert asked is not None
    plain = agent.tokenizer.encode("ab\\boxed{2}", add_special_tokens=False)
    odd = [plain[0], agent.tokenizer.unk_token_id, *plain[1:], 0]  # reads the same
    recipe = recipe_of(root, debates="x")

    def completion(prompt_ids: list[int]) -> list[int]:
        said = Candidate(problem, 0, "a", "ab\\boxed{2}", messages, prompt_ids=prompt_ids, token_ids=odd)
        source = Source([said], Tally(1), ("a",), "here", "responses")
        found, _ = examples_for(recipe, agent, Prompts("compact"), source, [0], 256)
        assert found[0].prompt_ids.tolist() == asked.tolist()
        return [int(i) for i in found[0].completion_ids]

    assert completion(asked.tolist()) == odd
    assert completion([1, *asked.tolist()]) == [*plain, 0]


def test_everybodys_responses_are_read_by_another_tokenizer(root: Path, recorded: Path) -> None:
    found, tally, agent = examples(root, "b", "qwen3", debates=str(recorded), responses="all")
    said = [(e.speaker, e.turn, agent.decode(e.completion_ids)) for e in found]
    assert sorted(said) == [("a", 0, "easy:\\boxed{4}"), ("a", 1, "so\\boxed{4}"), ("b", 0, "Isay\\boxed{4}")]
    assert "2+2" in agent.tokenizer.decode(found[0].prompt_ids)
    assert tally.left_out["wrong"] == 5


def test_turns_and_number_per_problem_choose(root: Path, recorded: Path) -> None:
    first, tally, _ = examples(root, debates=str(recorded), responses="all", turns=[0])
    assert {e.turn for e in first} == {0}
    assert tally.left_out["of other turns"] == 6
    both = [e.speaker for e in first]
    assert len(both) == 2
    one, tally, _ = examples(root, debates=str(recorded), responses="all", turns=[0], per_problem=1)
    assert len(one) == 1
    assert one[0].speaker in both
    assert tally.left_out["beyond sft.per_problem"] == 1


def debate_row(**changes: Any) -> dict[str, Any]:
    def said(agent: str, text: str, **more: Any) -> dict[str, Any]:
        return {"agent": agent, "text": text, **more}

    saw = [[0, "a"], [0, "b"]]
    turns = [
        [said("a", "yes \\boxed{4}"), said("b", "no \\boxed{5}")],
        [said("a", "still \\boxed{4}", saw=saw), said("b", "oh \\boxed{4}", saw=saw)],
    ]
    return {"problem_id": "p", "question": "2+2=?", "gold": "4", "agents": ["a", "b"], "turns": turns, **changes}


def test_debates_of_other_tools_are_graded_and_their_prompts_made_again(root: Path, tmp_path: Path) -> None:
    """Rows without verdicts and without recorded prompts: what was shown follows from `saw`, answers masked."""
    path = write(tmp_path / "debates.jsonl", [debate_row()])
    found, tally, agent = examples(root, "b", "qwen3", debates=str(tmp_path))
    assert [e.turn for e in found] == [1]
    assert tally.left_out == {"wrong": 1, "of other agents": 2}
    prompt = agent.tokenizer.decode(found[0].prompt_ids)
    debate = read_debates(path)[0]
    prompts = Prompts("compact")
    shown = prompts.shown(debate.turns[0], debate.agents)
    assert prompt == agent.tokenizer.decode(agent.encode(prompts.debate(debate.problem, shown, 1)))
    assert "yes\\boxed{?}" in tight(prompt)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gold": None}, "4 ungraded"),
        ({"question": None}, "3 without the question"),
        ({"gold": "77"}, "4 wrong"),
    ],
)
def test_nothing_usable_says_why(root: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    row = debate_row(**changes)
    for turn in row["turns"]:
        for response in turn:
            response.pop("saw", None)
    path = write(tmp_path / "debates.jsonl", [row])
    with pytest.raises(UserError, match=f"4 responses read, 0 used; left out: .*{reason}"):
        examples(root, debates=str(path))


def test_rows_that_are_too_long_or_hold_control_tokens_are_left_out(root: Path, tmp_path: Path) -> None:
    rows = [
        {"problem": "1+1", "answer": "2", "solution": "\\boxed{2}"},
        {"problem": "1+2", "answer": "3", "solution": "x" * 90 + "\\boxed{3}"},
        {"problem": "1+3", "answer": "4", "solution": "a <pad> b \\boxed{4}"},
        {"problem": "9" * 300 + "+0", "answer": "5", "solution": "\\boxed{5}"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    found, tally, _ = examples(root, data={"path": str(path)}, max_tokens=100)
    assert [e.problem_id for e in found] == ["rows/0"]
    assert tally.left_out == {"longer than 100 tokens": 2, "that hold control tokens": 1}
    with pytest.raises(UserError, match="3 longer than 12 tokens"):
        examples(root, data={"path": str(path)}, max_tokens=12)


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sft=null", "sft: is missing"),
        ("sft.debates=nowhere", "either data"),
        ("sft.epochs=2", "either steps or epochs"),
        ("sft.turns=[0]", "turns chooses among recorded debates"),
        ("sft.data.path=nowhere.jsonl", "sft.data.path: nowhere.jsonl does not exist"),
        ("sft.lr=1", "did you mean 'learning_rate'"),
        ("debate.protocol=none", "none"),
    ],
)
def test_bad_recipes_are_refused_before_anything_is_loaded(
    root: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    assert umad("sft", root / "warm.yaml", change, "--dry-run") == 2
    assert message in capsys.readouterr().err


def test_debates_of_unknown_agents_are_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "d.jsonl", [debate_row()])
    change = ["sft.data=null", f"sft.debates={path}", "agents.0.name=zoe", f"output={tmp_path}/run"]
    assert umad("sft", root / "warm.yaml", *change) == 2
    assert "'zoe' does not speak there, only a, b" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert umad("sft", root / "warm.yaml", "sft.data=null", f"sft.debates={tmp_path}/none") == 2
    assert "does not exist" in capsys.readouterr().err


def test_without_trl_the_message_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft.importlib.util, "find_spec", lambda name: None if name == "trl" else object())
    with pytest.raises(UserError, match=r"pip install 'umad\[trl\]'"):
        sft.check(recipe_of(root, data={"path": str(root / "solved.jsonl")}))


def test_deepspeed_is_refused_with_a_way_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"does not run under DeepSpeed.*ddp\.yaml"):
        sft.check(recipe_of(root, data={"path": str(root / "solved.jsonl")}))


# --- whole runs -------------------------------------------------------------------------------------------------------


def mean_loss(folder: Path, found: list[Example]) -> float:
    """By plain cross entropy, a sequence at a time: over completion tokens only."""
    model = models.load_model(str(folder))
    total, count = 0.0, 0
    for example in found:
        prompt, completion = (
            torch.from_numpy(np.array(ids)).long() for ids in (example.prompt_ids, example.completion_ids)
        )
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, completion, reduction="sum"))
        count += len(completion)
    return total / count


def test_a_run_learns_and_reinforcement_learning_starts_from_it(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "warm"
    before = weights(root / "qwen2")
    assert umad("sft", root / "warm.yaml", f"output={run}", "sft.steps=12") == 0
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 25))
    found, _, _ = examples(root, data={"path": str(root / "solved.jsonl")})
    assert rows[0]["agent/a/loss"] == pytest.approx(mean_loss(root / "qwen2", found), abs=1e-5)
    assert rows[11]["agent/a/loss"] < rows[0]["agent/a/loss"] - 0.5
    assert rows[23]["agent/b/loss"] < rows[12]["agent/b/loss"] - 0.5
    assert rows[0]["agent/a/lr"] == 5e-3
    last = run / "checkpoints/step_000024"
    assert latest_checkpoint(run) == last
    assert not missing_parts(run / "checkpoints/step_000012")
    assert mean_loss(last / "a", found) < rows[11]["agent/a/loss"]
    assert any(not torch.equal(tensor, weights(last / "a")[name]) for name, tensor in before.items())
    assert torch.equal(
        weights(run / "checkpoints/step_000012/b")["model.norm.weight"], weights(root / "qwen3")["model.norm.weight"]
    )
    configs = [json.loads((folder / "generation_config.json").read_text()) for folder in (root / "qwen2", last / "a")]
    assert configs[0] == configs[1]
    for name in ("config.yaml", "log.txt", "report.html", "state.json"):
        assert (run / name).is_file()

    held_out = write(
        root / "held_out.jsonl", [{"problem": "7+1=?", "answer": "8"}, {"problem": "8+1=?", "answer": "9"}]
    )
    settings = [f"data.eval.path={held_out}", "evaluation={turns: 2, decomposition: {problems: 0}}"]
    assert umad("eval", run, *settings) == 0
    summary = json.loads((run / "eval/step_000024/summary.json").read_text())
    assert summary["n_problems"] == 2
    assert len(summary["accuracy"]["b"]) == 2
    for step, steps in (("12", "0 (step 12 of the run)"), ("24", "12 (step 24 of the run)")):
        assert umad("export", run, "--agent", "b", "--to", tmp_path / step, "--step", step) == 0
        card = (tmp_path / step / "README.md").read_text()
        assert f"| steps | {steps} |" in card
        assert "TRL's SFTTrainer" in card

    write(root / "two.jsonl", [{"id": "four", "problem": "2+2=?", "answer": "4"}])
    further = tmp_path / "further.yaml"
    further.write_text(
        f"name: further\nagents: [{{name: a, model: {last}/a}}, {{name: b, model: {last}/b}}]\n"
        "debate: {style: compact}\nsampling: {max_tokens: 8}\n"
        "training: {steps: 1, problems_per_step: 1, group_size: 2}\n"
        f"data: {{train: {{path: {root}/two.jsonl}}}}\n"
    )
    assert umad("train", further, "--dry-run") == 0
    assert umad("train", further, f"output={tmp_path}/further") == 0
    assert (tmp_path / "further/checkpoints/step_000001/a/model.safetensors").is_file()


def test_rejection_sampling_makes_right_answers_likelier(root: Path, recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "rejection"
    change = ["sft.data=null", f"sft.debates={recorded}", "sft.steps=8", "sft.batch_size=2", f"output={run}"]
    assert umad("sft", root / "warm.yaml", *change) == 0
    rows = metrics(run)
    for name, first, last in (("a", 0, 7), ("b", 8, 15)):
        assert rows[last][f"agent/{name}/loss"] < rows[first][f"agent/{name}/loss"] - 0.5
    assert "12 responses read, 2 used; left out: 5 wrong" in (run / "log.txt").read_text()


def test_an_adapter_is_trained_alone_and_merged_beside_it(root: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run = tmp_path / "lora"
    change = ["agents.0.adapter={rank: 4, alpha: 8}", "agents.1.trainable=false", "sft.steps=4", f"output={run}"]
    assert umad("sft", root / "warm.yaml", *change) == 0
    rows = metrics(run)
    assert rows[-1]["agent/a/loss"] < rows[0]["agent/a/loss"]
    folder = run / "checkpoints/step_000004/a"
    assert not (folder.parent / "b").exists()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    merged = models.load_model(str(folder))
    base = models.load_model(str(root / "qwen2"))
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()(ids).logits
        assert torch.allclose(merged(ids).logits, adapted, atol=1e-5)
    assert not torch.allclose(plain, adapted, atol=1e-3)


def test_accumulated_micro_batches_give_the_same_step(root: Path, tmp_path: Path) -> None:
    training = "training={steps: 1, micro_batch_tokens: 1}"
    data = f"data.train.path={root}/solved.jsonl"
    whole = ["sft.steps=2", "agents.1.trainable=false"]
    assert umad("sft", root / "warm.yaml", *whole, f"output={tmp_path}/whole") == 0
    assert umad("sft", root / "warm.yaml", *whole, training, data, f"output={tmp_path}/parts") == 0
    rows = [metrics(tmp_path / name) for name in ("whole", "parts")]
    for key in ("loss", "grad_norm"):
        for one, other in zip(*rows, strict=True):
            assert one[f"agent/a/{key}"] == pytest.approx(other[f"agent/a/{key}"], rel=1e-4)


def test_training_settings_hold_here_too(root: Path, tmp_path: Path) -> None:
    training = (
        "training={steps: 1, schedule: linear, warmup_steps: 2, gradient_checkpointing: true, precision: bfloat16}"
    )
    data = f"data.train.path={root}/solved.jsonl"
    assert (
        umad(
            "sft",
            root / "warm.yaml",
            "sft.steps=4",
            "agents.1.trainable=false",
            training,
            data,
            f"output={tmp_path}/run",
        )
        == 0
    )
    rates = [row["agent/a/lr"] for row in metrics(tmp_path / "run")]
    assert rates == pytest.approx([2.5e-3, 5e-3, 5e-3, 2.5e-3])
    assert weights(tmp_path / "run/checkpoints/step_000004/a")["model.norm.weight"].dtype == torch.float32


def test_resuming_goes_on_with_the_next_agent_to_the_same_weights(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert umad("sft", root / "warm.yaml", f"output={whole}", "checkpoints.every=2", "checkpoints.keep=1") == 0
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["step_000006"]
    train = sft._train

    def interrupted(run: Any, stage: Any, config: Any) -> None:
        if stage.name == "b":
            raise KeyboardInterrupt
        train(run, stage, config)

    monkeypatch.setattr(sft, "_train", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["sft", str(root / "warm.yaml"), f"output={parted}"])
    monkeypatch.setattr(sft, "_train", train)
    assert umad("sft", root / "warm.yaml", f"output={parted}") == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err
    assert umad("sft", root / "warm.yaml", f"output={parted}", "sft.learning_rate=1", "--resume") == 2
    assert "sft.learning_rate: 0.005 -> 1" in capsys.readouterr().err
    assert umad("sft", root / "warm.yaml", f"output={parted}", "--resume") == 0
    assert [row["step"] for row in metrics(parted)] == [1, 2, 3, 4, 5, 6]
    for name in ("a", "b"):
        one, other = (weights(run / "checkpoints/step_000006" / name) for run in (whole, parted))
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_loss_that_is_not_finite_ends_the_run_unsaved(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ["sft.learning_rate=1.0e+30", f"output={tmp_path}/run"]
    assert umad("sft", root / "warm.yaml", *change) == 1
    assert "is not finite; nothing of it was saved" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


@pytest.mark.slow
def test_two_processes_make_the_steps_of_one(root: Path, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert umad("sft", root / "warm.yaml", f"output={alone}") == 0
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    done = subprocess.run(
        [*launch, "-m", "umad.cli", "sft", str(root / "warm.yaml"), f"output={both}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for one, two in zip(metrics(alone), metrics(both), strict=True):
        for key in one:
            if key.endswith(("/loss", "/grad_norm", "/tokens")):
                assert two[key] == pytest.approx(one[key], rel=1e-4)
