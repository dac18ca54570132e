"""Remote trainers: the same numbers as a training service's, what is sent, what is left out, and how a run goes on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nexrl_sdk import LocalBackend, MockBackend, RemoteApiTrainer, Run, Trainer, Trajectory
from nexrl_sdk.backend.api import wire_config, wire_inputs
from nexrl_sdk.recipe.config import Recipe
from nexrl_sdk.trainer import RemoteApiCrossEntropyTrainer, RemoteApiGrpoTrainer, RemoteApiOpdTrainer, SelfHostedCrossEntropyTrainer, SelfHostedGrpoTrainer, SelfHostedOpdTrainer
from nexrl_sdk.trainer.remote import BackendServiceHolder, convert_trajectories_to_datums
from nexrl_sdk.types import BackendError, ConfigError, Datum, EvaluatorError, Interrupted, NonFiniteError

ROWS = [{"prompt": f"{a}{b}: ", "answer": b + a} for a in "abcde" for b in "xyz"]
KIN = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++")


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.05 * len(answer)


@pytest.fixture(scope="module")
def model(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False)


def recipe_of(folder, algorithm="grpo", **sections):
    settings = {
        "data": {"rows": ROWS, "batch_size": 4},
        "rollout_worker": {"max_tokens": 6, "num_workers": 2},
        "trajectory_pool": {"group_size": 4},
        "trainer": {"total_train_steps": 4, "optim": {"lr": 3e-3}},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return Recipe(model={"path": str(folder), **settings.pop("model", {})}, evaluator=reward, algorithm=algorithm, **settings)


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.backend.model.parameters().items()}


class WireHolder(BackendServiceHolder):
    """A training API behind its wire: loss inputs alone, without weights of tokens beside them."""

    def train(self, datums, config):
        loss = config["loss_fn"]
        sent = []
        for d in datums:
            fields = wire_inputs(d, loss)
            sent.append(Datum(d.tokens, fields.pop("target_tokens"), fields))
        return super().train(sent, {**config, "loss_config": wire_config(datums, loss, config["loss_config"])})


def both(hosted, remote, recipe, holder=BackendServiceHolder, edit=lambda rollouts: None):
    """The metrics and the weights after one update by each, on the same rollouts."""
    found = []
    with hosted(recipe) as first:
        rollouts = first.rollout()
        edit(rollouts)
        found.append((first.train(rollouts), weights(first)))
    with remote(recipe) as second:
        assert isinstance(second.service_holder, BackendServiceHolder)
        second.set_service_holder(holder(second.backend))
        found.append((second.train(rollouts), weights(second)))
    return found


def same(found, exact=("loss", "grad_norm", "batch/skipped_zero_advantage", "advantage/mean", "advantage/max", "reward/mean")):
    (a, before), (b, after) = found
    for name in exact:
        assert (name in a) == (name in b) and (name not in a or b[name] == pytest.approx(a[name], abs=1e-6, rel=1e-5)), name
    assert all(torch.allclose(before[n], after[n], atol=1e-5) for n in before)


# -- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("holder", [BackendServiceHolder, WireHolder])
@pytest.mark.parametrize("name", KIN)
def test_the_first_step_is_that_of_a_training_service(name, holder, model):
    same(both(SelfHostedGrpoTrainer, RemoteApiGrpoTrainer, recipe_of(model, name), holder))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum", "dr_grpo"])
def test_every_aggregation_over_the_wire(mode, model):
    same(both(SelfHostedGrpoTrainer, RemoteApiGrpoTrainer, recipe_of(model, {"type": "grpo", "loss_agg_mode": mode, "clip_ratio_high": 0.28}), WireHolder))


@pytest.mark.parametrize("holder", [BackendServiceHolder, WireHolder])
def test_epochs_and_mini_batches(holder, model):
    found = both(SelfHostedGrpoTrainer, RemoteApiGrpoTrainer, recipe_of(model, {"type": "grpo", "ppo_epochs": 2, "mini_batch_size": 8}), holder)
    same(found, ("loss", "grad_norm", "batch/skipped_zero_advantage", "policy/ratio_mean"))
    assert found[1][0]["batch/optimizer_steps"] == 4


def test_dro_keeps_every_sequence(model):
    recipe = recipe_of(model, {"type": "grpo", "loss_fn": "dro", "loss_agg_mode": "token-mean"})

    def level(rollouts):
        for t in rollouts[:4]:  # one group without an advantage
            t.reward = 0.5

    found = both(SelfHostedGrpoTrainer, RemoteApiGrpoTrainer, recipe, edit=level)
    same(found)
    assert found[1][0]["batch/skipped_zero_advantage"] == 0
    fewer = both(SelfHostedGrpoTrainer, RemoteApiGrpoTrainer, recipe_of(model, {"type": "grpo", "loss_agg_mode": "token-mean"}), edit=level)
    assert fewer[1][0]["batch/skipped_zero_advantage"] == 4, "a loss without a penalty leaves them out"


@pytest.mark.parametrize("holder", [BackendServiceHolder, WireHolder])
def test_supervised_learning(holder, model):
    same(both(SelfHostedCrossEntropyTrainer, RemoteApiCrossEntropyTrainer, recipe_of(model, {"type": "cross_entropy", "mini_batch_size": 2}), holder))


@pytest.mark.parametrize("holder", [BackendServiceHolder, WireHolder])
def test_distillation(holder, model, tiny):
    teacher = tiny("qwen2", kind="char", chat=False, seed=1)
    found = both(SelfHostedOpdTrainer, RemoteApiOpdTrainer, recipe_of(model, "opd", service={"teacher_service": {"path": str(teacher)}}), holder)
    same(found, ("loss", "grad_norm", "distill/reverse_kl", "distill/teacher_nll"))
    assert found[1][0]["distill/reverse_kl"] > 0


def test_the_loss_is_the_formula(model):
    """The first loss of dr_grpo against float64 autograd through transformers' own forward."""
    from transformers import AutoModelForCausalLM

    with RemoteApiGrpoTrainer(recipe_of(model, "dr_grpo")) as trainer:
        prepared = trainer.prepare(trainer.rollout())
        theirs, total = AutoModelForCausalLM.from_pretrained(model).double(), torch.zeros((), dtype=torch.float64)
        rewards = np.array([t.reward for t in prepared])
        for i, t in enumerate(prepared):
            advantage = rewards[i] - rewards[[u.run_id == t.run_id for u in prepared]].mean()
            ids = torch.tensor(t.tokens)
            lp = torch.log_softmax(theirs(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            ratio = torch.exp(lp - torch.tensor(t.logprobs, dtype=torch.float64)[1:])
            total = total - (ratio * advantage * torch.tensor(t.loss_mask)[1:]).sum() / 6 / len(prepared)
        total.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in theirs.parameters())).item()
        metrics = trainer.update(prepared)
    assert metrics["loss"] == pytest.approx(total.item(), abs=1e-6) and metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


