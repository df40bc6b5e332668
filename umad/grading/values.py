"""Numbers behind expressions: exact fractions where possible, else 40 digits.

An expression with free variables is evaluated at fixed points that depend on the variables' names only; two expressions
that agree there to 20 digits are the same for all practical purposes (Schwartz-Zippel). Every operation is bounded
before it is done, so that no tower, factorial or product costs more than microseconds: `TooLarge` is raised instead.
"""

from __future__ import annotations

import hashlib
import math
import threading
from fractions import Fraction
from functools import lru_cache
from typing import Any

from umad.grading.nodes import Name, Node, Num, Op, TooLarge, Unreadable

DIGITS = 40
MAX_BITS = 8_192
"""Bits of an exact numerator or denominator (2,466 decimal digits)."""
MAX_MAGNITUDE = 100_000
"""Largest binary exponent of an inexact value."""

Value = Any  # Fraction, or a complex of the thread's mpmath context
_local = threading.local()


def context() -> Any:
    """This thread's mpmath context: its precision is state, so threads must not share one."""
    ctx = getattr(_local, "ctx", None)
    if ctx is None:
        import mpmath  # type: ignore[import-untyped]

        ctx = _local.ctx = mpmath.MPContext()
        ctx.dps = DIGITS
    return ctx


class Undefined(Exception):
    """Division by zero, log 0, and the like: no value."""


@lru_cache(maxsize=4096)
def _point(name: str, point: int) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{name}/{point}".encode("utf-8", "replace"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big") | 1


def _variable(name: str, point: int) -> Value:
    """A value in (0.4, 2.4) from the name; at point 2 its sign may be minus, so that |x| and x differ there."""
    first, second = _point(name, point)
    ctx = context()
    value = ctx.mpf("0.4") + 2 * (ctx.mpf(first) + ctx.mpf(second) / 2**64) / 2**64
    return -value if point == 2 and second & 2 else value


