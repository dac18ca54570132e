"""Answers that a model may write to hold up, or to slip past, the ready-made rewards: each child process has a limit, and no test reads a clock."""

from __future__ import annotations

import copy
import datetime as dt
import functools
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
from decimal import Decimal

import numpy as np
import pytest

from nexrl_sdk.rollout.cached import Cached, content_key
from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget, WeightedRewards, score, waiting, within
from nexrl_sdk.rollout.extract import extract_answer
from nexrl_sdk.rollout.processes import Unchecked
from nexrl_sdk.rollout.judge import Judge
from nexrl_sdk.rollout.rewards import ExactMatch, FuzzyMatch, JSONFormat, Length, Maths, Numeric, Processes, RegexFormat, evaluate_batch
from nexrl_sdk.types import ConfigError, EvaluatorError

ENDLESS = 60  # seconds for a child process: far more than linear work takes, far less than quadratic work on these lengths


def child(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=ENDLESS, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


DEGENERATE = {
    "answer is and blanks": "'The answer is' + ' ' * N",
    "answer, many blanks": "('answer' + ' ' * 1000) * (N // 1000)",
    "answer is, marks": "'answer is' + '*_' * (N // 2)",
    "a fraction of a fraction": "'1/' + '1' * N + '/1'",
    "many fractions": "'1/1' * (N // 3)",
    "thousands": "'1' + ',111' * (N // 4) + '1'",
    "points": "'1.' * (N // 2)",
    "signs": "'-1' * (N // 2)",
    "powers": "'1e' * (N // 2)",
    "nested boxes": "r'\\boxed{' * (N // 8) + '}' * (N // 8)",
    "a box of blanks": "r'\\boxed' + ' ' * N",
    "boxes of one": "r'\\boxed a' * (N // 8)",
    "a long box of one": "r'\\boxed ' + 'a' * N + '{'",
    "hashes": "'####' + ' ' * N",
    "many hashes": "'#' * N",
    "lines": "chr(10) * N",
    "tags": "'<answer>' * (N // 8)",
}


@pytest.mark.timeout(120)
def test_no_answer_makes_extraction_take_the_square_of_its_length():
    code = "from nexrl_sdk.rollout.extract import WAYS, extract_answer\n"
    for n in (1_000, 400_000):
        code += f"N = {n}\n" + "".join(f"for way in WAYS: extract_answer({text}, way)\n" for text in DEGENERATE.values())
    found = child(code)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("text", "how", "found"),
    [
        ("3/4/5", "number", "4/5"),
        ("1/2.5", "number", "2.5"),
        ("3/4.", "number", "3/4"),
        ("The answer is:\n5", ("answer", "number"), "5"),
        ("Answer: **7**", "answer", "7"),
        ("the answer is : 7", "answer", "7"),
        ("The answer is   **7.**", "answer", "7"),
        (r"\boxed{1 \boxed{2}} \boxed{\boxed{3} 4}", "boxed", "3"),
    ],
)
def test_what_is_extracted_in_the_corners(text, how, found):
    assert extract_answer(text, how) == found


# -- a limit for each evaluation, without its wait for others -----------------------------------------


@pytest.mark.timeout(60)
def test_the_wait_for_ones_turn_is_no_time_of_the_evaluation():
    go, begun = threading.Event(), threading.Event()

    def turn():
        with waiting(), waiting():
            begun.set()
            go.wait(30)
        return 5

    found = []
    thread = threading.Thread(target=lambda: found.append(within(0.2, turn)))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(EvaluatorError, match="longer than"):  # beside it, one that works for as long as that, and longer
        within(0.6, lambda: go.wait(30))
    assert thread.is_alive()
    go.set()
    thread.join(30)
    assert found == [5]
    go.clear()
    with pytest.raises(EvaluatorError, match="longer than"):
        within(0.2, lambda: (turn_once(), go.wait(30)))
    with waiting():  # where nobody has a limit
        pass


def turn_once():
    with waiting():
        pass


# -- mathematics ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    processes = Processes(size=2)
    yield processes
    processes.close()


ENDLESS_ANSWERS = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\sum_{n=1}^{99999999}\frac{\sin(n!)}{n^n+1}}"]


@pytest.mark.timeout(300)
def test_an_answer_that_cannot_be_checked_is_no_error(pool):
    pytest.importorskip("math_verify")
    maths = Maths(limit=1, processes=pool)
    assert score(maths, {"answer": "5"}, "5").metrics == {"extracted": 1.0, "parsed": 1.0, "unchecked": 0.0}
    for found in evaluate_batch(maths, [{"answer": "5"}] * 2, ENDLESS_ANSWERS, concurrency=2):
        assert (found.status, found.reward, found.metrics["unchecked"]) == ("ok", 0.0, 1.0), found.error
    endless = score(maths, {"answer": "9^{9^{9^{9}}}"}, "5")
    assert endless.status == "error" and "cannot be compared with anything" in endless.error


