"""What an agent imitates under `umad sft`: prompts as it would see them in a debate, with right responses, as token ids."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umad.config import Recipe, SFTConfig
from umad.debate.agents import Agent, fit_prompt
from umad.debate.prompts import Message, Prompts, special_strings
from umad.debate.recorded import read_rollouts
from umad.engines.base import GenerationError
from umad.grading import Grader
from umad.grading.grader import GradeItem
from umad.records import Debate, Problem, Response, UserError, read_debates
from umad.runs import build

if TYPE_CHECKING:
    import numpy as np

PROBE = "umad-probe-7f3"


@dataclass(frozen=True)
class Candidate:
    """A right response and what was shown before it. `messages` are None where they have to be made from `shown`, the
    responses that were read. `prompt_ids` and `token_ids` are as recorded."""

    problem: Problem
    turn: int
    speaker: str
    text: str
    messages: Sequence[Message] | None = None
    shown: tuple[Response, ...] = ()
    order: tuple[str, ...] = ()
    """The debate's agents: labels follow their order."""
    prompt_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Example:
    """One row of the training set: int32 ids; only the completion is learned, its last token ends the turn."""

    problem_id: str
    turn: int
    speaker: str
    prompt_ids: np.ndarray
    completion_ids: np.ndarray

    def row(self) -> dict[str, list[int]]:
        """As TRL takes it: labels of -100 are not learned."""
        prompt, completion = self.prompt_ids.tolist(), self.completion_ids.tolist()
        return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}


@dataclass
class Tally:
    """How many rows were read, and why some of them are not used."""

    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def drop(self, why: str, count: int = 1) -> None:
        if count:
            self.left_out[why] += count

    def copy(self) -> Tally:
        return Tally(self.read, Counter(self.left_out))

    def describe(self, kept: int, what: str) -> str:
        reasons = ", ".join(f"{count} {why}" for why, count in self.left_out.most_common())
        return f"{self.read} {what} read, {kept} used" + (f"; left out: {reasons}" if reasons else "")


@dataclass(frozen=True)
class Source:
    """The right responses that there are, before it is known which agent learns from them."""

    candidates: Sequence[Candidate]
    tally: Tally
    speakers: tuple[str, ...]
    """Everybody who spoke; empty for a data set."""
    where: str
    what: str


def read_source(recipe: Recipe, grader: Grader) -> Source:
    """Reads and grades `sft.data` or `sft.debates`.

    Raises:
        UserError: it cannot be read, or holds nothing that is right.
    """
    assert recipe.sft is not None
    source = _from_data(recipe, grader) if recipe.sft.data is not None else _from_debates(recipe.sft, grader)
    if not source.candidates:
        raise UserError(f"{source.where}: there is nothing to learn from ({source.tally.describe(0, source.what)})")
    return source


# --- data sets --------------------------------------------------------------------------------------------------------


def _from_data(recipe: Recipe, grader: Grader) -> Source:
    from umad.tasks.solutions import load_solutions

    assert recipe.sft is not None
    assert recipe.sft.data is not None
    solutions, bare, broken = load_solutions(recipe.sft.data, recipe.data.on_bad_rows, build.gold_faults)
    tally = Tally(len(solutions) + bare + len(broken))
    tally.drop("broken", len(broken))
    tally.drop("without a solution", bare)
    stated = [s for s in solutions if s.stated is not None]
    grades = grader.grade([_item(s.problem, s.stated or "") for s in stated])
    wrong = {id(s) for s, grade in zip(stated, grades, strict=True) if not grade.equal}
    tally.drop("whose answer is not the gold", len(wrong))
    kept = [Candidate(s.problem, 0, "", s.text) for s in solutions if id(s) not in wrong]
    return Source(kept, tally, (), "sft.data", "problems")


def _item(problem: Problem, text: str) -> GradeItem:
    gold = problem.gold or ""
    required = (gold, *problem.required) if problem.required else gold
    return GradeItem(required, text, problem.kind, problem.alternatives, problem.choices)


# --- recorded debates -------------------------------------------------------------------------------------------------


