"""Evaluators with settings, made in a cell, are written as the call that made them, and judge the same from the file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from nexrl_sdk import Recipe
from nexrl_sdk.recipe.source import capture, read_source
from nexrl_sdk.rollout.evaluator import EvaluationRunResult, Evaluator, WeightedRewards, as_evaluator, reward, score
from nexrl_sdk.rollout.judge import Judge
from nexrl_sdk.rollout.rewards import Cached, ExactMatch, FuzzyMatch, JSONFormat, Length, Numeric, RegexFormat
from nexrl_sdk.types import ConfigError

BONUS = 0.25
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def bonus(row, answer):
    return BONUS * len(answer)


@reward(weight=2.0, name="long")
def lengthy(row, answer):
    return bonus(row, answer)


class Mine(Evaluator):
    """Settings, a default, a lock and a helper."""

    def __init__(self, scale, *, words=("a",), inner=None, function=bonus):
        self.scale, self.words, self.inner, self.function, self.lock = scale, words, inner, function, threading.Lock()

    def evaluate(self, data, evaluation_target):
        with self.lock:
            text = evaluation_target.final_answer
            more = 0.0 if self.inner is None else self.inner.evaluate(data, evaluation_target).reward
            return EvaluationRunResult(self.scale * sum(text.count(w) for w in self.words) + self.function(data, text) + more)


class Stateful(Mine):
    def evaluate(self, data, evaluation_target):
        self.scale += 1
        return EvaluationRunResult(self.scale)


near = Numeric(relative=0.5)


def uses_near(row, answer):
    return near.compare(answer, row["answer"])[0]


MADE = {
    "schema": lambda: JSONFormat(schema=SCHEMA, fence="forbidden"), "weighted": lambda: WeightedRewards([ExactMatch(ignore_case=True), lengthy, JSONFormat()], [0.5, 0.25, 0.25]),
    "pattern": lambda: RegexFormat(re.compile("a+", re.IGNORECASE), how="search"), "numeric": lambda: Numeric("answer", ("boxed", re.compile("= (.*)")), relative=0.1), "length": lambda: Length(10, buffer=5, unit="words"),
    "mine": lambda: Mine(2.0, words=("a", "1"), inner=FuzzyMatch(by="ratio")), "function in it": lambda: Mine(1, function=lengthy), "function": lambda: uses_near,
    "judge": lambda: Judge("Is it right? {row.answer} {answer}", base_url="http://localhost:9/v1", model="m", key_env="JUDGE_KEY", scale=(0, 5)), "plain": lambda: Numeric(),
    "list": lambda: [ExactMatch(name="first"), ExactMatch(ignore_case=True, name="second", weight=0.5)],
}  # fmt: skip
ANSWERS = ["1", "1.3", '{"a": 1}', '{"a": "x"}', "A", "a a a", "= 1", ""]


@pytest.mark.parametrize("name", MADE)
def test_what_is_written_judges_the_same(name, tmp_path):
    made = MADE[name]()
    recipe = Recipe(model="m", data=[{"prompt": "p", "answer": "1"}], evaluator=made)
    recipe.save(tmp_path / "new")
    back = Recipe.load(tmp_path / "new")
    assert back == recipe and back.fingerprint() == recipe.fingerprint()
    again, first = as_evaluator(back.evaluator()), as_evaluator(made)
    assert type(again).__name__ == type(first).__name__
    if name != "judge":
        assert [score(again, {"answer": "1"}, a) for a in ANSWERS] == [score(first, {"answer": "1"}, a) for a in ANSWERS]
    else:
        assert again.cache_state() == first.cache_state() and again._door == first._door
    assert not [f for f in recipe.validate() if "evaluator" in str(f)]


def test_each_setting_has_a_digest_of_its_own(tmp_path):
    digests = {capture(MADE[name]()).digest for name in MADE if name != "list"}
    assert len(digests) == len(MADE) - 1 and capture(MADE["mine"]()).digest == capture(MADE["mine"]()).digest
    path = tmp_path / "mine.py"
    path.write_text(capture(MADE["mine"]()).code)
    assert read_source(path, "evaluator").digest == capture(MADE["mine"]()).digest


def test_a_cache_is_written_with_its_path(tmp_path):
    cached = Cached(Numeric(relative=0.1), tmp_path / "scores.sqlite")
    assert score(cached, {"answer": "1"}, "1").reward == 1
    source = capture(cached)
    assert f"evaluator = Cached(Numeric(relative=0.1), Path({str(tmp_path / 'scores.sqlite')!r}))" in source.code and "from pathlib import Path" in source.code
    cached.close()


def changed():
    made = Stateful(1.0)
    made.evaluate({}, None)
    return made


def secret():
    class Asks(Evaluator):
        def __init__(self, api_key):
            self.api_key = api_key

        def evaluate(self, data, evaluation_target): ...

    return Asks("sk-123")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (changed, "this Stateful holds 'scale', which is not what it was made with"),
        (lambda: Mine(1.0, function=lambda row, answer: 1.0), "a lambda cannot be written"),
        (lambda: Mine(1.0, inner=object()), "this object was made in a way that no file holds"),
        (secret, "Asks was made with 'api_key', a secret"),
        (lambda: Mine(1.0, inner=changed()), "this Mine holds 'inner', which is not what it was made with|this Stateful holds 'scale'"),
    ],
)
def test_what_cannot_be_written_is_named(make, told, tmp_path):
    recipe = Recipe(model="m", data=[{"prompt": "a"}], evaluator=make())
    with pytest.raises(ConfigError, match=told):
        recipe.save(tmp_path / "new")
    assert not (tmp_path / "new").exists() and recipe == recipe


def test_arguments_are_forgotten_with_their_evaluator():
    import gc

    from nexrl_sdk.rollout.evaluator import _MADE_WITH

    gc.collect()
    before = len(_MADE_WITH)
    many = [Numeric() for _ in range(100)]
    assert len(_MADE_WITH) == before + 100
    del many
    gc.collect()
    assert len(_MADE_WITH) == before


@pytest.mark.timeout(180)
def test_from_cells_of_a_notebook(tmp_path):
    """Made in a real kernel, run by a process that knows the files alone."""
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "from nexrl_sdk import Recipe, Evaluator\nfrom nexrl_sdk.rollout.evaluator import EvaluationRunResult, WeightedRewards, reward\nfrom nexrl_sdk.rollout.rewards import JSONFormat",
        "class Shaped(Evaluator):\n    def __init__(self, most):\n        self.most = most\n    def evaluate(self, data, target):\n        return EvaluationRunResult(min(self.most, len(target.final_answer)))",
        "@reward(weight=0.5)\ndef short(row, answer):\n    return 1.0 / (1 + len(answer))",
        f"Recipe(model='m', data=[{{'prompt': 'a'}}], evaluator=JSONFormat(schema={{'type': 'object'}})).save({str(tmp_path / 'schema')!r})",
        f"Recipe(model='m', data=[{{'prompt': 'a'}}], evaluator=WeightedRewards([Shaped(3), short])).save({str(tmp_path / 'weighted')!r})",
    ]
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_code_cell(c) for c in cells]
    NotebookClient(nb, timeout=120, kernel_name="python3").execute()
    code = textwrap.dedent(f"""
        from nexrl_sdk import Recipe
        from nexrl_sdk.rollout.evaluator import as_evaluator, score
        rewards = [score(as_evaluator(Recipe.load({str(tmp_path)!r} + "/" + n).evaluator()), {{}}, a).reward for n, a in (("schema", "{{}}"), ("schema", "[]"), ("weighted", "abcd"))]
        assert rewards == [1.0, 0.0, 3 + 0.5 * 0.2], rewards
    """)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
