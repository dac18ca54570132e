"""The one loop that all callers share: threads, coroutines, cancelling, faults, interruptions."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
import transformers as tf

from nexrl_sdk.engine.model import EngineModel, LoraConfig
from nexrl_sdk.engine.sampler import Sampler
from nexrl_sdk.types import BackendError, Interrupted, NonFiniteError, SamplingParams

torch.set_num_threads(1)
KINDS = ["qwen2", "gpt2"]


def build(name: str) -> EngineModel:
    torch.manual_seed(0)
    if name == "gpt2":
        return EngineModel(tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=512)))
    return EngineModel(tf.Qwen2ForCausalLM(tf.Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512)))


def tokens(groups) -> list[list[list[int]]]:
    return [[c.tokens for c in g] for g in groups]


def slow(sampler: Sampler, seconds: float = 0.002, at=None) -> list[int]:
    """Make each step take a while; returns a list that grows by the number of rows at each step. `at(step)` may raise."""
    seen: list[int] = []
    make = sampler._lane

    def lane(adapter):
        x = make(adapter)
        if not hasattr(x.decoder, "plain_step"):
            x.decoder.plain_step = x.decoder.step

            def step(newest):
                seen.append(len(newest))
                time.sleep(seconds)
                if at is not None:
                    at(len(seen))
                return x.decoder.plain_step(newest)

            x.decoder.step = step
        return x

    sampler._lane = lane
    return seen


CALLS = [([[i + 1, 2, 3][: 1 + i % 3]], SamplingParams(max_tokens=10 + 5 * i, seed=i, stop=[5]), 1 + i % 4) for i in range(8)]


@pytest.mark.parametrize("name", KINDS)
def test_callers_in_threads_share_the_batch_and_get_what_they_would_alone(name):
    model = build(name)
    alone = [tokens(Sampler(model).sample(*c)) for c in CALLS]
    sampler = Sampler(model)
    seen, got = slow(sampler), {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: tokens(sampler.sample(*CALLS[i]))})) for i in range(8)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert [got[i] for i in range(8)] == alone
    assert max(seen) > 4, "they were not batched"


@pytest.mark.parametrize("name", KINDS)
def test_coroutines_share_the_batch_without_a_thread_each(name):
    model = build(name)
    alone = [tokens(Sampler(model).sample(*c)) for c in CALLS]
    sampler = Sampler(model)
    seen = slow(sampler, 0.001)

    async def main():
        before = threading.active_count()
        tasks = [asyncio.create_task(sampler.sample_async(*c)) for c in CALLS * 4]
        await asyncio.sleep(0.01)
        assert threading.active_count() <= before + 1
        return await asyncio.gather(*tasks)

    assert [tokens(x) for x in asyncio.run(main())] == alone * 4
    assert max(seen) > 30
    deadline = time.time() + 10
    while sampler._thread is not None and time.time() < deadline:
        time.sleep(0.01)
    assert sampler._thread is None
    assert tokens(sampler.sample(*CALLS[0])) == alone[0]


def test_a_cancelled_task_frees_its_rows_and_leaves_the_others_alone():
    model = build("qwen2")
    want = tokens(Sampler(model).sample([[1, 2]], SamplingParams(max_tokens=60, seed=1, stop=[])))
    sampler = Sampler(model)
    seen = slow(sampler)

    async def main():
        long = asyncio.create_task(sampler.sample_async([[3]], SamplingParams(max_tokens=500, stop=[]), n=10))
        other = asyncio.create_task(sampler.sample_async([[1, 2]], SamplingParams(max_tokens=60, seed=1, stop=[])))
        while not seen or seen[-1] < 11:
            await asyncio.sleep(0.002)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return await other

    assert tokens(asyncio.run(main())) == want
    assert seen[-1] == 1 and len(seen) < 120


def test_the_stop_flag_ends_a_call_between_tokens():
    sampler = Sampler(build("qwen2"))
    flag = threading.Event()
    slow(sampler, at=lambda step: flag.set() if step == 5 else None)
    with pytest.raises(Interrupted):
        sampler.sample([[1]], SamplingParams(max_tokens=400, stop=[]), n=3, stop_flag=flag)
    assert sampler._lanes[None].idle
    assert len(sampler.sample([[1]], SamplingParams(max_tokens=4, stop=[]))[0][0].tokens) == 4

    async def main():
        await sampler.sample_async([[1]], SamplingParams(max_tokens=4), stop_flag=flag)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


@pytest.mark.parametrize("where", [1, 3, 9])
def test_ctrl_c_at_a_step_loses_nothing_of_the_others(where):
    """The interrupted caller gets the KeyboardInterrupt; the others' rows start over and draw the same numbers."""
    model = build("qwen2")
    want = tokens(Sampler(model).sample(*CALLS[3]))
    sampler = Sampler(model)
    armed = [True]

    def at(step):
        if step == where and armed.pop() if armed else False:
            raise KeyboardInterrupt

    slow(sampler, 0.01, at)
    got, errors = [], []

    def other():
        got.append(tokens(sampler.sample(*CALLS[3])))

    def interrupted():
        try:
            sampler.sample([[9]], SamplingParams(max_tokens=300, stop=[]))
        except KeyboardInterrupt as e:
            errors.append(e)

    first = threading.Thread(target=interrupted)
    second = threading.Thread(target=other)
    with model.lock:
        first.start()
        time.sleep(0.05)  # the first becomes the driver
        second.start()
        time.sleep(0.05)
    [t.join(60) for t in (first, second)]
    assert len(errors) == 1 and got == [want]
    assert not sampler._jobs and not sampler._driving


