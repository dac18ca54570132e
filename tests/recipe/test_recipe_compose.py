"""Composition as Hydra does it, overrides, and the spellings of NexRL's documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nexrl_sdk import Recipe
from nexrl_sdk.recipe.compose import Tree, compose, override, respell
from nexrl_sdk.types import ConfigError


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def merged(*layers: dict) -> dict:
    """Deep merge, later layers win: the oracle for composition."""
    out: dict = {}
    for layer in layers:
        for key, value in layer.items():
            out[key] = merged(out[key], value) if isinstance(out.get(key), dict) and isinstance(value, dict) else value
    return out


def complaint(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as e:
        function(*args, **kwargs)
    return str(e.value)


A, B, OWN = {"trainer": {"save_freq": 1, "keep_last": 1}}, {"trainer": {"save_freq": 2, "type": "self_hosted"}}, {"trainer": {"save_freq": 3}, "seed": 4}


@pytest.mark.parametrize("order", [["a", "b", "_self_"], ["_self_", "b", "a"], ["a", "_self_", "b"], ["b", "a"], ["common/c", "_self_"]])
def test_order_of_defaults(order, tmp_path):
    files = {"t/a.yaml": yaml.dump(A), "t/b.yaml": yaml.dump(B), "common/c.yaml": yaml.dump({"defaults": ["d"], **A}), "common/d.yaml": yaml.dump(B), "t/t.yaml": yaml.dump({"defaults": order, **OWN})}
    layers = {"a": [A], "b": [B], "_self_": [OWN], "common/c": [B, A]}
    wanted = [layer for name in (order if "_self_" in order else [*order, "_self_"]) for layer in layers[name]]
    assert OmegaConf.to_container(compose(write(tmp_path, files) / "t/t.yaml").values) == merged(*wanted)


def test_searchpath_groups_packages_and_optional(tmp_path, monkeypatch):
    files = {
        "shared/base.yaml": "seed: 1\n",
        "optim/fast.yaml": "lr: 0.1\n",
        "t/t.yaml": "hydra: {searchpath: ['file://shared', 'file://more']}\ndefaults: [base, {optim@trainer.optim: fast}, optional nothing, _self_]\n",
        "u/u.yaml": "defaults: [{trainer: quick}]\n", "u/trainer/quick.yaml": "total_train_steps: 2\n", "more/x.yaml": "{}\n",
    }  # fmt: skip
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    assert OmegaConf.to_container(compose(Path("t/t.yaml")).values) == {"seed": 1, "trainer": {"optim": {"lr": 0.1}}}
    assert OmegaConf.to_container(compose(Path("u/u.yaml")).values) == {"trainer": {"total_train_steps": 2}}


def test_errors_of_composition(tmp_path):
    write(tmp_path, {"a.yaml": "defaults: [b]\n", "b.yaml": "defaults: [a]\n", "c.yaml": "defaults: [bb]\n", "d.yaml": "defaults: base\n", "e.yaml": "defaults: ['override x']\n"})
    assert "defaults go in a circle: a.yaml -> b.yaml -> a.yaml" in complaint(compose, tmp_path / "a.yaml")
    assert "defaults name 'bb'" in complaint(compose, tmp_path / "c.yaml")
    assert "defaults must be a list" in complaint(compose, tmp_path / "d.yaml")
    assert "is not supported" in complaint(compose, tmp_path / "e.yaml")


@pytest.mark.parametrize("text", ["trainer.optim.lr", "=3", "a=[1", "~nothing", "a.b.c=${"])
def test_bad_overrides_are_quoted(text):
    assert text.lstrip("~") in complaint(lambda: OmegaConf.to_container(override(Tree(OmegaConf.create({"seed": 1})), [text]).values, resolve=True))


@pytest.mark.parametrize("text,value", [("x=1", 1), ("x=1e-5", 1e-5), ("x=true", True), ("x=null", None), ("x=[a,b]", ["a", "b"]), ("x={a: 1}", {"a": 1}), ("x='1'", "1"), ("x=a=b", "a=b"), ("x=file.py:Name", "file.py:Name"), ("x=", None)])
def test_values_of_overrides(text, value):
    found = override(Tree(OmegaConf.create({})), [text]).values.x
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value


BASE = {"model": {"path": "m"}, "data": {"data_files": "x.jsonl"}, "rollout_worker": {"evaluator_module_path": "a.py:b"}}


def test_documents_spellings_mean_the_same():
    documents = {
        "data": {"type": "torch", "data_files": "x.jsonl", "max_prompt_length": "${rollout_worker.max_prompt_length}"},
        "rollout_worker": {"type": "simple", "evaluator_module_path": "a.py:b", "max_prompt_length": 16384, "tokenizer": "org/tok"},
        "trajectory_pool": {"type": "default", "batch_size": 32, "group_size": 4},
        "trainer": {
            "type": "self_hosted_grpo", "max_response_length": 77, "remove_previous_ckpt": True,
            "algorithm": {"type": "grpo", "batch_size": "${trajectory_pool.batch_size}", "inference_service": {"model": "m", "tokenizer": "org/tok"}},
            "train_service": {"main_actor": {"backend": "local", "identifier": "policy", "role": "actor", "world_size": 1, "actor": {"optim": {"lr": 2e-6}}}},
        },
        "validate": {"data": {"type": "torch", "data_files": "y.jsonl", "shuffle": False}, "eval": {"type": "default", "compute_interval": 500}},
        "weight": {"type": "default", "sync_mode": "batch-async", "staleness_threshold": 2}, "logger": {"backend": "file"},
        "runtime_monitor": {"exception_handling": {"enabled": True, "policy": "stop_on_error"}},
    }  # fmt: skip
    own = {
        "model": {"path": "m", "tokenizer": "org/tok"}, "data": {"data_files": "x.jsonl", "max_prompt_length": 16384, "batch_size": 8},
        "rollout_worker": {"evaluator_module_path": "a.py:b", "max_tokens": 77}, "trajectory_pool": {"group_size": 4}, "trainer": {"type": "self_hosted_grpo", "keep_last": 1, "optim": {"lr": 2e-6}, "error_budget": 0.0},
        "validate": {"data": {"data_files": "y.jsonl"}, "eval": {"compute_interval": 500}}, "logger": {"backend": ["file"]}, "runtime_monitor": {"exception_handling": {"policy": "stop_on_error"}},
        "weight": {"sync_mode": "batch-async", "staleness_threshold": 2},
    }  # fmt: skip
    assert Recipe.from_dict(documents).to_dict() == Recipe.from_dict(own).to_dict()


def test_flat_service_and_its_config():
    service = {"backend": "local", "model_tag": "tag", "config": {"loss_fn": "importance_sampling", "learning_rate": 2e-6, "beta1": 0.8, "beta2": 0.9, "eps": 1e-7}}
    for place in ({"service": {"train_service": service}}, {"train_service": service}, {"trainer": {"train_service": service}}):
        c = Recipe.from_dict({**BASE, **place}).config
        assert (c.service.train_service.identifier, c.algorithm.loss_fn, c.trainer.optim.lr, list(c.trainer.optim.betas), c.trainer.optim.eps) == ("tag", "importance_sampling", 2e-6, [0.8, 0.9], 1e-7)


@pytest.mark.parametrize(
    "extra,expected",
    [
        ({"resource": {"inference": {"gpu_count": 2}}}, "resource: where a run is placed"),
        ({"environment": {"setup_script": "x.sh"}}, "environment: a script cannot change"),
        ({"service": {"train_service": {"backend": "http"}, "inference_service": {"backend": "local"}}}, "service.inference_service.backend: 'local' samples from the weights of this process"),
        ({"service": {"inference_service": {"url": "http://x"}}}, "service.inference_service.url: which kind of server is it?"),
        ({"service": {"train_service": {"url": "http://x"}}}, "service.train_service.url: 'http://x' needs a training service; say service.train_service.backend: http"),
        ({"service": {"train_service": {"backend": "htpp"}}}, "service.train_service.backend: 'htpp' is not known; did you mean 'http'?"),
        ({"service": {"tinker_service": {"lora_rank": 8}}}, "service.tinker_service: service.train_service.backend is 'local'; say 'tinker' there"),
        ({"service": {"inference_service": {"backend": "vllm", "freeze_for_weight_sync": False}}}, "service.inference_service.freeze_for_weight_sync"),
        ({"service": {"train_service": {"student": {"backend": "http"}, "teacher": {"backend": "http"}}}}, "student, teacher all have the role 'actor'"),
        ({"trainer": {"train_service": {"backend": "local", "world_size": 8}}}, "world_size: 8 needs a training service"),
        ({"weight": {"sync_mode": "fully-asynch"}}, "'fully-asynch' is not known; did you mean 'fully-async'?"),
        ({"weight": {"staleness_threshold": -1}}, "weight.staleness_threshold: must be 0 or more, not -1"),
        ({"service": {"train_service": {"a": {"role": "critc"}}}}, "service.train_service.a.role: 'critc' is not known"),
        ({"rollout_worker": {"type": "nexua", "evaluator_module_path": "a.py:b"}}, "'nexua' is not known"),
        ({"trainer": {"type": "remote_api_grpo"}}, "use 'self_hosted_grpo'"),
        ({"runtime_monitor": {"health_check": {"timeout": 0}}}, "runtime_monitor.health_check.timeout: must be greater than 0, not 0"),
        ({"rollout_worker": {"evaluator_module_path": "a.py:b", "tokenizer": "one"}, "model": {"path": "m", "tokenizer": "two"}}, "rollout_worker.tokenizer: 'one' contradicts model.tokenizer: 'two'"),
        ({"trainer": {"max_response_length": 0}}, "must be 1 or more, not 0 (written as trainer.max_response_length)"),
        ({"runtime_monitor": {"exception_handling": {"policy": "stop"}}}, "runtime_monitor.exception_handling.policy"),
        ({"trajectory_pool": {"key_list": ["query"]}}, "trajectory_pool.key_list"),
    ],
)
def test_what_this_backend_cannot_honour_is_refused_by_name(extra, expected):
    assert expected in complaint(Recipe.from_dict, {**BASE, **extra})


def test_the_documents_full_example_is_refused_item_by_item():
    text = """
