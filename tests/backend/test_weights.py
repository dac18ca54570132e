"""Routes, probe and pusher, against an engine in this process that fails on demand."""

from __future__ import annotations

import json
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend.weights_fakes import FakeEngine, train_step

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.weights import ROUTES, BroadcastRoute, ParityError, ParityProbe, PushError, WeightPusher, check_folder, compare, make_route, probe_prompts
from nexrl_sdk.types import BackendError, CheckpointError

FULL = ["shared-dir", "broadcast", "in-process"]


@pytest.fixture
def make(tiny: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`make(route)`: a trainer, an engine with the same weights, and a pusher between them."""
    opened: list[Any] = []

    def build(route: str, *, lora: bool = False, family: str = "qwen2", **options: Any) -> tuple[LocalBackend, FakeEngine, WeightPusher]:
        folder = tiny(family)
        trainer = LocalBackend(folder, dtype="float32", device="cpu", lora={"rank": 4} if lora else None)
        engine = FakeEngine(folder)
        opened.extend((trainer, engine))
        probe = options.pop("probe", ParityProbe(probe_prompts(272)))
        the_route = BroadcastRoute(timeout=10) if route == "broadcast" else make_route(route)
        return trainer, engine, WeightPusher(trainer.train_service, engine, the_route, probe, tmp_path / "weights", **options)

    yield build
    for x in opened:
        x.close()


def versions(pusher: WeightPusher) -> list[str]:
    return sorted(p.name for p in Path(pusher.folder).iterdir() if not p.name.startswith("."))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("route", "lora"), [*[(r, False) for r in FULL], ("lora", True), ("shared-dir", True), ("broadcast", True), ("in-process", True)])
def test_each_route_brings_the_trainers_weights(make: Callable[..., Any], route: str, lora: bool) -> None:
    trainer, engine, pusher = make(route, lora=lora)
    pusher.push(0)
    for version in (1, 2, 3):
        train_step(trainer)
        metrics = pusher.push(version)
        assert engine.weight_version == version and not engine.paused
        assert metrics["probe/max_abs"] < 1e-4 and metrics["time/push"] >= metrics["time/push_paused"] > 0
    assert versions(pusher) == ["v000002", "v000003"]
    prompts = probe_prompts(272, seed=5)
    other = ParityProbe(prompts, tolerance=1e-4).check(pusher.train, engine)
    assert other.tokens == 4 * 31


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_families_by_broadcast(make: Callable[..., Any], family: str) -> None:
    trainer, _, pusher = make("broadcast", family=family)
    train_step(trainer)
    assert pusher.push(1)["probe/max_abs"] < 1e-4


@pytest.mark.timeout(60)
def test_order_of_the_steps(make: Callable[..., Any]) -> None:
    _, engine, pusher = make("shared-dir")
    pusher.push(0)
    assert engine.calls == ["pause", "update", "half-way", "reset_prefix_cache", "logprobs", "resume"]


def broken(text: str = "the disk went away") -> Callable[[], None]:
    def fault() -> None:
        raise BackendError(text)

    return fault


@pytest.mark.timeout(60)
@pytest.mark.parametrize("route", [*FULL, "lora"])
@pytest.mark.parametrize("step", ["pause", "half-way", "reset_prefix_cache", "logprobs", "resume"])
def test_a_push_that_fails_is_undone(make: Callable[..., Any], route: str, step: str) -> None:
    trainer, engine, pusher = make(route, lora=route == "lora")
    train_step(trainer)
    pusher.push(1)
    probe = ParityProbe(probe_prompts(272, seed=9), tolerance=1e-4)
    good = probe.expected(pusher.train)
    train_step(trainer, lr=0.05)

    def once() -> None:
        del engine.faults[step]
        raise BackendError("the disk went away")

    engine.faults[step] = once
    with pytest.raises(PushError, match=r"push of version 2 by .* failed; version 1 was restored and proved.*the disk went away") as caught:
        pusher.push(2)
    assert (caught.value.version, caught.value.restored) == (2, 1)
    assert engine.weight_version == 1 and not engine.paused and not pusher.paused
    assert probe.compare(good, engine).ok
    assert engine.sample([[1, 2, 3]])[0][0].tokens
    assert pusher.push(3)["probe/max_abs"] < 1e-4


@pytest.mark.timeout(60)
def test_wrong_weights_are_found_and_undone(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("shared-dir")
    pusher.push(0)
    train_step(trainer, lr=0.01)
    engine.skip = {"model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(ParityError, match=r"version 0 was restored.*prompt \d, token \d+ \(id \d+\): trainer -[\d.]+, engine -[\d.]+; largest difference .* tolerance 0.005") as caught:
        pusher.push(1)
    assert caught.value.result is not None and caught.value.result.max_abs > 5e-3 and caught.value.restored == 0
    assert not engine.paused and engine.weight_version == 0


@pytest.mark.timeout(60)
def test_weights_that_stayed_behind_are_found_within_the_tolerance(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("in-process", probe=ParityProbe(probe_prompts(272), "bfloat16"))
    pusher.push(0)
    train_step(trainer, lr=1e-5)
    engine.skip = set(engine.base)
    with pytest.raises(ParityError, match=r"the engine made 0% of the trainer's last change"):
        pusher.push(1)
    engine.skip = set()
    assert pusher.push(1)["probe/max_abs"] < 1e-4


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("route", "lora"), [("shared-dir", False), ("lora", True)])
@pytest.mark.parametrize("damage", ["truncate", "header", "flip", "remove"])
def test_a_damaged_file_never_becomes_weights(make: Callable[..., Any], route: str, lora: bool, damage: str) -> None:
    trainer, engine, pusher = make(route, lora=lora)
    pusher.push(0)
    prove = ParityProbe(probe_prompts(272), tolerance=1e-5)
    good = prove.expected(pusher.train)
    train_step(trainer)
    export = pusher.train.export_weights
    from nexrl_sdk.backend.weights import fingerprint

    def damaging(path: str, kind: str = "full") -> dict[str, Any]:
        answer = export(path, kind)
        answer["fingerprint"] = fingerprint(Path(answer["path"]))
        hurt(next(Path(answer["path"]).glob("*.safetensors")), damage)
        return answer

    pusher.train.export_weights = damaging
    with pytest.raises(BackendError, match=r"truncated|cannot be read|fingerprint|holds no weights"):
        pusher.push(1)
    assert not engine.paused and engine.weight_version == 0 and prove.compare(good, engine).ok
    pusher.train.export_weights = export
    assert pusher.push(1)["probe/max_abs"] < 1e-4


def hurt(file: Path, how: str) -> None:
    """Damage a safetensors file."""
    data = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
        return
    if how == "truncate":
        data = data[:-100]
    elif how == "header":
        data[:8] = struct.pack("<Q", 1 << 40)
    else:
        data[-17] ^= 0x01
    file.write_bytes(bytes(data))


@pytest.mark.timeout(60)
def test_a_damaged_good_version_is_passed_over(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("shared-dir", keep=3)
    for version in range(3):
        pusher.push(version)
        train_step(trainer)
    hurt(next((Path(pusher.folder) / "v000002").glob("*.safetensors")), "flip")
    engine.faults["reset_prefix_cache"] = lambda: (_ for _ in ()).throw(BackendError("no")) if engine.version == 3 else None
    with pytest.raises(PushError, match=r"version 1 was restored") as caught:
        pusher.push(3)
    assert caught.value.restored == 1 and engine.weight_version == 1


@pytest.mark.timeout(60)
def test_where_nothing_can_be_restored_the_engine_stays_paused(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("shared-dir")
    engine.faults["half-way"] = broken()
    with pytest.raises(PushError, match=r"nothing is sampled until a push or a restore succeeds.*this was the first push"):
        pusher.push(0)
    assert engine.paused and pusher.paused
    engine.faults.clear()
    pusher.push(0)
    assert not engine.paused and not pusher.paused
    train_step(trainer)
    engine.faults["half-way"] = broken()
    with pytest.raises(PushError, match=r"nothing is sampled until.*version 0 could not be restored: the disk went away") as caught:
        pusher.push(1)
    assert caught.value.restored is None and engine.paused and pusher.paused
    engine.faults.clear()
    assert pusher.restore() == 0 and not engine.paused


@pytest.mark.timeout(60)
def test_an_engine_that_hangs_is_left_paused_and_its_late_answer_changes_nothing(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("shared-dir")
    pusher.push(0)
    go = threading.Event()
    engine.faults["half-way"] = lambda: (go.wait(30), None)[1]
    train_step(trainer)
    pusher.timeout = 0.5
    start = time.monotonic()
    with pytest.raises(PushError, match=r"did not end within 0.5 s"):
        pusher.push(1)
    assert time.monotonic() - start < 25
    before = len(engine.calls)
    engine.faults.clear()
    go.set()
    wait_for_threads()
    assert engine.paused and engine.calls[before:] == []
    pusher.timeout = 30
    assert pusher.restore() == 0 and not engine.paused


@pytest.mark.timeout(60)
def test_a_failing_export_leaves_the_engine_alone(make: Callable[..., Any]) -> None:
    _, engine, pusher = make("shared-dir")
    pusher.push(0)
    calls = len(engine.calls)

    def full(path: str, kind: str = "full") -> dict[str, Any]:
        raise CheckpointError("no space left")

    pusher.train.export_weights = full
    with pytest.raises(CheckpointError, match=r"no space left"):
        pusher.push(1)
    assert len(engine.calls) == calls and not engine.paused


@pytest.mark.timeout(60)
def test_a_training_service_that_hangs_leaves_the_engine_alone(make: Callable[..., Any]) -> None:
    _, engine, pusher = make("shared-dir")
    pusher.push(0)
    calls, go, export = len(engine.calls), threading.Event(), pusher.train.export_weights
    pusher.train.export_weights = lambda *a: go.wait(30) and export(*a)
    pusher.timeout = 0.5
    with pytest.raises(PushError, match=r"the engine was not touched, and goes on with version 0. The training service does not answer"):
        pusher.push(1)
    go.set()
    wait_for_threads()
    assert len(engine.calls) == calls and not engine.paused and not pusher.paused


@pytest.mark.timeout(60)
def test_the_first_interrupt_waits_for_the_push(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("shared-dir")
    pusher.push(0)
    train_step(trainer)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine.faults["half-way"] = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            pusher.push(1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert engine.weight_version == 1 and not engine.paused and pusher.good[-1].version == 1


def wait_for_threads() -> None:
    """Until no push is under way."""
    deadline = time.monotonic() + 10
    while any(t.name == "nexrl-push" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.timeout(60)
def test_the_same_version_again_does_not_overwrite_what_may_be_restored(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("shared-dir")
    pusher.push(4)
    train_step(trainer, lr=0.05)
    engine.faults["reset_prefix_cache"] = lambda: broken()() if engine.calls.count("update") == 2 else None
    with pytest.raises(PushError, match=r"version 4 was restored"):
        pusher.push(4)
    assert pusher.push(4)["probe/max_abs"] < 1e-4
    assert len(versions(pusher)) == 2


@pytest.mark.timeout(60)
def test_broadcast_ends_by_its_deadline_when_a_side_is_missing(make: Callable[..., Any]) -> None:
    _, engine, pusher = make("broadcast")
    pusher.push(0)
    pusher.route.timeout = 1.0
    engine.begin_broadcast = lambda spec: None  # type: ignore[method-assign]
    engine.faults["update"] = lambda: engine.faults.clear() or broken("never joined")()
    start = time.monotonic()
    with pytest.raises(PushError, match=r"version 0 was restored.*could not meet the other side.*the engine: never joined"):
        pusher.push(1)
    assert time.monotonic() - start < 20


@pytest.mark.timeout(60)
def test_broadcast_in_bfloat16(make: Callable[..., Any]) -> None:
    trainer, engine, pusher = make("broadcast", probe=ParityProbe(probe_prompts(272), "bfloat16"))
    pusher.route.dtype = "bfloat16"
    train_step(trainer)
    pusher.push(1)
    for name, tensor in trainer.model.base.state_dict().items():
        assert torch.equal(engine.backend.model.base.state_dict()[name], tensor.bfloat16().float()), name


def test_compare_minds_non_finite_values_and_lengths() -> None:
    good = [np.array([np.nan, -1.0, -2.0])]
    result = compare([[5, 6, 7]], good, [np.array([np.nan, -1.0, np.nan])], 10.0)
    assert not result.ok and (result.prompt, result.position, result.token) == (0, 2, 7)
    with pytest.raises(ParityError, match=r"3 tokens"):
        compare([[5, 6, 7]], good, [np.array([np.nan, -1.0])], 10.0)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    check_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(BackendError, match=r"names b in model-00002-of-00002.safetensors"):
        check_folder(tmp_path)


def test_registry() -> None:
    assert set(ROUTES) == {"shared-dir", "lora", "broadcast", "in-process"} and all(r.name == n for n, r in ROUTES.items())