def _exact(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooLarge("a number with too many digits")
    return value


def _bounded(value: Value) -> Value:
    ctx = context()
    for part in (value.real, value.imag):
        if ctx.isnan(part) or ctx.isinf(part):
            raise Undefined
        if part and abs(ctx.mag(part)) > MAX_MAGNITUDE:
            raise TooLarge("a number out of range")
    return value


def inexact(value: Value) -> Value:
    if isinstance(value, Fraction):
        ctx = context()
        return ctx.mpf(value.numerator) / value.denominator
    return value


def evaluate(node: Node, point: int = 0, bump: bool = False) -> Value:
    """The value of an expression at one of the points 0, 1, 2.

    With `bump` every literal that has decimals is taken one unit in its last place higher: the difference to the plain
    value is what rounding may have done.
    """
    if isinstance(node, Num):
        return node.value + node.ulp if bump and node.ulp is not None else node.value
    if isinstance(node, Name):
        return _named(node.name, point)
    if not isinstance(node, Op):
        raise Unreadable(type(node).__name__)
    name, args = node.name, node.args
    if name == "base":
        return Fraction(in_base(args[0], args[1]))
    if name in _TRIGONOMETRIC and isinstance(args[0], Op) and args[0].name == "deg":
        ctx = context()
        angle = inexact(evaluate(args[0].args[0], point, bump)) * ctx.pi / 180
        return _function(name, [angle])
    return _apply(name, [evaluate(arg, point, bump) for arg in args], point)


def _named(name: str, point: int) -> Value:
    ctx = context()
    if name == "pi":
        return +ctx.pi
    if name == "e":
        return +ctx.e
    if name == "i":
        return ctx.mpc(0, 1)
    return _variable(name, point)


def in_base(digits: Node, base: Node) -> int:
    """The value of `1011_2`; the digits were read as a decimal literal."""
    if not isinstance(digits, Num) or not isinstance(base, Num):
        raise Unreadable("base")
    text = str(digits.value)
    try:
        return int(text, int(base.value))
    except ValueError:
        raise Undefined from None


def _apply(name: str, values: list[Value], point: int) -> Value:
    exact = all(isinstance(value, Fraction) for value in values)
    if name == "add":
        return _sum(values)
    if name == "mul":
        return _product(values)
    if name == "neg":
        return -values[0]
    if name == "inv":
        if values[0] == 0:
            raise Undefined
        return _exact(1 / values[0]) if exact else _bounded(1 / values[0])
    if name == "pow":
        return power(values[0], values[1])
    if name == "root":
        return _root(values[0], values[1])
    if name == "fact":
        return _factorial(values[0])
    if name == "deg":
        return values[0]
    if name == "pct":
        return values[0] / 100
    if name == "ratio" and len(values) == 2:
        return _apply("mul", [values[0], _apply("inv", [values[1]], point)], point)
    if name == "apply":
        return _product(values) + inexact(values[0])
    if name in ("pm", "mp", "cup", "cap", "setminus", "ratio"):
        raise Unreadable(name)
    return _function(name, values)


def _sum(values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        if isinstance(total, Fraction) and isinstance(value, Fraction):
            total = _exact(total + value)
        else:
            total = _bounded(inexact(total) + inexact(value))
    return total


def _product(values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        if isinstance(total, Fraction) and isinstance(value, Fraction):
            total = _exact(total * value)
        else:
            total = _bounded(inexact(total) * inexact(value))
    return total


def _log2(value: Value) -> float:
    """A rough binary logarithm of |value|, never an overflow."""
    if isinstance(value, Fraction):
        return value.numerator.bit_length() - value.denominator.bit_length() + 1
    ctx = context()
    return float(ctx.mag(value)) if value else 0.0


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent, the principal value; exact for whole exponents and for roots that come out even."""
    ctx = context()
    if base == 0:
        if exponent == 0:
            return Fraction(1)
        if inexact(exponent).real <= 0:
            raise Undefined
        return Fraction(0)
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if abs(exponent) > MAX_MAGNITUDE and base not in (1, -1):
            raise TooLarge("a power out of range")
        if exponent.denominator == 1:
            if base in (1, -1):
                return base if exponent.numerator % 2 else Fraction(1)
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if bits * abs(exponent.numerator) > 2 * MAX_BITS:
                raise TooLarge("a power with too many digits")
            return _exact(base**exponent.numerator)
        if base > 0 and exponent.denominator <= 64:
            root = _exact_root(base, exponent.denominator)
            if root is not None:
                return power(root, Fraction(exponent.numerator))
    size = abs(_log2(exponent))
    if size > 40 and _log2(exponent) > 0:
        raise TooLarge("a power out of range")
    base, exponent = inexact(base), inexact(exponent)
    if abs(exponent) * (abs(_log2(base)) + 8) > MAX_MAGNITUDE:
        raise TooLarge("a power out of range")
    return _bounded(ctx.power(base, exponent))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    top, bottom = _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 2:
        root = math.isqrt(value)
    else:
        if value.bit_length() > 1024:
            return None
        ctx = context()
        root = int(ctx.nint(ctx.root(ctx.mpf(value), degree))) if value.bit_length() < 120 else 0
    return root if root**degree == value else None


def _root(radicand: Value, degree: Value) -> Value:
    if degree == 0:
        raise Undefined
    if isinstance(radicand, Fraction) and isinstance(degree, Fraction) and degree.denominator == 1:
        if radicand < 0 and degree % 2 == 1:  # the real root, as answers mean it
            return -_root(-radicand, degree)
        if radicand < 0 and degree == 2:
            ctx = context()
            return ctx.mpc(0, 1) * inexact(_root(-radicand, degree))
    if isinstance(degree, Fraction):
        return power(radicand, 1 / degree)
    return power(radicand, 1 / inexact(degree))


def _factorial(value: Value) -> Value:
    if not isinstance(value, Fraction):
        ctx = context()
        if abs(value) > 200:
            raise TooLarge("a factorial out of range")
        return _bounded(ctx.gamma(value + 1))
    if value.denominator != 1 or value < 0:
        raise Undefined
    if value > 900:
        raise TooLarge("a factorial with too many digits")
    return _exact(Fraction(math.factorial(value.numerator)))


_TRIGONOMETRIC = frozenset(["sin", "cos", "tan", "cot", "sec", "csc"])
_WHOLE = frozenset(("floor", "ceil", "binom", "gcd", "lcm", "max", "min", "abs"))


def _function(name: str, values: list[Value]) -> Value:
    if name in _WHOLE:
        return _whole_function(name, values)
    ctx = context()
    if name in ("log", "ln", "lg", "log10"):
        return _logarithm(name, values)
    if name == "exp":
        return power(+ctx.e, values[0])
    if name in ("sqrt", "cbrt"):
        return _root(values[0], Fraction(2 if name == "sqrt" else 3))
    if len(values) != 1:
        raise Unreadable(name)
    x = inexact(values[0])
    if _log2(x) > 200:
        raise TooLarge("an angle out of range")
    if name in ("sinh", "cosh", "tanh", "coth") and abs(x) > 10_000:
        raise TooLarge("a value out of range")
    aliases = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}
    function = getattr(ctx, aliases.get(name, name), None)
    if function is None or name not in _ANALYTIC:
        raise Unreadable(name)
    try:
        value = function(x)
    except (ZeroDivisionError, ValueError):
        raise Undefined from None
    if ctx.mag(value) > 100:  # tan(pi/2) in 40 digits
        raise Undefined
    return _bounded(value)


_ANALYTIC = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "arccot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "coth",
    ]
)


def _logarithm(name: str, values: list[Value]) -> Value:
    """`log` without a base is natural, as `ln`; answers that mean base 10 say so or are plain numbers."""
    ctx = context()
    if any(value == 0 for value in values):
        raise Undefined
    result = ctx.log(inexact(values[0]))
    if name in ("lg", "log10"):
        return result / ctx.log(10)
    if len(values) > 1:
        below = ctx.log(inexact(values[1]))
        if below == 0:
            raise Undefined
        result = result / below
        nearest = ctx.nint(result.real)
        if abs(result - nearest) < ctx.mpf(10) ** -(DIGITS - 8):
            return Fraction(int(nearest))
    return _bounded(result)


def _falling(n: Value, k: int) -> Value:
    """n (n - 1) ... (n - k + 1) / k!, for any n."""
    return _product([n - step for step in range(k)]) / math.factorial(k)


def _whole_function(name: str, values: list[Value]) -> Value:
    ctx = context()
    if name == "abs":
        return abs(values[0])
    if name in ("floor", "ceil"):
        value = values[0]
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
        if value.imag or _log2(value) > 100:
            raise Unreadable(name)
        nearest = ctx.nint(value.real)
        if abs(value.real - nearest) < ctx.mpf(10) ** -(DIGITS - 10):
            return Fraction(int(nearest))
        return Fraction(int(ctx.floor(value.real) if name == "floor" else ctx.ceil(value.real)))
    if name in ("max", "min") and values:
        if any(inexact(value).imag for value in values):
            raise Unreadable(name)
        return (max if name == "max" else min)(values, key=lambda value: inexact(value).real)
    if name == "binom" and not isinstance(values[0], Fraction) and values[1] in range(1, 21):
        return _falling(values[0], int(values[1]))
    if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
        return _product(values) + len(name) + inexact(values[0])  # a fingerprint: same arguments, same value
    numbers = [value.numerator for value in values]
    if name == "binom":
        n, k = numbers
        if not 0 <= k <= n:
            return Fraction(0)
        if min(k, n - k) * max(n.bit_length(), 1) > MAX_BITS:
            raise TooLarge("a binomial coefficient with too many digits")
        return _exact(Fraction(math.comb(n, k)))
    return Fraction(math.gcd(*numbers) if name == "gcd" else math.lcm(*numbers))


# --- text of values ---------------------------------------------------------------------------------------------------


_ZERO = 1e-30  # what 40 digits leave of an exact zero


def number_text(value: Value) -> str:
    """A value as text: whole numbers exactly, anything else to 20 significant digits; equal text is equal value."""
    if isinstance(value, Fraction):
        return str(value.numerator) if value.denominator == 1 else _real_text(inexact(value))
    real, imaginary = value.real, value.imag
    noise = max(abs(real), abs(imaginary)) * context().mpf(10) ** -20
    real = real if abs(real) > max(noise, _ZERO) else context().mpf(0)
    imaginary = imaginary if abs(imaginary) > max(noise, _ZERO) else context().mpf(0)
    return _real_text(real) if not imaginary else f"{_real_text(real)},{_real_text(imaginary)}i"


def _real_text(value: Value) -> str:
    ctx = context()
    if not value:
        return "0"
    nearest = ctx.nint(value)
    if nearest and abs(value) < 10**20 and abs(value - nearest) <= abs(value) * ctx.mpf(10) ** -20:
        return str(int(nearest))
    text: str = ctx.nstr(value, 20, min_fixed=-5, max_fixed=21)
    return text


def names_in(node: Node) -> set[str]:
    """Free names: variables and infinity, without pi, e and i."""
    if isinstance(node, Name):
        return set() if node.name in ("pi", "e", "i") else {node.name}
    if isinstance(node, Op):
        found: set[str] = set()
        for arg in node.args:
            found |= names_in(arg)
        return found
    return set()


def literals_in(node: Node) -> list[Num]:
    if isinstance(node, Num):
        return [node]
    if isinstance(node, Op):
        return [literal for arg in node.args for literal in literals_in(arg)]
    return []


def has_operation(node: Node, name: str) -> bool:
    return isinstance(node, Op) and (node.name == name or any(has_operation(arg, name) for arg in node.args))
