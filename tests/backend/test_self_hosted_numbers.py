"""One batch after another through a local backend, a service of one process, and a service of two: the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.train_server import RunningService, start_train_service
from nexrl_sdk.types import Batch, Trajectory

STEPS = 5
ACTOR = {"optim": {"lr": 3e-3, "grad_clip": 1.0, "lr_scheduler": "cosine", "warmup_steps": 2, "total_steps": STEPS}, "clip_ratio": 0.2, "ppo_epochs": 2, "ppo_mini_batch_size": 6,
         "loss_agg_mode": "token-mean", "entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.05}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with start_train_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def batch(step: int) -> dict[str, Any]:
    """Twelve answers of unequal length, with old logprobs and advantages."""
    rng = np.random.default_rng(step)
    rows = []
    for i in range(12):
        prompt, answer = int(rng.integers(2, 9)), int(rng.integers(1, 14))
        mask = [0] * prompt + [1] * answer
        logprobs = np.where(np.array(mask) > 0, rng.normal(-3, 0.5, prompt + answer), 0.0)
        rows.append(Trajectory(tokens=rng.integers(4, 260, prompt + answer).tolist(), loss_mask=mask, logprobs=logprobs.tolist(), reward=float(rng.random()), group_id=i // 4, run_id=i))
    made = Batch.from_trajectories(rows)
    mask_BT = torch.as_tensor(made.values["loss_mask"]).float()
    made.values["old_log_probs"] = torch.as_tensor(made.values["rollout_log_probs"])
    made.values["advantages"] = mask_BT * torch.as_tensor(rng.normal(0, 1, len(rows)), dtype=torch.float32)[:, None]
    made.metadata["global_step"] = step
    return made.to_nextrainer_batch()


def history(train: Any) -> list[dict[str, float]]:
    """Metrics of the steps."""
    return [train.update_actor(batch(step))["metrics"] for step in range(STEPS)]


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["full", "lora"])
def test_local_one_rank_and_two_ranks(lora: Any, service: RunningService, tiny_qwen2: Path, tmp_path: Path) -> None:
    with LocalBackend(tiny_qwen2, dtype="float32", device="cpu", lora=lora) as local:
        local.train_service.initialize_worker(config_dict={"actor": ACTOR})
        expected = history(local.train_service)
        final = weights(local.export(tmp_path / "local"))
    assert len({round(m["loss"], 6) for m in expected}) == STEPS and expected[0]["grad_norm"] > 0
    for ranks in (1, 2):
        name = f"{ranks}{'lora' if lora else 'full'}"
        client = service.client(name)
        client.initialize_worker(config_dict={"model": {"path": str(tiny_qwen2), "dtype": "float32", "device": "cpu", "lora": lora}, "actor": ACTOR}, world_size=ranks)
        client.init_model()
        assert client.worker_info()["world_size"] == ranks
        found = history(client)
        for step, (a, b) in enumerate(zip(expected, found, strict=True)):
            for key in ("loss", "grad_norm", "lr", "policy/entropy", "policy/clip_frac"):
                assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-5), (ranks, step, key)
        for key, value in weights(client.export_weights(f"final/{name}")["path"]).items():
            torch.testing.assert_close(value, final[key], rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
        client.deregister()
