"""Evaluators that do what no one expects: always a score in words, always a file that can be read again."""

from __future__ import annotations

import asyncio
import json
import math

import polars as pl
import pytest

from nexrl_sdk.rollout.evaluator import as_evaluator, score
from nexrl_sdk.rollout.rollouts import Rollouts, dumps
from nexrl_sdk.types import Trajectory


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class Odd(BaseException):
    pass


class NoRepr:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("error", [Mute(), Odd("boo"), GeneratorExit(), SystemExit(3), asyncio.CancelledError(), StopIteration(), MemoryError(), RuntimeError("x" * 10**6)])
def test_whatever_is_raised_is_a_cause(error):
    def reward(row, answer):
        raise error

    found = score(as_evaluator(reward), {}, "a")
    assert found.status == "error" and type(error).__name__ in found.error and len(found.error) < 2200 and not found.error.endswith(": ")


def test_an_interrupt_in_an_evaluator_is_an_interrupt():
    def reward(row, answer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(as_evaluator(reward), {}, "a")


@pytest.mark.parametrize("value", [1e308, -1e31, 10**400, NoRepr()])
def test_rewards_that_overflow_a_mean_are_errors(value):
    found = score(as_evaluator(lambda row, answer: value), {}, "a")
    assert found.status == "error" and found.reward is None
    assert score(as_evaluator(lambda row, answer: 1e30), {}, "a").reward == 1e30


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_cannot_be_written_costs_only_itself(ending, tmp_path):
    ring: dict = {}
    ring["ring"] = ring
    t = Trajectory(tokens=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0], reward=1.0, response="\ud800 half", prompt="p", extra_info=ring, ground_truth=10**5000, other=NoRepr(), metrics={"\udfff": 1.0})
    path = Rollouts([t, Trajectory(tokens=[3], loss_mask=[1], reward=math.nan)]).save(tmp_path / f"r.{ending}")
    back = Rollouts.load(path)
    assert back[0].tokens == [1, 2] and back[0].response == "\ud800 half" and back[0].metrics == {"\udfff": 1.0} and back[0].reward == 1.0
    assert "RecursionError" in str(back[0]["extra_info"]) and "ValueError" in str(back[0]["ground_truth"])
    if ending == "jsonl":
        assert len([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]) == 2
    else:
        assert len(pl.read_parquet(path)) == 2
    assert dumps(t)
