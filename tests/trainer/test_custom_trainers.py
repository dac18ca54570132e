"""Every example of the page on custom trainers runs as it is printed, with nexrl_sdk read for nexrl."""

from __future__ import annotations

import ast
import logging
import math
import re
import textwrap
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from nexrl_sdk import LocalBackend, Recipe, Trainer
from nexrl_sdk.nexrl_types import Batch
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.trainer import RemoteApiTrainer, SelfHostedGrpoTrainer, SelfHostedTrainer
from nexrl_sdk.types import ConfigError, Trajectory

PAGE = re.sub(r"\bnexrl(?=\.)", "nexrl_sdk", (Path(__file__).parent / "custom_trainers.md").read_text(encoding="utf-8"))
BLOCKS = [(kind, body) for kind, body in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]
PYTHON = [body for kind, body in BLOCKS if kind == "python"]
YAML = [body for kind, body in BLOCKS if kind == "yaml"]
ROWS = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]


def block(words, among=PYTHON):
    """The one example with these words in it."""
    found = [b for b in among if words in b]
    assert len(found) == 1, (words, len(found))
    return found[0]


def within(body, name, base=SelfHostedTrainer):
    """A class that has the methods of an example."""
    space: dict = {"Base": base}
    exec(f"import torch\nfrom nexrl_sdk.nexrl_types import Batch\nclass Example(Base):\n{textwrap.indent(body, '    ')}", space)
    space["Example"].__abstractmethods__ = frozenset()
    assert name in vars(space["Example"])
    return space["Example"]


@pytest.fixture()
def workspace(tmp_path, monkeypatch):
    """The files of the page, where it puts them."""
    folder = tmp_path / "recipe" / "my_task"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for body in PYTHON:
        named = re.match(r"# recipe/my_task/(\w+\.py)\n", body)
        if named and "class MyTrainer" not in body:
            (folder / named[1]).write_text(body, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def model(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False)


def reward(row, answer):
    return sum(c in "aeiou" for c in answer) / max(1, len(answer)) + 0.05 * len(answer)


def recipe_of(workspace, model, yaml):
    """An example's configuration, with the model and the rows that it leaves to the reader."""
    rest = {
        "model": {"path": str(model)},
        "data": {"batch_size": 4},
        "rollout_worker": {"max_tokens": 6},
        "trajectory_pool": {"group_size": 4},
        "trainer": {"optim": {"lr": 3e-3}},
    }
    (workspace / "rows.jsonl").write_text("".join(f'{{"prompt": "{r["prompt"]}"}}\n' for r in ROWS))
    (workspace / "reward.py").write_text("def reward(row, answer):\n    return sum(c in 'aeiou' for c in answer) / max(1, len(answer)) + 0.05 * len(answer)\n")
    if "learning_rate" in yaml:
        del rest["trainer"]
    rest["data"]["data_files"], rest["rollout_worker"]["evaluator_module_path"] = "rows.jsonl", "reward.py:reward"
    return Recipe.from_dict(OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(yaml), rest)), base_dir=workspace)


