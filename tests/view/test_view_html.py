"""Elements, cards, tables and charts: well formed, inert, capped, and drawn where they should be."""

from __future__ import annotations

import html as std_html
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from view_oracle import ATTACKS, check

from nexrl_sdk.types import ConfigError
from nexrl_sdk.view import html as h


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_text_comes_back_as_it_went_in(text):
    page = check(str(h.el("p", text, title=text)))
    shown = h.plain(text)
    assert page.text == shown
    assert page.tags[0][1]["title"] == shown
    assert std_html.unescape(str(h.escape(text))) == shown or "\r" in text


@pytest.mark.parametrize("attack", ATTACKS, ids=[str(i) for i in range(len(ATTACKS))])
def test_attacks_are_inert_everywhere(attack):
    views = [
        h.card(attack, {attack or "k": attack, "list": [attack] * 3, "nested": {attack or "k": {"a": attack}}}, h.chip(attack, "bad", attack)),
        h.fragment(h.table([[attack, 1.0]] * 3, [attack, attack]), h.heading(attack), h.tile(attack, attack)),
        h.fragment(h.line_chart({attack: [(0, 1), (1, 2)], "b": [(0, 1)]}, attack, note=attack, x_name=attack[:50])),
    ]
    for view in views:
        check(str(view), limit=80_000)


def test_only_html_passes_unescaped():
    assert h.join("<b>", h.Html("<b>"), None, False, 0, ["x", ("y",)]) == "&lt;b&gt;<b>0xy"
    assert h.escape(str(h.Html("<b>"))) == "&lt;b&gt;"  # what has become plain text is text again
    assert h.join(h.Html("<b>") + "<i>") == "&lt;b&gt;&lt;i&gt;"


@pytest.mark.parametrize("tag", ["script", "iframe", "img", "style", "object", "p onclick=alert(1)", "svg/onload=alert(1)", ""])
def test_elements_that_run_or_load_cannot_be_made(tag):
    with pytest.raises(ConfigError, match="not allowed"):
        h.el(tag)


@pytest.mark.parametrize("name", ["onclick", "ONCLICK", "onLoad", "OnError", "src", "srcdoc", "a b", 'x"y', "xlink:href", "x>y", ""])
def test_attributes_that_run_or_load_cannot_be_made(name):
    with pytest.raises(ConfigError, match="not allowed"):
        h.el("p", **{name: "x"})


@pytest.mark.parametrize("target", ["https://example.org", "//example.org", "javascript:alert(1)", "data:text/html,x", " #a"])
def test_links_stay_within_the_page(target):
    with pytest.raises(ConfigError, match="within its page"):
        h.el("a", "x", href=target)


def test_values_that_fight_back():
    class Bad:
        def __str__(self):
            raise RuntimeError("<script>")

        __repr__ = __str__

    cyclic: list = []
    cyclic.append(cyclic)
    shown = check(str(h.card("x", {"bad": Bad(), "cyclic": cyclic, "nan": math.nan, "none": None, "big": 10**5000, "bytes": b"<b>", "function": check, "array": np.zeros((3, 4))})))
    assert "Bad that cannot be shown: RuntimeError" in shown.text
    assert "ndarray (3, 4) float64" in shown.text and "check" in shown.text


def test_long_things_are_cut_and_say_so():
    page = check(str(h.card("x" * 10**6, {"k": list(range(10**6)), "t": "y" * 10**6, **{f"n{i}": i for i in range(10_000)}})), limit=60_000)
    assert re.search(r"… 999,984 more items", page.text) and "… 999,840 more characters" in page.text and "… 9,942 more values" in page.text
    page = check(str(h.fragment(h.table(([i] for i in range(10**5)), ["n"], limit=7))), limit=20_000)
    assert page.count("tr") == 8 and "… 99,993 more rows" in page.text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (-0.0, "0"), (1, "1"), (1234567, "1,234,567"), (-1234, "−1,234"), (0.5, "0.5"), (0.00012, "1.2e-4"), (99.95, "99.95"), (123.456, "123.5"), (1e6, "1e6"), (2.5e9, "2.5e9"),
     (np.float32(0.25), "0.25"), (np.int64(7), "7"), (np.bool_(True), "yes"), (False, "no"), (math.inf, "∞"), (-math.inf, "−∞"), (math.nan, "NaN"), (None, "–"), ("a", "a"), (1 + 2j, "(1+2j)")],
)  # fmt: skip
def test_numbers_read_well(value, shown):
    assert h.number(value) == shown


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_right_to_three_digits(x):
    if abs(x) > 1.79e308:
        return
    text = h.number(x).replace("−", "-").replace(",", "")
    assert math.isclose(float(text), x, rel_tol=6e-3, abs_tol=0 if abs(x) >= 1e-300 else 1e-300)


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 8))
def test_ticks_lie_inside_and_are_few(lo, span, count):
    hi = lo + span
    if hi <= lo or span < 1e-6 * abs(lo):
        return
    found = h.ticks(lo, hi, count)
    assert 1 <= len(found) <= count + 1
    assert all(lo - 1e-6 * span <= t <= hi + 1e-6 * span for t in found)
    assert np.allclose(np.diff(found), np.diff(found)[:1], rtol=1e-6) if len(found) > 2 else True


