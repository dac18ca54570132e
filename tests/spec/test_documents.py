"""Every code block of NexRL's documents runs here, or is listed with the reason why the document's own code cannot."""

from __future__ import annotations

import ast
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parent))

import world as w
from documents import DOCUMENTS, FOLDER, Block, documents

from nexrl_sdk import HTTPTrainServiceClient, LocalBackend, MockTrainServiceClient, Recipe, Trainer, compat
from nexrl_sdk.backend.service import TrainServiceClient
from nexrl_sdk.nexrl_types import Batch, Trajectory
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.trainer import BaseTrainer, RemoteApiCrossEntropyTrainer, RemoteApiGrpoTrainer, RemoteApiTrainer, SelfHostedGrpoTrainer, SelfHostedTrainer
from nexrl_sdk.types import ConfigError
from nexrl_sdk.utils.finetune_service_utils import convert_trajectories_to_datums
from nexrl_sdk.utils.logging_utils import log_rollout_metrics

HERE = documents()
BLOCKS = [b for found in HERE.values() for b in found]
pytestmark = [pytest.mark.skipif(not BLOCKS, reason=f"NexRL's documents are not in {FOLDER}; NEXRL_SPEC names their folder")]

# -- what the document's own code cannot do -----------------------------------------------------------
# (document, heading, hash of the block) -> (the exception that running it as Python gives; "" for what is no Python), and why

DIAGRAM = ("", "a drawing, not code")
LISTED: dict[tuple[str, str, str], tuple[str, str]] = {
    ("custom-trainers", "1. Preserve Required Fields", "26915a54"): ("SyntaxError", "a list of field names in a Python fence"),
    ("remote-api-trainers", "Architecture", "13e60e31"): ("IndentationError", "a drawing in a Python fence"),
    ("trainers-overview", "1. Self-Hosted Training (NexTrainer Backend)", "fdda060e"): DIAGRAM,
    ("trainers-overview", "1. Self-Hosted Training (NexTrainer Backend)", "ccd53149"): DIAGRAM,
    ("trainers-overview", "2. Remote API Training (Tinker/Weaver Backend)", "8ca2f251"): DIAGRAM,
    ("trainers-overview", "2. Remote API Training (Tinker/Weaver Backend)", "744687c5"): DIAGRAM,
    ("training-service", "Architecture", "8ca794c8"): DIAGRAM,
    ("user-guide", "Directory Layout", "5e159534"): ("", "a drawing of folders, not code; the examples are written there"),
    ("user-guide", "Self-Hosted Trainers (Self-Hosted Backend)", "f160ba8a"): DIAGRAM,
    ("user-guide", "Self-Hosted Trainers (Self-Hosted Backend)", "12c6db48"): DIAGRAM,
    ("user-guide", "Remote API Trainers (Tinker/Weaver Backend)", "180d8b2b"): DIAGRAM,
    ("user-guide", "Remote API Trainers (Tinker/Weaver Backend)", "0c708d96"): DIAGRAM,
    ("user-guide", "Prerequisites", "cb8af739"): ("", "installs NexRL itself from the network"),
    ("user-guide", "Configuration Setup", "b77969b4"): ("", "sources cli/setup_env.sh, a file of NexRL's own repository"),
    ("user-guide", "Configuration Setup", "c245b5fd"): ("", "applies files of NexRL's own repository to a Kubernetes cluster"),
    ("user-guide", "Extending SelfHostedTrainer", "3829274f"): ("NameError", "two lines out of a table in NexRL's controller.py, whose names are not imported; a recipe names its class in custom_trainer_module_path"),
}

RUNS: dict[tuple[str, str, str], Callable[[Block, w.World], None]] = {}


def runs(*key: str) -> Callable[[Any], Any]:
    """Marks what runs a block."""

    def mark(function: Any) -> Any:
        RUNS[key] = function  # type: ignore[index]
        return function

    return mark


@pytest.fixture()
def world(tmp_path, monkeypatch, tiny):
    """A workspace in the documents' layout, with every file that they name."""
    found = w.World(tmp_path, lambda: tiny("qwen2", kind="byte", max_position_embeddings=2048), {b.digest: b.body for b in BLOCKS})
    monkeypatch.chdir(tmp_path)
    compat.install()
    torch.set_num_threads(1)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(block, world):
    """It runs, or the table says why it cannot, and it still cannot."""
    assert (block.key in RUNS) != (block.key in LISTED), f"{block} under {block.heading!r} is {'both run and listed' if block.key in RUNS else 'neither run nor listed'}: key {block.key}"
    if block.key in RUNS:
        RUNS[block.key](block, world)
        return
    expected, _ = LISTED[block.key]
    assert (block.kind == "python") == bool(expected)
    if expected:
        with pytest.raises(Exception) as e:
            w.run(block.body)
        assert type(e.value).__name__ == expected, "what is listed fails otherwise now, or runs"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_entry_without_its_block(document):
    """A document that has changed is noticed."""
    if document not in HERE:
        pytest.skip(f"{document}.md is not in {FOLDER}")
    keys = {b.key for b in HERE[document]}
    assert not [k for k in (*RUNS, *LISTED) if k[0] == document and k not in keys]


def test_blocks_that_are_listed_are_few():
    assert len(LISTED) < len(BLOCKS) / 5 and all(reason for _, reason in LISTED.values())
    assert {b.kind for b in BLOCKS} <= {"python", "yaml", "bash", "json", "text"}


# -- custom-trainers -----------------------------------------------------------------------------------

TRAINER = "recipe/my_task/my_trainer.py"


@runs("custom-trainers", "Step 1: Create Trainer Class", "1c69cf62")
def _custom_trainer(block: Block, world: w.World) -> None:
    cls = load_object(f"{world.write(TRAINER, block.body)}:MyCustomTrainer")
    prepared, metrics = w.bare(cls)._prepare_batch(w.dummy_batch())
    assert issubclass(cls, SelfHostedTrainer) and metrics["advantage_mean"] == pytest.approx(0.25)
    assert torch.allclose(torch.as_tensor(prepared.values["advantages"]), torch.tensor([0.0, 0.5, 0.0, 0.5]))
    assert torch.as_tensor(prepared.values["token_level_scores"])[:, -1].tolist() == [0.0, 1.0, 0.0, 1.0]


@runs("custom-trainers", "Step 2: Register Trainer", "03462a03")
def _its_recipe(block: Block, world: w.World) -> None:
    world.write(TRAINER, world.bodies["1c69cf62"])
    recipe = world.recipe(block.body)
    assert recipe.config.trainer.total_train_steps == 100 and recipe.config.service.train_service.world_size == 8
    with LocalBackend(world.model()) as backend:
        trainer = Trainer(recipe, backend)
        assert type(trainer).__name__ == "MyCustomTrainer" and trainer._my_param == 0.5
        assert math.isfinite(trainer.step().metrics["grad_norm"]) and trainer.step_count == 1


def _commands(*expected: str) -> Callable[[Block, w.World], None]:
    """NexRL's commands of a block are those, in this package's words."""

    def check(block: Block, world: w.World) -> None:
        w.syntax(block.body)
        for name in ("recipe/my_task/my_task.yaml",):
            world.write(name, "")
        assert [" ".join(w.parsed(c)) for c in w.commands(block.body)] == list(expected)

    return check