# -- what is sent ---------------------------------------------------------------------------------


def trajectory(advantage=1.0, mask=(0, 1, 1), **fields):
    return Trajectory(**{"tokens": [5, 6, 7], "loss_mask": list(mask), "logprobs": [0.0, -1.0, -2.0], "advantage": advantage, "run_id": "r", **fields})


def test_datums_are_shifted_by_one():
    (d,) = convert_trajectories_to_datums([trajectory(2.0)], "ppo", "token-sum")
    assert d.tokens.tolist() == [5, 6] and d.targets.tolist() == [6, 7]
    assert {k: v.tolist() for k, v in d.fields.items()} == {"weights": [1.0, 1.0], "logprobs": [-1.0, -2.0], "advantages": [2.0, 2.0]}
    (d,) = convert_trajectories_to_datums([trajectory(None, mask=(0, 0, 1), logprobs=[])], "cross_entropy")
    assert d.fields["weights"].tolist() == [0.0, 1.0] and "advantages" not in d.fields
    (d,) = convert_trajectories_to_datums([trajectory(None, advantages=[9.0, 0.5, -0.5])], "importance_sampling")
    assert d.fields["advantages"].tolist() == [0.5, -0.5]


def test_weights_count_what_is_left_out():
    rows = [trajectory(1.0), trajectory(0.0), trajectory(-1.0, mask=(0, 0, 1)), trajectory(1.0, mask=(0, 0, 0))]
    assert [d.fields["weights"].tolist() for d in convert_trajectories_to_datums(rows)] == [pytest.approx([0.2, 0.2]), pytest.approx([0.0, 0.2])]
    by_sequence = convert_trajectories_to_datums(rows, "ppo", "seq-mean-token-mean")
    assert [d.fields["weights"].tolist() for d in by_sequence] == [pytest.approx([1 / 6, 1 / 6]), pytest.approx([0.0, 1 / 3])]
    assert [d.fields["weights"].sum() for d in convert_trajectories_to_datums(rows, "ppo", "dr_grpo", {"max_tokens": 10})] == [pytest.approx(2 / 30), pytest.approx(1 / 30)]
    assert len(convert_trajectories_to_datums(rows, "dro")) == len(convert_trajectories_to_datums(rows, "ppo", keep_all=True)) == 3