environment: {setup_script: x.env.sh}
rollout_worker: {type: nexau, nexau_agent_config_path: a.yaml, evaluator_module_path: "e.py:E", task_name: t}
trainer: {type: self_hosted_grpo, total_train_steps: 10, sync_weight_path: /p}
service: {train_service: {backend: nextrainer, url: "http://x", model_tag: policy, world_size: 4}, inference_service: {backend: vllm}}
resource: {training: {gpu_count: 4}}
"""
    message = complaint(Recipe.from_dict, {**BASE, **yaml.safe_load(text)})
    named = ["environment:", "resource:"]
    assert [n for n in named if n not in message] == [] and "unknown key" not in message


def test_named_services_go_to_their_roles():
    named = {
        "student_service": {"identifier": "student", "role": "actor", "backend": "http", "url": "http://x:1", "resource": {"world_size": 8}, "actor": {"model": {"path": "s"}, "optim": {"lr": 2e-6}, "ppo_epochs": 2, "clip_ratio_low": 0.1}},
        "teacher_service": {"role": "teacher", "backend": "self-hosted", "url": "http://x:1", "resource": {"world_size": 4}, "actor": {"model": {"path": "t"}}},
    }
    c = Recipe.from_dict({**BASE, "model": {}, "service": {"train_service": named, "inference_service": {"backend": "sglang", "url": "http://y"}}}).config
    student, teacher = c.service.train_service, c.service.teacher_service
    assert (c.model.path, c.trainer.optim.lr, c.algorithm.ppo_epochs, c.algorithm.clip_ratio_low) == ("s", 2e-6, 2, 0.1)
    assert (student.backend, student.url, student.identifier, student.world_size, student.role) == ("http", "http://x:1", "student", 8, "actor")
    assert (teacher.backend, teacher.identifier, teacher.world_size, teacher.path, teacher.role) == ("http", "teacher_service", 4, "t", "teacher")
    assert c.service.inference_service.backend == "openai"
    flat = Recipe.from_dict({**BASE, "service": {"teacher_service": {"path": "t"}}}).config.service
    assert (flat.train_service.identifier, flat.teacher_service.identifier) == ("policy", "teacher")
    assert Recipe.from_dict({**BASE, "train_service": {"backend": "nextrainer"}}).config.service.inference_service.backend == "vllm"


def test_respell_leaves_its_input_alone():
    given = {"trainer": {"algorithm": {"type": "grpo"}}, "logger": {"backend": "file"}}
    respell(given)
    assert given == {"trainer": {"algorithm": {"type": "grpo"}}, "logger": {"backend": "file"}}


def test_environment_values(monkeypatch, tmp_path):
    monkeypatch.setenv("TASK_MODEL", "org/${not_a_key}")
    assert Recipe.from_dict({**BASE, "model": {"path": "${env.TASK_MODEL}"}}).config.model.path == "org/${not_a_key}"
    assert Recipe.from_dict({**BASE, "model": {"path": "${oc.env:TASK_MODEL}"}}).config.model.path == "org/${not_a_key}"
    assert Recipe.from_dict({**BASE, "model": {"path": "${oc.env:NO_SUCH,fallback}"}}).config.model.path == "fallback"
    (tmp_path / "r.yaml").write_text(yaml.dump({**BASE, "model": {"path": "${env.NO_SUCH_VARIABLE}"}}))
    message = complaint(Recipe.load, tmp_path / "r.yaml")
    assert message.startswith("model.path: the environment variable NO_SUCH_VARIABLE is not set") and "r.yaml" in message
    assert "Interpolation key" in complaint(Recipe.from_dict, {**BASE, "seed": "${nothing.here}"})
