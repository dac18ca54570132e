"""Agents that are functions or commands: nothing of them stays behind, and what they raise or return is told in words."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nexrl_sdk.serve.agent_run import MARK, AgentError, run_command, run_function

pytestmark = pytest.mark.timeout(120)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


SLEEPER = "import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
DAEMON = "import os, sys, time\nr, w = os.pipe()\nif not os.fork():\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n    [os.close(f) for f in (0, 1, 2)]\n    os.write(w, str(os.getpid()).encode())\n    time.sleep(1000)\npid = os.read(r, 20).decode()\n"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc here")
@pytest.mark.parametrize(
    "code,ending",
    [(SLEEPER + "print(p.pid)", "answers"), (DAEMON + "print(pid)", "answers"), (SLEEPER + "sys.exit(str(p.pid))", "fails"), (SLEEPER + "print(p.pid, file=sys.stderr, flush=True); time.sleep(1000)", "hangs")],
)
def test_processes_in_sessions_of_their_own_end_with_the_rollout(code, ending, monkeypatch):
    bystander = os.getpid()
    monkeypatch.setenv(MARK, "outer")
    command = [sys.executable, "-S", "-c", code]
    if ending == "answers":
        pid = int(run_command(command, "http://h/1", {}) or 0)
    else:
        with pytest.raises(AgentError) as raised:
            run_command(command, "http://h/1", {}, timeout=3.0 if ending == "hangs" else None)
        pid = int(str(raised.value).split()[-1])
    assert pid > 1 and gone(pid) and alive(bystander)


def test_two_commands_do_not_end_each_others(tmp_path):
    first = tmp_path / "began"
    go = tmp_path / "go"
    waits = f"import os, time\nopen({str(first)!r}, 'w').close()\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\nprint('first')"
    found: list = []
    thread = threading.Thread(target=lambda: found.append(run_command([sys.executable, "-S", "-c", waits], "http://h/1", {})))
    thread.start()
    while not first.exists():
        time.sleep(0.01)
    assert run_command([sys.executable, "-S", "-c", SLEEPER + "print('second')"], "http://h/2", {}) == "second"
    go.touch()
    thread.join(60)
    assert found == ["first"]


def test_a_run_is_marked_with_those_that_it_runs_inside_of(monkeypatch):
    monkeypatch.setenv(MARK, "outer")
    said = run_command([sys.executable, "-S", "-c", f"import os; print(os.environ[{MARK!r}])"], "http://h/1", {})
    assert said is not None and said.split()[0] == "outer" and len(said.split()) == 2


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_an_agent_whose_exception_cannot_say_what_it_is(raised):
    class Speechless(Exception):
        def __str__(self):
            raise raised

    def agent(base_url, row):
        raise Speechless

    def plain(base_url, row):
        raise raised

    with pytest.raises(AgentError, match=rf"^the agent failed: Speechless: \(its message cannot be read: {type(raised).__name__}\)$"):
        run_function(agent, "http://h/1", {})
    with pytest.raises(AgentError, match=f"^the agent failed: {type(raised).__name__}"):
        run_function(plain, "http://h/1", {})


def test_words_are_found_under_the_agents_limit():
    release = threading.Event()

    class Slow(Exception):
        def __str__(self):
            release.wait(60)
            return "late"

    class Answer:
        def __str__(self):
            release.wait(60)
            return "late"

    def agent(base_url, row):
        raise Slow

    for slow in (agent, lambda base_url, row: Answer()):
        with pytest.raises(AgentError, match=r"did not end within 0\.1 s"):
            run_function(slow, "http://h/1", {}, timeout=0.1)
    release.set()


@pytest.mark.parametrize(
    "answer,hint",
    [
        (SimpleNamespace(content="4"), r"SimpleNamespace: .*; return its text, answer\.content"),
        ({"role": "assistant", "content": "4"}, r"dict: .*; return its text, answer\['content'\]"),
        (SimpleNamespace(choices=[1]), r"; return its text, answer\.choices\[0\]\.message\.content"),
        (4.0, r"float: 4\.0; return it as text, str\(answer\)"),
        ({"answer": "4"}, r"dict: {'answer': '4'}$"),
    ],
)
def test_an_answer_that_is_no_text_is_told_where_the_text_is(answer, hint):
    with pytest.raises(AgentError, match=hint):
        run_function(lambda base_url, row: answer, "http://h/1", {})


def test_an_answer_is_text_and_no_subclass_of_it():
    class Text(str):
        def __len__(self):
            raise SystemExit

    assert type(run_function(lambda base_url, row: str.__new__(Text, "4"), "http://h/1", {})) is str
