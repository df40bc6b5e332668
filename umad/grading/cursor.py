"""The characters of an answer: commands, words, and number literals in their many notations."""

from __future__ import annotations

import re
from fractions import Fraction

from umad.grading.nodes import Num, TooLarge, Unreadable
from umad.grading.words import FUNCTIONS, GREEK

RELATIONS = {
    **{"=": "=", "==": "=", ":=": "=", r"\approx": "~", r"\equiv": "=", r"\simeq": "~", r"\cong": "=", r"\doteq": "="},
    **{"<": "<", ">": ">", "<=": "<=", ">=": ">=", "=<": "<=", "!=": "!=", r"\lt": "<", r"\gt": ">"},
    **{r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\leqq": "<=", r"\ge": ">=", r"\geq": ">="},
    **{r"\geqslant": ">=", r"\geqq": ">=", r"\ne": "!=", r"\neq": "!=", r"\in": "in", r"\notin": "notin"},
}
SET_OPS = {r"\cup": "cup", r"\bigcup": "cup", r"\cap": "cap", r"\setminus": "setminus", r"\backslash": "setminus"}
NAMES = {r"\infty": "oo", r"\pi": "pi", r"\emptyset": "∅", r"\varnothing": "∅", r"\imath": "i", r"\jmath": "j"}
NAMES |= {"\\" + letter: letter for letter in GREEK}
_KNOWN_COMMANDS = (
    set(RELATIONS)
    | set(SET_OPS)
    | set(NAMES)
    | {"\\" + name for name in FUNCTIONS}
    | {r"\frac", r"\sqrt", r"\cdot", r"\times", r"\div", r"\pm", r"\mp", r"\circ", r"\binom", r"\dbinom", r"\tbinom"}
    | {r"\lfloor", r"\rfloor", r"\lceil", r"\rceil", r"\langle", r"\rangle", r"\begin", r"\end", r"\mid", r"\mathbb"}
    | {r"\overline", r"\bar", r"\angle", r"\triangle", r"\ldots", r"\dots", r"\cdots", r"\degree", r"\to", r"\colon"}
    | {r"\ast", r"\star", r"\land", r"\lor", r"\wedge", r"\vee", r"\prime", r"\choose", r"\percent", r"\pmod", r"\bmod"}
)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.S)
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_DECIMAL = re.compile(r"\d+\.\d+|\.\d+|\d+\.?(?![\d])|\d+")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?")
_SPACED = re.compile(r"\d{1,3}(?: \d{3})+(?![\d])(?:\.\d+)?")
_COMMA_DECIMAL = re.compile(r"\d+,\d+")
_REPEATING = re.compile(r"(\d*)\.(\d*)\s*\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_MIXED = re.compile(r"(\d+) (\d+) ?/ ?(\d+)(?!\d)")
_EXPONENT = re.compile(r"[eE]([-+]?\d{1,4})(?![\dA-Za-z.])")
_DOTS = re.compile(r"\s*(?:\.\.\.|…)")


class Cursor:
    def __init__(self, text: str, commas: str) -> None:
        self.text, self.at, self.depth, self.brackets, self.bars, self.commas = text, 0, 0, 0, 0, commas
        self.spaced_commas = re.search(r",\s", text) is not None

    # -- characters ----------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def peek(self) -> str:
        """The next character, or the next command (its longest known beginning: `\\pir` is `\\pi r`); "" at the end."""
        self.skip()
        if self.at >= len(self.text):
            return ""
        if self.text[self.at] != "\\":
            return self.text[self.at]
        match = _COMMAND.match(self.text, self.at)
        command = match.group() if match else "\\"
        if command in _KNOWN_COMMANDS or len(command) <= 2:
            return command
        for end in range(len(command) - 1, 2, -1):
            if command[:end] in _KNOWN_COMMANDS:
                return command[:end]
        return command

    def accept(self, token: str) -> bool:
        if token and self.peek() == token:
            self.at += len(token)
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise Unreadable(f"{token!r} missing at {self.text[self.at : self.at + 20]!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def word(self) -> str:
        self.skip()
        found = _WORD.match(self.text, self.at)
        return found.group() if found else ""

    def literal(self) -> Num:
        self.skip()
        if repeating := self.match(_REPEATING):
            whole, fixed, cycle = repeating.groups()
            if len(repeating.group()) > 60:
                raise TooLarge("too many digits")
            scale = 10 ** len(fixed)
            value = Fraction(int(whole + fixed or "0"), scale) + Fraction(int(cycle), scale * (10 ** len(cycle) - 1))
            return Num(value)
        if mixed := self.match(_MIXED):
            whole_number, top, bottom = (int(part) for part in mixed.groups())
            if bottom and top < bottom:
                return Num(whole_number + Fraction(top, bottom))
            raise Unreadable("not a mixed number")
        if self.commas == "decimal" and (found := self.match(_COMMA_DECIMAL)):
            return _literal(found.group().replace(",", "."))
        grouped = self.commas == "auto" and (self.brackets == 0 or self.spaced_commas)
        found = (self.match(_GROUPED) if grouped else None) or self.match(_SPACED) or self.match(_DECIMAL)
        if not found:
            raise Unreadable("no number")
        digits = found.group().replace(",", "").replace(" ", "")
        if len(digits) > 1000:
            raise TooLarge("too many digits")
        if exponent := self.match(_EXPONENT):
            power = int(exponent.group(1))
            if abs(power) > 400:
                raise TooLarge("exponent too large")
            mantissa = _literal(digits)
            scale = Fraction(10) ** power
            ulp = (mantissa.ulp or Fraction(1)) * scale
            return Num(mantissa.value * scale, ulp if ulp < 1 else None, mantissa.digits)
        number = _literal(digits)
        if number.ulp is not None and (self.peek() in (r"\ldots", r"\dots", r"\cdots") or self.match(_DOTS)):
            self.at += len(self.peek()) if self.peek().endswith("dots") else 0
            return _continued(digits) or number
        return number


def _continued(digits: str) -> Num | None:
    """`0.333...` as 1/3: the digits before the dots, where their last ones visibly repeat."""
    found = re.fullmatch(r"(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,3})\4+)", digits)
    if found is None:
        return None
    whole, fixed = found.group(1), found.group(2)
    cycle = found.group(3) or found.group(4)
    scale = 10 ** len(fixed)
    return Num(Fraction(int(whole + fixed or "0"), scale) + Fraction(int(cycle), scale * (10 ** len(cycle) - 1)))


def _literal(digits: str) -> Num:
    whole, _, decimals = digits.partition(".")
    significant = len((whole + decimals).lstrip("0"))
    ulp = Fraction(1, 10 ** len(decimals)) if decimals else None
    return Num(Fraction(int(whole + decimals or "0"), 10 ** len(decimals)), ulp, significant)