numbers = st.one_of(st.floats(), st.integers(-(10**400), 10**400), st.none())


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.lists(st.tuples(st.integers(-5, 2**70) | st.floats(), numbers), max_size=50), max_size=3))
def test_charts_stand_anything(series):
    page = check(str(h.fragment(h.line_chart(series, "t", dots=list(series)[:1]))))
    drawn = " ".join(str(v) for tag, a in page.tags for k, v in a.items() if k in ("d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width"))
    assert "nan" not in drawn and "inf" not in drawn
    check(str(h.fragment(h.sparkline([y for points in series.values() for _, y in points]))))


def path_points(d: str) -> np.ndarray:
    return np.array([[float(v) for v in p.split()] for p in re.split("[ML]", d) if p])


def test_points_land_where_they_should():
    page = check(str(h.fragment(h.line_chart({"a": [(0, 0.0), (5, 10.0), (10, 5.0)]}, width=480, height=190))))
    (d,) = [a["d"] for t, a in page.tags if t == "path"]
    xy = path_points(d)
    assert np.allclose(np.diff(xy[:, 0]), (480 - 46 - 10) / 2, atol=0.1)  # equal steps, equal distances, up to the edges
    assert xy[0, 0] == 46 and xy[-1, 0] == 470
    zero = next(float(a["y1"]) for t, a in page.tags if t == "line")
    assert abs(xy[0, 1] - zero) < 0.1 and xy[1, 1] < xy[2, 1] < xy[0, 1]
    assert np.isclose((xy[0, 1] - xy[2, 1]) / (xy[0, 1] - xy[1, 1]), 0.5, atol=0.01)


def test_what_is_not_finite_breaks_the_line_and_is_marked():
    page = check(str(h.fragment(h.line_chart({"a": [(0, 1), (1, 2), (2, math.nan), (3, 2), (4, None), (5, math.inf), (6, 1), (7, 1)]}))))
    line = max((a["d"] for t, a in page.tags if t == "path"), key=len)
    assert line.count("M") == 3
    assert "a is NaN" in page.text and "a is ∞" in page.text


def test_thinning_keeps_every_peak():
    x, y = np.arange(100_000.0), np.zeros(100_000)
    y[[137, 50_001, 99_998]] = [5, -7, math.nan]
    tx, ty = h.thin(x, y, 200)
    assert len(tx) < 700 and {137.0, 50_001.0, 99_998.0} <= set(tx.tolist()) and np.all(np.diff(tx) > 0)
    assert np.nanmax(ty) == 5 and np.nanmin(ty) == -7 and np.isnan(ty).any()
    check(str(h.fragment(h.line_chart({"a": zip(x, y)}))), limit=120_000)


def test_the_average_neither_lags_nor_bends():
    x = np.arange(200.0)
    assert np.allclose(h.smooth(3 * x - 7, 10), 3 * x - 7)
    y = 3 * x - 7
    y[50:60] = math.nan
    out = h.smooth(y, 10)
    assert np.isnan(out[50:60]).all() and np.allclose(out[~np.isnan(y)], y[~np.isnan(y)])
    noise = np.random.default_rng(0).normal(size=2000)
    assert h.smooth(noise, 10).std() < 0.3


def test_tones_are_checked():
    with pytest.raises(ConfigError, match="did you mean 'good'"):
        h.chip("x", "goood")
