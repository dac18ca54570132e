"""What a recipe says of an agent: each valid value has an effect, and what contradicts or would change nothing is refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from nexrl_sdk import Recipe
from nexrl_sdk.rollout.chat import has_nexau
from nexrl_sdk.types import ConfigError

_found = importlib.util.spec_from_file_location("proxy_data", Path(__file__).parents[1] / "serve" / "proxy_data.py")
assert _found is not None and _found.loader is not None
proxy_data = importlib.util.module_from_spec(_found)
_found.loader.exec_module(proxy_data)
Scripted, assert_exact = proxy_data.Scripted, proxy_data.assert_exact

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(has_nexau(), reason="NexAU reads agents' files here")]
ASK = """
import json, os, sys, threading, time, urllib.request
def ask(base_url, *said, **more):
    messages = [{"role": "user", "content": s} for s in said]
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps({"model": "m", "messages": messages, **more}).encode(), {"content-type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
ONCE = ASK + """
row = json.load(sys.stdin)
ask(os.environ["OPENAI_BASE_URL"], row["prompt"])
print(json.dumps({"final_answer": json.dumps([os.getpid(), os.getcwd(), sys.executable, sys.argv[1:], sorted(row)])}))
"""
STAYS = ASK + """
for line in sys.stdin:
    task = json.loads(line)
    ask(task["base_url"], task["row"]["prompt"])
    print(json.dumps({"id": task["id"], "final_answer": json.dumps([os.getpid(), os.getcwd()])}), flush=True)
"""
FUNCTIONS = ASK + """
import asyncio
lock, now, most, met = threading.Lock(), 0, 0, threading.Barrier(3)
def plain(base_url, row):
    return "plain " + ask(base_url, row["prompt"])["content"]
async def later(base_url, row):
    return "later " + (await asyncio.to_thread(ask, base_url, row["prompt"]))["content"]
def told(base_url, row):
    return json.dumps(ask(base_url, row["prompt"], tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]))
def waits(base_url, row):
    ask(base_url, row["prompt"])
    time.sleep(row["seconds"])
    return "done"
def goes_on(base_url, row):
    while True:
        row["prompt"] += ask(base_url, row["prompt"])["content"]
def alone(base_url, row):
    global now, most
    with lock:
        now += 1
        most = max(now, most)
    ask(base_url, row["prompt"])
    time.sleep(0.01)
    with lock:
        now -= 1
    return str(most)
def together(base_url, row):
    ask(base_url, row["prompt"])
    met.wait(60)
    return "met"
number = 7
def one(row):
    return ""
"""
ROWS = [{"prompt": f"Question {i}", "answer": "?"} for i in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"once.py": ONCE, "stays.py": STAYS, "functions.py": FUNCTIONS}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "inner").mkdir()
    for name in ("once.py", "stays.py"):
        shutil.copy(tmp_path / name, tmp_path / "inner" / name)
    (tmp_path / "agent.yaml").write_text("name: a\nsystem_prompt: Be brief.\n")
    return tmp_path


def recipe(folder: Path, **worker: Any) -> Recipe:
    given = {"type": "agent", "max_tokens": 200, **worker}
    return Recipe(model="tiny", data=ROWS, evaluator=lambda row, answer: 1.0, base_dir=folder, rollout_worker=given, trajectory_pool={"group_size": 1})


def run(folder: Path, backend: Any = None, rows: Any = ROWS, **worker: Any) -> Any:
    backend = backend or Scripted(("Good.",))
    made = recipe(folder, **worker).make_worker(backend)
    try:
        found = made.run(rows)
    finally:
        made.agent.close()
        getattr(made.agent.agent, "close", lambda: None)()
    learned = [t for t in found if t.status != "failed"]
    if len(learned) == len(found):
        assert_exact(backend.drawn, learned)
    return found


# -- each value has an effect ---------------------------------------------------------------------------------------


