"""Tools under everything that a model, a user's function and a loaded machine can do; traces from many threads."""

from __future__ import annotations

import asyncio
import enum
import functools
import gc
import json
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionToolParam

from nexrl_sdk.rollout.tools import MOST_HANGING, Tool, ToolResult, as_text, cut_middle
from nexrl_sdk.rollout.trace import InMemoryTracer, Span
from nexrl_sdk.types import ConfigError

if TYPE_CHECKING:
    from nowhere import AgentState

pytestmark = pytest.mark.timeout(60)


def echo(value: Any = None) -> Any:
    """Give it back."""
    return value


def tool_of(result) -> Tool:
    return Tool("t", "", {}, lambda: result)


# --- results ---


@dataclass
class Point:
    x: int
    y: float


class Model(pydantic.BaseModel):
    name: str


class Silent(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize(
    "value,text",
    [
        ("as it is\n", "as it is\n"),
        ("", ""),
        (None, "None"),
        (True, "True"),
        (3, "3"),
        (0.5, "0.5"),
        (math.nan, "nan"),
        (b"bytes \xff", "bytes \ufffd"),
        ({"a": [1, "é", None, True]}, '{"a": [1, "é", null, true]}'),
        ([math.nan, math.inf], "[NaN, Infinity]"),
        ({"x": np.float32(0.5), "y": np.arange(3), "z": {3}}, '{"x": 0.5, "y": [0, 1, 2], "z": [3]}'),
        ({"p": Point(1, 2.0), "m": Model(name="n")}, '{"p": {"x": 1, "y": 2.0}, "m": {"name": "n"}}'),
        (Point(1, 2.0), '{"x": 1, "y": 2.0}'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({1: "a", None: "b"}, '{"1": "a", "null": "b"}'),
        ("<|im_end|><|im_start|>system", "<|im_end|><|im_start|>system"),
        ("half \ud83d half", "half \ufffd half"),
        ("\ud83d\ude00", "😀"),
        ({"a": "\ud800"}, '{"a": "\ufffd"}'),
    ],
)
def test_results_become_text(value, text):
    result = tool_of(value).call({})
    assert (result.text, result.error, result.truncated) == (text, None, False)
    result.text.encode("utf-8")


def test_circles_and_deep_nesting_become_text():
    circle: list[Any] = []
    circle.append(circle)
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    assert tool_of(circle).call({}).text == "[[...]]"
    result = tool_of(deep).call({})
    assert result.text and (result.error is None or "RecursionError" in result.error)
    while isinstance(deep, list):  # taken apart from outside, or freeing it is deep too
        deep = deep.pop()


@pytest.mark.parametrize("size", [200, 201, 20_000, 20_001, 5_000_000])
def test_long_results_lose_their_middle(size):
    tool = Tool("t", "", {}, lambda: "a" * (size // 2) + "b" * (size - size // 2), output_limit=200)
    result = tool.call({})
    assert len(result.text) <= 200 and result.truncated == (size > 200)
    assert result.text[0] == "a" and result.text[-1] == "b" and (str(size) in result.text) == result.truncated


def test_cutting_keeps_both_ends():
    text = "".join(chr(0x4E00 + i % 5000) for i in range(10_000))
    for limit in (100, 1000, 9_999):
        cut, left_out = cut_middle(text, limit)
        head, _, tail = cut.partition("\n[…")
        assert left_out and len(cut) == limit and text.startswith(head) and text.endswith(tail.partition("…]\n")[2])
    assert cut_middle(text, 10_000) == (text, False)


# --- what models write ---


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second,
            which may be left out

    Returns:
        their sum
    """
    return a + b


ADD = Tool.from_function(add)


@pytest.mark.parametrize(
    "arguments,expected",
    [
        ('{"a": 1', "the arguments are no JSON"),
        ("{'a': 1}", "the arguments are no JSON"),
        ('{"a": 1} {"a": 2}', "Extra data"),
        ('{"a": 1, "a": 2}', "name 'a' twice"),
        ('{"a": NaN}', "NaN is no JSON value"),
        ('{"a": -Infinity}', "-Infinity is no JSON value"),
        ("[1, 2]", "must be a JSON object"),
        ('"a"', "must be a JSON object"),
        ("null", "'a' is a required property"),
        ("7", "must be a JSON object"),
        (7, "must be a JSON object"),
        ({1: 2}, "must be a JSON object"),
        ("", "'a' is a required property"),
        ("{}", "'a' is a required property"),
        ('{"a": "1"}', "a: '1' is not of type 'integer'"),
        ('{"a": true}', "a: True is not of type 'integer'"),
        ('{"a": 1.5}', "a: 1.5 is not of type 'integer'"),
        ('{"a": null}', "a: None is not of type 'integer'"),
        ('{"a": 1, "c": 2}', "'c' was unexpected"),
        ('{"a": 1, "bb": 2}', "did you mean 'b'?"),
        ('{"a": 1e999}', "cannot convert float infinity|not of type|finite"),
        ("[" * 100_000, "RecursionError"),
        ('{"a": ' + "[" * 100_000, "RecursionError"),
        ('{"a": ' + "9" * 10_000 + "}", "Exceeds the limit"),
        ('{"a": "' + "x" * 1_000_000 + '"}', "is not of type 'integer'"),
        ('{"' + "k" * 1_000_000 + '": 1, "a": 2}', "was unexpected"),
    ],
)
def test_wrong_arguments_are_said(arguments, expected):
    result = ADD.call(arguments)
    assert result.error and result.text == f"Error: {result.error}" and len(result.text) < 3100
    assert any(e in result.error for e in expected.split("|")), result.error


@pytest.mark.parametrize("arguments,text", [('{"a": 1}', "2"), (' {"a": 1, "b": -1} ', "0"), ({"a": 2}, "3"), ('{"a": 1.0}', "2"), ('{"a": 12345678901234567890}', "12345678901234567891")])
def test_right_arguments(arguments, text):
    assert ADD.call(arguments).text == text


def test_no_arguments():
    assert [Tool.from_function(echo).call(a).text for a in ("", "{}", None, {}, "  ")] == ["None"] * 5


def test_what_the_caller_gave_is_not_changed():
    def greedy(items: list) -> int:
        items.append(1)
        return len(items)

    given = {"items": [1, 2]}
    assert Tool.from_function(greedy).call(given).text == "3"
    assert Tool.from_function(greedy).call(json.dumps(given)).text == "3"


def test_schemas_are_checked_as_jsonschema_does():
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}, "tag": {"enum": ["a", "b"]}, "deep": {"type": "array", "items": {"type": "object", "required": ["x"]}}}, "required": ["n"]}
    tool = Tool("t", "", schema, lambda **kw: "ok")
    for value in ({"n": 1}, {"n": -1}, {"n": 0, "tag": "c"}, {"n": 0, "deep": [{"x": 1}, {}]}, {"n": 0, "more": 1}, {}):
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert (tool.call(value).error is None) == valid
    assert "deep.1: 'x' is a required property" in tool.call({"n": 0, "deep": [{"x": 1}, {}]}).error


def test_schemas_fetch_nothing():
    tool = Tool("t", "", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/never.json"}}}, echo)
    result = tool.call({"a": 1})
    assert result.error and "never.json" in result.error


@pytest.mark.parametrize(
    "schema,expected",
    [
        ("text", "must be a JSON schema, a mapping"),
        ([], "must be a JSON schema"),
        ({"type": "array"}, "must have type 'object'"),
        ({"type": "object", "properties": []}, "are no JSON schema"),
        ({"type": "object", "required": "a"}, "are no JSON schema"),
        ({"properties": {"a": {"type": "text"}}}, "'text' is not valid"),
        ({"properties": {"a": {"default": object()}}}, "are no JSON"),
        ({"properties": {"a": {"default": math.nan}}}, "are no JSON"),
        ({"properties": {"a": {"pattern": "("}}}, "are no JSON schema"),
        ({"properties": {"agent_state": {"type": "object"}}}, "filled in by the agent"),
    ],
)
def test_what_is_no_schema(schema, expected):
    with pytest.raises(ConfigError) as e:
        Tool("t", "", schema, echo)
    assert expected in str(e.value)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -3}, "s": {"type": "string", "maxLength": 3}, "l": {"type": "array", "items": {"type": ["number", "null"]}}, "o": {"anyOf": [{"type": "object"}, {"const": 7}]}},
    "required": ["n"],
    "additionalProperties": {"type": "boolean"},
}
ECHO = Tool("echo", "", SCHEMA, lambda **arguments: arguments, output_limit=1_000_000)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(["n", "s", "l", "o"]) | st.text(max_size=3), JSON, max_size=5) | JSON)
def test_any_json_is_taken_or_refused_as_jsonschema_says(value):
    result = ECHO.call(json.dumps(value))
    valid = isinstance(value, dict | None) and jsonschema.Draft202012Validator(SCHEMA).is_valid(value)
    assert (result.error is None) == valid
    if valid:
        assert json.loads(result.text) == value
    result.text.encode()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(st.characters()) | st.text('{}[]",:0123456789eE.-ntf\\u '))
def test_any_text_is_answered(text):
    result = ECHO.call(text)
    assert result.text and (result.error is None or result.text == f"Error: {result.error}")


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(), max_size=400), st.integers(100, 300))
def test_any_result_fits(text, limit):
    result = Tool("t", "", {}, lambda: text, output_limit=limit).call({})
    assert len(result.text) <= limit and result.truncated == (len(text) > limit)
    result.text.encode()


# --- from functions ---


def test_a_function_describes_itself():
    function = ADD.definition()["function"]
    assert function["name"] == "add" and function["description"] == "Add two numbers."
    assert function["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer", "description": "the first"}, "b": {"type": "integer", "default": 1, "description": "the second, which may be left out"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    pydantic.TypeAdapter(ChatCompletionToolParam).validate_python(ADD.definition(), strict=True)


class Colour(enum.Enum):
    RED = "red"


def test_arguments_have_their_annotated_types():
    seen: dict[str, Any] = {}

    def take(point: Point, colour: Colour, kind: Literal["a", "b"], tags: list[str], size: Annotated[int, pydantic.Field(ge=1, description="at least one")], other: Point | None = None) -> str:
        seen.update(locals())
        return "ok"

    tool = Tool.from_function(take)
    schema = tool.parameters
    assert schema["properties"]["kind"]["enum"] == ["a", "b"] and schema["properties"]["size"]["minimum"] == 1 and "title" not in json.dumps(schema)
    given = {"point": {"x": 1, "y": 2}, "colour": "red", "kind": "a", "tags": ["x"], "size": 3}
    assert tool.call(json.dumps(given)).text == "ok"
    assert seen["point"] == Point(1, 2.0) and seen["colour"] is Colour.RED and seen["other"] is None and seen["tags"] == ["x"]
    for wrong in ({"size": 0}, {"colour": "blue"}, {"point": {"x": 1}}, {"kind": "c"}, {"tags": "x"}):
        assert tool.call({**given, **wrong}).error.startswith("take was not called: the arguments do not fit")


def test_parameters_called_like_a_schemas_own_words():
    def odd(title: str, properties: str, schema: str, _hidden: int, self: int, model_config: int, json: str = "j") -> str:
        return f"{title}{properties}{schema}{_hidden}{self}{model_config}{json}"

    tool = Tool.from_function(odd)
    assert list(tool.parameters["properties"]) == ["title", "properties", "schema", "_hidden", "self", "model_config", "json"]
    assert tool.call({"title": "t", "properties": "p", "schema": "s", "_hidden": 1, "self": 2, "model_config": 3}).text == "tps123j"


def test_any_callable():
    class Counter:
        def __call__(self, n: int) -> int:
            """Count."""
            return n + 1

        def method(self, n: int) -> int:
            return n + 2

    def wrap(f):
        @functools.wraps(f)
        def inner(*args, **kwargs):
            return f(*args, **kwargs) * 10

        return inner

    assert Tool.from_function(Counter(), name="count").call({"n": 1}).text == "2"
    assert Tool.from_function(Counter().method).call({"n": 1}).text == "3"
    assert Tool.from_function(wrap(add)).call({"a": 1}).text == "20"
    assert Tool.from_function(functools.partial(add, b=5), name="add5").call({"a": 1}).text == "6"
    assert Tool.from_function(lambda **kw: sorted(kw), name="any").call({"b": 1, "a": 2}).text == '["a", "b"]'


@pytest.mark.parametrize(
    "function,expected",
    [
        (lambda x: x, "a tool's name has"),
        (5, "signature cannot be read|needs a function"),
        (print, "no name that a model could use"),
        (len, "no name that a model could use"),
        (Point, "needs a function"),
    ],
)
def test_what_cannot_be_a_tool(function, expected):
    with pytest.raises(ConfigError) as e:
        Tool.from_function(function)
    assert any(x in str(e.value) for x in expected.split("|")), e.value


def test_unknown_annotations():
    def wrong(a: "Nowhere") -> str:  # noqa: F821, UP037
        return ""

    def opaque(a: threading.Lock) -> str:
        return ""

    for function in (wrong, opaque):
        with pytest.raises(ConfigError, match="annotations"):
            Tool.from_function(function)


def test_what_the_agent_fills_in():
    def search(query: str, agent_state: AgentState, global_storage: dict | None = None) -> str:
        """Search."""
        return f"{query} {agent_state} {global_storage}"

    tool = Tool.from_function(search)
    assert tool.needs == {"agent_state", "global_storage"} and list(tool.parameters["properties"]) == ["query"]
    assert tool.call({"query": "q"}, injected={"agent_state": "S", "sandbox": "never"}).text == "q S None"
    assert "missing 1 required positional argument: 'agent_state'" in tool.call({"query": "q"}).error
    assert "'agent_state' was unexpected" in tool.call({"query": "q", "agent_state": "mine"}).error


def test_preset_arguments_win():
    seen = []
    tool = Tool("t", "", {"type": "object", "properties": {"q": {"type": "string"}}, "additionalProperties": False}, lambda q, key: seen.append((q, key)) or "ok", preset={"key": "secret"})
    assert tool.call({"q": "x"}).text == "ok" and seen == [("x", "secret")]
    refused = tool.call({"q": "x", "key": "mine"})
    assert "'key' was unexpected" in refused.error and "secret" not in refused.text
    open_tool = Tool("t", "", {}, lambda q, key: key, preset={"key": "secret"})
    assert open_tool.call({"q": "x", "key": "mine"}).text == "secret"
    assert "key" not in Tool.from_function(lambda q, key: key, name="t", preset={"key": 1}).parameters["properties"]
    with pytest.raises(ConfigError, match="'kei' is preset"):
        Tool.from_function(lambda q, key: key, name="t", preset={"kei": 1})


# --- what tools do ---


class Quiet(BaseException):
    pass


@pytest.mark.parametrize(
    "error,expected",
    [
        (ValueError("bad"), "t raised ValueError: bad"),
        (ValueError(), "t raised ValueError"),
        (SystemExit(3), "t raised SystemExit: 3"),
        (KeyboardInterrupt(), "t raised KeyboardInterrupt"),
        (GeneratorExit(), "t raised GeneratorExit"),
        (Quiet("base"), "t raised Quiet: base"),
        (Silent(), "its message cannot be read"),
        (asyncio.CancelledError(), "t raised CancelledError"),
        (MemoryError(), "t raised MemoryError"),
        (RecursionError("deep"), "t raised RecursionError"),
        (StopIteration(1), "t raised StopIteration"),
        (ValueError("x" * 1_000_000), "more characters"),
        (ValueError("\ud800"), "t raised ValueError: \ufffd"),
        (TimeoutError("theirs"), "t raised TimeoutError: theirs"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_is_its_result(error, expected, is_async):
    def plain():
        raise error

    async def later():
        raise error

    if is_async and isinstance(error, StopIteration):
        expected = "t raised RuntimeError"
    result = Tool("t", "", {}, later if is_async else plain).call({})
    assert expected in result.error and result.text.startswith("Error: ") and len(result.text) < 3100


def test_endless_recursion_in_a_tool():
    def deeper():
        return deeper()

    assert "RecursionError" in Tool("t", "", {}, deeper).call({}).error


def test_sys_exit_ends_nothing():
    assert Tool("t", "", {}, lambda: sys.exit(0)).call({}).error == "t raised SystemExit: 0"


def test_a_tool_that_hangs_is_given_up():
    release, ended = threading.Event(), threading.Event()

    def hang():
        release.wait(50)
        ended.set()

    began = time.monotonic()
    result = Tool("t", "", {}, hang).call({}, timeout=0.05)
    assert result.error == "t took longer than 0.05 s and was given up" and result.seconds >= 0.05 and time.monotonic() - began < 45 and not ended.is_set()
    assert Tool("t", "", {}, hang, timeout=0.05).call({}).error == result.error
    release.set()
    assert ended.wait(30)


def test_an_async_tool_that_hangs_is_cancelled():
    cancelled = threading.Event()

    async def hang():
        try:
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    assert "took longer than" in Tool("t", "", {}, hang).call({}, timeout=0.05).error
    assert cancelled.wait(30)


def test_arguments_and_results_that_hang_are_given_up():
    release = threading.Event()

    class Slow:
        def __str__(self):
            release.wait(50)
            return "late"

    assert "took longer than" in tool_of(Slow()).call({}, timeout=0.05).error
    release.set()


def test_a_stop_flag_ends_the_wait():
    release, stop, inside = threading.Event(), threading.Event(), threading.Event()

    def hang():
        inside.set()
        release.wait(50)

    threading.Thread(target=lambda: inside.wait(40) and stop.set(), daemon=True).start()
    assert Tool("t", "", {}, hang).call({}, timeout=50, stop_flag=stop).error == "t was given up: the run was stopped"
    release.set()
    assert Tool.from_function(echo).call({"value": "v"}, stop_flag=threading.Event()).text == "v"


def test_hanging_calls_do_not_pile_up():
    release, runs = threading.Event(), []

    def hang():
        runs.append(1)
        release.wait(50)

    tool = Tool("t", "", {}, hang)
    with ThreadPoolExecutor(32) as pool:
        errors = [r.error for r in pool.map(lambda _: tool.call({}, timeout=0.01), range(MOST_HANGING + 64))]
    assert all(errors) and len(runs) <= MOST_HANGING + 32
    assert "earlier calls of t still run; it is not called again" in tool.call({}, timeout=0.01).error
    release.set()
    deadline = time.monotonic() + 40
    while tool._hanging() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tool.call({}, timeout=30).error is None


def test_two_hundred_calls_at_once():
    together = threading.Barrier(200)

    def meet(i: int) -> int:
        together.wait(40)
        return i

    tool = Tool.from_function(meet)
    with ThreadPoolExecutor(200) as pool:
        results = list(pool.map(lambda i: tool.call(f'{{"i": {i}}}', timeout=50), range(200)))
    assert [r.text for r in results] == [str(i) for i in range(200)] and tool._hanging() == 0


def test_async_tools_at_once_have_loops_of_their_own():
    async def where(i: int) -> str:
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))
        return f"{i}"

    tool = Tool.from_function(where)
    with ThreadPoolExecutor(20) as pool:
        assert [r.text for r in pool.map(lambda i: tool.call({"i": i}), range(50))] == [str(i) for i in range(50)]

    async def outside():
        return tool.call({"i": 7}).text

    assert asyncio.run(outside()) == "7"


def test_calls_leave_nothing_behind():
    tool = Tool.from_function(echo)
    tool.call({"value": "x" * 1_000_000})
    before = threading.active_count()
    for _ in range(50):
        assert tool.call({"value": 1}).text == "1"
    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_the_reference_cycle_of_an_error_does_not_keep_the_arguments():
    result = Tool("t", "", {}, lambda: 1 / 0).call({})
    assert isinstance(result, ToolResult) and result.error == "t raised ZeroDivisionError: division by zero"


@pytest.mark.parametrize("name", ["", "two words", "a" * 65, "né", "a/b", "a\n", 5, None])
def test_names_that_no_model_could_call(name):
    with pytest.raises(ConfigError, match="a tool's name has 1 to 64"):
        Tool(name, "", {}, echo)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "3", True])
def test_timeouts(timeout):
    with pytest.raises(ConfigError, match="timeout must be more than 0"):
        Tool("t", "", {}, echo, timeout=timeout)


def test_as_text_of_plain_values():
    assert [as_text(v) for v in ("é", 1, [1], {"a": "é"})] == ["é", "1", "[1]", '{"a": "é"}']


# --- traces ---

KEYS = ["id", "name", "type", "parent_id", "start_time", "end_time", "duration_ms", "inputs", "outputs", "attributes", "error", "children"]


def test_a_trace_has_nexaus_structure():
    tracer = InMemoryTracer()
    with tracer.span("agent", "agent", {"query": "q"}, step=3):
        with tracer.span("model", "llm", {"messages": []}) as llm:
            llm.outputs = {"choices": []}
        with tracer.span("sub", "sub_agent"), tracer.span("model", "LLM"):
            pass
    trace = tracer.get_trace()
    assert list(trace) == KEYS and trace["type"] == "AGENT" and trace["attributes"] == {"step": 3} and trace["parent_id"] is None
    assert [(c["name"], c["type"]) for c in trace["children"]] == [("model", "LLM"), ("sub", "SUB_AGENT")]
    assert trace["children"][1]["children"][0]["parent_id"] == trace["children"][1]["id"]
    assert trace["start_time"] <= trace["children"][0]["start_time"] and trace["duration_ms"] >= 0
    assert json.loads(json.dumps(trace)) == trace and tracer.dump_traces() == [trace]


def test_the_documents_loop_over_children():
    tracer, seen = InMemoryTracer(), []
    with tracer.span("a", "agent"):
        with tracer.span("m", "llm", {"messages": [{"role": "user", "content": "q"}], "tools": []}) as span:
            span.outputs = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "nexrl_train": {"response_tokens": [1, 2]}}
    for child in tracer.get_trace().get("children", []):
        if child.get("type") == "LLM":
            seen.append((child.get("inputs", {}).get("messages"), child["outputs"]["nexrl_train"]["response_tokens"]))
    assert seen == [([{"role": "user", "content": "q"}], [1, 2])]
    assert InMemoryTracer().get_trace().get("children", []) == []


def test_what_is_recorded_does_not_change_later():
    tracer, messages, answer = InMemoryTracer(), [{"role": "user"}], {"tokens": [1]}
    span = tracer.start_span("m", "llm", {"messages": messages})
    tracer.end_span(span, answer)
    messages[0]["role"] = "changed"
    answer["tokens"].append(2)
    first = tracer.get_trace()
    first["outputs"]["tokens"].append(3)
    again = tracer.get_trace()
    assert again["inputs"] == {"messages": [{"role": "user"}]} and again["outputs"] == {"tokens": [1]}


def test_errors_are_recorded_and_raised():
    tracer = InMemoryTracer()
    for error in (ValueError("bad"), SystemExit(1), Silent()):
        with pytest.raises(type(error)), tracer.span("a", "tool"):
            raise error
    errors = [t["error"] for t in tracer.dump_traces()]
    assert errors[:2] == ["ValueError: bad", "SystemExit: 1"] and "cannot be read" in errors[2]
    assert all(t["end_time"] is not None for t in tracer.dump_traces()) and tracer.current() is None


def test_spans_by_hand():
    tracer = InMemoryTracer()
    root = tracer.start_span(name="a", span_type="AGENT", inputs="text", parent_span=None, attributes={"k": 1})
    child = tracer.start_span("t", "tool", {"x": 1}, parent_span=root)
    tracer.end_span(child, outputs="result", error=ValueError("e"), attributes={"j": 2})
    trace = tracer.get_trace()
    assert trace["inputs"] == {"input": "text"} and trace["end_time"] is None and trace["duration_ms"] is None
    assert trace["children"][0]["outputs"] == {"result": "result"} and trace["children"][0]["error"] == "ValueError: e" and trace["children"][0]["attributes"] == {"j": 2}
    tracer.end_span(root)
    assert isinstance(root, Span) and root.ended is not None
    with tracer.span("outer", "agent") as outer:
        assert tracer.start_span("inner", "llm").parent_id == outer.id
    assert [t["name"] for t in tracer.dump_traces()] == ["a", "outer"] and tracer.get_trace()["name"] == "outer"
    tracer.clear()
    assert tracer.get_trace() == {} and tracer.dump_traces() == []


def test_a_tracer_may_forget_the_oldest_runs():
    tracer = InMemoryTracer(max_spans=5)
    for i in range(4):
        with tracer.span(f"run{i}", "agent"), tracer.span("m", "llm"):
            pass
    assert [t["name"] for t in tracer.dump_traces()] == ["run2", "run3"]
    with tracer.span("long", "agent"):
        for _ in range(20):
            tracer.start_span("m", "llm")
    assert [t["name"] for t in tracer.dump_traces()] == ["long"] and len(tracer.get_trace()["children"]) == 20


def test_span_types():
    class SpanType(enum.StrEnum):
        SUB_AGENT = "SUB_AGENT"

    assert InMemoryTracer().start_span("x", SpanType.SUB_AGENT).type == "sub_agent"
    with pytest.raises(ConfigError, match="did you mean 'tool'"):
        InMemoryTracer().start_span("x", "tol")


def test_two_tracers_do_not_mix():
    a, b = InMemoryTracer(), InMemoryTracer()
    with a.span("a", "agent"), b.span("b", "agent"), a.span("a1", "llm"):
        assert a.current().name == "a1" and b.current().name == "b"
    assert [c["name"] for c in a.get_trace()["children"]] == ["a1"] and b.get_trace()["children"] == []


def test_tools_are_traced_under_their_caller():
    tracer = InMemoryTracer()

    def inner() -> str:
        with tracer.span("inside", "tool"):
            return "ok"

    async def later() -> str:
        with tracer.span("later", "tool"):
            return "ok"

    with tracer.span("call", "tool"):
        assert Tool.from_function(inner).call({}).text == Tool.from_function(later).call({}).text == "ok"
    assert [c["name"] for c in tracer.get_trace()["children"]] == ["inside", "later"]


def test_many_threads_share_a_tracer():
    tracer = InMemoryTracer()

    def run(i):
        with tracer.span(f"agent{i}", "agent"):
            for j in range(5):
                with tracer.span(f"{i}.{j}", "llm"):
                    tracer.get_trace()

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(run, range(100)))
    traces = tracer.dump_traces()
    assert sorted(t["name"] for t in traces) == sorted(f"agent{i}" for i in range(100))
    assert all([c["name"] for c in t["children"]] == [f"{t['name'][5:]}.{j}" for j in range(5)] for t in traces)


def test_tasks_have_their_own_current_span():
    tracer = InMemoryTracer()

    async def run(i):
        with tracer.span(f"a{i}", "agent"):
            await asyncio.sleep(0)
            with tracer.span(f"m{i}", "llm"):
                await asyncio.sleep(0)

    async def both():
        await asyncio.gather(*(run(i) for i in range(10)))

    asyncio.run(both())
    assert {t["name"]: [c["name"] for c in t["children"]] for t in tracer.dump_traces()} == {f"a{i}": [f"m{i}"] for i in range(10)}


def test_deep_and_odd_values_in_traces():
    circle: dict[str, Any] = {}
    circle["self"] = circle["again"] = circle
    wide: Any = "leaf"
    for _ in range(90):
        wide = [wide, wide]
    tracer = InMemoryTracer()
    with tracer.span("a", "agent", {"circle": circle, "wide": wide, "thing": object()}) as span:
        span.outputs = [1, 2]  # type: ignore[assignment]
        for _ in range(2000):
            span = tracer.start_span("deeper", "sub_agent", parent_span=span)
    trace, depth = tracer.get_trace(), 0
    assert trace["inputs"]["circle"] == {"self": "(contains itself)", "again": "(contains itself)"} and trace["outputs"] == {"result": [1, 2]}
    while trace["children"]:
        trace, depth = trace["children"][0], depth + 1
    assert depth == 2000


# --- code of the user's that runs late, and patterns ---


def raising(error):
    def t():
        raise error

    return Tool.from_function(t)


def speechless(raised):
    class Speechless(Exception):
        def __str__(self):
            raise raised

    return Speechless()


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_an_exception_that_cannot_say_what_it_is_is_a_result(raised):
    assert raising(speechless(raised)).call({}).error == f"t raised Speechless: (its message cannot be read: {type(raised).__name__})"


def test_words_are_found_under_the_tools_limit():
    release = threading.Event()

    class Slow(Exception):
        def __str__(self):
            release.wait(50)
            return "late"

    assert raising(Slow()).call({}, timeout=0.1).error == "t took longer than 0.1 s and was given up"
    release.set()


def test_results_are_text_and_no_subclass_of_it():
    class Text(str):
        def __len__(self):
            raise SystemExit(5)

        encode = __getitem__ = __len__  # type: ignore[assignment]

    class Says:
        def __str__(self):
            return str.__new__(Text, "said")

    class Error(Exception):
        def __str__(self):
            return str.__new__(Text, "x")

    for value in (Says(), str.__new__(Text, "said")):
        found = tool_of(value).call({})
        assert (found.text, found.error, type(found.text)) == ("said", None, str) and type(as_text(value)) is str
    assert raising(Error()).call({}).error.startswith("t raised Error")


SLOW = "^(a|aa)+$"
FORTY = "a" * 60 + "!"


@pytest.mark.parametrize(
    "schema,arguments",
    [
        ({"properties": {"s": {"type": "string", "pattern": SLOW}}}, {"s": FORTY}),
        ({"patternProperties": {SLOW: {}}}, {FORTY: 1}),
        ({"patternProperties": {SLOW: {}}, "additionalProperties": False}, {FORTY: 1}),
        ({"properties": {"s": {"type": "array", "items": {"propertyNames": {"pattern": SLOW}}}}}, {"s": [{FORTY: 1}]}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"s": {"pattern": SLOW}}}, {"s": FORTY}),
    ],
)
def test_a_pattern_that_backtracks_is_given_up_and_other_threads_go_on(schema, arguments, monkeypatch):
    monkeypatch.setattr("nexrl_sdk.rollout.tools.PATTERN_SECONDS", 0.2)
    tool = Tool("t", "", {"type": "object", **schema}, lambda **given: "called")
    found = tool.call(json.dumps(arguments), timeout=50)
    assert "takes too long to find out" in found.error and found.error.startswith("t was not called")
    assert "took longer than 0.05 s" in tool.call(json.dumps(arguments), timeout=0.05).error or found.error


@pytest.mark.parametrize("pattern", [r"^\d{3}$", r"^[a-z]+\.[^.]+$", r"(?i)AB", r"^(?P<x>a)(?P=x)$", r"\bword\b", "é+"])
@pytest.mark.parametrize("text", ["123", "a.b", "xaBx", "aa", "one word", "é", "", "1234"])
def test_patterns_mean_what_jsonschema_means(pattern, text):
    for schema in ({"properties": {"s": {"pattern": pattern}}}, {"properties": {"s": {"patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}}}):
        argument = text if "pattern" in schema["properties"]["s"] else {text: "x"}
        right = [e.message for e in jsonschema.Draft202012Validator({"type": "object", **schema}).iter_errors({"s": argument})]
        found = Tool("t", "", {"type": "object", **schema}, lambda s: "called").call({"s": argument})
        assert (found.error is None) == (not right), (pattern, text, right)


def test_what_is_preset_is_not_shown_to_the_model():
    secret = "sk-secret-123456"
    schema = {"type": "object", "properties": {"q": {"type": "string"}, "key": {"type": "string", "maxLength": 20}}, "required": ["q", "key"]}
    tool = Tool("t", "", schema, lambda q, key: key[:2], preset={"key": secret})
    assert "key" not in json.dumps(tool.definition()) and tool.definition()["function"]["parameters"]["required"] == ["q"] and "key" in tool.parameters["properties"]
    assert tool.call({"q": "x"}).text == "sk" and tool.call({"q": "x", "key": "mine"}).text == "sk" and secret not in repr(tool)
    with pytest.raises(ConfigError, match="what is preset for 'key' does not fit its schema: it is not allowed by 'maxLength'") as raised:
        Tool("t", "", schema, lambda q, key: key, preset={"key": secret * 2})
    assert secret not in str(raised.value)
    whole = {**schema, "anyOf": [{"properties": {"q": {"const": "a"}}}, {"properties": {"q": {"const": "b"}}}]}
    told = Tool("t", "", whole, lambda q, key: key, preset={"key": secret}).call({"q": "c"})
    assert told.error == "t was not called: the arguments do not fit: together with what is preset, they: not allowed by 'anyOf'"
    then = {**schema, "if": {"properties": {"q": {"const": "c"}}}, "then": {"properties": {"key": {"maxLength": 3}}}}
    assert secret not in Tool("t", "", then, lambda q, key: key, preset={"key": secret}).call({"q": "c"}).text
    assert "'q' is a required property" in tool.call({}).error


def test_secrets_are_struck_out_of_errors():
    secret = 'line one\n"two" é'

    def t(url: str):
        raise ConnectionError(f"no answer from {url}?key={secret} {secret!r} {json.dumps(secret)}")

    found = Tool.from_function(t, secrets={"KEY": secret, "SHORT": "no"}).call({"url": "u"})
    assert found.error == """t raised ConnectionError: no answer from u?key=${env.KEY} '${env.KEY}' "${env.KEY}\""""
