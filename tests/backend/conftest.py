"""A vLLM server for the whole session: it takes half a minute to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# vLLM's attention on a CPU knows head dimensions from 32 up
VLLM_SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2560}


@pytest.fixture(scope="session")
def vllm_model(tiny: Callable[..., Path]) -> Callable[[int], Path]:
    """`vllm_model(seed)`: a folder with a tiny tied Qwen2 that vLLM can serve."""
    return lambda seed=0: tiny("qwen2", seed=seed, **VLLM_SHAPE)


@pytest.fixture(scope="session")
def vllm_server(vllm_model: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of `vllm_model(0)` that takes weights and adapters of rank 8 from the temporary folder."""
    pytest.importorskip("vllm")
    from nexrl_sdk.backend.vllm import VLLMServer

    root = tmp_path_factory.getbasetemp()
    server = VLLMServer(vllm_model(0), dtype="float32", max_model_len=2560, lora_rank=8, weights_root=root, args=["--enforce-eager"])
    with server:
        yield server
