"""What the tests of the asynchronous modes run, also as children that are killed: a small training with slow, uneven answers."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from nexrl_sdk import Recipe, Run, Trainer
from nexrl_sdk.rollout.worker import SimpleRolloutWorker

PROMPTS, GROUP, STEPS = 4, 2, 6


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.1 * len(answer)


class SlowWorker(SimpleRolloutWorker):
    """Takes up to `slowest` seconds for a prompt: the prompts of one call wait side by side."""

    slowest = 0.03

    def answer(self, tasks, n, sampling, stop_flag):
        waits = [random.Random(t.seed).random() ** 3 * self.slowest for t in tasks]
        if stop_flag is None:
            time.sleep(max(waits))
        else:
            stop_flag.wait(max(waits))
        return super().answer(tasks, n, sampling, stop_flag)


def make_recipe(model: str, mode: str = "batch-async", threshold: int = 1, steps: int = STEPS, save: int = 1, weight: dict | None = None, **more: Any) -> Recipe:
    rows = [{"prompt": f"{a}{b}: "} for a in "abcdefghij" for b in "vwxyz"]
    return Recipe(
        model=model, data={"rows": rows, "batch_size": PROMPTS}, evaluator=reward, rollout_worker={"max_tokens": 5, "num_workers": 2},
        trajectory_pool={"group_size": GROUP, **more.pop("trajectory_pool", {})}, weight={"sync_mode": mode, "staleness_threshold": threshold, **(weight or {})},
        trainer={"total_train_steps": steps, "save_freq": save, "optim": {"lr": 3e-3}}, **more,
    )  # fmt: skip


def make_trainer(recipe: Recipe, run: Any = None, backend: Any = None, slowest: float = 0.03) -> Any:
    trainer = Trainer(recipe, backend, run=run)
    worker = SlowWorker(trainer.backend, recipe.evaluator(), sampling=recipe.sampling(), group_size=recipe.config.trajectory_pool.group_size, concurrency=2, seed=recipe.config.seed)
    worker.slowest = slowest
    trainer.worker = worker
    return trainer


def train(model: str, folder: Path, mode: str = "batch-async", steps: int = STEPS, save: int = 1, threshold: int = 1) -> None:
    """Start or go on with a run, to its end."""
    exists = (folder / "run.json").exists()
    recipe = make_recipe(model, mode, threshold, steps=steps, save=save)
    run = Run.open(folder, recipe) if exists else Run.create(folder, recipe)
    with make_trainer(recipe, run) as trainer:
        if exists:
            trainer.resume()
        trainer.fit(steps - trainer.step_count, progress=False)


def killed_after(model: str, folder: Path, mode: str, steps: int, save: int, seconds: float, threshold: int = 1) -> None:
    """Train, and die so many seconds after training began."""
    import os
    import signal
    import threading

    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL])
    timer.daemon = True
    real = Trainer.fit

    def fit(self, *args, **kwargs):
        timer.start()
        return real(self, *args, **kwargs)

    Trainer.fit = fit
    train(model, folder, mode, steps, save, threshold)

