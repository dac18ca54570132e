"""A cell, a script and the command line run the same objects and give the same numbers, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
CELLS = """
import json, os
from nexrl_sdk import Recipe, Trainer
recipe = Recipe.load({recipe!r})
trainer = Trainer(recipe)
lines = []
""".strip()
STEP_CELL = """
rollouts = trainer.rollout()
batch = trainer.prepare(rollouts)
metrics = trainer.update(batch)
trainer.publish()
lines.append({**metrics, "step": trainer.step_count})
""".strip()


def comparable(lines: list[dict]) -> list[dict]:
    """Training metrics without clocks."""
    train = [line for line in lines if "loss" in line]
    return [{k: v for k, v in sorted(line.items()) if not k.startswith("time/") and k != "tokens/per_second"} for line in train]


@pytest.fixture(scope="module")
def by_cli(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("cli") / "run"
    command = [sys.executable, "-m", "nexrl_sdk.launch.cli", "run", str(ROOT / "recipes/reverse"), "--out", str(out), "--steps", str(STEPS), "--no-report"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return comparable([json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()])


def test_script(by_cli):
    code = f"import json; from nexrl_sdk import Trainer; t = Trainer({str(ROOT / 'recipes/reverse')!r}); t.fit({STEPS}, progress=False); print(json.dumps(t.history))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(by_cli) == STEPS
    assert comparable(json.loads(done.stdout.splitlines()[-1])) == by_cli


def test_cells(by_cli, tmp_path):
    """By hand, one stage at a time, in a real kernel."""
    import nbformat
    from nbclient import NotebookClient

    nb = nbformat.v4.new_notebook()
    sources = [CELLS.format(recipe=str(ROOT / "recipes/reverse")), *[STEP_CELL] * STEPS, "print(json.dumps(lines))"]
    nb.cells = [nbformat.v4.new_code_cell(s) for s in sources]
    NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(o["text"] for o in nb.cells[-1].outputs if o.get("name") == "stdout")
    assert comparable(json.loads(text.splitlines()[-1])) == by_cli
