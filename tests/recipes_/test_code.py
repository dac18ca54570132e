"""The code recipe: its rows, its rewards, and a step of training with programs in the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nexrl_sdk import BaseEvaluationTarget, Recipe
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.rollout.evaluator import as_evaluator
from nexrl_sdk.rollout.sandbox import how_confined

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "code"
MODE, REASON = how_confined()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(MODE == "none", reason=f"no sandbox on this machine: {REASON}")]


def made(name: str) -> Any:
    """Something of the script that makes the rows."""
    return load_object(f"make_data.py:{name}", RECIPE)


@pytest.mark.parametrize(("file", "tasks"), [("train.jsonl", "TRAIN"), ("test.jsonl", "TEST")])
def test_the_rows_are_what_the_script_makes(file: str, tasks: str) -> None:
    rows = [json.loads(line) for line in (RECIPE / file).read_text(encoding="utf-8").splitlines()]
    assert rows == list(made("rows")(made(tasks), 0))
    assert all(len(r["tests"]) >= 5 and not any(t.removeprefix("assert ") in r["prompt"] for t in r["tests"]) for r in rows)


def test_no_task_is_in_both_files() -> None:
    assert not {t.name for t in made("TRAIN")} & {t.name for t in made("TEST")}


def test_solutions_are_rewarded_and_guesses_are_not() -> None:
    evaluator = as_evaluator("evaluator.py:SandboxedTests", RECIPE)
    for task in [*made("TRAIN")[::4], *made("TEST")[::3]]:
        row, k = next(made("rows")([task], 0)), task.constants[0]
        right = evaluator.evaluate(row, BaseEvaluationTarget(f"Here it is:\n```python\n{made('solution')(task, k)}```\n"))
        assert (right.reward, right.metrics["fenced"]) == (1.0, 1.0), (task.name, right.extra_info)
        assert evaluator.evaluate(row, BaseEvaluationTarget(f"def {task.name}({task.parameters}):\n    return 'no'")).reward == 0.0


def test_the_recipe_is_valid_offline() -> None:
    assert [f for f in Recipe.load(RECIPE).validate() if getattr(f, "level", "") == "error"] == []


def test_one_step_of_training(tiny: Any) -> None:
    from nexrl_sdk import Trainer

    small = ["data.batch_size=2", "trajectory_pool.group_size=2", "rollout_worker.max_tokens=6", "trainer.total_train_steps=1", "trainer.save_freq=0", "trainer.autocast=none"]
    trainer = Trainer(Recipe.load(RECIPE, [f"model.path={tiny(max_position_embeddings=2048)}", "data.max_prompt_length=2000", *small]), run=False)
    try:
        result = trainer.step()
        assert all(t.status == "ok" and t.reward == 0.0 for t in result.rollouts)
        assert result.metrics["eval/tests_passed"] == 0.0 and result.metrics["eval/timeout"] == 0.0 and result.metrics["errors/failed"] == 0
    finally:
        trainer.backend.close()
