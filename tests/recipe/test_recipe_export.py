"""Cells to files: what was written runs, is equal, and what cannot be written is named."""

from __future__ import annotations

import json
import math
import os
import random as rnd
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nexrl_sdk import Recipe
from nexrl_sdk.recipe.source import capture, read_source
from nexrl_sdk.types import ConfigError

VOWELS = frozenset("aeiou")
TABLE = {"a": [1, 2.5, None], "b": ("x", True)}
DRAW = rnd.Random(0)


class Base:
    scale = 2.0

    def half(self, x: float) -> float:
        return x / self.scale


class Judge(Base):
    """An evaluator with a parent, imports and a constant."""

    def __init__(self, bonus: float = 0.5):
        self.bonus = bonus

    def evaluate(self, data, target):
        return self.half(math.sqrt(len(target))) + self.bonus + TABLE["a"][0]


def helper(text):
    return len(VOWELS & set(text)) if text else recursion(0)


def recursion(n):
    return n if n > 3 else recursion(n + 1)


def decorated(function):
    return function


@decorated
def score(row, answer, weight=np.float64(1.0)):
    return float(np.mean([helper(answer), weight]))


def uses_state(row, answer):
    return DRAW.random()


def run_file(path: Path, name: str):
    """The written file alone, in a namespace of its own."""
    namespace: dict = {"__name__": "written"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace[name]


def test_written_code_runs_alone(tmp_path):
    path = tmp_path / "score.py"
    path.write_text(capture(score).code)
    assert run_file(path, "score")({}, "abe") == score({}, "abe")
    assert read_source(path, "score").digest == capture(score).digest
    path.write_text(capture(Judge()).code)
    assert run_file(path, "Judge")().evaluate({}, "abcd") == Judge().evaluate({}, "abcd")
    assert read_source(path, "Judge").digest == capture(Judge).digest == capture(Judge()).digest


def nested():
    scale = 3

    def closure(row, answer):
        return scale

    def plain(row, answer):
        return 1.0

    return closure, plain


@pytest.mark.parametrize(
    "make,expected",
    [
        (lambda: lambda row, answer: 1.0, "a lambda cannot be written"),
        (lambda: nested()[0], "'closure' is a closure over scale"),
        (lambda: uses_state, "it uses 'DRAW', a Random, which cannot be written"),
        (lambda: Judge(bonus=0.1), "this Judge was made with values of its own (bonus)"),
    ],
)
def test_what_cannot_be_written_is_named(make, expected, tmp_path):
    recipe = Recipe(model="m", data=[{"prompt": "a"}], evaluator=make())
    with pytest.raises(ConfigError, match="the recipe cannot be saved") as e:
        recipe.save(tmp_path / "new")
    assert expected in str(e.value) and "evaluator" in str(e.value) and not (tmp_path / "new").exists()


def test_a_nested_function_without_a_closure_is_written(tmp_path):
    recipe = Recipe(model="m", data=[{"prompt": "a"}], evaluator=nested()[1])
    recipe.save(tmp_path / "new")
    assert Recipe.load(tmp_path / "new").evaluator()({}, "") == 1.0


draws, ordinary = [DRAW], [DRAW]


def names_of_its_own(row, answer):
    """Its variables are called as things of the module are that no file can hold."""
    draws = [len(answer)]
    return float(sum(d for d in draws)) + sum(ordinary for ordinary in (1, 2))


def test_a_functions_own_variables_are_not_the_modules(tmp_path):
    source = capture(names_of_its_own)
    assert not source.constants and [n for n, _ in source.definitions] == ["names_of_its_own"]
    (tmp_path / "own.py").write_text(source.code)
    assert run_file(tmp_path / "own.py", "names_of_its_own")({}, "ab") == 5.0 and read_source(tmp_path / "own.py", "names_of_its_own").digest == source.digest


def make_rows():
    return [{"prompt": f"{i}"} for i in range(3)]


def build(seed, cache_dir):
    return cache_dir


class OwnTrainer:
    pass


class OwnWorker:
    pass


def test_every_role_round_trips(tmp_path):
    rows = [{"prompt": "é\n", "answer": np.int64(3), "tags": ["x", {"y": None}], "score": np.float32(0.5)}]
    recipe = Recipe(model={"builder": build}, data=make_rows, evaluator=score, validate=rows, trainer_class=OwnTrainer, worker_class=OwnWorker, algorithm={"my_param": [1, 2]}, rollout_worker={"turns": 2}, seed=7)
    path = recipe.save(tmp_path / "new")
    again = Recipe.load(path)
    assert again == recipe and again.fingerprint() == recipe.fingerprint()
    assert again.trainer_class().__name__ == "OwnTrainer" and again.worker_class().__name__ == "OwnWorker" and again.config.algorithm.my_param == [1, 2]
    assert json.loads((tmp_path / "new/validation.jsonl").read_text()) == {"prompt": "é\n", "answer": 3, "tags": ["x", {"y": None}], "score": 0.5}
    assert again.save(tmp_path / "third").exists() and Recipe.load(tmp_path / "third") == recipe


def test_a_frame_is_written_as_rows(tmp_path):
    pytest.importorskip("nexrl_sdk.rollout.data")
    recipe = Recipe(model="m", data=pd.DataFrame([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]), evaluator=score)
    recipe.save(tmp_path / "new")
    again = Recipe.load(tmp_path / "new")
    assert again == recipe and again.rows() == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]


