"""What evaluators and rollouts lack: left out of baselines, counted, logged; past the budget the run stops with the traceback. Advantages against the closed form."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from nexrl_sdk import LocalBackend, Recipe, Trainer
from nexrl_sdk.launch.runner import run_recipe
from nexrl_sdk.rollout.agent import AgentRolloutWorker
from nexrl_sdk.types import BackendError, EvaluatorError, SamplingParams

pytestmark = pytest.mark.timeout(180)
GROUP, PROMPTS = 4, 4
#   what each answer of each prompt gets: a number, None (unscored), or an exception
SCORES = [[0.0, 1.0, None, 0.5], [2.0, ValueError("boo"), None, None], [ValueError("boo")] * 4, [1.0, 1.0, 1.0, "0.5"]]


def expected(rewards: list[float]) -> list[float]:
    """GRPO: over the mean of those that are scored, their sample deviation and 1e-6; nothing to compare with is 0."""
    if len(rewards) < 2 or np.ptp(rewards) == 0:
        return [0.0] * len(rewards)
    return [(r - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6) for r in rewards]


class Told:
    """An evaluator that says what the table says, each answer of a prompt in turn."""

    def __init__(self):
        self.left = {i: list(row) for i, row in enumerate(SCORES)}

    def evaluate(self, data, target):
        value = self.left[data["i"]].pop(0)
        if isinstance(value, Exception):
            raise value
        return {"reward": value, "metrics": {"asked": 1.0, "i": float(data["i"])}}


def recipe_of(folder, evaluator, **trainer):
    return Recipe(model=str(folder), data={"rows": [{"prompt": f"row {i}", "i": i} for i in range(PROMPTS)], "batch_size": PROMPTS, "shuffle": False}, evaluator=evaluator, algorithm="grpo",
                  rollout_worker={"max_tokens": 4, "num_workers": 1}, trajectory_pool={"group_size": GROUP}, trainer={"total_train_steps": 1, "save_freq": 0, **trainer})  # fmt: skip


def test_advantages_are_the_closed_forms_over_what_is_scored(tiny, tmp_path):
    with LocalBackend(tiny("qwen2", max_position_embeddings=64)) as backend:
        trainer = Trainer(recipe_of(tiny("qwen2", max_position_embeddings=64), Told(), error_budget=0.5), backend, run=tmp_path / "run")
        step = trainer.step()
        trainer.close()
    for i, row in enumerate(SCORES):
        group = [t for t in step.rollouts if t.data["i"] == i]
        scored = [v for v in row if isinstance(v, float)]
        assert [t.status for t in group] == ["ok" if isinstance(v, float) else "unscored" if v is None else "error" for v in row]
        assert [t.reward for t in group] == [v if isinstance(v, float) else None for v in row]
        assert [t.advantage for t in group if t.scored] == pytest.approx(expected(scored), abs=1e-6)
        assert all(not t.advantage for t in group if not t.scored)
    every = [v for row in SCORES for v in row if isinstance(v, float)]
    m = step.metrics
    assert (m["errors/evaluator"], m["errors/unscored"], m["errors/failed"], m["errors/frac"]) == (6.0, 3.0, 0.0, 9 / 16)
    assert m["reward/mean"] == pytest.approx(np.mean(every)) and m["rollouts/count"] == 16 and m["group/count"] == 3
    assert m["eval/asked"] == 1.0 and m["eval/i"] == pytest.approx(np.mean([i for i, row in enumerate(SCORES) for v in row if isinstance(v, float)]))
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert all(logged[k] == m[k] for k in ("errors/evaluator", "errors/unscored", "eval/asked", "eval/i", "reward/mean"))


EVALUATOR = """
def helper(row):
    return {"a": 1}[row["missing"]]


def judge(row, answer):
    return helper(row)
"""


def test_past_the_budget_the_run_stops_with_the_traceback(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(EVALUATOR)
    recipe = recipe_of(tiny("qwen2", max_position_embeddings=64), f"{tmp_path / 'mine.py'}:judge")
    with pytest.raises(EvaluatorError) as e:
        run_recipe(recipe, out=tmp_path / "run", report=False)
    told = str(e.value)
    assert told.startswith("16 of 16 rollouts failed, more than trainer.error_budget=0.5 allows; nothing was trained on. The first cause:\nthe evaluator raised KeyError: 'missing' (at mine.py:3)")
    assert 'mine.py", line 7, in judge' in told and 'mine.py", line 3, in helper' in told and told.rstrip().endswith("KeyError: 'missing'")


@pytest.mark.parametrize(("policy", "stops"), [("stop_on_error", True), ("continue", False), ("budget", False)])
def test_the_policy_decides(policy, stops, tiny):
    table = iter([ValueError("boo"), *[float(i) for i in range(15)]])

    def judge(row, answer):
        value = next(table)
        if isinstance(value, Exception):
            raise value
        return value

    recipe = recipe_of(tiny("qwen2", max_position_embeddings=64), judge).override(f"runtime_monitor.exception_handling.policy={policy}")
    with Trainer(recipe) as trainer:
        if stops:
            with pytest.raises(EvaluatorError, match="1 of 16 rollouts failed"):
                trainer.step()
        else:
            assert trainer.step().metrics["errors/evaluator"] == 1


def test_a_run_of_many_sequences_counts_once_in_the_budget(tiny):
    """Half of the runs fail; those that do not are three sequences each."""

    def agent(query, session, data):
        if data["i"] % 2:
            raise ValueError(f"row {data['i']} fails")
        for name in ("a", "b"):
            session.child(name).complete([{"role": "user", "content": query}])
        return session.complete([{"role": "user", "content": query}]).message["content"]

    for budget, stops in ((0.4, True), (0.5, False)):
        with Trainer(recipe_of(tiny("qwen2", max_position_embeddings=256), lambda row, answer: 1.0, error_budget=budget)) as trainer:
            trainer.worker = AgentRolloutWorker(trainer.backend, lambda row, answer: 1.0, agent=agent, group_size=2, retries=0, sampling=SamplingParams(max_tokens=4))
            if stops:
                with pytest.raises(BackendError, match=r"4 of 8 rollouts failed[\s\S]*row 1 fails[\s\S]*line \d+, in agent"):
                    trainer.step()
            else:
                assert math.isfinite(trainer.step().metrics["reward/mean"])
