"""Answers as messages: round trips through the families' own templates, and what models get wrong."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_families import AGENTS, loaded

from nexrl_sdk.tokens.parse import FORMATS, Format, parse_message, response_format, said, template_message
from nexrl_sdk.tokens.render import _template
from nexrl_sdk.types import ConfigError

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "deep": {"type": "object"}, "many": {"type": "array"}, "on": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "say-it", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}},
]
LOOSE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = st.text(st.sampled_from('ab ✓日é{}[]:,"\\\n.<>/1'), max_size=14)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 10**20) | st.floats(-3, 3).map(lambda x: round(x, 3)) | WORDS, lambda x: st.lists(x, max_size=2) | st.dictionaries(WORDS, x, max_size=2), max_leaves=5)
CALLS = st.one_of(
    st.fixed_dictionaries({}, optional={"a": st.integers(-(10**12), 10**12), "b": st.integers(-5, 5), "deep": st.dictionaries(WORDS, VALUES, max_size=2), "many": st.lists(VALUES, max_size=2), "on": st.booleans()}).map(lambda a: ("add", a)),
    WORDS.filter(lambda t: not t.startswith("\n") and not t.endswith("\n")).map(lambda t: ("say-it", {"text": t})),
)
PLAIN = st.text(st.characters(exclude_categories=("Cs", "Co", "Cc")), max_size=20)
THINKS = {"qwen3", "qwen3-thinking", "chatml-inline"}  # whose templates show what was just thought


class Words:
    """As much of a tokenizer as reading text needs."""

    chat_template = "<tool_call>"


@pytest.fixture(params=list(AGENTS))
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return request.param


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and arguments of each call."""
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


def asked(family: str, tokenizer: Any, message: dict[str, Any]) -> tuple[str, str]:
    """The prompt's text, and what transformers' rendering of the message adds to it."""
    user = {"role": "user", "content": "hi"}
    kwargs = {"tools": TOOLS, **AGENTS[family].get("kwargs", {})}
    end = AGENTS[family]["end"]
    prompt, whole = (_template(tokenizer, m, g, kwargs) for m, g in (([user], True), ([user, message], False)))
    whole = whole[: whole.rindex(end) + len(end)]
    if not whole.startswith(prompt):  # shown otherwise than asked for: from where the answer's turn begins
        prompt = _template(tokenizer, [user], False, kwargs)
        lead = {"deepseek-r1": "<｜Assistant｜>"}.get(family, "<|im_start|>assistant\n")
        assert whole[len(prompt) :].startswith(lead)
        return prompt + lead, whole[len(prompt) + len(lead) :]
    return prompt, whole[len(prompt) :]


def test_formats_are_found_from_the_template(family: str) -> None:
    assert response_format(loaded(family)).name == AGENTS[family]["format"]


