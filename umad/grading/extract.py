"""Where the final answer stands in a model's response.

The order is fixed and the same for rewards, votes and evaluation: the last balanced box; else a stated final answer
("the answer is", "####", `<answer>`, bold); else, where the kind allows it, the last formula, number or option letter.
Thinking blocks are ignored, and no marker is demanded. Every step is linear in the length of the text.
"""

from __future__ import annotations

import re

from umad.grading.cleaning import repair_escapes
from umad.grading.options import bare_option, last_lone_letter, last_match, named_options, option_letter
from umad.grading.words import is_math_word

TAIL = 20_000
"""Characters at the end of a response in which an answer without a box is looked for."""

_THINK_ENDS = ("</think>", "</thinking>", "</thought>", "[/THINK]", "<|channel|>final<|message|>")
_SPECIAL_TOKEN = re.compile(r"<\|[A-Za-z0-9_▁/]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|</?think(?:ing)?>|\[THINK\]")
_BRACES = re.compile(r"\\+(?:boxed|fbox|framebox)\s*\{|\\[{}\\]|[{}]")
_BOX_NAMES = ("\\boxed", "\\fbox", "\\framebox")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(-?\d[\d.,]*|[A-Za-z]\b)")
_MATH_MARKS = re.compile(
    r"\\[()\[\]]|\\(?:quad|qquad|text|mathrm|textbf|left|right|ldots)(?![a-z])|\\[,;:! ]|[${}~*&]|\s+"
)
_JOINED_BY = re.compile(
    r"(?:[A-Za-z]+\s){0,4}(?:,|;|and|,\s?and)?\s?(?:[A-Za-z]\w?(?:_\w{1,3})?\s?(?:\([a-z]\)\s?)?=)?", re.I
)
_JUDGING = re.compile(
    r"\b(?:is|was|are|not|wrong|incorrect|but|or|instead|says?|said|than|then|so|agent|wait|to|from|vs|should)\b", re.I
)


