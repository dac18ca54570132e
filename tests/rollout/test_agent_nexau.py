"""Agents of NexAU's own through whole runs, with a package in its form that the test writes; and workers that return an output with its evaluation, as NexRL's do."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_world import Scripted, call, check_exact

from nexrl_sdk import Recipe
from nexrl_sdk.rollout.agent import AgentRolloutWorker, BaseNexAURolloutWorker
from nexrl_sdk.rollout.chat import NexAUAgent
from nexrl_sdk.rollout.evaluator import EvaluationRunResult
from nexrl_sdk.rollout.rollouts import Rollouts

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
NEXAU = '''
import json, yaml

class InMemoryTracer:
    def __init__(self): self.spans = []
    def dump_traces(self): return self.spans

class AgentConfig:
    made = []
    def __init__(self, path):
        found = yaml.safe_load(open(path))
        self.name, self.turns, self.says = found["name"], found.get("max_iterations", 5), found.get("says")
        self.tracers = [object(), InMemoryTracer()] if found.get("traced", True) else None
        AgentConfig.made.append(self)
    @classmethod
    def from_yaml(cls, path): return cls(path)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]

class Agent:
    """A loop around tool calls, a helper that is asked first, and a trace of it all."""
    def __init__(self, *, config): self.config = config
    def run(self, *, message, context=None, custom_llm_client_provider=None):
        if self.config.says == "raise": raise OSError("the tools' server is down")
        helper = custom_llm_client_provider("helper")
        hint = helper.chat.completions.create(model="m", messages=[{"role": "user", "content": "helper: " + message}])
        client, messages = custom_llm_client_provider(self.config.name), [{"role": "system", "content": "Add for " + str((context or {}).get("who"))}, {"role": "user", "content": message}]
        spans = [{"name": "helper", "type": "SUB_AGENT", "children": []}]
        for _ in range(self.config.turns):
            said = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0.1).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            spans.append({"name": "m", "type": "LLM", "outputs": {"content": said.content}, "children": []})
            if not said.tool_calls: break
            for c in said.tool_calls:
                given = json.loads(c.function.arguments)
                result = str(given["a"] + given["b"]) if c.function.name == "add" else "Error: no such tool"
                spans.append({"name": c.function.name, "type": "TOOL", "error": None, "children": []})
                messages.append({"role": "tool", "tool_call_id": c.id, "content": result})
        if self.config.tracers: self.config.tracers[1].spans.append({"name": self.config.name, "type": "AGENT", "children": spans})
        if self.config.says == "nothing": return None
        if self.config.says == "binding": return __import__("importlib").import_module("tool_of_ours").add(20, 22)
        return (said.content, {"state": object()}) if self.config.says == "tuple" else said.content
'''
EVALUATOR = """
from nexrl_sdk import EvaluationRunResult, Evaluator
class Judge(Evaluator):
    def evaluate(self, data, evaluation_target):
        (seen,) = evaluation_target.observation
        kinds = [s["type"] for s in seen["trace"].get("children", [])]
        return EvaluationRunResult(float(evaluation_target.final_answer == data["answer"]), metrics={"tools": kinds.count("TOOL"), "models": kinds.count("LLM")})
