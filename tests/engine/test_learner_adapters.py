"""The state of one adapter: taken out, put into another, refused where it does not fit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import EngineModel, LoraConfig, load_model
from nexrl_sdk.types import AdamParams, CheckpointError, ConfigError, Datum

torch.set_num_threads(1)
LORA = LoraConfig(rank=3, train_unembed=True)


def step(learner: Learner, adapter: str, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 250, (4, 12))
    learner.forward_backward([Datum(r[:-1], r[1:], {"weights": np.ones(11)}) for r in rows], adapter=adapter)
    learner.optim_step(AdamParams(learning_rate=0.05), adapter=adapter)


def weights(model: EngineModel, adapter: str) -> dict[str, torch.Tensor]:
    return {n.replace(f".{adapter}.", "."): p.detach().clone() for n, p in model.parameters(adapter).items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def copied(state: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return {n: t.clone() for n, t in state[0].items()}, dict(state[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_the_state_under_another_name_and_in_another_model(tiny, dtype: str) -> None:
    first = load_model(tiny("qwen2"), dtype=dtype)
    first.add_adapter("run_a", LORA)
    learner = Learner(first)
    [step(learner, "run_a", i) for i in range(3)]
    tensors, meta = copied(learner.state_of("run_a"))
    assert not any("run_a" in n for n in tensors)
    [step(learner, "run_a", i) for i in range(3, 5)]

    second = load_model(tiny("qwen2"), dtype=dtype)
    second.add_adapter("other", LoraConfig(rank=5))
    second.add_adapter("run_b", LORA)
    again = Learner(second)
    [step(again, x, 9) for x in ("run_b", "other")]
    before = weights(second, "other")
    again.load_state_of("run_b", tensors, meta)
    assert same(again.state_of("run_b")[0], tensors)
    [step(again, "run_b", i) for i in range(3, 5)]
    assert same(weights(second, "run_b"), weights(first, "run_a"))
    assert same(weights(second, "other"), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_alone_begin_with_fresh_moments(tiny, dtype: str) -> None:
    model = load_model(tiny("qwen2"), dtype=dtype)
    model.add_adapter("run_a", LORA)
    model.add_adapter("run_b", LORA)
    learner = Learner(model)
    [step(learner, "run_a", i) for i in range(3)]
    tensors, meta = copied(learner.state_of("run_a"))
    only = {n: t for n, t in tensors.items() if n.startswith("adapter/weight/")}
    for given in (tensors, only):
        step(learner, "run_b", 7)
        learner.forward_backward([Datum([1, 2], [2, 3], {"weights": np.ones(2)})], adapter="run_b")
        learner.load_state_of("run_b", given, meta, optimizer=False)
        assert learner.gradients("run_b") == {}
        assert same(weights(model, "run_a"), weights(model, "run_b"))
        rest = {n: t for n, t in learner.state_of("run_b")[0].items() if not n.startswith(("adapter/weight/", "adapter/master/"))}
        assert rest and not any(t.any() for t in rest.values())
    with pytest.raises(CheckpointError, match="it lacks"):
        learner.load_state_of("run_b", only, meta)


def test_what_does_not_fit_changes_nothing(tiny) -> None:
    model = load_model(tiny("qwen2"), dtype="float32")
    for name, lora in {"run_a": LORA, "rank": LoraConfig(rank=2, train_unembed=True), "layers_": LoraConfig(rank=3), "alpha": LoraConfig(rank=3, alpha=1, train_unembed=True)}.items():
        model.add_adapter(name, lora)
    learner = Learner(model)
    for i, name in enumerate(model.adapters):
        step(learner, name, i)
    tensors, meta = copied(learner.state_of("run_a"))
    for name, match in (("rank", "not fit"), ("layers_", "not fit"), ("alpha", "scaled by")):
        before = copied(learner.state_of(name))[0]
        for optimizer in (True, False):
            with pytest.raises(CheckpointError, match=match):
                learner.load_state_of(name, tensors, meta, optimizer)
        assert same(learner.state_of(name)[0], before)
    with pytest.raises(CheckpointError, match="other base weights"):
        learner.load_state_of("run_a", tensors, {**meta, "base": "0" * 16})
    with pytest.raises(ConfigError, match="no adapter 'x'"):
        learner.state_of("x")


def test_forgetting_one_leaves_the_others(tiny) -> None:
    model = load_model(tiny("qwen2"), dtype="float32")
    for name in ("run_a", "run_b"):
        model.add_adapter(name, LORA)
    learner = Learner(model)
    for name in ("run_a", "run_b"):
        step(learner, name, 0)
        learner.forward_backward([Datum([1, 2], [2, 3], {"weights": np.ones(2)})], adapter=name)
    kept = copied(learner.state_of("run_b"))[0]
    learner.forget("run_a")
    assert learner.gradients("run_a") == {} and learner.gradients("run_b")
    assert not any(t.any() for n, t in learner.state_of("run_a")[0].items() if "/weight/" not in n)
    assert same(learner.state_of("run_b")[0], kept)
    model.remove_adapter("run_a")
    learner.forget("run_a")
    learner.forget("never was")
    assert "run_a" not in learner._optimizers


@pytest.mark.timeout(60)
def test_an_adapter_removed_between_micro_batches_ends_the_call_with_its_name(tiny) -> None:
    model = load_model(tiny("qwen2"), dtype="float32")
    for name in ("run_a", "run_b"):
        model.add_adapter(name, LORA)
    learner = Learner(model, token_budget=1)
    micro, seen = learner._micro_batch, []

    def micro_batch(layout: Any, call: Any) -> torch.Tensor:
        out = micro(layout, call)
        seen.append(1)
        if len(seen) == 2:
            other = threading.Thread(target=model.remove_adapter, args=("run_a",))
            other.start()
            while not model.lock._queue:
                pass
        return out

    learner._micro_batch = micro_batch  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no adapter 'run_a'"):
        learner.forward_backward([Datum([i, 2], [2, 3], {"weights": np.ones(2)}) for i in range(9)], adapter="run_a")
    assert len(seen) == 2
    learner.forward_backward([Datum([1, 2], [2, 3], {"weights": np.ones(2)})], adapter="run_b")
