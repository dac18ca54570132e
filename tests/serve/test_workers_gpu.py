"""Ranks on GPUs over NCCL; skipped where there is none. `pytest -m gpu -s tests/serve/test_workers_gpu.py` prints what it measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.serve.workers import WorkerGroup
from nexrl_sdk.types import AdamParams, Datum

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.xdist_group("workers_gpu")]
SHAPE = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.02}


@pytest.fixture(scope="module")
def half_billion(tiny: Callable[..., Path]) -> Path:
    """A random model in the shape of Qwen2.5-0.5B."""
    return tiny("qwen2", dtype="bfloat16", **SHAPE)


def make_data(seed: int, count: int, length: int) -> list[Datum]:
    """Sequences of one length, all of whose tokens count."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 151936, (count, length + 1))
    fields = {"weights": np.ones(length), "logprobs": np.full(length, -12.0), "advantages": rng.normal(size=length)}
    return [Datum(r[:-1], r[1:], fields) for r in rows]


@pytest.mark.parametrize("lora", [None, {"rank": 16}], ids=["full", "lora"])
def test_one_gpu_over_nccl_equals_the_local_backend(half_billion: Path, lora: dict[str, int] | None) -> None:
    data = make_data(0, 8, 256)
    with WorkerGroup(half_billion, 1, device="cuda", lora=lora, token_budget=2048) as group:
        local = LocalBackend(half_billion, device="cuda", lora=lora, token_budget=2048)
        for _ in range(2):
            a, b = (x.forward_backward(data, "importance_sampling") for x in (group, local))
            assert a.loss == pytest.approx(b.loss, rel=5e-2, abs=1.0)
            assert float(np.mean([np.abs(x - y).mean() for x, y in zip(a.logprobs, b.logprobs)])) < 0.05
            assert group.optim_step(AdamParams(1e-5))["grad_norm"] == pytest.approx(local.optim_step(AdamParams(1e-5))["grad_norm"], rel=0.1)


@pytest.mark.parametrize("lora", [None, {"rank": 16}], ids=["full", "lora"])
def test_tokens_per_second_and_memory(half_billion: Path, lora: dict[str, int] | None) -> None:
    size, data = torch.cuda.device_count(), make_data(1, 32, 1024)
    with WorkerGroup(half_billion, size, device="cuda", lora=lora, token_budget=16384, gradient_checkpointing=True) as group:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            group.forward_backward(data, "importance_sampling")
            group.optim_step(AdamParams(1e-5))
            times.append(time.perf_counter() - start)
        peak = max(r["peak_memory"] for r in group.rank_info())
    print(f"\n{'lora' if lora else 'full'}, {size} GPU(s): {32 * 1024 / min(times):,.0f} tokens/s, peak {peak / 2**30:.2f} GiB a GPU")
    assert peak > 0
