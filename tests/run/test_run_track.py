"""Trackers: real ones where they are installed, and none may end a run."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import ClassVar

import pytest

from nexrl_sdk import Recipe, Run
from nexrl_sdk.run import track
from nexrl_sdk.types import ConfigError


def recipe(backends, **logger):
    return Recipe(model="m", data=[{"prompt": "a"}], evaluator="a.py:b", logger={"backend": backends, **logger}, project_name="p", experiment_name="e")


class Memory:
    """A tracker that keeps what it gets, and fails when told to."""

    made: ClassVar[list[Memory]] = []

    def __init__(self, experiment):
        self.experiment, self.lines, self.fail = experiment, [], False
        Memory.made.append(self)

    def log(self, step, metrics):
        if self.fail:
            raise ConnectionError("the tracker's server is gone")
        self.lines.append((step, metrics))

    def close(self):
        self.lines.append("closed")


@pytest.fixture
def memory(monkeypatch):
    Memory.made = []
    monkeypatch.setitem(track.TRACKERS, "wandb", Memory)
    return Memory


def test_a_run_sends_its_metrics_and_keeps_its_id(memory, tmp_path):
    made = recipe(["file", "wandb"], wandb={"tags": ["x"]})
    with Run.create(tmp_path / "r", made) as run:
        run.log(1, {"loss": 0.5, "bad": float("nan")})
    with Run.open(tmp_path / "r", made) as run:
        run.log(2, {"loss": 0.25})
    first, second = memory.made
    assert first.lines == [(1, {"loss": 0.5}), "closed"] and second.lines[0] == (2, {"loss": 0.25})
    assert first.experiment.id == second.experiment.id and (first.experiment.project, first.experiment.name) == ("p", "e")
    assert dict(first.experiment.options) == {"tags": ["x"]} and first.experiment.config["seed"] == 0


def test_a_tracker_that_fails_does_not_end_the_run(memory, tmp_path, caplog):
    with Run.create(tmp_path / "r", recipe(["wandb"])) as run, caplog.at_level(logging.WARNING):
        memory.made[0].fail = True
        run.log(1, {"loss": 0.5})
        run.log(2, {"loss": 0.5})
        assert run.last_step == 2
    assert [r.message for r in caplog.records] == ["wandb failed at step 1 and gets no more metrics: ConnectionError: the tracker's server is gone"]


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_not_installed(name, tmp_path, monkeypatch):
    def missing(module, package=None):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(track.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'nexrl_sdk\[track\]'"):
        Run.create(tmp_path / "r", recipe([name]))
    Run.open(tmp_path / "r").close()  # the lock was given back


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_files_hold_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run.create(tmp_path / "r", recipe(["tensorboard"])) as run:
        run.log(1, {"reward/mean": 0.5})
        run.log(2, {"reward/mean": 0.75})
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Run.create(tmp_path / "r", recipe(["wandb"], wandb={"mode": "offline"})) as run:
        run.log(1, {"reward/mean": 0.5})
    assert list(Path(run.folder).rglob("*.wandb"))


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_local(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with Run.create(tmp_path / "r", recipe(["trackio"])) as run:
        run.log(1, {"reward/mean": 0.5})
    assert list((tmp_path / "trackio").rglob("*"))