def last_segment(text: str) -> str:
    """What follows the last thinking block, without the tokenizer's special tokens."""
    start = 0
    for marker in _THINK_ENDS:
        at = text.rfind(marker)
        if at >= 0:
            start = max(start, at + len(marker))
    segment = text[start:] if start else text
    if "<" in segment or "[THINK]" in segment:
        segment = _SPECIAL_TOKEN.sub(" ", segment)
    return segment


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Outermost balanced boxes, in order: (start, end, content). One pass, whatever the nesting."""
    found: list[tuple[int, int, int]] = []  # start, end, start of the content
    stack: list[tuple[int, int]] = []  # (start of the box or -1 for a plain brace, start of the content)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            if not stack:
                continue
            start, inside = stack.pop()
            if start < 0:
                continue
            while found and found[-1][0] > start:  # boxes inside this one
                found.pop()
            found.append((start, match.end(), inside))
        elif token == "{":
            stack.append((-1, 0))
        elif token not in ("\\{", "\\}", "\\\\"):
            stack.append((match.start(), match.end()))
    return [(start, end, text[inside : end - 1]) for start, end, inside in found]


def unbox(text: str) -> str | None:
    """The content of the last non-empty box, joined with its neighbours where the text lists several answers.

    `\\boxed{1} and \\boxed{2}` is the list "1, 2"; `\\boxed{5}. Wait, that's wrong. \\boxed{3}` is 3. None: no such box.
    """
    found = [(start, end, _strip_boxes(content)) for start, end, content in boxes(text)]
    found = [box for box in found if box[2]]
    if not found:
        bare = last_match(_BARE_BOX, text)
        return bare.group(1).rstrip(".,") if bare else None
    first = len(found) - 1
    while first > 0 and _is_list_gap(text, found[first - 1][1], found[first][0]):
        first -= 1
    parts = list(dict.fromkeys(content for _, _, content in found[first:]))
    return ", ".join(parts)


def _strip_boxes(content: str) -> str:
    """`\\boxed{5}` inside a box, and text wrapped around nothing else, are 5."""
    content = content.strip()
    if "\\" in content and any(name in content for name in _BOX_NAMES):
        inner = boxes(content)
        if inner:
            pieces, at = [], 0
            for start, end, inside in inner:
                pieces += [content[at:start], inside]
                at = end
            content = "".join([*pieces, content[at:]]).strip()
            content = re.sub(r"\\(?:boxed|fbox|framebox)(?=\s*\{)", "", content)
    return "" if not content.strip("{}$ \t\n") else content


def _is_list_gap(text: str, start: int, end: int) -> bool:
    if end - start > 80:
        return False
    gap = _MATH_MARKS.sub(" ", text[start:end])
    gap = re.sub(r"\([a-z]\)", " ", gap)
    gap = re.sub(r"\s+", " ", gap).strip()
    return (
        not _JUDGING.search(gap) and _JOINED_BY.fullmatch(gap) is not None and ("," in gap or "and" in gap or not gap)
    )


# --- answers that are stated, not boxed -------------------------------------------------------------------------------

_STATED = re.compile(
    r"(?:\bfinal\s+(?:answer|result)|\b(?:correct\s+)?answers?)\b[^\n.:=?!]{0,60}?"
    r"(?:\b(?:is|are|be|equals)\b|:|=|(?=\**\s*\n))[\s*:#>]*"
    r"|^\s*(?:A|Ans)\s*[:=]\s*"
    r"|^[^\n#]{0,200}####\s*"
    r"|<answer>\s*",
    re.I | re.M,
)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*|__([^_\n]{1,200})__")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*|\")|\n|</answer>")
_REASON = re.compile(r",?\s(?:because|since|which|where|not|but|so|given|as|after|with)\s", re.I)
_DISPLAYS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
_GOES_ON = re.compile(r"\s*(?:(?:,|and\b|or\b|;)\s*(?:and\s|or\s)?(?:\$|\\\(|\d)|[-+*/=<>^]|\\[a-z])", re.I)
_NO_IDEA = re.compile(r"(?:sorry|unsure|unclear|i|i'm|i'd|i'll|we|let)\b(?!\s*=)", re.I)
_NEGATED = re.compile(r"(?:not|never|wrong|incorrect|unknown|unclear)\b", re.I)


def _stated(text: str) -> str | None:
    """The last stated final answer, or None."""
    answer = None
    for match in _STATED.finditer(text):
        candidate = _clause(text, match.end())
        if candidate and not _NEGATED.match(candidate):
            answer = candidate
    return answer


def _clause(text: str, at: int) -> str:
    """The answer that begins at `at`: a formula in its delimiters, or the words up to the end of the sentence."""
    rest = text[at : at + 400]
    for opening, closing in _DISPLAYS:
        if rest.startswith(opening):
            end = rest.find(closing, len(opening))
            if end < 0:
                continue
            formula, after = rest[len(opening) : end].strip(), rest[end + len(closing) :]
            if opening in ("$$", "\\[") or (not _GOES_ON.match(after) and not _is_prose(formula)):
                return formula
    end_of = _SENTENCE_END.search(rest)
    clause = rest[: end_of.start()] if end_of else rest
    reason = _REASON.search(clause)
    if reason and any(map(str.isalnum, clause[: reason.start()])):
        clause = clause[: reason.start()]
    return clause.strip(" \t*_:\"'`,;")


# --- the last number, formula or letter -------------------------------------------------------------------------------

_DIGITS = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)*|\.\d+"
NUMBER = re.compile(
    rf"(?<![\w.,\\^])(?:(?<![\w)])[-−–])?(?:\\?[$€£]\s?)?-?(?:\d+\s\d+/\d+|(?:{_DIGITS})(?:/\d+(?:\.\d+)?)?)(?:[eE][-+]?\d+)?(?:\s?\\?%)?"
)
_FORMULA = re.compile(
    r"\$\$(.{1,400}?)\$\$|\\\[(.{1,400}?)\\\]|\\\((.{1,400}?)\\\)|(?<!\\)\$([^$\n]{1,400}|\s*\n[^$\n]{1,400}\n\s*)(?<!\\)\$",
    re.S,
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][A-Za-z']+")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|mbox|mathrm|textbf|textit|operatorname|begin|end|mathbf|mathbb|textnormal)\s*\{[^{}]*\}"
)


def _is_prose(text: str) -> bool:
    return any(not is_math_word(word) for word in _WORD.findall(_TEXT_COMMAND.sub(" ", text)))


def last_number(text: str) -> str | None:
    match = last_match(NUMBER, text)
    return match.group().strip().rstrip(",") if match else None


def _last_math(text: str) -> str | None:
    """The last formula in delimiters or the last number, whichever ends later."""
    formula, number = last_match(_FORMULA, text), last_match(NUMBER, text)
    if formula and (not number or number.end() <= formula.end()):
        return next(group for group in formula.groups() if group is not None).strip()
    return number.group().strip().rstrip(",") if number else None


def _unmarked_math(text: str) -> str | None:
    stripped = text.strip()
    if len(stripped) <= 400 and not _is_prose(stripped):
        return stripped or None
    found = _last_math(text)
    if found is None and len(stripped) <= 60 and len(stripped.split()) <= 5 and not _NO_IDEA.match(stripped):
        return stripped
    return found


def _math_answer(text: str) -> str | None:
    stated = _stated(text)
    if stated and (any(map(str.isdigit, stated)) or "\\" in stated or len(stated.split()) <= 3):
        return stated
    for match in reversed(list(_BOLD.finditer(text))):
        bold = (match.group(1) or match.group(2)).strip(" :.")
        if any(map(str.isdigit, bold)) and not _is_prose(bold):
            return bold
    return _unmarked_math(text)


def stated_text(text: str) -> str | None:
    """Where words answer: what is stated, else the last bold words, else the last line."""
    stated = _stated(text)
    if stated:
        return stated
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    bold = _BOLD.findall(text)
    if bold and len(lines) > 1:
        return (bold[-1][0] or bold[-1][1]).strip(" :.") or None
    return lines[-1]


# --- option letters ---------------------------------------------------------------------------------------------------


def _choice_answer(text: str) -> str | None:
    stated = _stated(text)
    if stated and (letter := option_letter(stated)):
        return letter
    if named := named_options(text):
        return named[-1]
    bold = [letter for first, second in _BOLD.findall(text) if (letter := option_letter(first or second))]
    if bold:
        return bold[-1]
    lines = [line for line in text.splitlines() if line.strip()]
    for loose in (False, True):
        for line in reversed(lines):
            letter = option_letter(line) if loose else bare_option(line)
            if letter and len(line.split()) <= 12:
                return letter
    return last_lone_letter(text) or stated


def extract(text: str | None, kind: str = "math", *, require_box: bool = False) -> str | None:
    """The final answer in a response, or None.

    A box that is empty or never closed is no answer, however many numbers stand around it. With `require_box` nothing
    but a box counts. Nothing is evaluated: what comes back is a piece of the text (several boxes that form a list are
    joined by commas; the option letter alone for kind `choice`).
    """
    if not text:
        return None
    segment = last_segment(repair_escapes(text) if "\x0c" in text else text)
    has_box = "\\" in segment and any(name in segment for name in _BOX_NAMES)
    if has_box:
        boxed = unbox(segment)
        if boxed is None or kind != "choice":
            return boxed
        return option_letter(boxed) or boxed
    if require_box:
        return None
    if kind.startswith("code:"):
        return segment.strip() or None
    tail = segment[-TAIL:]
    if kind == "choice":
        return _choice_answer(tail)
    if kind == "text":
        return stated_text(tail)
    if kind == "number":
        stated = _stated(tail)
        return (last_number(stated) if stated else None) or last_number(tail)
    return _math_answer(tail)
