"""What the children of `test_kill_resume` run: a small training, and the ways to kill it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from nexrl_sdk import Recipe, Run, Trainer

STEPS, SAVE = 5, 2


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.1 * len(answer)


def make_recipe(model: str) -> Recipe:
    rows = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]
    trainer = {"total_train_steps": STEPS, "save_freq": SAVE, "optim": {"lr": 3e-3, "warmup_steps": 2, "schedule": "cosine"}}
    return Recipe(model=model, data={"rows": rows, "batch_size": 4}, evaluator=reward, rollout_worker={"max_tokens": 6, "num_workers": 2},
                  trajectory_pool={"group_size": 4}, trainer=trainer, validate={"data": {"rows": rows[:4]}, "eval": {"compute_interval": 2}})  # fmt: skip


def train(model: str, folder: Path, on_event: Callable[[str, dict], None] | None = None) -> None:
    """Start or go on with a run, to its end."""
    exists = (folder / "run.json").exists()
    recipe = make_recipe(model)
    run = Run.open(folder) if exists else Run.create(folder, recipe)
    with Trainer(recipe, run=run, callbacks=[on_event] if on_event else []) as trainer:
        if exists:
            trainer.resume()
        trainer.fit(STEPS - trainer.step_count, progress=False)
        if trainer.step_count % SAVE:
            trainer.save()


def killed_at_event(model: str, folder: Path, event: str, step: int) -> None:
    """Train, and die when the trainer tells of an event."""

    def on_event(name: str, payload: dict) -> None:
        if name == event and payload["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(model, folder, on_event)


def killed_at_call(model: str, folder: Path, name: str, at: int) -> None:
    """Train, and die at the n-th call of a function of `os`."""
    real, seen = getattr(os, name), []

    def call(*args, **kwargs):
        seen.append(1)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, name, call)
    train(model, folder)
