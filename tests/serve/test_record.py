"""`nexrl serve openai`: an agent is tried by hand, and what it sampled is in a file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_data import Scripted
from typer.testing import CliRunner

openai = pytest.importorskip("openai", reason="the openai client is not installed")

from nexrl_sdk.launch.cli import app
from nexrl_sdk.rollout.rollouts import Rollouts
from nexrl_sdk.serve.openai import CaptureProxy
from nexrl_sdk.serve.record import Record
from nexrl_sdk.types import ConfigError

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command on a free port: its process, its address and what it says an agent needs."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "nexrl_sdk.launch.cli", "serve", "openai", *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "OPENAI_API_KEY=" in line:
                break
        found = re.search(r"OPENAI_BASE_URL=(http://\S+)/session/first/v1", said)
        assert found, said
        yield process, found[1], said
    finally:
        process.kill()
        process.wait()


def test_an_agent_is_tried_by_hand(tiny: Any, tmp_path: Path) -> None:
    with served(tmp_path, "--model", str(tiny("qwen2", max_position_embeddings=512)), "--out", "kept.jsonl", "--max-tokens", "6") as (process, url, said):
        assert "kept.jsonl" in said
        for name in ("first", "second"):
            with openai.OpenAI(base_url=f"{url}/session/{name}/v1", api_key="local") as client:
                messages: list[Any] = [{"role": "user", "content": "How are you?"}]
                for _ in range(2):
                    reply = client.chat.completions.create(model="any", messages=messages)
                    messages += [reply.choices[0].message, {"role": "user", "content": "And now?"}]
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate()
    assert process.returncode == 0 and "4 answers in 2 sessions" in rest and rest.endswith("ended\n")
    kept = Rollouts.load(tmp_path / "kept.jsonl")
    assert [t.group_id for t in kept] == ["first", "second"] and all(len(t["turns"]) == 2 and 2 <= sum(t.loss_mask) <= 12 for t in kept)


def test_a_recipe_gives_model_and_sampling(tmp_path: Path) -> None:
    with served(tmp_path, str(ROOT / "recipes/reverse"), "rollout_worker.max_tokens=3") as (process, url, _):
        body = {"prompt": "abc>", "max_tokens": 50}
        assert httpx.post(f"{url}/session/a/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 0
    (kept,) = Rollouts.load(tmp_path / "captured.jsonl")
    assert kept.data == {"session": "a"} and kept.prompt == "abc>" and 1 <= sum(kept.loss_mask) <= 3


def test_names_begin_sessions_where_that_is_wanted() -> None:
    def ask(proxy: CaptureProxy, name: str) -> httpx.Response:
        return httpx.post(f"{proxy.url}/session/{name}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})

    with CaptureProxy(Scripted(["Hello."])) as proxy:
        assert ask(proxy, "mine").status_code == 404
    with CaptureProxy(Scripted(["Hello."] * 9), named={}) as proxy:
        assert ask(proxy, "mine").status_code == 200 and ask(proxy, "mine").status_code == 200
        assert list(proxy.places.open) == ["mine"] and len(proxy.places.open["mine"].session.conversation.turns) == 2
        for name in ("x" * 81, "a%20b", "%2e%2e%2f", "ä"):
            assert ask(proxy, name).status_code == 404
        assert list(proxy.places.open) == ["mine"]
    with pytest.raises(ConfigError, match="no backend"):
        CaptureProxy(named={})


def test_a_record_is_written_where_there_is_more(tmp_path: Path) -> None:
    with CaptureProxy(Scripted(["Hello."] * 3), named={}) as proxy:
        record = Record(proxy, tmp_path / "kept.parquet")
        assert record.save() == 0 and not record.path.exists()
        httpx.post(f"{proxy.url}/session/a/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}).raise_for_status()
        assert record.save() == 1
        written = record.path.stat().st_mtime_ns
        assert record.save() == 1 and record.path.stat().st_mtime_ns == written
        with pytest.raises(ConfigError, match="is there already"):
            Record(proxy, tmp_path / "kept.parquet")
    assert json.dumps(Rollouts.load(record.path)[0]["response_message"]["content"]) == '"Hello."'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a recipe, or a model"),
        (["recipes/reverse", "--model", "x"], "and not both"),
        (["--model", "x", "--out", "kept.txt"], r"ends with \.jsonl or \.parquet"),
        (["--model", "x", "--out", "nowhere/kept.jsonl"], "no folder that can be written"),
        (["--model", "x", "--host", "0.0.0.0"], "needs a key"),
        (["no_such_recipe"], "no_such_recipe"),
    ],
)
def test_what_cannot_be_served_is_said_before_a_model_is_loaded(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEXRL_API_KEY", raising=False)
    found = CliRunner().invoke(app, ["serve", "openai", *arguments, "--port", "0"])
    assert found.exit_code != 0 and re.search(said, str(found.exception))
