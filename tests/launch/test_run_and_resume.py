"""Whole runs through the command line: what is on disk, what is printed, and what an interrupt or a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

pytest.importorskip("nexrl_sdk.trainer.base")
pytest.importorskip("nexrl_sdk.backend.local")

from nexrl_sdk.launch.cli import main
from nexrl_sdk.launch.runner import resume_run, run_recipe
from nexrl_sdk.launch.template import write_template

STEPS = ["trainer.total_train_steps=8", "trainer.save_freq=3", "validate.eval.compute_interval=4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the template's recipe, and its model cached."""
    import torch
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    import nexrl_sdk.backend.local
    import nexrl_sdk.trainer.grpo
    import nexrl_sdk.view.report

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("place")
    old, cache = Path.cwd(), os.environ.get("NEXRL_CACHE")
    os.environ["NEXRL_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    write_template(folder / "my_task")
    yield folder
    os.chdir(old)
    os.environ.pop("NEXRL_CACHE")
    if cache is not None:
        os.environ["NEXRL_CACHE"] = cache


def start(place: Path, name: str, work) -> int:
    """Run in a forked process with its output in a file; returns the process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        handle = os.open(place / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(place: Path, name: str, work) -> str:
    """Run to the end in a forked process (never here: threads do not survive a fork); returns what it printed."""
    code = finish(start(place, name, work))
    text = (place / f"{name}.out").read_text()
    assert code == 0, text
    return text


def record(folder: Path) -> dict:
    """What must be equal between runs: metrics without clocks, and sampled tokens."""
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith("time/") and k != "tokens/per_second"} for line in lines]
    tokens = {p.name: [json.loads(x)["tokens"] for x in p.read_text().splitlines()] for p in sorted((folder / "rollouts").glob("*.jsonl"))}
    summary = {k: v for k, v in json.loads((folder / "summary.json").read_text()).items() if k != "seconds"}
    return {"metrics": metrics, "tokens": tokens, "summary": summary}


def wait_for_step(folder: Path, step: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        path = folder / "metrics.jsonl"
        if path.exists() and any(json.loads(x)["step"] >= step for x in path.read_text().splitlines() if x.endswith("}")):
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} never reached step {step}")


@pytest.fixture(scope="module")
def whole(place) -> dict:
    """The uninterrupted run, through the command line."""
    in_child(place, "whole", lambda: main(["run", "my_task", *STEPS, "--out", "runs/whole"]))
    return record(place / "runs/whole")


def test_what_a_run_leaves(place, whole):
    folder = place / "runs/whole"
    assert {"reward/before", "reward/after", "steps", "seconds"} <= set(json.loads((folder / "summary.json").read_text()))
    assert [m["step"] for m in whole["metrics"] if "loss" in m] == list(range(1, 9)) and [m["step"] for m in whole["metrics"] if "val/reward/mean" in m] == [0, 4, 8]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_000006", "step_000008"]
    assert (folder / "report.html").stat().st_size > 2000 and (folder / "metrics.parquet").exists()
    assert {f"val_{s:06d}.jsonl" for s in (0, 4, 8)} <= set(whole["tokens"])
    text = (place / "whole.out").read_text()
    assert "held-out reward  " in text and "runs/whole/report.html" in text and "nexrl run my_task --seed 1" in text


def test_the_function_and_the_command_give_the_same(place, whole):
    from nexrl_sdk import Recipe

    def work() -> None:
        summary = run_recipe(Recipe.load("my_task", STEPS), out="runs/function", progress=False, report=False)
        assert summary["folder"] == str(place / "runs/function")
        assert resume_run("runs/function")["reward/after"] == summary["reward/after"]

    in_child(place, "function", work)
    assert record(place / "runs/function") == whole


@pytest.mark.parametrize("name,signals", [("once", [signal.SIGINT]), ("twice", [signal.SIGINT, signal.SIGINT]), ("term", [signal.SIGTERM]), ("kill", [signal.SIGKILL])])
def test_interrupted_and_resumed(name, signals, place, whole):
    folder = place / f"runs/{name}"
    pid = start(place, name, lambda: main(["run", "my_task", *STEPS, "--out", str(folder), "--no-report"]))
    wait_for_step(folder, 2)
    for number in signals:
        os.kill(pid, number)
        time.sleep(0.02)
    code = finish(pid)
    text = (place / f"{name}.out").read_text()
    assert code == (-9 if name == "kill" else 130), text
    if name != "kill":
        assert f"nexrl resume runs/{name}" in text and "Traceback" not in text
    in_child(place, name, lambda: main(["resume", str(folder), "--no-report"]))
    assert record(folder) == whole


def killed(at: str, step: int):
    def on_event(event: str, payload: dict) -> None:
        if event == at and payload["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_event


@pytest.mark.parametrize("event,step", [("eval", 0), ("step", 8), ("save", 8)])
def test_killed_around_the_evaluations(event, step, place, whole):
    """Also between the last step and the evaluation after it."""
    from nexrl_sdk import Recipe

    folder = place / f"runs/{event}{step}"
    recipe = Recipe.load("my_task", STEPS)
    assert finish(start(place, "killed", lambda: run_recipe(recipe, out=folder, progress=False, report=False, callbacks=[killed(event, step)]))) == -9
    in_child(place, "resumed", lambda: resume_run(folder, progress=False, report=False))
    assert record(folder) == whole


@pytest.mark.parametrize("name,at", [("fsync", 12), ("replace", 9), ("rename", 1)])
def test_a_full_disk(name, at, place, whole):
    """From some write on, all fail: the message says what to do, and after it is done the run ends as if nothing had been."""
    folder = place / f"runs/full_{name}"
    real, seen = getattr(os, name), 0

    def full(*args, **kwargs):
        nonlocal seen
        seen += 1
        if seen > at:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    def work() -> None:
        setattr(os, name, full)
        main(["run", "my_task", *STEPS, "--out", str(folder), "--no-report"])

    code = finish(start(place, "full", work))
    text = (place / "full.out").read_text()
    assert code == 1 and "error: no space left" in text and "nexrl resume" in text and "Traceback" not in text, text
    in_child(place, "full", lambda: main(["resume", str(folder), "--no-report"]))
    assert record(folder) == whole


def test_a_run_that_fails_before_its_first_record_leaves_nothing(place):
    code = finish(start(place, "none", lambda: main(["run", "my_task", "--out", "runs/none", "model.builder=null", "model.path=org/no-such-model"])))
    text = (place / "none.out").read_text()
    assert code in (1, 2) and not Path("runs/none").exists() and "Traceback" not in text and "no-such-model" in text


def test_longer_than_it_was_meant_to_be(place, whole):
    in_child(place, "longer", lambda: main(["run", "my_task", *STEPS, "--steps", "5", "--out", "runs/longer", "--no-report"]))
    in_child(place, "longer", lambda: main(["resume", "runs/longer", "--steps", "8", "--no-report"]))
    got, want = record(place / "runs/longer"), whole
    assert [m for m in got["metrics"] if "loss" in m] == [m for m in want["metrics"] if "loss" in m]


def test_the_template_learns(place):
    in_child(place, "learns", lambda: main(["run", "my_task", "--out", "runs/learns", "--no-report"]))
    summary = json.loads(Path("runs/learns/summary.json").read_text())
    assert summary["reward/after"] > summary["reward/before"] + 0.3
