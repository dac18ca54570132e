"""Whole runs through Tinker's and Weaver's APIs: the numbers of the local backend, resumed runs, rollouts ahead, distillation."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from nexrl_sdk import LocalBackend, Run, Trainer
from nexrl_sdk.engine.model import LoraConfig
from nexrl_sdk.recipe.config import Recipe
from nexrl_sdk.serve.api import serve
from nexrl_sdk.trainer import RemoteApiGrpoTrainer, SelfHostedGrpoTrainer

APIS = [pytest.param(a, marks=pytest.mark.skipif(importlib.util.find_spec(a) is None, reason=f"the {a} client is not installed")) for a in ("tinker", "weaver")]
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]
ROWS = [{"prompt": f"{a}{b}: ", "answer": b + a} for a in "abcde" for b in "xyz"]


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.05 * len(answer)


@pytest.fixture(scope="module")
def model(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False)


@pytest.fixture(scope="module")
def server(model):
    with serve(*[a.values[0] for a in APIS if importlib.util.find_spec(a.values[0])], models={"org/tiny": model}, dtype="float32") as running:
        yield running


def recipe_of(api, server, model, algorithm="grpo", **sections):
    settings = {
        "data": {"rows": ROWS, "batch_size": 4}, "rollout_worker": {"max_tokens": 6, "num_workers": 2}, "trajectory_pool": {"group_size": 4},
        "trainer": {"total_train_steps": 4, "save_freq": 2, "optim": {"lr": 3e-3}},
    }  # fmt: skip
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    service = {"train_service": {"backend": api, "url": server.url, "base_model": "org/tiny"}, f"{api}_service": {"lora_rank": 4}, **settings.pop("service", {})}
    return Recipe(model={"path": str(model), "dtype": "float32"}, evaluator=reward, algorithm=algorithm, service=service, **settings)


def plain_recipe(model, algorithm, **sections):
    """The same for a backend of this process."""
    return Recipe(model={"path": str(model), "dtype": "float32"}, data={"rows": ROWS, "batch_size": 4}, evaluator=reward, algorithm=algorithm, rollout_worker={"max_tokens": 6}, trajectory_pool={"group_size": 4}, trainer={"optim": {"lr": 3e-3}}, **sections)


def adapter(model):
    """An adapter as the APIs train it, in this process."""
    return LocalBackend(model, dtype="float32", lora=LoraConfig(rank=4, alpha=32.0, train_unembed=True, seed=0))


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dr_grpo", {"type": "rloo", "mini_batch_size": 8}])
@pytest.mark.parametrize("api", APIS)
def test_the_numbers_of_the_local_backend(api, algorithm, server, model):
    """Three updates on the API's rollouts: loss and gradient norm of each are those of an adapter in this process, by the trainer of a training service."""
    recipe = recipe_of(api, server, model, algorithm)
    with adapter(model) as backend, SelfHostedGrpoTrainer(plain_recipe(model, algorithm), backend) as local, Trainer(recipe) as trainer:
        assert type(trainer) is RemoteApiGrpoTrainer and trainer.service_holder is trainer.backend.service_holder
        for step in range(3):
            result = trainer.step()
            assert {v for t in result.rollouts for v in t.weight_versions} == {step}
            here = local.train(result.rollouts)
            assert result.metrics["loss"] == pytest.approx(here["loss"], abs=1e-4)
            assert result.metrics["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("algorithm", ["grpo", "cross_entropy"])
def test_a_resumed_run_is_the_same_run(api, algorithm, server, model, tmp_path):
    recipe = recipe_of(api, server, model, algorithm)
    with Trainer(recipe, run=tmp_path / "whole") as trainer:
        whole = [h["loss"] for h in trainer.fit(progress=False)]
        trainer.rewind(2)
        again = [h["loss"] for h in trainer.fit(progress=False)]
    with Trainer(recipe, run=tmp_path / "parts") as trainer:
        trainer.fit(3, progress=False)
    with Trainer(recipe, run=Run.open(tmp_path / "parts")) as trainer:
        assert trainer.resume() == 2
        trainer.fit(progress=False)
        parts = [h["loss"] for h in trainer.history]
    assert parts == pytest.approx(whole, abs=1e-6) and again == pytest.approx(whole[2:], abs=1e-6)


@pytest.mark.parametrize("api", APIS)
def test_rollouts_ahead_of_training(api, server, model):
    with Trainer(recipe_of(api, server, model, weight={"sync_mode": "batch-async"})) as trainer:
        history = trainer.fit(progress=False)
    assert len(history) == 4 and max(h["staleness/max"] for h in history) == 1


@pytest.mark.parametrize("api", APIS)
def test_distillation_from_a_teacher_here(api, server, model, tiny):
    service = {"teacher_service": {"path": str(tiny("qwen2", kind="char", chat=False, seed=1))}}
    plain = plain_recipe(model, "opd", service=service)
    with adapter(model) as backend, Trainer(plain, backend) as local, Trainer(recipe_of(api, server, model, "opd", service=service)) as trainer:
        for _ in range(3):
            result = trainer.step()
            here = local.train(result.rollouts)
            for name in ("loss", "distill/reverse_kl", "distill/teacher_nll"):
                assert result.metrics[name] == pytest.approx(here[name], abs=1e-4)
    assert here["distill/reverse_kl"] > 0


@pytest.mark.parametrize("api", APIS)
def test_validation_before_and_after(api, server, model):
    recipe = recipe_of(api, server, model, "cross_entropy", validate={"data": {"rows": ROWS[:4]}, "temperature": 0.0}, trainer={"optim": {"lr": 3e-2}, "total_train_steps": 6, "save_freq": 0})
    with Trainer(recipe) as trainer:
        history = trainer.fit(progress=False)
        assert history[-1]["loss"] < history[0]["loss"] and len(trainer.evaluate().rollouts) == 4
