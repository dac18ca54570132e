"""Grade-school mathematics: is the last number right?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from nexrl_sdk import BaseEvaluationTarget, EvaluationRunResult, Evaluator

# 72 | 1,234.50 | .5 | -3: a minus that touches what stands before it subtracts, and is no sign
NUMBER = re.compile(r"(?:(?<![\w.)\]}])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")


def numbers(text: str) -> list[Decimal]:
    """All numbers in a text, in order; `1,234`, `$5`, `-3` and `0.50` are understood."""
    plain = text.replace("\u2212", "-").replace("\\$", "$").replace("{,}", ",").replace("\\!", "")
    return [Decimal(m.group().replace(",", "").replace("$", "")) for m in NUMBER.finditer(plain)]


def last_box(text: str) -> str | None:
    """What stands in the last complete `\\boxed{...}`, braces in it balanced; None where there is none."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    return None


def final_number(text: str) -> tuple[Decimal | None, str]:
    """The answer that a text arrives at, and how it was marked: "boxed", "hashes", "last" or "none"."""
    box = last_box(text)
    if box is not None and (inside := numbers(box)):
        return inside[-1], "boxed"
    _, hashes, tail = text.rpartition("####")
    if hashes and (after := numbers(tail)):
        return after[0], "hashes"
    anywhere = numbers(text)
    return (anywhere[-1], "last") if anywhere else (None, "none")


class GSM8KEvaluator(Evaluator):
    """Reward 1 for the right number, else 0; `eval/marked` is the share of answers given as they were asked for."""

    def evaluate(
        self,
        data: Mapping[str, Any],  # a row of openai/gsm8k: question, answer (a solution that ends in `#### 72`)
        evaluation_target: BaseEvaluationTarget,  # final_answer: what the model wrote
    ) -> EvaluationRunResult:
        """Compare the last numbers of the model's answer and of the row's."""
        truth, _ = final_number(str(data["answer"]))
        if truth is None:
            raise ValueError(f"this row's answer holds no number: {data['answer']!r}")
        given, how = final_number(evaluation_target.final_answer)
        return EvaluationRunResult(reward=float(given == truth), ground_truth=str(truth), metrics={"marked": float(how in ("boxed", "hashes"))})