def dummy_batch(size=4):
    rows = [Trajectory(tokens=[0, 5, 6, 7, 8], loss_mask=[0, 0, 0, 1, 1], logprobs=[0, 0, 0, -1.0, -2.0], reward=float(i % 2), group_id=i // 2, run_id=i) for i in range(size)]
    return Batch.from_trajectories(rows, pad_token_id=0)


def bare(cls, **sections):
    return cls(OmegaConf.create({"algorithm": {"my_param": 0.5}, "train_service": {"world_size": 1, "backend": "self-hosted", "url": "http://localhost:1"}, **sections}))


def test_every_python_example_is_here():
    """What cannot be parsed is the one list of fields."""
    assert len(PYTHON) == 14 and len(YAML) == 3
    unparsed = [b for b in PYTHON if not _parses(b)]
    assert len(unparsed) == 1 and "# Required for NexTrainer" in unparsed[0]


def _parses(body):
    try:
        return bool(ast.parse(body))
    except SyntaxError:
        return False


# -- pattern 1 ------------------------------------------------------------------------------------


def test_custom_self_hosted_trainer_trains(workspace, model):
    """The class and its recipe, as printed, for two steps on a real engine."""
    recipe = recipe_of(workspace, model, next(y for y in YAML if "MyCustomTrainer" in y and "total_train_steps: 100" in y))
    assert recipe.config.trainer.total_train_steps == 100 and recipe.config.service.train_service.world_size == 8
    with LocalBackend(model) as backend:
        before = {n: p.detach().clone() for n, p in backend.model.parameters().items()}
        trainer = Trainer(recipe, backend)
        assert type(trainer).__name__ == "MyCustomTrainer" and trainer._my_param == 0.5 and trainer._use_custom_advantage
        batch = trainer.prepare(trainer.rollout())
        required = re.findall(r"^- (\w+)", block("# Required for NexTrainer"), re.MULTILINE)
        assert set(required) <= set(batch.values) and len(required) == 6
        assert torch.allclose(torch.as_tensor(batch.values["advantages"]), 0.5 * torch.tensor(list(batch.metadata["rewards"])))
        metrics = trainer.update(batch)
        assert metrics["grad_norm"] > 0 and metrics["advantage_mean"] == pytest.approx(0.5 * metrics["rollout/reward_mean"], abs=1e-6)
        trainer.step()
        assert trainer.step_count == 2 and any(not torch.equal(before[n], p) for n, p in backend.model.parameters().items())


def test_the_unit_test_of_the_page_passes(workspace):
    (workspace / "recipe" / "my_task" / "test_my_trainer.py").write_text(block("def test_custom_trainer_prepare_batch"), encoding="utf-8")
    test = load_object(f"{workspace}/recipe/my_task/test_my_trainer.py:test_custom_trainer_prepare_batch")
    test.__globals__["create_dummy_batch"] = dummy_batch  # the page leaves this to the reader
    test()


def test_the_short_integration_recipe_runs(workspace, model):
    yaml = next(y for y in YAML if "Just 2 steps for testing" in y)
    with LocalBackend(model) as backend:
        trainer = Trainer(recipe_of(workspace, model, yaml), backend)
        trainer.fit(progress=False)
        assert trainer.step_count == 2


# -- pattern 2 ------------------------------------------------------------------------------------


def test_custom_remote_trainer_trains(workspace, model):
    yaml = next(y for y in YAML if "MyRemoteTrainer" in y)
    with LocalBackend(model) as backend, Trainer(recipe_of(workspace, model, yaml), backend) as trainer:  # as printed, with a backend of this process in place of Tinker's
        assert isinstance(trainer, RemoteApiTrainer) and trainer._advantage_weight == 1.0 and trainer.recipe.config.service.inference_service.backend == "tinker"
        assert trainer.step().metrics["batch/optimizer_steps"] == 1.0 and trainer.train_config()["learning_rate"] == 2e-6
    here = OmegaConf.to_container(OmegaConf.create(yaml))
    here["trainer"]["train_service"] = {"config": {"loss_fn": "importance_sampling", "learning_rate": 1e-3}}
    with Trainer(recipe_of(workspace, model, OmegaConf.to_yaml(here)).override("trainer.total_train_steps=2")) as trainer:
        assert isinstance(trainer, RemoteApiTrainer) and trainer._advantage_weight == 1.0
        history = trainer.fit(progress=False)
        assert len(history) == 2 and history[0]["grad_norm"] > 0 and abs(history[0]["custom/advantage_mean"]) < 1e-6


def test_a_service_holder_of_ones_own(workspace):
    cls = load_object(f"{workspace}/recipe/my_task/my_remote_trainer.py:MyRemoteTrainer")
    trainer, seen = bare(cls, algorithm={"advantage_weight": 2.0}), []
    with pytest.raises(ConfigError, match="set_service_holder"):
        _ = trainer.service_holder

    class Holder:
        def train(self, datums, config):
            seen.append((datums, config))
            return {"metrics": {"loss": 0.5}}

    trainer.set_service_holder(Holder())
    rows = [Trajectory(tokens=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -1.0, -1.0], reward=r, run_id="a") for r in (0.0, 1.0)]
    metrics = trainer.train(rows)
    (datums, config), = seen
    assert [d.fields["advantages"].tolist() for d in datums] == [[-1.0, -1.0], [1.0, 1.0]] and config["loss_fn"] == "importance_sampling"
    assert metrics["loss"] == 0.5 and trainer.step_count == 1


# -- pattern 3 ------------------------------------------------------------------------------------


def test_algorithm_module_beside_the_trainer(workspace):
    folder = workspace / "recipe" / "my_task"
    (folder / "my_trainer.py").write_text("import torch\n" + block("class MyTrainer"), encoding="utf-8")  # the page uses it without importing it
    cls = load_object(f"{folder}/my_trainer.py:MyTrainer")
    prepared, metrics = bare(cls, algorithm={"discount_factor": 0.99, "gae_lambda": 0.95})._prepare_batch(dummy_batch())
    assert list(prepared.metadata["advantages"]) == [] and math.isnan(metrics["advantage_mean"])  # the page's advantages are still to be written
    assert load_object(f"{folder}/my_algorithm.py:compute_custom_loss")(torch.zeros(2), torch.zeros(2)) is None


# -- common patterns ------------------------------------------------------------------------------


def test_kl_penalty():
    batch = dummy_batch()
    shape = batch.values["input_ids"].shape
    batch.values.update(log_probs=torch.full(shape, -1.0), ref_log_probs=torch.full(shape, -1.5), token_level_scores=torch.zeros(shape))
    found = bare(within(block("def _apply_kl_penalty"), "_apply_kl_penalty"))._apply_kl_penalty(batch, 0.1)
    assert torch.allclose(found.values["token_level_scores"], torch.full(tuple(shape), -0.05))


def test_value_function():
    trainer = bare(within(block("def _compute_values"), "_compute_values"))
    trainer._value_network = type("Values", (), {"predict": staticmethod(lambda ids: torch.as_tensor(ids).float())})()
    assert trainer._compute_values(dummy_batch()).shape == (4, 5)


def test_n_step_returns():
    trainer = bare(within(block("def _compute_nstep_returns"), "_compute_nstep_returns"))
    assert trainer._compute_nstep_returns([1.0, 1.0, 1.0], 2, 0.5) == [1.5, 1.5, 1.0]


@pytest.mark.parametrize("size", [0, 1, 4])
def test_metrics_and_edge_cases(size):
    """Best practices 2 and 3 together: advantages of batches of every size, and their statistics."""
    edge = next(b for b in PYTHON if "Handle empty batch" in b)
    logged = next(b for b in PYTHON if 'metrics["algorithm/advantage_mean"]' in b)
    trainer = bare(within(f"{edge}\n{logged}", "_compute_advantages"))
    batch = dummy_batch(size)
    advantages = trainer._compute_advantages(batch)
    assert advantages.shape == (size,) and torch.isfinite(advantages).all()
    if size == 4:
        rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])
        assert torch.allclose(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-8))
        _, metrics = trainer._prepare_batch(batch)
        assert metrics["algorithm/advantage_max"] == pytest.approx(float(advantages.max()))