MY_TASK = "run recipe/my_task/my_task.yaml"
runs("custom-trainers", "Step 3: Test Your Trainer", "b5b65556")(_commands(MY_TASK))
runs("custom-trainers", "2. Integration Test", "c4a677ba")(_commands("run recipe/my_task/test_config.yaml"))


@runs("custom-trainers", "Step 1: Create Trainer Class", "945818ca")
def _custom_remote_trainer(block: Block, world: w.World) -> None:
    cls = load_object(f"{world.write('recipe/my_task/my_remote_trainer.py', block.body)}:MyRemoteTrainer")
    trainer, holder = w.bare(cls, algorithm={"advantage_weight": 2.0}), w.Holder()
    trainer.set_service_holder(holder)
    rows = [Trajectory(tokens=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -1.0, -1.0], reward=r, run_id="a") for r in (0.0, 1.0)]
    assert trainer.train(rows)["loss"] == 0.5
    assert [d.fields["advantages"].tolist() for d in holder.seen[0][0]] == [[-1.0, -1.0], [1.0, 1.0]]


@runs("custom-trainers", "Step 2: Register and Configure", "7970741f")
def _its_remote_recipe(block: Block, world: w.World) -> None:
    world.write("recipe/my_task/my_remote_trainer.py", world.bodies["945818ca"])
    recipe = world.recipe(block.body)
    with LocalBackend(world.model()) as backend, Trainer(recipe, backend) as trainer:  # a backend of this process in the place of Tinker's
        assert isinstance(trainer, RemoteApiTrainer) and trainer._advantage_weight == 1.0
        assert trainer.step().metrics["batch/optimizer_steps"] == 1.0 and trainer.train_config()["learning_rate"] == 2e-6


@runs("custom-trainers", "Step 1: Create Algorithm Module", "20fd3ce7")
def _algorithm_module(block: Block, world: w.World) -> None:
    found = w.run(block.body)
    assert found["compute_my_advantages"](w.dummy_batch()).metadata["advantages"] == [] and found["compute_custom_loss"](torch.zeros(2), torch.zeros(2)) is None


@runs("custom-trainers", "Step 2: Use in Trainer", "8f555941")
def _algorithm_in_a_trainer(block: Block, world: w.World) -> None:
    world.write("recipe/my_task/my_algorithm.py", world.bodies["20fd3ce7"])
    cls = load_object(f"{world.write(TRAINER, block.body)}:MyTrainer")
    cls._prepare_batch.__globals__["torch"] = torch  # the page uses it without importing it
    prepared, metrics = w.bare(cls, algorithm={"discount_factor": 0.99, "gae_lambda": 0.95})._prepare_batch(w.dummy_batch())
    assert list(prepared.metadata["advantages"]) == [] and math.isnan(metrics["advantage_mean"])  # the page's advantages are still to be written


@runs("custom-trainers", "Pattern: KL Penalty", "acf41bb1")
def _kl_penalty(block: Block, world: w.World) -> None:
    batch = w.dummy_batch()
    shape = batch.values["input_ids"].shape
    batch.values.update(log_probs=torch.full(shape, -1.0), ref_log_probs=torch.full(shape, -1.5), token_level_scores=torch.zeros(shape))
    found = w.bare(w.within(block.body, SelfHostedTrainer))._apply_kl_penalty(batch, 0.1)
    assert torch.allclose(found.values["token_level_scores"], torch.full(tuple(shape), -0.05))


@runs("custom-trainers", "Pattern: Value Function", "697d55d1")
def _value_function(block: Block, world: w.World) -> None:
    trainer = w.bare(w.within(block.body, SelfHostedTrainer))
    trainer._value_network = SimpleNamespace(predict=lambda ids: torch.as_tensor(ids).float())
    assert trainer._compute_values(w.dummy_batch()).shape == (4, 5)


@runs("custom-trainers", "Pattern: Multi-Step Returns", "63b19d5e")
def _n_step_returns(block: Block, world: w.World) -> None:
    assert w.bare(w.within(block.body, SelfHostedTrainer))._compute_nstep_returns([1.0, 1.0, 1.0], 2, 0.5) == [1.5, 1.5, 1.0]


@runs("custom-trainers", "2. Log Metrics", "fc17d9b7")
def _logged_metrics(block: Block, world: w.World) -> None:
    trainer = w.bare(w.within(f"{world.bodies['db3250ed']}\n{block.body}", SelfHostedTrainer))
    batch = w.dummy_batch()
    assert trainer._prepare_batch(batch)[1]["algorithm/advantage_max"] == pytest.approx(float(trainer._compute_advantages(batch).max()))


@runs("custom-trainers", "3. Handle Edge Cases", "db3250ed")
def _edge_cases(block: Block, world: w.World) -> None:
    trainer = w.bare(w.within(block.body, SelfHostedTrainer))
    for size in (0, 1, 4):
        assert torch.isfinite(trainer._compute_advantages(w.dummy_batch(size))).all()
    assert trainer._compute_advantages(w.dummy_batch(4)).tolist() == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2, abs=1e-6)


@runs("custom-trainers", "4. Use Existing Utilities", "26888d94")
def _utilities(block: Block, world: w.World) -> None:
    found = w.run(block.body, self=SimpleNamespace(_pad_token_id=0), batch=w.dummy_batch(), trajectories=w.dummy_trajectories(), metrics={})
    assert len(found["batch"]) == 4 and found["metrics"]["rollout/rollouts/count"] == 4


@runs("custom-trainers", "1. Unit Test", "5af74501")
def _unit_test(block: Block, world: w.World) -> None:
    world.write(TRAINER, world.bodies["1c69cf62"])
    test = load_object(f"{world.write('recipe/my_task/test_my_trainer.py', block.body)}:test_custom_trainer_prepare_batch")
    test.__globals__["create_dummy_batch"] = w.dummy_batch  # the page leaves it to the reader
    test()


@runs("custom-trainers", "2. Integration Test", "e2221f19")
def _integration_recipe(block: Block, world: w.World) -> None:
    world.write(TRAINER, world.bodies["1c69cf62"])
    with LocalBackend(world.model()) as backend:
        trainer = Trainer(world.recipe(block.body), backend)
        trainer.fit(progress=False)
        assert trainer.step_count == 2


@runs("custom-trainers", "From SelfHostedGrpoTrainer", "4502b81c")
def _patterns_of_the_grpo_trainer(block: Block, world: w.World) -> None:
    body = block.body.replace("...", "pad_token_id=self._pad_token_id")  # the page's ellipses
    with Trainer(world.recipe("")) as trainer:
        assert type(trainer) is SelfHostedGrpoTrainer
        batch = trainer.prepare(trainer.rollout())
        found = w.run(body, self=trainer, batch=batch)
    mask = torch.as_tensor(found["batch"].values["loss_mask"])
    assert found["reward_tensor"].shape == mask.shape
    assert torch.allclose(found["old_log_probs"][mask == 1], torch.as_tensor(batch.values["rollout_log_probs"])[mask == 1], atol=1e-3)