def test_rows_that_are_no_json_are_named(tmp_path):
    with pytest.raises(ConfigError, match="data: row 1 cannot be written as JSON"):
        Recipe(model="m", data=[{"prompt": "a"}, {"prompt": object()}], evaluator=score).save(tmp_path / "new")


def test_saved_elsewhere_a_recipe_still_finds_its_files(tmp_path, monkeypatch):
    task = tmp_path / "task"
    (task / "tiny").mkdir(parents=True)
    (task / "tiny/config.json").write_text("{}")
    (task / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (task / "task.py").write_text("def f(row, answer):\n    return 1.0\n\n\nclass T:\n    pass\n")
    (task / "task.yaml").write_text("model: {path: tiny}\ndata: {data_files: [rows.jsonl]}\nrollout_worker: {evaluator_module_path: 'task.py:f'}\ntrainer: {custom_trainer_module_path: task.py, custom_trainer_class_name: T}\n")
    recipe = Recipe.load(task)
    recipe.save(tmp_path / "deep/er/copy")
    again = Recipe.load(tmp_path / "deep/er/copy")
    monkeypatch.chdir("/")
    assert again == recipe and again.evaluator()({}, "") == 1.0 and Path(again.model_path()).samefile(task / "tiny") and again.trainer_class().__name__ == "T"


def test_from_cells_of_a_notebook(tmp_path):
    """Functions and classes of a real kernel, with a helper in another cell, redefined once."""
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "from nexrl_sdk import Recipe\nimport math, os\nWEIGHT = 0.25",
        "def helper(x):\n    return x",
        "def helper(x):\n    '''The second one counts.'''\n    return math.floor(x) * WEIGHT",
        "class Judge:\n    @staticmethod\n    def share(text):\n        return helper(len(text))\n\n    def evaluate(self, data, target):\n        return self.share(target)",
        "def reward(row, answer):\n    return Judge().evaluate(row, answer)",
        f"recipe = Recipe(model='m', data=[{{'prompt': 'a'}}], evaluator=reward); recipe.save({str(tmp_path / 'new')!r}); again = Recipe.load({str(tmp_path / 'new')!r})",
        "assert again == recipe, (again.canonical(), recipe.canonical())",
        "assert again.evaluator()({}, 'four') == 1.0",
        "Recipe(model='m', data=[{'prompt': 'a'}], evaluator=Judge).save(" + repr(str(tmp_path / "cls")) + ")",
    ]
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_code_cell(c) for c in cells]
    NotebookClient(nb, timeout=120, kernel_name="python3").execute()
    code = textwrap.dedent(f"""
        from nexrl_sdk import Recipe
        assert Recipe.load({str(tmp_path / "new")!r}).evaluator()({{}}, "four") == 1.0
        assert Recipe.load({str(tmp_path / "cls")!r}).evaluator()().evaluate({{}}, "four") == 1.0
    """)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=dict(os.environ))
