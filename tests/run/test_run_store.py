"""The run folder: locked, whole after any kill, and of one recipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from nexrl_sdk import Recipe, Run
from nexrl_sdk.run import store
from nexrl_sdk.run.monitor import progress
from nexrl_sdk.run.store import Folder
from nexrl_sdk.types import ConfigError, RunFolderError

ROWS = [{"prompt": "a>", "answer": "b"}]


def reward(row, answer):
    return 1.0


def recipe(**sections):
    return Recipe(**{"model": "m", "data": ROWS, "evaluator": reward, **sections})


class Lines:
    """Stands for Rollouts where only `save` is needed."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def save(self, path):
        Path(path).write_text("".join(json.dumps({"tokens": t}) + "\n" for t in self.tokens))


def checkpoint(run: Run, step: int, complete: bool = True) -> None:
    folder = run.checkpoint_path(step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x")
    if complete:
        (folder / "manifest.json").write_text("{}")


def test_what_is_in_it(tmp_path):
    with Run.create(tmp_path / "r", recipe()) as run:
        run.log(0, {"val/reward/mean": 0.25})
        run.log(1, {"loss": 0.1, "reward/mean": 1 / 3})
        run.log(1, {"val/reward/mean": 0.5})
        run.save_rollouts(1, Lines([1, 2], [3]))
        run.save_rollouts(1, Lines([4]), is_val=True)
        run.finish({"steps": 1})
    names = {str(p.relative_to(run.folder)) for p in run.folder.rglob("*") if p.is_file()}
    assert names == {".lock", "run.json", "recipe.yaml", "environment.json", "metrics.jsonl", "metrics.parquet", "summary.json", "cells/evaluator.py", "cells/rows.jsonl", "rollouts/step_000001.jsonl", "rollouts/val_000001.jsonl"}
    table = pl.read_parquet(run.folder / "metrics.parquet")
    assert table["step"].to_list() == [0, 1] and table["reward/mean"].to_list() == [None, 1 / 3] and table["val/reward/mean"].to_list() == [0.25, 0.5]
    read = Folder(run.folder)
    assert read.summary == {"steps": 1} and list(read.rollout_files) == [1] and read.last_step == 1
    assert [x.name for x in read.rollout_files.values()] == ["step_000001.jsonl"]
    assert json.loads((run.folder / "environment.json").read_text())["packages"]["numpy"]


def test_floats_come_back_bit_for_bit(tmp_path):
    values = [0.1 + 0.2, 1e-308, -0.0, 1.7976931348623157e308, 1 / 3]
    with Run.create(tmp_path / "r", recipe()) as run:
        run.log(1, {f"m{i}": v for i, v in enumerate(values)} | {"bad": float("inf")})
        line = run.metric_lines()[0]
    assert [line[f"m{i}"].hex() for i in range(5)] == [v.hex() for v in values] and line["bad"] != line["bad"]
    json.loads((run.folder / "metrics.jsonl").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_a_run_is_reloaded_from_its_folder(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text("def f(row, answer):\n    return 1.0\n")
    (tmp_path / "task.yaml").write_text("model: {path: m}\ndata: {source: 'task.py:f'}\nrollout_worker: {evaluator_module_path: 'task.py:f'}\n")
    for i, made in enumerate([recipe(), recipe(validate=[{"prompt": "v"}], seed=3), Recipe.load(tmp_path / "task.yaml", ["seed=2"])]):
        run = Run.create(tmp_path / f"r{i}", made)
        run.close()
        monkeypatch.chdir("/")
        again = Recipe.load(run.folder)
        assert again == made
        Run.open(run.folder, again).close()


def test_a_run_of_what_no_file_holds_says_where_to_resume(tmp_path):
    made = recipe(evaluator=lambda row, answer: 1.0)
    Run.create(tmp_path / "r", made).close()
    with pytest.raises(ConfigError, match=r"a lambda cannot be written.*Run.open"):
        Recipe.load(tmp_path / "r")
    Run.open(tmp_path / "r", made).close()


@pytest.mark.parametrize(
    "changed,expected",
    [
        ({"seed": 1}, "seed is 0 there and 1 here"), ({"trainer": {"optim": {"lr": 1e-4}}}, "trainer.optim.lr is 1e-05 there and 0.0001 here"),
        ({"data": [{"prompt": "other", "answer": "b"}]}, "data.data_files: its content has changed"), ({"evaluator": test_what_is_in_it}, "rollout_worker.evaluator_module_path: its content has changed"),
        ({"validate": ROWS}, "validate.data"), ({"trainer": {"total_train_steps": 5, "optim": {"schedule": "cosine"}}}, "schedule"),
    ],
)  # fmt: skip
def test_another_recipes_folder_is_refused(changed, expected, tmp_path):
    Run.create(tmp_path / "r", recipe()).close()
    for way in (Run.open, Run.create):
        with pytest.raises(RunFolderError, match="of another recipe") as e:
            way(tmp_path / "r", recipe(**changed))
        assert expected in str(e.value)


def test_what_does_not_change_the_numbers_may_change(tmp_path):
    Run.create(tmp_path / "r", recipe()).close()
    Run.open(tmp_path / "r", recipe(trainer={"total_train_steps": 500, "save_freq": 7, "keep_last": 0}, logger={"backend": ["file"]}, experiment_name="other", rollout_worker={"num_workers": 1})).close()


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(RunFolderError, match=r"holds no run\.json"):
        Run.open(tmp_path)
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match="not empty and is not a run folder"):
        Run.create(tmp_path, recipe())
    Run.create(tmp_path / "r", recipe()).close()
    with pytest.raises(RunFolderError, match=r"already holds a run that stands at step 0.*nexrl resume"):
        Run.create(tmp_path / "r", recipe())


HOLDER = """
import sys, time
from nexrl_sdk import Recipe, Run
run = Run.open(sys.argv[1])
print("held", flush=True)
step = run.last_step
while True:
    step += 1
    run.log(step, {"loss": 1.0 / step, "padding": 0.123456789})
"""


def test_two_processes(tmp_path):
    """The second opener is refused by name of the first; after SIGKILL the folder is free and whole."""
    Run.create(tmp_path / "r", recipe()).close()
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"in use by process {child.pid} on"):
            Run.open(tmp_path / "r")
        assert progress(Folder(tmp_path / "r")).state == "running"
        time.sleep(0.2)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert progress(Folder(tmp_path / "r")).state == "stopped"
        with Run.open(tmp_path / "r") as run:
            steps = [line["step"] for line in run.metric_lines()]
        assert steps == list(range(1, len(steps) + 1)) and (tmp_path / "r/metrics.jsonl").read_bytes().endswith(b"\n")
    assert len(steps) > 3


@pytest.mark.parametrize("tail", [b"{", b'{"step": 3, "loss": 0.', b'{"step": 3, "loss": 0.5}', b"\x00\x00\x00\x00", b'{"step": 3}\n{"st\xc3', b"null\n"])
def test_torn_lines_are_dropped(tail, tmp_path):
    run = Run.create(tmp_path / "r", recipe())
    run.log(1, {"loss": 1.0})
    run.log(2, {"loss": 0.5})
    run.close()
    with (run.folder / "metrics.jsonl").open("ab") as f:
        f.write(tail)
    assert [x["step"] for x in Folder(run.folder).metric_lines()][:2] == [1, 2]
    with Run.open(run.folder) as run:
        whole = run.last_step
        run.log(whole + 1, {"loss": 0.1})
        assert [x["step"] for x in run.metric_lines()] == list(range(1, whole + 2))


def test_truncate_drops_what_came_later(tmp_path):
    with Run.create(tmp_path / "r", recipe()) as run:
        run.log(0, {"val/reward/mean": 0.1})
        for step in range(1, 6):
            run.log(step, {"loss": 1.0 / step})
            run.save_rollouts(step, Lines([step]))
            checkpoint(run, step)
            run.log(step, {"val/reward/mean": 0.2})
            run.save_rollouts(step, Lines([step]), is_val=True)
        run.finish({"steps": 5})
        before = (run.folder / "metrics.jsonl").read_bytes().splitlines()
        run.truncate(3)
        assert (run.folder / "metrics.jsonl").read_bytes().splitlines() == before[:7]
        assert list(run.rollout_files) == [1, 2, 3] and len(list((run.folder / "rollouts").glob("val_*"))) == 3
        assert [p.name for p in run.checkpoints] == [f"step_{s:06d}" for s in (1, 2, 3)] and run.summary == {} and not (run.folder / "metrics.parquet").exists()
        run.truncate(0)
        assert run.metric_lines() == [{"step": 0, "val/reward/mean": 0.1}] and run.checkpoints == [] and run.latest_checkpoint() is None


def test_checkpoints(tmp_path):
    with Run.create(tmp_path / "r", recipe()) as run:
        for step in (2, 10, 4):
            checkpoint(run, step)
        checkpoint(run, 12, complete=False)
        assert run.latest_checkpoint().name == "step_000010" and run.latest_checkpoint(9).name == "step_000004" and run.latest_checkpoint(1) is None
        run.prune_checkpoints(0)
        assert len(run.checkpoints) == 3
        run.prune_checkpoints(2)
        assert [p.name for p in run.checkpoints] == ["step_000004", "step_000010"]


def test_checkpoints_elsewhere(tmp_path):
    with Run.create(tmp_path / "r", recipe(trainer={"checkpoint_path": str(tmp_path / "big")})) as run:
        checkpoint(run, 3)
        assert run.checkpoints == [tmp_path / "big/step_000003"]


def test_a_closed_run_refuses_to_write(tmp_path):
    run = Run.create(tmp_path / "r", recipe())
    run.close()
    run.close()
    with pytest.raises(RunFolderError, match="closed"):
        run.log(1, {})


def limited(work: str, folder: Path, size: int) -> subprocess.CompletedProcess:
    code = f"import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\nfrom nexrl_sdk.run import store\nimport errno\nstore._FULL = (errno.EFBIG,)\nfrom nexrl_sdk import Run\n{work}"
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)


