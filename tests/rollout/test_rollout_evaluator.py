"""Evaluators: the documents' classes, plain functions, weighted rewards, and every kind of wrong answer."""

from __future__ import annotations

import math
import re
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from nexrl_sdk.rollout import evaluator as module
from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget, EvaluationRunResult, Evaluator, NexAUEvaluationTarget, WeightedRewards, as_evaluator, reward, score, within
from nexrl_sdk.types import ConfigError, EvaluatorError, Interrupted

ROW = {"answer": "4"}


def returning(value):
    return as_evaluator(lambda row, answer: value)


@pytest.mark.parametrize(
    "value,expected",
    [(1, 1.0), (0.25, 0.25), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(True), 1.0), (np.array(0.5), 0.5), (torch.tensor(0.5), 0.5), (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5), (-3, -3.0)],
)
def test_numbers_are_rewards(value, expected):
    s = score(returning(value), ROW, "4")
    assert (s.status, s.reward, s.error) == ("ok", expected, None) and type(s.reward) is float


@pytest.mark.parametrize(
    "value,expected",
    [
        (math.nan, "the reward must be finite, not nan"),
        (math.inf, "must be finite, not inf"),
        (-np.inf, "must be finite, not -inf"),
        (torch.tensor(float("nan")), "must be finite"),
        ("0.5", "must be a number, not str '0.5'; convert it with float()"),
        ([1.0], "must be a number, not list"),
        (np.array([1.0, 2.0]), "must be a number, not ndarray"),
        (1j, "must be a number, not complex"),
        (10**400, "OverflowError"),
        ({"score": 1.0}, "returned a dictionary without 'reward'"),
        ({}, "returned a dictionary without 'reward'"),
        ({"reward": "x"}, "must be a number, not str"),
        ({"reward": 1.0, "note": "text"}, "the metric 'note' must be a number, not str 'text'"),
        ({"reward": 1.0, "metrics": [1]}, "TypeError"),
        (EvaluationRunResult(reward=math.nan), "must be finite"),
        (EvaluationRunResult(reward=1.0, metrics={"a": [1]}), "the metric 'a'"),
        (EvaluationRunResult(reward=1.0, metrics=3), "metrics must be a dictionary"),
    ],
)
def test_what_is_no_reward_is_an_error_with_its_cause(value, expected):
    s = score(returning(value), ROW, "4")
    assert s.status == "error" and s.reward is None and s.traceback and expected in s.error


def test_none_is_unscored():
    for value in (None, {"reward": None, "seen": 1}, EvaluationRunResult(reward=None, metrics={"seen": 1})):
        s = score(returning(value), ROW, "4")
        assert (s.status, s.reward, s.traceback) == ("unscored", None, None) and s.error
    assert s.metrics == {"seen": 1.0}


def test_what_is_raised_is_kept_with_its_traceback():
    def boom(row, answer):
        return 1 / 0 if row["answer"] == "4" else row["nothing"]

    s = score(as_evaluator(boom), ROW, "4")
    assert s.status == "error" and s.error.startswith("the evaluator raised ZeroDivisionError: division by zero (at test_rollout_evaluator.py:") and "in boom" in s.traceback
    assert "KeyError: 'nothing'" in score(as_evaluator(boom), {"answer": ""}, "4").error
    for error in (SystemExit(1), RecursionError(), StopIteration()):
        def raises(row, answer, error=error):
            raise error

        assert score(as_evaluator(raises), ROW, "4").status == "error"

    def interrupt(row, answer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(as_evaluator(interrupt), ROW, "4")


def test_metrics_that_are_not_finite_are_put_aside_and_the_reward_stands():
    s = score(returning({"reward": 1, "bleu": math.nan, "n": np.int32(3), "none": None, "flag": True, "inf": math.inf}), ROW, "4")
    assert s.status == "ok" and s.metrics == {"n": 3.0, "flag": 1.0} and s.extra_info["dropped_metrics"] == {"bleu": "nan", "none": "None", "inf": "inf"}


def test_dictionaries():
    s = score(returning({"reward": 0.5, "ground_truth": "4", "length": 2, "metrics": {"em": 1}, "extra_info": {"why": "x"}}), ROW, "4")
    assert (s.reward, s.ground_truth, s.metrics, s.extra_info) == (0.5, "4", {"length": 2.0, "em": 1.0}, {"why": "x"})


def test_the_row_cannot_be_changed_for_others():
    def spoil(row, answer):
        row["answer"] = None
        return 1.0

    row = dict(ROW)
    assert score(as_evaluator(spoil), row, "4").status == "ok" and row == ROW


def test_a_hanging_evaluator_is_given_up():
    release = threading.Event()

    def hang(row, answer):
        release.wait(100)
        return 1.0

    began = time.monotonic()
    s = score(as_evaluator(hang), ROW, "4", timeout=0.1)
    assert s.status == "error" and "took longer than 0.1 s (eval_timeout)" in s.error and time.monotonic() - began < 40
    assert all(t.daemon for t in threading.enumerate() if t.name == "evaluator")
    release.set()
    release.set()
    assert within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])