def test_a_command_is_a_process_a_rollout_in_the_recipes_folder(folder: Path) -> None:
    told = [json.loads(t["final_answer"]) for t in run(folder, agent_command=["{python}", "once.py", "at {base_url}"])]
    assert len({pid for pid, *_ in told}) == 3 and os.getpid() not in {pid for pid, *_ in told}
    for _, cwd, program, (address,), keys in told:
        assert Path(cwd) == folder and program == sys.executable and keys == ["answer", "prompt", "query"]
        assert address.startswith("at http://127.0.0.1:") and address.endswith("/v1")


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_stay_and_share_the_tasks(folder: Path, processes: int) -> None:
    told = [json.loads(t["final_answer"]) for t in run(folder, rows=ROWS * 3, agent_command=["{python}", "stays.py"], agent_processes=processes, agent_workspace="inner")]
    assert len({pid for pid, _ in told}) == processes and {cwd for _, cwd in told} == {str(folder / "inner")}


def test_a_workspace_is_where_a_command_runs(folder: Path) -> None:
    (t, *_) = run(folder, agent_command=["{python}", "once.py"], agent_workspace="inner")
    assert json.loads(t["final_answer"])[1] == str(folder / "inner")


@pytest.mark.parametrize("kind", ["plain", "later"])
def test_a_function_may_be_async(folder: Path, kind: str) -> None:
    assert [t["final_answer"] for t in run(folder, agent_function=f"functions.py:{kind}")] == [f"{kind} Good."] * 3


def test_an_agents_file_is_our_own_loop(folder: Path) -> None:
    backend = Scripted(("Good.",))
    (t, *_) = recipe(folder, agent_config_path="agent.yaml").make_worker(backend).run(ROWS)
    assert t["final_answer"] == "Good." and "<|system|>Be brief.<|end|>" in t.prompt


def test_rollouts_end_at_their_timeout_and_not_before(folder: Path) -> None:
    (late,) = run(folder, rows=[{"prompt": "x", "seconds": 600}], agent_function="functions.py:waits", rollout_timeout=0.3)
    assert late.status == "failed" and "0.3 s (timeout)" in late["error"]
    (there,) = run(folder, rows=[{"prompt": "x", "seconds": 0.5}], agent_function="functions.py:waits", rollout_timeout=100)
    assert there["final_answer"] == "done" and there.reward == 1.0


def test_as_many_rollouts_are_at_work_as_the_recipe_says(folder: Path) -> None:
    assert {t["final_answer"] for t in run(folder, rows=ROWS * 2, agent_function="functions.py:alone", rollouts_at_once=1)} == {"1"}
    assert {t["final_answer"] for t in run(folder, agent_function="functions.py:together", rollouts_at_once=3)} == {"met"}


@pytest.mark.parametrize("unfinished", ["score", "fail"])
def test_a_conversation_that_outgrows_the_context(folder: Path, unfinished: str) -> None:
    (t, *_) = run(folder, Scripted(("Good. " * 5,), context=120), ROWS[:1], agent_function="functions.py:goes_on", unfinished=unfinished, retries=0)
    assert (t.status, t.reward) == (("ok", 1.0) if unfinished == "score" else ("failed", None))
    assert t["agent"]["ended"] == "context" if unfinished == "score" else "ContextOverflowError" in t["error"]


def test_the_templates_variables(folder: Path) -> None:
    for mood in ("calm", None):
        backend = Scripted(("Good.",))
        backend.tokenizer.chat_template = "{{ mood }}|" + backend.tokenizer.chat_template
        (t, *_) = run(folder, backend, agent_function="functions.py:plain", **({"template_kwargs": {"mood": mood}} if mood else {}))
        assert t.prompt.startswith(f"{mood or ''}|<|user|>Question 0")


def test_how_the_model_writes_calls(folder: Path) -> None:
    said = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    for given, calls in ((None, 0), ("mistral", 1)):
        (t, *_) = run(folder, Scripted((said,)), agent_function="functions.py:told", tool_format=given)
        message = json.loads(t["final_answer"])
        assert len(message.get("tool_calls") or []) == calls and (message["content"] == said) == (not calls)