@pytest.mark.timeout(300)
def test_right_answers_beside_endless_ones_wait_for_nothing_that_counts(pool):
    pytest.importorskip("math_verify")
    maths, one = Maths(limit=1, processes=Processes(size=1)), "$2+3$"
    try:
        answers = [ENDLESS_ANSWERS[0]] * 3 + [one] * 2
        found = evaluate_batch(maths, [{"answer": "5"}] * 5, answers, concurrency=5, timeout=4.0)  # one after the other takes longer
        assert [s.reward for s in found] == [0.0] * 3 + [1.0] * 2, [s.error for s in found]
    finally:
        maths._processes.close()


@pytest.mark.timeout(120)
def test_what_was_held_up_or_ended_by_others_stays_an_error(pool):
    pytest.importorskip("math_verify")
    task = {"kind": "pattern", "pattern": "a", "flags": 0, "how": "search", "text": "a"}
    alone = Processes(size=1)
    try:
        assert alone.ask(task, 30)["right"]
        os.kill(alone.pids[0], signal.SIGSTOP)
        with pytest.raises(EvaluatorError, match="hardly given processor time") as e:
            alone.ask(task, 0.5)
        assert not isinstance(e.value, Unchecked)
        assert alone.ask(task, 30)["right"]
        (pid,) = alone.pids
        os.kill(pid, signal.SIGSTOP)
        found = []
        thread = threading.Thread(target=lambda: found.append(alone.ask(task, 10)))
        thread.start()
        os.kill(pid, signal.SIGCONT)
        thread.join(60)
        assert found[0]["right"]
        with pytest.raises(Unchecked, match="no result within"):
            alone.ask({**task, "pattern": "(a+)+b", "text": "a" * 64}, 1.0)
    finally:
        alone.close()


SAME = ["x+1", "[0,1)", "(1,2]", "5", r"\frac{1}{2}", "sin(x)", "2x", r"\sqrt{8}", "x<3", "A"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["{}", " {}\n", "<answer>{}</answer>", r"so \boxed{{{}}}", "${}$", r"\({}\)", "<answer> ${}$ </answer>"])
def test_what_is_written_the_same_is_the_same(pool, form):
    pytest.importorskip("math_verify")
    found = evaluate_batch(Maths(processes=pool, limit=60), [{"answer": t} for t in SAME], [form.format(t) for t in SAME])
    assert [s.reward for s in found] == [1.0] * len(SAME), [(s.reward, s.error) for s in found]


OTHERS = [("x+1", "x+2", 0), (r"\frac{x+1}{2}", r"\frac{1+x}{2}", 1), (r"\sqrt{8}", r"2\sqrt{2}", 1), ("5", "<answer>10/2</answer>", 1), ("5", "7, no: <answer>5</answer>", 1), ("5", "5, no: <answer>7</answer>", 0), ("5", r"<answer>7</answer> \boxed{5}", 1), ("5", "I do not know", 0), ("x+1", "1+x", 1), ("2x", "x+x", 1), ("5", "5 apples", 1), ("x", "5", 0), (r"\text{no}", "no", 1), ("5", "", 0)]


@pytest.mark.timeout(120)
def test_plain_answers_are_read_as_formulas(pool):
    pytest.importorskip("math_verify")
    found = evaluate_batch(Maths(processes=pool, limit=60), [{"answer": t} for t, _, _ in OTHERS], [a for _, a, _ in OTHERS])
    assert [s.reward for s in found] == [float(r) for _, _, r in OTHERS], [(s.reward, s.error) for s in found]


# -- schemas -------------------------------------------------------------------------------------------

TREE = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
HALF = {"properties": {"x": {"type": "number", "multipleOf": 0.5}}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("schema", "answer", "reward", "unchecked"),
    [
        (TREE, "[" * 50 + "]" * 50, 1, 0),
        (TREE, "[" * 400 + "]" * 400, 0, 1),
        ({"type": "array"}, "[" * 400 + "]" * 400, 1, 0),
        (HALF, '{"x": 1.5}', 1, 0),
        (HALF, '{"x": ' + "9" * 4000 + "}", 0, 1),
        ({"type": "string", "pattern": "^(a+)+$"}, '"' + "a" * 64 + 'b"', 0, 1),
        ({"type": "string", "pattern": "^a+$"}, '"aaa"', 1, 0),
        ({"type": "array", "uniqueItems": True}, json.dumps([{"a": i} for i in range(20_000)]), 1, 0),
        ({"type": "array", "uniqueItems": True}, json.dumps([{"a": i} for i in range(20_000)] + [{"a": 1.0}]), 0, 0),
    ],
    ids=range(9),
)
def test_an_answer_is_held_to_a_schema_or_is_nothing(schema, answer, reward, unchecked):
    pytest.importorskip("jsonschema")
    found = score(JSONFormat(schema, limit=2.0 if unchecked else 60.0), {}, answer)
    assert (found.status, found.reward, found.metrics["unchecked"]) == ("ok", reward, unchecked), (found.error, found.extra_info)