class Plain(Evaluator):
    def evaluate(self, data, evaluation_target):
        return EvaluationRunResult(reward=float(evaluation_target.final_answer == data["answer"]))


class Foreign:
    """Of a package that has the same names and is not ours."""

    class Result:
        reward, ground_truth, metrics, extra_info = 0.5, "t", {"a": 1.0}, {}

    def evaluate(self, data, evaluation_target):
        return self.Result()


class NeedsArguments(Plain):
    def __init__(self, url):
        self.url = url


class Callable_:
    def __call__(self, row, answer):
        return 0.75


def test_what_is_accepted(tmp_path):
    (tmp_path / "evaluator.py").write_text(
        "from nexrl_sdk.rollout.evaluator import Evaluator, EvaluationRunResult\n\n\nclass Mine(Evaluator):\n    def evaluate(self, data, evaluation_target):\n        return EvaluationRunResult(reward=1.0)\n\n\ndef exact(row, answer):\n    return answer == row['answer']\n\n\nX = 3\n"
    )
    for given, expected in ((Plain, 1.0), (Plain(), 1.0), (Foreign, 0.5), (Foreign(), 0.5), (Callable_(), 0.75), (lambda row, answer, extra=0: 1.0, 1.0), (lambda *args: 0.3, 0.3), ("evaluator.py:Mine", 1.0), ("evaluator.py:exact", 1.0), (["evaluator.py:exact", Callable_()], 1.75)):
        assert score(as_evaluator(given, tmp_path), ROW, "4").reward == expected, given
    for given, expected in (
        ("evaluator.py:Mien", "did you mean 'Mine'"),
        ("evaluator.py:X", "is int, and no evaluator"),
        ("evaluator.py", "name the evaluator in it too, as in 'evaluator.py:MyEvaluator'"),
        ("evaluater.py:Mine", "did you mean 'evaluator.py'"),
        (3, "not int 3"),
        (None, "not NoneType"),
        ([], "at least one reward"),
        (NeedsArguments, "NeedsArguments() cannot be made: "),
        (dict, "dict is no evaluator"),
        (Evaluator, "Evaluator() cannot be made"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            as_evaluator(given, tmp_path)


def test_signatures_that_cannot_be_meant():
    async def later(row, answer):
        return 1.0

    def typed(answer: str, row: dict):
        return 1.0

    for given, expected in (
        (lambda answer: 1.0, "must take two arguments"),
        (lambda row, answer, more: 1.0, "must take two arguments"),
        (lambda row, answer, *, key: 1.0, "must take two arguments"),
        (lambda response, data: 1.0, "swap its parameters"),
        (typed, "swap its parameters"),
        (later, "is async"),
    ):
        with pytest.raises(ConfigError, match=expected):
            as_evaluator(given)


def test_weighted_rewards():
    @reward(weight=0.5, name="right")
    def f(row, answer):
        return {"reward": answer == "4", "steps": 3, "ground_truth": "4"}

    @reward
    def g(row, answer):
        return None if answer == "skip" else 0.25

    both = as_evaluator([f, g])
    s = score(both, ROW, "4")
    assert s.reward == 0.75 and s.metrics == {"right": 1.0, "g": 0.25, "right/steps": 3.0} and s.ground_truth == "4"
    assert score(both, ROW, "skip").reward == 0.0 and "g" not in score(both, ROW, "skip").metrics
    assert score(WeightedRewards([g]), ROW, "skip").status == "unscored"
    assert score(WeightedRewards([f, g], weights=[2, 4]), ROW, "4").reward == 3.0
    bad = score(WeightedRewards([f, Foreign(), lambda row, answer: "x"]), ROW, "4")
    assert bad.status == "error" and "the reward <lambda> must be a number" in bad.error
    for rewards, weights, expected in (([f, f], None, "same name"), ([f], [1, 2], "1 rewards have 2 weights"), ([], None, "at least one")):
        with pytest.raises(ConfigError, match=expected):
            WeightedRewards(rewards, weights)


def test_targets_of_the_documents():
    assert BaseEvaluationTarget(final_answer="x").observation is None
    target = NexAUEvaluationTarget(final_answer="x", observation=[{"trace": {}}])
    assert isinstance(target, BaseEvaluationTarget) and score(as_evaluator(Plain), {"answer": "x"}, target).reward == 1.0
    assert EvaluationRunResult() == EvaluationRunResult(reward=0.0, ground_truth="", metrics={}, extra_info={})


GUIDE = Path(__file__).resolve().parents[2].parent / "shared" / "spec" / "user-guide.md"


def blocks() -> dict[str, str]:
    """Evaluator classes of the user's guide, by name."""
    found = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n"), re.DOTALL | re.MULTILINE) if GUIDE.exists() else []
    named = {}
    for block in found:
        for name in re.findall(r"^class (\w+)\(Evaluator\)", block, re.MULTILINE):
            named[f"{name}{sum(k.startswith(name) for k in named) or ''}"] = block
    return named


@pytest.mark.skipif(not GUIDE.exists(), reason="the user's guide does not lie beside this checkout")
def test_evaluators_of_the_users_guide_run():
    rows = {"answer": "4", "question": "2+2?", "required_points": ["four"], "test_cases": [{"function_name": "f", "inputs": [2], "expected_output": 4}]}
    answers = {
        "MyEvaluator": ("4", 1.0), "ExtractorEvaluator": ("so <answer>4</answer>", 1.0), "MultiCriteriaEvaluator": ("4", 0.56),
        "CodeGenEvaluator": ("```python\ndef f(x):\n    return x * x\n```", 1.0), "ReasoningEvaluator": ("<reasoning>Step 1.</reasoning><answer>4</answer>", 0.85),
    }  # fmt: skip
    seen = set()
    for key, block in blocks().items():
        name = key.rstrip("0123456789")
        if name not in answers:
            continue  # asks a hosted model
        space = {**{k: getattr(module, k) for k in ("Evaluator", "BaseEvaluationTarget", "EvaluationRunResult")}, "re": re, "BaseNexAURolloutWorker": object}
        code = re.sub(r"^from nexrl[^\n(]*(\([^)]*\)|[^\n]*)\n", "", block, flags=re.MULTILINE)
        exec("from __future__ import annotations\nfrom typing import Any\n" + code, space)
        answer, expected = answers[name]
        s = score(as_evaluator(space[name]), rows, answer)
        assert s.status == "ok", (key, s.error)
        assert s.reward == pytest.approx(expected), key
        assert all(type(v) is float for v in s.metrics.values())
        seen.add(name)
    assert seen == set(answers)


class Evil(float):
    """A number that is NaN once it is asked."""

    def __float__(self):
        return math.nan


class HalfFraction(Fraction):
    def __float__(self):
        return math.inf


@pytest.mark.parametrize("value", [Evil(1.0), HalfFraction(1, 2)])
def test_a_number_is_what_float_says_of_it(value):
    assert "must be finite" in score(returning(value), ROW, "4").error
    s = score(returning({"reward": 1, "odd": value}), ROW, "4")
    assert s.status == "ok" and s.metrics == {} and list(s.extra_info["dropped_metrics"]) == ["odd"]
    assert "must be finite" in score(WeightedRewards([lambda row, answer: value]), ROW, "4").error


def speechless(raised):
    class Speechless(Exception):
        def __str__(self):
            raise raised

    return Speechless()


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(30)
    return found[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("timeout", [None, 30])
@pytest.mark.parametrize("raised", [SystemExit(3), GeneratorExit(), KeyboardInterrupt()])
def test_an_exception_that_cannot_say_what_it_is_costs_only_its_own_answer(raised, timeout):
    error = speechless(raised)

    def reward_(row, answer):
        raise error

    def exit_(row, answer):
        raise type("Odd", (EvaluatorError,), {"__str__": type(error).__str__})("x")

    for f, expected in ((reward_, f"the evaluator raised Speechless: (its message cannot be read: {type(raised).__name__})"), (exit_, f"(its message cannot be read: {type(raised).__name__})")):
        s = in_a_thread(lambda f=f: score(as_evaluator(f), ROW, "4", timeout))
        assert s.status == "error" and s.error.startswith(expected) and type(s.error) is str and type(s.traceback) is str
    if not isinstance(raised, KeyboardInterrupt) or timeout:
        assert score(as_evaluator(reward_), ROW, "4", timeout).status == "error"  # in the main thread too


@pytest.mark.timeout(60)
def test_only_the_main_threads_interrupt_is_ctrl_c():
    def interrupt(row, answer):
        raise KeyboardInterrupt

    def interrupted(row, answer):
        raise Interrupted("the stop flag was set")

    assert "the evaluator raised KeyboardInterrupt (at " in in_a_thread(lambda: score(as_evaluator(interrupt), ROW, "4")).error
    assert "the evaluator raised KeyboardInterrupt (at " in score(as_evaluator(interrupt), ROW, "4", timeout=30).error
    with pytest.raises(EvaluatorError, match="KeyboardInterrupt"):
        within(30, lambda: interrupt({}, ""))
    for timeout in (None, 30):
        with pytest.raises(Interrupted):
            score(as_evaluator(interrupted), ROW, "4", timeout)


@pytest.mark.timeout(60)
def test_words_are_found_under_the_evaluators_limit():
    release = threading.Event()

    class Slow(Exception):
        def __str__(self):
            release.wait(50)
            return "late"

    class Text(str):
        def __len__(self):
            raise SystemExit

        __getitem__ = __str__ = __len__  # type: ignore[assignment]

    class Said(Exception):
        def __str__(self):
            return str.__new__(Text, "said")

    def slow(row, answer):
        raise Slow

    def said(row, answer):
        raise Said

    assert "took longer than 0.1 s" in score(as_evaluator(slow), ROW, "4", timeout=0.1).error
    release.set()
    s = score(as_evaluator(said), ROW, "4")
    assert s.status == "error" and "Said: said (at " in s.error and type(s.error) is str
    s = score(returning({"reward": 1, "ground_truth": Text("t"), Text("m"): 2.0}), ROW, "4")
    assert s.status == "ok" and type(s.ground_truth) is str and [type(k) for k in s.metrics] == [str]


def test_what_an_evaluator_writes_is_seen_by_nobody_else():
    class Writes(Evaluator):
        def evaluate(self, data, evaluation_target):
            seen.append((repr(data["nested"]), repr(evaluation_target)))
            data["nested"]["x"].append("leak")
            data["array"][0] = 7
            data["pair"][1].append(9)
            evaluation_target.observation[0]["trace"].clear()
            evaluation_target.final_answer = "hacked"
            return EvaluationRunResult(float(data["lock"] is lock and data["again"] is data["nested"]))

    seen: list = []
    lock, nested = threading.Lock(), {"x": []}
    row = {"nested": nested, "again": nested, "array": np.zeros(2), "pair": (1, []), "lock": lock}
    target = NexAUEvaluationTarget("right", [{"trace": {"a": 1}}])
    assert [score(Writes(), row, target).reward for _ in range(2)] == [1.0, 1.0]
    assert seen[0] == seen[1] and row["nested"] == {"x": []} and row["array"][0] == 0 and row["pair"] == (1, []) and target == NexAUEvaluationTarget("right", [{"trace": {"a": 1}}])


def test_rows_that_cannot_be_copied_are_given_as_they_are():
    ring: dict = {}
    ring["ring"] = ring
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    s = score(as_evaluator(lambda row, answer: row["ring"]["ring"]["ring"] is row["ring"]["ring"]), {"ring": ring}, "4")
    assert s.reward == 1.0 and score(as_evaluator(lambda row, answer: row["deep"] is deep), {"deep": deep}, "4").reward == 1.0