@runs("custom-trainers", "From RemoteApiGrpoTrainer", "5ab37bef")
def _patterns_of_the_remote_trainer(block: Block, world: w.World) -> None:
    rows, metrics = [Trajectory(tokens=[1, 2], loss_mask=[0, 1], reward=r, run_id="a") for r in (0.0, 1.0)], dict[str, Any]()
    w.run(block.body, trajectories=rows, metrics=metrics)
    assert rows[0].advantage == pytest.approx(-(0.5**0.5), abs=1e-4) and metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6)


# -- remote-api-trainers ---------------------------------------------------------------------------------


def _declared(*classes: type) -> Callable[[Block, w.World], None]:
    """A bare signature is no Python; it is held against the class that must have it."""

    def check(block: Block, world: w.World) -> None:
        with pytest.raises(SyntaxError):
            ast.parse(block.body)
        assert w.signatures(block.body)
        for cls in classes:
            assert w.disagreements(block.body, cls) == []

    return check


runs("remote-api-trainers", "Constructor", "32ab1848")(_declared(RemoteApiTrainer, RemoteApiGrpoTrainer, RemoteApiCrossEntropyTrainer))
runs("remote-api-trainers", "_prepare_trajectories() (Abstract)", "a80e507d")(_declared(RemoteApiTrainer, RemoteApiGrpoTrainer))
runs("remote-api-trainers", "set_service_holder()", "5ab7e384")(_declared(RemoteApiTrainer))


@runs("remote-api-trainers", "Main Training Flow", "8bedd023")
def _training_flow(block: Block, world: w.World) -> None:
    trainer, holder = w.bare(w.within(block.body, RemoteApiGrpoTrainer, log_rollout_metrics=log_rollout_metrics, convert_trajectories_to_datums=convert_trajectories_to_datums)), w.Holder()
    trainer.set_service_holder(holder)
    rows = w.dummy_trajectories()
    for i, t in enumerate(rows):
        t.run_id = f"prompt {i // 2}"  # which names a group on the page
        del t["group_id"]
    metrics = trainer.train(rows)
    assert metrics["loss"] == 0.5 and metrics["rollout/reward/mean"] == 0.5 and trainer.step_count == 1 and len(holder.seen[0][0]) == 4
    ours, other = w.bare(RemoteApiGrpoTrainer), w.Holder()
    ours.set_service_holder(other)
    ours.train(rows)
    assert [d.fields["advantages"].tolist() for d in other.seen[0][0]] == [pytest.approx(d.fields["advantages"].tolist(), rel=1e-5) for d in holder.seen[0][0]]


def _grpo_method(block: Block, world: w.World) -> None:
    cls = w.within(block.body, RemoteApiTrainer, __package__="nexrl.trainer")
    rows, metrics = [Trajectory(tokens=[1, 2], loss_mask=[0, 1], reward=r, run_id="a") for r in (0.0, 1.0)], dict[str, Any]()
    found = w.bare(cls)._prepare_trajectories(rows, metrics)
    assert [t.advantage for t in found] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-4) and "advantage/mean" in metrics


runs("remote-api-trainers", "_prepare_trajectories() Implementation", "e73f9b1a")(_grpo_method)
runs("user-guide", "RemoteApiGrpoTrainer", "afb58c5b")(_grpo_method)


@runs("remote-api-trainers", "_prepare_trajectories() Implementation", "1a08ece1")
def _supervised_method(block: Block, world: w.World) -> None:
    rows = w.dummy_trajectories()
    assert w.bare(w.within(block.body, RemoteApiTrainer))._prepare_trajectories(rows, {}) == rows


def _remote_recipe(loss: str, backend: str, lr: float, algorithm: str) -> Callable[[Block, w.World], None]:
    def check(block: Block, world: w.World) -> None:
        _check_remote(world.recipe(block.body), loss, backend, lr, algorithm)

    return check


def _check_remote(recipe: Recipe, loss: str, backend: str, lr: float, algorithm: str) -> None:
    c = recipe.config
    assert (c.service.train_service.backend, c.algorithm.loss_fn, c.trainer.optim.lr, c.algorithm.type, c.trainer.total_train_steps) == (backend, loss, lr, algorithm, 100)
    assert not [f for f in recipe.validate() if f.level == "error" and not f.key.startswith("service.")]  # no service is running here


runs("remote-api-trainers", "Configuration Example", "f3df3af3")(_remote_recipe("importance_sampling", "tinker", 2e-6, "grpo"))
runs("remote-api-trainers", "Configuration Example", "9a7336f8")(_remote_recipe("cross_entropy", "weaver", 1e-5, "cross_entropy"))


@runs("remote-api-trainers", "Usage Example", "b085496e")
def _two_recipes_in_one_block(block: Block, world: w.World) -> None:
    first, second = block.body.split("# For supervised")  # one block, two recipes: `trainer` stands in it twice
    _check_remote(world.recipe(first), "importance_sampling", "tinker", 2e-6, "grpo")
    _check_remote(world.recipe(f"#{second}"), "cross_entropy", "weaver", 1e-5, "cross_entropy")


@runs("remote-api-trainers", "Service Datum Format", "7fba1b1b")
def _datums(block: Block, world: w.World) -> None:
    rows = w.dummy_trajectories()
    for t in rows:
        t.advantage = 1.0
    assert len(w.run(block.body, trajectories=rows)["datums"]) == 4


@runs("remote-api-trainers", "Trajectory-Based Processing", "86c562c3")
def _a_trajectory(block: Block, world: w.World) -> None:
    t = Trajectory(**ast.literal_eval(block.body[block.body.index("{") :]))
    assert (t["reward"], t.run_id, t.get("advantage"), t["response"]) == (1.0, "uid_123_run_0", 0.5, "The answer is 4.")


@runs("remote-api-trainers", "Service Holder Pattern", "b081665a")
def _holders(block: Block, world: w.World) -> None:
    from nexrl.tinker import TinkerServiceHolder  # type: ignore[import-not-found]
    from nexrl.weaver import WeaverServiceHolder  # type: ignore[import-not-found]

    for cls in (TinkerServiceHolder, WeaverServiceHolder):
        assert not w.disagreements("def __init__(self, url: str | None = None)", cls)
    for backend in ("tinker", "weaver"):
        trainer = w.bare(w.within("def _prepare_trajectories(self, trajectories, metrics):\n    return trajectories", RemoteApiTrainer))
        made: list[Any] = []
        names = {n: (lambda url, n=n, made=made: made.append((n, url)) or w.Holder()) for n in ("TinkerServiceHolder", "WeaverServiceHolder")}
        w.run(block.body, backend=backend, url="http://localhost:1", trainer=trainer, **names)  # a real one asks its service at once
        assert made == [(f"{backend.title()}ServiceHolder", "http://localhost:1")] and isinstance(trainer.service_holder, w.Holder)


@runs("remote-api-trainers", "Automatic Backend Selection", "f4418de2")
def _selection(block: Block, world: w.World) -> None:
    config = OmegaConf.create({"algorithm": {}, "train_service": {"backend": "self-hosted", "url": "http://localhost:1"}})
    names = {"SelfHostedGrpoTrainer": SelfHostedGrpoTrainer, "RemoteApiGrpoTrainer": RemoteApiGrpoTrainer, "RemoteApiCrossEntropyTrainer": RemoteApiCrossEntropyTrainer}
    for backend, algorithm, cls in (("self-hosted", "grpo", SelfHostedGrpoTrainer), ("tinker", "grpo", RemoteApiGrpoTrainer), ("weaver", "cross_entropy", RemoteApiCrossEntropyTrainer)):
        assert type(w.run(block.body, config=config, backend=backend, algorithm=algorithm, **names)["trainer"]) is cls