def debate_files(path: Path) -> list[Path]:
    """The files of debates that `path` stands for: itself, a run's transcripts, or a folder's `debates.jsonl`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"sft.debates: {path} does not exist")
    found = sorted((path / "transcripts").glob("*.jsonl")) or [f for f in [path / "debates.jsonl"] if f.is_file()]
    if not found:
        raise UserError(
            f"sft.debates: {path} has neither transcripts/*.jsonl nor debates.jsonl; give a run folder "
            "(logging.transcripts not 0), an evaluation folder or a file of debates"
        )
    return found


def _from_debates(config: SFTConfig, grader: Grader) -> Source:
    assert config.debates is not None
    tally, speakers, kept = Tally(), dict[str, None](), list[Candidate]()
    for path in debate_files(Path(config.debates)):
        debates = _graded(read_debates(path), grader)
        rollouts = _rollouts(path)
        for debate in debates:
            speakers |= dict.fromkeys(r.agent for r in debate.responses())
            for response in debate.responses():
                tally.read += 1
                found = _candidate(debate, response, rollouts, config)
                if isinstance(found, str):
                    tally.drop(found)
                else:
                    kept.append(found)
    return Source(kept, tally, tuple(speakers), f"sft.debates: {config.debates}", "responses")


def _graded(debates: Sequence[Debate], grader: Grader) -> list[Debate]:
    """The debates, responses graded that are not but could be."""
    todo = [(d.problem, r) for d in debates for r in d.responses() if r.correct is None and d.problem.gold is not None]
    grades = grader.grade([_item(problem, response.text) for problem, response in todo])
    made = {
        id(r): replace(r, correct=grade.equal, answer=grade.extracted)
        for (_, r), grade in zip(todo, grades, strict=True)
    }
    return [replace(d, turns=tuple(tuple(made.get(id(r), r) for r in turn) for turn in d.turns)) for d in debates]


def _rollouts(transcript: Path) -> Mapping[tuple[Any, ...], Mapping[str, Any]]:
    """What a run recorded beside a transcript: shown messages and token ids, by response."""
    path = transcript.parent.parent / "rollouts" / f"{transcript.stem}.parquet"
    if transcript.parent.name != "transcripts" or not path.is_file():
        return {}
    return {(r["problem_id"], r["instance"], r["rollout"], r["turn"], r["agent"]): r for r in read_rollouts(path)}


def _candidate(
    debate: Debate, response: Response, rollouts: Mapping[tuple[Any, ...], Mapping[str, Any]], config: SFTConfig
) -> Candidate | str:
    """The response as a candidate, or why it is none."""
    if config.turns is not None and response.turn not in config.turns:
        return "of other turns"
    if response.correct is None:
        return "ungraded"
    if not response.correct:
        return "wrong"
    if response.truncated:
        return "cut off before their end"
    if not response.text.strip():
        return "without text"
    made = Candidate(debate.problem, response.turn, response.agent, response.text, order=debate.agents)
    key = (debate.problem.id, debate.instance, debate.rollout, response.turn, response.agent)
    recorded = rollouts.get(key)
    if recorded is not None and recorded["messages"]:
        return replace(
            made,
            messages=recorded["messages"],
            prompt_ids=recorded["prompt_ids"],
            token_ids=recorded["completion_ids"],
        )
    if debate.problem.question.strip() == "?":
        return "without the question"
    if response.turn > 0 and not response.saw:
        return "of which it is not recorded what they were shown"
    seen = {(r.turn, r.agent): r for r in debate.responses()}
    if any(pair not in seen for pair in response.saw):
        return "of which what they were shown is missing"
    return replace(made, shown=tuple(seen[pair] for pair in response.saw))


# --- one agent's examples ---------------------------------------------------------------------------------------------


def examples_for(
    recipe: Recipe, agent: Agent, prompts: Prompts, source: Source, stops: Sequence[int], context: int
) -> tuple[list[Example], Tally]:
    """What `agent` learns from, in a fixed order, and what it does not.

    stops: tokens that end a response. context: most tokens of prompt and response that the model takes.

    Raises:
        UserError: nothing is left; the message says what was read and why each kind was left out.
    """
    config = recipe.sft
    assert config is not None
    tally = source.tally.copy()
    chosen = _chosen(config, agent.name, source, tally, recipe.seed)
    longest = min(config.max_tokens or context, context)
    specials = frozenset(special_strings(agent.tokenizer))
    encoder = _Encoder(agent, prompts, specials, tuple(stops), end_of_turn(agent.tokenizer, stops), longest)
    examples = []
    for candidate in chosen:
        made = encoder.example(candidate)
        if isinstance(made, str):
            tally.drop(made)
        else:
            examples.append(made)
    if not examples:
        raise UserError(
            f"{source.where}: there is nothing for agent {agent.name!r} to learn from ({tally.describe(0, source.what)})"
        )
    return examples, tally


def _chosen(config: SFTConfig, name: str, source: Source, tally: Tally, seed: int) -> list[Candidate]:
    """Own or all responses, no text twice for a problem and turn, at most `per_problem` of each."""
    candidates = list(source.candidates)
    if source.speakers and config.responses == "own":
        if name not in source.speakers:
            raise UserError(
                f"{source.where}: agent {name!r} does not speak there, only {', '.join(source.speakers)}; "
                "name the agents alike, or set sft.responses: all"
            )
        candidates = [c for c in candidates if c.speaker == name]
        tally.drop("of other agents", len(source.candidates) - len(candidates))
    groups: dict[tuple[str, int], dict[str, Candidate]] = defaultdict(dict)
    for candidate in candidates:
        groups[candidate.problem.id, candidate.turn].setdefault(candidate.text.strip(), candidate)
    unlike = sum(map(len, groups.values()))
    tally.drop("with a text that was there before", len(candidates) - unlike)
    kept = list(_drawn(groups, config.per_problem, seed))
    tally.drop("beyond sft.per_problem", unlike - len(kept))
    return kept


def _drawn(
    groups: Mapping[tuple[str, int], Mapping[str, Candidate]], most: int | None, seed: int
) -> Iterator[Candidate]:
    for (problem, turn), members in groups.items():
        every = list(members.values())
        if most is not None and len(every) > most:
            rng = random.Random(f"sft/{seed}/{problem}/{turn}")
            every = [every[i] for i in sorted(rng.sample(range(len(every)), most))]
        yield from every


def end_of_turn(tokenizer: Any, stops: Sequence[int]) -> int:
    """The token that the chat template puts after what an assistant said; the end of sequence where it puts none that ends a
    response in generation."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    _, found, after = tokenizer.apply_chat_template(talk, tokenize=False).rpartition(PROBE)
    ids = tokenizer.encode(after, add_special_tokens=False) if found else []
    if ids and ids[0] in stops:
        return int(ids[0])
    return int(tokenizer.eos_token_id if tokenizer.eos_token_id in stops else stops[0])


