from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umad.reporting import svg
from umad.reporting.svg import Series, axis, line_chart, number, percent, share_bar, smooth, thin

NS = "{http://www.w3.org/2000/svg}"
VALUES = st.lists(st.floats(-1e9, 1e9).filter(lambda v: v == 0 or abs(v) > 1e-9), max_size=20)


def chart(*series: Series, **options: object) -> ET.Element:
    return ET.fromstring(line_chart("t", "d", list(series), x_label="step", ident="i", **options))  # type: ignore[arg-type]


@given(VALUES, st.booleans(), st.booleans())
def test_an_axis_holds_its_values_and_its_ticks(values: list[float], whole: bool, zero: bool) -> None:
    made = axis(values, whole=whole, zero=zero)
    assert made.low < made.high
    slack = 1e-9 * (made.high - made.low)
    assert all(made.low - slack <= value <= made.high + slack for value in (*values, *made.ticks))
    assert not whole or all(float(tick).is_integer() for tick in made.ticks)
    assert not (zero and values) or made.low <= 0 <= made.high
    assert len(made.ticks) <= 12


def test_ticks_are_round_numbers() -> None:
    assert axis([0.0, 1.0]).ticks == pytest.approx((0, 0.25, 0.5, 0.75, 1))
    assert axis([3.0, 98.0]).ticks == pytest.approx((0, 25, 50, 75, 100))
    assert axis([1, 2, 3], whole=True).ticks == (1, 2, 3)


def test_an_axis_ignores_what_is_not_finite() -> None:
    assert axis([math.nan, 0.0, math.inf, 1.0]) == axis([0.0, 1.0])
    assert axis([]).low < axis([]).high


def test_points_stand_where_their_values_are() -> None:
    made = chart(Series("a", [(0, 0.0), (10, 1.0)], marks="filled"))
    first, last = ((float(c.get("cx", "")), float(c.get("cy", ""))) for c in made.iter("circle"))
    assert first == pytest.approx((svg.LEFT + svg.INSET, svg.HEIGHT - svg.BOTTOM), abs=0.1)
    assert last == pytest.approx((svg.WIDTH - svg.RIGHT - svg.INSET, svg.TOP), abs=0.1)


def test_a_gap_breaks_the_line_and_a_lone_value_gets_a_mark() -> None:
    made = chart(Series("a", [(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, math.nan)]))
    (path,) = (p for p in made.iter("path") if "line" in (p.get("class") or ""))
    assert (path.get("d") or "").count("M") == 2
    assert len(list(made.iter("circle"))) == 1


def test_whiskers_are_drawn_at_marks_and_bands_without() -> None:
    bounds = [(1.0, 0.2, 0.4), (2.0, 0.3, 0.5)]
    kinds = {
        marks: [
            p.get("class") for p in chart(Series("a", [(1, 0.3), (2, 0.4)], marks=marks, low_high=bounds)).iter("path")
        ]
        for marks in ("filled", "none")
    }
    assert any("whisker" in (kind or "") for kind in kinds["filled"])
    assert any("band" in (kind or "") for kind in kinds["none"])


def test_charts_have_a_text_alternative_and_names_are_escaped() -> None:
    made = ET.fromstring(line_chart("<b>&", "in words", [Series('<script>"', [(1, 1.0)])], x_label="<x>", ident="here"))
    assert made.get("role") == "img"
    assert made.get("aria-labelledby") == "here-t here-d"
    assert [made.findtext("title"), made.findtext("desc")] == ["<b>&", "in words"]
    assert not list(made.iter("script"))


@pytest.mark.parametrize("points", [[], [(1.0, None)], [(1.0, math.nan)]])
def test_a_chart_of_nothing_is_still_a_chart(points: list[svg.Point]) -> None:
    assert chart(Series("a", points)).get("role") == "img"


def test_long_lines_are_thinned_by_means_that_keep_the_ends_close() -> None:
    points: list[svg.Point] = [(float(i), float(i)) for i in range(10_000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert all(x == y for x, y in thinned)
    assert thinned[0][0] < 100
    assert thinned[-1][0] > 9_899


def test_thinning_keeps_gaps_and_takes_means_over_known_values() -> None:
    assert thin([(0, 1.0), (1, None), (2, None), (3, math.nan)], 2) == [(0.5, 1.0), (2.5, None)]


def test_smoothing_is_a_trailing_mean_over_known_values() -> None:
    assert smooth([(1, 1.0), (2, None), (3, 3.0), (4, 5.0)], 2) == [(1, 1.0), (2, None), (3, 2.0), (4, 4.0)]


def test_shares_fill_the_bar_in_proportion() -> None:
    made = ET.fromstring(share_bar("t", "d", [("a", 3.0, 1), ("b", 1.0, 2)], ident="i"))
    first, second = (float(r.get("x", "")) for r in made.iter("rect"))
    assert (first, second) == (0.0, 540.0)
    assert [r.findtext("title") for r in made.iter("rect")] == ["a: 75.0%", "b: 25.0%"]


def test_numbers_are_written_as_people_write_them() -> None:
    assert [number(v) for v in (None, math.nan, 0, 12345, 0.7134, 2.1e-6, 123.456)] == [
        *("–", "–", "0", "12,345", "0.713", "2.1e-06", "123.5")
    ]
    assert [percent(v) for v in (None, 0.1234, math.nan)] == ["–", "12.3%", "–"]


def test_an_axis_survives_values_whose_distance_overflows() -> None:
    made = axis([-1.7e308, 0.0, 1.0, 1.7e308])
    assert made.low <= 0
    assert 1 <= made.high < 10
