"""What tests of the training service send."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nexrl_sdk.types import Datum

ACTOR = {"optim": {"lr": 1e-3}, "ppo_epochs": 2, "ppo_mini_batch_size": 3, "use_kl_loss": True, "kl_loss_coef": 0.01, "entropy_coeff": 0.01}


def make_batch(seed: int = 0, rows: int = 6, width: int = 14) -> dict[str, Any]:
    """A prepared batch."""
    rng = np.random.default_rng(seed)
    ids, attention = rng.integers(3, 272, (rows, width)), np.ones((rows, width), np.int64)
    loss_mask = attention.copy()
    loss_mask[:, :4] = 0
    for i in range(rows):
        attention[i, width - i :] = loss_mask[i, width - i :] = 0
    tensors = {"input_ids": ids * attention, "attention_mask": attention, "position_ids": np.maximum(attention.cumsum(1) - 1, 0), "loss_mask": loss_mask,
               "advantages": rng.normal(size=(rows, width)).astype(np.float32), "old_log_probs": (rng.normal(-5.6, 0.3, (rows, width)) * loss_mask).astype(np.float32)}  # fmt: skip
    return {"tensors": {k: torch.from_numpy(v) for k, v in tensors.items()}, "values": {"model_tag": "default"}, "metadata": {"batch_size": rows, "rewards": [float("nan"), *[1.0] * (rows - 1)]}}


def make_datums(seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [Datum(rng.integers(0, 272, n), rng.integers(0, 272, n), {"weights": np.ones(n), "logprobs": rng.normal(-5.5, 0.1, n), "advantages": rng.normal(size=n)}) for n in (3, 7, 5)]
