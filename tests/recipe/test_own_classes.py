"""What is given as a worker's or trainer's class and is none is refused with what to give."""

from __future__ import annotations

import pytest

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.backend.mock import MockBackend
from nexrl_sdk.rollout.worker import SimpleRolloutWorker
from nexrl_sdk.types import ConfigError

BACKEND = MockBackend(lambda prompt, member: "a")


def agent(query, session):
    return session.complete([{"role": "user", "content": query}]).message["content"]


def recipe_of(**given):
    return Recipe(**{"model": "mock", "data": [{"prompt": "a"}] * 4, "evaluator": lambda row, answer: 1.0, "trainer": {"total_train_steps": 1}, **given})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"worker_class": agent}, r"worker_class: a class is wanted, not the function agent; an agent that is a function is given as Recipe\(agent="),
        ({"worker_class": SimpleRolloutWorker(BACKEND)}, "worker_class: a class is wanted, .*give its class, SimpleRolloutWorker"),
        ({"trainer_class": agent}, "trainer_class: a class is wanted, not the function agent"),
    ],
)
def test_what_is_no_class(given, told):
    recipe = recipe_of(**given)
    with pytest.raises(ConfigError, match=told):
        Trainer(recipe, backend=BACKEND).rollout(1)
    assert any("a class is wanted" in str(f) for f in recipe.validate())


def test_a_files_name_that_is_no_class(tmp_path):
    (tmp_path / "mine.py").write_text("def worker(task):\n    return 1\n")
    recipe = recipe_of(worker_class=f"{tmp_path / 'mine.py'}:worker")
    with pytest.raises(ConfigError, match="custom_rollout_worker_module_path: a class is wanted, not the function worker"):
        recipe.make_worker(BACKEND)
    assert any("a class is wanted" in str(f) for f in recipe.validate())
