"""Recipes for training APIs: the documents' spellings, what follows from a backend, and what an API cannot do."""

from __future__ import annotations

import pytest
import yaml

from nexrl_sdk import Recipe
from nexrl_sdk.recipe.check import check_api
from nexrl_sdk.types import ConfigError

BASE = {"model": {"path": "org/m"}, "data": {"data_files": "x.jsonl"}, "rollout_worker": {"evaluator_module_path": "a.py:b"}}
TINKER = {"service": {"train_service": {"backend": "tinker"}}}


def complaint(extra) -> str:
    with pytest.raises(ConfigError) as e:
        Recipe.from_dict(merged(BASE, extra))
    return str(e.value)


def merged(base, extra):
    out = dict(base)
    for key, value in extra.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


DOCUMENTS = """
trainer: {type: remote_api_grpo, total_train_steps: 1000, max_prompt_length: 15000, max_response_length: 13000}
service:
  train_service:
    backend: "%s"
    url: http://api:8000
    config: {loss_fn: importance_sampling, learning_rate: 2e-6, beta1: 0.9, beta2: 0.99, eps: 1e-7, weight_decay: 0.01, grad_clip_norm: 0.5}
  %s_service: {lora_rank: 16, api_key: your-api-key, base_url: null, base_model: org/other}
"""


@pytest.mark.parametrize("api", ["tinker", "weaver"])
def test_the_documents_spelling(api):
    c = Recipe.from_dict(merged(BASE, yaml.safe_load(DOCUMENTS.replace("2e-6", "2.0e-6").replace("1e-7", "1.0e-7") % (api, api)))).config
    o, s = c.trainer.optim, c.service
    assert (o.lr, list(o.betas), o.eps, o.weight_decay, o.grad_clip) == (2e-6, [0.9, 0.99], 1e-7, 0.01, 0.5)
    assert (c.algorithm.type, c.algorithm.loss_fn, c.trainer.type) == ("grpo", "importance_sampling", "remote_api_grpo")
    assert (s.train_service.backend, s.inference_service.backend, s.train_service.url, s.train_service.base_model, s.train_service.api_key) == (api, api, "http://api:8000", "org/other", "your-api-key")
    assert dict(c.model.lora) == {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear"}


def test_what_follows_from_the_backend():
    recipe = Recipe.from_dict(merged(BASE, TINKER))
    c = recipe.config
    assert c.model.lora.rank == 32 and c.service.inference_service.backend == "tinker"
    again = recipe.override("model.lora.rank=8", "trainer.total_train_steps=3")
    assert (again.config.model.lora.rank, again.config.service.inference_service.backend, again.config.trainer.total_train_steps) == (8, "tinker", 3)
    assert Recipe.from_dict(merged(BASE, {**TINKER, "model": {"path": "m", "lora": None}, "service": {"train_service": {"backend": "tinker"}, "tinker_service": {"lora_rank": 4}}})).config.model.lora.rank == 4
    named = Recipe.from_dict({**BASE, "model": {}, "service": {"train_service": {"backend": "weaver", "url": "http://x:1", "base_model": "org/there"}}})
    assert named.model_path() == "org/there"


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({"trainer": {"type": "remote_api_cross_entropy"}}, "cross_entropy"),
        ({"trainer": {"type": "remote_api_opd"}, "service": {"teacher_service": {"path": "t"}}}, "opd"),
        ({"service": {"train_service": {"config": {"loss_fn": "cross_entropy"}}}}, "cross_entropy"),
        ({"trainer": {"type": "remote_api_grpo"}, "algorithm": {"type": "rloo"}}, "rloo"),
    ],
)
def test_a_trainer_or_a_loss_stands_for_an_algorithm(extra, kind):
    assert Recipe.from_dict(merged(merged(BASE, TINKER), extra)).config.algorithm.type == kind


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"trainer": {"type": "self_hosted_grpo"}}, "trainer.type: 'self_hosted_grpo': 'tinker' is a training API; use 'remote_api_grpo'"),
        ({"trainer": {"type": "self_hosted_ppo"}}, "use 'remote_api_grpo'"),
        ({"trainer": {"type": "remote_api_gpro"}}, "did you mean 'remote_api_grpo'?"),
        ({"trainer": {"type": "remote_api_cross_entropy"}, "algorithm": {"type": "grpo"}}, "algorithm.type: 'grpo' is not what trainer.type 'remote_api_cross_entropy' learns by"),
        ({"trainer": {"type": "remote_api_grpo"}, "algorithm": {"type": "opd"}}, "algorithm.type: 'opd' is not what trainer.type 'remote_api_grpo' learns by"),
        ({"algorithm": {"type": "grpo", "loss_fn": "cross_entropy"}}, "algorithm.type: 'grpo' is not what algorithm.loss_fn 'cross_entropy' learns by"),
        ({"model": {"lora": {"alpha": 16.0}}}, "model.lora.alpha: 16.0, and tinker trains adapters with 32"),
        ({"model": {"lora": {"dropout": 0.1}}}, "model.lora.dropout"),
        ({"model": {"lora": {"target_modules": ["q_proj"]}}}, "model.lora.target_modules"),
        ({"service": {"train_service": {"world_size": 2}}}, "service.train_service.world_size: 2 processes are for a training service"),
        ({"service": {"inference_service": {"backend": "vllm"}}}, "service.inference_service.backend: 'vllm' does not get the weights that tinker trains"),
        ({"service": {"inference_service": {"backend": "weaver"}}}, "service.inference_service.backend: 'weaver' does not get"),
        ({"service": {"inference_service": {"url": "http://x:1"}}}, "service.inference_service.url: answers come from the API that trains"),
        ({"service": {"weaver_service": {"lora_rank": 8}}}, "service.weaver_service: service.train_service.backend is 'tinker'; say 'weaver' there"),
        ({"service": {"tinker_service": {"lora_rnk": 8}}}, "service.tinker_service.lora_rnk: unknown key; did you mean 'lora_rank'?"),
        ({"service": {"tinker_service": 8}}, "service.tinker_service: must be a section of keys, not 8"),
        ({"service": {"train_service": {"config": {"learning_rte": 1e-3}}}}, "service.train_service.config.learning_rte: unknown key; did you mean 'learning_rate'?"),
        ({"service": {"train_service": {"config": {"learning_rate": 1e-3}}}, "trainer": {"optim": {"lr": 1e-4}}}, "service.train_service.config.learning_rate: 0.001 contradicts trainer.optim.lr: 0.0001"),
        ({"service": {"train_service": {"config": {"beta2": 0.9}}}, "trainer": {"optim": {"betas": [0.9, 0.95]}}}, "service.train_service.config.beta2: 0.9 contradicts trainer.optim.betas"),
        ({"service": {"train_service": {"config": {"grad_clip_norm": -1.0}}}}, "must be 0 or more, not -1.0 (written as service.train_service.config.grad_clip_norm)"),
        ({"service": {"tinker_service": {"lora_rank": 8}}, "model": {"lora": {"rank": 16}}}, "service.tinker_service.lora_rank: 8 contradicts model.lora.rank: 16"),
        ({"service": {"teacher_service": {"backend": "tinker", "path": "t"}}}, "service.teacher_service.backend: 'tinker' trains the policy, and holds no other model"),
    ],
)
def test_what_does_not_fit_an_api_is_refused_by_name(extra, expected):
    assert expected in complaint(merged(TINKER, extra))


