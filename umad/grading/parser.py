"""A small parser for final answers: cleaned LaTeX or plain text in, an expression tree out.

Recursive descent over characters, linear in the length, with a cap on nesting. Nothing is evaluated here. It reads what
final answers are made of (numbers, arithmetic, roots, functions, tuples, sets, intervals, matrices, relations, units);
anything else raises `Unreadable`, and the caller compares in another way.
"""

from __future__ import annotations

import re
from fractions import Fraction

from umad.grading.cursor import NAMES, RELATIONS, SET_OPS, Cursor
from umad.grading.nodes import Builder, Chain, Grid, Group, Measure, Name, Node, Num, Op, TooLarge, Unreadable, Words
from umad.grading.words import CONNECTIVES, CONSTANTS, FUNCTIONS, GREEK, UNITS, is_math_word

MAX_DEPTH = 40

_SUBSCRIPT = re.compile(r"_\s*(?:\{([^{}]*)\}|([A-Za-z0-9]))")
_SEPARATOR = re.compile(r"\s*(?:(?:,|;)\s*(?:and\b|or\b)?|and\b|or\b|\\(?:land|lor|wedge|vee)(?![a-z]))\s*", re.I)
_UNIT_TAIL = re.compile(
    r'\s*(?:"[^"]*"|[A-Za-z][A-Za-z\'.\-]*|\([A-Za-z ]*\)|/\s*[A-Za-z]+|\^\s*\{?[23]\}?|-(?=[A-Za-z"]))'
)
_UNION_LETTER = re.compile(r"(?<=[)\]}\s])U\s*(?=[(\[{\\])")
_CORNERS = re.compile(r"\s*[A-Z]{1,5}(?![A-Za-z])")
_QUOTED = re.compile(r'\s*"([^"]*)"(?=\s*(?:$|,|;|and\b|or\b|[)}\]&\\]))')
_PRODUCTS = (frozenset("abcd"), frozenset("xyzw"), frozenset("abcxyz"), frozenset("pqrst"), frozenset("mnk"))


def parse(text: str, *, commas: str = "auto") -> Node:
    """The tree of a cleaned answer. `commas`: how `1,234` reads: "auto", "list" (two items) or "decimal" (1.234)."""
    parser = _Parser(text, commas)
    node = parser.answer("")
    if parser.at < len(text):
        raise Unreadable(f"stopped at {text[parser.at : parser.at + 20]!r}")
    return node


