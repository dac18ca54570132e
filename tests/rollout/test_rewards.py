"""Ready-made rewards against verdicts that others gave: math-verify, jsonschema, brute force; and faults, caches and processes."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl_sdk.rollout import rewards
from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget, EvaluationRunResult, Evaluator, WeightedRewards, as_evaluator, score
from nexrl_sdk.rollout.rewards import (
    Cached, ExactMatch, FuzzyMatch, JSONFormat, Length, Maths, Numeric, Processes, RegexFormat, close_processes, edit_ratio, evaluate_batch, extract_answer, identity_of, last_box, normalise, parse_number, token_f1,
)  # fmt: skip
from nexrl_sdk.types import ConfigError, DataError, EvaluatorError


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# -- extraction ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "how", "found"),
    [
        (r"\boxed{4} or rather \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", "boxed", r"\{1, 2\}"),
        (r"a } b { c \boxed{3}", "boxed", "3"),
        (r"\boxed{3} and \boxed{4", "boxed", "3"),
        (r"\boxed{a \text{if } x}", "boxed", r"a \text{if } x"),
        (r"\fbox{7}", "boxed", "7"),
        (r"so $\boxed 5$.", "boxed", "5"),
        (r"\boxed{}", "boxed", None),
        ("no box", "boxed", None),
        ("#### 12\nwait\n#### 1,4", "hashes", "1,4"),
        ("Answer: x = 3", "answer", "x = 3"),
        ("**Final Answer**: **B**", "answer", "B"),
        ("The answer is 12.", "answer", "12"),
        ("ANSWER: no\nAnswer: yes", "answer", "yes"),
        ("<answer>a</answer> then <answer>\nb\n</answer>", "tag", "b"),
        ("<answer>a", "tag", None),
        ("</answer>a<answer>", "tag", None),
        ("it costs $1,234.50 in all", "number", "1,234.50"),
        ("8-3", "number", "3"),
        ("x is -3", "number", "-3"),
        ("x=-3", "number", "-3"),
        ("3/4", "number", "3/4"),
        ("H2O is water", "number", None),
        ("first\nlast \n\n", "line", "last"),
        ("id: a1\nid: b2", re.compile(r"id: (\w+)"), "b2"),
        ("abc", re.compile("b"), "b"),
        ("it is 5", ("boxed", "number"), "5"),
        ("<think>4</think>", "number", None),
        ("<think>4</think> so 5 <think> hm, 6", "number", None),
        ("thought without a beginning: 4</think> 5", "number", "5"),
    ],
)
def test_where_an_answer_stands(text, how, found):
    assert extract_answer(text, how) == found


@pytest.mark.timeout(120)
def test_long_hostile_texts_take_no_long_time():
    for text in ("<answer>" * 200_000, r"\boxed{" * 200_000, "{" * 500_000, "Answer: " * 100_000, "####" * 200_000, "1," * 400_000, "<think>" * 100_000, "-" * 500_000, "\\" * 500_000, "answer is" * 100_000):
        for how in rewards.WAYS:
            extract_answer(text, how)
    parse_number("1" * 10**6)
    parse_number("1e999999999")


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.text("ab1+ ", max_size=4), lambda inner: st.lists(inner.map(lambda x: "{" + x + "}"), max_size=3).map("".join), max_leaves=8))
def test_any_balanced_content_of_a_box_comes_back(content):
    found = last_box(f"so {{x}} \\boxed{{{content}}} }} {{")
    assert (found or "") == content.strip()


def test_ways_that_are_not_known():
    with pytest.raises(ConfigError, match="did you mean 'boxed'"):
        ExactMatch(extract="boxd")
    with pytest.raises(ConfigError, match="no way"):
        Numeric(extract=())


# -- text and numbers ------------------------------------------------------------------------------


def squad_f1(prediction, truth):
    """SQuAD's evaluation script, as published."""
    import collections
    import string

    def normalize_answer(s):
        s = s.lower()
        s = "".join(ch for ch in s if ch not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())

    a, b = normalize_answer(prediction).split(), normalize_answer(truth).split()
    same = sum((collections.Counter(a) & collections.Counter(b)).values())
    if len(a) == 0 or len(b) == 0:
        return float(a == b)
    if same == 0:
        return 0.0
    precision, recall = same / len(a), same / len(b)
    return 2 * precision * recall / (precision + recall)


