"""Rows as evaluators get them: their own to change."""

from __future__ import annotations

import threading

from nexrl_sdk.rollout.evaluator import as_evaluator, score


def test_a_row_that_an_evaluator_changes_is_its_own():
    """Answers of a group share their row: what one evaluation takes out of it, another finds."""
    row = {"tests": [1, 2, 3], "more": {"a": [1]}, "lock": threading.Lock()}
    plain = {"tests": [1, 2, 3], "more": {"a": [1]}}

    def takes(data, answer):
        data["more"]["a"].append(2)
        data["new"] = True
        return float(data["tests"].pop())

    assert [score(as_evaluator(takes), plain, "a").reward for _ in range(3)] == [3.0, 3.0, 3.0] and plain == {"tests": [1, 2, 3], "more": {"a": [1]}}
    assert score(as_evaluator(lambda data, answer: float(len(data))), row, "a").reward == 3.0  # what cannot be copied is given as it is
