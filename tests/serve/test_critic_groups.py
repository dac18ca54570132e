"""Critics: in this process, in a service, and over two ranks, the same numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nexrl_sdk.backend.http import HTTPTrainServiceClient
from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.service import TrainServiceClient
from nexrl_sdk.backend.train_server import start_train_service
from nexrl_sdk.types import BackendError, Batch, ConfigError, DataError

SETTINGS = {"actor": {"optim": {"lr": 5e-3}, "cliprange_value": 0.5, "ppo_epochs": 2, "mini_batch_size": 3}}


def make_batch(vocab: int = 250) -> Batch:
    rng = np.random.default_rng(1)
    ids, attended = rng.integers(3, vocab, (6, 12)), np.ones((6, 12), np.int64)
    attended[0, 9:] = attended[3, 10:] = 0
    sampled = attended * (np.arange(12) >= 5)
    values = {"input_ids": ids, "attention_mask": attended, "position_ids": np.tile(np.arange(12), (6, 1)), "loss_mask": sampled, "returns": rng.normal(size=(6, 12)).astype(np.float32) * sampled}
    return Batch({k: torch.as_tensor(v) for k, v in values.items()}, {})


def learn(client: TrainServiceClient, batch: Batch) -> tuple[list[float], np.ndarray]:
    """Losses of four updates, and the values after them."""
    losses = []
    for _ in range(4):
        batch.values["values"] = torch.as_tensor(client.compute_values(batch.to_nextrainer_batch())["tensors"]["values"])
        losses.append(client.update_critic(batch.to_nextrainer_batch())["metrics"]["loss"])
    return losses, np.asarray(client.compute_values(batch.to_nextrainer_batch())["tensors"]["values"])


@pytest.mark.timeout(240)
def test_one_process_a_service_and_two_ranks_agree(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("qwen2", dtype="float32")
    here = LocalBackend(model, dtype="float32", values=True).train_service
    here.initialize_worker(config_dict=SETTINGS, role="critic")
    batch = make_batch()
    losses, values = learn(here, batch)
    assert losses[-1] < 0.8 * losses[0] and np.abs(values).max() > 0.1, "it learns the returns"
    assert not values[batch.values["attention_mask"].numpy() == 0].any() and not values[:, 0].any()
    with start_train_service(tmp_path / "root") as service:
        for size in (1, 2):
            with HTTPTrainServiceClient(service.url, f"critic{size}", key=service.key) as client:
                client.initialize_worker(config_dict={**SETTINGS, "model": {"path": str(model), "dtype": "float32", "device": "cpu"}}, role="critic", world_size=size)
                assert client.init_model()["role"] == "critic"
                theirs, found = learn(client, batch)
                np.testing.assert_allclose(theirs, losses, atol=1e-5)
                np.testing.assert_allclose(found, values, atol=3e-5)
                client.save_checkpoint("c/step_1")
                moved = learn(client, batch)[1]
                assert np.abs(moved - found).max() > 1e-3
                client.load_checkpoint("c/step_1")
                np.testing.assert_allclose(client.compute_values(batch.to_nextrainer_batch())["tensors"]["values"], found, atol=1e-6)
                for call, says in [(lambda c: c.compute_log_prob(batch.to_nextrainer_batch()), "is a critic"), (lambda c: c.forward([], "ppo"), "critic|no datums")]:
                    with pytest.raises((ConfigError, DataError), match=says):
                        call(client)


@pytest.mark.timeout(60)
def test_what_is_no_critic_says_so(tiny_qwen2: Path) -> None:
    policy, critic = LocalBackend(tiny_qwen2), LocalBackend(tiny_qwen2, values=True)
    batch = make_batch().to_nextrainer_batch()
    for call in (policy.train_service.compute_values, policy.train_service.update_critic):
        with pytest.raises(ConfigError, match="only a critic has values"):
            call(batch)
    with pytest.raises(ConfigError, match="is a language model"):
        policy.train_service.initialize_worker(role="critic")
    with pytest.raises(ConfigError, match="is a critic"):
        critic.train_service.initialize_worker(role="actor")
    critic.train_service.initialize_worker(role="critic")
    with pytest.raises(DataError, match="learns from a batch with returns"):
        critic.train_service.update_critic({**batch, "tensors": {k: v for k, v in batch["tensors"].items() if k != "returns"}})
    with pytest.raises(BackendError, match="does not sample"):
        critic.sample([[5]])
    with pytest.raises(ConfigError, match="learns by the loss value"):
        critic.train_service.initialize_worker(config_dict={"loss_fn": "ppo"}, role="critic")
    critic.close()
    policy.close()
