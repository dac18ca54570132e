"""What `Recipe.validate` finds before a model is loaded."""

from __future__ import annotations

import json
import sys

import pytest

from nexrl_sdk import Recipe
from nexrl_sdk.recipe.check import check_clipping
from nexrl_sdk.types import ConfigError

pytest.importorskip("nexrl_sdk.rollout.evaluator")
pytest.importorskip("nexrl_sdk.rollout.data")

ROWS = [{"prompt": f"{i}>", "answer": "a"} for i in range(32)]


def reward(row, answer):
    return 1.0


def one_argument(row):
    return 1.0


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def found(model, **sections) -> dict[str, str]:
    recipe = Recipe(**{"model": str(model), "data": ROWS, "evaluator": reward, "validate": ROWS, "rollout_worker": {"max_tokens": 8}, **sections})
    return {f.key: f"{f.level}: {f.message}" for f in recipe.validate()}


def test_a_good_recipe_has_no_findings_and_loads_no_model(model):
    loaded = "transformers" in sys.modules
    assert found(model) == {}
    assert ("transformers" in sys.modules) == loaded


def test_a_truncated_distribution_can_be_wanted(model):
    assert found(model, rollout_worker={"top_k": 5, "max_tokens": 8, "allow_truncated_sampling": True}) == {}


def test_a_section_is_found_under_config(model):
    with pytest.raises(AttributeError, match=r"recipe\.config\.algorithm"):
        _ = Recipe(model=str(model), data=ROWS, evaluator=reward).algorithm


@pytest.mark.parametrize(
    "sections,key,expected",
    [
        ({"algorithm": {"mini_batch_size": 5}}, "algorithm.mini_batch_size", "error: 5 does not divide the 128 trajectories"),
        ({"trajectory_pool": {"group_size": 1}}, "trajectory_pool.group_size", "error: grpo compares"),
        ({"rollout_worker": {"temperature": 0.0, "max_tokens": 8}}, "rollout_worker.temperature", "error: 0 is greedy"),
        ({"rollout_worker": {"max_tokens": 64}}, "rollout_worker.max_tokens", "error: 64 new tokens leave no room"),
        ({"data": {"rows": ROWS, "max_prompt_length": 60}}, "data.max_prompt_length", "more than the model's context of 64"),
        ({"data": {"rows": ROWS, "prompt_key": "question"}}, "data", "has no column 'question'"),
        ({"data": "nowhere.jsonl"}, "data", "nowhere.jsonl"),
        ({"data": []}, "data", "error"),
        ({"data": {"rows": ROWS, "batch_size": 64}}, "data.batch_size", "warning"),
        ({"validate": None}, "validate.data", "warning: there are no held-out rows"),
        ({"validate": {"data": ROWS, "ks": [1, 4]}}, "validate.ks", "error: pass@4 needs at least 4 answers"),
        ({"evaluator": "nowhere.py:reward"}, "rollout_worker.evaluator_module_path", "nowhere.py does not exist"),
        ({"evaluator": one_argument}, "rollout_worker.evaluator_module_path", "error"),
        ({"evaluator": 3.5}, "rollout_worker.evaluator_module_path", "error"),
        ({"logger": {"backend": ["file", "trackio"]}}, "logger.backend", "pip install 'nexrl_sdk[track]'"),
        ({"trainer": {"optim": {"warmup_steps": 200}}}, "trainer.optim.warmup_steps", "warning"),
        ({"rollout_worker": {"top_p": 0.9, "max_tokens": 8}}, "rollout_worker.top_p", "error: 0.9 leaves out tokens"),
        ({"algorithm": "cross_entropy", "weight": {"sync_mode": "fully-async"}}, "weight.sync_mode", "error: 'fully-async' lets rollouts run ahead"),
        ({"algorithm": "opd"}, "service.teacher_service", "error: distillation needs a teacher"),
        ({"weight": {"route": "lora"}, "service": {"train_service": {"backend": "http"}, "inference_service": {"backend": "openai", "url": "http://x"}}}, "weight.route", "error: 'lora' sends an adapter"),
        ({"weight": {"route": "in-process"}}, "weight.route", "error: 'in-process' is for a vLLM engine"),
        ({"weight": {"route": "shared-dir"}}, "weight.route", "warning: 'shared-dir' has no effect"),
        ({"trainer": {"custom_trainer_module_path": "x.py"}}, "trainer.custom_trainer_module_path", "belong together"),
    ],
)
def test_findings(sections, key, expected, model):
    if key == "logger.backend" and "trackio" in sys.modules:
        pytest.skip("trackio is installed")
    assert expected in found(model, **sections)[key]


HTTP = {"train_service": {"backend": "http"}, "inference_service": {"backend": "openai", "url": "http://x"}}


