"""Whole training steps on a real engine: every preset, KL, corrections, LoRA, supervised learning, trainers of one's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nexrl_sdk import AdamParams, Batch, LocalBackend, Recipe, SelfHostedTrainer, Trainer
from nexrl_sdk.algo.losses import PRESETS
from nexrl_sdk.types import ConfigError, ContextOverflowError, DataError

ROWS = [{"prompt": f"{a}{b}: ", "answer": b + a} for a in "abcde" for b in "xyz"]


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.05 * len(answer)


@pytest.fixture(scope="module")
def model(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False)


def make(folder, algorithm="grpo", steps=4, **sections):
    settings = {
        "data": {"rows": ROWS, "batch_size": 4},
        "rollout_worker": {"max_tokens": 6, "num_workers": 2},
        "trajectory_pool": {"group_size": 4},
        "trainer": {"total_train_steps": steps, "optim": {"lr": 3e-3}},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return Trainer(Recipe(model={"path": str(folder), **settings.pop("model", {})}, evaluator=reward, algorithm=algorithm, **settings))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_takes_a_first_step_from_ratio_one(name, model):
    with make(model, name) as trainer:
        before = {n: p.detach().clone() for n, p in trainer.backend.model.parameters().items()}
        metrics = trainer.step().metrics
        assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4) and abs(metrics["policy/kl"]) < 1e-4
        assert metrics["grad_norm"] > 0 and math.isfinite(metrics["loss"])
        after = trainer.backend.model.parameters()
        assert any(not torch.equal(before[n], after[n]) for n in before)
        second = trainer.step()
        assert {v for t in second.rollouts for v in t.weight_versions} == {1}


def test_the_update_is_the_gradient_of_the_formula(model):
    """One GRPO step's gradient against autograd through transformers' own forward, in float64."""
    from transformers import AutoModelForCausalLM

    with make(model) as trainer:
        rollouts = trainer.rollout()
        batch = trainer.prepare(rollouts)
        theirs = AutoModelForCausalLM.from_pretrained(model).double()
        total, scored = torch.zeros((), dtype=torch.float64), list(rollouts)
        rewards = np.array([t.reward for t in scored])
        for i, t in enumerate(scored):
            group = rewards[[u.group_id == t.group_id for u in scored]]
            advantage = (rewards[i] - group.mean()) / (group.std(ddof=1) + 1e-6) if group.std() > 1e-9 else 0.0
            assert t.advantage == pytest.approx(advantage, abs=1e-4)
            ids, mask = torch.tensor(t.tokens), torch.tensor(t.loss_mask, dtype=torch.float64)
            lp = torch.log_softmax(theirs(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            ratio = torch.exp(lp - torch.tensor(t.logprobs, dtype=torch.float64)[1:])
            total = total - (torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask[1:]).sum() / mask.sum() / len(scored)
        total.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in theirs.parameters())).item()
        metrics = trainer.update(batch)
        assert metrics["loss"] == pytest.approx(total.item(), abs=1e-6) and metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_kl_to_the_reference_starts_at_zero_and_holds_the_policy(model):
    moved = {}
    for coef in (0.0, 5.0):
        with make(model, {"type": "grpo", "kl_loss_coef": coef}, steps=6) as trainer:
            metrics = trainer.fit(6, progress=False)
            if coef:
                assert abs(metrics[0]["policy/ref_kl"]) < 1e-6 < metrics[-1]["policy/ref_kl"]
            datums = [t.to_datum() for t in trainer.rollout()]
            now, ref = trainer.backend.forward(datums), trainer.backend.forward(datums, reference=True)
            moved[coef] = np.mean([np.abs(a - b)[d.fields["weights"] > 0].mean() for a, b, d in zip(now.logprobs, ref.logprobs, datums)])
    assert moved[5.0] < 0.7 * moved[0.0]


def test_kl_in_the_reward_with_an_adaptive_controller(model, tmp_path):
    algorithm = {"type": "reinforce++", "use_kl_in_reward": True, "critic": {"kl_ctrl": {"type": "adaptive", "kl_reward_coef": 0.1, "target_kl": 0.001, "horizon": 100}}}
    with make(model, algorithm) as trainer:
        history = trainer.fit(3, progress=False)
        assert history[0]["policy/kl_coef"] == 0.1 and history[0]["policy/ref_kl"] < 1e-5
        assert history[2]["policy/kl_coef"] != 0.1
        trainer.save(tmp_path / "ck")
        value = trainer._kl_controller.value
        trainer.step()
        trainer.load(tmp_path / "ck")
        assert trainer._kl_controller.value == value and trainer.step_count == 3


def test_correction_compares_sampler_and_learner(model):
    with make(model, {"type": "grpo", "correction": "tis"}) as trainer:
        metrics = trainer.step().metrics
        assert metrics["policy/correction_mean"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["policy/mismatch_max"] < 1e-4


def test_a_batch_that_nobody_has_scored_is_refused(model):
    with make(model) as trainer:
        rollouts = trainer.rollout()
        for t in rollouts:
            t.reward = None
        with pytest.raises(DataError, match=r"no reward yet.*score them first"):
            trainer.prepare(rollouts)
        assert len(trainer.prepare(trainer.score(rollouts))) == len(rollouts)


def test_epochs_and_mini_batches_move_the_ratio(model):
    with make(model, {"type": "grpo", "ppo_epochs": 2, "mini_batch_size": 8}) as trainer:
        batch = trainer.prepare(trainer.rollout())
        steps = []
        trainer.backend.learner.optim_step, real = (lambda *a, **k: steps.append(1) or real(*a, **k)), trainer.backend.learner.optim_step
        metrics = trainer.update(batch)
        assert len(steps) == 4 and metrics["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-6)


def test_groups_that_teach_nothing_are_left_out_or_change_nothing(model):
    with make(model, "dapo", data={"rows": ROWS, "batch_size": 4}) as trainer:
        rollouts = trainer.rollout()
        for t in rollouts[:4]:
            t.reward = 1.0
        batch = trainer.prepare(rollouts)
        assert len(batch) == 12 and batch.metadata["step_metrics"]["batch/filtered"] == 4


def test_lora_trains_the_adapter_alone(model):
    with make(model, model={"lora": {"rank": 4}}) as trainer:
        base = {n: p.detach().clone() for n, p in trainer.backend.model.base.named_parameters() if "lora_" not in n}
        trainer.fit(2, progress=False)
        assert all(torch.equal(base[n], p) for n, p in trainer.backend.model.base.named_parameters() if "lora_" not in n)
        datums = [t.to_datum() for t in trainer.rollout(1)]
        gap = trainer.backend.forward(datums).logprobs[0] - trainer.backend.forward(datums, reference=True).logprobs[0]
        assert np.abs(gap).max() > 1e-5


def test_temperature_other_than_one(model):
    with make(model, rollout_worker={"temperature": 0.6}) as trainer:
        assert trainer.step().metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_supervised_learning_lowers_the_loss(model):
    with make(model, "cross_entropy", steps=15, trainer={"optim": {"lr": 1e-2}}) as trainer:
        history = trainer.fit(15, progress=False)
        assert history[-1]["loss"] < 0.6 * history[0]["loss"]


def test_supervised_row_longer_than_the_context(model):
    rows = [{"prompt": "a", "answer": "b" * 400}]
    with make(model, "cross_entropy", data={"rows": rows, "batch_size": 1}) as trainer, pytest.raises(ContextOverflowError, match="row 0 is"):
        trainer.step()


class Documented(SelfHostedTrainer):
    """The pattern of the custom-trainers document: a parameter of its own, one advantage a sequence through the metadata."""

    def __init__(self, config):
        super().__init__(config)
        self._my_param = config.algorithm.get("my_param", 0.5)

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
        self._log_rollout_metrics(batch)
        fields = ["input_ids", "attention_mask", "position_ids", "loss_mask"]
        batch = Batch.remove_redundant_left_padding(batch, pad_token_id=self._pad_token_id, anchor_field="input_ids", fields=fields)
        batch.metadata["advantages"] = [r * self._my_param for r in batch.metadata["rewards"]]
        return batch, {"advantage_mean": float(torch.mean(batch.values["advantages"]))}


def test_a_trainer_of_ones_own_with_a_parameter_of_its_own(model):
    recipe = Recipe(model=str(model), data={"rows": ROWS, "batch_size": 4}, evaluator=reward, algorithm={"type": "grpo", "my_param": 0.25},
                    trainer_class=Documented, rollout_worker={"max_tokens": 6}, trainer={"total_train_steps": 1})  # fmt: skip
    with Trainer(recipe) as trainer:
        assert type(trainer) is Documented and trainer._my_param == 0.25
        metrics = trainer.step().metrics
        assert metrics["advantage_mean"] == pytest.approx(0.25 * metrics["reward/mean"], rel=1e-4)


def test_documents_constructor_without_a_recipe():
    from omegaconf import OmegaConf

    config = OmegaConf.create({"algorithm": {"my_param": 0.5}, "train_service": {"world_size": 1, "backend": "self-hosted", "url": "http://localhost"}})
    trainer = Documented(config)
    batch = Batch.from_trajectories([{"tokens": [3, 4, 5], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -1.0], "reward": 2.0}])
    prepared, metrics = trainer._prepare_batch(batch)
    assert prepared.values["advantages"].tolist() == [1.0] and metrics["advantage_mean"] == 1.0


def test_wrong_adam_is_refused():
    with pytest.raises(ConfigError, match="betas in"):
        AdamParams(beta1=1.0)


def test_backend_of_a_recipe_is_closed_with_its_trainer(model):
    trainer = make(model)
    backend = trainer.backend
    assert isinstance(backend, LocalBackend)
    trainer.close()
    with pytest.raises(Exception, match="closed"):
        backend.sample([[1]])
