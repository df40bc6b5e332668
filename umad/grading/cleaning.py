"""From what models write to a small, regular subset of LaTeX. Every step is one linear pass."""

from __future__ import annotations

import re
import unicodedata

MAX_LENGTH = 2_000
"""Characters. A longer "answer" is compared as text only: no final answer is that long, and bombs are."""

_UNICODE = {
    **dict.fromkeys("−–—‒﹣－", "-"),
    **dict.fromkeys("×⋅·∙•∗✕", "*"),
    **dict.fromkeys("÷∕⁄／", "/"),
    **dict.fromkeys("≤⩽", r"\le "),
    **dict.fromkeys("≥⩾", r"\ge "),
    **dict.fromkeys("°º˚", r"^\circ "),
    **dict.fromkeys('“”„"«»', " "),
    **dict.fromkeys("‘’′", "'"),
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∈": r"\in ",
    "∉": r"\notin ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∖": r"\setminus ",
    "∞": r"\infty ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3]",
    "±": r"\pm ",
    "∓": r"\mp ",
    "→": r"\to ",
    "⇒": r"\implies ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "∅": r"\emptyset ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "％": "%",
    "π": r"\pi ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "λ": r"\lambda ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "€": "",
    "£": "",
    "¥": "",
}
_FRACTION_SIGNS = {"½": "1 2", "⅓": "1 3", "⅔": "2 3", "¼": "1 4", "¾": "3 4", "⅕": "1 5", "⅖": "2 5", "⅗": "3 5"}
_FRACTION_SIGNS |= {"⅘": "4 5", "⅙": "1 6", "⅚": "5 6", "⅛": "1 8", "⅜": "3 8", "⅝": "5 8", "⅞": "7 8"}
_TRANSLATE = str.maketrans(
    _UNICODE | {sign: f"\\frac{{{pair[0]}}}{{{pair[2]}}}" for sign, pair in _FRACTION_SIGNS.items()}
)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

# "\f", "\t", "\b", "\r", "\n", "\v", "\a" of \frac, \text, ... that some tool read as escapes
_BROKEN_ESCAPES = re.compile(
    "\x0c(?=rac)|\t(?=ext|imes|frac|heta|an(?![a-z])|o(?![a-z])|extbf)|\x08(?=eta|inom|egin|ar|oxed)|\r(?=ight|ho|angle|m)"
    "|\n(?=eq(?![a-z]))|\x0b(?=ec)|\x07(?=lpha|pprox|ngle)"
)
_ESCAPE_LETTERS = {"\x0c": "\\f", "\t": "\\t", "\x08": "\\b", "\r": "\\r", "\n": "\\n", "\x0b": "\\v", "\x07": "\\a"}

_SPACING = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|left|right|middle|[bB]igg?[lrm]?|quad|qquad|hspace\{[^{}]*\}"
    r"|phantom(?:\{[^{}]*\})?|thinspace|enspace|hfill|noindent|centering|tag\{[^{}]*\}|bf|it|rm)(?![a-z](?!_|\b))"
    r"|\\q?quad"
)
_DELIMITERS = re.compile(r"(?<!\\)\\(?:[()\[\],;:> /])|\\?\$|~|&nbsp;|\s")
_TEXT = re.compile(
    r"\\(?:text|mbox|textrm|textnormal|textbf|textit|textsf|texttt|mathrm|operatorname\*?|emph|hbox)\s*\{([^{}]*)\}"
)
_STYLED = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathcal|overrightarrow|vec|hat|underline|pmb)\s*(?=[{A-Za-z0-9\\])"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:,\s?\\!|\{,\}|\\,|\\!,|,\\,|\\ )\s*(?=\d{3}(?!\d))")
_ORDINAL = re.compile(r"(?<=\d)\s*\^\s*\{?\s*\"?(?:st|nd|rd|th)\"?\s*\}?(?![a-z])|(?<=\d)(?:st|nd|rd|th)\b")
_CONDITION = re.compile(r"\(\s*([a-z]\s*\\in(?![a-z])[^()]{1,60})\)")  # k\pi (k \in Z)
_CONNECTIVE = re.compile(r"[\s,;]*(and|or)[\s,;]*", re.I)


def _text_content(match: re.Match[str]) -> str:
    """Text inside a formula: a connective, a number or one letter is read as such; words are quoted."""
    content = match.group(1)
    stripped = content.strip()
    connective = _CONNECTIVE.fullmatch(stripped)
    if connective:
        return f" {connective.group(1).lower()} "
    if re.fullmatch(r"\(?[A-Za-z]\)?", stripped) or not any(map(str.isalpha, stripped)):
        return f" {content} "
    number = re.fullmatch(r"(-?[\d.,]+)\s+(.*)", stripped, re.S)
    lead = ""
    if number:
        lead, stripped = number.groups()
    else:
        joined = re.fullmatch(r"[,;]?\s*(and|or)\b\s+(.*)", stripped, re.S | re.I)
        if joined:
            lead, stripped = joined.groups()
    return f' {lead.lower()} "{stripped.replace(chr(34), " ")}" '


def repair_escapes(text: str) -> str:
    return _BROKEN_ESCAPES.sub(lambda match: _ESCAPE_LETTERS[match.group()], text)


def clean(text: str) -> str:
    """One answer without layout, delimiters, currency signs and look-alike characters.

    Words that came from `\\text{}` stand in double quotes afterwards. The caller checks the length.
    """
    text = repair_escapes(text).strip()
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
        text = _SUBSCRIPT.sub(lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", text)
        text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text).translate(_TRANSLATE)
        text = unicodedata.normalize("NFKC", text)
        text = "".join(c for c in text if c.isascii() or unicodedata.category(c)[0] not in "CM")
    else:
        text = text.replace('"', " ").replace("\0", "")
    if "\\" in text:
        if "\\\\" in text and "\\begin" not in text.replace("\\\\begin", ""):
            text = re.sub(r"\\\\(?=[A-Za-z{}$%,!;()\[\]])", r"\\", text)
        text = _THOUSANDS.sub("", text).replace("\\!", "")
        text = text.replace("\\$", " ").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").replace("\\#", "#")
        text = _SPACING.sub(" ", text)
        text = _TEXT.sub(_text_content, text)
        text = _STYLED.sub(" ", text)
        text = re.sub(r"\\[dtc]frac", r"\\frac", text)
        text = re.sub(r"\\[lr]?vert(?![a-z])", "|", text).replace("\\|", "|")
    else:
        text = _THOUSANDS.sub("", text)
    text = _ORDINAL.sub("", text)
    text = _CONDITION.sub(r", \1", text)
    text = _DELIMITERS.sub(" ", text)
    text = re.sub(r" {2,}", " ", text).strip()
    for arrow in ("\\implies", "\\Rightarrow", "\\Longrightarrow", "\\therefore"):
        if arrow in text:
            text = text.rpartition(arrow)[2].strip()
    text = re.sub(
        r"(?<![.\d])[.:,;]+$|(?<=\d)(?:\.{1,2}|[,;:]+)$|^(?:=|:|\\approx\b|\\in\b(?= ?\d))\s*", "", text
    ).strip()
    return text.rstrip("\\").strip() if text.endswith("\\") else text
