"""What the children of the self-hosted tests run: a small training through a service, and the ways to kill it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killed_runs import SAVE, STEPS, make_recipe

from nexrl_sdk import HTTPTrainServiceClient, Run, SelfHostedBackend, Trainer

sys.path.append(str(Path(__file__).resolve().parents[1] / "backend"))


def make_backend(model: str, url: str, identifier: str) -> SelfHostedBackend:
    """A group of a running service, sampled from by an engine of this process that loads what the service exports."""
    from weights_fakes import FakeEngine

    client = HTTPTrainServiceClient(url, identifier)
    client.initialize_worker(config_dict={"model": {"path": model, "dtype": "float32", "device": "cpu"}})
    client.init_model()
    engine = FakeEngine(Path(model))
    return SelfHostedBackend(client, engine, engine.backend.tokenizer)


def train(model: str, folder: Path, url: str, identifier: str, on_event: Callable[[str, dict[str, Any]], None] | None = None) -> None:
    """Start or go on with a run, to its end."""
    exists = (folder / "run.json").exists()
    recipe = make_recipe(model)
    run = Run.open(folder) if exists else Run.create(folder, recipe)
    with make_backend(model, url, identifier) as backend, Trainer(recipe, backend, run=run, callbacks=[on_event] if on_event else []) as trainer:
        if exists:
            trainer.resume()
        trainer.fit(STEPS - trainer.step_count, progress=False)
        if trainer.step_count % SAVE:
            trainer.save()


def killed_at_event(model: str, folder: Path, url: str, identifier: str, event: str, step: int) -> None:
    """Train, and die when the trainer tells of an event."""

    def on_event(name: str, payload: dict[str, Any]) -> None:
        if name == event and payload["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(model, folder, url, identifier, on_event)


def killed_in_call(model: str, folder: Path, url: str, identifier: str, name: str, at: int) -> None:
    """Train, and die while the service answers the n-th call of a kind."""
    real, seen = getattr(HTTPTrainServiceClient, name), []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == at:
            threading.Timer(0.004, os.kill, [os.getpid(), signal.SIGKILL]).start()
            real(self, *args, **kwargs)
            time.sleep(10)
        return real(self, *args, **kwargs)

    setattr(HTTPTrainServiceClient, name, call)
    train(model, folder, url, identifier)


def service_killed_in_save(model: str, folder: Path, url: str, identifier: str, root: str, pid: int) -> None:
    """Train, and kill the service as soon as it begins to write its second checkpoint; exit 7 where the trainer hears of it."""
    from nexrl_sdk.types import BackendError

    def watch() -> None:
        while not list(Path(root).glob("*/.step_000004*")):
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    try:
        train(model, folder, url, identifier)
    except BackendError as e:
        assert "does not answer" in str(e) or "training service" in str(e), e
        sys.exit(7)
