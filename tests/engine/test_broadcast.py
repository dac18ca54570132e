"""Weights between processes over gloo: whole or an error on both sides, within the deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nexrl_sdk.engine import broadcast
from nexrl_sdk.engine.broadcast import WeightChannel, check_spec, named_weights, plan_weights, send_weights
from nexrl_sdk.engine.model import LoraConfig, load_model
from nexrl_sdk.types import BackendError, DataError

PEER = """
import json, os, sys, time
import torch
from nexrl_sdk.engine.broadcast import WeightChannel
print("up", flush=True)
spec, mode = json.loads(sys.argv[1]), sys.argv[2]
with WeightChannel(spec, int(sys.argv[3])) as channel:
    for i, (name, tensor) in enumerate(channel.receive()):
        if i == 2 and mode != "whole":
            print("half-way", flush=True)
            time.sleep(600)
print("whole", flush=True)
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def weights(count: int = 40, rows: int = 300) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    return {f"w{i}": (torch.randn(rows, i + 1) * 50).to(kinds[i % 4]) for i in range(count)} | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3.5)}


def make_spec(named: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": free_port(), "backend": "gloo", "world_size": 2, "timeout": 10, **plan_weights(named.items()), **changes}


def receive(spec: dict[str, Any], rank: int = 1) -> tuple[threading.Thread, dict[str, Any]]:
    out: dict[str, Any] = {}

    def body() -> None:
        try:
            with WeightChannel(spec, rank) as channel:
                out["got"] = {n: t.clone() for n, t in channel.receive()}
        except BackendError as e:
            out["error"] = e

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, out


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bucket", [1, 4096, 32 << 20])
def test_every_byte_arrives_whatever_the_bucket(monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    monkeypatch.setattr(broadcast, "BUCKET", bucket)
    named = weights()
    spec = make_spec(named)
    thread, out = receive(spec)
    assert send_weights(named.items(), spec)["bytes"] >= sum(t.numel() * t.element_size() for t in named.values())
    thread.join(20)
    assert list(out["got"]) == list(named)
    assert all(torch.equal(out["got"][n], t) and out["got"][n].dtype == t.dtype for n, t in named.items())


@pytest.mark.timeout(60)
def test_several_receivers() -> None:
    named = weights(6)
    spec = make_spec(named, world_size=4)
    threads = [receive(spec, rank) for rank in (1, 2, 3)]
    send_weights(named.items(), spec)
    for thread, out in threads:
        thread.join(20)
        assert all(torch.equal(out["got"][n], t) for n, t in named.items())


def peer(spec: dict[str, Any], mode: str) -> subprocess.Popen[str]:
    import json

    return subprocess.Popen([sys.executable, "-c", PEER, json.dumps(spec), mode, "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_is_killed_or_stopped_half_way(monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    named = {f"w{i}": torch.zeros(3_000_000) for i in range(8)}
    spec = make_spec(named, timeout=3)
    process = peer(spec, "wait")
    assert process.stdout is not None and process.stdout.readline() == "up\n"

    def slowly() -> Any:
        for i, pair in enumerate(named.items()):
            if i == 6:
                assert process.stdout is not None and process.stdout.readline() == "half-way\n"
                os.kill(process.pid, signum)
            yield pair

    start = time.monotonic()
    try:
        with pytest.raises(BackendError, match=r"lost (a receiver half-way|the other side)"):
            send_weights(slowly(), spec)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - start < 60


@pytest.mark.timeout(60)
def test_a_sender_that_fails_half_way() -> None:
    named = {f"w{i}": torch.ones(3_000_000) for i in range(6)}
    spec = make_spec(named)
    thread, out = receive(spec)

    def failing() -> Any:
        for i, pair in enumerate(named.items()):
            if i == 4:
                raise RuntimeError("out of memory")
            yield pair

    with pytest.raises(RuntimeError, match="out of memory"):
        send_weights(failing(), spec)
    thread.join(20)
    assert "lost the sender half-way" in str(out["error"])


@pytest.mark.timeout(60)
def test_both_sides_hear_of_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    named = weights(4)
    spec = make_spec(named)
    original = WeightChannel._agree
    monkeypatch.setattr(WeightChannel, "_agree", lambda self, total: original(self, total + self.rank))
    thread, out = receive(spec)
    with pytest.raises(BackendError, match=r"1 of 1 receivers got other bytes"):
        send_weights(named.items(), spec)
    thread.join(20)
    assert "other bytes" in str(out["error"])


@pytest.mark.timeout(60)
def test_another_model_than_announced_is_refused_on_both_sides() -> None:
    named = weights(4)
    spec = make_spec(named)
    thread, out = receive(spec)
    with pytest.raises(BackendError, match=r"w2 \[300, 3\] was announced and w2 \[2, 2\] came"):
        send_weights({**named, "w2": torch.zeros(2, 2)}.items(), spec)
    thread.join(20)
    assert "error" in out


@pytest.mark.timeout(60)
def test_nobody_comes() -> None:
    spec = make_spec(weights(2), timeout=1)
    start = time.monotonic()
    with pytest.raises(BackendError, match=r"rank 0 of 2 at 127.0.0.1:\d+, could not meet the other side"):
        WeightChannel(spec, 0)
    with pytest.raises(BackendError, match=r"rank 1 of 2 .* could not meet the other side"):
        WeightChannel(spec, 1)
    assert time.monotonic() - start < 20


def test_the_sender_listens_at_its_host_alone() -> None:
    spec = make_spec(weights(2), timeout=1)
    def wait_in_vain() -> None:
        with pytest.raises(BackendError):
            WeightChannel(spec, 0)

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    end = time.monotonic() + 1
    found: list[str] = []
    port = f"{spec['port']:04X}"
    while not found and time.monotonic() < end:
        lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
        found = [f[1] for f in map(str.split, lines[1:]) if len(f) > 3 and f[1].endswith(":" + port) and f[3] == "0A"]
    thread.join()
    assert found == [f"0100007F:{port}"]


def test_specifications_are_checked() -> None:
    spec = make_spec(weights(2))
    check_spec(spec)
    for changes, message in (({"backend": "mpi"}, "gloo or nccl"), ({"world_size": 1}, "world_size"), ({"dtypes": ["float31"] * 4}, "float32"), ({"shapes": [[-1]] * 4}, "shape"), ({"names": []}, "names")):
        with pytest.raises(DataError, match=message):
            check_spec({**spec, **changes})
    with pytest.raises(BackendError, match="nccl sends between GPUs"):
        WeightChannel({**spec, "backend": "nccl"}, 0)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_named_weights_are_those_of_transformers(tiny: Callable[..., Path], family: str) -> None:
    model = load_model(tiny(family), dtype="float32", device="cpu")
    want = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).state_dict()
    got = dict(named_weights(model))
    tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
    assert set(got) == set(want) - tied
    assert all(torch.equal(got[n], want[n]) for n in got)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_an_adapter_is_merged(tiny: Callable[..., Path], family: str) -> None:
    model = load_model(tiny(family), dtype="float32", device="cpu", lora=LoraConfig(rank=4, alpha=12))
    for name, parameter in model.base.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    state = model.base.state_dict()
    base = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).state_dict()
    merged = 0
    for name, tensor in named_weights(model, "default"):
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.default.weight" in state:
            delta = 3.0 * state[f"{stem}.lora_B.default.weight"] @ state[f"{stem}.lora_A.default.weight"]
            merged += 1
            torch.testing.assert_close(tensor, base[name] + (delta.T if family == "gpt2" else delta))
        else:
            assert torch.equal(tensor, base[name])
    assert merged >= 8