TEXT = st.text("abc the.,A ", max_size=24)


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT)
def test_f1_is_squads(a, b):
    assert token_f1(normalise(a), normalise(b)) == pytest.approx(squad_f1(a, b), abs=1e-12)


@settings(max_examples=300, deadline=None)
@given(st.text("abcd", max_size=20), st.text("abcd", max_size=20))
def test_the_edit_ratio_is_that_of_the_longest_common_subsequence(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    expected = 2 * table[-1][-1] / (len(a) + len(b)) if a or b else 1.0
    assert edit_ratio(a, b) == pytest.approx(expected)


def test_exact_match_and_its_settings():
    row = {"answer": "The  Café"}
    for evaluator, answer, reward in [
        (ExactMatch(), " The Café\n", 1),
        (ExactMatch(), "The Cafe\u0301", 1),
        (ExactMatch(), "the café", 0),
        (ExactMatch(ignore_case=True), "THE CAFÉ", 1),
        (ExactMatch(ignore_case=True, ignore_articles=True, ignore_punctuation=True), "café!", 1),
        (ExactMatch(ignore_whitespace=False), "The Café", 0),
    ]:
        assert score(evaluator, row, answer).reward == reward, (evaluator, answer)
    assert score(ExactMatch(), {"answer": ["a", "b"]}, "b").reward == 1 and score(ExactMatch(), {"answer": 4}, "4").reward == 1


@pytest.mark.parametrize("evaluator", [ExactMatch(), FuzzyMatch(), Numeric(), Maths()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("row", [{}, {"anser": "4"}, {"answer": None}, {"answer": ""}, {"answer": "  "}, {"answer": []}, {"answer": math.nan}, {"answer": {"a": 1}}], ids=str)
def test_a_truth_that_is_missing_is_an_error_and_no_zero(evaluator, row):
    for answer in ("4", "", "nothing"):
        found = score(evaluator, row, answer)
        assert found.status == "error" and found.reward is None and "truth" in found.error
    if "anser" in row:
        assert "'anser'" in found.error


def test_a_truth_of_which_nothing_is_left_is_an_error():
    for evaluator in (ExactMatch(ignore_articles=True, ignore_case=True), FuzzyMatch()):
        assert score(evaluator, {"answer": "The"}, "").status == score(evaluator, {"answer": "the"}, "a").status == "error"
    assert "no number" in score(Numeric(), {"answer": "four"}, "4").error and "no number" in score(Numeric(), {"answer": "four"}, "none").error
    assert "no answer by" in score(Numeric(truth_extract="hashes"), {"answer": "four"}, "4").error


@pytest.mark.parametrize("answer", [None, ["4"], {"a": 1}, b"4"])
def test_an_answer_that_is_no_text_is_an_error(answer):
    for evaluator in (ExactMatch(), Numeric(), JSONFormat(), RegexFormat("."), Length(5)):
        found = score(evaluator, {"answer": "4"}, BaseEvaluationTarget(answer))
        assert found.status == "error" and "the answer must be text" in found.error


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-3.50", "-3.5"), ("1,234,567.5", "1234567.5"), ("$1,200", 1200), (r"\$18.90", "18.9"), ("€ 5", 5), ("50%", 50), (r"50\%", 50), ("7/2", "7/2"), ("-7/2", "-7/2"), ("1 1/2", "3/2"),
        (r"1\frac{1}{2}", "3/2"), (r"\frac{3}{4}", "3/4"), (r"\dfrac34", "3/4"), (r"-\frac12", "-1/2"), ("1.2e3", 1200), ("1.2E-3", "0.0012"), (r"3 \times 10^{4}", 30000), ("3*10^-2", "0.03"), ("12 km", 12),
        ("12km/h", 12), (r"5\text{ cm}^2", 5), (r"30^\circ", 30), ("1,200 m²", 1200), ("$5$", 5), ("5.", 5), (".5", "0.5"), ("−3", -3), ("10{,}000", 10000), ("+4", 4), ("007", 7), ("12 square meters", 12),
        ("abc", None), ("", None), ("1/0", None), ("1 2", None), ("1.2.3", None), ("nan", None), ("inf", None), ("1e9999", None), ("x=5", None), ("1,23", None), ("two 5", None), ("12 + 3", None), ("5 or 6", None),
    ],
)  # fmt: skip
def test_numbers_in_text(text, value):
    assert parse_number(text) == (None if value is None else Fraction(value))


def test_tolerance_is_relative_to_the_truth_or_absolute():
    near = Numeric(relative=0.01)
    assert [score(near, {"answer": "100"}, a).reward for a in ("101", "99", "101.01", "-100")] == [1, 1, 0, 0]
    assert [score(Numeric(relative=0, absolute=0.5), {"answer": 0}, a).reward for a in ("0.5", "0.51", "-0.5")] == [1, 0, 1]
    assert [score(Numeric(relative=0), {"answer": "0.3"}, a).reward for a in ("0.30", "0.3000001", "3/10")] == [1, 0, 1]
    assert score(Numeric(percent="divide"), {"answer": "0.5"}, "50%").reward == 1 and score(Numeric(), {"answer": "0.5"}, "50%").reward == 0
    with pytest.raises(ConfigError, match="relative"):
        Numeric(relative=-1)


# -- mathematics -----------------------------------------------------------------------------------

PAIRS = [
    ("$x+1$", "$1+x$"), ("1/2", "0.5"), (r"\sqrt{8}", r"$2\sqrt2$"), ("$1,200$", "1200"), ("$(1,2)$", "$[1,2]$"), ("$x$", "$y$"), ("1", "hello"), ("$x<3$", r"$(-\infty,3)$"), ("$0$", r"$\frac{1}{0}$"), (r"$\{1,2\}$", r"$\{2,1\}$"),
    (r"\frac{x^2-1}{x-1}", "$x+1$"), (r"\boxed{3}", r"first \boxed{4}, then \boxed{3}"), ("3", r"\boxed{3.0}"), (r"$\pi$", "3.14159265358979"), ("$2^{10}$", "1024"), ("$5$", "the sum is $2+3$"), (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"$\begin{pmatrix}1\\2\end{pmatrix}$"),
    ("$x=5$", "5"), ("7", ""), ("7", "}}{{ $"), (r"$\sin^2 x+\cos^2 x$", "1"), ("$i^2$", "-1"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    processes = Processes(size=2)
    yield processes
    pids = processes.pids
    processes.close()
    assert processes.pids == [] and all(map(gone, pids))


@pytest.mark.timeout(120)
def test_maths_says_what_math_verify_says_in_a_main_thread(pool):
    math_verify = pytest.importorskip("math_verify")
    maths, verdicts = Maths(processes=pool), []
    for truth, answer in PAIRS:
        wrapped = truth if re.search(r"\$|\\boxed", truth) else f"${truth}$"
        verdicts.append(float(math_verify.verify(math_verify.parse(wrapped), math_verify.parse(answer))))
    mine = evaluate_batch(maths, [{"answer": t} for t, _ in PAIRS], [a for _, a in PAIRS], concurrency=8)
    empty = [s.status for s in mine]
    assert empty == ["ok"] * len(PAIRS), [s.error for s in mine]
    assert [s.reward for s in mine] == verdicts and 0 < sum(verdicts) < len(PAIRS)
    assert len(pool.pids) == 2


@pytest.mark.timeout(120)
def test_what_hangs_is_killed_and_replaced(pool):
    pytest.importorskip("math_verify")
    hanging = [r"\boxed{\sum_{n=1}^{99999999}\frac{\sin(n!)}{n^n+1}}", r"\boxed{9999999^{99999999}+1}"]
    short, maths = Maths(limit=0.6, processes=pool), Maths(processes=pool)
    assert score(maths, {"answer": "4"}, "4").reward == 1
    before = set(pool.pids)
    late = evaluate_batch(short, [{"answer": "1"}] * 4, hanging * 2, concurrency=4)
    assert [(s.reward, s.metrics["unchecked"]) for s in late] == [(0.0, 1.0)] * 4
    assert before - set(pool.pids)
    assert [s.reward for s in evaluate_batch(maths, [{"answer": "4"}] * 6, ["$2+2$", "5"] * 3)] == [1, 0] * 3
    assert len(pool.pids) <= 2 and all(map(gone, before - set(pool.pids)))


@pytest.mark.timeout(120)
def test_a_process_that_dies_is_an_error_where_it_worked_and_nothing_where_it_rested(pool):
    pytest.importorskip("math_verify")
    maths = Maths(processes=pool, limit=60)
    assert score(maths, {"answer": "4"}, "4").reward == 1
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: pool.pids == [])
    assert score(maths, {"answer": "4"}, "4").reward == 1
    found = []
    thread = threading.Thread(target=lambda: found.append(score(maths, {"answer": "1"}, r"\boxed{\sum_{n=1}^{99999999}\frac{\sin(n!)}{n^n+1}}")))
    thread.start()
    until(lambda: pool._free.qsize() < 2)

    def kill_until_it_ends():
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        return not thread.is_alive()

    until(kill_until_it_ends)
    assert found[0].status == "error" and "ended with code -9" in found[0].error


@pytest.mark.timeout(120)
def test_many_threads_share_few_processes(pool):
    pytest.importorskip("math_verify")
    maths = Maths(processes=pool)
    found = evaluate_batch(maths, [{"answer": str(i)} for i in range(96)], [f"${i - 1 + i % 3}+1$" for i in range(96)], concurrency=32)
    assert [s.reward for s in found] == [float(i % 3 == 0) for i in range(96)] and len(pool.pids) == 2


@settings(max_examples=100, deadline=None)
@given(st.fractions(max_denominator=999).filter(lambda x: abs(x) < 10**9), st.sampled_from(["{n}/{d}", r"\frac{{{n}}}{{{d}}}", r"\dfrac{{{n}}}{{{d}}}", "${n}/{d}$", "{n} / {d} km"]))
def test_fractions_come_back_as_they_were_written(value, form):
    sign = "-" if value < 0 else ""
    text = form.format(n=abs(value.numerator), d=value.denominator)
    text = text.replace("$", f"${sign}", 1) if text.startswith("$") else sign + text
    assert parse_number(text) == value and score(Numeric(relative=0), {"answer": text}, f"so \\boxed{{{text.strip('$')}}}").reward == 1


@pytest.mark.timeout(120)
def test_a_truth_that_is_no_mathematics_is_an_error(pool):
    pytest.importorskip("math_verify")
    found = score(Maths(processes=pool), {"answer": r"\text{}"}, "4")
    assert found.status == "error" and "cannot be read" in found.error
    assert score(Maths(processes=pool, extract="boxed"), {"answer": r"\text{}"}, "no box").status == "error"
    several = score(Maths(processes=pool, extract="boxed"), {"answer": ["3", "4"]}, r"\boxed{2+2}")
    assert several.reward == 1 and score(Maths(processes=pool, extract="boxed"), {"answer": "4"}, "4").reward == 0


def test_without_math_verify_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(rewards.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"nexrl_sdk\[rewards\]"):
        Maths()
    with pytest.raises(ConfigError, match="jsonschema"):
        JSONFormat({"type": "object"})
    assert score(JSONFormat(), {}, "{}").reward == 1


SCRIPT = """
import os, sys, threading
from nexrl_sdk.rollout.evaluator import score
from nexrl_sdk.rollout.processes import shared_processes
from nexrl_sdk.rollout.rewards import Maths
judge = Maths(limit=50)
assert score(judge, {"answer": "4"}, "$2+2$").reward == 1
pid = os.fork()
if pid == 0:
    assert shared_processes().pids == []
    assert score(judge, {"answer": "4"}, "$2+2$").reward == 1
    child = shared_processes().pids
    shared_processes().close()
    os._exit(0 if child else 1)
assert os.waitpid(pid, 0)[1] == 0
assert score(judge, {"answer": "4"}, "$2+2$").reward == 1
threading.Thread(target=score, args=(judge, {"answer": "4"}, r"\\boxed{\\sum_{n=1}^{99999999}\\frac{\\sin(n!)}{n^n+1}}"), daemon=True).start()
while shared_processes()._free.qsize() == shared_processes().size:
    pass
print(*shared_processes().pids, flush=True)
if sys.argv[1] == "killed":
    threading.Event().wait()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["ended", "killed"])
def test_no_process_is_left_behind_and_forks_have_their_own(how):
    pytest.importorskip("math_verify")
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    pids = [int(p) for p in process.stdout.readline().split()]
    assert pids
    if how == "killed":
        process.kill()
    assert process.wait(60) == (-9 if how == "killed" else 0)
    until(lambda: all(map(gone, pids)))
    process.stdout.close()


@pytest.mark.timeout(60)
def test_processes_end_after_a_rest_and_start_again():
    pool = Processes(size=1, rest=0.2)
    try:
        task = {"kind": "pattern", "pattern": "a+", "flags": 0, "how": "fullmatch", "text": "aaa"}
        assert pool.ask(task, 30)["right"]
        first = set(pool._there)
        until(lambda: pool.pids == [])
        assert pool.ask(task, 30)["right"] and len(pool._there) == 1 and not first & pool._there
    finally:
        pool.close()


# -- form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"a": 1}', 1), (' [1, 2]\n', 1), ("4", 1), ('```json\n{"a": 1}\n```', 1), ('<think>{bad</think>\n{"a": 1}', 1), ("{'a': 1}", 0), ('{"a": NaN}', 0), ('{"a": Infinity}', 0), ('{"a": 1, "a": 2}', 0), ('{"a": 1} ok', 0),
        ('Here: {"a": 1}', 0), ('```json\n{"a": 1}\n```\nthat is it', 0), ("", 0), ('{"a": 1,}', 0), ("[" * 100_000, 0), ("// c\n{}", 0), ('<think>{"a": 1}', 0),
    ],
)  # fmt: skip
def test_json_is_strict(answer, reward):
    assert score(JSONFormat(), {}, answer).reward == reward


def test_fences():
    fenced, plain = '```json\n{"a": 1}\n```', '{"a": 1}'
    assert [score(JSONFormat(fence=f), {}, a).reward for f in ("allowed", "required", "forbidden") for a in (fenced, plain)] == [1, 1, 1, 0, 0, 1]


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=3), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from("abc"), x, max_size=3), max_leaves=6))
def test_schemas_as_jsonschema_has_them(value):
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "array", "maxItems": 2, "items": {"type": "string"}}]}
    try:
        jsonschema.validate(value, schema)
        expected = 1.0
    except jsonschema.ValidationError:
        expected = 0.0
    assert score(JSONFormat(schema), {}, json.dumps(value)).reward == expected


def test_a_schema_that_is_none_is_refused_and_one_elsewhere_is_not_fetched(monkeypatch):
    pytest.importorskip("jsonschema")
    with pytest.raises(ConfigError, match="no JSON schema"):
        JSONFormat({"type": "objekt"})
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: pytest.fail("something was fetched"))
    assert score(JSONFormat({"$ref": "https://json-schema.org/draft/2020-12/schema"}), {}, '{"type": 5}').reward == 0
    found = score(JSONFormat({"$ref": "http://127.0.0.1:9/schema.json"}), {}, "{}")
    assert found.status == "error" and found.reward is None


@pytest.mark.timeout(60)
def test_patterns():
    think = RegexFormat(r"<think>.*</think>\s*<answer>.*</answer>", how="search")
    assert score(think, {}, "x <think>a</think>\n<answer>b</answer>").reward == 1 and score(think, {}, "<answer>b</answer>").reward == 0
    with pytest.raises(ConfigError, match="no regular expression"):
        RegexFormat("(")
    endless = score(RegexFormat(r"(a+)+b", limit=0.5), {}, "a" * 64)
    assert endless.status == "error" and "within 0.5 s" in endless.error
    assert score(RegexFormat(re.compile("AB", re.I), limit=30), {}, "ab").reward == 1
    close_processes()


def test_length():
    assert [round(score(Length(8, 4, penalty=2, unit="words"), {}, "w " * n).reward, 6) for n in (0, 4, 5, 6, 8, 9)] == [0, 0, -0.5, -1, -2, -2]
    assert [score(Length(3), {}, "x" * n).reward for n in (3, 4)] == [0, -1]
    with pytest.raises(ConfigError, match="buffer"):
        Length(3, 4)


# -- faults through wrappers -----------------------------------------------------------------------


class Faulty(Evaluator):
    def __init__(self, value):
        self.value, self.calls = value, 0

    def evaluate(self, data, evaluation_target):
        self.calls += 1
        if isinstance(self.value, BaseException):
            raise self.value
        if self.value == "hang":
            threading.Event().wait(20)
        return self.value if isinstance(self.value, EvaluationRunResult) else EvaluationRunResult(reward=self.value)


FAULTS = [
    (ValueError("boo"), "error", "ValueError"), (EvaluatorError("boo"), "error", "boo"), (SystemExit(1), "error", "SystemExit"), ("hang", "error", "longer than"), (None, "unscored", "no reward"), (math.nan, "error", "finite"),
    (math.inf, "error", "finite"), ("0.5", "error", "must be a number"), (EvaluationRunResult(1.0, metrics=None), "error", ""), (EvaluationRunResult(1.0, metrics={"a": "x"}), "error", ""),
]  # fmt: skip
WRAPPERS = {
    "alone": lambda e, path: e,
    "cached": lambda e, path: Cached(e),
    "cached on disk": lambda e, path: Cached(e, path / "c.sqlite", identity="v1"),
    "weighted": lambda e, path: WeightedRewards([e], [2.0]),
    "cached and weighted": lambda e, path: WeightedRewards([Cached(e)]),
    "weighted and cached": lambda e, path: Cached(WeightedRewards([e])),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("value", "status", "says"), FAULTS, ids=lambda v: repr(v)[:30])
def test_faults_are_the_same_through_each_wrapper(wrapper, value, status, says, tmp_path):
    inner = Faulty(value)
    evaluator = WRAPPERS[wrapper](inner, tmp_path)
    timeout = 0.1 if value == "hang" else None
    for _ in range(2):
        found = score(evaluator, {"answer": "4"}, "4", timeout)
        assert (found.status, found.reward) == (status, None) and says in str(found.error)
    if status == "error" and value != "hang":
        assert inner.calls == 2  # errors are not kept


def test_a_criterion_that_fails_is_no_zero_in_the_sum():
    both = WeightedRewards([ExactMatch(), Faulty(ValueError("boo"))])
    assert score(both, {"answer": "4"}, "4").status == "error"
    assert score(WeightedRewards([ExactMatch(), Faulty(None)]), {"answer": "4"}, "4").reward == 1
    named = as_evaluator([ExactMatch(name="first"), ExactMatch("other", name="second", weight=0.5)])
    assert score(named, {"answer": "4", "other": "5"}, "5").metrics["second"] == 1 and score(named, {"answer": "4", "other": "5"}, "5").reward == 0.5


# -- the cache -------------------------------------------------------------------------------------


class Counting(Evaluator):
    def __init__(self, bonus=0.0):
        self.bonus, self._calls = bonus, None

    def evaluate(self, data, evaluation_target):
        CALLS.append(evaluation_target.final_answer)
        return EvaluationRunResult(float(evaluation_target.final_answer == data.get("answer")) + self.bonus, "truth", {"n": 1.0}, {"words": ["a"]})


CALLS: list = []


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def test_the_key_is_the_content_and_nothing_else():
    cached = Cached(Counting())
    rows = [{"answer": "4", "k": 1}, {"k": 1, "answer": "4"}, {"answer": "4", "k": 1.0}, {"answer": "4", "k": True}, {"answer": "4", "k": "1"}]
    for row in rows:
        score(cached, row, "4")
    assert len(CALLS) == 4  # the order of columns does not matter, the type of a value does
    score(cached, rows[0], BaseEvaluationTarget("4", observation="seen"))
    assert len(CALLS) == 5
    assert (cached.hits, cached.misses) == (1, 5)


def test_what_comes_back_is_a_copy():
    cached = Cached(Counting())
    first = cached.evaluate({"answer": "4"}, BaseEvaluationTarget("4"))
    first.extra_info["words"].append("changed")
    assert cached.evaluate({"answer": "4"}, BaseEvaluationTarget("4")) == EvaluationRunResult(1.0, "truth", {"n": 1.0}, {"words": ["a"]})


def test_what_cannot_be_written_down_is_computed_each_time():
    cached = Cached(Counting())
    for _ in range(2):
        score(cached, {"answer": "4", "image": object()}, "4")
    assert len(CALLS) == 2
    text = {"answer": "4", "note": '{"__nexrl__": "Unsaved"}'}
    for _ in range(2):
        score(cached, text, "4")
    assert len(CALLS) == 3


def test_the_oldest_go_first(tmp_path):
    for cached in (Cached(Counting(), max_entries=2), Cached(Counting(), tmp_path / "c.sqlite", max_entries=2)):
        CALLS.clear()
        for answer in "abcbca":
            score(cached, {}, answer)
        assert CALLS == ["a", "b", "c", "a"]
        cached.close()


@pytest.mark.timeout(60)
def test_equal_calls_at_once_are_one_computation():
    begun, go, calls = threading.Event(), threading.Event(), []

    def slow(row, answer):
        calls.append(answer)
        begun.set()
        go.wait(30)
        if answer == "bad":
            raise ValueError("boo")
        return 1.0

    for answer, status in (("good", "ok"), ("bad", "error")):
        cached, found = Cached(slow), []
        begun.clear(), go.clear(), calls.clear()
        threads = [threading.Thread(target=lambda: found.append(score(cached, {}, answer))) for _ in range(8)]  # noqa: B023
        [t.start() for t in threads]
        begun.wait(30)
        go.set()
        [t.join(30) for t in threads]
        assert [s.status for s in found] == [status] * 8
        assert len(calls) == 1 if status == "ok" else calls
        score(cached, {}, answer)
        assert len(calls) == 1 if status == "ok" else len(calls) >= 2


@pytest.mark.timeout(60)
def test_a_computation_that_hangs_does_not_hold_up_its_equals_for_ever():
    go, begun, calls = threading.Event(), threading.Event(), []

    def hangs_once(row, answer):
        calls.append(answer)
        begun.set()
        if len(calls) == 1:
            go.wait(40)
        return 1.0

    cached = Cached(hangs_once, share=0.2)
    thread = threading.Thread(target=score, args=(cached, {}, "a"))
    thread.start()
    begun.wait(30)
    assert score(cached, {}, "a", timeout=30).reward == 1 and len(calls) == 2
    go.set()
    thread.join(30)


def test_a_file_serves_later_runs_and_other_objects(tmp_path):
    path = tmp_path / "deep" / "scores.sqlite"
    first = Cached(Counting(), path)
    score(first, {"answer": "4"}, "4")
    first.close()
    assert score(Cached(Counting(), path), {"answer": "4"}, "4").reward == 1 and len(CALLS) == 1
    assert score(Cached(Counting(bonus=1.0), path), {"answer": "4"}, "4").reward == 2 and len(CALLS) == 2
    assert score(Cached(Counting(), path, identity="v2"), {"answer": "4"}, "4").reward == 1 and len(CALLS) == 3
    gc.collect()


def test_identities():
    def make(n):
        return lambda row, answer: n

    assert identity_of(as_evaluator(make(1))) == identity_of(as_evaluator(make(1))) != identity_of(as_evaluator(make(2)))
    assert identity_of(Numeric(relative=0.1)) != identity_of(Numeric(relative=0.2)) and identity_of(ExactMatch(extract=re.compile("a"))) != identity_of(ExactMatch(extract=re.compile("b")))
    assert identity_of(WeightedRewards([ExactMatch()], [1.0])) != identity_of(WeightedRewards([ExactMatch()], [0.5]))
    with pytest.raises(ConfigError, match="identity='v1'"):
        identity_of(Faulty(object()))


def test_a_damaged_file_is_said_and_a_damaged_line_is_computed_again(tmp_path):
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 40)
    with pytest.raises(DataError, match=r"c\.sqlite cannot be used"):
        Cached(Counting(), path)
    good = tmp_path / "d.sqlite"
    cached = Cached(Counting(), good)
    score(cached, {}, "a")
    cached.close()
    with sqlite3.connect(good) as db:
        db.execute("UPDATE scores SET value = ?", ('{"broken',))
    db.close()
    assert score(Cached(Counting(), good), {}, "a").status == "ok" and len(CALLS) == 2


def test_a_file_that_fails_later_costs_a_computation_and_no_score(tmp_path, caplog):
    cached = Cached(Counting(), tmp_path / "c.sqlite")
    cached._file._db.execute("DROP TABLE scores")
    assert [score(cached, {}, "a").status for _ in range(2)] == ["ok", "ok"] and len(CALLS) == 1  # memory has it still
    assert "cannot be used as a cache" in caplog.text
    cached.close()


@pytest.mark.timeout(120)
def test_processes_share_a_file(tmp_path):
    path = tmp_path / "c.sqlite"
    code = "import sys; from nexrl_sdk.rollout.rewards import *; c = Cached(Numeric(), sys.argv[1]); s = evaluate_batch(c, [{'answer': i % 7} for i in range(60)], [str(i % 7) for i in range(60)]); print(sum(x.reward for x in s), c.misses)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    several = [subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)]
    said = [p.communicate(timeout=90)[0].split() for p in several]
    assert [s[0] for s in said] == ["60.0"] * 3 and all(7 >= int(s[1]) >= 0 for s in said)
    last = Cached(Numeric(), path)
    assert score(last, {"answer": 3}, "3").reward == 1 and last.hits == 1
    last.close()


# -- in a recipe -----------------------------------------------------------------------------------


class Near(Numeric):
    def __init__(self):
        super().__init__(relative=0.01)


class Shaped(JSONFormat):
    def __init__(self):
        super().__init__({"type": "object"})


class Kept(Cached):
    def __init__(self):
        super().__init__(Near(), share=5.0)


@pytest.mark.parametrize("evaluator", [Near, Near(), Shaped, Kept, [Near, Shaped], Maths()], ids=["class", "instance", "schema", "cached", "list", "maths"])
def test_a_recipe_is_saved_with_them(evaluator, tmp_path):
    from nexrl_sdk import Recipe

    pytest.importorskip("math_verify")
    Recipe(model="mock", data=[{"prompt": "a", "answer": "100"}], evaluator=evaluator).save(tmp_path / "r")
    back = as_evaluator(Recipe.load(tmp_path / "r").evaluator())
    assert repr(back) == repr(as_evaluator(evaluator))
    if evaluator in (Near, Kept):
        assert [score(back, {"answer": "100"}, a).reward for a in ("101", "102")] == [1, 0]


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_batches_keep_their_order_and_their_errors():
    rows = [{"answer": i} for i in range(40)] + [{}]
    seen = []
    found = evaluate_batch(Numeric(), rows, [str(i) for i in range(40)] + ["1"], concurrency=5, progress=lambda done, total: seen.append((done, total)))
    assert [s.ground_truth for s in found[:40]] == [str(i) for i in range(40)] and found[40].status == "error" and seen[-1] == (41, 41)
    assert evaluate_batch(Numeric(), [], []) == []
    with pytest.raises(DataError, match="2 rows have 1 answers"):
        evaluate_batch(Numeric(), [{}, {}], ["a"])
    hung = evaluate_batch(Faulty("hang"), [{}] * 3, ["a"] * 3, timeout=0.1, progress=True)
    assert [s.status for s in hung] == ["error"] * 3