"""
ROWS = [{"prompt": "12 + 30?", "answer": "42", "who": "Ann"}, {"prompt": "1 + 2?", "answer": "4", "who": "Bob"}]


def say(text: str, params: Any) -> str:
    """A hint, a call, and what the tool said."""
    if "helper:" in text:
        return "use add"
    a, b = text.split("<|user|>")[1].split("?")[0].split(" + ")
    return text.rpartition("<|tool|>")[2].partition("<|end|>")[0] if "<|tool|>" in text else call("add", a=int(a), b=int(b))


@pytest.fixture
def nexau(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nexau").mkdir()
    (tmp_path / "nexau" / "__init__.py").write_text(NEXAU)
    (tmp_path / "agent.yaml").write_text("name: main\n")
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    for name in [n for n in sys.modules if n.split(".")[0] == "nexau"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "nexau"]:
        del sys.modules[name]
    sys.modules.pop("tool_of_ours", None)
    sys.path[:] = [p for p in sys.path if not p.startswith(str(tmp_path))]


def recipe(folder: Path, **worker: Any) -> Recipe:
    given = {"type": "agent", "agent_config_path": "agent.yaml", "evaluator_module_path": "evaluator.py:Judge", "max_tokens": 200, "retries": 0, **worker}
    return Recipe(model="tiny", data=ROWS, base_dir=folder, rollout_worker=given, trajectory_pool={"group_size": 2})


def by_agent(found: Any) -> dict[str | None, list[Any]]:
    return {name: [t for t in found if t.get("agent_name") == name] for name in (None, "helper")}


def test_a_recipe_runs_nexaus_agent_with_its_helper_token_for_token(nexau: Path) -> None:
    backend = Scripted(say)
    worker = recipe(nexau).make_worker(backend)
    assert isinstance(worker.agent, NexAUAgent)
    found = worker.run(ROWS)
    check_exact(backend.drawn, found)
    parts = by_agent(found)
    assert len(parts[None]) == len(parts["helper"]) == 4 and {t.run_id for t in parts[None]} == {t.run_id for t in parts["helper"]}
    assert [t["final_answer"] for t in parts[None]] == ["42", "42", "3", "3"] and [t.reward for t in parts[None]] == [1.0, 1.0, 0.0, 0.0] and [t.reward for t in parts["helper"]] == [1.0, 1.0, 0.0, 0.0]
    for t in parts[None]:
        assert t["trace"]["type"] == "AGENT" and (t.metrics["tools"], t.metrics["models"]) == (1, 2)
        assert f"Add for {t.data['who']}" in t.prompt and len(t["turns"]) == 2
        assert t["agent"]["turns"] == 3  # the helper's, too
        assert (t["agent"]["tool_calls"], t["agent"]["tool_errors"]) == (1, 0)
    made = sys.modules["nexau"].AgentConfig.made
    assert len({id(c) for c in made}) == 4, "a new agent for each rollout"


@pytest.mark.parametrize(("more", "answer"), [("says: tuple\n", "42"), ("says: nothing\n", "42"), ("traced: false\n", "42"), ("max_iterations: 1\n", "")])
def test_what_nexaus_agents_may_return(nexau: Path, more: str, answer: str) -> None:
    (nexau / "agent.yaml").write_text("name: main\n" + more)
    backend = Scripted(say)
    found = recipe(nexau).make_worker(backend).run(ROWS[:1])
    check_exact(backend.drawn, found)
    assert [t["final_answer"] for t in by_agent(found)[None]] == [answer] * 2 and {t.status for t in found} == {"ok"}
    if more == "traced: false\n":  # the conversation is the trace
        assert {(t.metrics["tools"], t.metrics["models"], t["agent"]["tool_calls"]) for t in found} == {(1, 3, 1)}


def test_tools_are_found_in_the_workspace_or_beside_the_file(nexau: Path) -> None:
    for workspace in (None, nexau / "there"):
        folder = nexau / "agents" if workspace is None else workspace
        folder.mkdir()
        (nexau / "agents" / "agent.yaml").write_text("name: main\nsays: binding\n")
        (folder / "tool_of_ours.py").write_text(f"def add(a, b): return f'{{a + b}} by {folder.name}'\n")
        sys.modules.pop("tool_of_ours", None)
        importlib.invalidate_caches()
        found = AgentRolloutWorker(Scripted(say), lambda row, answer: 1.0, agent=nexau / "agents" / "agent.yaml", workspace=workspace, group_size=1).run(ROWS[:1])
        assert by_agent(found)[None][0]["final_answer"] == f"42 by {folder.name}", found[0].get("error")
    assert recipe(nexau, agent_config_path="agents/agent.yaml", agent_workspace="there").make_worker(Scripted(say)).agent.workspace == nexau / "there"


def test_a_failure_of_nexaus_is_recorded_with_its_cause(nexau: Path) -> None:
    (nexau / "agent.yaml").write_text("name: main\nsays: raise\n")
    found = recipe(nexau).make_worker(Scripted(say)).run(ROWS[:1])
    assert [(t.status, t.reward) for t in found] == [("failed", None)] * 2 and all("OSError: the tools' server is down" in t["error"] for t in found)


def test_rollouts_of_nexaus_are_stored_and_read_again(nexau: Path) -> None:
    backend = Scripted(say)
    found = recipe(nexau).make_worker(backend).run(ROWS[:1])
    again = Rollouts.load(found.save(nexau / "r.jsonl"), backend.tokenizer)
    assert [json.dumps(t["trace"]) for t in again] == [json.dumps(t["trace"]) for t in found] and [list(t.tokens) for t in again] == [list(t.tokens) for t in found]


# -- (output, evaluation) -------------------------------------------------------------------------------------------


class Output:
    """What NexRL's workers return beside the evaluation."""

    def __init__(self, final_answer: Any):
        self.final_answer = final_answer


