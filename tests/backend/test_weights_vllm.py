"""Routes, probe and pusher with a real vLLM on the CPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from backend.weights_fakes import train_step

pytest.importorskip("vllm")

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.weights import BroadcastRoute, ParityError, ParityProbe, PushError, WeightPusher, make_route, probe_prompts
from nexrl_sdk.types import BackendError, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(240)]
PROBE = ParityProbe(probe_prompts(272), "float32")


@pytest.fixture
def engine(vllm_server: Any, vllm_model: Callable[[int], Path]) -> Iterator[Any]:
    """A client of the session's server, which has the first model's weights at the start and at the end."""
    client = vllm_server.client(stall_timeout=10)
    client.resume()
    client.update_from_folder(vllm_model(0), 0)
    yield client
    client.resume()
    client.update_from_folder(vllm_model(0), 0)
    client.close()


@pytest.fixture
def make(engine: Any, vllm_model: Callable[[int], Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`make(route)`: a trainer of the server's model, and a pusher."""
    opened: list[Any] = []

    def build(route: str, *, lora: bool = False, **options: Any) -> tuple[LocalBackend, WeightPusher]:
        trainer = LocalBackend(vllm_model(0), dtype="float32", device="cpu", lora={"rank": 4} if lora else None)
        opened.append(trainer)
        the_route = BroadcastRoute(timeout=10) if route == "broadcast" else make_route(route)
        return trainer, WeightPusher(trainer.train_service, engine, the_route, PROBE, tmp_path / "weights", **options)

    yield build
    for x in opened:
        x.close()


def sampled_by_the_trainer(trainer: LocalBackend, engine: Any) -> float:
    """Largest difference between the logprobs of what the engine samples and the trainer's of the same tokens."""
    from backend.weights_fakes import datum

    prompt, gap = [5, 6, 41, 7, 8, 42], 0.0
    for c in engine.sample([prompt], SamplingParams(max_tokens=16, stop=[]), 2)[0]:
        scored = trainer.forward([datum(prompt + c.tokens)], "cross_entropy", {}).logprobs[0][len(prompt) - 1 :]
        gap = max(gap, abs(scored - c.logprobs).max())
    return gap


@pytest.mark.parametrize(("route", "lora"), [("shared-dir", False), ("shared-dir", True), ("broadcast", False), ("broadcast", True), ("lora", True)])
def test_each_route(make: Callable[..., Any], engine: Any, route: str, lora: bool) -> None:
    trainer, pusher = make(route, lora=lora)
    pusher.push(0)
    for version in (1, 2):
        train_step(trainer, lr=0.01)
        metrics = pusher.push(version)
        assert metrics["probe/max_abs"] < 1e-3
        assert engine.weight_version == version
    assert sampled_by_the_trainer(trainer, engine) < 1e-3


@pytest.mark.parametrize("fault", ["truncated", "flipped", "foreign"])
def test_damaged_and_foreign_weights(make: Callable[..., Any], engine: Any, vllm_model: Any, fault: str) -> None:
    from backend.test_weights import hurt

    from nexrl_sdk.backend.weights import fingerprint

    trainer, pusher = make("shared-dir")
    pusher.push(1)
    expected = PROBE.expected(pusher.train)
    train_step(trainer, lr=0.01)
    export = pusher.train.export_weights

    def damaged(path: str, kind: str = "full") -> dict[str, Any]:
        answer = export(path, kind)
        folder = Path(answer["path"])
        if fault == "foreign":
            return {**answer, "path": str(vllm_model(3))}
        answer["fingerprint"] = fingerprint(folder)
        hurt(next(folder.glob("*.safetensors")), {"truncated": "truncate", "flipped": "flip"}[fault])
        return answer

    pusher.train.export_weights = damaged
    what = {"truncated": "truncated", "flipped": "(?s)version 1 was restored.*fingerprint differs", "foreign": r"version 1 was restored.*prompt \d, token \d+"}[fault]
    with pytest.raises(ParityError if fault == "foreign" else BackendError, match=what):
        pusher.push(2)
    assert engine.weight_version == 1 and not engine.health()["paused"]
    assert PROBE.compare(expected, engine).ok
    pusher.train.export_weights = export
    assert pusher.push(2)["probe/max_abs"] < 1e-3


