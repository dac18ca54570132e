"""SIGKILL at any moment: the resumed run equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

STEPS, SAVE = 5, 2


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.1 * len(answer)


def make_recipe(model: Path, **changes):
    from nexrl_sdk import Recipe

    rows = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]
    trainer = {"total_train_steps": STEPS, "save_freq": SAVE, "optim": {"lr": 3e-3, "warmup_steps": 2, "schedule": "cosine"}}
    return Recipe(model=str(model), data={"data_files": rows, "batch_size": 4}, evaluator=reward, rollout_worker={"max_tokens": 6, "num_workers": 2},
                  trajectory_pool={"group_size": 4}, trainer=trainer, validate={"data": {"data_files": rows[:4]}, "eval": {"compute_interval": 2}}, **changes)  # fmt: skip


def train(model: Path, folder: Path, on_event: Callable[[str, dict], None] | None = None) -> None:
    """Start or go on with a run, to its end."""
    from nexrl_sdk import Run, Trainer

    recipe = make_recipe(model)
    exists = (folder / "run.json").exists()
    run = Run.open(folder) if exists else Run.create(folder, recipe)
    with Trainer(recipe, run=run, callbacks=[on_event] if on_event else []) as trainer:
        if exists:
            trainer.resume()
        left = STEPS - trainer.step_count
        trainer.fit(left, progress=False)
        if trainer.step_count % SAVE:
            trainer.save()


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; returns its wait status."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def killed_at(event: str, step: int) -> Callable[[str, dict], None]:
    def on_event(name: str, payload: dict) -> None:
        if name == event and payload["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_event


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
def model(tiny) -> Path:
    import torch

    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert in_child(lambda: train(model, folder)) == 0
    found = record(folder)
    assert [m["step"] for m in found["metrics"] if "loss" in m] == list(range(1, STEPS + 1)) and found["weights"]
    return found


@pytest.mark.parametrize("event,step", [("rollout", 1), *[("step", s) for s in range(1, STEPS + 1)], ("rollout", 4), ("save", 2), ("save", 4), ("eval", 0), ("eval", 2), ("eval", 4)])
def test_killed_between_stages(event, step, model, whole, tmp_path):
    folder = tmp_path / "run"
    assert in_child(lambda: train(model, folder, killed_at(event, step))) == signal.SIGKILL
    assert in_child(lambda: train(model, folder)) == 0
    assert record(folder) == whole


class KillAt:
    """Counts calls of a function of `os` and kills the process at one of them."""

    def __init__(self, name: str, at: int):
        self.real, self.at, self.seen = getattr(os, name), at, 0

    def __call__(self, *args, **kwargs):
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("name,at", [*[("fsync", a) for a in (1, 4, 9, 16, 25)], *[("rename", a) for a in (1, 2, 3)], *[("replace", a) for a in (1, 3, 5)]])
def test_killed_while_writing(name, at, model, whole, tmp_path):
    """At the n-th fsync or rename of the run: inside checkpoints, metrics and rollouts alike."""
    folder = tmp_path / "run"

    def work() -> None:
        setattr(os, name, KillAt(name, at))
        train(model, folder)

    assert in_child(work) == signal.SIGKILL
    assert in_child(lambda: train(model, folder)) == 0
    assert record(folder) == whole