@runs("remote-api-trainers", "Usage Example", "ca8de630")
def _custom_fields(block: Block, world: w.World) -> None:
    cls = w.run(block.body, compute_custom_value=lambda t: 2 * t.reward)["MyCustomRemoteTrainer"]  # the page leaves it to the reader
    assert [t.custom_field for t in w.bare(cls)._prepare_trajectories(w.dummy_trajectories(), {})] == [0.0, 2.0, 0.0, 2.0]


# -- trainers-overview -------------------------------------------------------------------------------------

runs("trainers-overview", "Constructor", "32ab1848")(_declared(BaseTrainer, SelfHostedTrainer, RemoteApiTrainer))
runs("trainers-overview", "train()", "8b6f2b8e")(_declared(BaseTrainer, SelfHostedTrainer, RemoteApiTrainer))
runs("trainers-overview", "initialize_workers()", "af8f0fb4")(_declared(BaseTrainer, SelfHostedTrainer))
runs("trainers-overview", "run() / stop()", "95d2684b")(_declared(BaseTrainer))
runs("trainers-overview", "Module References", "f77436b3")(_declared(BaseTrainer))


@runs("trainers-overview", "Training Loop", "1d101007")
def _training_loop(block: Block, world: w.World) -> None:
    from nexrl_sdk import TrajectoryPool
    from nexrl_sdk.run.track import ActivityTracker

    pool = TrajectoryPool(batch_size=4, group_size=2)
    pool.put(w.dummy_trajectories())
    logged: list[Any] = []
    tracker = ActivityTracker({"file": SimpleNamespace(log=lambda step, metrics: logged.append((step, dict(metrics))), close=lambda: None)})  # type: ignore[dict-item]
    trainer = w.within(block.body, object)()
    trainer.__dict__.update(_stop_event=threading.Event(), _train_step=0, _total_train_steps=1, _trajectory_pool=pool, _activity_tracker=tracker, train=lambda rows: {"count": float(len(rows))})
    trainer._main_loop()
    assert logged == [(1, {"count": 4.0})]


@runs("trainers-overview", "Configuration", "8e9fa205")
def _overview_recipe(block: Block, world: w.World) -> None:
    c = world.recipe(block.body).config
    assert (c.trainer.total_train_steps, c.service.train_service.backend, c.service.train_service.url, c.service.train_service.world_size) == (100, "http", "http://localhost:5000", 8)


# -- training-service ----------------------------------------------------------------------------------------

runs("training-service", "initialize_worker()", "880df123")(_declared(TrainServiceClient, HTTPTrainServiceClient, MockTrainServiceClient))
runs("training-service", "update_actor()", "724695a4")(_declared(TrainServiceClient, HTTPTrainServiceClient, MockTrainServiceClient))
runs("training-service", "compute_log_prob()", "57e7d8db")(_declared(TrainServiceClient, HTTPTrainServiceClient, MockTrainServiceClient))
runs("training-service", "Constructor", "ab25cdd2")(_declared(HTTPTrainServiceClient))


@runs("training-service", "save_checkpoint() / load_checkpoint()", "189ef47b")
def _checkpoint_signatures(block: Block, world: w.World) -> None:
    for cls in (TrainServiceClient, HTTPTrainServiceClient, MockTrainServiceClient):
        assert w.disagreements(block.body, cls) == ["load_checkpoint: del_local_after_load=False, documented True"]  # on purpose: reading a checkpoint does not delete it


@runs("training-service", "Worker Group Management", "62fd8f6f")
def _worker_groups(block: Block, world: w.World) -> None:
    made: list[Any] = []

    class Client(HTTPTrainServiceClient):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            made.append(self)
            self._caller.call = lambda name, body, **_: body | {"call": name}  # type: ignore[method-assign,assignment] # no service runs at the page's address

    found = w.run(block.body, HTTPTrainServiceClient=Client)
    assert [c.identifier for c in made] == ["nexrl0", "group1", "group2"] and found["client"].save_checkpoint("/x")["local_path"] == "/x"


@runs("training-service", "Tensor Serialization", "02da7428")
def _tensors(block: Block, world: w.World) -> None:
    from nexrl_sdk.wire import data_to_tensor, tensor_to_data

    client = w.within(block.body, object, tensor_to_data=tensor_to_data, data_to_tensor=data_to_tensor)()
    for tensor in (torch.tensor([[1, 2]]), torch.randn(2, 3), torch.tensor([True])):
        assert torch.equal(client._data_to_tensor(client._tensor_to_data(tensor)), tensor)


@runs("training-service", "Training Step Execution", "30ea1483")
def _a_step_over_http(block: Block, world: w.World) -> None:
    """The reference's own method, over a session that hands the parts to a mock."""
    from nexrl_sdk.wire import split_for_requests

    mock, posted = MockTrainServiceClient(), []

    def post(url: str, json: Any, params: Any, timeout: float) -> Any:
        posted.append((url, json, params["identifier"], timeout))
        return SimpleNamespace(json=lambda: mock.update_actor({"tensors": {}}))

    names = {"_prepare_data_proto_request": lambda self, batch: repr(batch).encode(), "_process_data_proto_response": lambda self, answer: answer}
    client = w.within(block.body, type("Base", (), names), split_for_requests=split_for_requests)()
    client.session, client.base_url, client.identifier, client.request_timeout = SimpleNamespace(post=post), "http://h", "policy", 3.0
    assert client.update_actor({"a": 1})["metrics"] == {"loss": 0.5} and posted == [("http://h/update_actor", ({}, b"{'a': 1}"), "policy", 3.0)]


@runs("training-service", "Health Monitoring", "e66ad05f")
def _health(block: Block, world: w.World) -> None:
    """`self` is missing among its parameters, so its functions can be defined and not called; ours can."""
    found = w.run(block.body)
    for name in ("health_check", "worker_info"):
        with pytest.raises(NameError, match="'self'"):
            found[name]()
        assert callable(getattr(HTTPTrainServiceClient, name)) and isinstance(getattr(MockTrainServiceClient(), name)(), dict)


@runs("training-service", "NexTrainer Batch Format", "a38d982e")
def _batch_format(block: Block, world: w.World) -> None:
    wanted, batch = w.run(block.body)["batch"], w.dummy_batch()
    shape = tuple(batch.values["input_ids"].shape)
    batch.values.update({k: torch.zeros(shape) for k in ("token_level_scores", "advantages", "old_log_probs")})
    ours = batch.to_nextrainer_batch()
    assert set(wanted) == set(ours) and set(wanted["tensors"]) <= set(ours["tensors"]) and set(wanted["metadata"]) <= set(ours["metadata"])
    assert ours["metadata"]["batch_size"] == 4 and list(ours["metadata"]["global_token_num"]) == [5, 5, 5, 5]


@runs("training-service", "Single Service (Standard Training)", "5674430e")
def _single_service(block: Block, world: w.World) -> None:
    found = world.recipe(block.body, model={"path": "/path/to/model"})
    c = found.config
    assert (c.service.train_service.identifier, c.service.train_service.backend, c.service.train_service.world_size, c.trainer.optim.lr, c.model.path) == ("default", "http", 8, 2e-6, "/path/to/model")


