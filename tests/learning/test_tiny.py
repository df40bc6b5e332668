from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from umad.debate.prompts import Prompts
from umad.engines.models import load_model, load_tokenizer, stop_ids
from umad.learning import tiny
from umad.learning.tiny_lessons import Teacher, collate
from umad.learning.tiny_tokenizers import build_tokenizer
from umad.records import UserError
from umad.tasks import arithmetic

KINDS = ("digits", "numbers")
SHORT = dataclasses.replace(tiny.WARM_START, target=0.0, max_steps=1, check_every=1, batch=4, check_problems=8)


@pytest.fixture
def short(monkeypatch):
    """A warm start of one step, whatever comes of it."""
    monkeypatch.setattr(tiny, "WARM_START", SHORT)


def model_of(spec):
    sizes = tiny.SPECS[spec]
    tokenizer = build_tokenizer(sizes.tokenizer, tiny.CONTEXT)
    return tiny.build_model(sizes, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, 0), tokenizer


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_back_the_text(kind):
    tokenizer = build_tokenizer(kind, 64)
    printable = "".join(map(chr, range(32, 127))) + "\n\n"
    for text in (printable, "7+12=19\n19+5=24\n\\boxed{24}", "[A] 007+120=1234 \\boxed{?} user assistant"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


def test_the_tokenizers_agree_on_nothing():
    digits, numbers = (build_tokenizer(kind, 64) for kind in KINDS)
    text = "7+12=19"
    assert digits.convert_ids_to_tokens(digits.encode(text)) == list(text)
    assert numbers.convert_ids_to_tokens(numbers.encode(text)) == ["7", "+", "12", "=", "19"]
    shared = set(digits.get_vocab()) & set(numbers.get_vocab())
    assert shared
    assert all(digits.get_vocab()[token] != numbers.get_vocab()[token] for token in shared)
    message = [{"role": "user", "content": "1+1=?"}]
    assert digits.apply_chat_template(message, tokenize=False) != numbers.apply_chat_template(message, tokenize=False)


@pytest.mark.parametrize("kind", KINDS)
def test_pad_and_end_are_different_tokens_and_specials_are_one_token_each(kind):
    tokenizer = build_tokenizer(kind, 64)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for token in tokenizer.all_special_tokens:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert len(tokenizer.encode("\\boxed", add_special_tokens=False)) == (1 if kind == "digits" else 6)
    assert len(tokenizer.encode("\\boxed{", add_special_tokens=False)) == (2 if kind == "digits" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_template_takes_every_role_and_opens_the_answer_only_when_asked(kind):
    tokenizer = build_tokenizer(kind, 64)
    messages = [{"role": role, "content": f"<{role} says>"} for role in ("system", "user", "assistant")]
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert all(message["content"] in closed for message in messages)
    assert opened.startswith(closed)
    assert len(opened) > len(closed)


# --- lessons ----------------------------------------------------------------------------------------------------------


def test_a_lesson_is_the_projects_prompt_and_the_right_solution():
    tokenizer = build_tokenizer("digits", 64)
    teacher, rng = Teacher(tokenizer), random.Random(0)
    problem = next(arithmetic.problems(1, "train", 0))
    expression = problem.question.removesuffix("=?")
    prompt, response = teacher.lesson(problem, False, rng)
    expected = tokenizer.apply_chat_template(Prompts("compact").first(problem), add_generation_prompt=True)
    assert prompt == list(expected["input_ids"])
    assert response[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(response[:-1]) == arithmetic.solution(expression)


def test_debate_lessons_show_masked_solutions_of_which_about_half_are_flawed():
    tokenizer = build_tokenizer("numbers", 64)
    teacher, rng = Teacher(tokenizer), random.Random(0)
    right = 0
    for problem, _ in zip(arithmetic.problems(1, "train", 0), range(200), strict=False):
        prompt, response = teacher.lesson(problem, True, rng)
        text = tokenizer.decode(prompt)
        steps = arithmetic.solution(problem.question.removesuffix("=?")).partition("\\boxed")[0]
        assert text.count("\\boxed{?}") == text.count("\\boxed{") == 2
        assert "[A] " in text
        assert "[B] " in text
        right += text.count(steps + "\\boxed")
        assert tokenizer.decode(response).startswith(steps)
    assert 150 < right < 250


def test_collate_marks_response_tokens_only():
    batch = collate([([1, 2], [3]), ([4], [5, 6, 7])])
    assert batch.ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch.target.tolist() == [[False, False, True, False], [False, True, True, True]]


# --- the warm start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", tiny.SPECS)
def test_share_solved_is_the_mean_probability_of_the_response_alone(spec):
    model, tokenizer = model_of(spec)
    teacher, rng = Teacher(tokenizer), random.Random(1)
    whole = [teacher.lesson(p, True, rng) for p, _ in zip(arithmetic.problems(), "abc", strict=False)]
    # the last tokens only: fresh weights give a whole response a probability of about 0
    lessons = [(prompt + response[:-n], response[-n:]) for n, (prompt, response) in enumerate(whole, 2)]
    expected = []
    for prompt, response in lessons:
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.6
        scores = torch.log_softmax(logits, -1)[range(len(response)), response]
        expected.append(scores.sum().exp().item())
    got = tiny.share_solved(model, collate(lessons), 0.6)
    assert got > 1e-30
    assert got == pytest.approx(sum(expected) / 3, rel=1e-4)


def test_fresh_weights_depend_on_the_seed_only():
    spec = tiny.SPECS["tiny:qwen3"]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = tiny.build_model(spec, 50, 0, 1, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    two = tiny.build_model(spec, 50, 0, 1, seed=5)
    other = tiny.build_model(spec, 50, 0, 1, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_few_steps_lower_the_loss():
    model, tokenizer = model_of("tiny:qwen3")
    check = collate(
        [
            Teacher(tokenizer).lesson(p, False, random.Random(2))
            for p, _ in zip(arithmetic.problems(), "ab", strict=False)
        ]
    )

    def loss():
        logits, tokens = tiny._response_logits(model, check)
        return torch.nn.functional.cross_entropy(logits, tokens).item()

    before = loss()
    with pytest.raises(RuntimeError, match="after 30 steps"):
        tiny.warm_start(
            model, tokenizer, 0, dataclasses.replace(SHORT, target=1.0, max_steps=30, check_every=30, batch=8)
        )
    assert loss() < before - 1


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", tiny.SPECS)
def test_the_folder_is_a_plain_model_folder_that_loads_as_it_was_made(spec, short, tmp_path):
    folder = tiny.tiny_agent(spec, 0, tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    } <= names
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 300_000
    assert type(model).__name__ == f"{spec.partition(':')[2].capitalize()}ForCausalLM"
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id,)
    assert model.config.vocab_size == len(tokenizer)
    made = build_tokenizer(tiny.SPECS[spec].tokenizer, tiny.CONTEXT)
    text = "[A] 7+12=19\n\\boxed{?} user: 3-4*5"
    assert tokenizer.encode(text) == made.encode(text)
    assert tokenizer.get_vocab() == made.get_vocab()
    messages = [{"role": "user", "content": text}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == made.apply_chat_template(messages, tokenize=False)


def test_an_agent_is_made_once_and_again_for_another_seed(short, tmp_path):
    seen = []
    first = tiny.tiny_agent("tiny:qwen2", 0, tmp_path, lambda *args: seen.append(args))
    assert [(step, usual) for step, usual, _ in seen] == [(1, tiny.USUAL_STEPS)]
    weights = (first / "model.safetensors").read_bytes()
    assert tiny.tiny_agent("tiny:qwen2", 0, tmp_path, lambda *args: pytest.fail("made again")) == first
    other = tiny.tiny_agent("tiny:qwen2", 1, tmp_path)
    assert (other / "model.safetensors").read_bytes() != weights
    assert not list((tmp_path / "tiny").glob(".*"))
    again = tiny.tiny_agent("tiny:qwen2", 0, tmp_path / "elsewhere")
    assert (again / "model.safetensors").read_bytes() == weights


def test_what_decides_the_weights_decides_the_folder(monkeypatch):
    keys = {tiny._key("tiny:qwen2", 0), tiny._key("tiny:qwen3", 0), tiny._key("tiny:qwen2", 1)}
    monkeypatch.setattr(tiny, "VERSION", tiny.VERSION + 1)
    keys.add(tiny._key("tiny:qwen2", 0))
    monkeypatch.setattr(tiny, "WARM_START", dataclasses.replace(tiny.WARM_START, target=0.5))
    keys.add(tiny._key("tiny:qwen2", 0))
    assert len(keys) == 5


def test_a_process_that_comes_second_takes_what_the_first_made(short, tmp_path, monkeypatch):
    made = tiny.tiny_agent("tiny:qwen2", 0, tmp_path / "a")

    def slower(spec, seed, plan, part, progress):
        (part / "config.json").write_text("mine")
        target = tmp_path / "b" / "tiny" / made.name
        target.mkdir()
        (target / "config.json").write_text("the first one's")

    monkeypatch.setattr(tiny, "_make", slower)
    folder = tiny.tiny_agent("tiny:qwen2", 0, tmp_path / "b")
    assert (folder / "config.json").read_text() == "the first one's"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_warm_start_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "WARM_START", dataclasses.replace(SHORT, target=1.0))
    with pytest.raises(RuntimeError, match="after 1 steps"):
        tiny.tiny_agent("tiny:qwen2", 0, tmp_path)
    assert list((tmp_path / "tiny").iterdir()) == []


def test_the_callers_thread_count_comes_back(short, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tiny.tiny_agent("tiny:qwen2", 0, tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_unknown_agents_and_unwritable_caches_are_the_users_matter(tmp_path):
    with pytest.raises(UserError, match="tiny agents are tiny:qwen2 and tiny:qwen3"):
        tiny.tiny_agent("tiny:llama", 0, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set UMAD_CACHE"):
        tiny.tiny_agent("tiny:qwen2", 0, tmp_path / "file")


@pytest.mark.slow
def test_a_warm_start_solves_about_what_it_aims_at_on_unseen_problems(tmp_path):
    folder = tiny.tiny_agent("tiny:qwen3", 0, tmp_path)
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    teacher, rng = Teacher(tokenizer), random.Random(3)
    held_out = [p for p, _ in zip(arithmetic.problems(1, "test", 0), range(300), strict=False)]
    for debate in (False, True):
        share = tiny.share_solved(model, collate([teacher.lesson(p, debate, rng) for p in held_out]), 0.6)
        assert 0.4 < share < 0.8
