"""Recipes in NexRL's layout load, are checked, and train; what cannot be honoured is refused by name."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path

import pytest

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.launch import cli
from nexrl_sdk.types import ConfigError

EVALUATOR = '''
from nexrl.rollout_worker import BaseEvaluationTarget, EvaluationRunResult, Evaluator, NexAUEvaluationTarget


class Vowels(Evaluator):
    """The share of vowels."""

    def evaluate(self, data, evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        text = evaluation_target.final_answer
        assert isinstance(evaluation_target, NexAUEvaluationTarget) and "children" in str(evaluation_target.observation)
        return EvaluationRunResult(reward=sum(c in "aeiou" for c in text) / max(1, len(text)) + 0.01 * len(text), ground_truth=data["answer"], metrics={"length": float(len(text))})
'''
WORKER = '''
from typing import Any

from nexau.archs.tracer.adapters import InMemoryTracer
from nexrl.rollout_worker import BaseNexAURolloutWorker
from nexrl.rollout_worker.base_nexau_rollout_worker import BaseNexAURolloutWorker as Same
from tools import shout  # of the workspace

assert Same is BaseNexAURolloutWorker


class Asks(BaseNexAURolloutWorker):
    def __init__(self, config):
        super().__init__(config)
        self.task_name = config.get("task_name")

    def format_task_query(self, data_item: dict[str, Any]) -> str:
        return shout(f"{self.task_name}: {data_item['question']}")
'''
TRAINER = '''
import torch

from nexrl.algorithm.core_algos import compute_grpo_advantage_for_trajectories
from nexrl.nexrl_types import Batch
from nexrl.trainer import SelfHostedGrpoTrainer


class Counts(SelfHostedGrpoTrainer):
    def __init__(self, config):
        super().__init__(config)
        self.scale = config.algorithm.get("my_scale", 1.0)

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
        batch, metrics = super()._prepare_batch(batch)
        batch.values["advantages"] = self.scale * torch.as_tensor(batch.values["advantages"])
        metrics["mine/scale"] = self.scale
        return batch, metrics
'''
AGENT = """
type: agent
name: asker
max_context_tokens: 1000
system_prompt: Answer.
system_prompt_type: string
llm_config: {temperature: 1.0, max_tokens: 5, api_type: openai_chat_completion}
tracers:
  - import: nexau.archs.tracer.adapters.in_memory:InMemoryTracer
"""
COMMON = """
model: {path: "${oc.env:TASK_MODEL}"}
rollout_worker: {max_prompt_length: 512, temperature: 1.0}
trainer: {type: self_hosted_grpo, save_freq: 100}
algorithm: {type: grpo}
"""
TASK = """
hydra:
  searchpath:
    - file://recipe/shared
defaults:
  - common/base
  - optimizer
  - _self_
project_name: Layout
experiment_name: ask-v1
data:
  type: torch
  data_files: ["${oc.env:TASK_DATA,recipe/ask/train.jsonl}"]
  max_prompt_length: ${rollout_worker.max_prompt_length}
rollout_worker:
  type: "nexau"
  nexau_agent_config_path: "recipe/ask/agent_workspace/agent_config.yaml"
  nexau_agent_workspace: "recipe/ask/agent_workspace"
  evaluator_module_path: "recipe/ask/agent_workspace/evaluator.py:Vowels"
  custom_rollout_worker_module_path: "recipe/ask/agent_workspace/worker.py"
  custom_rollout_worker_class_name: "Asks"
  task_name: "ask"
trajectory_pool: {type: default, batch_size: 8, group_size: 4, check_batch_ready_function: batch_size}
algorithm: {batch_size: "${trajectory_pool.batch_size}", my_scale: 2.0}
trainer:
  total_train_steps: 1
  custom_trainer_module_path: "recipe/ask/trainer.py"
  custom_trainer_class_name: "Counts"