# -- what is wrong is refused ---------------------------------------------------------------------------------------

COMMAND = ["{python}", "once.py"]
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"agent_command": COMMAND, "agent_config_path": "agent.yaml"}, "agent_config_path", "rollout_worker.agent_config_path and rollout_worker.agent_command both name an agent; leave one out"),
    ({"agent_command": COMMAND, "agent_function": "functions.py:plain"}, "agent_command", "rollout_worker.agent_command and rollout_worker.agent_function both name an agent"),
    ({"agent_function": "functions.py:plain", "agent_config_path": "agent.yaml"}, "agent_config_path", "both name an agent"),
    ({"agent_function": "functions.py:plain", "agent_processes": 2}, "agent_processes", "processes are of rollout_worker.agent_command, and there is none"),
    ({"agent_config_path": "agent.yaml", "agent_processes": 2}, "agent_processes", "name the command, or leave agent_processes out"),
    ({"agent_function": "functions.py:plain", "agent_workspace": "inner"}, "agent_workspace", "leave agent_workspace out"),
    ({"agent_command": COMMAND, "agent_workspace": "iner"}, "agent_workspace", "did you mean 'inner'"),
    ({"agent_command": COMMAND, "agent_workspace": "once.py"}, "agent_workspace", "there is no folder"),
    ({"agent_command": ["{python}", "onse.py"]}, "agent_command", "did you mean 'once.py'"),
    ({"agent_command": ["{pyton}", "once.py"]}, "agent_command", "there is no program '{pyton}' to run; {python} is this interpreter"),
    ({"agent_command": ["no-such-program"]}, "agent_command", "there is no program 'no-such-program'"),
    ({"agent_command": ["{python}", "stays.py", "{base_url}"], "agent_processes": 1}, "agent_command", "{base_url} is another one for each task"),
    ({"agent_function": "functions.py:plane"}, "agent_function", "did you mean 'plain'"),
    ({"agent_function": "function.py:plain"}, "agent_function", "functions.py"),
    ({"agent_function": "functions.py:number"}, "agent_function", "an agent is a function"),
    ({"agent_function": "functions.py:one"}, "agent_function", "functions.py:one is one(row): too many positional arguments"),
    ({"agent_config_path": "agents.yaml"}, "agent_config_path", "agent.yaml"),
    ({"agent_function": "functions.py:plain", "tool_format": "herms"}, "tool_format", "did you mean 'hermes'"),
    ({"type": "simple", "agent_command": COMMAND}, "agent_command", "SimpleRolloutWorker runs no agent; say rollout_worker.type: agent, or leave it out"),
    *(({"type": "simple", k: v}, k, "SimpleRolloutWorker runs no agent") for k, v in {
        "agent_config_path": "agent.yaml", "agent_function": "functions.py:plain", "agent_processes": 1, "agent_workspace": "inner", "rollout_timeout": 5,
        "rollouts_at_once": 3, "unfinished": "fail", "template_kwargs": {"a": 1}, "tool_format": "hermes",
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("given", "key", "said"), WRONG, ids=[f"{i} {k}" for i, (_, k, _) in enumerate(WRONG)])
def test_contradictions_are_errors_before_anything_runs(folder: Path, given: dict[str, Any], key: str, said: str) -> None:
    made = recipe(folder, **given)
    with pytest.raises(ConfigError) as caught:
        made.make_worker(Scripted())
    assert said in str(caught.value) and (f"rollout_worker.{key}" in str(caught.value) or ".yaml" in said)
    assert any(f.level == "error" and f.key == f"rollout_worker.{key}" and said in f.message for f in made.validate()), made.validate()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"agent_command": []}, "agent_command"),
        ({"agent_command": "python once.py"}, "agent_command"),
        ({"agent_command": [1, None]}, "agent_command"),
        ({"agent_processes": 0}, "agent_processes"),
        ({"agent_processes": "two"}, "agent_processes"),
        ({"agent_processes": 1.5}, "agent_processes"),
        ({"agent_function": 3}, "agent_function"),
        ({"agent_function": {"file": "agent.py"}}, "agent_function"),
        ({"rollout_timeout": 0}, "rollout_timeout"),
        ({"rollout_timeout": -1.0}, "rollout_timeout"),
        ({"rollout_timeout": "soon"}, "rollout_timeout"),
        ({"rollout_timeout": float("nan")}, "rollout_timeout"),
        ({"rollouts_at_once": 0}, "rollouts_at_once"),
        ({"unfinished": "scored"}, "did you mean 'score'"),
        ({"unfinished": None}, "unfinished"),
        ({"template_kwargs": [1]}, "template_kwargs"),
        ({"template_kwargs": "enable_thinking"}, "template_kwargs"),
        ({"tool_format": 4}, "tool_format"),
        ({"type": "agents"}, "did you mean 'agent'"),
        ({"agent_comand": COMMAND}, "did you mean 'agent_command'"),
        ({"rollouts_at_onces": 4}, "did you mean 'rollouts_at_once'"),
        ({"roll_out_timeout": 4}, "did you mean 'rollout_timeout'"),
        ({"agent_process": 4}, "did you mean 'agent_processes'"),
    ],
)
def test_wrong_values_and_keys_are_errors_at_once(folder: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(folder, **given)


def test_an_agent_that_is_not_named(folder: Path) -> None:
    found = [f for f in recipe(folder).validate() if f.key.startswith("rollout_worker")]
    assert [f.key for f in found] == ["rollout_worker.agent_config_path"] and "rollout_worker.agent_command or agent_function" in found[0].message


@pytest.mark.parametrize("given", [{"agent_command": COMMAND}, {"agent_command": ["{python}", "stays.py"], "agent_processes": 1, "agent_workspace": "inner"}, {"agent_function": "functions.py:plain"}, {"agent_config_path": "agent.yaml"}])
def test_good_agents_have_no_findings(folder: Path, given: dict[str, Any]) -> None:
    assert [f for f in recipe(folder, **given).validate() if f.key.startswith("rollout_worker")] == []


# -- a recipe's name follows its agent ------------------------------------------------------------------------------


def test_an_agents_code_is_part_of_the_recipe_and_what_python_leaves_is_not(folder: Path) -> None:
    given = [{"agent_command": COMMAND}, {"agent_command": COMMAND, "agent_workspace": "."}, {"agent_config_path": "agent.yaml", "agent_workspace": "."}, {"agent_function": "functions.py:plain"}]
    changed = [folder / "once.py", folder / "once.py", folder / "once.py", folder / "functions.py"]
    for each, file in zip(given, changed):
        before = recipe(folder, **each).fingerprint()
        (folder / "__pycache__").mkdir(exist_ok=True)
        (folder / "__pycache__" / f"x{len(before)}.pyc").write_bytes(os.urandom(9))
        (folder / ".hidden").mkdir(exist_ok=True)
        (folder / ".hidden" / "x").write_bytes(os.urandom(9))
        assert recipe(folder, **each).fingerprint() == before
        file.write_text(file.read_text().replace("urllib.request.Request(", "urllib.request.Request( ") if "functions" not in file.name else file.read_text().replace('"plain "', '"plain: "'))
        assert recipe(folder, **each).fingerprint() != before
        file.write_text(file.read_text() + "\n")


def test_a_run_inside_the_workspace_does_not_change_the_recipe(folder: Path) -> None:
    made = Recipe(model="tiny", data=ROWS, evaluator=lambda row, answer: 1.0, base_dir=folder, output_dir=str(folder / "runs" / "a"), rollout_worker={"type": "agent", "agent_config_path": "agent.yaml", "agent_workspace": "."})
    before = made.fingerprint()
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "metrics.jsonl").write_text("{}")
    assert made.fingerprint() == before