def test_what_a_loss_lacks_is_said():
    with pytest.raises(ConfigError, match="1 trajectories have no advantage"):
        convert_trajectories_to_datums([trajectory(None)])
    with pytest.raises(ConfigError, match="1 trajectories have no logprobs"):
        convert_trajectories_to_datums([trajectory(logprobs=[])])
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        convert_trajectories_to_datums([trajectory()], "cisp")
    with pytest.raises(ConfigError, match=r"config\.learning_rte is not known"):
        BackendServiceHolder(MockBackend()).train([], {"learning_rte": 1.0})


class Recorder:
    """A service holder that keeps what it was sent."""

    def __init__(self, fail_at=None):
        self.sent, self.fail_at = [], fail_at

    def train(self, datums, config):
        if len(self.sent) == self.fail_at:
            raise NonFiniteError("the loss is not finite")
        self.sent.append((list(datums), dict(config)))
        return {"metrics": {"loss": float(len(datums))}}


def recorded(recipe, cls=RemoteApiGrpoTrainer, **kwargs):
    trainer = cls(recipe, MockBackend())
    trainer.set_service_holder(holder := Recorder(**kwargs))
    return trainer, holder


def test_what_the_api_is_told():
    optim = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.1, "grad_clip": 0.5, "warmup_steps": 4}
    trainer, holder = recorded(recipe_of("mock", {"type": "dapo", "clip_ratio_low": 0.1}, trainer={"optim": optim}))
    trainer.fit(2, progress=False)
    (_, first), (_, second) = holder.sent
    assert first == {"loss_fn": "ppo", "loss_config": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.28}, "learning_rate": pytest.approx(0.25e-3), "beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    assert second["learning_rate"] == pytest.approx(0.5e-3)


def test_no_signal_is_no_step():
    recipe = recipe_of("mock", {"type": "grpo", "mini_batch_size": 4})
    trainer, holder = recorded(recipe)
    rollouts = trainer.rollout()
    for t in rollouts[4:]:
        t.reward = 1.0
    metrics = trainer.train(rollouts)
    assert len(holder.sent) == metrics["batch/optimizer_steps"] == 1 and trainer.step_count == 1
    assert metrics["batch/skipped_zero_advantage"] == pytest.approx(3.0), "the mean over the four mini-batches"
    trainer, holder = recorded(recipe_of("mock", "dapo"))
    for t in (rollouts := trainer.rollout()):
        t.reward = 1.0
    metrics = trainer.train(rollouts)
    assert not holder.sent and metrics["batch/filtered"] == 16 and metrics["batch/sequences"] == 16