@dataclass(frozen=True)
class _Encoder:
    """From candidates to token ids of one agent."""

    agent: Agent
    prompts: Prompts
    specials: frozenset[str]
    stops: tuple[int, ...]
    end: int
    longest: int

    def example(self, candidate: Candidate) -> Example | str:
        """The example, or why there is none."""
        import numpy as np

        try:
            prompt = self._prompt(candidate)
        except GenerationError:
            return "with too long a prompt"
        completion = self._recorded(candidate, prompt)
        if completion is None:
            if any(special in candidate.text for special in self.specials):
                return "that hold control tokens"
            ids = self.agent.tokenizer.encode(candidate.text.strip(), add_special_tokens=False)
            completion = np.asarray([*ids, self.end], dtype=np.int32)
        if len(prompt) + len(completion) > self.longest:
            return f"longer than {self.longest} tokens"
        return Example(candidate.problem.id, candidate.turn, candidate.speaker, prompt, completion)

    def _prompt(self, candidate: Candidate) -> np.ndarray:
        if candidate.messages is not None:
            ids = self.agent.encode(candidate.messages)
        else:
            shown = self.prompts.shown(candidate.shown, candidate.order) if candidate.shown else ()
            ids = fit_prompt(self.agent, self.prompts, candidate.problem, shown, candidate.turn).ids
        assert ids is not None
        return ids

    def _recorded(self, candidate: Candidate, prompt: np.ndarray) -> np.ndarray | None:
        """The completion as it was sampled, id for id (encoding its text again may give others), where the recorded ids are
        this tokenizer's: they encode the same prompt and read as the same text."""
        import numpy as np

        if not candidate.token_ids or candidate.prompt_ids is None or prompt.tolist() != list(candidate.prompt_ids):
            return None
        if self.agent.decode(candidate.token_ids) != candidate.text:
            return None
        ids = list(candidate.token_ids)
        return np.asarray(ids if ids[-1] in self.stops else [*ids, self.end], dtype=np.int32)
