"""Sessions as OpenAI clients, and NexAU's agents by way of a package in its form."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_world import FORGETFUL, Scripted, call

from nexrl_sdk.rollout.chat import ChatClient, NexAUAgent, _namespace, completion_dict, has_nexau, trace_of
from nexrl_sdk.rollout.session import Session, session_trajectories
from nexrl_sdk.types import Completion, ConfigError, SamplingParams

TOKENIZER: list[Any] = []  # the byte tokenizer, once a test has asked for it
HELLO = [{"role": "user", "content": "hi"}]
NEXAU = '''
class InMemoryTracer:
    def __init__(self): self.spans = []
    def dump_traces(self): return self.spans

class AgentConfig:
    def __init__(self, path):
        self.name, self.tracers = "main", [InMemoryTracer()]
        self.text = open(path).read()
    @classmethod
    def from_yaml(cls, path): return cls(path)

class Agent:
    def __init__(self, *, config): self.config = config
    def run(self, *, message, context=None, custom_llm_client_provider=None):
        one, two = (custom_llm_client_provider(n) for n in ("main", "helper"))
        first = two.chat.completions.create(model="m", messages=[{"role": "user", "content": message + "?"}])
        last = one.chat.completions.create(model="m", messages=[{"role": "user", "content": message}, {"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "go on"}])
        self.config.tracers[0].spans.append({"type": "AGENT", "children": []})
        return last.choices[0].message.content
'''


@pytest.fixture(autouse=True)
def tokenizer(byte_tokenizer: Any) -> None:
    TOKENIZER[:] = [byte_tokenizer]


class Says:
    """A backend that says what it is given, one after the other."""

    def __init__(self, *texts: str):
        self.tokenizer, self.texts, self.asked = TOKENIZER[0], list(texts), []

    def sample(self, prompts: Any, params: Any, n: int = 1, stop_flag: Any = None) -> list[list[Completion]]:
        self.asked.append((list(prompts[0]), params))
        made = []
        for _ in range(n):
            tokens = self.tokenizer.encode(self.texts.pop(0) + "<|end|>", add_special_tokens=False)
            made.append(Completion(tokens, [-0.25] * len(tokens), "stop", 4))
        return [made]


def test_answers_have_openais_form_and_the_tokens_that_were_drawn() -> None:
    backend = Says("one", "two")
    client = ChatClient(Session(backend), model="tiny")
    answer = client.chat.completions.create(model="x", messages=HELLO, n=2, max_tokens=9, max_completion_tokens=7, stop=["\n"])
    assert [c.message.content for c in answer.choices] == ["one", "two"] and answer.model == "tiny" and answer.object == "chat.completion"
    assert backend.asked[0][1].max_tokens == 7 and backend.asked[0][1].stop == ["\n"]
    train = answer.model_extra["nexrl_train"]
    assert train["prompt_tokens"] == backend.asked[0][0] and backend.tokenizer.decode(train["response_tokens"]) == "one<|end|>"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stream": True}, "leave stream out"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "a named tool cannot be promised"),
        ({"response_format": {"type": "json_object"}}, "leave response_format out"),
        ({"logit_bias": {"1": 5}}, "leave logit_bias out"),
        ({"parallel_tool_calls": False}, "leave parallel_tool_calls out"),
        ({"store": True}, "leave store out"),
        ({"logprobs": True}, "under nexrl_train"),
        ({"n": 0}, "n: Input should be greater"),
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"extra_body": "x"}, "extra_body holds more fields"),
        ({"extra_body": {"guided_json": {}}}, "guided_json is no field that is known here"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "'image_url'; this model reads text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "whose role is one of"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], expected: str) -> None:
    session = Session(Says())
    with pytest.raises(ConfigError, match=expected):
        ChatClient(session).create(**{"messages": HELLO, **options})
    assert session.calls == 0


def test_a_client_and_the_proxy_refuse_the_same() -> None:
    """Whatever field openai's own client knows is read alike by both."""
    import inspect

    from openai.resources.chat.completions import Completions

    from nexrl_sdk.rollout.request import HARMLESS, NEUTRAL, NOTED, Chat

    theirs = set(inspect.signature(Completions.create).parameters) - {"self", "timeout", "extra_headers", "extra_query", "extra_body"}
    assert theirs <= {*HARMLESS, *NEUTRAL, *NOTED, *Chat.model_fields}