@pytest.mark.parametrize(
    "service,key,expected",
    [
        ({"inference_service": {"backend": "openai"}}, "service.inference_service.url", "error: 'openai' is a server that runs already: give its url"),
        ({"inference_service": {"backend": "vllm", "args": ["--api-key", "x"]}}, "service.inference_service.args", "error: the run gives the server"),
        ({"train_service": {"role": "teacher"}}, "service.train_service.role", "error: 'teacher', and this is the place of the actor: name the teacher in service.teacher_service"),
        ({"teacher_service": {"path": "org/m", "role": "critic"}}, "service.teacher_service.role", "name the critic in service.critic_service"),
        ({"teacher_service": {}}, "service.teacher_service.path", "error: distillation needs a teacher: name its model"),
        ({"teacher_service": {"path": "./nowhere"}}, "service.teacher_service.path", "error: there is no folder"),
        ({"teacher_service": {"path": "."}}, "service.teacher_service.path", "holds no config.json"),
        ({"reference_service": {"path": "./nowhere"}}, "service.reference_service.path", "error: there is no folder"),
        ({**HTTP, "teacher_service": {"backend": "http", "path": "org/m", "identifier": "policy"}}, "service.teacher_service.identifier", "error: 'policy' names the actor in the same service"),
        ({**HTTP, "reference_service": {"backend": "http", "identifier": "policy", "url": "http://a/"}, "teacher_service": {"backend": "http", "path": "org/m", "identifier": "policy", "url": "http://a"}}, "service.reference_service.identifier", "error: 'policy' names the teacher in the same service"),
    ],
)
def test_services_that_do_not_fit(service, key, expected, model, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert expected in found(model, algorithm="opd", service={"teacher_service": {"path": "org/m"}, **service})[key]


def test_services_that_fit(model):
    apart = {**HTTP, "teacher_service": {"backend": "http", "path": "org/m", "identifier": "policy", "url": "http://other"}}
    assert found(model, algorithm="opd", service=apart) == {}
    assert found(model, algorithm="opd", service={**HTTP, "teacher_service": {"backend": "http", "path": "org/m"}}) == {}


@pytest.mark.parametrize("config,gpu,warned", [({"head_dim": 16}, False, True), ({"hidden_size": 64, "num_attention_heads": 4}, False, True), ({"hidden_size": 64, "num_attention_heads": 2}, False, False), ({"head_dim": 16}, True, False)])
def test_heads_that_vllm_does_not_compute_without_a_gpu(config, gpu, warned, model, monkeypatch):
    monkeypatch.setattr("nexrl_sdk.recipe.check._has_gpu", lambda: gpu)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **config}))
    says = found(model, service={"inference_service": {"backend": "vllm"}}).get("service.inference_service.backend", "")
    assert ("heads of 16" in says) is warned or "not installed" in says


def test_model_folders(model, tmp_path):
    (model / "model.safetensors").unlink()
    assert "holds no weights" in found(model)["model.path"]
    (model / "tokenizer.json").unlink()
    assert "holds no tokenizer" in found(model)["model.tokenizer"]
    (model / "config.json").unlink()
    assert "holds no config.json" in found(model)["model.path"]
    assert "did you mean 'tiny'" in found("./tinyy")["model.path"] or "there is no folder" in found("./tinyy")["model.path"]
    assert found("org/name") == {}


@pytest.mark.parametrize("kind", ["rloo", "cross_entropy"])
def test_a_clip_ratio_that_the_loss_cannot_use_is_named_before_the_model_is_loaded(kind):
    recipe = Recipe(model="gpt2", data=[{"prompt": "a"}], evaluator=lambda row, answer: 1.0, algorithm={"type": kind, "clip_ratio": 0.2})
    assert [f.key for f in check_clipping(recipe)] == ["algorithm.clip_ratio"]
    from nexrl_sdk.trainer.self_hosted import loss_settings

    with pytest.raises(ConfigError, match=r"algorithm\.clip_ratio.*does not clip"):
        loss_settings(recipe.config.algorithm)


def test_a_token_clip_ratio_for_sequences_is_warned_of():
    settings = {"model": "gpt2", "data": [{"prompt": "a"}], "evaluator": lambda row, answer: 1.0}
    assert [f.level for f in check_clipping(Recipe(**settings, algorithm={"type": "gspo", "clip_ratio": 0.2}))] == ["warning"]
    assert not list(check_clipping(Recipe(**settings, algorithm="gspo")))


def test_supervised_learning_needs_no_room_for_answers(tiny):
    settings = {"model": str(tiny("qwen2", chat=False)), "data": [{"prompt": "a", "response": "b"}], "rollout_worker": {"max_tokens": 10**6}}
    assert not [f for f in Recipe(**settings, algorithm="cross_entropy").validate() if f.level == "error" or f.key == "validate.data"]
    assert "rollout_worker.max_tokens" in [f.key for f in Recipe(**settings, evaluator=reward).validate()]
