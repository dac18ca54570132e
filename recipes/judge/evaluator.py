"""Explanations, judged by a language model, and held to their length by counting."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from nexrl_sdk.rollout.evaluator import WeightedRewards, reward
from nexrl_sdk.rollout.judge import Judge

PROMPT = """How good is this explanation?

It was asked for:
{row.prompt}

What makes it good:
{row.criteria}

The explanation:
{answer}

10 is an explanation that an expert in teaching would be glad to have written. 5 is right but does not suit its reader. 1 is wrong, empty, or not about the subject. Length is judged elsewhere: give nothing for it."""

SENTENCE = re.compile(r"[^.!?]*\w[^.!?]*(?:[.!?]+|$)")


@reward(weight=0.2)
def brief(
    row: Mapping[str, Any],  # with the number of sentences that are allowed
    answer: str,
) -> float:  # 1 or 0
    """Whether it has no more sentences than were asked for, and at least one."""
    return float(1 <= len(SENTENCE.findall(answer)) <= row["sentences"])


class Explained(WeightedRewards):
    """0.8 of what the judge says and 0.2 for keeping to the length; an answer that could not be judged is an error, not a 0."""

    def __init__(self) -> None:
        judge = Judge(
            PROMPT,
            base_url=os.environ.get("JUDGE_BASE_URL", "http://localhost:8000/v1"),
            model=os.environ.get("JUDGE_MODEL", "Qwen/Qwen2.5-7B-Instruct"),
            key_env="JUDGE_API_KEY" if "JUDGE_API_KEY" in os.environ else None,
            scale=(1, 10),
            name="judge",
            weight=0.8,
        )
        super().__init__([judge, brief])