def test_no_space_left(tmp_path):
    """A write that the system cuts short (a file size limit stands for a full disk) leaves whole lines and an error that helps."""
    Run.create(tmp_path / "r", recipe()).close()
    done = limited("import sys\nrun = Run.open(sys.argv[1])\nfor step in range(1, 1000): run.log(step, {'loss': 0.123456789})", tmp_path / "r", 20_000)
    assert done.returncode == 1 and "no space left in" in done.stderr and f"nexrl resume {tmp_path / 'r'}" in done.stderr
    raw = (tmp_path / "r/metrics.jsonl").read_bytes()
    assert raw.endswith(b"\n") and 19_000 < len(raw) <= 20_000
    with Run.open(tmp_path / "r") as run:
        last = run.last_step
        run.log(last + 1, {"loss": 0.0})


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_no_space_left_anywhere(name, tmp_path, monkeypatch):
    with Run.create(tmp_path / "r", recipe()) as run:
        run.log(1, {"loss": 1.0})
        before = (run.folder / "metrics.jsonl").read_bytes()

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store.os, name, full)
        for write in (lambda: run.log(2, {"loss": 0.5}), lambda: run.save_rollouts(2, Lines([1])), lambda: run.finish({}), lambda: run.truncate(0)):
            if name == "fsync" and write.__code__.co_names[0] == "save_rollouts":
                continue
            if name == "replace" and write.__code__.co_names[0] == "log":
                continue
            with pytest.raises(RunFolderError, match="no space left"):
                write()
        monkeypatch.undo()
        assert (run.folder / "metrics.jsonl").read_bytes() == before and not [p for p in run.folder.rglob("*.part*")]


def test_secrets_are_not_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_KEY", "hunter2hunter2")
    made = Recipe.from_dict({"model": {"path": "m"}, "data": {"data_files": "x.jsonl"}, "rollout_worker": {"evaluator_module_path": "a.py:b"}, "logger": {"wandb": {"api_key": "${oc.env:WANDB_KEY}", "password": "opensesame"}}}, base_dir=tmp_path)
    run = Run.create(tmp_path / "r", made)
    run.close()
    for path in run.folder.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert "hunter2" not in text and "opensesame" not in text, path
    assert "${oc.env:WANDB_KEY}" in (run.folder / "recipe.yaml").read_text()
    assert os.environ["WANDB_KEY"] == Recipe.load(run.folder).config.logger.wandb.api_key
