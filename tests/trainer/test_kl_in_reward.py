"""KL in the reward: reference logprobs of real models, both controllers, and advantages, each against transformers and numpy."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from nexrl_sdk import LocalBackend, Recipe, Trainer
from nexrl_sdk.types import Trajectory

ROWS = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.05 * len(answer)


@pytest.fixture(scope="module")
def models(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False), tiny("qwen2", kind="char", chat=False, seed=1)


def make(folder, kl_ctrl, *, kind="grpo", estimator="kl", backend=None, **sections):
    algorithm = {"type": kind, "use_kl_in_reward": True, "kl_estimator": estimator, "critic": {"kl_ctrl": kl_ctrl}}
    settings = {"rollout_worker": {"max_tokens": 6}, "trajectory_pool": {"group_size": 4}, "trainer": {"total_train_steps": 6, "optim": {"lr": 5e-3}}, **sections}
    return Trainer(Recipe(model={"path": str(folder), **settings.pop("model", {})}, data={"rows": ROWS, "batch_size": 4}, evaluator=reward, algorithm=algorithm, **settings), backend)


@functools.lru_cache(8)
def oracle(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).double()


def logprobs(folder, tokens):
    model = oracle(folder)
    ids = torch.tensor(tokens)
    with torch.no_grad():
        return torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0].numpy()


ESTIMATORS = {"kl": lambda a, b: a - b, "abs": lambda a, b: abs(a - b), "mse": lambda a, b: (a - b) ** 2 / 2, "low_var_kl": lambda a, b: np.exp(b - a) - (b - a) - 1}


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_penalised_advantages_are_those_of_numpy(models, tmp_path, estimator):
    """After some steps: policy and reference by transformers, penalty and group statistics by hand."""
    coef = 0.3
    with make(models[0], {"type": "fixed", "kl_reward_coef": coef}, estimator=estimator) as trainer:
        trainer.fit(3, progress=False)
        now = trainer.backend.export(tmp_path / "now")
        rollouts = trainer.rollout()
        batch = trainer.prepare(rollouts)
        returns, kls = [], []
        for t in rollouts:
            mask = np.array(t.loss_mask[1:]) == 1
            kl = ESTIMATORS[estimator](logprobs(now, t.tokens), logprobs(models[0], t.tokens))[mask]
            returns.append(t.reward - coef * kl.sum())
            kls.append(kl.mean())
        found = np.asarray(batch.values["token_level_scores"]).sum(1)
        assert found == pytest.approx(np.array(returns), abs=2e-3)
        for i, t in enumerate(rollouts):
            group = np.array([r for r, u in zip(returns, rollouts) if u.group_id == t.group_id])
            assert t.advantage == pytest.approx((returns[i] - group.mean()) / (group.std(ddof=1) + 1e-6), abs=2e-2)
        metrics = batch.metadata["step_metrics"]
        assert metrics["policy/ref_kl"] == pytest.approx(np.mean(kls), abs=1e-3) and metrics["policy/kl_coef"] == coef
        assert metrics["policy/ref_kl"] > 1e-4 or estimator == "kl"


def test_the_adaptive_controller_follows_its_rule(models):
    """Ziegler et al., 2019: coefficient times 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon, step after step."""
    settings = {"type": "adaptive", "kl_reward_coef": 0.1, "target_kl": 0.05, "horizon": 64}
    with make(models[0], settings, estimator="low_var_kl") as trainer:
        history = trainer.fit(6, progress=False)
    coef = 0.1
    for h in history:
        assert h["policy/kl_coef"] == pytest.approx(coef, rel=1e-6)
        coef *= 1 + np.clip(h["policy/ref_kl"] / 0.05 - 1, -0.2, 0.2) * h["batch/sequences"] / 64
    assert history[1]["policy/kl_coef"] < 0.1 < max(h["policy/ref_kl"] for h in history)  # it falls while the policy is near, and the policy moves


def test_a_fixed_coefficient_holds_the_policy(models):
    ends = {}
    for coef in (0.0, 5.0):
        with make(models[0], {"type": "fixed", "kl_reward_coef": coef}, kind="reinforce++", estimator="kl", trainer={"total_train_steps": 12, "optim": {"lr": 3e-3}}) as trainer:
            ends[coef] = np.mean([abs(h["policy/ref_kl"]) for h in trainer.fit(12, progress=False)[-4:]])
    assert ends[5.0] < 0.7 * ends[0.0]


def test_a_reference_service_takes_the_place_of_the_first_weights(models):
    with make(models[0], {"type": "fixed", "kl_reward_coef": 0.1}, service={"reference_service": {"path": str(models[1]), "role": "reference"}}) as trainer:
        rollouts = trainer.rollout()
        metrics = trainer.prepare(rollouts).metadata["step_metrics"]
        kls = [(logprobs(models[0], t.tokens) - logprobs(models[1], t.tokens))[np.array(t.loss_mask[1:]) == 1].mean() for t in rollouts]
        assert metrics["policy/ref_kl"] == pytest.approx(np.mean(kls), abs=1e-3)


def test_the_reference_of_an_adapter_is_the_model_without_it(models):
    with make(models[0], {"type": "fixed", "kl_reward_coef": 0.1}, model={"lora": {"rank": 4}}, estimator="low_var_kl") as trainer:
        history = trainer.fit(4, progress=False)
        assert abs(history[0]["policy/ref_kl"]) < 1e-6 < history[-1]["policy/ref_kl"]
        t = trainer.rollout()[0]
        mask = np.array(t.loss_mask[1:]) == 1
        found = np.asarray(trainer._compute_ref_log_probs(trainer.prepare([t])))[0]
        assert found[-len(mask):][mask] == pytest.approx(logprobs(models[0], t.tokens)[mask], abs=1e-3)


def test_sum_of_rewards_is_kept_where_nothing_moved(models):
    """Before the first step policy and reference are one, and the penalty is nothing."""
    with LocalBackend(models[0]) as backend:
        trainer = make(models[0], {"type": "fixed", "kl_reward_coef": 10.0}, backend=backend)
        rollouts: list[Trajectory] = trainer.rollout()
        batch = trainer.prepare(rollouts)
        assert np.asarray(batch.values["token_level_scores"]).sum(1) == pytest.approx(np.array([t.reward for t in rollouts]), abs=1e-3)
