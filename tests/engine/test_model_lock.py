"""One model for many: whose turn it is, and adapters that come, are copied and go."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import EngineModel, FairLock, LoraConfig, load_model
from nexrl_sdk.engine.sampler import Sampler
from nexrl_sdk.types import AdamParams, ConfigError, Datum, SamplingParams

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def model(tiny) -> EngineModel:
    return load_model(tiny("qwen2"), dtype="float32")


def data(count: int, seed: int = 0) -> list[Datum]:
    rows = np.random.default_rng(seed).integers(0, 250, (count, 12))
    return [Datum(r[:-1], r[1:], {"weights": np.ones(11)}) for r in rows]


def train(model: EngineModel, learner: Learner, adapter: str, seed: int = 0) -> None:
    learner.forward_backward(data(4, seed), adapter=adapter)
    learner.optim_step(AdamParams(learning_rate=0.05), adapter=adapter)


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def stranger(lock: FairLock) -> None:
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()


def test_a_fair_lock_is_reentrant_and_refuses_who_does_not_hold_it() -> None:
    lock = FairLock()
    with lock, lock:
        lock.acquire()
        lock.release()
        other = threading.Thread(target=stranger, args=(lock,))
        other.start()
        other.join()
        assert lock._owner == threading.get_ident()
    assert lock._owner is None
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()


def test_nothing_is_lost_among_many_threads() -> None:
    lock, count = FairLock(), [0]

    def work() -> None:
        for _ in range(300):
            with lock:
                before = count[0]
                if before % 7 == 0:
                    time.sleep(0)
                with lock:
                    count[0] = before + 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert count[0] == 2400 and lock._owner is None and not lock._queue


def test_who_gives_up_waiting_is_passed_over() -> None:
    lock, got = FairLock(), []

    def wait(name: str) -> None:
        ticket = threading.get_ident(), threading.Lock()
        if name == "gives up":
            ticket[1].acquire()
            with lock._guard:
                lock._queue.append(ticket)
            until(lambda: len(lock._queue) == 2)
            lock._withdraw(ticket)
            got.append(name)
        else:
            with lock:
                got.append(name)

    with lock:
        first = threading.Thread(target=wait, args=("gives up",))
        first.start()
        until(lambda: len(lock._queue) == 1)
        second = threading.Thread(target=wait, args=("waits",))
        second.start()
        first.join()
    second.join()
    assert got == ["gives up", "waits"] and lock._owner is None


def test_sampling_goes_on_between_micro_batches(model: EngineModel) -> None:
    model.add_adapter("a")
    sampler, learner = Sampler(model), Learner(model, token_budget=1, share_prefixes=False)
    order: list[str] = []
    step, micro = Sampler._cycle, learner._micro_batch

    def cycle(self: Sampler) -> bool:
        with model.lock:
            order.append("token")
        return step(self)

    def micro_batch(layout, call):
        order.append("micro-batch")
        return micro(layout, call)

    sampler._cycle = lambda: cycle(sampler)  # type: ignore[method-assign]
    learner._micro_batch = micro_batch  # type: ignore[method-assign]
    future = sampler.submit([[1, 2, 3]], SamplingParams(max_tokens=400, stop=[]), adapter="a")
    until(lambda: "token" in order)
    learner.forward_backward(data(40), adapter="a")
    future.cancel()
    assert order.count("micro-batch") == 40
    first, last = order.index("micro-batch"), len(order) - 1 - order[::-1].index("micro-batch")
    between = order[first:last]
    assert between.count("token") >= 30, "the learner did not let the sampler in"
    until(lambda: sampler._thread is None)


def test_a_copy_is_equal_and_then_its_own(model: EngineModel) -> None:
    model.add_adapter("a", LoraConfig(rank=3, alpha=5, train_unembed=True))
    learner, sampler = Learner(model), Sampler(model)
    train(model, learner, "a")
    model.copy_adapter("a", "b")
    text = [[1, 2, 3, 4, 5]]
    same = [sampler.logprobs(text, x)[0] for x in ("a", "b", None)]
    np.testing.assert_array_equal(same[0], same[1])
    assert np.nanmax(np.abs(same[0] - same[2])) > 1e-3
    train(model, learner, "a", seed=1)
    after = [sampler.logprobs(text, x)[0] for x in ("a", "b")]
    np.testing.assert_array_equal(after[1], same[1])
    assert np.nanmax(np.abs(after[0] - after[1])) > 1e-3
    generation = model.generation
    model.copy_adapter("a", "b")
    assert model.generation > generation
    np.testing.assert_array_equal(sampler.logprobs(text, "b")[0], after[0])
    assert [p.data_ptr() for p in model.parameters("a").values()] != [p.data_ptr() for p in model.parameters("b").values()]


def test_a_copy_onto_another_shape_and_names_that_cannot_be(model: EngineModel) -> None:
    model.add_adapter("a", LoraConfig(rank=2))
    model.add_adapter("b", LoraConfig(rank=3))
    model.add_adapter("c", LoraConfig(rank=2, train_mlp=False))
    model.add_adapter("d", LoraConfig(rank=2, alpha=1))
    for name in "bcd":
        before = {n: p.detach().clone() for n, p in model.parameters(name).items()}
        with pytest.raises(ConfigError, match="another rank, scale or set of layers"):
            model.copy_adapter("a", name)
        assert all(torch.equal(p, before[n]) for n, p in model.parameters(name).items())
    with pytest.raises(ConfigError, match="there is no adapter 'x'"):
        model.copy_adapter("x", "e")
    for name in ("layers", "q_proj", "weight", "lora_A"):
        with pytest.raises(ConfigError, match="part of the model"):
            model.copy_adapter("a", name)
    with pytest.raises(ConfigError, match="letters, digits and underscores"):
        model.copy_adapter("a", "run-1:2")
    assert model.adapters == ["a", "b", "c", "d"]