def test_a_step_that_breaks_off_says_how_far_it_came():
    trainer, _ = recorded(recipe_of("mock", {"type": "grpo", "mini_batch_size": 8}), fail_at=1)
    with pytest.raises(NonFiniteError, match="1 optimizer steps of this batch had been taken before it"):
        trainer.step()
    assert trainer.step_count == 0
    with pytest.raises(BackendError, match=r"broken off half-way: call rewind\(0\)"):
        trainer.step()
    trainer.service_holder.fail_at = len(trainer.service_holder.sent)  # the first call of what is tried next
    with pytest.raises(NonFiniteError):
        trainer.train(trainer.rollout())
    with pytest.raises(BackendError, match=r"broken off half-way: call rewind\(0\)"):
        trainer.step()
    trainer, _ = recorded(recipe_of("mock"), fail_at=0)
    with pytest.raises(NonFiniteError, match=r"^the loss is not finite$"):
        trainer.step()
    trainer.service_holder.fail_at = None
    assert trainer.step().step == 1, "nothing was trained before, so the step can be repeated"
    trainer, holder = recorded(recipe_of("mock"))
    trainer._stop_event.set()
    with pytest.raises(Interrupted):
        trainer.update(trainer.prepare([trajectory(reward=float(i), run_id="a") for i in range(2)]))
    assert not holder.sent


def test_an_evaluator_that_never_scores_is_an_error():
    trainer, holder = recorded(recipe_of("mock"))
    with pytest.raises(EvaluatorError, match="2 of 2 are unscored"):
        trainer.train([trajectory(reward=None, status="unscored", error="no") for _ in range(2)])
    assert not holder.sent


# -- the class for a backend and an algorithm ------------------------------------------------------


@pytest.mark.parametrize("api", ["tinker", "weaver"])
@pytest.mark.parametrize(("algorithm", "cls"), [*((name, RemoteApiGrpoTrainer) for name in KIN), ("cross_entropy", RemoteApiCrossEntropyTrainer)])
def test_trainer_takes_the_class_for_the_api(api, algorithm, cls):
    trainer = Trainer(recipe_of("mock", algorithm, service={"train_service": {"backend": api}}), MockBackend())
    assert type(trainer) is cls and trainer.step().step == 1


def test_the_holder_of_a_backend_is_used():
    backend = MockBackend()
    backend.service_holder = Recorder()
    Trainer(recipe_of("mock", service={"train_service": {"backend": "tinker", "config": {"loss_fn": "importance_sampling", "learning_rate": 3e-3}}}), backend).step()
    ((_, config),) = backend.service_holder.sent
    assert (config["loss_fn"], config["loss_config"], config["learning_rate"]) == ("importance_sampling", {}, 3e-3)


class Mine(RemoteApiTrainer):
    def _prepare_trajectories(self, trajectories, metrics):
        for t in trajectories:
            t.advantage = t.reward
        return trajectories


@pytest.mark.parametrize(
    ("algorithm", "worker", "key"),
    [({"type": "grpo", "kl_loss_coef": 0.1}, {}, "algorithm.kl_loss_coef"), ({"type": "grpo", "correction": "tis"}, {}, "algorithm.correction"), ("grpo", {"temperature": 0.5}, "rollout_worker.temperature"), ("ppo", {}, "algorithm.type")],
)
def test_what_an_api_cannot_do_is_refused_before_it_is_reached(algorithm, worker, key):
    recipe = recipe_of("mock", algorithm, rollout_worker=worker, service={"train_service": {"backend": "weaver"}})
    with pytest.raises(ConfigError, match=key):
        Trainer(recipe, MockBackend())
    with pytest.raises(ConfigError, match=key):
        Mine(recipe, MockBackend())