def test_utilities():
    space = {"self": bare(within("def _prepare_batch(self, batch):\n    return batch, {}", "_prepare_batch")), "batch": dummy_batch(), "trajectories": [], "metrics": {}}
    exec(block("# Use in your trainer"), space)
    assert len(space["batch"]) == 4 and "rollout/rollouts/count" in space["metrics"]


# -- from the trainers that are here ---------------------------------------------------------------


def test_patterns_of_the_grpo_trainer(workspace, model):
    body = block("# Old log probabilities").replace("...", "pad_token_id=self._pad_token_id")
    recipe = Recipe(model=str(model), data={"rows": ROWS, "batch_size": 2}, evaluator=reward, rollout_worker={"max_tokens": 4}, trajectory_pool={"group_size": 2})
    with Trainer(recipe) as trainer:
        assert type(trainer) is SelfHostedGrpoTrainer
        batch = trainer.prepare(trainer.rollout())
        space = {"self": trainer, "batch": batch, "Batch": Batch}
        exec(body, space)
        mask = torch.as_tensor(space["batch"].values["loss_mask"])
        assert space["reward_tensor"].shape == mask.shape and space["old_log_probs"].shape == mask.shape
        assert torch.allclose(space["old_log_probs"][mask == 1], torch.as_tensor(batch.values["rollout_log_probs"])[mask == 1], atol=1e-3)


def test_patterns_of_the_remote_grpo_trainer():
    rows = [Trajectory(tokens=[1, 2], loss_mask=[0, 1], reward=r, run_id="a") for r in (0.0, 1.0)]
    space = {"trajectories": rows, "logger": logging.getLogger("test"), "metrics": {}}
    exec(block("use_run_ids=True"), space)
    assert rows[0].advantage == pytest.approx(-(0.5**0.5), abs=1e-4) and space["metrics"]["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
