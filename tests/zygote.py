"""A clean process that forks children on demand.

Threads of a test process (polars, torch) do not survive a fork, and a child that needs them waits for ever. The zygote has
imported everything and used nothing, so its children start in milliseconds and run as a fresh process would.
"""

from __future__ import annotations

import json

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SERVER = """
import importlib, json, os, signal, sys, traceback

sys.path[:0] = json.loads(sys.argv[1])
import torch

torch.set_num_threads(1)
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)


def child(task):
    handle = os.open(task["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(task["cwd"])
    os.environ.update(task["env"])
    try:
        exec(compile(task["code"], "<task>", "exec"), {"__name__": "task"})
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


print("ready", flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if "wait" in task:
        print(os.waitstatus_to_exitcode(os.waitpid(task["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        child(task)
    print(pid, flush=True)
"""


class Zygote:
    """Runs pieces of code, each in a process of its own."""

    def __init__(self, modules: Sequence[str], path: Sequence[Path | str] = ()):
        arguments = [json.dumps([str(p) for p in path]), json.dumps(list(modules))]
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _ask(self, **task: object) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        return int(self._answer())

    def start(self, code: str, out: Path, cwd: Path | None = None, **env: str) -> int:
        """Start a piece of code with its output in a file; returns its process id."""
        return self._ask(code=code, out=str(out), cwd=str(cwd or Path.cwd()), env=env)

    def wait(self, pid: int) -> int:
        """Its exit code; minus the signal's number where one ended it."""
        return self._ask(wait=pid)

    def run(self, code: str, out: Path, cwd: Path | None = None, **env: str) -> str:
        """Run a piece of code to its end; returns what it printed, and fails where it failed."""
        status = self.wait(self.start(code, out, cwd, **env))
        assert status == 0, f"exit code {status}\n{out.read_text()}"
        return out.read_text()

    def close(self) -> None:
        """End the zygote."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


