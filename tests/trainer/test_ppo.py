"""PPO with a critic: what a batch is given, against loops; learning; and a critic that comes back with its checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk import LocalBackend, Recipe, Run, Trainer
from nexrl_sdk.recipe.check import check_recipe
from nexrl_sdk.trainer.ppo import SelfHostedPpoTrainer
from nexrl_sdk.types import CheckpointError

ROWS = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.05 * len(answer)


@pytest.fixture(scope="module")
def model(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False)


def recipe_of(model: Path, algorithm: Any = None, **more: Any) -> Recipe:
    algorithm = {"type": "ppo", "gae_lambda": 0.9, "gamma": 0.99, "critic": {"optim": {"lr": 5e-3}}, **(algorithm or {})}
    trainer = {"total_train_steps": 6, "save_freq": 2, "optim": {"lr": 3e-3}}
    return Recipe(model={"path": str(model), "dtype": "float32"}, data={"rows": ROWS, "batch_size": 8}, evaluator=reward, algorithm=algorithm, rollout_worker={"max_tokens": 6}, trajectory_pool={"group_size": 1}, trainer=trainer, **more)


@pytest.mark.parametrize("kl", [False, True])
def test_a_batch_is_given_what_the_definitions_say(model, kl):
    """Values by the critic, then delta, advantage and return in plain loops; one answer a prompt is enough."""
    with Trainer(recipe_of(model, {"use_kl_in_reward": kl, "critic": {"optim": {"lr": 5e-3}, "kl_ctrl": {"kl_reward_coef": 0.1}}})) as trainer:
        assert isinstance(trainer, SelfHostedPpoTrainer)
        trainer.fit(2, progress=False)
        rollouts = trainer.rollout()
        batch = trainer.prepare(rollouts)
        critic = trainer._critic_client.backend
        got, rows = {k: np.asarray(batch.values[k], dtype=np.float64) for k in ("advantages", "returns", "token_level_scores", "loss_mask")}, []
        assert (np.abs(got["token_level_scores"]) > 0).sum() > (len(rollouts) if kl else 0)
        for b, t in enumerate(rollouts):
            values = critic.model.base(input_ids=torch.tensor(t.tokens)[None]).logits[0, :-1, 0].detach().numpy()
            at, tokens = np.flatnonzero(got["loss_mask"][b]), np.flatnonzero(t.loss_mask)
            v, r, ahead, adv = values[tokens - 1], got["token_level_scores"][b, at], 0.0, np.zeros(len(at))
            for i in reversed(range(len(at))):
                delta = r[i] + 0.99 * (v[i + 1] if i + 1 < len(at) else 0.0) - v[i]
                adv[i] = ahead = delta + 0.99 * 0.9 * ahead
            np.testing.assert_allclose(got["returns"][b, at], adv + v, atol=1e-5)
            rows.append(adv)
        flat = np.concatenate(rows)
        want = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(np.concatenate([got["advantages"][b][got["loss_mask"][b] > 0] for b in range(len(rollouts))]), want, atol=1e-4)


def test_it_learns_and_its_critic_foresees(model):
    with Trainer(recipe_of(model).override("data.batch_size=32")) as trainer:
        history = trainer.fit(40, progress=False)
    rewards, foreseen = ([h[k] for h in history] for k in ("reward/mean", "critic/explained_variance"))
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15
    assert max(foreseen[5:]) > 0.1 and history[0]["critic/value"] == 0.0


def steps_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time") and k != "tokens/per_second"} for line in lines]


def test_a_resumed_run_has_its_critic_back(model, tmp_path):
    with Trainer(recipe_of(model), run=tmp_path / "whole") as trainer:
        trainer.fit(6, progress=False)
    with Trainer(recipe_of(model), run=tmp_path / "broken") as trainer:
        trainer.fit(5, progress=False)
    assert [p.name for p in sorted((tmp_path / "broken/checkpoints/critic").iterdir())] == ["step_000002", "step_000004"]
    with Trainer(recipe_of(model), run=Run.open(tmp_path / "broken")) as trainer:
        assert trainer.resume() == 4
        trainer.fit(2, progress=False)
    assert steps_of(tmp_path / "broken") == steps_of(tmp_path / "whole")


def test_rewind_takes_the_critic_along(model):
    with Trainer(recipe_of(model)) as trainer:
        first = trainer.fit(5, progress=False)
        for step in (3, 0):
            trainer.rewind(step)
            again = trainer.fit(5 - step, progress=False)
            for a, b in zip(again, first[step:], strict=True):
                assert a["critic/loss"] == b["critic/loss"] and a["loss"] == b["loss"]


def test_a_damaged_critic_costs_one_checkpoint(model, tmp_path):
    with Trainer(recipe_of(model), run=tmp_path / "run") as trainer:
        trainer.fit(5, progress=False)
    newest = next((tmp_path / "run/checkpoints/critic/step_000004").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with Trainer(recipe_of(model), run=Run.open(tmp_path / "run")) as trainer:
        assert trainer.resume() == 2
    shutil.rmtree(tmp_path / "run/checkpoints/critic")
    with Trainer(recipe_of(model), run=Run.open(tmp_path / "run")) as trainer, pytest.raises(CheckpointError, match="critic"):
        trainer.resume()


def test_a_critic_of_another_model_and_one_that_is_given(model, tiny, tmp_path):
    other = tiny("llama", kind="char", chat=False)
    with Trainer(recipe_of(model, service={"critic_service": {"path": str(other)}})) as trainer:
        trainer.step()
        assert trainer._critic_client.backend.model.config.model_type == "llama" and trainer.backend.model.config.model_type == "qwen2"
        trainer._critic_client.backend.export(tmp_path / "critic")
        batch = trainer.prepare(trainer.rollout())
        values = np.asarray(batch.values["values"])
    assert np.abs(values).max() > 0
    with Trainer(recipe_of(model, service={"critic_service": {"path": str(tmp_path / "critic")}})) as trainer:
        np.testing.assert_allclose(np.asarray(trainer._compute_values(batch)), values, atol=1e-5)


@pytest.mark.parametrize(("changes", "key"), [({"gae_lambda": 0.9}, "gae_lambda"), ({"gamma": 1.0}, "gamma"), ({"critic": {"optim": {"lr": 1e-3}}}, r"critic\.optim"), ({"critic": {"cliprange_value": 0.2}}, "cliprange_value")])
def test_what_has_no_effect_is_refused(model, changes, key):
    recipe = Recipe(model={"path": str(model)}, data=ROWS, evaluator=reward, algorithm={"type": "grpo", **changes})
    assert [f for f in check_recipe(recipe) if f.level == "error" and f.key.endswith(key.replace("\\", ""))]



def test_a_critic_beside_any_backend(model):
    """A backend that brings no critic: one is made in this process, and let go with the trainer."""
    with LocalBackend(model, dtype="float32") as backend:
        with Trainer(recipe_of(model), backend) as trainer:
            assert trainer.step().metrics["critic/mse"] > 0
            critic = trainer._critic_client.backend
        assert critic._closed and not backend._closed
