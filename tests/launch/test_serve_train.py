"""`nexrl serve train`: what it refuses before it loads anything, an impatient Ctrl-C, and an output that nobody reads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl_sdk.backend.vllm import free_port
from nexrl_sdk.launch.cli import main

COMMAND = [sys.executable, "-m", "nexrl_sdk.launch.cli"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("serve-train")]


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (["--port", "70000"], "less than or equal to 65535"),
        (["--port", "-1"], "greater than or equal to 0"),
        (["--max-body-mb", "0"], "greater than or equal to 1"),
        (["--max-body-mb", "-5"], "greater than or equal to 1"),
        (["--world-size", "0"], "greater than or equal to 1"),
        (["--remote-root", "garbage"], "--remote-root 'garbage' is no place"),
        (["--root", ""], "--root is empty"),
        (["--host", "0.0.0.0", "--model", "."], "needs a key: set NEXRL_TRAIN_KEY"),
    ],
)
def test_refused_before_anything_is_made(arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEXRL_TRAIN_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "train", *arguments])
    said = capsys.readouterr()
    assert ended.value.code == 2 and expected in said.err and "loading" not in said.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--train-url", "--inference-url"])
@pytest.mark.parametrize("url,says", [("http://[::1", "Invalid IPv6"), ("", "no address"), ("garbage", "no address"), ("http://u:opensesame@h", "without a user")])
def test_addresses_of_a_run(option: str, url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from nexrl_sdk.launch.template import write_template

    monkeypatch.chdir(tmp_path)
    write_template(tmp_path / "task")
    with pytest.raises(SystemExit) as ended:
        main(["run", "task", option, url])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and "opensesame" not in said and not (tmp_path / "runs").exists()


def below(pid: int) -> dict[int, bytes]:
    """The processes under one, with their commands."""
    found: dict[int, bytes] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child: Path(f"/proc/{child}/cmdline").read_bytes(), **below(child)}
    return found


def gone(pids: dict[int, bytes], within: float) -> bool:
    """Whether they have all ended, or end in time; a number that another process has by now does not count."""

    def there(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes() == pids[pid] != b""
        except OSError:
            return False

    end = time.monotonic() + within
    while time.monotonic() < end and any(map(there, pids)):
        time.sleep(0.1)
    return not any(map(there, pids))


@pytest.mark.parametrize("moment", ["starting", "serving"])
def test_an_impatient_interrupt_leaves_no_process(moment: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as said:
        service = subprocess.Popen([*COMMAND, "serve", "train", "--model", str(tiny("qwen2")), "--world-size", "2", "--port", "0", "--root", str(tmp_path / "root")], stdout=said, stderr=said, start_new_session=True)
    found: dict[int, bytes] = {}
    try:
        while service.poll() is None and not (len(found) >= 2 and (moment == "starting" or "training service on" in (tmp_path / "said").read_text())):
            time.sleep(0.05)
            found = {pid: command for pid, command in below(service.pid).items() if b"torch.distributed.run" in command}  # its supervisor, and itself
        for _ in range(5):
            found = {**below(service.pid), **found}  # one that has ended has no command any more
            service.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert service.wait(60) in (0, 130, -signal.SIGINT)  # the last: one that came when all was done
    finally:
        service.kill()
        service.wait()
    assert len(found) >= 2 and gone(found, 30), found
    assert "Traceback" not in (tmp_path / "said").read_text()


@pytest.mark.parametrize("out", ["/dev/full", "closed"])
def test_an_output_that_takes_nothing(out: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    script = 'exec "$@" > /dev/full' if out == "/dev/full" else 'exec "$@" >&-'
    port = free_port()
    service = subprocess.Popen(["sh", "-c", script, "sh", *COMMAND, "serve", "train", "--port", str(port), "--root", str(tmp_path / "root")], stderr=subprocess.PIPE, env=environment, text=True)
    try:
        while service.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        service.send_signal(signal.SIGINT)
        _, said = service.communicate(timeout=30)
    finally:
        service.kill()
        service.wait()
    assert service.returncode == 0 and "Traceback" not in said and "Error" not in said


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, "init", "task"], stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, text=True, timeout=60)
    helped = subprocess.run([*COMMAND, "--help"], stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "task" / "recipe.yaml").is_file()
    assert "error" not in helped.stderr and "Traceback" not in helped.stderr