@LOOSE
@given(content=PLAIN, thought=PLAIN, calls=st.lists(CALLS, max_size=3))
def test_messages_come_back_from_their_own_rendering(family: str, content: str, thought: str, calls: list[tuple[str, Any]]) -> None:
    tokenizer = loaded(family)
    calls = calls[:1] if family == "llama3.1" else calls
    if family in ("llama3.1", "mistral-v3") and calls:
        content = ""  # which these do not show beside calls
    thought = thought if family in THINKS else ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought.strip():
        message["reasoning_content"] = thought.strip()
    if calls:
        message["tool_calls"] = [{"id": f"abcdefgh{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    shown = {**message, "content": f"<think>{thought}</think>" + content} if family == "chatml-inline" and thought.strip() else message
    prompt, answer = asked(family, tokenizer, shown)
    for given_ in (answer, tokenizer(answer, add_special_tokens=False)["input_ids"]):
        read = parse_message(tokenizer, given_, prefix=prompt, tools=TOOLS)
        assert read.problem is None
        assert read.message["content"].strip() == content.strip()
        assert read.message.get("reasoning_content", "") == thought.strip()
        assert calls_of(read.message) == calls
        assert said(read.message, True) == said(message, True)
    if family.startswith("mistral") and calls:
        assert [c["id"] for c in read.message["tool_calls"]] == [c["id"] for c in message["tool_calls"]]


@LOOSE
@given(cut=st.floats(0, 1), calls=st.lists(CALLS, min_size=1, max_size=2))
def test_a_cut_answer_loses_no_text_and_makes_no_call_up(family: str, cut: float, calls: list[tuple[str, Any]]) -> None:
    tokenizer, calls = loaded(family), calls[:1] if family == "llama3.1" else calls
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": f"abcdefgh{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]}
    prompt, answer = asked(family, tokenizer, message)
    part = answer[: int(cut * len(answer))]
    read = parse_message(tokenizer, part, prefix=prompt, tools=TOOLS)
    assert calls_of(read.message) == calls[: len(calls_of(read.message))]
    if not read.message.get("tool_calls") and "<think>" not in part:
        assert read.message["content"].strip() in part and len(read.message["content"].strip()) >= len(part.strip()) - len(AGENTS[family]["end"])


@LOOSE
@given(text=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "a>", "<parameter=", "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "\n```json\n", '{"name": "f", "arguments": {"a": 1}}', '{"name":', "[", "]", "{", "}", "NaN", '"', "x", " ", "\n", "✓", "\ud800"]), max_size=24).map("".join), form=st.sampled_from(list(FORMATS)), opened=st.booleans())  # fmt: skip
def test_anything_is_read_without_an_error_and_nothing_vanishes(text: str, form: str, opened: bool) -> None:
    read = parse_message(Words(), text, format=form, prefix="<think>\n" if opened else "", tools=TOOLS)
    assert json.loads(json.dumps(read.message)) == read.message and "\ud800" not in json.dumps(read.message, ensure_ascii=False)
    for _, arguments in calls_of(read.message):
        assert isinstance(arguments, dict)
    if not read.message.get("tool_calls") and not read.thought:
        assert read.message["content"] == text.replace("\ud800", "\ufffd")
    if read.thought and not read.message.get("tool_calls"):
        rest = text.replace("\ud800", "\ufffd")
        assert ("<think>\n" * opened + rest).startswith(read.thought) and rest.strip().endswith(read.message["content"])


def hermes(body: str) -> Any:
    """What a call of these words is read as."""
    return parse_message(Words(), f"See: <tool_call>{body}</tool_call> so.")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "NaN"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "NaN"),
        ('{"name": "f", "arguments": [1]}', "no JSON object"),
        ('{"name": "f", "arguments": "words"}', "no JSON object"),
        ('{"name": 3, "arguments": {}}', "no name"),
        ('{"arguments": {}}', "no name"),
        ('{"name": "f", "arguments": {"x": 1}', "is no JSON"),
        ("{'name': 'f'}", "is no JSON"),
        ("", "is empty"),
        ("[]", "is no JSON object"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "is no JSON"),
        ('{"name": "f", "arguments": ' + '{"a":' * 10_000 + "1" + "}" * 10_001, "nested too deeply"),
        ('{"name": "f", "arguments": ' + '{"a":' * 150 + "1" + "}" * 151, "nested too deeply"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 10_000 + "]" * 10_000 + "}}", "nested too deeply"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_read_stay_where_they_stood(body: str, why: str) -> None:
    read = hermes(body)
    assert read.message == {"role": "assistant", "content": f"See: <tool_call>{body}</tool_call> so."}
    assert read.problem is not None and why in read.problem and len(read.problem) < 1000


def test_a_wrong_call_beside_right_ones() -> None:
    read = parse_message(Words(), 'a<tool_call>{"name": "f"}</tool_call>b<tool_call>{no</tool_call>c<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>d')
    assert calls_of(read.message) == [("f", {}), ("g", {"x": 1})]
    assert read.message["content"] == "ab<tool_call>{no</tool_call>cd"
    assert read.problem is not None and read.problem.count("a tool call") == 1
    assert len({c["id"] for c in read.message["tool_calls"]}) == 2


def test_the_last_of_doubled_keys_counts_and_ids_are_stable() -> None:
    text = '<tool_call>{"name": "f", "name": "g", "arguments": {"x": 1, "x": 2}}</tool_call>'
    one, two, other = (parse_message(Words(), t).message for t in (text, text, text + " "))
    assert calls_of(one) == [("g", {"x": 2})]
    assert one == two and one["tool_calls"][0]["id"] != other["tool_calls"][0]["id"]
    assert len(one["tool_calls"][0]["id"]) == 9 and one["tool_calls"][0]["id"].isalnum()


def test_half_characters_in_arguments_become_whole_ones() -> None:
    read = hermes('{"name": "f", "arguments": {"x": "\\ud800", "y": "\\ud83d\\ude42"}}')
    assert calls_of(read.message) == [("f", {"x": "\ufffd", "y": "🙂"})]
    assert template_message({"role": "user", "content": "\ud800x"})["content"] == "\ufffdx"


def test_what_is_thought_calls_nothing() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    read = parse_message(Words(), f"<think>I could {call}.</think>No.")
    assert read.message == {"role": "assistant", "content": "No.", "reasoning_content": f"I could {call}."}
    assert read.thought == f"<think>I could {call}.</think>"
    assert parse_message(Words(), f"I could {call}", prefix="<|im_start|>assistant\n<think>\n").message["reasoning_content"] == f"I could {call}"
    assert parse_message(Words(), f"a </think> {call}").message["content"] == "a </think>"


def test_the_word_think_in_a_question_or_an_answer_is_no_tag() -> None:
    prompt = "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert parse_message(Words(), "A tag: <think> opens it.", prefix=prompt).message == {"role": "assistant", "content": "A tag: <think> opens it."}


def test_an_end_in_letters_is_text() -> None:
    tokenizer = loaded("qwen2.5")
    letters = [i for c in "say <|im_end|>" for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert parse_message(tokenizer, [*letters, end, end]).message["content"] == "say <|im_end|>"
    assert parse_message(tokenizer, "say it<|im_end|><|endoftext|>").message["content"] == "say it"
    assert parse_message(tokenizer, []).message == {"role": "assistant", "content": ""}
    assert parse_message(tokenizer, [end]).message["content"] == ""


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})]),
        ('{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})]),
        ('Wait. <|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ('{"name": "Bob", "age": 3}', []),
        ('{"answer": 42}', []),
        ("[1, 2]", []),
        ("42", []),
        ('{"name": "f", "parameters": {"x": 1}', []),
        ('Call {"name": "f", "parameters": {}}', []),
        ('{"name": "f", "parameters": {}} and more', []),
    ],
)  # fmt: skip
def test_llama_answers_that_are_calls_and_that_are_not(text: str, calls: list[tuple[str, Any]]) -> None:
    read = parse_message(Words(), text, format="llama")
    assert calls_of(read.message) == calls and read.problem is None
    assert calls or read.message["content"] == text


@pytest.mark.parametrize("text", ["<|python_tag|>print(1)", '<|python_tag|>f.call(x="1")', "<|python_tag|>"])
def test_llama_tags_without_a_call_are_told(text: str) -> None:
    read = parse_message(Words(), text, format="llama")
    assert read.message["content"] == text and read.problem is not None


@pytest.mark.parametrize(
    "body",
    ["<parameter=a>\n1\n", "<parameter=a>1</parameter>", "<parameter=a>1</parameter></tool_call>"],
)
def test_elements_that_are_not_closed_are_no_call(body: str) -> None:
    text = f"<tool_call>\n<function=add>\n{body}"
    read = parse_message(Words(), text, format="qwen_xml", tools=TOOLS)
    assert read.message["content"] == text and "not closed" in str(read.problem)


def test_elements_keep_their_text_and_get_their_types() -> None:
    value = "if a < b:\n\n  say('<parameter=x>')\n"
    text = f"<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=deep>\n{{\"x\": [1]}}\n</parameter>\n<parameter=free>\n{value}\n</parameter>\n</function>"
    assert calls_of(parse_message(Words(), text, format="qwen_xml", tools=TOOLS).message) == [("add", {"a": 1, "on": True, "deep": {"x": [1]}, "free": value})]
    assert calls_of(parse_message(Words(), text, format="qwen_xml").message)[0][1]["a"] == "1"
    deep = "<function=add><parameter=many>" + "[" * 9000 + "]" * 9000 + "</parameter></function>"
    assert "tool_calls" not in parse_message(Words(), deep, format="qwen_xml", tools=TOOLS).message


def test_every_beginning_of_an_answer_is_read() -> None:
    text = '<think>so</think>Hi <tool_call>\n{"name": "f", "arguments": {"x": "✓"}}\n</tool_call>'
    seen = [parse_message(Words(), text[:n]).message for n in range(len(text) + 1)]
    assert all(not m.get("tool_calls") for m in seen[: text.index("}}") + 2])
    assert seen[-1]["content"] == "Hi" and seen[-1]["reasoning_content"] == "so"


def test_a_tokenizers_own_response_template_is_used() -> None:
    class Own(Words):
        response_template: ClassVar[dict[str, Any]] = {
            "start_anchor": "<a>",
            "defaults": {"role": "assistant"},
            "fields": {"content": {}, "thinking": {"open": "{{", "close": "}}"}, "tool_calls": {"open": "((", "close": "))", "repeats": True, "content": "json", "transform": {"type": "function", "function": "{content}"}}},
        }

    read = parse_message(Own(), '{{hm}}yes(({"name": "f", "arguments": {"x": 1}}))', prefix="<a>")
    assert read.message["content"] == "yes" and read.message["reasoning_content"] == "hm" and calls_of(read.message) == [("f", {"x": 1})]
    broken = parse_message(Own(), "yes((no))", prefix="<a>")
    assert broken.message["content"] == "yes((no))" and "cannot read" in str(broken.problem)
    assert calls_of(parse_message(Own(), '<tool_call>{"name": "f"}</tool_call>', format="hermes").message) == [("f", {})]


def test_unknown_formats_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        parse_message(Words(), "x", format="hermis")
    mine = Format("mine", (), begin=r"CALL ", end=r"\n")
    assert calls_of(parse_message(Words(), 'CALL {"name": "f"}\ndone', format=mine).message) == [("f", {})]


PIECES = ["<think></think>", "<think>", "</think>", "<tool_call>", "<tool_call> ", "</tool_call>", "<tool_call><function=", "<function=a>", "<function=a><parameter=a>", "<parameter=a>", "<parameter=", "</parameter>", "<function=a></function>", "[TOOL_CALLS]", "[TOOL_CALLS]a[CALL_ID]", "[TOOL_CALLS]a[ARGS]{", "<|python_tag|>", '{"name":"f","parameters":{}};', "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜> ", "<｜tool▁call▁begin｜>a", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "{", '{"a":', "[", '"', "\\", " ", "\n", "a "]  # fmt: skip


@pytest.mark.timeout(60)  # a search that begins again at each piece takes many minutes
@pytest.mark.parametrize("form", list(FORMATS))
def test_work_grows_with_the_length_of_an_answer_and_not_faster(form: str) -> None:
    for piece in PIECES:
        text = "<tool_call><function=a>" * (form == "qwen_xml") + piece * (200_000 // len(piece)) + "x"
        parse_message(Words(), text, format=form, tools=TOOLS)


OPENINGS = {"qwen_xml": ["<function=", "<tool_call>"], "deepseek": ["<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>"], "mistral_args": ["[TOOL_CALLS]", "[TOOL_CALLS]a[CALL_ID]"], "mistral": ["[TOOL_CALLS]"], "hermes": ["<tool_call>"], "llama": ["<|python_tag|>"]}  # fmt: skip


@pytest.mark.timeout(60)  # a pattern that tries each way to part spaces takes hours
@pytest.mark.parametrize("form", list(FORMATS))
def test_spaces_behind_an_opening_are_read_once(form: str) -> None:
    for opening in OPENINGS[form]:
        for space in (" ", "\t", "\n", " \n", "\u2003", "a ", " a"):
            text = opening + space * (400_000 // len(space))
            for answer in (text, text + "<", text + "<function=a></function>", "<think>" + text):
                assert calls_of(parse_message(Words(), answer, format=form, tools=TOOLS).message) in ([], [("a", {})])


@pytest.mark.parametrize(
    "form, text, names",
    [
        ("qwen_xml", "<function= \n f g >\n</function>", ["f g"]),
        ("qwen_xml", "<function= >\n</function>", []),
        ("deepseek", "<｜tool▁call▁begin｜> function<｜tool▁sep｜> f\n```json\n{}\n```<｜tool▁call▁end｜>", ["f"]),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>", ["function"]),
        ("deepseek", "<｜tool▁call▁begin｜> <｜tool▁sep｜>{}<｜tool▁call▁end｜>", []),
        ("mistral_args", "[TOOL_CALLS] f [ARGS]{}", ["f"]),
        ("mistral_args", "[TOOL_CALLS] [ARGS]{}", []),
    ],
)
def test_names_begin_with_no_space(form: str, text: str, names: list[str]) -> None:
    parsed = parse_message(Words(), text, format=form)
    assert [name for name, _ in calls_of(parsed.message)] == names
    assert names or "has no name" in str(parsed.problem)


def test_a_megabyte_of_arguments_and_of_ends() -> None:
    big = json.dumps({"name": "f", "arguments": {"x": "y✓\n" * 300_000}}, ensure_ascii=False)
    assert len(calls_of(hermes(big).message)[0][1]["x"]) == 900_000
    many = json.dumps({"name": "f", "arguments": {"x": [[i] for i in range(100_000)]}})
    assert len(calls_of(hermes(many).message)[0][1]["x"]) == 100_000
    assert parse_message(loaded("qwen3"), "hi" + "<|im_end|>" * 50_000).message["content"] == "hi"
    assert parse_message(loaded("qwen3"), [loaded("qwen3").eos_token_id] * 50_000).message["content"] == ""