@pytest.mark.parametrize("without_openai", [False, True])
def test_an_answer_is_sent_back_as_it_came(without_openai: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As agents write it: `messages.append(response.choices[0].message)`."""
    if without_openai:
        monkeypatch.setattr("nexrl_sdk.rollout.chat._as_completion", _namespace)
    backend = Says('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "I look.\nObservation: rain", "done")
    session = Session(backend)
    client, messages = ChatClient(session), [{"role": "developer", "content": "Be brief."}, *HELLO]
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = client.chat.completions.create(messages=messages, tools=tools, stop=None, reasoning_effort="low").choices[0].message
    messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"}]
    second = client.chat.completions.create(messages=messages, stop="\nObservation:", user="me").choices[0].message
    assert second.content == "I look."
    assert client.chat.completions.create(messages=[*messages, second, *HELLO]).choices[0].message.content == "done"
    (trajectory,) = session_trajectories(session)
    assert len(trajectory["turns"]) == 3 and trajectory.prompt.startswith("<|system|>Be brief.") and session.overridden == {"reasoning_effort": "low"}


def test_a_call_that_is_required_is_noted_and_the_model_is_free() -> None:
    session = Session(Says("no", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
    answers = [ChatClient(session).create(messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required").choices[0] for _ in range(2)]
    assert [a.finish_reason for a in answers] == ["stop", "tool_calls"] and session.overridden == {"tool_choice": "required"}


def test_tools_that_the_template_does_not_show_are_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from nexrl_sdk.rollout import session as room

    monkeypatch.setattr(room, "_TOLD", set())
    session = Session(Says("a", "b", "c"))
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    caplog.set_level("INFO", "nexrl_sdk.rollout.session")
    for _ in range(2):
        ChatClient(session).create(messages=HELLO, tools=tools)
    assert caplog.text.count("shows no tools") == 1 and session.overridden == {"strict": True}
    monkeypatch.setattr(session.tokenizer, "chat_template", "{{ tools }}" + session.tokenizer.chat_template)
    monkeypatch.setattr(room, "_TOLD", set())
    ChatClient(session).create(messages=HELLO, tools=tools)
    assert caplog.text.count("shows no tools") == 1


@pytest.mark.parametrize("options", [{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, {}])
def test_no_tools_are_no_tools(options: dict[str, Any]) -> None:
    """An agent that describes its tools in words reads the calls itself."""
    said = 'Let me see. <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    session = Session(Says(f"<think>hm</think>\n{said}", "done"))
    (answer,) = ChatClient(session).create(messages=HELLO, **options).choices
    assert answer.finish_reason == "stop" and answer.message.tool_calls is None and answer.message.content == said and answer.message.reasoning_content == "hm"
    ChatClient(session).create(messages=[*HELLO, answer.message, *HELLO], **options)
    assert len(session_trajectories(session)) == 1


def test_fields_that_ask_for_nothing_are_let_pass_and_none_given_is_not_looked_at() -> None:
    from openai import NOT_GIVEN

    answer = ChatClient(Session(Says("a"))).create(messages=HELLO, tool_choice="auto", user="me", logit_bias=None, response_format=NOT_GIVEN, stream=False)
    assert answer.choices[0].message.content == "a"


def test_without_openai_the_same_attributes_are_there() -> None:
    session = Session(Says('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "b"))
    made = [_namespace(completion_dict([session.complete(HELLO)], "m")) for _ in range(2)]
    assert made[0].choices[0].message.tool_calls[0].function.name == "f" and made[0].choices[0].finish_reason == "tool_calls"
    assert made[1].choices[0].message.content == "b" and made[1].choices[0].message.tool_calls is None


@pytest.fixture
def nexau(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package in NexAU's form."""
    (tmp_path / "nexau").mkdir()
    (tmp_path / "nexau" / "__init__.py").write_text(NEXAU)
    for name in [n for n in sys.modules if n.split(".")[0] == "nexau"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "nexau"]:
        del sys.modules[name]


def test_an_agent_of_nexaus_is_given_sessions_for_itself_and_its_sub_agents(nexau: Path) -> None:
    (nexau / "agent.yaml").write_text("name: main\n")
    session = Session(Says("helped", "done"))
    assert has_nexau() and NexAUAgent(nexau / "agent.yaml").run("do it", client=session) == "done"
    found = session_trajectories(session.family(), run_id="r")
    assert [t.get("agent_name") for t in found] == [None, "helper"] and session.meta["nexau_traces"] == [{"type": "AGENT", "children": []}]
    drawn = [session.tokenizer.decode([x for x, m in zip(t.tokens, t.loss_mask) if m]) for t in found]
    assert drawn == ["done<|end|>", "helped<|end|>"]


def test_without_nexau_its_agents_are_refused(tmp_path: Path) -> None:
    if has_nexau():
        pytest.skip("NexAU is installed here")
    with pytest.raises(ConfigError, match=r"AgentConfig\.load reads the same file"):
        NexAUAgent(tmp_path / "agent.yaml")


def test_a_trace_has_each_step_once_though_the_template_forgets_and_the_agent_drops_messages() -> None:
    backend = Scripted([f"<think>hm</think>{call('add', a=1)}", "<think>so</think>2", f"<think>well</think>{call('add', a=2)}", "3"], template=FORGETFUL)
    session, messages = Session(backend, sampling=SamplingParams(max_tokens=500)), [{"role": "user", "content": "1+1?"}]
    for _ in range(2):
        reply = session.complete(messages).message
        messages += [reply, {"role": "tool", "content": f"r{len(messages)}", "tool_call_id": reply["tool_calls"][0]["id"]}]
        messages += [session.complete(messages).message, {"role": "user", "content": "1+2?"}]
    session.complete([{"role": "user", "content": "so far:"}, *messages[-4:]])  # without what came first
    found = session_trajectories(session)
    assert len(found) == 3  # one sequence a question
    steps = [(s["type"], s["outputs"].get("result")) for s in trace_of(found)["children"]]
    assert steps == [("LLM", None), ("TOOL", "r1"), ("LLM", None), ("LLM", None), ("TOOL", "r5"), ("LLM", None), ("LLM", None)]
    plain = [{"prompt_messages": t["prompt_messages"], "response_message": t["response_message"]} for t in found[:2]]
    assert [s["type"] for s in trace_of(plain)["children"]] == [kind for kind, _ in steps[:6]]
