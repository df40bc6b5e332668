"""Charts as inline SVG, made of small pure functions: numbers in, markup out. Colours come from the page's style sheet.

Every chart is `role="img"` with a title and a description; the report puts a table of its numbers under it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from markupsafe import Markup

WIDTH, HEIGHT = 340, 220
"""User units of one panel; about the pixels that it gets, so that text keeps its size on a phone."""
LEFT, RIGHT, TOP, BOTTOM = 44, 4, 10, 34
INSET = 10
"""Room between the plot's edges and its first and last x."""
MAX_POINTS = 240
"""Points of one line; longer ones are averaged in equal pieces."""

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y), y None where nothing is known, which leaves a gap.

    `colour` 1 to 8 picks from the palette, 0 is neutral. `low_high` are intervals (x, low, high), drawn as whiskers where
    marks are drawn and as a band elsewhere. `dodge` moves all of it sideways by so many units, so that whiskers of two
    series do not cover each other. `faint` values are drawn thin behind the line (what was smoothed).
    """

    name: str
    points: Sequence[Point]
    colour: int = 1
    dash: Literal["solid", "dashed", "dotted"] = "solid"
    marks: Literal["none", "filled", "hollow"] = "none"
    low_high: Sequence[tuple[float, float, float]] = field(default_factory=tuple)
    faint: Sequence[Point] = field(default_factory=tuple)
    dodge: float = 0.0


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float, start: float, end: float) -> float:
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def axis(values: Iterable[float], *, count: int = 4, whole: bool = False, zero: bool = False) -> Axis:
    """An axis over finite `values` with round ticks at a distance of 1, 2, 2.5 or 5 times a power of ten.

    `whole`: ticks at whole numbers only. `zero`: the axis starts at 0 (or below, for negative values).
    """
    # beyond 1e300 the distance between two values can overflow
    known = [value for value in values if math.isfinite(value) and abs(value) <= 1e300]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        pad = 0.5 if whole else abs(high) * 0.1 or 1.0
        low, high = low if zero and low == 0 else low - pad, high + pad
    step = _step(high - low, count)
    if whole:
        step = max(1.0, math.ceil(step))
    if not whole:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    ticks = tuple(i * step for i in range(first, math.floor(high / step + 1e-9) + 1))
    return Axis(low, high, ticks)


def _step(span: float, count: int) -> float:
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if rough <= power * m * (1 + 1e-9))


def number(value: float | None, digits: int = 3) -> str:
    """A number as people write it: 12,345 · 0.713 · 2.1e-06; a dash for nothing or NaN."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 10 ** -(digits + 1) or abs(value) >= 1e9:
        return f"{value:.2g}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.{digits if abs(value) < 10 else 1}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points, each the mean of an equal piece; pieces with no known value stay gaps."""
    if len(points) <= limit:
        return list(points)
    made: list[Point] = []
    for i in range(limit):
        piece = points[i * len(points) // limit : (i + 1) * len(points) // limit]
        known = [y for _, y in piece if y is not None and math.isfinite(y)]
        made.append((sum(x for x, _ in piece) / len(piece), sum(known) / len(known) if known else None))
    return made


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Trailing mean over the last `window` known values; a gap stays a gap."""
    made: list[Point] = []
    recent: list[float] = []
    for x, y in points:
        if y is None or not math.isfinite(y):
            made.append((x, None))
            continue
        recent.append(y)
        del recent[:-window]
        made.append((x, sum(recent) / len(recent)))
    return made


def line_chart(
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    x_label: str,
    as_percent: bool = False,
    whole_x: bool = True,
    zero: bool = False,
    y_axis: Axis | None = None,
    ident: str,
) -> str:
    """A panel of lines. `ident` must be unique in the page; `y_axis` fixes the scale so that panels can be compared."""
    x = axis((x for s in series for x, _ in (*s.points, *s.faint)), count=5, whole=whole_x)
    y = y_axis or axis(y_values(series), zero=zero)
    parts = [_frame(x, y, x_label, as_percent)]
    parts += [_faint(s, x, y) for s in series if s.faint]
    parts += [_dodged(_interval(s, x, y), s.dodge) for s in series if s.low_high]
    parts += [_dodged(_line(s, x, y, as_percent), s.dodge) for s in series]
    return _svg("".join(parts), title, description, ident, WIDTH, HEIGHT)


def y_values(series: Sequence[Series]) -> list[float]:
    """Everything that the y axis of these series has to hold."""
    values = [y for s in series for _, y in (*thin(s.points), *thin(s.faint)) if y is not None]
    return values + [bound for s in series for _, low, high in s.low_high for bound in (low, high)]


def share_bar(title: str, description: str, parts: Sequence[tuple[str, float, int]], *, ident: str) -> str:
    """One bar cut into shares (name, value, colour); values are positive and need not sum to 1."""
    total = sum(value for _, value, _ in parts)
    width, height, at, made = 720.0, 34.0, 0.0, []
    for name, value, colour in parts:
        size = width * value / total if total > 0 else 0.0
        gap = min(1.5, size / 2)
        label = f"{escape(name)}: {percent(value / total if total else None)}"
        made.append(
            f'<rect class="f{colour}" x="{at:.2f}" y="0" width="{max(size - gap, 0.3):.2f}" height="{height:.0f}" rx="2">'
            f"<title>{label}</title></rect>"
        )
        at += size
    return _svg("".join(made), title, description, ident, int(width), int(height), stretch=True)


def _svg(body: str, title: str, description: str, ident: str, width: int, height: int, stretch: bool = False) -> str:
    ratio = ' preserveAspectRatio="none"' if stretch else ""
    return (
        f'<svg class="{"share" if stretch else "chart"}" viewBox="0 0 {width} {height}" role="img"{ratio} '
        f'aria-labelledby="{ident}-t {ident}-d"><title id="{ident}-t">{escape(title)}</title>'
        f'<desc id="{ident}-d">{escape(description)}</desc>{body}</svg>'
    )


def _dodged(markup: str, by: float) -> str:
    return f'<g transform="translate({by:g} 0)">{markup}</g>' if by and markup else markup


def _at(point: tuple[float, float], x: Axis, y: Axis) -> tuple[float, float]:
    return x.place(point[0], LEFT + INSET, WIDTH - RIGHT - INSET), y.place(point[1], HEIGHT - BOTTOM, TOP)


def _frame(x: Axis, y: Axis, x_label: str, as_percent: bool) -> str:
    parts = []
    for tick in y.ticks:
        _, at = _at((x.low, tick), x, y)
        label = percent(tick, _tick_digits(y.ticks, 100)) if as_percent else _tick_label(tick, y.ticks)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>')
    base = HEIGHT - BOTTOM
    for tick in x.ticks:
        at, _ = _at((tick, y.low), x, y)
        parts.append(f'<line class="axis" x1="{at:.1f}" y1="{base}" x2="{at:.1f}" y2="{base + 4}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{base + 15}" text-anchor="middle">{_tick_label(tick, x.ticks)}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>')
    parts.append(f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    return f'<g aria-hidden="true">{"".join(parts)}</g>'


def _tick_digits(ticks: Sequence[float], scale: float = 1.0) -> int:
    """Decimals that keep neighbouring ticks apart."""
    gap = (ticks[1] - ticks[0]) * scale if len(ticks) > 1 else 1.0
    return next((d for d in range(7) if abs(round(gap, d) - gap) < 1e-6 * gap), 6)


def _tick_label(tick: float, ticks: Sequence[float]) -> str:
    digits = _tick_digits(ticks)
    largest = max(map(abs, ticks))
    if digits > 4 or largest >= 1e6:
        return "0" if abs(tick) < 1e-12 * largest else f"{tick:.3g}".replace("-", "−")
    return f"{tick:,.{digits}f}".replace("-", "−") if abs(tick) > 1e-9 * largest else "0"


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Stretches of known values."""
    made: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None or not math.isfinite(y):
            made.append([])
        else:
            made[-1].append((x, y))
    return [run for run in made if run]


def _path(run: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in (_at(point, x, y) for point in run))


def _faint(s: Series, x: Axis, y: Axis) -> str:
    path = "".join(_path(run, x, y) for run in _runs(thin(s.faint)))
    return f'<path class="faint s{s.colour}" d="{path}"/>' if path else ""


def _interval(s: Series, x: Axis, y: Axis) -> str:
    known = [(at, low, high) for at, low, high in s.low_high if math.isfinite(low) and math.isfinite(high)]
    if not known:
        return ""
    if s.marks == "none":
        edge = [(at, high) for at, _, high in known] + [(at, low) for at, low, _ in reversed(known)]
        return f'<path class="band f{s.colour}" d="{_path(edge, x, y)}Z"/>'
    parts = []
    for at, low, high in known:
        (a, top), (_, bottom) = _at((at, high), x, y), _at((at, low), x, y)
        parts.append(f"M{a:.1f} {top:.1f}V{bottom:.1f}M{a - 3:.1f} {top:.1f}h6M{a - 3:.1f} {bottom:.1f}h6")
    return f'<path class="whisker s{s.colour}" d="{"".join(parts)}"/>'


def _line(s: Series, x: Axis, y: Axis, as_percent: bool) -> str:
    runs = _runs(thin(s.points))
    path = "".join(_path(run, x, y) for run in runs)
    parts = [f'<path class="line {s.dash} s{s.colour}" d="{path}"/>'] if path else []
    # a value between two gaps has no line and would be lost without a mark
    marked = [p for run in runs for p in run if s.marks != "none" or len(run) == 1]
    for point in marked:
        a, b = _at(point, x, y)
        value = percent(point[1]) if as_percent else number(point[1])
        kind = "hollow" if s.marks == "hollow" else "filled"
        parts.append(
            f'<circle class="mark {kind} s{s.colour} f{s.colour}" cx="{a:.1f}" cy="{b:.1f}" r="3.6">'
            f"<title>{escape(s.name)}, {number(point[0])}: {value}</title></circle>"
        )
    return "".join(parts)


def swatch(s: Series) -> Markup:
    """A sample of a line for a legend."""
    mark = (
        f'<circle class="mark {s.marks} s{s.colour} f{s.colour}" cx="13" cy="6" r="3.6"/>' if s.marks != "none" else ""
    )
    return Markup(
        f'<svg class="swatch" viewBox="0 0 26 12" width="26" height="12" aria-hidden="true">'
        f'<path class="line {s.dash} s{s.colour}" d="M1 6H25"/>{mark}</svg>'
    )
