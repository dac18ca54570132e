"""`nexrl run recipes/reverse/self_hosted.yaml`: real services, started and ended by the run, or running already; and what happens when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/reverse/self_hosted.yaml"


class Command:
    """A `nexrl` command in a session of its own, whose processes carry a mark in their environment."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None):
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NEXRL_TEST_MARK": self.mark, **(env or {})}
        self.output = tempfile.NamedTemporaryFile(suffix=".out")
        self.process = subprocess.Popen([sys.executable, "-m", "nexrl_sdk.launch.cli", *arguments], cwd=ROOT, env=environment, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True)

    def read(self) -> str:
        """All that it has said so far."""
        return Path(self.output.name).read_text(errors="replace")

    def until(self, words: str, seconds: float = 180) -> None:
        """Wait until it has said something."""
        wait(lambda: words in self.read() or self.process.poll() is not None, seconds)
        assert words in self.read(), self.read()

    def until_step(self, step: int, folder: str | Path, seconds: float = 180) -> None:
        """Wait until a step has been recorded."""
        lines = Path(folder) / "metrics.jsonl"
        wait(lambda: (lines.is_file() and f'"step": {step}, ' in lines.read_text()) or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.read()

    def end(self, seconds: float = 180) -> tuple[int, str]:
        """Its exit code and all that it said; no process of it is left."""
        wait(lambda: self.process.poll() is not None, seconds)
        wait(lambda: not self.left(), 30)
        return self.process.returncode, self.read()

    def left(self) -> list[str]:
        """Processes with its mark that are there still."""
        return [" ".join(p.cmdline())[:120] for p in psutil.process_iter() if self._mine(p)]

    def _mine(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("NEXRL_TEST_MARK") == self.mark
        except psutil.Error:
            return False


def wait(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


@pytest.mark.parametrize("after", ["starting vLLM", "the actor is ready"])
def test_interrupted_while_services_start(after: str, tmp_path: Path) -> None:
    run = Command("run", RECIPE, "--steps", "5", "--out", str(tmp_path / "run"))
    run.until(after)
    time.sleep(1)
    os.kill(run.process.pid, signal.SIGINT)
    code, text = run.end(60)
    assert code == 130 and "nothing was recorded" in text and "Traceback" not in text, text
    assert not (tmp_path / "run").exists()


def test_a_run_starts_what_it_needs_and_leaves_nothing(tmp_path: Path) -> None:
    run = Command("run", RECIPE, "--steps", "3", "--out", str(tmp_path / "run"), "validate.max_samples=32")
    run.until_step(1, tmp_path / "run", 300)
    assert len([p for p in run.left() if "serve.workers" in p and "torch.distributed.run" not in p]) == 2 and any("vllm" in p for p in run.left())
    code, text = run.end()
    assert code == 0 and "held-out reward" in text and "Traceback" not in text, text
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"time/push"' in lines and "NEXRL" not in lines
    assert list((tmp_path / "run" / "services" / "train").glob("*/step_000003/manifest.json"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A training service and a vLLM server of the recipe's model, and the arguments and keys that reach them."""
    from nexrl_sdk import Recipe, VLLMServer, start_train_service

    root = tmp_path_factory.mktemp("service")
    model = Recipe.load(ROOT / RECIPE).model_path()
    with start_train_service(root) as train, VLLMServer(model, dtype="float32", max_model_len=64, weights_root=root, args=["--enforce-eager"]) as engine:
        yield SimpleNamespace(train=train, engine=engine, urls=["--train-url", train.url, "--inference-url", engine.url], env={"NEXRL_TRAIN_KEY": train.key, "NEXRL_INFERENCE_KEY": engine.key})


FEW = ["validate.max_samples=16", "trainer.save_freq=2"]


def test_services_that_run_already(running: SimpleNamespace, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run = Command("run", RECIPE, *running.urls, "--steps", "60", "--out", out, *FEW, env=running.env)
    run.until_step(3, out)
    os.kill(run.process.pid, signal.SIGINT)
    code, text = run.end()
    assert code == 130 and "nexrl resume" in text and "Traceback" not in text, text
    assert running.train.running and running.train.client().get_models() == {}  # the group has left, the service is there
    again = Command("resume", out, *running.urls, "--steps", "8", env=running.env)
    code, text = again.end()
    assert code == 0 and "8 steps" in text, text


@pytest.mark.parametrize("wrong", ["--train-url", "--inference-url"])
def test_an_address_where_nothing_is(wrong: str, running: SimpleNamespace, tmp_path: Path) -> None:
    urls = [*running.urls]
    urls[urls.index(wrong) + 1] = "http://127.0.0.1:9"
    code, text = Command("run", RECIPE, *urls, "--steps", "2", "--out", str(tmp_path / "run"), env=running.env).end(120)
    assert code == 1 and "127.0.0.1:9" in text and "Traceback" not in text, text


def test_a_wrong_key(running: SimpleNamespace, tmp_path: Path) -> None:
    code, text = Command("run", RECIPE, *running.urls, "--steps", "2", "--out", str(tmp_path / "run"), env={**running.env, "NEXRL_TRAIN_KEY": "wrong"}).end(120)
    assert code in (1, 2) and "key" in text and "Traceback" not in text and running.env["NEXRL_INFERENCE_KEY"] not in text, text


def test_a_rank_that_is_killed(running: SimpleNamespace, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run = Command("run", RECIPE, *running.urls, "--steps", "100", "--out", out, *FEW, env=running.env)
    run.until_step(3, out)
    ranks = [p for p in psutil.Process(running.train.pid).children(recursive=True) if "serve.workers" in " ".join(p.cmdline()) and "torch.distributed.run" not in " ".join(p.cmdline())]
    os.kill(ranks[1].pid, signal.SIGKILL)
    code, text = run.end(90)
    assert code == 1 and "SIGKILL" in text and "nexrl resume" in text and "Traceback" not in text, text
    code, text = Command("resume", out, *running.urls, "--steps", "6", env=running.env).end()
    assert code == 0, text


def test_vllm_is_killed_at_last(running: SimpleNamespace, tmp_path: Path) -> None:
    run = Command("run", RECIPE, *running.urls, "--steps", "100", "--out", str(tmp_path / "run"), *FEW, env=running.env)
    run.until_step(3, tmp_path / "run")
    os.kill(running.engine.pid, signal.SIGKILL)
    code, text = run.end(120)
    assert code == 1 and running.engine.url in text and "nexrl resume" in text and "Traceback" not in text, text
