"""Whole runs through the command line: what is on disk, what is printed, and what an interrupt or a kill leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from zygote import Zygote

from nexrl_sdk.launch.template import write_template

STEPS = ["trainer.total_train_steps=8", "trainer.save_freq=3", "validate.eval.compute_interval=4"]
MODULES = ["transformers.models.qwen2.modeling_qwen2", "nexrl_sdk.backend.local", "nexrl_sdk.trainer.grpo", "nexrl_sdk.view.report", "nexrl_sdk.launch.cli", "nexrl_sdk.launch.runner"]


class Place:
    """A folder with the template's recipe and its model, where commands are run in processes of their own."""

    def __init__(self, folder: Path, zygote: Zygote):
        self.folder, self.zygote = folder, zygote

    def _out(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def start(self, name: str, code: str) -> int:
        return self.zygote.start(code, self._out(name), self.folder, NEXRL_CACHE=str(self.folder / "cache"))

    def finish(self, name: str, pid: int) -> tuple[int, str]:
        return self.zygote.wait(pid), self._out(name).read_text()

    def run(self, name: str, code: str) -> str:
        code_, text = self.finish(name, self.start(name, code))
        assert code_ == 0, text
        return text


def command(*arguments: str) -> str:
    """Code that runs `nexrl` with these arguments."""
    return f"from nexrl_sdk.launch.cli import main\nmain({list(arguments)!r})"


def function(name: str, out: str, callbacks: str = "[]") -> str:
    """Code that runs the recipe by the runner's function."""
    what = f"Recipe.load('my_task', {STEPS!r}), out={out!r}" if name == "run_recipe" else repr(out)
    return f"import os\nfrom nexrl_sdk import Recipe\nfrom nexrl_sdk.launch.runner import {name}\nsummary = {name}({what}, progress=False, report=False, callbacks={callbacks})"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_template(folder / "my_task")
    zygote = Zygote(MODULES)
    yield Place(folder, zygote)
    zygote.close()


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
    place.run("whole", command("run", "my_task", *STEPS, "--out", "runs/whole"))
    return record(place.folder / "runs/whole")


def test_what_a_run_leaves(place, whole):
    folder = place.folder / "runs/whole"
    assert {"reward/before", "reward/after", "steps", "seconds"} <= set(json.loads((folder / "summary.json").read_text()))
    assert [m["step"] for m in whole["metrics"] if "loss" in m] == list(range(1, 9)) and [m["step"] for m in whole["metrics"] if "val/reward/mean" in m] == [0, 4, 8]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_000006", "step_000008"]
    assert (folder / "report.html").stat().st_size > 2000 and (folder / "metrics.parquet").exists()
    assert {f"val_{s:06d}.jsonl" for s in (0, 4, 8)} <= set(whole["tokens"])
    text = (place.folder / "whole.out").read_text()
    assert "held-out reward  " in text and "runs/whole/report.html" in text and re.search(r"nexrl run my_task .*--seed 1", text)


def test_the_function_and_the_command_give_the_same(place, whole):
    place.run("function", function("run_recipe", "runs/function") + "\nfrom nexrl_sdk.launch.runner import resume_run\nassert resume_run('runs/function') == {**summary, 'folder': os.path.abspath('runs/function'), 'finished': True}")
    assert record(place.folder / "runs/function") == whole


@pytest.mark.parametrize("name,signals", [("once", [signal.SIGINT]), ("twice", [signal.SIGINT, signal.SIGINT]), ("term", [signal.SIGTERM]), ("kill", [signal.SIGKILL])])
def test_interrupted_and_resumed(name, signals, place, whole):
    folder = place.folder / f"runs/{name}"
    pid = place.start(name, command("run", "my_task", *STEPS, "--out", f"runs/{name}", "--no-report"))
    wait_for_step(folder, 2)
    for number in signals:
        os.kill(pid, number)
        time.sleep(0.02)
    code, text = place.finish(name, pid)
    assert code == (-9 if name == "kill" else 130), text
    if name != "kill":
        assert f"nexrl resume runs/{name}" in text and "Traceback" not in text
    place.run(name, command("resume", f"runs/{name}", "--no-report"))
    assert record(folder) == whole


@pytest.mark.parametrize("event,step", [("eval", 0), ("step", 8), ("save", 8)])
def test_killed_around_the_evaluations(event, step, place, whole):
    """Also between the last step and the evaluation after it."""
    out = f"runs/{event}{step}"
    killer = f"[lambda event, payload: os.kill(os.getpid(), 9) if (event, payload['step']) == ({event!r}, {step}) else None]"
    code, text = place.finish("killed", place.start("killed", function("run_recipe", out, killer)))
    assert code == -9, text
    place.run("resumed", function("resume_run", out))
    assert record(place.folder / out) == whole


FULL = """
import os
real, seen = os.{name}, 0

def full(*args, **kwargs):
    global seen
    seen += 1
    if seen > {at}:
        raise OSError(28, "No space left on device")
    return real(*args, **kwargs)

os.{name} = full
"""


@pytest.mark.parametrize("name,at", [("fsync", 12), ("replace", 9), ("rename", 1)])
def test_a_full_disk(name, at, place, whole):
    """From some write on, all fail: the message says what to do, and after it is done the run ends as if nothing had been."""
    out = f"runs/full_{name}"
    code, text = place.finish("full", place.start("full", FULL.format(name=name, at=at) + command("run", "my_task", *STEPS, "--out", out, "--no-report")))
    assert code == 1 and "error: no space left" in text and "nexrl resume" in text and "Traceback" not in text, text
    place.run("full", command("resume", out, "--no-report"))
    assert record(place.folder / out) == whole


def test_a_run_that_fails_before_its_first_record_leaves_nothing(place):
    code, text = place.finish("none", place.start("none", command("run", "my_task", "--out", "runs/none", "model.builder=null", "model.path=org/no-such-model")))
    assert code in (1, 2) and not (place.folder / "runs/none").exists() and "Traceback" not in text and "no-such-model" in text


def test_longer_than_it_was_meant_to_be(place, whole):
    place.run("longer", command("run", "my_task", *STEPS, "--steps", "5", "--out", "runs/longer", "--no-report"))
    place.run("longer", command("resume", "runs/longer", "--steps", "8", "--no-report"))
    got = record(place.folder / "runs/longer")
    assert [m for m in got["metrics"] if "loss" in m] == [m for m in whole["metrics"] if "loss" in m]


def test_the_template_learns(place):
    place.run("learns", command("run", "my_task", "--out", "runs/learns", "--no-report"))
    summary = json.loads((place.folder / "runs/learns/summary.json").read_text())
    assert summary["reward/after"] > summary["reward/before"] + 0.3