@runs("training-service", "Multiple Services (OPD)", "2eaebda4")
def _student_and_teacher(block: Block, world: w.World) -> None:
    c = world.recipe(block.body, model={"path": "/path/to/student"}, algorithm={"type": "opd"}).config
    assert (c.model.path, c.service.train_service.identifier, c.service.teacher_service.identifier, c.service.teacher_service.path) == ("/path/to/student", "student", "teacher", "/path/to/teacher")


@runs("training-service", "Client Creation", "8e3becf9")
def _client_creation(block: Block, world: w.World) -> None:
    client = w.run(block.body)["client"]
    assert isinstance(client, HTTPTrainServiceClient) and client.identifier == "nexrl0"


@runs("training-service", "Usage in Self-Hosted Trainers", "f07d5925")
def _a_trainer_and_its_client(block: Block, world: w.World) -> None:
    made: list[MockTrainServiceClient] = []

    def create(backend: str, url: str, identifier: str | None) -> MockTrainServiceClient:
        made.append(MockTrainServiceClient(url, identifier))
        return made[-1]

    cls = w.run(block.body, BaseTrainer=type("Base", (), {"world_size": 2, "_prepare_batch": lambda self, batch: batch}), create_train_service_client=create, worker_config={"optim": {}})["SelfHostedTrainer"]
    trainer = cls(OmegaConf.create({"train_service": {"backend": "self-hosted", "url": "http://h"}}))
    trainer.initialize_workers()
    assert [name for name, _ in made[0].calls] == ["initialize_worker", "init_model"]
    with pytest.raises(UnboundLocalError, match="batch"):  # the page's train uses its batch before there is one
        trainer.train([])
    written = block.body.replace("self._prepare_batch(batch)", "self._prepare_batch(trajectories)")
    fixed = w.run(written, BaseTrainer=cls.__mro__[1], create_train_service_client=create, worker_config={})["SelfHostedTrainer"](trainer_config())
    assert fixed.train(w.dummy_batch())["metrics"] == {"loss": 0.5}


def trainer_config() -> Any:
    """A service's address."""
    return OmegaConf.create({"train_service": {"backend": "self-hosted", "url": "http://h"}})


@runs("training-service", "Saving Checkpoints", "42bc7f1c")
def _saving(block: Block, world: w.World) -> None:
    trainer, client = w.within(block.body, object)(), MockTrainServiceClient()
    trainer._train_service_client = client
    assert isinstance(trainer._save_checkpoint(3), dict) and client.calls[-1][0] == "save_checkpoint" and client.calls[-1][1]["global_step"] == 3


@runs("training-service", "Loading Checkpoints", "2a3a1126")
def _loading(block: Block, world: w.World) -> None:
    trainer, client = w.within(block.body, object)(), MockTrainServiceClient()
    trainer._train_service_client = client
    assert isinstance(trainer._load_checkpoint("/p"), dict) and client.calls[-1][0] == "load_checkpoint"


@runs("training-service", "Error Handling", "14069350")
def _error_handling(block: Block, world: w.World) -> None:
    client = HTTPTrainServiceClient("http://localhost:1")
    client._caller.call = lambda *_, **__: {"metrics": {}}  # type: ignore[method-assign] # no service runs
    w.run(block.body, client=client, batch={}, requests=SimpleNamespace(exceptions=SimpleNamespace(RequestException=OSError)))
    assert client.request_timeout == 200


@runs("training-service", "1. Batch Splitting", "992b785d")
def _splitting(block: Block, world: w.World) -> None:
    from nexrl_sdk.wire import split_for_requests

    chunks = w.run(block.body, split_for_requests=split_for_requests, request_data=bytes(250 * 1024 * 1024))["chunks"]
    assert [len(part) for _, part in chunks] == [100 << 20, 100 << 20, 50 << 20]


@runs("training-service", "3. Worker Group Isolation", "939acc30")
def _isolation(block: Block, world: w.World) -> None:
    found = w.run(block.body, HTTPTrainServiceClient=HTTPTrainServiceClient, url="http://localhost:1")
    assert (found["client_policy"].identifier, found["client_value"].identifier, found["client"].identifier) == ("policy", "value", None)


@runs("training-service", "MockTrainServiceClient", "56d573a4")
def _mock_client(block: Block, world: w.World) -> None:
    assert w.run(block.body, batch=w.dummy_batch().to_nextrainer_batch())["result"] == {"metrics": {"loss": 0.5}, "meta_info": {}}


# -- user-guide: commands --------------------------------------------------------------------------------------

runs("user-guide", "Zero-Setup Quick Start", "ad706f64")(_commands(MY_TASK, MY_TASK))
runs("user-guide", "Minimal Setup for a New Task", "662860fe")(_commands(MY_TASK, MY_TASK))
runs("user-guide", "Self-Hosted Mode", "ba50dcf5")(_commands("run recipe/my_task.yaml"))
runs("user-guide", "Training-Service Mode", "858093c6")(_commands("run recipe/my_task.yaml"))
runs("user-guide", "CLI Options", "c593bfbf")(
    _commands("run recipe/math/config.yaml", "run recipe/math/tinker.yaml --out runs/exp-v2", "run recipe/math/config.yaml --inference-url http://my-service:8000")
)
runs("user-guide", "Validate Configuration", "5f8e23e5")(_commands("validate recipe/my_task/my_task.yaml"))
runs("user-guide", "Common Commands", "9885c9e5")(
    _commands(
        MY_TASK, f"{MY_TASK} --out runs/my-experiment", "run recipe/my_task/tinker.yaml", f"{MY_TASK} --inference-url http://my-service:8000", MY_TASK,
    )  # and two of kubectl, which are not NexRL's
)  # fmt: skip


@runs("user-guide", "CLI Options", "d8abe530")
def _options(block: Block, world: w.World) -> None:
    """The help of a command; its options are those that are taken."""
    import re

    assert set(re.findall(r"--[a-z-]+", block.body)) == set(compat.OPTIONS.values())
    assert set(re.findall(r"(?<![-\w])-[a-z]\b", block.body)) == {o for o in compat.OPTIONS if o}


@runs("user-guide", "Minimal Setup for a New Task", "ab69febb")
def _folders(block: Block, world: w.World) -> None:
    subprocess.run(["bash", "-ec", block.body], check=True)
    assert (world.folder / "recipe/my_task/agent_workspace").is_dir()


@runs("user-guide", "3. Environment Setup (`my_task.env.sh`)", "e09cedc9")
def _environment(block: Block, world: w.World) -> None:
    script = world.write("recipe/my_task/my_task.env.sh", block.body)
    told = subprocess.run(["bash", "-ec", f"source {script}; printenv MY_TASK_DATA_PATH MY_TASK_CONFIG_PATH"], check=True, capture_output=True, text=True).stdout
    assert told.split() == ["/path/to/data", "/path/to/config"]


# -- user-guide: recipes ---------------------------------------------------------------------------------------

WORKSPACE = "recipe/my_task/agent_workspace"
COMMON = """
model: {path: MODEL}
data: {batch_size: 2}
rollout_worker: {max_tokens: 6}
trajectory_pool: {group_size: 2}
trainer: {type: self_hosted_grpo, total_train_steps: 1}
"""


