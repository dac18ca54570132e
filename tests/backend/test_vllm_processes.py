"""Processes are ended whatever happens; weights are checked before they are taken. No vLLM needed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nexrl_sdk.backend.vllm import Supervised, VLLMServer, causes, serve_command, tail
from nexrl_sdk.backend.vllm_ext import KeyGuard, confined
from nexrl_sdk.types import BackendError, ConfigError

pytestmark = pytest.mark.timeout(90)
FAMILY = "sleep 300 & trap '' TERM; echo $! ; sleep 300"  # a child, and a shell that ignores TERM


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_close_ends_the_family(tmp_path: Path) -> None:
    process = Supervised(["sh", "-c", FAMILY.replace("trap '' TERM; ", "")], tmp_path / "log")
    until(lambda: tail(process.log_path) != "")
    child = int(tail(process.log_path))
    assert process.code is None and process.describe() == "it runs"
    process.close()
    process.close()
    assert process.code == -signal.SIGTERM
    until(lambda: gone(child) and gone(process.pid))


def test_close_kills_what_ignores_term(tmp_path: Path) -> None:
    process = Supervised(["sh", "-c", FAMILY], tmp_path / "log")
    until(lambda: tail(process.log_path) != "")
    child = int(tail(process.log_path))
    process.close(grace=0.5)
    assert process.code == -signal.SIGKILL
    until(lambda: gone(child) and gone(process.pid))


def test_death_is_seen_and_takes_the_children_along(tmp_path: Path) -> None:
    process = Supervised(["sh", "-c", FAMILY], tmp_path / "log")
    until(lambda: tail(process.log_path) != "")
    child = int(tail(process.log_path))
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: process.code is not None)
    assert process.code == -signal.SIGKILL and process.describe() == "it was ended by SIGKILL"
    until(lambda: gone(child))
    process.close()


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "sys.exit(0)", "raise RuntimeError", "os._exit(1)"])
def test_parent_takes_it_along(tmp_path: Path, ending: str) -> None:
    code = f"import os, sys; from pathlib import Path; from nexrl_sdk.backend.vllm import Supervised; p = Supervised(['sh', '-c', 'sleep 300'], Path({str(tmp_path / 'log')!r})); print(p.pid, p.group, flush=True); {ending}"
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pids = list(map(int, parent.stdout.split()))
    assert len(pids) == 2
    until(lambda: all(map(gone, pids)))


def test_causes_of_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO fine\n(EngineCore pid=19602) ERROR 11-21 06:20:14 [core.py:1512] RuntimeError: Worker failed\n"
                   "(EngineCore pid=19602) ERROR 11-21 06:20:14 [core.py:1512]   File \"x.py\", line 1\n(APIServer pid=1) ValueError: bad flag\nRuntimeError: Worker failed\n")  # fmt: skip
    assert causes(log) == ["RuntimeError: Worker failed", "ValueError: bad flag"]


def test_a_server_for_others_needs_a_key_and_a_root(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key"):
        VLLMServer("m", host="0.0.0.0")
    server = VLLMServer("m", host="0.0.0.0", key="k1", weights_root=tmp_path, log_path=tmp_path / "log")
    assert "k1" not in repr(server) and "k1" not in " ".join(serve_command("m", 1)) and not server.running
    server.close()


def test_start_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nexrl_sdk.backend.vllm as module

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="not installed"):
        VLLMServer("m", log_path=tmp_path / "log").start()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "serve_command", lambda *a, **k: ["sh", "-c", "echo 'ValueError: no such model'; exit 4"])
    with pytest.raises(BackendError, match=r"exit code 4; .*\n  ValueError: no such model"):
        VLLMServer("m", log_path=tmp_path / "log").start()
    monkeypatch.setattr(module, "serve_command", lambda *a, **k: ["sleep", "300"])
    seen: list[float] = []
    slow = VLLMServer("m", log_path=tmp_path / "log2", start_timeout=1, progress=lambda s, line: seen.append(s))
    with pytest.raises(BackendError, match="not healthy within 1 s"):
        slow.start()
    assert seen and slow.pid is not None
    until(lambda: gone(slow.pid))


def test_weights_are_read_from_below_the_root_only(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "root-not"
    (root / "v1").mkdir(parents=True)
    other.mkdir()
    (root / "link").symlink_to(other)
    assert confined(str(root / "v1"), str(root)) == root / "v1" and confined(str(other), "") == other
    for outside in (other, root / "link", root / ".." / "root-not", Path("/")):
        with pytest.raises(PermissionError):
            confined(str(outside), str(root))


def request(guard: KeyGuard, path: str, key: str | None, body: bytes = b"{}") -> int:
    """The status that a request gets; 200 where it reaches the application."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    asyncio.run(guard({"type": "http", "path": path, "headers": headers}, receive, send))
    return int(sent[0]["status"])


def test_key_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    monkeypatch.setenv("VLLM_API_KEY", "right")
    guard = KeyGuard(application)
    assert request(guard, "/health", None) == 200
    assert [request(guard, "/pause", k) for k in (None, "wrong", "right")] == [401, 401, 200]
    assert [request(guard, "/collective_rpc", "right", json.dumps({"method": m}).encode()) for m in ("nexrl_receive", "reload_weights", "nexr")] == [200, 403, 403]
    assert request(guard, "/collective_rpc", "right", b"\x80\x04 a pickle") == 403
