"""What `nexrl init --agent` writes: it is valid, its tool and its reward work, and it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_world import Scripted, call

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.launch.template import write_template
from nexrl_sdk.types import ConfigError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_template(tmp_path / "shop", agent=True)
    return tmp_path / "shop"


def test_the_tool_and_the_reward(folder: Path) -> None:
    recipe = Recipe.load(folder)
    assert not recipe.validate() and len(recipe.rows()) == 256 != len(recipe.rows(validation=True))
    row = {"prompt": "What do 4 of 'tea' cost?", "answer": "48"}
    looks = [call("price", item="tea"), "48"]
    for said, reward in ((looks, 1.0), (["48"], 0.0), ([call("price", item="teas"), "48"], 0.0), ([call("price", item="tea"), "47"], 0.0)):
        (t, *_) = recipe.make_worker(Scripted(said)).run([row])
        assert (t.status, t.reward) == ("ok", reward), (said, t.error)
    assert t["turns"][0]["message"]["tool_calls"] and "keep a shop" in t["prompt_messages"][0]["content"]


def test_it_trains(folder: Path, tiny: Any) -> None:
    recipe = Recipe.load(folder, [f"model.path={tiny('qwen2', max_position_embeddings=1024)}", "rollout_worker.max_tokens=6", "data.batch_size=2", "trajectory_pool.group_size=2", "trainer.total_train_steps=1"])
    with Trainer(recipe) as trainer:
        assert {t.status for t in trainer.step().rollouts} == {"ok"}


def test_nothing_is_written_over(folder: Path) -> None:
    (folder / "recipe.yaml").unlink()
    with pytest.raises(ConfigError, match=r"agent.yaml exists already, and nothing was written"):
        write_template(folder, agent=True)
    assert not (folder / "recipe.yaml").exists()