weight: {type: default, sync_mode: sync}
logger: {backend: file}
"""


@pytest.fixture()
def layout(tmp_path, monkeypatch, tiny):
    """A workspace as NexRL's users have it, and its recipe."""
    files = {
        "recipe/common/base.yaml": COMMON, "recipe/shared/optimizer.yaml": "trainer: {optim: {lr: 1e-3}}\n", "recipe/ask/ask.yaml": TASK,
        "recipe/ask/agent_workspace/agent_config.yaml": AGENT, "recipe/ask/agent_workspace/evaluator.py": EVALUATOR, "recipe/ask/agent_workspace/worker.py": WORKER,
        "recipe/ask/agent_workspace/tools.py": "def shout(text):\n    return text.upper()\n", "recipe/ask/trainer.py": TRAINER,
        "recipe/ask/train.jsonl": "".join(f'{{"question": "{q}?", "answer": "{q}"}}\n' for q in "abcd"),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASK_MODEL", str(tiny("qwen2", max_position_embeddings=1024)))
    return Path("recipe/ask/ask.yaml")


def change(path: Path, old: str, new: str) -> Path:
    """The recipe with one thing changed."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.timeout(120)
def test_it_loads_is_checked_and_trains(layout):
    recipe = Recipe.load(layout)
    assert [str(f) for f in recipe.validate() if f.level == "error"] == []
    c = recipe.config
    assert (c.trainer.optim.lr, c.data.max_prompt_length, c.data.batch_size, c.trainer.save_freq, c.model.path) == (1e-3, 512, 2, 100, __import__("os").environ["TASK_MODEL"])
    with Trainer(recipe) as trainer:
        assert type(trainer).__name__ == "Counts"
        step = trainer.step()
    assert step.metrics["mine/scale"] == 2.0 and math.isfinite(step.metrics["grad_norm"]) and step.metrics["eval/length"] >= 0
    assert len(step.rollouts) == 8 and [t.get("error") for t in step.rollouts] == [None] * 8
    assert all(t.reward is not None and "ASK: " in t["prompt_messages"][-1]["content"] and t["ground_truth"] in "abcd" for t in step.rollouts)
    assert all(t["trace"]["children"] for t in step.rollouts)


@pytest.mark.timeout(120)
def test_the_documents_commands_run_it(layout):
    """`python -m nexrl.main recipe=ask/ask` and `nexrl -m … -r`, in this process."""
    for arguments in (["run", "recipe=ask/ask", "--no-report"], ["-m", "self-hosted", "-c", str(layout), "-t", "tagged"], ["-m", "self-hosted", "-c", str(layout), "-r", "-t", "tagged", "seed=3"]):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as e:
            cli.main(arguments)
        assert e.value.code == 0, said.getvalue()
    assert Path("runs/ask-v1/metrics.jsonl").is_file() and Path("runs/tagged/report.html").is_file()


@pytest.mark.parametrize(
    "old,new,expected",
    [
        ("_self_\n", "_self_\n  - comon/base\n", "defaults name 'comon/base'"),
        ("optimizer", "optimiser", "defaults name 'optimiser'"),
        ("oc.env:TASK_DATA,recipe/ask/train.jsonl", "oc.env:TASK_DATA_NOWHERE", "the environment variable TASK_DATA_NOWHERE is not set"),
        ("type: \"nexau\"", "type: \"nexua\"", "rollout_worker.type: 'nexua' is not known"),
        ("custom_rollout_worker_class_name: \"Asks\"", "nexau_agent_config: x", "rollout_worker.nexau_agent_config: unknown key"),
        ("project_name", "resource: {training: {gpu_count: 4}}\nproject_name", "resource: where a run is placed"),
        ("project_name", "environment: {setup_script: a.sh}\nproject_name", "environment: a script cannot change"),
        ("project_name", "launch_mod: ray\nproject_name", "launch_mod: unknown key"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(layout, old, new, expected):
    with pytest.raises(ConfigError) as e:
        Recipe.load(change(layout, old, new))
    assert expected in str(e.value)


@pytest.mark.parametrize(
    "file,old,new,key,expected",
    [
        ("agent_config.yaml", "type: agent", "typ: agent", "rollout_worker.agent_config_path", "'typ'"),
        ("evaluator.py", "import BaseEvaluationTarget", "import BaseEvaluationTarge", "rollout_worker.evaluator_module_path", "did you mean 'BaseEvaluationTarget'?"),
        ("worker.py", "nexau.archs.tracer.adapters", "nexau.archs.tracer.adapter", "rollout_worker.custom_rollout_worker", "did you mean 'adapters'?"),
        ("worker.py", "from tools", "from toolz", "rollout_worker.custom_rollout_worker", "No module named 'toolz'"),
    ],
)
def test_what_is_wrong_in_its_files_is_found_before_a_run(layout, file, old, new, key, expected):
    change(layout.parent / "agent_workspace" / file, old, new)
    found = [f for f in Recipe.load(layout).validate() if f.level == "error"]
    assert any(f.key.startswith(key) and expected in str(f) for f in found), found


@pytest.mark.parametrize(
    "old,new,expected",
    [
        ('"nexau"\n', '"simple"\n', "SimpleRolloutWorker runs no agent; say rollout_worker.type: agent"),
        ("  nexau_agent_config_path: \"recipe/ask/agent_workspace/agent_config.yaml\"\n", "", "give an agent's file"),
    ],
)
def test_an_agent_without_its_file_and_a_file_without_an_agent(layout, old, new, expected):
    change(layout, '  custom_rollout_worker_module_path: "recipe/ask/agent_workspace/worker.py"\n  custom_rollout_worker_class_name: "Asks"\n', "")
    found = [str(f) for f in Recipe.load(change(layout, old, new)).validate() if f.level == "error"]
    assert any(expected in f for f in found), found


def test_a_worker_that_runs_no_agent(layout):
    change(layout.parent / "agent_workspace" / "worker.py", "class Asks(BaseNexAURolloutWorker)", "from nexrl.rollout_worker import SimpleRolloutWorker\n\n\nclass Asks(SimpleRolloutWorker)")
    assert {f.key for f in Recipe.load(layout).validate() if f.level == "error"} == {"rollout_worker.type", "rollout_worker.agent_config_path", "rollout_worker.agent_workspace"}


def test_a_recipe_that_is_saved_elsewhere_finds_its_agent(layout, tmp_path):
    saved = Recipe.load(Recipe.load(layout).save(tmp_path / "elsewhere" / "saved"))
    assert saved.agent_settings()["agent"].name == "asker" and saved.worker_class().__name__ == "Asks"


@pytest.mark.parametrize(
    "section,expected",
    [
        ("data: {data_files: x.jsonl, rollout_repeat_n: 8, tokenizer_path: t}", ["data.rollout_repeat_n: unknown key; here it is trajectory_pool.group_size", "data.tokenizer_path: unknown key; here it is model.tokenizer"]),
        ("service: {inference_service: {backend: vllm, base_url: 'http://x', model_path: m}}", ["service.inference_service.base_url: unknown key; here it is service.inference_service.url"]),
        ("weight: {sync_method: disk, validate_freq: 3}", ["weight.sync_method: unknown key; here it is weight.route", "weight.validate_freq: unknown key; here it is validate.eval.compute_interval"]),
        ("validate: {eval: {validate_freq: 2}}", ["validate.eval.validate_freq: unknown key; here it is validate.eval.compute_interval"]),
        ("resume: {mode: auto}", ["resume: unknown key; here it is the command nexrl resume RUN"]),
    ],
)
def test_keys_of_nexrls_own_recipes_are_told_where_they_are(tmp_path, section, expected):
    (tmp_path / "a.yaml").write_text(section)
    with pytest.raises(ConfigError) as e:
        Recipe.load(tmp_path / "a.yaml")
    assert all(text in str(e.value) for text in expected), e.value