def test_a_step_that_fails_fails_its_callers_and_no_later_one():
    sampler = Sampler(build("qwen2"))
    broken = [True]

    def at(step):
        if broken:
            raise RuntimeError("out of memory")

    slow(sampler, 0, at)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.sample([[1]], SamplingParams(max_tokens=5))
    broken.clear()
    assert sampler.sample([[1]], SamplingParams(max_tokens=5, stop=[]))[0][0].finish_reason == "length"


def test_a_prefill_that_fails_fails_its_caller_alone():
    model = build("qwen2")
    sampler, got = Sampler(model), []
    want = tokens(Sampler(model).sample([[1, 2]], SamplingParams(max_tokens=80, seed=0, stop=[])))
    seen = slow(sampler)
    decoder = sampler._lane(None).decoder
    prefill = decoder.prefill

    def failing(prompts, *rest):
        if tuple(prompts[0]) == (13,):
            raise RuntimeError("no room")
        return prefill(prompts, *rest)

    decoder.prefill = failing
    good = threading.Thread(target=lambda: got.append(tokens(sampler.sample([[1, 2]], SamplingParams(max_tokens=80, seed=0, stop=[])))))
    good.start()
    while len(seen) < 5:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="no room"):
        sampler.sample([[13]], SamplingParams(max_tokens=5))
    good.join(60)
    assert got == [want]


@pytest.mark.parametrize("name", KINDS)
def test_logits_that_are_not_finite_fail_their_own_rows(name):
    model = build(name)
    model.add_adapter("good", LoraConfig(rank=2)), model.add_adapter("bad", LoraConfig(rank=2))
    with torch.no_grad():
        for p in model.parameters("bad").values():
            p.fill_(float("nan"))
    sampler, results = Sampler(model), {}
    params = SamplingParams(max_tokens=12, seed=0, stop=[])
    want = tokens(Sampler(model).sample([[1, 2]], params, 4, "good"))

    def call(adapter):
        try:
            results[adapter] = tokens(sampler.sample([[1, 2]], params, 4, adapter))
        except NonFiniteError as e:
            results[adapter] = e

    threads = [threading.Thread(target=call, args=(a,)) for a in ("good", "bad")]
    with model.lock:
        [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert isinstance(results["bad"], NonFiniteError) and "not finite" in str(results["bad"])
    assert results["good"] == want
    assert tokens(sampler.sample([[1, 2]], params, 4, "good")) == want


def test_weights_that_break_and_are_mended_leave_no_trace():
    model = build("qwen2")
    sampler, params = Sampler(model), SamplingParams(max_tokens=6, seed=0, stop=[])
    want = tokens(sampler.sample([[1, 2], [3]], params, 3))
    weight = next(iter(model.parameters().values()))
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError):
        sampler.sample([[1, 2]], params, 3)
    with torch.no_grad():
        weight.copy_(good)
    assert tokens(sampler.sample([[1, 2], [3]], params, 3)) == want


def test_caches_can_be_released_between_calls():
    sampler = Sampler(build("qwen2"))
    want = tokens(sampler.sample(*CALLS[2]))
    sampler.release()
    assert not sampler._lanes and tokens(sampler.sample(*CALLS[2])) == want


def test_closing_ends_what_is_under_way_and_is_idempotent():
    sampler = Sampler(build("qwen2"))
    seen, errors = slow(sampler), []

    def call():
        try:
            sampler.sample([[1]], SamplingParams(max_tokens=400, stop=[]))
        except BackendError as e:
            errors.append(e)

    threads = [threading.Thread(target=call) for _ in range(3)]
    [t.start() for t in threads]
    while len(seen) < 3:
        time.sleep(0.001)
    sampler.close()
    [t.join(30) for t in threads]
    assert len(errors) == 3
    sampler.close()
    with pytest.raises(BackendError):
        sampler.sample([[1]])


def test_weights_may_change_between_two_steps_under_the_lock():
    model = build("qwen2")
    sampler, stop = Sampler(model), threading.Event()
    slow(sampler, 0.0005)

    def learner():
        while not stop.is_set():
            with model.lock, torch.no_grad():
                for p in model.parameters().values():
                    p.mul_(1.0001)
                model.generation += 1
            time.sleep(0.001)

    thread = threading.Thread(target=learner)
    thread.start()
    try:
        out = sampler.sample([[1, 2]], SamplingParams(max_tokens=60, stop=[]), n=8)
    finally:
        stop.set()
        thread.join()
    assert all(len(c.tokens) == 60 for c in out[0])