def test_a_trainer_of_ones_own_is_not_given_what_its_loss_would_not_see():
    with pytest.raises(ConfigError, match=r"algorithm.clip_ratio: Mine learns by importance_sampling"):
        recorded(recipe_of("mock", {"type": "grpo", "clip_ratio": 0.05}), Mine)
    trainer, _ = recorded(recipe_of("mock", {"type": "grpo", "loss_fn": "ppo", "clip_ratio": 0.05}), Mine)
    assert trainer.train_config()["loss_config"]["clip_low_threshold"] == 0.95
    trainer, _ = recorded(recipe_of("mock", weight={"sync_mode": "fully-async"}), Mine)
    assert trainer.train_config()["loss_fn"] == "ppo", "answers of older weights need a loss that clips"


def test_a_trainer_of_ones_own_keeps_its_loss_and_temperature():
    trainer, holder = recorded(recipe_of("mock", rollout_worker={"temperature": 0.5}), Mine)
    trainer.step()
    assert holder.sent[0][1]["loss_fn"] == "importance_sampling" and holder.sent[0][1]["loss_config"] == {"temperature": 0.5}


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cls", [RemoteApiGrpoTrainer, RemoteApiCrossEntropyTrainer])
def test_a_resumed_run_is_the_same_run(cls, model, tmp_path):
    recipe = recipe_of(model, "cross_entropy" if cls is RemoteApiCrossEntropyTrainer else {"type": "grpo", "mini_batch_size": 8}, trainer={"save_freq": 2})
    with cls(recipe, run=tmp_path / "whole") as trainer:
        whole, end = trainer.fit(progress=False), weights(trainer)
    with cls(recipe, run=tmp_path / "parts") as trainer:
        trainer.fit(3, progress=False)
    with cls(recipe, run=Run.open(tmp_path / "parts")) as trainer:
        assert trainer.resume() == 2
        trainer.fit(progress=False)
        again = trainer.history
        assert all(torch.equal(end[n], p) for n, p in weights(trainer).items())
        trainer.rewind(2)
        trainer.fit(progress=False)
        assert all(torch.equal(end[n], p) for n, p in weights(trainer).items())
    assert [h["loss"] for h in again] == [h["loss"] for h in whole]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["batch-async", "fully-async"])
def test_rollouts_may_run_ahead(mode, model):
    with RemoteApiGrpoTrainer(recipe_of(model, "rloo", weight={"sync_mode": mode})) as trainer:
        assert (trainer._config.algorithm.correction, trainer._config.algorithm.do_old_log_prob_compute, trainer._loss_fn) == ("none", False, "ppo")
        history = trainer.fit(progress=False)
    assert len(history) == 4 and all(math.isfinite(h["loss"]) for h in history) and max(h["staleness/max"] for h in history) > 0


def test_validation_and_supervision(model):
    recipe = recipe_of(model, "cross_entropy", validate={"data": {"rows": ROWS[:4]}, "temperature": 0.0})
    with RemoteApiCrossEntropyTrainer(recipe) as trainer:
        history = trainer.fit(progress=False)
        assert history[-1]["loss"] < history[0]["loss"] and len(trainer.evaluate().rollouts) == 4


def test_an_opd_teacher_without_an_address_is_asked_for(model):
    recipe = recipe_of(model, "opd", service={"train_service": {"backend": "tinker"}, "teacher_service": {"backend": "http", "path": "t"}})
    with LocalBackend(model) as backend, pytest.raises(ConfigError, match=r"service.teacher_service.url: missing; the student is not trained in a service"):
        Trainer(recipe, backend)


def test_a_closed_backend_says_so(model):
    trainer = RemoteApiGrpoTrainer(recipe_of(model))
    prepared = trainer.prepare(trainer.rollout())
    trainer.close()
    with pytest.raises(BackendError, match="closed"):
        trainer.update(prepared)
