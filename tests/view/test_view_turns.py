"""A conversation as it is shown: whatever models, tools and files put into it, the page stays whole, inert and short."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from view_oracle import ATTACKS, check

from nexrl_sdk.types import Trajectory
from nexrl_sdk.view import rollouts as r

NUMBERS = [str(i) for i in range(len(ATTACKS))]


class Bytes:
    """One byte, one token."""

    all_special_ids = ()

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


def call(name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(question: Any = "12 + 30?", name: Any = "add", arguments: Any = '{"a": 12}', result: Any = "42", answer: Any = "It is 42.", **more: Any) -> Trajectory:
    """Two turns with a call between them."""
    said = [str(s)[:3000].encode(errors="replace") for s in (question, f"{name}({arguments})", result, answer)]
    edges = np.cumsum([0, *map(len, said)]).tolist()
    mask = [int(i in (1, 3)) for i, s in enumerate(said) for _ in s]
    turns = [{"start": edges[i], "end": edges[i + 1], "place": i, "number": n, "learned": True, "forked": False, "finish_reason": "stop", "message": {"role": "assistant"}} for n, i in enumerate((1, 3))]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]}, {"role": "tool", "name": name, "tool_call_id": "call_0", "content": result}]
    fields = {"prompt_messages": messages, "response_message": {"role": "assistant", "content": answer}, "turns": turns, "final_answer": answer, **more}
    return Trajectory(tokens=[b for s in said for b in s], loss_mask=mask, logprobs=[-0.5 * m for m in mask], reward=1.0, **fields)


def shown(t: Any, limit: int = 400_000, **options: Any) -> Any:
    return check(str(r.trajectory_html(t, Bytes(), **options)), limit=limit)


def test_a_conversation_is_shown_in_order_with_its_calls() -> None:
    page = shown(talk())
    shown_in = page.text[page.text.index("12 + 30?") :]
    places = [shown_in.index(s) for s in ("12 + 30?", 'add({"a": 12})', "calls ", "42", "It is 42.")]
    assert places == sorted(places) and [page.text.count(s) for s in ("user", "assistant", "tool")] == [1, 2, 1]
    ids = [int(i) for t, a in page.tags if t == "i" and "id " in (a.get("title") or "") for i in str(a["title"]).split("id ")[1].split()]
    assert bytes(ids) == b'add({"a": 12})It is 42.'  # each sampled token once, and no other


@pytest.mark.parametrize("attack", ATTACKS, ids=NUMBERS)
@pytest.mark.parametrize("where", ["question", "name", "arguments", "result", "answer", "trace", "role", "error", "tools"])
def test_attacks_are_inert_wherever_they_stand(attack: str, where: str) -> None:
    if where in ("trace", "error", "tools"):
        more: dict[str, Any] = {"trace": {"trace": {"name": attack, "children": [{"outputs": {attack: attack}}]}}, "error": {"error": attack, "status": "failed"}, "tools": {"tools": [call(attack, {attack: attack})]}}[where]
        t = talk(**more)
    elif where == "role":
        t = talk()
        t.prompt_messages[0]["role"] = attack
    else:
        t = talk(**{where: attack})
    for by in r.COLOR_BY:
        shown(t, by=by)
    check(str(r.trajectory_html(t)), limit=400_000)
    check(str(r.rollouts_html([t, t], Bytes())), limit=400_000)


class Evil:
    """A value whose every question is answered by an error."""

    def __str__(self) -> str:
        raise RuntimeError("<b>no</b>")

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise RuntimeError("<b>no</b>")


deep: Any = []
for _ in range(100_000):
    deep = [deep]
ODD = [
    None, True, 0, -1, 10**30, math.nan, math.inf, b"<script>", "", [], {}, [None], {"a": [1, {"b": None}]}, {1: 2}, object(), Evil(), {"x": Evil()}, [Evil()], np.arange(5), np.array(["<b>", "x"], dtype=object),
    np.float32("nan"), range(10**12), {"text": "<script>"}, [{"type": "text", "text": "<i>"}] * 3, deep, "x" * 300_000, ["y" * 1000] * 100, {str(i): "<" * 100 for i in range(1000)}, type, lambda: 0,
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=[f"{i}" for i in range(len(ODD))])
def test_values_that_are_no_text_are_shown_or_passed_over(odd: Any) -> None:
    plain = talk()
    for where in ("content", "role", "tool_calls", "name", "tool_call_id"):
        t = talk()
        for m in [*t.prompt_messages, t.response_message]:
            m[where] = odd
        assert "user" in shown(t).text or where == "role"
    for where in ("name", "arguments"):
        t = talk()
        t.prompt_messages[1]["tool_calls"][0]["function"][where] = odd
        assert "It is 42." in shown(t).text
    for inner in (odd, [odd], {"function": odd}, [{"function": odd}]):
        t = talk()
        t.prompt_messages[1]["tool_calls"] = inner
        assert "It is 42." in shown(t).text
    for field in ("prompt_messages", "response_message", "turns", "tools", "trace", "agent", "final_answer", "agent_name", "metrics", "attempts"):
        shown({**plain, field: odd})
        shown({**plain, field: [odd]})
        check(str(r.rollouts_html([{**plain, field: odd}], Bytes())))
    for field in ("start", "end", "place", "number", "learned", "forked", "finish_reason", "message"):
        turns = [{**plain["turns"][0], field: odd}, plain["turns"][1]]
        page = shown({**plain, "turns": turns})
        assert "It is 42." in page.text or field == "place"


FIELDS = ["prompt", "data", "ground_truth", "error", "status", "run_id", "group_id", "finish_reason", "response", "reward", "advantage", "weight_versions", "is_val", "trace", "agent", "metrics", "tools", "traceback", "tokens", "logprobs"]


@pytest.mark.parametrize("field", FIELDS)
def test_fields_of_a_rollout_may_hold_what_a_table_gives(field: str) -> None:
    for i, odd in enumerate(ODD):
        for j, value in enumerate((odd, [odd], {"x": odd})):
            t = {**talk(), **({"status": "error"} if (i + j) % 2 else {}), field: value}
            check(str(r.trajectory_html(t, Bytes())), limit=200_000)
            check(str(r.rollouts_html([t], Bytes())), limit=200_000)


hostile = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.text(max_size=6), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "text", "x"]), x, max_size=3), max_leaves=6
)
turn = st.dictionaries(st.sampled_from(["start", "end", "place", "learned", "forked", "finish_reason"]), hostile, max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(hostile | turn, max_size=3), hostile | st.lists(hostile, max_size=3), hostile, st.lists(st.integers(-5, 300), max_size=5))
def test_conversations_from_a_file_may_hold_anything(turns: Any, messages: Any, last: Any, tokens: Any) -> None:
    t = {"tokens": tokens, "loss_mask": [1] * len(tokens), "turns": turns, "prompt_messages": messages, "response_message": last}
    for by in r.COLOR_BY:
        shown(t, by=by)
    check(str(r.trajectory_html(t)))


def test_long_conversations_are_cut_and_say_so() -> None:
    n = 500
    turns = [{"start": 1000 * i, "end": 1000 * i + 1000, "place": 2 * i + 1, "learned": True, "forked": False, "finish_reason": "stop"} for i in range(n)]
    messages = [m for _ in range(n) for m in ({"role": "user", "content": "u" * 5000}, {"role": "assistant", "content": "a" * 1000})]
    t = {"tokens": np.full(1000 * n, 97), "loss_mask": np.ones(1000 * n), "logprobs": np.full(1000 * n, -1.0), "turns": turns, "prompt_messages": messages[:-1], "response_message": messages[-1]}
    page = shown(t, limit=1_500_000)
    assert f"{2 * n - r.MESSAGES:,} more messages" in page.text and "4,400 more characters" in page.text and "more tokens" in page.text


def test_many_calls_are_cut_and_say_so() -> None:
    t = talk()
    t.prompt_messages[1]["tool_calls"] = [call("f" * 1000, "x" * 100_000)] * 50_000
    page = shown(t)
    assert page.text.count("calls ") == 20 and "49,980 more calls" in page.text and "936 more characters" in page.text and "99,700 more characters" in page.text


def test_what_is_not_learned_forked_or_cut_is_marked() -> None:
    t = talk()
    t["turns"][0].update(learned=False, forked=True, finish_reason="length")
    page = shown(t)
    assert [page.text.count(m) for m in ("not learned", "forked", "cut")] == [1, 1, 1]


def test_a_conversation_from_a_table_is_shown_the_same(tmp_path: Any) -> None:
    import pandas as pd

    pd.DataFrame([dict(talk())]).to_parquet(tmp_path / "r.parquet")
    row = pd.read_parquet(tmp_path / "r.parquet").iloc[0].to_dict()  # lists are arrays there
    page, again = shown(talk()), shown(row)
    assert all(s in again.text for s in ("12 + 30?", 'calls add({"a": 12})', "It is 42."))
    assert [a for t, a in again.tags if t == "i"] == [a for t, a in page.tags if t == "i"]
