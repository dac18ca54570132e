"""Rollouts: stored to the last bit, as tables, as a list."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings, strategies as st
from IPython.lib.pretty import pretty

from nexrl_sdk.rollout.rollouts import TAG, Rollouts, Unsaved, dumps, loads
from nexrl_sdk.types import ConfigError, DataError, Trajectory

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | FLOATS | st.text() | st.binary(max_size=8) | st.dates() | st.datetimes() | st.decimals(allow_nan=False),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just(TAG) | st.integers(), x, max_size=3),
    max_leaves=8,
)


def same(a, b) -> bool:
    """Equal, with NaN equal to NaN and True unlike 1."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@st.composite
def trajectories(draw):
    n = draw(st.integers(0, 5))
    per_token = lambda x: draw(st.lists(x, min_size=n, max_size=n))
    known = {
        "tokens": per_token(st.integers(0, 2**40)), "loss_mask": per_token(st.integers(0, 1)), "logprobs": per_token(FLOATS), "reward": draw(st.none() | FLOATS | st.integers()),
        "group_id": draw(st.none() | st.text() | st.integers()), "status": draw(st.sampled_from(["ok", "failed"])), "prompt": draw(st.text()), "response": draw(st.none() | st.text()),
    }  # fmt: skip
    keep = draw(st.sets(st.sampled_from(["reward", "group_id", "status", "prompt", "response"])))
    checked = {*known, "advantages", "ref_logprobs"}  # hypothesis also tries names that it finds in the source
    extra = draw(st.dictionaries(st.text(min_size=1).filter(lambda k: k not in checked), PLAIN, max_size=3))
    return Trajectory({**extra, **{k: v for k, v in known.items() if k in keep or k in ("tokens", "loss_mask", "logprobs")}})


@settings(max_examples=80, deadline=None)
@given(st.lists(trajectories(), max_size=4), st.sampled_from(["a.jsonl", "a.parquet"]))
def test_what_is_stored_comes_back_exactly(tmp_path_factory, every, name):
    path = tmp_path_factory.getbasetemp() / name
    back = Rollouts.load(Rollouts(every).save(path))
    assert len(back) == len(every)
    for a, b in zip(every, back):
        assert sorted(a) == sorted(b)
        assert all(same(a[k], b[k]) for k in a), (dict(a), dict(b))


def test_every_line_is_strict_json(tmp_path):
    path = Rollouts([Trajectory(tokens=[1], loss_mask=[1], logprobs=[math.nan], reward=math.inf, prompt="a\u2028b\n", data={"x": -math.inf})]).save(tmp_path / "a.jsonl")

    def refuse(name):
        raise AssertionError(name)

    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 2 and json.loads(lines[0], parse_constant=refuse)["prompt"] == "a\u2028b\n"
    assert Rollouts.load(path)[0].data == {"x": -math.inf}


def test_arrays_come_back_as_lists_and_float32_exactly():
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    t = Trajectory(tokens=np.arange(50), loss_mask=torch.ones(50, dtype=torch.int64), logprobs=values, reward=np.float32(0.1), metrics={"a": np.float64(1 / 3)}, pair=(1, "x"))
    back = loads(dumps(t))
    assert back.tokens == list(range(50)) and back.loss_mask == [1] * 50 and back.pair == [1, "x"]
    assert np.array_equal(np.array(back.logprobs, np.float32), values) and back.reward == float(np.float32(0.1)) and back.metrics == {"a": 1 / 3}
    assert loads(dumps(back)) == back
    assert loads(dumps(Trajectory(logprobs=list(values), tokens=[1] * 50))).logprobs == [float(v) for v in values]


def test_an_object_that_cannot_be_stored_leaves_a_note():
    class Picture:
        def __repr__(self):
            return "<picture>"

    back = loads(dumps(Trajectory(data={"image": Picture(), "when": dt.time(1, 2), "d": Decimal("1.10")})))
    assert back.data == {"image": Unsaved("Picture", "<picture>"), "when": dt.time(1, 2), "d": Decimal("1.10")}
    assert loads(dumps(back)) == back


def _span(kind: str, inputs: Any, *children: Any) -> dict[str, Any]:
    return {"id": None, "type": kind, "inputs": inputs, "outputs": {}, "children": list(children)}


def _talk(turns: int) -> dict[str, Any]:
    """The trace of a conversation, with a sub-agent's beside each turn."""
    messages, spans = [{"role": "user", "content": "Q"}], list[Any]()
    for i in range(turns):
        spans += [_span("LLM", {"tools": [{"name": "look"}], "messages": [dict(m) for m in messages]}), _span("TOOL", {"arguments": "{}"})]
        spans.append(_span("SUB_AGENT", {"message": "m"}, *(_span("LLM", {"messages": [{"role": "user", "content": f"sub {i}"}, *messages[:n]]}) for n in (0, 1))))
        messages += [{"role": "assistant", "content": f"a{i}"}, {"role": "tool", "content": "x" * 1000}]
    return _span("AGENT", {}, *spans)


@pytest.mark.parametrize("name", ["r.jsonl", "r.parquet"])
def test_a_trace_takes_the_room_of_its_turns_and_comes_back(tmp_path, name):
    few, many = (Trajectory(tokens=[1], trace=_talk(n)) for n in (20, 80))
    assert len(dumps(many)) < 5 * len(dumps(few)) and repr(dict(loads(dumps(many)))) == repr(dict(many))
    (back,) = Rollouts([many]).save(tmp_path / name) and Rollouts.load(tmp_path / name)
    assert repr(back["trace"]) == repr(many["trace"]) and dumps(back) == dumps(many)