def test_apis_and_their_trainers_belong_together():
    assert "trainer.type: 'remote_api_grpo': it is for Tinker and Weaver, and service.train_service.backend is 'local'; use 'self_hosted_grpo'" in complaint({"trainer": {"type": "remote_api_grpo"}})
    assert "service.inference_service.backend: 'weaver' samples what it has trained" in complaint({"service": {"inference_service": {"backend": "weaver"}}})


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"algorithm": {"type": "ppo"}}, "algorithm.type"),
        ({"algorithm": {"kl_loss_coef": 0.01}}, "algorithm.kl_loss_coef"),
        ({"algorithm": {"use_kl_in_reward": True}}, "algorithm.use_kl_in_reward"),
        ({"algorithm": {"entropy_coef": 0.01}}, "algorithm.entropy_coef"),
        ({"algorithm": {"dual_clip": 3.0}}, "algorithm.dual_clip"),
        ({"algorithm": {"correction": "tis"}}, "algorithm.correction"),
        ({"algorithm": {"do_old_log_prob_compute": True}}, "algorithm.do_old_log_prob_compute"),
        ({"algorithm": {"loss_fn": "dro"}}, "algorithm.loss_agg_mode"),
        ({"rollout_worker": {"temperature": 0.7}}, "rollout_worker.temperature"),
        ({"rollout_worker": {"min_p": 0.1}}, "rollout_worker.min_p"),
        ({"service": {"reference_service": {"path": "r"}}}, "service.reference_service"),
        ({"weight": {"route": "lora"}}, "weight.route"),
        ({"model": {"revision": "main"}}, "model.revision"),
    ],
)
def test_what_the_losses_of_an_api_cannot_do(extra, key):
    assert key in [f.key for f in check_api(Recipe.from_dict(merged(merged(BASE, TINKER), extra))) if f.level == "error"]


@pytest.mark.parametrize("extra", [{}, {"weight": {"sync_mode": "fully-async"}}, {"algorithm": {"type": "gspo", "correction": "none"}}, {"algorithm": {"loss_fn": "dro", "loss_agg_mode": "token-mean"}}, {"algorithm": {"type": "cross_entropy"}, "rollout_worker": {"temperature": 0.0}}])
def test_what_they_can(extra):
    found = [f for f in check_api(Recipe.from_dict(merged(merged(BASE, TINKER), extra))) if "not installed" not in f.message]
    assert found == []


def test_a_key_of_the_environment_stays_a_reference(monkeypatch):
    monkeypatch.setenv("TASK_KEY", "tml-secret")
    recipe = Recipe.from_dict(merged(merged(BASE, TINKER), {"service": {"tinker_service": {"api_key": "${oc.env:TASK_KEY}"}}}))
    assert recipe.config.service.train_service.api_key == "tml-secret"
    text = recipe.to_yaml()
    assert "tml-secret" not in text and "${oc.env:TASK_KEY}" in text
    assert Recipe.from_dict(yaml.safe_load(text)).config.service.train_service.api_key == "tml-secret"


def test_what_an_api_settles_by_itself_is_named():
    extra = {"trainer": {"autocast": "bfloat16"}, "model": {"threads": 2}, "service": {"inference_service": {"max_retries": 5}}}
    found = [f for f in check_api(Recipe.from_dict(merged(merged(BASE, TINKER), extra))) if f.level == "warning"]
    assert [f.key for f in found] == ["model.threads", "trainer.autocast", "service.inference_service.max_retries"] and "has no effect" in found[0].message
