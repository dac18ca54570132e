"""`nexrl serve tinker` and `weaver` as commands: what is refused before a model is loaded, what is said, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

COMMAND = [sys.executable, "-m", "nexrl_sdk.launch.cli"]
pytestmark = pytest.mark.timeout(120)


def said(*args: str, **env: str) -> tuple[int, str]:
    """Exit code and all that a command says."""
    done = subprocess.run([*COMMAND, "serve", *args], capture_output=True, text=True, timeout=90, env={**os.environ, **env})
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["tinker"], {}, "needs a model"),
        (["weaver", "--model", "a="], {}, "is not NAME=VALUE"),
        (["tinker", "--model", "a=/nowhere/at/all"], {}, "no model folder"),
        (["tinker", "--model", "a=b", "--loss-alias", "mine=pppo"], {}, "did you mean 'ppo'"),
        (["tinker", "--model", "a=b", "--loss-alias", "mine"], {}, "is not NAME=VALUE"),
        (["tinker", "--model", "a=b", "--host", "0.0.0.0"], {}, "needs a key"),
        (["tinker", "--model", "a=b"], {"NEXRL_API_KEY": "sk-1"}, "begin with tml-"),
        (["tinker", "--model", "a=b", "--dtype", "float13"], {}, "float13"),
        (["tinker", "--model", "a=b", "--root", " "], {}, "--root is empty"),
    ],
)
def test_what_cannot_be_served_is_refused(args: list[str], env: dict[str, str], words: str, tmp_path: Path) -> None:
    code, text = said(*args, *([] if "--root" in args else ["--root", str(tmp_path)]), **env)
    assert code in (1, 2) and words in text and "Traceback" not in text, text
    assert all(value not in text for value in env.values())


def test_both_apis_on_one_port_until_an_interrupt(tiny: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("weaver")
    env = {**os.environ, "NEXRL_API_KEY": "tml-secret"}
    server = subprocess.Popen([*COMMAND, "serve", "tinker", "--model", f"tiny={tiny('qwen2')}", "--port", "0", "--root", str(tmp_path / "root"), "--also-weaver"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    lines: list[str] = []
    try:
        assert server.stdout is not None
        while len(lines) < 20 and "WEAVER_BASE_URL" not in "".join(lines) and (line := server.stdout.readline()):
            lines.append(line)
        text = "".join(lines)
        assert "serving tiny on http://127.0.0.1:" in text and "TINKER_API_KEY=$NEXRL_API_KEY" in text and "tml-secret" not in text
        url = text.split("serving tiny on ")[1].split()[0]
        assert httpx.get(f"{url}/api/v1/get_server_capabilities", headers={"x-api-key": "tml-secret"}).json()["supported_models"][0]["model_name"] == "tiny"
        assert httpx.get(f"{url}/api/v1/supported-models", headers={"x-weaver-api-key": "tml-secret"}).status_code == 200
        assert httpx.get(f"{url}/api/v1/supported-models").status_code == 401
        busy = said("tinker", "--model", f"tiny={tiny('qwen2')}", "--port", url.rsplit(":", 1)[1], "--root", str(tmp_path / "other"))
        assert busy[0] == 1 and "is the port taken?" in busy[1] and "Traceback" not in busy[1]
        server.send_signal(signal.SIGINT)
        rest = server.communicate(timeout=30)[0]
        assert server.returncode == 0 and "Traceback" not in rest and "ended" in rest
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=2):
            time.sleep(0)
    finally:
        server.kill()
        server.wait()
