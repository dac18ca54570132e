"""Trainers of a bare configuration, as the documents have it, against a real training service with two groups in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nexrl_sdk import LocalBackend, Recipe, Trainer
from nexrl_sdk.backend.http import MockTrainServiceClient
from nexrl_sdk.backend.train_server import start_train_service
from nexrl_sdk.trainer import SelfHostedGrpoTrainer, SelfHostedOpdTrainer, SelfHostedPpoTrainer
from nexrl_sdk.types import ConfigError

ROWS = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.05 * len(answer)


@pytest.fixture(scope="module")
def models(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False), tiny("qwen2", kind="char", chat=False, seed=1)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with start_train_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def recipe_of(models, algorithm):
    return Recipe(model={"path": str(models[0]), "dtype": "float32"}, data={"rows": ROWS, "batch_size": 4}, evaluator=reward, algorithm=algorithm, rollout_worker={"max_tokens": 6},
                  trajectory_pool={"group_size": 4}, trainer={"total_train_steps": 3, "optim": {"lr": 3e-3}}, service={"teacher_service": {"path": str(models[1])}} if algorithm == "opd" or algorithm["type"] == "opd" else {})  # fmt: skip


def bare(service, models, algorithm, tag):
    """The documents' layout: named services, each with its role and its model."""

    def section(role, path):
        return {"backend": "http", "url": service.url, "api_key": service.key, "identifier": f"{role}-{tag}", "role": role, "resource": {"world_size": 1}, "actor": {"model": {"path": str(path), "dtype": "float32"}}}

    other = {"opd": ("teacher", models[1]), "ppo": ("critic", models[0])}.get(tag)
    services = {"student_service": section("actor", models[0]), **({"other_service": section(*other)} if other else {})}
    return OmegaConf.create({"train_service": services, "algorithm": algorithm, "optim": {"lr": 3e-3}, "rollout_worker": {"max_tokens": 6}, "total_train_steps": 3})


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("cls", "algorithm", "tag"), [
    (SelfHostedOpdTrainer, {"type": "opd"}, "opd"),
    (SelfHostedGrpoTrainer, {"type": "grpo", "use_kl_in_reward": True, "critic": {"kl_ctrl": {"type": "adaptive", "kl_reward_coef": 0.1, "target_kl": 0.01, "horizon": 50}}}, "kl"),
    (SelfHostedPpoTrainer, {"type": "ppo", "critic": {"optim": {"lr": 1e-2}, "cliprange_value": 0.3}, "ppo_epochs": 2}, "ppo"),
])  # fmt: skip
def test_the_same_numbers_as_in_process(service, models, cls, algorithm, tag):
    """Three steps on the same rollouts: loss, gradient norm, KL and coefficient agree to 1e-5."""
    remote = cls(bare(service, models, algorithm, tag))
    remote.initialize_workers()
    with Trainer(recipe_of(models, algorithm)) as local:
        for _ in range(3):
            rollouts = local.rollout()
            mine, theirs = local.train(rollouts), remote.train(list(rollouts))
            local.publish()
            for name in ("loss", "grad_norm", "distill/reverse_kl", "policy/ref_kl", "policy/kl_coef", "critic/loss", "critic/grad_norm", "critic/explained_variance"):
                assert (name in mine) == (name in theirs)
                assert mine.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=1e-5, abs=1e-6), name
        after = local._train_service_client.compute_log_prob(local.prepare(rollouts).to_nextrainer_batch())["tensors"]["old_log_probs"]
    there = remote._compute_old_log_probs(remote.prepare(list(rollouts)))
    assert np.asarray(there) == pytest.approx(np.asarray(after), abs=1e-4) and remote.step_count == 3


@pytest.mark.timeout(120)
def test_a_teacher_elsewhere_and_a_student_here(service, models):
    """A recipe that trains in this process and asks a service for the teacher; the group is let go at the end."""
    recipe = recipe_of(models, "opd").override("service.teacher_service.backend=http", f"service.teacher_service.url={service.url}", f"service.teacher_service.api_key={service.key}", "service.teacher_service.identifier=far")
    with Trainer(recipe) as trainer, Trainer(recipe_of(models, "opd")) as other:
        assert "far" in str(trainer._teacher_client.get_models())
        assert trainer.step().metrics["distill/reverse_kl"] == pytest.approx(other.step().metrics["distill/reverse_kl"], abs=1e-5)
    assert "far" not in str(service.client("far").get_models())


def test_a_teacher_over_http_needs_its_address(models):
    with pytest.raises(ConfigError, match=r"service\.teacher_service\.url: missing"):
        Trainer(recipe_of(models, "opd").override("service.teacher_service.backend=http"))


def test_what_a_service_is_told(models):
    """initialize_workers, then init_model: the documents' actor section as it is, and the number of processes."""
    section = {"backend": "mock", "identifier": "nexrl0", "world_size": 8, "actor": {"model": {"path": "org/model"}, "optim": {"lr": 2e-6}, "ppo_epochs": 2}}
    trainer = SelfHostedGrpoTrainer(OmegaConf.create({"train_service": section, "algorithm": {"type": "grpo"}}))
    client = trainer._train_service_client
    assert isinstance(client, MockTrainServiceClient) and client.identifier == "nexrl0" and client.calls == []
    trainer.initialize_workers()
    (first, told), (second, _) = client.calls
    assert (first, second, told["world_size"], told["role"]) == ("initialize_worker", "init_model", 8, "actor")
    assert told["config_dict"] == {"actor": {"optim": {"lr": 2e-6}, "ppo_epochs": 2}, "model": {"path": "org/model"}}


def test_services_without_roles_are_told_apart_or_refused():
    two = {"a": {"backend": "mock"}, "b": {"backend": "mock"}}
    with pytest.raises(ConfigError, match="two services have the role 'actor'"):
        _ = SelfHostedGrpoTrainer(OmegaConf.create({"train_service": two}))._train_service_client
    with pytest.raises(ConfigError, match="none has the role 'teacher'"):
        _ = SelfHostedOpdTrainer(OmegaConf.create({"train_service": {"backend": "mock"}, "algorithm": {"type": "opd"}}))._teacher_client
    with pytest.raises(ConfigError, match="is 'local'"):
        _ = SelfHostedGrpoTrainer(OmegaConf.create({"train_service": {"backend": "local"}}))._train_service_client


def test_a_client_of_ones_own(models):
    """As the documents' __init__ assigns it."""
    with LocalBackend(models[0], dtype="float32") as backend:
        trainer = SelfHostedGrpoTrainer(OmegaConf.create({"algorithm": {"type": "grpo"}, "optim": {"lr": 1e-3}}))
        trainer._train_service_client = backend.train_service
        trainer.initialize_workers()
        assert backend.train_service.config.lr == 1e-3
