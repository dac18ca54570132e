"""SIGKILL at any moment: the resumed run equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from killed_runs import STEPS
from zygote import Zygote


def record(folder: Path) -> dict:
    """Everything that must be equal: metrics without clocks, tokens and logprobs, weights and moments."""
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith("time") and k != "tokens/per_second"} for line in lines]
    tokens = {}
    for path in sorted((folder / "rollouts").glob("*.jsonl")):
        rows = [json.loads(x) for x in path.read_text().splitlines()]
        tokens[path.name] = [(r["tokens"], r["logprobs"], r["reward"]) for r in rows]
    newest = sorted(p for p in (folder / "checkpoints").iterdir() if (p / "manifest.json").exists())[-1]
    weights = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(newest.glob("*.safetensors"))}
    return {"metrics": metrics, "tokens": tokens, "checkpoint": newest.name, "weights": weights}


@pytest.fixture(scope="module")
def child(tiny, tmp_path_factory) -> Iterator[Callable[..., int]]:
    """`child("train", folder, ...)` runs a function of `killed_runs` in a process of its own; returns its exit code."""
    heavy = ["accelerate", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto"]
    zygote = Zygote(["killed_runs", "nexrl_sdk.trainer.grpo", "nexrl_sdk.backend.local", *heavy], [Path(__file__).parent])
    model, out = str(tiny("qwen2", kind="char", chat=False)), tmp_path_factory.mktemp("out") / "log"

    def run(function: str, folder: Path, *args: object) -> int:
        arguments = ", ".join(repr(a) for a in args)
        code = f"from pathlib import Path; import killed_runs; killed_runs.{function}({model!r}, Path({str(folder)!r}), {arguments})"
        status = zygote.wait(zygote.start(code, out))
        assert status in (0, -signal.SIGKILL), out.read_text()
        return status

    yield run
    zygote.close()


@pytest.fixture(scope="module")
def whole(child, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert child("train", folder) == 0
    found = record(folder)
    assert [m["step"] for m in found["metrics"] if "loss" in m] == list(range(1, STEPS + 1)) and found["weights"]
    return found


EVENTS = [("rollout", 1), *[("step", s) for s in range(1, STEPS + 1)], ("rollout", 4), ("save", 2), ("save", 4), ("eval", 0), ("eval", 2), ("eval", 4)]


@pytest.mark.parametrize("event,step", EVENTS)
def test_killed_between_stages(event, step, child, whole, tmp_path):
    folder = tmp_path / "run"
    assert child("killed_at_event", folder, event, step) == -signal.SIGKILL
    assert child("train", folder) == 0
    assert record(folder) == whole


CALLS = [*[("fsync", a) for a in (1, 4, 9, 16, 25)], *[("rename", a) for a in (1, 2, 3)], *[("replace", a) for a in (1, 3, 5)]]


@pytest.mark.parametrize("name,at", CALLS)
def test_killed_while_writing(name, at, child, whole, tmp_path):
    """At the n-th fsync or rename of the run: inside checkpoints, metrics and rollouts alike."""
    folder = tmp_path / "run"
    assert child("killed_at_call", folder, name, at) == -signal.SIGKILL
    assert child("train", folder) == 0
    assert record(folder) == whole