class _Parser(Cursor):
    # -- lists, relations, units ---------------------------------------------------------------------------------------

    def answer(self, closing: str) -> Node:
        """Items up to `closing` ("" for the end), which stays unread."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("nested too deeply")
        items, joined = [self.item()], ","
        while separator := self.match(_SEPARATOR):
            if "or" in separator.group().lower() or "lor" in separator.group() or "vee" in separator.group():
                joined = "or"
            elif joined == "," and separator.group().strip(" ,;"):
                joined = "and"
            if self.at >= len(self.text):
                break
            items.append(self.item())
        self.depth -= 1
        return items[0] if len(items) == 1 else Group("", "", tuple(items), joined)

    def item(self) -> Node:
        self.skip()
        node = self.chain()
        start = self.at
        while self.match(_UNIT_TAIL):
            if re.search(r"(?:^|\s)(?:and|or)$", self.text[start : self.at], re.I):
                self.at = self.text.rfind(" ", start, self.at - 2) if " " in self.text[start : self.at] else start
                break
        unit = self.text[start : self.at].replace('"', " ").strip()
        return Measure(node, unit) if unit else node

    def relation(self) -> str:
        token = self.peek()
        pair = self.text[self.at : self.at + 2]
        if pair in RELATIONS:
            self.at += 2
            return RELATIONS[pair]
        if token in RELATIONS:
            self.at += len(token)
            return RELATIONS[token]
        return ""

    def chain(self) -> Node:
        if quoted := self.match(_QUOTED):
            return Words(quoted.group(1).strip())
        args, ops = [self.sets()], []
        while op := self.relation():
            ops.append(op)
            args.append(self.sets())
        self.skip()
        return Chain(tuple(args), tuple(ops)) if ops else args[0]

    def sets(self) -> Node:
        node = self.ratio()
        while True:
            token = self.peek()
            if token not in SET_OPS and not (token == "U" and _UNION_LETTER.match(self.text, self.at)):
                return node
            self.at += len(token)
            node = Op(SET_OPS.get(token, "cup"), (node, self.ratio()))

    def ratio(self) -> Node:
        parts = [self.sum()]
        while self.peek() in (":", r"\colon") and self.text[self.at + 1 : self.at + 2] != "=" and self.brackets >= 0:
            if self.in_builder:
                break
            self.at += len(self.peek())
            parts.append(self.sum())
        return parts[0] if len(parts) == 1 else Op("ratio", tuple(parts))

    in_builder = False

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def sum(self) -> Node:
        terms = [self.term()]
        while True:
            token = self.peek()
            if token == "+":
                self.at += 1
                terms.append(self.term())
            elif token == "-" and not (self.text[self.at + 1 : self.at + 2].isalpha() and self.is_unit_ahead(1)):
                self.at += 1
                terms.append(Op("neg", (self.term(),)))
            elif token in (r"\pm", r"\mp"):
                self.at += 3
                first = terms[0] if len(terms) == 1 else Op("add", tuple(terms))
                terms = [Op(token[1:], (first, self.term()))]
            else:
                return terms[0] if len(terms) == 1 else Op("add", tuple(terms))

    def is_unit_ahead(self, offset: int) -> bool:
        found = re.compile(r"[A-Za-z]+").match(self.text, self.at + offset)
        return found is not None and not is_math_word(found.group()) and len(found.group()) > 1

    def term(self) -> Node:
        sign = ""
        while self.peek() in ("-", "+", r"\pm", r"\mp"):
            token = self.peek()
            self.at += len(token)
            if token == "-":
                sign = "" if sign == "neg" else "neg"
            elif token != "+":
                rest = self.term()
                return Op(token[1:], (Num(Fraction(0)), rest))
        factors = [self.power()]
        while True:
            token = self.peek()
            if token in ("*", r"\cdot", r"\times", r"\ast", r"\star") or (token == "x" and self.is_times()):
                self.at += len(token)
                self.accept("*")
                factors.append(self.signed_power())
            elif token in ("/", r"\div"):
                self.at += len(token)
                factors.append(Op("inv", (self.signed_power(),)))
            elif self.starts_factor(token):
                if isinstance(factors[-1], Num) and (token.isdigit() or token == "."):
                    raise Unreadable("two numbers side by side")
                factors.append(self.power())
            else:
                break
        node = factors[0] if len(factors) == 1 else Op("mul", tuple(factors))
        return Op("neg", (node,)) if sign else node

    def is_times(self) -> bool:
        """`2 x 10^3`: a cross between two numbers."""
        before = self.text[: self.at].rstrip()[-1:]
        return before.isdigit() and re.match(r"x\s+\d", self.text[self.at :]) is not None

    def signed_power(self) -> Node:
        if self.accept("-"):
            return Op("neg", (self.power(),))
        self.accept("+")
        return self.power()

    def starts_factor(self, token: str) -> bool:
        if not token or token in "+-*/=<>,;:!)]}&^_%'\"":
            return False
        if token == "|":
            return self.bars == 0 and not self.in_builder
        if token == "[":
            return False
        if token.isalpha():
            return self.reads_as_math(self.word())
        if token[0] == "\\" and len(token) > 1:
            if token in RELATIONS or token in SET_OPS or token in (r"\}", r"\{", r"\%", r"\\", r"\&"):
                return False
            return token not in (
                *(r"\rangle", r"\rfloor", r"\rceil", r"\end", r"\mid", r"\pm", r"\mp", r"\to", r"\colon", r"\land"),
                *(
                    r"\lor",
                    r"\wedge",
                    r"\vee",
                    r"\choose",
                    r"\ldots",
                    r"\dots",
                    r"\cdots",
                    r"\pmod",
                    r"\bmod",
                    r"\circ",
                ),
            )
        return token.isdigit() or token in "({."

    def reads_as_math(self, word: str) -> bool:
        """Whether letters here are variables or a function, not a unit, a connective or a sentence."""
        lower = word.lower()
        if lower in CONNECTIVES:
            return False
        if lower in FUNCTIONS or lower in CONSTANTS or word in GREEK or len(word) == 1:
            return True
        if lower.startswith("sqrt"):
            return True
        if lower in UNITS:
            return False
        if any(set(word) <= letters for letters in _PRODUCTS):
            return True
        return is_math_word(word)

    def power(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("nested too deeply")
        node = self.primary()
        for _ in range(6):
            token = self.peek()
            if token == "^":
                self.at += 1
                node = self.exponent(node)
            elif token == "!" and self.text[self.at + 1 : self.at + 2] != "=":
                self.at += 1
                node = Op("fact", (node,))
            elif token in ("%", r"\%", r"\percent"):
                self.at += len(token)
                node = Op("pct", (node,))
            elif token == r"\degree":
                self.at += len(token)
                node = Op("deg", (node,))
            elif token == "'" and isinstance(node, Name):
                self.at += 1
                node = Name(node.name + "'")
            else:
                break
        self.depth -= 1
        return node

    def exponent(self, base: Node) -> Node:
        braced = re.compile(
            r"\s*\{\s*\\(circ|prime|degree|top)\s*\}|\s*\\(circ|prime|degree|top)(?![a-z])|\s*\{?\s*(T)\s*\}?(?![A-Za-z])"
        )
        mark = braced.match(self.text, self.at)
        if mark:
            name = mark.group(1) or mark.group(2) or mark.group(3)
            if name in ("circ", "degree"):
                self.at = mark.end()
                return Op("deg", (base,))
            if name == "prime" and isinstance(base, Name):
                self.at = mark.end()
                return Name(base.name + "'")
            if name in ("T", "top") and isinstance(base, Grid):
                self.at = mark.end()
                return Grid(tuple(zip(*base.rows, strict=True)))
        if self.peek() == "{":
            return Op("pow", (base, self.braced()))
        negative = self.accept("-")
        self.accept("+")
        exponent = self.primary() if not self.peek().isalpha() else self.letter()
        if self.peek() == "^":  # towers without braces: from the right
            self.at += 1
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise TooLarge("nested too deeply")
            exponent = self.exponent(exponent)
            self.depth -= 1
        return Op("pow", (base, Op("neg", (exponent,)) if negative else exponent))

    def braced(self) -> Node:
        """A TeX argument: `{...}`, or one digit, letter or command."""
        token = self.peek()
        if token == "{":
            self.at += 1
            node = self.answer("}")
            self.expect("}")
            return node
        if token.isdigit():
            self.at += 1
            return Num(Fraction(int(token)), None, 1)
        if token.isalpha():
            return self.letter()
        if token.startswith("\\"):
            return self.primary()
        raise Unreadable(f"argument missing at {self.text[self.at : self.at + 20]!r}")

    # -- the smallest pieces -------------------------------------------------------------------------------------------

    def primary(self) -> Node:
        token = self.peek()
        if token.isdigit() or token == ".":
            return self.number()
        if token in ("(", "[", "{", r"\{", r"\langle"):
            return self.group(token)
        if token == "|":
            if self.bars > 4:
                raise TooLarge("nested too deeply")
            return self.absolute()
        if token.startswith("\\") and len(token) > 1:
            return self.command(token)
        if token.isalpha() and token.isascii():
            return self.letters()
        raise Unreadable(f"cannot start with {token!r}")

    def number(self) -> Node:
        node = self.literal()
        subscript = _SUBSCRIPT.match(self.text, self.at)
        if subscript and node.ulp is None:
            base = subscript.group(1) or subscript.group(2) or ""
            base = base.replace('"', "").strip()
            words = {
                "two": "2",
                "three": "3",
                "four": "4",
                "five": "5",
                "six": "6",
                "seven": "7",
                "eight": "8",
                "ten": "10",
            }
            base = words.get(base.lower(), base)
            if base.isdigit() and 2 <= int(base) <= 36:
                self.at = subscript.end()
                return Op("base", (node, Num(Fraction(int(base)))))
            raise Unreadable("a number with a subscript")
        if node.ulp is None and self.text.startswith("\\frac", self.at + (self.text[self.at : self.at + 1] == " ")):
            return self.mixed(node)
        return node

    def mixed(self, whole: Num) -> Node:
        start = self.at
        self.skip()
        fraction = self.primary()
        if isinstance(fraction, Op) and fraction.name == "mul":
            top, bottom = fraction.args[0], fraction.args[1]
            if isinstance(bottom, Op) and isinstance(top, Num) and isinstance(bottom.args[0], Num):
                numerator, denominator = top.value, bottom.args[0].value
                if 0 < numerator < denominator and numerator.denominator == denominator.denominator == 1:
                    return Num(whole.value + numerator / denominator)
        self.at = start
        return whole

    def letter(self) -> Node:
        self.skip()
        letter = self.text[self.at]
        self.at += 1
        return self.subscripted(letter)

    def subscripted(self, name: str) -> Name:
        found = _SUBSCRIPT.match(self.text, self.at)
        if found:
            self.at = found.end()
            name += "_" + re.sub(r"[\s\"{}\\]", "", found.group(1) or found.group(2) or "")
        return Name(name)

    def letters(self) -> Node:
        word = self.word()
        lower = word.lower()
        if not self.reads_as_math(word):
            raise Unreadable(f"a word: {word!r}")
        if len(word) == 1:
            return self.applied(self.letter())
        if lower in FUNCTIONS:
            self.at += len(word)
            return self.function(lower)
        if lower.startswith("sqrt"):
            self.at += 4
            return self.root()
        if lower in CONSTANTS:
            self.at += len(word)
            return Name(CONSTANTS[lower])
        if word in GREEK:
            self.at += len(word)
            return self.subscripted(word)
        return self.letter()  # `xy`: the rest follows as an implicit factor, so that `xy^2` is x times y squared

    def applied(self, name: Node) -> Node:
        """`f(x)`: a function's value, kept apart from a product so that `f(x) = ...` is seen as a definition."""
        if isinstance(name, Name) and name.name[0] in "fghFGHPQpqTSVA" and self.text[self.at : self.at + 1] == "(":
            inside = re.match(r"\(\s*[a-zA-Z0-9,+\- ]{1,12}\)", self.text[self.at :])
            if inside and (name.name[0] in "fgh" or re.fullmatch(r"\(\s*[a-z]\s*\)", inside.group())):
                argument = self.group("(")
                arguments = argument.items if isinstance(argument, Group) else (argument,)
                return Op("apply", (name, *arguments))
        return name

    def group(self, opening: str) -> Node:
        self.at += len(opening)
        self.brackets += opening != "{"
        bars, self.bars = self.bars, 0
        builder, self.in_builder = self.in_builder, opening == r"\{" or (opening == "{" and self.depth <= 2)
        if opening in (r"\{", "{") and self.peek() in (r"\}", "}"):
            self.at += len(self.peek())
            self.bars, self.in_builder = bars, builder
            self.brackets -= opening != "{"
            return Name("∅")
        node = self.answer("")
        token = self.peek()
        if self.in_builder and token in ("|", ":", r"\mid", r"\colon"):
            self.at += len(token)
            self.in_builder = False
            node = Builder(node, self.answer(""))
            token = self.peek()
        self.bars, self.in_builder = bars, builder
        self.brackets -= opening != "{"
        if token == r"\choose" and opening == "{":
            self.at += len(token)
            node = Op("binom", (node, self.answer("")))
            token = self.peek()
        closes = {"(": (")", "]"), "[": (")", "]"), "{": ("}", r"\}"), r"\{": (r"\}", "}"), r"\langle": (r"\rangle",)}[
            opening
        ]
        if token not in closes:
            raise Unreadable(f"{opening!r} is not closed")
        self.at += len(token)
        if isinstance(node, Builder):
            return node
        bare = isinstance(node, Group) and not node.opening
        if opening in ("(", "[") and (bare or {opening, token} not in ({"(", ")"}, {"[", "]"})):
            items = node.items if isinstance(node, Group) and bare else (node,)
            return Group(opening, token, items)
        if opening == r"\langle":
            return Group("(", ")", node.items if isinstance(node, Group) and bare else (node,))
        if opening == r"\{" or (opening == "{" and bare):
            return Group("{", "}", node.items if isinstance(node, Group) and bare else (node,))
        return node

    def absolute(self) -> Node:
        self.expect("|")
        self.bars += 1
        node = self.sum()
        self.expect("|")
        self.bars -= 1
        return Op("abs", (node,))

    def command(self, token: str) -> Node:
        self.at += len(token)
        if token == r"\frac":
            top = self.braced()
            bottom = self.braced()
            return Op("mul", (top, Op("inv", (bottom,))))
        if token == r"\sqrt":
            return self.root()
        if token in NAMES:
            name = NAMES[token]
            return Name(name) if name in ("pi", "oo", "i", "∅") else self.subscripted(name)
        if token[1:] in FUNCTIONS:
            return self.function(token[1:])
        if token in (r"\binom", r"\dbinom", r"\tbinom"):
            top = self.braced()
            return Op("binom", (top, self.braced()))
        if token in (r"\lfloor", r"\lceil"):
            node = self.sum()
            self.expect(token.replace("\\l", "\\r"))
            return Op("floor" if "floor" in token else "ceil", (node,))
        if token == r"\mathbb":
            self.expect("{")
            letter = self.letter()
            self.expect("}")
            return Name("set " + (letter.name if isinstance(letter, Name) else ""))
        if token in (r"\angle", r"\triangle"):
            if corners := self.match(_CORNERS):
                return Op("apply", (Name(token[1:]), Name(corners.group().strip())))
            return Op("apply", (Name(token[1:]), self.power()))
        if token in (r"\overline", r"\bar"):
            return Op("apply", (Name("bar"), self.braced()))
        if token == r"\begin":
            return self.environment()
        raise Unreadable(f"command {token}")

    def root(self) -> Node:
        degree: Node = Num(Fraction(2))
        if self.peek() == "[":
            self.at += 1
            degree = self.sum()
            self.expect("]")
        if self.peek() == "(":
            radicand = self.group("(")
        elif (
            self.text[self.at - 1 : self.at].isalpha()
            and self.text[self.at - 5 : self.at - 4] != "\\"
            and self.peek().isdigit()
        ):
            radicand = self.literal()  # plain "sqrt 12"
        else:
            radicand = self.braced()
        return Op("root", (radicand, degree))

    def function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        for _ in range(2):
            if self.peek() == "_":
                self.at += 1
                base = self.braced()
            elif self.peek() == "^":
                self.at += 1
                power = self.braced() if self.peek() != "-" else self.power_of_function()
        argument = self.argument()
        inverse = isinstance(power, Op) and power.name == "neg" and power.args[0] == Num(Fraction(1), None, 1)
        if inverse and name in ("sin", "cos", "tan", "cot"):
            name, power = "arc" + name, None
        arguments = argument.items if isinstance(argument, Group) and not base else (argument,)
        call = Op(name, (*arguments, base) if base is not None else arguments)
        return call if power is None else Op("pow", (call, power))

    def power_of_function(self) -> Node:
        self.expect("-")
        return Op("neg", (self.braced(),))

    def argument(self) -> Node:
        """What a function applies to: a bracket, or the factors up to the next operator or function."""
        if self.peek() in ("(", "["):
            return self.group(self.peek())
        if self.peek() == "{":
            return self.braced()
        factors = [self.power()]
        while self.starts_factor(self.peek()):
            token = self.peek()
            if token[1:] in FUNCTIONS or (token.isalpha() and self.word().lower() in FUNCTIONS) or token == "(":
                break
            factors.append(self.power())
        return factors[0] if len(factors) == 1 else Op("mul", tuple(factors))

    def environment(self) -> Node:
        found = re.compile(r"\s*\{([a-zA-Z]*matrix|array|cases)\*?\}(?:\s*\{[lcr| ]*\})?").match(self.text, self.at)
        if not found or found.group(1).startswith("v"):
            raise Unreadable("environment")
        self.at = found.end()
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        brackets, self.brackets = self.brackets, 0
        while True:
            token = self.peek()
            if token == r"\end":
                break
            if token == r"\\":
                self.at += 2
                if row:
                    rows.append(tuple(row))
                row = []
            elif token == "&":
                self.at += 1
            elif self.match(re.compile(r"\s*\\hline")):
                continue
            else:
                row.append(self.chain())
        if row:
            rows.append(tuple(row))
        self.brackets = brackets
        closing = re.compile(r"\\end\s*\{[a-zA-Z*]*\}").match(self.text, self.at)
        if not closing or not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable("a ragged or unclosed environment")
        self.at = closing.end()
        if found.group(1) == "cases":
            return Group("", "", tuple(item for row in rows for item in row[:1]))
        return Grid(tuple(rows))