def _task(world: w.World, text: str) -> Path:
    """A recipe, and beside it every file that it names, as the guide has them; what it inherits is the common file."""
    world.write("recipe/self_hosted_nexau_common.yaml", COMMON.replace("MODEL", str(world.model())))
    world.write(f"{WORKSPACE}/agent_config.yaml", world.bodies["87db6c72"])
    world.write(f"{WORKSPACE}/evaluator.py", world.bodies["bedb3ba2"])
    world.write(f"{WORKSPACE}/my_worker.py", world.bodies["e31bac0b"])
    return world.write("recipe/my_task/my_task.yaml", text)


def _refused(path: Path) -> set[str]:
    """The keys that a recipe is refused for."""
    with pytest.raises(ConfigError) as e:
        Recipe.load(path)
    return {line.strip().partition(":")[0] for line in str(e.value).splitlines()[1:]} or {str(e.value).partition(":")[0]}


@runs("user-guide", "Minimal Setup for a New Task", "15611824")
def _minimal_recipe(block: Block, world: w.World) -> None:
    """It loads; that its rows are not there is all that is wrong; with rows it trains."""
    from nexrl.rollout_worker import AgentRolloutWorker  # type: ignore[import-not-found]

    path = _task(world, block.body)
    recipe = Recipe.load(path)
    assert (recipe.config.project_name, recipe.config.rollout_worker.task_name, issubclass(recipe.worker_class(), AgentRolloutWorker)) == ("NexRL-MyTask", "my_task", True)
    assert {f.key for f in recipe.validate() if f.level == "error"} == {"data"}
    world.write("rows.jsonl", '{"prompt": "a", "answer": "b"}\n{"prompt": "b", "answer": "c"}\n')
    with Trainer(recipe.override(f"data.data_files={world.folder}/rows.jsonl")) as trainer:
        step = trainer.step()
    assert len(step.rollouts) == 4 and {t.status for t in step.rollouts} == {"ok"} and {t.reward for t in step.rollouts} == {0.0}


@runs("user-guide", "1. Main Configuration (`my_task_name.yaml`)", "e7a7b4a8")
def _main_configuration(block: Block, world: w.World) -> None:
    """Where a run is placed, and what would have to happen before it, is refused; the rest loads."""
    path = _task(world, block.body)
    assert _refused(path) == {"environment", "resource"}
    kept = world.write(str(path.relative_to(world.folder)), _without(block.body, "environment", "resource"))
    c = Recipe.load(kept).config
    assert (c.trainer.total_train_steps, c.trainer.save_freq, c.data.max_prompt_length, c.model.tokenizer, c.data.seed, c.validate.validate_before_train) == (1000, 100, 16384, "Qwen/Qwen2.5-7B-Instruct", 42, True)


def _without(text: str, *dotted: str) -> str:
    """A recipe without some keys, its interpolations as they are written."""
    tree = OmegaConf.create(text)
    for key in dotted:
        parent, _, last = key.rpartition(".")
        del (OmegaConf.select(tree, parent) if parent else tree)[last]  # type: ignore[arg-type]
    return OmegaConf.to_yaml(tree)


def _worker_section(name: str) -> Callable[[Block, w.World], None]:
    """A worker's section, in a recipe that has the rest."""

    def check(block: Block, world: w.World) -> None:
        _task(world, "")
        text = f"defaults: [self_hosted_nexau_common, _self_]\ndata: {{data_files: rows.jsonl}}\n{block.body}\n"
        recipe = Recipe.load(world.write("recipe/my_task/my_task.yaml", text))
        assert any(c.__name__ == name for c in recipe.worker_class().__mro__)

    return check


runs("user-guide", "Using Default Worker", "7a39a3c8")(_worker_section("AgentRolloutWorker"))
runs("user-guide", "Custom Query Formatting", "88fe551a")(_worker_section("MyTaskWorker"))


@runs("user-guide", "Remote API GRPO (Most Common)", "c496a0f3")
def _remote_grpo(block: Block, world: w.World) -> None:
    c = world.recipe(block.body).config
    assert (c.trainer.type, c.data.max_prompt_length, c.rollout_worker.max_tokens, c.model.lora.rank, c.trainer.optim.lr, c.service.train_service.api_key) == ("remote_api_grpo", 15000, 13000, 32, 2e-6, "your-api-key")


@runs("user-guide", "Self-Hosted GRPO", "26fafa8b")
def _self_hosted_grpo(block: Block, world: w.World) -> None:
    c = world.recipe(block.body, model={"path": "Qwen/Qwen2.5-7B-Instruct"}, data={"batch_size": 16}).config
    assert (c.algorithm.critic.kl_ctrl.type, c.algorithm.critic.kl_ctrl.kl_reward_coef, c.trajectory_pool.batch_size, c.service.train_service.world_size) == ("adaptive", 0.1, 32, 4)


@runs("user-guide", "Extending SelfHostedTrainer", "d7064672")
def _my_custom(block: Block, world: w.World) -> None:
    """A type is registered in NexRL's controller; here its file is named, which the refusal says."""
    world.write("my_custom_trainer.py", world.bodies["08f7fee2"])
    with pytest.raises(ConfigError, match=r"trainer.type: 'my_custom' is not known"):
        world.recipe(block.body)
    written = OmegaConf.merge(OmegaConf.create(block.body), {"trainer": {"type": None, "custom_trainer_module_path": "my_custom_trainer.py", "custom_trainer_class_name": "MyCustomTrainer"}})
    with Trainer(world.recipe(OmegaConf.to_yaml(written))) as trainer:
        assert trainer._my_param == 2.0  # type: ignore[attr-defined]


@runs("user-guide", "Full Configuration Example", "d78a8d15")
def _full_configuration(block: Block, world: w.World) -> None:
    """All that a run in a process cannot honour is refused by name, and nothing else; without it the recipe loads."""
    path = _task(world, block.body)
    world.write("recipe/self_hosted_nexau_common.yaml", "trajectory_pool: {group_size: 2}\n")
    gone: list[str] = []
    for refused in (
        {"environment", "resource", "data.num_workers", "runtime_monitor.exception_handling.check_interval"},  # where a run is placed, and loops that are not here
        {"trajectory_pool.batch_size"},  # 32 answers are not one prompt of `data.batch_size` with 4: that is left out
        {"trajectory_pool.key_list"},  # answers are compared with those to the same row
    ):
        assert _refused(path) == refused
        gone += [k if k != "trajectory_pool.batch_size" else "data.batch_size" for k in refused]
        path.write_text(_without(block.body, *gone), encoding="utf-8")
    c = Recipe.load(path).config
    assert (c.model.path, c.data.batch_size, c.trajectory_pool.group_size, c.service.train_service.world_size, c.service.inference_service.url, c.weight.staleness_threshold) == ("Qwen/Qwen2.5-7B-Instruct", 8, 4, 4, "http://inference-service:8001", 2)
    assert (c.trainer.checkpoint_path, c.weight.path, c.logger.wandb.name, c.validate.eval.compute_interval) == ("/path/to/checkpoints/my-task-v1", "/path/to/sync_weights/my-task-v1", "my-task-v1", 500)


