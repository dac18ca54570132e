"""What an agent elsewhere did, in numbers and as a trace: counted from what was said through the proxy, since nothing else is known of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from proxy_data import Scripted, assert_exact

from nexrl_sdk.rollout.agent import AgentRolloutWorker
from nexrl_sdk.rollout.evaluator import EvaluationRunResult, Evaluator
from nexrl_sdk.serve.openai import CaptureProxy, proxied
from nexrl_sdk.types import SamplingParams

pytestmark = pytest.mark.timeout(120)
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}} for n in ("double", "half")]


def call(name: str, a: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {a}}}}}</tool_call>'


def ask(base_url: str, messages: list[Any]) -> dict[str, Any]:
    """The next message, which joins the conversation."""
    answer = httpx.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages, "tools": TOOLS}, timeout=60, trust_env=False)
    answer.raise_for_status()
    messages.append(answer.json()["choices"][0]["message"])
    return dict(messages[-1])


def result(message: dict[str, Any], i: int, said: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][i]["id"], "content": said}


class Sees(Evaluator):
    """The steps that an evaluator is shown."""

    def __init__(self) -> None:
        self.traces: list[Any] = []

    def evaluate(self, data: Any, evaluation_target: Any) -> EvaluationRunResult:
        self.traces.append(evaluation_target.observation[0]["trace"])
        return EvaluationRunResult(1.0, metrics={"seen": len(self.traces[-1]["children"])})


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    made: list[CaptureProxy] = []

    def go(agent: Any, *script: str, **settings: Any) -> tuple[Any, Sees, Scripted]:
        made.append(CaptureProxy(None))
        backend, sees = Scripted(script), Sees()
        worker = AgentRolloutWorker(backend, sees, agent=proxied(agent, proxy=made[-1]), group_size=1, sampling=SamplingParams(max_tokens=500), retries=0, **settings)
        return worker.run([{"prompt": "Go."}]), sees, backend

    yield go
    for proxy in made:
        proxy.stop()


def steps(trace: Any) -> list[tuple[Any, ...]]:
    return [(s["type"], s["name"], s["inputs"].get("arguments"), s["outputs"].get("result"), s["error"]) for s in trace["children"] if s["type"] == "TOOL"]


def test_turns_calls_and_errors_are_counted_and_each_result_is_of_its_call(run: Any) -> None:
    def agent(base_url: str, row: dict[str, Any]) -> str:
        talk: list[Any] = [{"role": "user", "content": row["prompt"]}]
        first = ask(base_url, talk)
        talk += [result(first, 1, "Error: an odd number"), result(first, 0, "14")]  # in another order
        second = ask(base_url, talk)
        talk.append(result(second, 0, ""))
        return str(ask(base_url, talk)["content"])

    (t,), sees, backend = run(agent, call("double", 7) + call("half", 7), call("half", 14), "Seven.")
    assert_exact(backend.drawn, [t])
    assert t["final_answer"] == "Seven." and {k: t["agent"][k] for k in ("turns", "tool_calls", "tool_errors", "ended")} == {"turns": 3, "tool_calls": 3, "tool_errors": 1, "ended": "answer"}
    assert {k: t.metrics[k] for k in ("turns", "tool_calls", "tool_errors", "seen")} == {"turns": 3.0, "tool_calls": 3.0, "tool_errors": 1.0, "seen": 6.0} and "seconds" not in t.metrics
    (trace,) = sees.traces
    found = [(kind, name, json.loads(a) if isinstance(a, str) else a, said, error) for kind, name, a, said, error in steps(trace)]
    assert found == [("TOOL", "half", {"a": 7}, "Error: an odd number", "Error: an odd number"), ("TOOL", "double", {"a": 7}, "14", None), ("TOOL", "half", {"a": 14}, "", None)]
    assert [s["type"] for s in trace["children"]] == ["LLM", "TOOL", "TOOL", "LLM", "TOOL", "LLM"] and trace["type"] == "AGENT"
    json.dumps(trace)


def test_calls_that_were_not_made_do_not_count(run: Any) -> None:
    (t,), sees, _ = run(lambda base_url, row: ask(base_url, [{"role": "user", "content": "?"}]) and "gave up", call("double", 7))
    assert (t["final_answer"], t["agent"]["turns"], t["agent"]["tool_calls"]) == ("gave up", 1, 0) and [s["type"] for s in sees.traces[0]["children"]] == ["LLM"]


def test_an_agent_that_answers_at_once_has_one_turn(run: Any) -> None:
    (t,), _, _ = run(lambda base_url, row: None if ask(base_url, [{"role": "user", "content": "?"}]) else "", "At once.")
    assert t["final_answer"] == "At once." and t.metrics["turns"] == 1.0 and t.metrics["tool_calls"] == t.metrics["forks"] == t.metrics["tool_call_problems"] == 0.0


def test_several_conversations_are_one_rollout_with_the_numbers_of_all(run: Any) -> None:
    def agent(base_url: str, row: dict[str, Any]) -> str:
        for question in ("first", "second"):
            talk: list[Any] = [{"role": "user", "content": question}]
            said = ask(base_url, talk)
            talk.append(result(said, 0, "14"))
            ask(base_url, talk)
        return "both"

    found, sees, backend = run(agent, *[call("double", 7), "Fourteen."] * 2)
    assert_exact(backend.drawn, found)
    assert len(found) == 2 and len(sees.traces) == 1, "a rollout is judged once"
    for t in found:
        assert (t["agent"]["turns"], t["agent"]["tool_calls"], t.reward) == (4, 2, 1.0)
    assert [s["type"] for s in sees.traces[0]["children"]] == ["LLM", "TOOL", "LLM"] * 2


def test_a_call_that_cannot_be_read_is_a_problem_and_no_call(run: Any) -> None:
    (t,), _, _ = run(lambda base_url, row: ask(base_url, [{"role": "user", "content": "?"}])["content"], '<tool_call>{"name": "double", "arguments": {"a": </tool_call>')
    assert t.metrics["tool_call_problems"] == 1.0 and t.metrics["tool_calls"] == 0.0 and t["tool_call_problems"]


def test_a_conversation_that_was_changed_forks_and_nothing_counts_twice(run: Any) -> None:
    def agent(base_url: str, row: dict[str, Any]) -> str:
        talk: list[Any] = [{"role": "user", "content": "?"}]
        said = ask(base_url, talk)
        talk.append(result(said, 0, "14"))
        said = ask(base_url, talk)
        talk[0] = {"role": "user", "content": "Another question?"}  # history is rewritten
        talk.append(result(said, 0, "7"))
        return str(ask(base_url, talk)["content"])

    found, sees, backend = run(agent, call("double", 7), call("half", 14), "Done.")
    assert_exact(backend.drawn, found)
    assert {(t["agent"]["turns"], t["agent"]["tool_calls"]) for t in found} == {(3, 2)}
    assert [s[3] for s in steps(sees.traces[0])] == ["14", "7"], "the result behind the rewritten beginning is of the model's own call"
    assert [s[1] for s in steps(sees.traces[0])].count("double") == 1 and [s["type"] for s in sees.traces[0]["children"]].count("LLM") == 3


def test_a_rollout_that_fails_says_how_far_it_came(run: Any) -> None:
    def agent(base_url: str, row: dict[str, Any]) -> str:
        talk: list[Any] = [{"role": "user", "content": "?"}]
        said = ask(base_url, talk)
        talk.append(result(said, 0, "Error: no number"))
        ask(base_url, talk)
        raise OSError("the tools' server is down")

    (t,), _, _ = run(agent, call("double", 7), "Hm.")
    assert t.status == "failed" and "OSError: the tools' server is down" in t["error"] and t["agent"]["turns"] == 2 and t["agent"]["ended"] == "failed"
    assert (t["agent"]["tool_calls"], t["agent"]["tool_errors"]) == (1, 1) and [s[3] for s in steps(t["trace"])] == ["Error: no number"]


@pytest.mark.parametrize("keeps_call", [True, False])
def test_results_behind_a_compacted_history_are_of_the_models_own_calls_and_count_once(run: Any, keeps_call: bool) -> None:
    """The same call three times, each word for word; then all but the end becomes a summary."""

    def agent(base_url: str, row: dict[str, Any]) -> str:
        talk: list[Any] = [{"role": "user", "content": "?"}]
        for said in ("1", "2"):
            talk.append(result(ask(base_url, talk), 0, said))
        last = ask(base_url, talk)
        kept = talk[-3:] if keeps_call else talk[-2:-1]  # in the second, a result without its call
        talk = [{"role": "user", "content": "Summary: 1, 2."}, *kept, *([] if keeps_call else [last]), result(last, 0, "3")]
        ask(base_url, talk)
        talk = [{"role": "user", "content": "Summary: 1, 2, 3."}, *talk[1:]]
        return str(ask(base_url, talk)["content"])

    found, sees, backend = run(agent, *[call("double", 7)] * 3, "Three.", "Done.")
    assert_exact(backend.drawn, found)
    assert [s[1:4] for s in steps(sees.traces[0])] == [("double", s[2], r) for s, r in zip(steps(sees.traces[0]), "123", strict=True)] and steps(sees.traces[0])[2][2] is not None
    assert {t["agent"]["tool_calls"] for t in found} == {3}


def test_examples_that_the_agent_shows_are_no_calls_of_the_model(run: Any) -> None:
    shown = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_9", "type": "function", "function": {"name": "half", "arguments": '{"a": 2}'}}]}

    def agent(base_url: str, row: dict[str, Any]) -> str:
        talk: list[Any] = [{"role": "user", "content": "2?"}, shown, result(shown, 0, "1"), {"role": "user", "content": "?"}]
        talk.append(result(ask(base_url, talk), 0, "14"))
        return str(ask(base_url, talk)["content"])

    (t,), sees, _ = run(agent, call("double", 7), "Done.")
    assert t["agent"]["tool_calls"] == 1 and [s[1] for s in steps(sees.traces[0])] == ["double"]