RETURNS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (("42", EvaluationRunResult(0.5, "42", {"m": 2.0})), "42", ("ok", 0.5)),
    ((Output("43"), EvaluationRunResult(1.0)), "43", ("ok", 1.0)),
    (({"a": 1}, EvaluationRunResult(1.0)), '{"a": 1}', ("ok", 1.0)),
    ((Output(None), EvaluationRunResult(0.0)), None, ("ok", 0.0)),
    (("x", EvaluationRunResult(None)), "x", ("unscored", None)),  # type: ignore[arg-type]
    (("x", EvaluationRunResult(float("nan"))), "x", ("error", None)),
    (("x", EvaluationRunResult("0.5")), "x", ("error", None)),  # type: ignore[arg-type]
    (("x", EvaluationRunResult(1.0, metrics={"m": float("inf"), "n": 3})), "x", ("ok", 1.0)),
    (Output("alone"), "alone", ("ok", -7.0)),
    ("alone", "alone", ("ok", -7.0)),
]


@pytest.mark.parametrize("base", [AgentRolloutWorker, BaseNexAURolloutWorker])
@pytest.mark.parametrize(("returned", "answer", "score"), RETURNS, ids=[str(i) for i in range(len(RETURNS))])
def test_an_output_with_its_evaluation_is_not_judged_again(base: Any, returned: Any, answer: Any, score: tuple[Any, ...]) -> None:
    class Own(base):
        def run_agent(self, task: dict[str, Any]) -> Any:
            self.client.complete([{"role": "user", "content": task["prompt"]}])
            return returned

    asked = []

    def judge(row: Any, said: str) -> float:
        asked.append(said)
        return -7.0

    backend = Scripted(["hm"])
    found = Own(backend, judge, group_size=2).run(ROWS[:1])
    check_exact(backend.drawn, found)
    assert [(t.status, t.reward) for t in found] == [score] * 2, found[0].get("error")
    assert asked == ([answer] * 2 if score == ("ok", -7.0) else [])
    if answer is not None:
        assert [t["final_answer"] for t in found] == [answer] * 2
    if isinstance(returned, tuple):
        assert found[0].metrics["turns"] == 1.0 and {k: v for k, v in found[0].metrics.items() if k in "mn"} == {k: v for k, v in returned[1].metrics.items() if v != float("inf")}


def test_a_pair_that_is_no_evaluation_is_an_answer() -> None:
    class Own(AgentRolloutWorker):
        def run_agent(self, task: dict[str, Any]) -> Any:
            self.client.complete([{"role": "user", "content": task["prompt"]}])
            return ("a", "b")

    (t,) = Own(Scripted(["hm"]), lambda row, answer: 1.0, group_size=1).run(ROWS[:1])
    assert t["final_answer"] == '["a", "b"]' and t.reward == 1.0