@runs("user-guide", "Configuration Inheritance", "84b69d7d")
def _base(block: Block, world: w.World) -> None:
    c = world.recipe(block.body).config
    assert (c.model.tokenizer, c.data.max_prompt_length, c.trainer.type, c.trainer.save_freq, c.algorithm.type) == ("Qwen/Qwen2.5-7B-Instruct", 16384, "self_hosted_grpo", 100, "grpo")


@runs("user-guide", "Configuration Inheritance", "c54b3aa9")
def _inherits(block: Block, world: w.World) -> None:
    _task(world, "")
    world.write("recipe/common/base_nexau.yaml", world.bodies["84b69d7d"])
    text = f"{block.body}\n  evaluator_module_path: {WORKSPACE}/evaluator.py:MyEvaluator\nmodel: {{path: {world.model()}}}\ndata: {{data_files: rows.jsonl}}\n"  # the page's "task-specific settings"
    c = Recipe.load(world.write("recipe/my_task/my_task.yaml", text)).config
    assert (c.rollout_worker.task_name, c.trainer.save_freq, c.data.max_prompt_length) == ("my_task", 100, 16384)


# -- user-guide: agents and their workers ------------------------------------------------------------------------


def _agent_file(tools: list[str], temperature: float, tokens: int) -> Callable[[Block, w.World], None]:
    def check(block: Block, world: w.World) -> None:
        from nexrl_sdk.rollout.agent_config import AgentConfig, load_tracers
        from nexrl_sdk.rollout.trace import InMemoryTracer

        world.write(f"{WORKSPACE}/custom_tools.py", "def calculator(expression: str) -> str:\n    return str(sum(map(int, expression.split('+'))))\n")
        config = AgentConfig.load(world.write(f"{WORKSPACE}/agent_config.yaml", block.body))
        assert config.name == "my_task_agent" and config.max_context_tokens == 100000 and [t.name for t in config.tools] == tools
        assert config.llm_config["temperature"] == temperature and config.llm_config["max_tokens"] == tokens
        assert [type(t) for t in load_tracers(config)] == [InMemoryTracer]
        for tool in config.tools:
            assert tool.call('{"expression": "1+2"}', timeout=5.0).text == "3"

    return check


runs("user-guide", "Minimal Setup for a New Task", "87db6c72")(_agent_file([], 0.7, 8192))
runs("user-guide", "2. Agent Configuration (`agent_config.yaml`)", "79e35f87")(_agent_file(["calculator"], 0.7, 8192))


@runs("user-guide", "Custom Query Formatting", "e31bac0b")
def _query(block: Block, world: w.World) -> None:
    cls = load_object(f"{world.write(f'{WORKSPACE}/my_worker.py', block.body)}:MyTaskWorker")
    with w.worker(cls, world, evaluator=lambda row, answer: 1.0) as worker:
        assert worker.format_task_query({"problem": "2+2?", "context": "arithmetic"}) == "Problem: 2+2?\nContext: arithmetic\n\nProvide your solution step by step."
        found = worker.run([{"problem": "2+2?"}])
    assert len(found) == 2 and all(t.status == "ok" and t.reward == 1.0 and "Problem: 2+2?" in str(t.get("prompt_messages")) for t in found)


@runs("user-guide", "Advanced: Custom Loss Masking", "e9612beb")
def _masking(block: Block, world: w.World) -> None:
    """As it is printed all is trained, for its first example returns; without that return it is its second."""
    from nexrl.rollout_worker import BaseNexAURolloutWorker  # type: ignore[import-not-found]

    infos = [{"response_message": {"content": "x", "tool_calls": [{}]}}, {"response_message": {"content": "y"}}]
    for body, expected in ((block.body, [True, True]), (block.body.replace("return [True] * len(trajectory_infos)", ""), [False, True])):
        cls = w.run(body, BaseNexAURolloutWorker=BaseNexAURolloutWorker)["MyTaskWorker"]
        with w.worker(cls, world, evaluator=lambda row, answer: 1.0) as worker:
            assert worker.get_train_loss_mask(infos) == expected
            assert all(sum(t.loss_mask) > 0 for t in worker.run([{"prompt": "a"}]))


@runs("user-guide", "Complete Custom Worker Example", "0e2fbaf5")
def _complete_worker(block: Block, world: w.World) -> None:
    cls = load_object(f"{world.write(f'{WORKSPACE}/my_worker.py', block.body)}:ComplexTaskWorker")
    seen: list[Any] = []

    def reward(row: Any, answer: str) -> dict[str, float]:
        seen.append(answer)
        return {"reward": 0.25, "length": float(len(answer))}

    with w.worker(cls, world, evaluator=reward) as worker:
        found = worker.run([{"prompt": "a"}])
    assert len(found) == 2 and [t.status for t in found] == ["ok", "ok"], [t.get("error") for t in found]
    assert {t.reward for t in found} == {0.25} and sorted(t.get("final_answer") for t in found) == sorted(seen) and all(sum(t.loss_mask) > 0 and len(t.tokens) == len(t.loss_mask) for t in found)


@runs("user-guide", "Pattern 1: Multi-Turn Conversation Task", "31434618")
def _multi_turn(block: Block, world: w.World) -> None:
    from nexrl.rollout_worker import BaseNexAURolloutWorker  # type: ignore[import-not-found]

    cls = w.run(block.body, BaseNexAURolloutWorker=BaseNexAURolloutWorker)["MultiTurnWorker"]
    row = {"conversation": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "query": "and?"}
    with w.worker(cls, world, evaluator=lambda row, answer: 1.0) as worker:
        assert worker.format_task_query(row) == "user: hi\nassistant: hello\nuser: and?\nassistant:"
        assert [t.status for t in worker.run([row])] == ["ok", "ok"]


# -- user-guide: evaluators ----------------------------------------------------------------------------------------


def _judged(cls: Any, row: dict[str, Any], answer: str) -> Any:
    """What an evaluator says, also through the scoring that a run uses."""
    from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget, as_evaluator, score

    result, scored = cls().evaluate(row, BaseEvaluationTarget(answer)), score(as_evaluator(cls), row, BaseEvaluationTarget(answer))
    assert scored.status == "ok" and scored.reward == pytest.approx(result.reward)
    return result


@runs("user-guide", "Minimal Setup for a New Task", "bedb3ba2")
def _minimal_evaluator(block: Block, world: w.World) -> None:
    cls = load_object(f"{world.write(f'{WORKSPACE}/evaluator.py', block.body)}:MyEvaluator")
    assert [_judged(cls, {"answer": "4"}, a).reward for a in ("4", "5")] == [1.0, 0.0]


@runs("user-guide", "Basic Evaluator Structure", "0383e028")
def _basic_evaluator(block: Block, world: w.World) -> None:
    cls = load_object(f"{world.write(f'{WORKSPACE}/evaluator.py', block.body)}:MyEvaluator")
    result = _judged(cls, {"answer": "4", "id": "x"}, " 4 ")
    assert (result.reward, result.ground_truth, result.metrics, result.extra_info["data_id"]) == (1.0, "4", {"exact_match": 1.0, "output_length": 3.0}, "x")


