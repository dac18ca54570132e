"""Agents that stay and take a task a line: whatever their processes do, each task ends with its own answer or a cause, and the next task works."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from proxy_data import Scripted

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.backend.mock import MockBackend
from nexrl_sdk.rollout.agent import AgentRolloutWorker
from nexrl_sdk.rollout.session import Session, SessionClosed
from nexrl_sdk.serve.agent_lines import LineAgents
from nexrl_sdk.serve.agent_run import AgentError, read_answer, run_command, run_function
from nexrl_sdk.serve.openai import proxied
from nexrl_sdk.types import ConfigError, DataError

pytestmark = pytest.mark.timeout(120)
LOOP = """
import json, os, subprocess, sys, threading, time
lock = threading.Lock()
def say(text):
    with lock:
        sys.stdout.write(text + "\\n")
        sys.stdout.flush()
def answer(task, text):
    say(json.dumps({"id": task["id"], "final_answer": text}))
def work(task):
    row = task["row"]
    exec(row["do"], {**globals(), "task": task, "row": row}) if "do" in row else answer(task, row["q"])
"""
ONE = LOOP + "for line in sys.stdin:\n    work(json.loads(line))\n"  # one task after another
MANY = LOOP + "for line in sys.stdin:\n    threading.Thread(target=work, args=(json.loads(line),)).start()\n"
HANG = "open(row['began'], 'w').close(); time.sleep(1000)"


@pytest.fixture
def agents() -> Iterator[Callable[..., LineAgents]]:
    made: list[LineAgents] = []

    def make(code: str = ONE, processes: int = 1, **options: Any) -> LineAgents:
        made.append(LineAgents([sys.executable, "-S", "-c", code], processes, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert not any(p for p in each._places)


def ask(agents: LineAgents, q: str = "fine", url: str = "http://h/1", **row: Any) -> Any:
    return agents(url, {"q": q, **row})


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def callers() -> set[threading.Thread]:
    """Threads that call an agent, those of other tests among them."""
    return {t for t in threading.enumerate() if t.name == "nexrl-agent"}


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not asked for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(agents: LineAgents) -> list[int]:
    return [p.child.pid for p in agents._places if p is not None]


# -- a process that ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no key for the search')", "ended with exit code 1 before it answered: no key for the search"),
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("", "ended with exit code 0 before it answered: it wrote nothing to its standard error"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", f"was ended by signal {signal.SIGRTMIN + 3}"),
        ("import os, time; os.close(1); time.sleep(1000)", "was ended by SIGKILL"),
    ],
)
def test_a_process_that_ends_at_its_start_is_a_failure_with_its_last_words(agents: Any, code: str, said: str) -> None:
    each = agents(code)
    for _ in range(1 if "sleep" in code else 3):  # it is tried again each time
        with pytest.raises(AgentError, match=r"^the agent's process") as caught:
            ask(each)
        assert said in str(caught.value) or "end before they take a task" in str(caught.value)
    with pytest.raises(AgentError) as caught:
        ask(agents("import sys; sys.stdin.readline()\n" + code))
    assert said in str(caught.value)


def test_a_process_that_ends_midway_fails_all_its_tasks_and_no_others(agents: Any, tmp_path: Path) -> None:
    each = agents(MANY, 2)
    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(ask, each, do="open(row['began'], 'w').close(); time.sleep(1000)", began=str(tmp_path / f"{i}")) for i in range(4)]
        until(lambda: len(list(tmp_path.iterdir())) == 4)
        first, second = (p for p in each._places)
        assert [len(first.tasks), len(second.tasks)] == [2, 2]  # shared evenly
        os.kill(first.child.pid, signal.SIGTERM)
        until(lambda: sum(w.done() for w in waiting) == 2)
        failed = [w for w in waiting if w.done()]
        assert all("was ended by SIGTERM before it answered" in str(w.exception()) for w in failed) and not second.ended
        assert ask(each) == "fine" and second.child.pid in pids(each) and first.child.pid not in pids(each)
        with pytest.raises(AgentError, match="exit code 3 before it answered: out of luck"):
            ask(each, do="sys.stderr.write('out of luck'); sys.stderr.flush(); os._exit(3)")
        each.close()
    assert all("SIGKILL" in str(w.exception()) for w in waiting if w not in failed)
    assert ask(each) == "fine", "a later task starts them again"


def test_what_was_written_before_the_end_counts(agents: Any) -> None:
    each = agents()
    assert ask(each, do="sys.stdout.write(json.dumps({'id': task['id'], 'final_answer': 'done'})); sys.stdout.flush(); os._exit(1)") == "done"  # without the line's end
    with pytest.raises(AgentError, match="exit code 1 before it answered"):
        ask(each, do="sys.stdout.write(json.dumps({'id': task['id'], 'final_answer': 'done'})[:-3]); sys.stdout.flush(); os._exit(1)")
    assert ask(each) == "fine"


# -- what it writes -------------------------------------------------------------------------------------------------

RUBBISH = [
    "", "thinking ...", "null", "[]", "7", '"x"', "{}", '{"id": null}', '{"id": -1, "final_answer": "lost"}', '{"id": 99999999999999999999999, "final_answer": "lost"}', "{" * 100_000, "[" * 100_000, "9" * 10_000,
    '{"level": "error", "error": "a log in JSON"}', '{"id": "word", "x": 1}', "\\ud800 \\x00 \\x85 \\u2028", '{"id": 0, ', "NaN", "y" * 3_000_000,
]  # fmt: skip


def test_lines_that_are_no_answers_are_passed_over(agents: Any) -> None:
    each = agents()
    do = "\n".join(f"say({line!r})" if line.isascii() else "" for line in RUBBISH) + "\nsys.stdout.flush(); sys.stdout.buffer.write(b'\\xff\\xfe\\x00\\n\\r\\n\\r'); sys.stdout.buffer.flush(); say(''); answer(task, 'after all')"
    assert ask(each, do=do) == "after all"
    assert ask(each, do="answer(task, 'one'); answer(task, 'two')") == "one"
    assert ask(each, do="say('x'); sys.stdout.write('\\r\\n'); answer(task, 'a\\nb\\u2028\\x85\\x00 \\U0001f642')") == "a\nb\u2028\x85\x00 \U0001f642"
    assert ask(each, do="say(json.dumps({'final_answer': None, 'id': task['id']}))") is None
    assert ask(each, do="say(json.dumps({'id': task['id']}))") is None
    assert len(set(pids(each))) == 1


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("say(json.dumps({'id': task['id'], 'final_answer': 42}))", "text or None, not int: 42"),
        ("say(json.dumps({'id': task['id'], 'final_answer': ['a']}))", "text or None, not list"),
        ("say(json.dumps({'id': task['id'], 'error': 'no'}))", "^the agent failed: no$"),
        ("say(json.dumps({'id': task['id'], 'error': ''}))", "^the agent failed"),
        ("say(json.dumps({'id': task['id'], 'error': {'why': 'x' * 9000}, 'final_answer': 'y'}))", "the agent failed: {'why': 'xxx"),
        ("say(json.dumps({'final_answer': 'whose?'}))", r"an answer names its task by the number in 'id', and it wrote \{\"final_answer\": \"whose\?\"\}"),
        ("say(json.dumps({'id': str(task['id']), 'final_answer': 'x'}))", "an answer names its task by the number in 'id'"),
        ("say(json.dumps({'id': True, 'final_answer': 'x'}))", "an answer names its task by the number in 'id'"),
        ("say(json.dumps({'id': task['id'], 'final_answer': 'x' * (17 << 20)}))", "it wrote a line of more than 16 MiB"),
        ("while True: sys.stdout.write('x' * (1 << 20))", "it wrote a line of more than 16 MiB"),
    ],
)
def test_answers_that_are_none_are_failures_and_the_next_task_works(agents: Any, do: str, said: str) -> None:
    each = agents()
    ask(each)
    with pytest.raises(AgentError, match=said) as caught:
        ask(each, do=do)
    assert len(str(caught.value)) < 2500
    assert ask(each) == "fine"


def test_answers_come_in_any_order_to_whom_they_belong(agents: Any) -> None:
    each = agents(LOOP + "held = [json.loads(sys.stdin.readline()) for _ in range(40)]\nfor task in reversed(held):\n    answer(task, task['row']['q'] + task['base_url'] + task['api_key'])\nsys.stdin.read()", 1, api_key="mine")
    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda i: ask(each, f"{i} ", f"http://h/{i}"), range(40)))
    assert found == [f"{i} http://h/{i}mine" for i in range(40)]


def test_a_log_of_any_length_is_read_and_its_end_kept(agents: Any) -> None:
    each = agents()
    assert ask(each, do="sys.stderr.write('z' * (1 << 22)); sys.stderr.flush(); answer(task, 'still here')") == "still here"
    with pytest.raises(AgentError, match=r"before it answered: z{900,}\nthe last words$") as caught:
        ask(each, do="sys.stderr.write('z' * (1 << 22) + '\\nthe last words'); sys.stderr.flush(); os._exit(9)")
    assert len(str(caught.value)) < 2200


# -- a task that does not end ---------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl_sdk.serve.agent_lines.GIVEN_UP", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_task_that_hangs_is_given_up_and_the_next_works(agents: Any, tmp_path: Path) -> None:
    each, before = agents(), callers()
    assert ask(each) == "fine"
    (old,), began = pids(each), tmp_path / "began"
    with pytest.raises(AgentError, match=r"did not end within 0\.2 s"):
        run_function(each, "http://h/1", {"do": HANG, "began": str(began)}, timeout=0.2)
    assert run_function(each, "http://h/2", {"q": "next"}, timeout=60) == "next"
    assert old not in pids(each) and not each._at_work
    until(lambda: not alive(old))

    cancel, waiting = threading.Event(), {"do": HANG, "began": str(tmp_path / "again")}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run_function, each, "http://h/3", waiting, cancel=cancel)
        until((tmp_path / "again").exists)
        cancel.set()
        with pytest.raises(SessionClosed):
            asked.result()
    assert ask(each) == "fine"
    until(lambda: callers() <= before)


@pytest.mark.usefixtures("impatient")
def test_the_others_of_a_process_that_hangs_with_one_task_are_let_finish(agents: Any, tmp_path: Path) -> None:
    each, gate = agents(MANY), tmp_path / "gate"
    slow = "open(row['began'], 'w').close()\nwhile not os.path.exists(row['gate']): time.sleep(0.01)\nanswer(task, 'finished')"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, each, do=slow, began=str(tmp_path / "slow"), gate=str(gate), url="http://h/0")
        until((tmp_path / "slow").exists)
        (old,) = pids(each)
        with pytest.raises(AgentError, match="did not end"):
            run_function(each, "http://h/1", {"do": HANG, "began": str(tmp_path / "x")}, timeout=0.2)
        assert ask(each) == "fine" and old not in pids(each) and alive(old) and not other.done()
        gate.touch()
        assert other.result() == "finished"
    until(lambda: not alive(old))


def test_an_agent_that_hears_of_the_end_keeps_its_process(agents: Any, tmp_path: Path) -> None:
    each, gate = agents(), tmp_path / "gate"
    do = "open(row['began'], 'w').close()\nwhile not os.path.exists(row['gate']): time.sleep(0.01)\nsay(json.dumps({'id': task['id'], 'error': 'refused'}))"
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run_function, each, "http://h/1", {"do": do, "began": str(tmp_path / "b"), "gate": str(gate)}, cancel=cancel)
        until((tmp_path / "b").exists)
        old = pids(each)
        gate.touch()  # as the refusal of its next request would
        cancel.set()
        assert asked.exception() is not None
    assert ask(each) == "fine" and pids(each) == old


@pytest.mark.usefixtures("impatient")
def test_a_process_that_does_not_read_is_replaced(agents: Any) -> None:
    each, before = agents("import os, time; os.path.exists('/') and time.sleep(1000)"), callers()
    for _ in range(2):
        with pytest.raises(AgentError, match="did not end"):
            run_function(each, "http://h/1", {"q": "x" * (1 << 20)}, timeout=0.2)  # more than a pipe holds
    until(lambda: callers() <= before)


# -- what it leaves behind ------------------------------------------------------------------------------------------

CHILD = "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)']); open(row['pid'], 'w').write(f'{child.pid} ')"


def pid_in(path: Path) -> int:
    return int(until(lambda: path.exists() and path.read_text().endswith(" ") and path.read_text()))


@pytest.mark.parametrize("how", ["os._exit(0)", "os._exit(4)", "os.kill(os.getpid(), 9)", "os.close(0); os.close(1); os._exit(0)"])
def test_grandchildren_that_hold_its_output_are_ended_and_nothing_waits_for_them(agents: Any, tmp_path: Path, how: str) -> None:
    each = agents()
    with pytest.raises(AgentError, match="before it answered"):
        ask(each, do=f"{CHILD}; {how}", pid=str(tmp_path / "pid"))
    until(lambda: not alive(pid_in(tmp_path / "pid")))
    assert ask(each) == "fine"


def test_a_grandchild_with_a_session_of_its_own_holds_nothing_up(agents: Any, tmp_path: Path) -> None:
    each = agents()
    with pytest.raises(AgentError, match="exit code 5 before it answered"):
        ask(each, do=CHILD.replace("])", "], start_new_session=True)") + "; os._exit(5)", pid=str(tmp_path / "pid"))
    assert ask(each) == "fine"
    escaped = pid_in(tmp_path / "pid")
    assert alive(escaped), "whoever leaves the group is not ours to find"
    os.kill(escaped, signal.SIGKILL)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_all_ends_with_the_agents(agents: Any, tmp_path: Path, how: str) -> None:
    each = LineAgents([sys.executable, "-S", "-c", ONE], 3)
    for i in range(3):
        assert ask(each, do=f"{CHILD}; answer(task, 'here')", pid=str(tmp_path / f"{i}")) == "here"
    found = [*pids(each), *(pid_in(tmp_path / f"{i}") for i in range(3))]
    if how == "close":
        each.close()
    del each
    gc.collect()
    until(lambda: not any(map(alive, found)))


def test_pipes_and_threads_do_not_pile_up(agents: Any) -> None:
    each = agents()
    ask(each)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(12):
        with pytest.raises(AgentError):
            ask(each, do="os._exit(1)")
    ask(each)
    until(lambda: len(os.listdir("/proc/self/fd")) <= files and threading.active_count() <= threads)


# -- what it is given -----------------------------------------------------------------------------------------------


def test_rows_arrive_as_a_process_a_rollout_gets_them(agents: Any, tmp_path: Path) -> None:
    import datetime

    import numpy as np

    row = {"q": "é\n\u2028\ud800", "n": np.arange(3), "x": np.float32(0.5), "when": datetime.date(2026, 1, 2), "deep": {"a": [None, True]}}
    each, tell = agents(), "[row[k] for k in ('q', 'n', 'x', 'when', 'deep')]"
    kept = ask(each, **{**row, "do": f"answer(task, json.dumps({tell}))"})
    told = run_command([sys.executable, "-S", "-c", f"import json, sys; row = json.load(sys.stdin); print(json.dumps({{'final_answer': json.dumps({tell})}}))"], "http://h:1/v1", row)
    assert kept == told == '["\\u00e9\\n\\u2028\\ud800", [0, 1, 2], 0.5, "2026-01-02", {"a": [null, true]}]'
    with pytest.raises(DataError, match="a set is no JSON"):
        run_function(each, "http://h/1", {"q": {1, 2}})
    assert ask(each) == "fine"


def test_the_environment_is_the_agents_own(agents: Any, tmp_path: Path) -> None:
    each = agents(env={"COLOUR": "blue"}, cwd=tmp_path)
    assert ask(each, do="answer(task, f\"{os.environ['COLOUR']} {os.getcwd()} {os.environ.get('OPENAI_BASE_URL')} {os.environ['OPENAI_API_KEY']}\")") == f"blue {tmp_path} None local"
    other = LineAgents([sys.executable], 2)
    assert repr(other).startswith("LineAgents(") and repr(other).endswith("2 processes)")


@pytest.mark.parametrize(("command", "said"), [([], "is a list such as"), ("python agent.py", "is a list such as"), ([1], "is a list such as")])
def test_commands_that_are_none_are_refused(command: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LineAgents(command)
    with pytest.raises(ConfigError, match="at least 1 process, not 0"):
        LineAgents(["x"], 0)


@pytest.mark.parametrize("command", [["no-such-program-anywhere"], ["/tmp"], ["/etc/hostname"]])
def test_a_command_that_cannot_be_started_is_the_recipes_fault(command: list[str]) -> None:
    with pytest.raises(ConfigError, match="cannot be started"):
        run_function(LineAgents(command), "http://h/1", {})


def test_a_last_line_holds_whatever_json_may_hold() -> None:
    assert read_answer('log\n{"final_answer": "a\u2028b\x85c"}\n') == "a\u2028b\x85c"
    assert read_answer("log\r\nanswer\r\n\r\n") == "answer" and read_answer("\n \n") is None


# -- what is closed with what ------------------------------------------------------------------------------------------


def test_a_proxy_closes_the_processes_that_it_holds_and_starts_them_again(agents: Any) -> None:
    held, backend = agents(), Scripted(["Good."])
    agent = proxied(held)
    worker = AgentRolloutWorker(backend, agent=agent)
    for _ in range(2):
        session = Session(backend)
        assert agent("?", session=session, data={"q": "fine"}, cancel=session.cancel) == "fine"
        (pid,) = pids(held)
        worker.close()
        worker.close()
        until(lambda pid=pid: not alive(pid))
        assert agent._proxy is None


def test_a_trainer_closes_the_agent_that_its_recipe_made_and_no_other() -> None:
    closed = []

    class Own:
        def __call__(self, query: str, session: Any) -> str:
            return "x"

        def close(self) -> None:
            closed.append(self)

    def solve(base_url: str, row: dict[str, Any]) -> str:
        return "fine"

    def listening() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "nexrl-openai" and t not in before]

    before = threading.enumerate()
    rows = [{"prompt": "?"}]
    with Trainer(Recipe(model="mock", data=rows, evaluator=lambda row, said: 1.0, agent=solve), MockBackend()) as trainer:
        session = Session(trainer.backend)
        assert trainer.worker.agent("?", session=session, data={}, cancel=session.cancel) == "fine" and listening()
    until(lambda: not listening())
    trainer.close()
    with Trainer(Recipe(model="mock", data=rows, evaluator=lambda row, said: 1.0, agent=Own()), MockBackend()) as trainer:
        assert trainer.worker is not None
    with Trainer(Recipe(model="mock", data=rows, evaluator=lambda row, said: 1.0, agent=solve), MockBackend()) as trainer:
        trainer.worker = AgentRolloutWorker(trainer.backend, agent=Own())
    assert not closed, "what was given is its owner's"


@pytest.mark.parametrize("agent", [7, None, b"agent.py", "agent.py", [], ["python", 3]])
def test_what_is_no_agent_is_refused_by_name(agent: Any) -> None:
    with pytest.raises(ConfigError, match=r"a function \(base_url, row\) or a command"):
        proxied(agent)
