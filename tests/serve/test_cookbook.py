"""tinker-cookbook's own training loops, as published, against `nexrl serve tinker`, judged by the metrics that they write."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cookbook_data import NAME, chats, make_workspace, read_rows

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed; scripts/tinker_cookbook.py installs it")

from nexrl_sdk import serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("cookbook"), pytest.mark.filterwarnings("ignore")]
ALIAS = {"stable_reinforce": "importance_sampling"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("cookbook"))


@pytest.fixture(scope="module")
def server(workspace: Path) -> Iterator[Any]:
    with serve("tinker", models={NAME: workspace / NAME}, loss_alias=ALIAS) as running:
        yield running


@contextlib.contextmanager
def killed_server(workspace: Path, root: Path) -> Iterator[dict[str, str]]:
    """`nexrl serve tinker` in a process that is killed at the end; gives what clients need in their environment."""
    log = root.parent / "server.log"
    command = [sys.executable, "-m", "nexrl_sdk.launch.cli", "serve", "tinker", "--model", f"{NAME}={NAME}", "--root", str(root), "--port", "0"]
    with log.open("w") as out, subprocess.Popen(command, cwd=workspace, stdout=out, stderr=out) as process:
        try:
            while (found := re.search(r"http://[\d.]+:\d+", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield {"TINKER_BASE_URL": found[0], "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
        finally:
            process.kill()


def run(workspace: Path, server_env: dict[str, str], recipe: str, log: Path, *, fails: bool = False, **options: object) -> str:
    """Run a recipe as its own process; returns what it wrote to the terminal."""
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={NAME}", f"log_path={log}", *[f"{k}={v}" for k, v in options.items()]]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(workspace / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=workspace, env={**os.environ, **offline, **server_env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert (done.returncode != 0) == fails, done.stdout[-4000:]
    return done.stdout


def metrics(log: Path, key: str) -> list[Any]:
    """One of the numbers that a loop logged, step by step."""
    return [row[key] for row in read_rows(log / "metrics.jsonl") if key in row]


def first_nll(workspace: Path, batch: int) -> float:
    """Of sl_loop's first batch before training, by transformers in float64."""
    import torch
    from datasets import Dataset
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.supervised.data import conversation_to_datum
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(workspace / NAME, dtype=torch.float64)
    renderer = get_renderer("qwen3", AutoTokenizer.from_pretrained(workspace / NAME))
    total = weight = 0.0
    for row in Dataset.from_list(chats(64)).shuffle(seed=0).select(range(batch)):
        datum = conversation_to_datum(row["messages"], renderer, 4096, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
        targets, weights = (torch.tensor(datum.loss_fn_inputs[k].data) for k in ("target_tokens", "weights"))
        with torch.no_grad():
            logprobs = model(torch.tensor(datum.model_input.to_ints())[None]).logits[0].log_softmax(-1)
        total -= float((logprobs.gather(-1, targets[:, None])[:, 0] * weights).sum())
        weight += float(weights.sum())
    return total / weight


def test_supervised_loop_resumes_on_another_server(workspace: Path, tmp_path: Path) -> None:
    """From its checkpoint, after the server was killed, the loop logs what it logged without interruption."""
    options = {"batch_size": 8, "max_steps": 6, "save_every": 2, "learning_rate": 5e-3}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with killed_server(workspace, tmp_path / "root") as env:
        run(workspace, env, "sl_loop", whole, **options)
    nll = metrics(whole, "train_mean_nll")
    assert nll[0] == pytest.approx(first_nll(workspace, 8), rel=1e-5) and nll[-1] < 0.7 * nll[0]
    resumed.mkdir()
    kept = (whole / "checkpoints.jsonl").read_text().splitlines()[:2]  # as if the loop had ended after its fourth step
    assert '"batch": 4' in kept[-1]
    (resumed / "checkpoints.jsonl").write_text("\n".join(kept) + "\n")
    with serve("tinker", models={NAME: workspace / NAME}, root=tmp_path / "root") as other:
        run(workspace, other.env, "sl_loop", resumed, **options)
    assert metrics(resumed, "step") == [4, 5]
    for key in ("train_mean_nll", "grad_norm", "learning_rate", "num_tokens"):
        assert metrics(resumed, key) == metrics(whole, key)[4:], key


RL = {"batch_size": 8, "group_size": 8, "max_tokens": 12, "learning_rate": 3e-3}


def test_rl_loop_learns(workspace: Path, server: Any, tmp_path: Path) -> None:
    """The RL loop, with the loss that it asks for by default: of the shape that is right by chance, the answers become right."""
    said = run(workspace, server.env, "rl_loop", tmp_path, max_steps=14, **RL)
    rewards = metrics(tmp_path, "reward/total")
    assert len(rewards) == 14 and sum(rewards[:3]) < 1.5 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.9, rewards
    assert "'stable_reinforce' is computed as 'importance_sampling'" in said
    assert read_rows(tmp_path / "checkpoints.jsonl")[-1]["sampler_path"].startswith("tinker://")


def test_the_default_loss_is_refused_without_an_alias(workspace: Path, tmp_path: Path) -> None:
    """Nothing else is computed in its place, unless the server was told to."""
    with serve("tinker", models={NAME: workspace / NAME}) as plain:
        said = run(workspace, plain.env, "rl_loop", tmp_path, fails=True, max_steps=1, **RL)
    assert "--loss-alias stable_reinforce=importance_sampling" in said


@pytest.mark.parametrize(
    "options", [{"loss_fn": "importance_sampling", "max_steps_off_policy": 1}, {"loss_fn": "ppo", "num_substeps": 2}, {"loss_fn": "cispo"}], ids=lambda o: o["loss_fn"]
)
def test_math_rl(workspace: Path, server: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """The full RL trainer: on the policy, what was sampled is scored as it was drawn, and replies learn to end."""
    run(workspace, server.env, "math_rl.train", tmp_path / "log", env="arithmetic", group_size=8, groups_per_batch=8, max_steps=5, eval_every=0, save_every=2, learning_rate=5e-3, **options)
    ended = metrics(tmp_path / "log", "env/all/format")
    assert len(ended) >= 4 and max(ended[-2:]) > ended[0] + 0.2, ended
    if options["loss_fn"] == "cispo":
        assert max(map(abs, metrics(tmp_path / "log", "optim/kl_sample_train_v1"))) < 1e-5


def merged_difference(workspace: Path, server: Any, path: str, folder: Path) -> float:
    """Largest difference in logprobs between the server and transformers, which runs what the cookbook merged from a checkpoint's adapter."""
    import tinker
    import torch
    from tinker_cookbook import weights
    from transformers import AutoModelForCausalLM

    adapter = server.hub.store.find(*path.removeprefix("tinker://").split("/")).folder
    weights.build_hf_model(base_model=str(workspace / NAME), adapter_path=str(adapter), output_path=str(folder))
    tokens = torch.arange(20, 60)
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None]).logits[0].log_softmax(-1)
    with tinker.ServiceClient() as client:
        scored = client.create_sampling_client(model_path=path).compute_logprobs(tinker.types.ModelInput.from_ints(tokens.tolist())).result()
    return float((logprobs[:-1].gather(-1, tokens[1:, None])[:, 0] - torch.tensor(scored[1:])).abs().max())


def test_chat_sl(workspace: Path, server: Any, tmp_path: Path) -> None:
    """The full supervised trainer, with checkpoints on the way; the cookbook merges the last into a model that scores as the server does."""
    run(workspace, server.env, "chat_sl.train", tmp_path / "log", dataset="chats.jsonl", batch_size=8, max_steps=6, save_every=3, eval_every=3, learning_rate=5e-3)
    nll = metrics(tmp_path / "log", "train_mean_nll")
    assert len(nll) == 6 and nll[-1] < 0.7 * nll[0]
    assert merged_difference(workspace, server, read_rows(tmp_path / "log/checkpoints.jsonl")[-1]["sampler_path"], tmp_path / "merged") < 1e-4


def test_preferences(workspace: Path, server: Any, tmp_path: Path) -> None:
    """DPO: a loss that the client computes, from ln 2 on."""
    run(workspace, server.env, "preference.dpo.train", tmp_path / "log", dataset="hhh", batch_size=8, max_steps=6, learning_rate=2e-3)
    loss = metrics(tmp_path / "log", "dpo_loss")
    assert loss[0] == pytest.approx(math.log(2)) and loss[-1] < 0.6 and metrics(tmp_path / "log", "accuracy")[-1] == 1.0
