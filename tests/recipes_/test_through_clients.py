"""The recipes that start a server and train through Tinker's and Weaver's own clients: they learn what they are there to show."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.trainer import RemoteApiCrossEntropyTrainer, RemoteApiGrpoTrainer

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
APIS = [pytest.param(a, marks=pytest.mark.skipif(importlib.util.find_spec(a) is None, reason=f"the {a} client is not installed")) for a in ("tinker", "weaver")]
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def kept_models(tmp_path, monkeypatch):
    """Models are made where they may be, or have been."""
    monkeypatch.setenv("NEXRL_CACHE", os.environ.get("NEXRL_CACHE", str(tmp_path / "cache")))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("name", "kind", "steps", "before", "after"),
    [
        ("pig_latin", RemoteApiCrossEntropyTrainer, 60, 0.01, 0.9),  # a third of its steps
        ("reverse", RemoteApiGrpoTrainer, 120, 0.45, 0.8),  # two fifths
    ],
)
def test_held_out_rewards_rise(api, name, kind, steps, before, after):
    recipe = Recipe.load(RECIPES / name / f"{api}.yaml", ["validate.max_samples=128", "logger.backend=[file]", "trainer.save_freq=0"])
    with Trainer(recipe) as trainer:
        assert type(trainer) is kind and type(trainer.service_holder).__module__ == f"nexrl_sdk.backend.{api}"
        assert trainer.evaluate().metrics["val/reward/mean"] < before
        trainer.fit(steps, progress=False)
        reached = trainer.evaluate()
    assert reached.metrics["val/reward/mean"] > after
    assert {v for t in reached.rollouts for v in t.weight_versions} == {steps}