KINDS = st.sampled_from([1, True, 1.0, 0.0, -0.0, math.nan, None, "1", {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": True}, [1], [1.0], {1: 2}, {TAG: "_After", "value": [1, []]}])
SPANS = st.recursive(st.just([]), lambda inner: st.lists(st.builds(lambda key, value, children: _span("LLM", {key: value}, *children), st.sampled_from(["messages", "tools"]), st.one_of(KINDS, st.lists(KINDS, max_size=4)), inner), max_size=4), max_leaves=6)


@settings(max_examples=200, deadline=None)
@given(children=SPANS)
def test_any_trace_comes_back_as_it_was(children):
    t = Trajectory(tokens=[1], trace=_span("AGENT", {}, *children))
    assert repr(dict(loads(dumps(t)))) == repr(dict(t)) and dumps(loads(dumps(t))) == dumps(t)


@pytest.mark.parametrize("trace", [{}, None, [], "x", {"children": 3}, {"children": [1, {"inputs": [2]}]}])
def test_what_is_no_trace_is_kept(trace):
    assert loads(dumps(Trajectory(trace=trace)))["trace"] == trace


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "a.jsonl"
    Rollouts([Trajectory(prompt="old")]).save(path)

    class Breaks(Trajectory):
        def items(self):
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError):
        Rollouts([Trajectory(prompt="new"), Breaks()]).save(path)
    assert Rollouts.load(path)[0].prompt == "old" and os.listdir(path.parent) == ["a.jsonl"]


def test_files_that_are_no_rollouts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"a.jsonl, line 2 is no stored trajectory"):
        Rollouts.load(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"status": "fine"}\n')
    with pytest.raises(DataError, match=r"line 1 .*'fine' is not known"):
        Rollouts.load(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="there are no rollouts at"):
        Rollouts.load(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"stored as .jsonl or .parquet, not as 'a.csv'"):
        Rollouts().save(tmp_path / "a.csv")


def some(n=6):
    made = [
        Trajectory(tokens=[1, 2, 3, 4 + i], loss_mask=[0, 0, 1, 1], logprobs=[0.0, 0.0, -1.0, -2.0], reward=i / 2, group_id=f"0:{i // 2}", run_id=f"0:{i // 2}/{i % 2}", prompt="p", response=f"r{i}", metrics={"em": float(i)}, data={"answer": "a", "list": [1]}, weight_versions=[3])
        for i in range(n - 1)
    ]
    return Rollouts([*made, Trajectory(group_id="0:2", run_id="0:2/1", status="failed", error="503", prompt="p")])


def test_tables_agree_and_hold_one_row_each():
    r = some()
    p, q = r.to_pandas(), r.to_polars()
    assert list(p.columns) == q.columns and len(p) == len(q) == 6
    assert p["reward"].tolist()[:5] == q["reward"].to_list()[:5] == [0.0, 0.5, 1.0, 1.5, 2.0] and q["reward"].to_list()[5] is None
    assert q["prompt_tokens"].to_list() == [2] * 5 + [0] and q["response_tokens"].to_list() == [2] * 5 + [0] and q["weight_version"].to_list()[0] == 3
    assert q["eval/em"].to_list() == [0, 1, 2, 3, 4, None] and q["data/answer"].to_list() == ["a"] * 5 + [None] and "data/list" not in q.columns
    assert r.to_polars(tokens=True)["tokens"].to_list()[0] == [1, 2, 3, 4] and "tokens" in r.to_pandas(tokens=True)
    mixed = Rollouts([Trajectory(reward=1, ground_truth="4"), Trajectory(reward=0.5, ground_truth=4), Trajectory(reward=None, ground_truth=None)])
    assert mixed.to_polars()["ground_truth"].to_list() == ["4", "4", None] and mixed.to_polars()["reward"].dtype == pl.Float64
    assert "reward" in Rollouts().to_pandas() and "reward" in Rollouts().to_polars().columns


def test_a_list_with_groups_filters_and_slices():
    r = some()
    r.tokenizer = "tok"
    assert {k: len(v) for k, v in r.groups().items()} == {"0:0": 2, "0:1": 2, "0:2": 2}
    assert r[:2].tokenizer == r.filter(status="ok").tokenizer == r.groups()["0:0"].tokenizer == Rollouts(r).tokenizer == "tok"
    assert len(r.filter(lambda t: t.scored and t.reward >= 1)) == 3 and len(r.filter(lambda t: True, status="failed", error="503")) == 1
    assert np.isnan(r.rewards[5]) and r.rewards[4] == 2.0 and isinstance(r[0], Trajectory) and isinstance(r[1:], Rollouts)
    assert len(r + some()) == 12 and isinstance(r + some(), Rollouts) and Rollouts([{"prompt": "x"}])[0].prompt == "x"
    no_group = Rollouts([Trajectory(run_id="a"), Trajectory(run_id="b"), Trajectory(run_id="a")])
    assert {k: len(v) for k, v in no_group.groups().items()} == {"a": 2, "b": 1}
    m = r.metrics()
    assert m["reward/mean"] == 1.0 and m["errors/failed"] == 1 and m["eval/em"] == 2.0


def test_it_shows_itself():
    r = some(12)
    text = pretty(r)
    assert text.startswith("Rollouts(12 in 6 groups, mean reward 2.500, 1 failed)") and "… 4 more" in text and len(text.splitlines()) == 10
    assert "503" in pretty(r[-1:]) and pretty(Rollouts()) == "Rollouts(0 in 0 groups)"
    hostile = Rollouts([Trajectory(prompt="<script>x()</script>", response="<img src=x>", tokens=[1], loss_mask=[1], logprobs=[-0.5], reward=1.0)])
    assert "<script>x()" not in hostile._repr_html_() and "<img src=x>" not in hostile._repr_html_() and "script" in hostile._repr_html_()
