"""A cache in a file is asked by evaluators of other settings and other source, and gives them nothing of each other's; errors are not kept."""

from __future__ import annotations

import pytest

from nexrl_sdk.rollout.cached import Cached, identity_of
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.rollout.evaluator import as_evaluator, score
from nexrl_sdk.rollout.rewards import ExactMatch, FuzzyMatch, JSONFormat, Length, Numeric, RegexFormat
from nexrl_sdk.types import ConfigError

BASE = """
import logging
import re
import threading

from nexrl_sdk.rollout.evaluator import EvaluationRunResult, Evaluator, reward
import ours

SHARE = 0.5
WORDS = {"good": 1.0}
PATTERN = re.compile("a+")
SEEN: list = []
log, lock = logging.getLogger(__name__), threading.Lock()


def twice(x):
    return 2 * x if x else again(x)


def again(x):
    return twice(x) if x else 0.0


@reward(weight=1.0)
def value(row, answer):
    with lock:
        SEEN.append(answer)
    log.debug("seen")
    return SHARE * twice(len(PATTERN.findall(answer))) + sum(WORDS.get(w, 0) for w in answer.split()) + ours.bonus()


class Judge(Evaluator):
    scale = 1.0

    def evaluate(self, data, evaluation_target):
        return EvaluationRunResult(self.scale * value(data, evaluation_target.final_answer))


class Finer(Judge):
    pass
"""
CHANGES = {
    "constant": ("SHARE = 0.5", "SHARE = 0.25"), "table": ('"good": 1.0', '"good": 2.0'), "pattern": ('"a+"', '"b+"'), "helper": ("return 2 * x", "return 3 * x"),
    "helper of a helper": ("if x else 0.0", "if x else 1.0"), "own lines": ("log.debug", "log.info"),
}  # fmt: skip
CLASS = {"class attribute": ("scale = 1.0", "scale = 2.0"), "its function": ("SHARE *", "2 * SHARE *"), "derived": ("class Finer(Judge):\n    pass", "class Finer(Judge):\n    more = 1")}

@pytest.mark.parametrize("what", CHANGES)
def test_what_a_function_uses_of_its_module_is_part_of_it(what, tmp_path):
    file = tmp_path / "mine.py"
    (tmp_path / "ours.py").write_text("def bonus():\n    return 0.0\n")
    file.write_text(BASE)
    path = tmp_path / "scores.sqlite"
    first = load_object(f"{file}:value")
    before = identity_of(as_evaluator(first))
    cached = Cached(first, path)
    assert score(cached, {}, "aa good").status == "ok" and (cached.hits, cached.misses) == (0, 1)
    assert identity_of(as_evaluator(first)) == before  # what it has seen changes nothing
    cached.close()
    again = Cached(load_object(f"{file}:value"), path)
    assert score(again, {}, "aa good").status == "ok" and again.hits == 1
    again.close()
    assert CHANGES[what][0] in BASE
    file.write_text(BASE.replace(*CHANGES[what]) + "\n")
    changed = Cached(load_object(f"{file}:value"), path)
    assert score(changed, {}, "aa good").status == "ok" and changed.hits == 0
    changed.close()


@pytest.mark.parametrize("what", [*CHANGES, *CLASS])
def test_what_a_class_uses_is_part_of_it(what, tmp_path):
    file = tmp_path / "mine.py"
    (tmp_path / "ours.py").write_text("def bonus():\n    return 0.0\n")
    file.write_text(BASE)
    old = identity_of(load_object(f"{file}:Finer")())
    assert identity_of(load_object(f"{file}:Finer")()) == old != identity_of(load_object(f"{file}:Judge")())
    file.write_text(BASE.replace(*{**CHANGES, **CLASS}[what]) + "\n")
    assert identity_of(load_object(f"{file}:Finer")()) != old


def test_a_module_of_the_users_is_part_of_it(tmp_path):
    (tmp_path / "mine.py").write_text(BASE)
    found = []
    for line in ("return 0.0", "return 1.0"):
        (tmp_path / "ours.py").write_text(f"def bonus():\n    {line}\n\n\n")
        (tmp_path / "mine.py").write_text(BASE + "\n" * len(found))
        found.append(identity_of(as_evaluator(load_object(f"{tmp_path}/mine.py:value"))))
    assert found[0] != found[1]


def test_no_two_settings_of_ready_made_ones_share_an_identity():
    every = [
        Numeric(), Numeric(relative=0.1), Numeric(absolute=0.1), Numeric(percent="divide"), Numeric("other"), Numeric(extract="line"), ExactMatch(), ExactMatch(ignore_case=True), ExactMatch(ignore_articles=True),
        FuzzyMatch(), FuzzyMatch(by="ratio"), FuzzyMatch(threshold=0.5), JSONFormat(), JSONFormat({"type": "object"}), JSONFormat({"type": "array"}), JSONFormat(fence="required"), RegexFormat("a"), RegexFormat("b"),
        RegexFormat("a", how="search"), Length(10), Length(10, 5), Length(10, unit="words"), Length(10, penalty=2.0), as_evaluator([ExactMatch(), Length(10)]), as_evaluator([ExactMatch(weight=0.5), Length(10)]),
    ]  # fmt: skip
    assert len({identity_of(e) for e in every}) == len(every)
    assert identity_of(JSONFormat({"type": "object"})) == identity_of(JSONFormat({"type": "object"})) and identity_of(Numeric()) == identity_of(Numeric())


SCALE = 1.0


def scaled(row, answer):
    return SCALE * len(answer)


def test_a_value_that_was_changed_while_the_program_ran_counts(monkeypatch):
    before = identity_of(as_evaluator(scaled))
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    assert identity_of(as_evaluator(scaled)) != before


def test_what_nothing_is_known_of_is_said():
    space = {"client": object()}
    exec("def judged(row, answer):\n    return client and 1.0", space)  # its source is nowhere
    with pytest.raises(ConfigError, match="identity='v1'"):
        identity_of(as_evaluator(space["judged"]))


def test_errors_are_not_kept_in_a_file(tmp_path):
    answers = iter([ValueError("boo"), float("nan"), "0.5", None, 1.0])

    def flaky(row, answer):
        value = next(answers)
        if isinstance(value, Exception):
            raise value
        return value

    cached = Cached(flaky, tmp_path / "c.sqlite", identity="v1")
    assert [score(cached, {}, "a").status for _ in range(5)] == ["error", "error", "error", "unscored", "unscored"]  # unscored is what it said
    cached.close()