def test_numbers_that_no_float_can_hold_are_no_json():
    for answer in ('{"x": 1e400}', '{"x": -1e400}', '{"x": Infinity}'):
        for evaluator in (JSONFormat(), JSONFormat(HALF)):
            found = score(evaluator, {}, answer)
            assert found.reward == 0 and found.metrics["json"] == 0


def test_elements_differ_as_jsonschema_says():
    jsonschema = pytest.importorskip("jsonschema")
    values = [0, False, 1, True, 1.0, None, "1", "a", [], [1], [True], [1.0], {}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": [1]}, {"b": 1}]
    schema = {"uniqueItems": True}
    theirs = [[jsonschema.Draft202012Validator(schema).is_valid([a, b]) for a in values] for b in values]
    mine = [[score(JSONFormat(schema), {}, json.dumps([a, b])).reward == 1 for a in values] for b in values]
    assert mine == theirs


def test_a_schema_without_end_is_refused():
    pytest.importorskip("jsonschema")
    with pytest.raises(ConfigError, match="refers to itself without end"):
        JSONFormat({"$ref": "#"})
    with pytest.raises(ConfigError, match="no JSON schema"):
        JSONFormat({"const": object()})
    assert score(JSONFormat({"properties": {"x": {"$ref": "http://127.0.0.1:9/s.json"}}}), {}, '{"x": 1}').status == "error"


# -- the cache -----------------------------------------------------------------------------------------

ALL_DIFFERENT = [
    1, 1.0, True, "1", None, "None", [1], (1,), {1}, np.array([1]), np.array([1.0]), np.array([[1]]), [[1]], np.int64(1), np.float32(0.1), 0.1, Decimal(1), math.nan, "nan", [math.nan], math.inf, -0.0, 0.0, b"1", {"1": 1}, {1: 1}, {(1,): 1}, [], (), {}, set(), [True], [1, True],
    dt.date(2020, 1, 1), dt.datetime(2020, 1, 1), "2020-01-01", "\ud800", "\\ud800", ["list", 1], ["int", "1"], ["all int", [1]], ["mapping", []], {"__nexrl__": "tuple", "value": [1]}, 1j,
]  # fmt: skip


def test_values_that_differ_have_keys_that_differ():
    keys = [content_key("i", {"v": v}, BaseEvaluationTarget("x")) for v in ALL_DIFFERENT]
    assert None not in keys
    assert [i for i, k in enumerate(keys) if keys.index(k) != i] == []
    assert keys == [content_key("i", {"v": copy.deepcopy(v)}, BaseEvaluationTarget("x")) for v in ALL_DIFFERENT]
    key = [content_key("i", {}, BaseEvaluationTarget("x", v)) for v in ALL_DIFFERENT]
    assert len(set(key)) == len(key) and not set(key) & set(keys)
    assert content_key("i", {"v": {"a": 1, "b": {3, 1, 2}}}, BaseEvaluationTarget("x")) == content_key("i", {"v": {"b": {2, 3, 1}, "a": 1}}, BaseEvaluationTarget("x"))


def looped():
    found: dict = {}
    found["again"] = found
    return found


@pytest.mark.parametrize("value", [threading.Lock(), (i for i in range(3)), object(), looped(), 10**5000, functools.reduce(lambda inner, _: [inner], range(100_000), [])], ids=["lock", "generator", "object", "loop", "digits", "deep"])
def test_what_cannot_be_written_or_copied_is_judged_without_a_cache(value):
    calls = []
    cached = Cached(lambda row, answer: calls.append(answer) or 1.0)
    for _ in range(2):
        assert cached.evaluate({}, BaseEvaluationTarget("x", value)).reward == 1
        assert cached.evaluate({"column": value}, BaseEvaluationTarget("x")).reward == 1
    assert len(calls) == 4 and cached.hits == 0


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "given", "meant"),
    [(Maths, "limt", "limit"), (JSONFormat, "fences", "fence"), (Judge, "vote", "votes"), (Cached, "max_entry", "max_entries"), (ExactMatch, "ignorecase", "ignore_case"), (WeightedRewards, "weight", "weights")],
)
def test_a_setting_that_is_not_there_is_refused_with_the_nearest(make, given, meant):
    with pytest.raises(ConfigError, match=f"{make.__name__} takes no '{given}'.*did you mean '{meant}'"):
        make(**{given: 1})


@pytest.mark.parametrize("make", [Maths, JSONFormat, Judge, Cached, ExactMatch, FuzzyMatch, Numeric, RegexFormat, Length, Processes])
def test_each_setting_is_explained(make):
    lines = inspect.getsource(make.__init__).partition("):\n")[0].splitlines()
    assert [line.strip() for line in lines if ":" in line and "#" not in line and "def " not in line] == []