@runs("user-guide", "Pattern 1: Answer Extraction with Regex", "418cf1ba")
def _extraction(block: Block, world: w.World) -> None:
    cls = w.run(block.body)["ExtractorEvaluator"]
    assert [_judged(cls, {"answer": "4"}, a).reward for a in ("<answer> 4\n</answer>", "<answer>5</answer>", "4")] == [1.0, 0.0, 0.0]
    assert _judged(cls, {"answer": "4"}, "4").metrics == {"extraction_failed": 1.0}


@runs("user-guide", "Pattern 2: Multi-Criteria Evaluation", "f4a33f69")
def _criteria(block: Block, world: w.World) -> None:
    result = _judged(w.run(block.body)["MultiCriteriaEvaluator"], {"answer": "red blue", "required_points": ["Red", "green"]}, "red blue")
    assert result.metrics == {"correctness": 1.0, "completeness": 0.5, "clarity": 0.3} and result.reward == pytest.approx(0.5 + 0.15 + 0.06)


@runs("user-guide", "Pattern 3: LLM-as-Judge Evaluation", "046a413d")
def _llm_judge(block: Block, world: w.World) -> None:
    for said, reward in ((" 0.75 ", 0.75), ("7", 1.0), ("well done", 0.0)):
        with w.judge(said) as asked:
            cls = w.run(block.body)["LLMJudgeEvaluator"]
            assert _judged(cls, {"question": "2+2?", "reference_answer": "4"}, "four").reward == reward
        assert len(asked) == 2 and asked[0]["model"] == "gpt-4" and "four" in asked[0]["messages"][0]["content"]


@runs("user-guide", "Pattern 2: Code Generation Task", "c0879c42")
def _code(block: Block, world: w.World) -> None:
    tests = [{"function_name": "double", "inputs": [x], "expected_output": y} for x, y in ((1, 2), (2, 4), (3, 7))]
    result = _judged(w.run(block.body)["CodeGenEvaluator"], {"test_cases": tests}, "Here:\n```python\ndef double(x):\n    return 2 * x\n```\n")
    assert result.metrics == {"test_pass_rate": pytest.approx(2 / 3), "tests_passed": 2.0, "tests_failed": 1.0}


@runs("user-guide", "Pattern 3: Reasoning Task with Chain of Thought", "fc5e0923")
def _reasoning(block: Block, world: w.World) -> None:
    from nexrl.rollout_worker import BaseNexAURolloutWorker  # type: ignore[import-not-found]

    found = w.run(block.body, BaseNexAURolloutWorker=BaseNexAURolloutWorker)
    result = _judged(found["ReasoningEvaluator"], {"answer": "4"}, f"<reasoning>Step 1. {'two and two ' * 5}</reasoning><answer>4</answer>")
    assert result.reward == 1.0 and _judged(found["ReasoningEvaluator"], {"answer": "4"}, "<answer>4</answer>").reward == pytest.approx(0.7)
    with w.worker(found["ReasoningWorker"], world, evaluator=found["ReasoningEvaluator"]) as worker:
        assert worker.format_task_query({"question": "2+2?"}).startswith("Question: 2+2?\n") and [t.reward for t in worker.run([{"question": "2+2?", "answer": "4"}])] == [0.0, 0.0]


# -- user-guide: trainers, and what helps to find mistakes ------------------------------------------------------------


@runs("user-guide", "Extending SelfHostedTrainer", "08f7fee2")
def _custom_batch(block: Block, world: w.World) -> None:
    cls = w.run(block.body, compute_my_advantages=lambda batch: torch.tensor(batch.metadata["rewards"]))["MyCustomTrainer"]  # the page leaves it to the reader
    prepared, metrics = w.bare(cls, algorithm={"my_param": 2.0})._prepare_batch(w.dummy_batch())
    assert metrics["my_algorithm/mean_advantage"] == 0.5 and "advantages" in prepared.values


@runs("user-guide", "Extending RemoteApiTrainer", "e0cc9784")
def _custom_trajectories(block: Block, world: w.World) -> None:
    cls = w.run(block.body, compute_feature=lambda t: len(t.tokens), compute_my_metric=len)["MyRemoteTrainer"]  # the page leaves both to the reader
    metrics: dict[str, Any] = {}
    assert [t["custom_feature"] for t in w.bare(cls)._prepare_trajectories(w.dummy_trajectories(), metrics)] == [5] * 4 and metrics == {"my_metric": 4}


@runs("user-guide", "SelfHostedGrpoTrainer", "dcd0af20")
def _grpo_batch(block: Block, world: w.World) -> None:
    """With its ellipses filled in, it prepares what our own method prepares."""
    body = block.body.replace("padding(...)", "padding(batch, pad_token_id=self._pad_token_id)").replace("(batch, ...)", "(batch)")
    with Trainer(world.recipe("")) as trainer:
        rollouts = trainer.rollout()
        ours = trainer.prepare(rollouts)
        raw = Batch.from_trajectories(list(rollouts), pad_token_id=trainer._pad_token_id)  # type: ignore[attr-defined]
        cls = w.within(body, type(trainer))
        trainer.__class__ = cls
        prepared, _ = trainer._prepare_batch(raw, {})  # type: ignore[attr-defined,call-arg]
    for key in ("advantages", "old_log_probs", "token_level_scores"):
        assert torch.as_tensor(prepared.values[key]).shape == torch.as_tensor(prepared.values["input_ids"]).shape
    assert torch.allclose(torch.as_tensor(prepared.values["advantages"]).float(), torch.as_tensor(ours.values["advantages"]).float(), atol=1e-5)


@runs("user-guide", "Enable Debug Logging", "eb2cf812")
def _debug_logging(block: Block, world: w.World) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    named = logging.getLogger("documents.debug")
    named.addHandler(handler)
    try:
        w.run(block.body, __name__="documents.debug", task={"id": 1}, query="q", output="o")
    finally:
        named.removeHandler(handler)
        named.setLevel(logging.NOTSET)
    assert len(seen) == 3 and seen[-1].endswith("o")


@runs("user-guide", "Test Components Independently", "b9fb72dc")
def _standalone(block: Block, world: w.World) -> None:
    world.write(f"{WORKSPACE}/evaluator.py", world.bodies["0383e028"])
    code = "import nexrl_sdk.compat\n" + block.body
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=world.folder, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(world.folder), str(Path(compat.__file__).parents[1])])})
    assert done.stdout.startswith("Reward: 0.0, Metrics: {'exact_match': 0.0"), done.stderr


@runs("user-guide", "Monitor Training", "a6e83190")
def _monitor(block: Block, world: w.World) -> None:
    from nexrl_sdk.run.track import ActivityTracker

    logged: list[Any] = []
    tracker = ActivityTracker({"wandb": SimpleNamespace(log=lambda step, metrics: logged.append((step, dict(metrics))), close=lambda: None)})  # type: ignore[dict-item]
    w.run(block.body, self=SimpleNamespace(_activity_tracker=tracker), value=0.5, count=3, current_step=7)
    assert logged == [(7, {"custom_metric": 0.5, "agent_calls": 3})]


def test_the_copy_that_other_tests_read_is_the_document():
    """`tests/trainer/test_custom_trainers.py` goes through that page where the documents are not at hand, too."""
    copy = Path(__file__).parents[1] / "trainer" / "custom_trainers.md"
    assert copy.read_bytes() == (FOLDER / "custom-trainers.md").read_bytes()
