"""An inference engine over a second local backend, whose every step can be made to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from nexrl_sdk.backend.inference import InferenceEngine
from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.vllm_ext import read_folder, weights_fingerprint
from nexrl_sdk.engine.broadcast import WeightChannel
from nexrl_sdk.types import AdamParams, BackendError, Completion, Datum, SamplingParams


class FakeEngine(InferenceEngine):
    """Samples with a model of its own; takes weights tensor by tensor, so that a failure leaves it half-way."""

    def __init__(self, folder: Path):
        self.backend = LocalBackend(folder, dtype="float32", device="cpu")
        self.base = {k: v.clone() for k, v in self.backend.model.base.state_dict().items()}
        self.version, self.paused, self.calls = 0, False, []
        self.faults: dict[str, Callable[[], None]] = {}  # called at a step; may raise, or wait
        self.skip: set[str] = set()  # weights that an update forgets, silently
        self._receiver: tuple[threading.Thread, dict[str, Any]] | None = None

    def _step(self, name: str) -> None:
        self.calls.append(name)
        self.faults.get(name, lambda: None)()

    def sample(self, prompts: Sequence[Sequence[int]], params: Any = None, n: int = 1, stop_flag: Any = None) -> list[list[Completion]]:
        assert not self.paused, "sampled while paused"
        return self.backend.sample(prompts, params or SamplingParams(max_tokens=4), n, stop_flag)

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        self._step("logprobs")
        out = self.backend.forward([datum(s) for s in sequences], "cross_entropy", {"temperature": temperature})
        return [np.concatenate([[np.nan], x.astype(np.float64)]) for x in out.logprobs]

    def pause(self) -> None:
        self._step("pause")
        self.paused = True

    def resume(self) -> None:
        self._step("resume")
        self.paused = False

    def reset_prefix_cache(self) -> None:
        self._step("reset_prefix_cache")

    def _take(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        state = self.backend.model.base.state_dict()
        for i, (name, tensor) in enumerate(named):
            if i == 5:
                self._step("half-way")
            if name not in self.skip:
                with torch.no_grad():
                    state[name].copy_(tensor)
        self.version = version

    def update_from_folder(self, path: str | Path, version: int, fingerprint: str | None = None) -> None:
        self._step("update")
        if fingerprint is not None and weights_fingerprint(read_folder(path)) != fingerprint:
            raise BackendError(f"{path}: fingerprint differs")
        self._take(read_folder(path), version)

    def update_from_adapter(self, path: str | Path, version: int) -> None:
        self._step("update")
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        tensors, merged = load_file(Path(path) / "adapter_model.safetensors"), dict(self.base)
        for key, a in tensors.items():
            if key.endswith("lora_A.weight"):
                b, name = tensors[key.replace("lora_A", "lora_B")], key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                merged[name] = self.base[name] + config["lora_alpha"] / config["r"] * b @ a
        self._take(merged.items(), version)

    def begin_broadcast(self, spec: Mapping[str, Any]) -> None:
        self._step("begin")
        out: dict[str, Any] = {}

        def receive() -> None:
            try:
                with WeightChannel(spec, 1) as channel:
                    self._take(channel.receive(), -1)
            except Exception as e:
                out["error"] = e

        self._receiver = (threading.Thread(target=receive, daemon=True), out)
        self._receiver[0].start()

    def update_broadcast(self, spec: Mapping[str, Any], version: int) -> None:
        self._step("update")
        assert self._receiver is not None
        thread, out = self._receiver
        thread.join(30)
        if thread.is_alive() or "error" in out:
            raise BackendError(f"receiving failed: {out.get('error', 'timeout')}")
        self.version = version

    def update_in_process(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._step("update")
        self._take(named, version)

    @property
    def weight_version(self) -> int:
        return self.version

    @property
    def max_length(self) -> int | None:
        return self.backend.capabilities.max_length

    def health(self) -> dict[str, Any]:
        return {"paused": self.paused}

    def close(self) -> None:
        self.backend.close()


def datum(tokens: Sequence[int]) -> Datum:
    """A sequence whose every next token counts."""
    return Datum(np.array(tokens[:-1]), np.array(tokens[1:]), {"weights": np.ones(len(tokens) - 1, dtype=np.float32)})


def train_step(backend: Any, tokens: Sequence[int] = (10, 20, 30, 40, 50, 60), lr: float = 1e-3) -> None:
    """One supervised step."""
    backend.forward_backward([datum(tokens)], "cross_entropy", {})
    backend.optim_step(AdamParams(lr))
