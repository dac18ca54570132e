"""A driver, or the service, killed at any moment: the resumed run equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import hashlib
import json
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from killed_runs import STEPS
from zygote import Zygote

from nexrl_sdk.backend.train_server import start_train_service

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def place(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A running service, and `run(function, folder, ...)` in processes of their own."""
    heavy = ["accelerate", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto", "httpx"]
    zygote = Zygote(["self_hosted_runs", "nexrl_sdk.trainer.grpo", "nexrl_sdk.backend.local", *heavy], [Path(__file__).parent])
    model, out = str(tiny("qwen2", kind="char", chat=False)), tmp_path_factory.mktemp("out") / "log"
    service = start_train_service(tmp_path_factory.mktemp("service"))

    def run(function: str, folder: Path, identifier: str, *args: object, at: Any = None) -> int:
        arguments = ", ".join(repr(a) for a in (identifier, *args))
        where = at or service
        code = f"from pathlib import Path; import os; os.environ['NEXRL_TRAIN_KEY'] = {where.key!r}; import self_hosted_runs; self_hosted_runs.{function}({model!r}, Path({str(folder)!r}), {where.url!r}, {arguments})"
        status = zygote.wait(zygote.start(code, out))
        assert status in (0, 7, -signal.SIGKILL), out.read_text()
        return int(status)

    yield SimpleNamespace(run=run, service=service, out=out)
    zygote.close()
    service.close()


def record(folder: Path, service: Any, identifier: str) -> dict[str, Any]:
    """Everything that must be equal: metrics without clocks and without pushes (a resume makes one more), tokens and logprobs, and the service's weights."""
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time", "probe/")) and k != "tokens/per_second"} for line in lines]
    tokens = {p.name: [(r["tokens"], r["logprobs"], r["reward"]) for r in map(json.loads, p.read_text().splitlines())] for p in sorted((folder / "rollouts").glob("*.jsonl"))}
    path = Path(service.client(identifier).export_weights(f"final/{uuid.uuid4().hex}")["path"])
    return {"metrics": metrics, "tokens": tokens, "weights": hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()}


@pytest.fixture(scope="module")
def whole(place: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert place.run("train", folder, "whole") == 0, place.out.read_text()
    found = record(folder, place.service, "whole")
    assert [m["step"] for m in found["metrics"] if "loss" in m] == list(range(1, STEPS + 1))
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(m["probe/max_abs"] < 1e-4 for m in lines if "loss" in m and m["step"] > 1)
    place.service.client("whole").deregister()
    return found


EVENTS = [("rollout", 1), *[("step", s) for s in range(1, STEPS + 1)], ("rollout", 4), ("save", 2), ("save", 4), ("eval", 2)]


@pytest.mark.parametrize("event,step", EVENTS)
def test_the_driver_is_killed_between_stages(event: str, step: int, place: SimpleNamespace, whole: dict[str, Any], tmp_path: Path) -> None:
    name = f"{event}{step}"
    assert place.run("killed_at_event", tmp_path / "run", name, event, step) == -signal.SIGKILL
    assert place.run("train", tmp_path / "run", name) == 0
    assert record(tmp_path / "run", place.service, name) == whole
    place.service.client(name).deregister()


@pytest.mark.parametrize("call,at", [("update_actor", 1), ("update_actor", 4), ("save_checkpoint", 1), ("save_checkpoint", 2), ("export_weights", 3)])
def test_the_driver_is_killed_in_a_call(call: str, at: int, place: SimpleNamespace, whole: dict[str, Any], tmp_path: Path) -> None:
    name = f"{call}{at}"
    assert place.run("killed_in_call", tmp_path / "run", name, call, at) == -signal.SIGKILL
    assert place.run("train", tmp_path / "run", name) == 0
    assert record(tmp_path / "run", place.service, name) == whole
    place.service.client(name).deregister()


def test_the_service_is_killed_while_it_writes_a_checkpoint(place: SimpleNamespace, whole: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "service"
    with start_train_service(root) as first:
        assert place.run("service_killed_in_save", tmp_path / "run", "policy", str(root), first.pid, at=first) == 7
    with start_train_service(root) as second:
        assert place.run("train", tmp_path / "run", "policy", at=second) == 0
        assert record(tmp_path / "run", second, "policy") == whole