def test_a_broadcast_that_fails_half_way(make: Callable[..., Any], engine: Any) -> None:
    trainer, pusher = make("broadcast")
    pusher.push(1)
    expected = PROBE.expected(pusher.train)
    train_step(trainer, lr=0.01)
    send, plan = pusher.train.broadcast_weights, pusher.route.plan(pusher.train)

    def half(spec: dict[str, Any]) -> dict[str, Any]:
        from nexrl_sdk.engine.broadcast import named_weights, send_weights

        named = list(named_weights(trainer.model, None))
        return send_weights(named[: len(plan["names"]) // 2], spec)

    pusher.train.broadcast_weights = half
    with pytest.raises(PushError, match=r"version 1 was restored.*was announced and nothing") as caught:
        pusher.push(2)
    assert caught.value.restored == 1
    assert engine.weight_version == 1 and PROBE.compare(expected, engine).ok
    pusher.train.broadcast_weights = send
    assert pusher.push(2)["probe/max_abs"] < 1e-3


def test_a_server_that_is_stopped_during_a_push(make: Callable[..., Any], engine: Any, vllm_server: Any) -> None:
    trainer, pusher = make("shared-dir", timeout=6)
    pusher.push(1)
    expected = PROBE.expected(pusher.train)
    train_step(trainer, lr=0.01)
    update = engine.update_from_folder

    def stopped(*args: Any) -> None:
        os.killpg(vllm_server._process.group, signal.SIGSTOP)
        update(*args)

    engine.update_from_folder = stopped
    start = time.monotonic()
    try:
        with pytest.raises(PushError, match=r"did not end within 6 s|no sign of life|no answer|nothing is sampled"):
            pusher.push(2)
    finally:
        os.killpg(vllm_server._process.group, signal.SIGCONT)
        engine.update_from_folder = update
    assert time.monotonic() - start < 30 and pusher.paused
    pusher.timeout = 60
    assert pusher.restore() == 1
    assert engine.weight_version == 1 and not engine.health()["paused"] and PROBE.compare(expected, engine).ok
    assert pusher.push(2)["probe/max_abs"] < 1e-3


def test_completions_under_way_during_a_push_that_fails(make: Callable[..., Any], engine: Any) -> None:
    """What a failed version drew is drawn again by the restored one."""
    trainer, pusher = make("shared-dir")
    pusher.push(1)
    good = LocalBackend(trainer.model.path, dtype="float32", device="cpu")
    train_step(trainer, lr=0.05)
    reset, calls = engine.reset_prefix_cache, []

    def once() -> None:
        reset()
        calls.append(1)
        if len(calls) == 1:
            raise BackendError("a fault after the update")

    rows: list[Any] = []
    thread = threading.Thread(target=lambda: rows.extend(engine.sample([[5, 6, 41]], SamplingParams(max_tokens=200, stop=[]), 2)[0]))
    thread.start()
    time.sleep(0.3)
    engine.reset_prefix_cache = once
    with pytest.raises(PushError, match=r"version 1 was restored.*a fault after the update"):
        pusher.push(2)
    engine.reset_prefix_cache = reset
    thread.join(60)
    from backend.weights_fakes import datum

    assert len(rows) == 2
    for c in rows:
        assert set(c.weight_versions or [c.weight_version]) == {1}
        scored = good.forward([datum([5, 6, 41, *c.tokens])], "cross_entropy", {}).logprobs[0][2:]
        assert abs(scored - c.logprobs).max() < 1e-3
    good.close()


def test_a_server_that_is_killed_during_a_push(vllm_model: Callable[[int], Path], tmp_path: Path) -> None:
    """Runs a server of its own."""
    from nexrl_sdk.backend.vllm import VLLMServer

    trainer = LocalBackend(vllm_model(0), dtype="float32", device="cpu")
    with VLLMServer(vllm_model(0), dtype="float32", max_model_len=256, args=["--enforce-eager"]) as server:
        engine = server.client(stall_timeout=10)
        pusher = WeightPusher(trainer.train_service, engine, make_route("shared-dir"), PROBE, tmp_path / "weights", timeout=60)
        pusher.push(1)
        update = engine.update_from_folder

        def killed(*args: Any) -> None:
            os.killpg(server._process.group, signal.SIGKILL)
            update(*args)

        engine.update_from_folder = killed
        start = time.monotonic()
        with pytest.raises(PushError, match=r"(?s)push of version 2 by shared-dir failed, and nothing is sampled until.*version 1 could not be restored"):
            pusher.push(2)
        assert time.monotonic() - start < 30 and pusher.paused
        with pytest.raises(BackendError, match="SIGKILL"):
            engine.health()
    trainer.close()


def test_in_process(vllm_model: Callable[[int], Path]) -> None:
    """vLLM and the trainer share a process, which ends with the test."""
    import json
    import subprocess
    import sys

    bench = Path(__file__).resolve().parent.parent / "bench" / "bench_sync.py"
    done = subprocess.run([sys.executable, str(bench), "--in-process", str(vllm_model(0)), "--rounds", "2"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])["in-process"]
    assert len(rows) == 2 and all(r["probe/max_abs"] < 1e-3 for r in rows)
