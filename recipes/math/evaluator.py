"""Competition mathematics: is what stands in the box the same?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from nexrl_sdk import BaseEvaluationTarget, EvaluationRunResult, Evaluator

DROPPED = re.compile(r"\\(?:left|right|!|,|;|:|quad|displaystyle)(?![a-zA-Z])|\\ |\^\{?\\circ\}?|\\degree|\\%|%|\\\$|\$|~")  # marks without a meaning for the value
WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}")
UNITS = re.compile(r"(?<=[\d})])\s*(?:degrees?|cm|inch(?:es)?|feet|miles?|meters?|units?|square\s+\w+|cubic\s+\w+|dollars?|cents?|hours?|minutes?|seconds?|mph)\b(?:\^\{?\d\}?)?")
FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")
NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")


def last_box(text: str) -> str | None:
    """What stands in the last complete `\\boxed{...}`, braces in it balanced; None where there is none."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    return None


def normal(text: str) -> str:
    """An answer in one spelling: no marks without meaning, `\\frac{a}{b}` written out, no units behind a number, no name before it."""
    text = re.sub(r"\\[dt]frac", r"\\frac", text.replace("\u2212", "-").replace("{,}", ",").strip().rstrip("."))
    text = UNITS.sub("", DROPPED.sub("", WORDS.sub(r" \1", text)))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if not re.search(r"[(\[]", text) else text
    text = re.sub(r"\s+", "", text)
    return re.sub(r"^[a-zA-Z]=(?=.)", "", text)


def value(text: str) -> Fraction | None:
    """The number that an answer in normal spelling is; None where it is none."""
    fraction = FRACTION.fullmatch(text)
    if fraction and int(fraction[3]):
        return Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] else 1)
    if (slash := re.fullmatch(r"(-?\d+)/(\d+)", text)) and int(slash[2]):
        return Fraction(int(slash[1]), int(slash[2]))
    return Fraction(text) if NUMBER.fullmatch(text) else None


def same(given: str, truth: str) -> bool:
    """Whether two answers are the same number, or else the same text."""
    a, b = normal(given), normal(truth)
    x, y = value(a), value(b)
    return x == y if x is not None and y is not None else a == b and a != ""


class MathEvaluator(Evaluator):
    """Reward 1 for the right answer in the last box, else 0; `eval/boxed` is the share of answers that have a box."""

    def evaluate(
        self,
        data: Mapping[str, Any],  # a row: problem, solution (with the answer in a box)
        evaluation_target: BaseEvaluationTarget,  # final_answer: what the model wrote
    ) -> EvaluationRunResult:
        """Compare the last boxes of the model's answer and of the row's solution."""
        truth = last_box(str(data["solution"]))
        if truth is None:
            raise ValueError(f"this row's solution has no \\boxed answer: {str(data['solution'])[-80:]!r}")
        given = last_box(evaluation_target.final_answer)
        right = given is not None and same(given, truth)
        return EvaluationRunResult(reward=float(right), ground_truth=truth, metrics={"boxed": float(given is not None)})
