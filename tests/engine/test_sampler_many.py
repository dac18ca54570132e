"""Many owners, many adapters, and scores of prompts, against transformers' own forward."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import EngineModel, LoraConfig, load_model
from nexrl_sdk.engine.sampler import Sampler
from nexrl_sdk.types import AdamParams, BackendError, ConfigError, ContextOverflowError, DataError, Datum, Interrupted, SamplingParams

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def model(tiny) -> EngineModel:
    return load_model(tiny("qwen2"), dtype="float32")


def train(model: EngineModel, adapter: str, seed: int) -> None:
    learner = Learner(model)
    rows = np.random.default_rng(seed).integers(0, 250, (4, 12))
    learner.forward_backward([Datum(r[:-1], r[1:], {"weights": np.ones(11)}) for r in rows], adapter=adapter)
    learner.optim_step(AdamParams(learning_rate=0.05), adapter=adapter)


def table(model: EngineModel, tokens: list[int], adapter: str | None = None, temperature: float = 1.0) -> np.ndarray:
    """transformers' logprobs [T - 1, V] of what comes after each token but the last, softmax in float64."""
    with model.adapter(adapter), torch.no_grad():
        logits = model.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return (logits.double() / temperature).log_softmax(-1)[:-1].numpy()


# futures -------------------------------------------------------------------------------------------------------------


def test_submit_waits_for_nothing(model: EngineModel) -> None:
    sampler, params = Sampler(model), SamplingParams(max_tokens=6, seed=1, stop=[])
    alone = sampler.sample([PROMPT], params, n=2)
    with model.lock:
        futures = [sampler.submit([PROMPT], params, n=2, owner=i) for i in range(3)]
        assert not any(f.done() for f in futures)
    assert all([c.tokens for c in f.result(60)[0]] == [c.tokens for c in alone[0]] for f in futures)
    assert sampler.submit([], params).result(0) == []
    for wrong, error in ((dict(prompts=[[]]), DataError), (dict(prompts=[[1] * 10**5]), ContextOverflowError), (dict(prompts=[PROMPT], adapter="x"), ConfigError)):
        with pytest.raises(error):
            sampler.submit(params=params, **wrong)
    sampler.close()
    with pytest.raises(BackendError, match="closed"):
        sampler.submit([PROMPT], params)


def test_a_cancelled_future_and_a_set_flag_free_their_rows(model: EngineModel) -> None:
    sampler, long = Sampler(model, max_batch=2), SamplingParams(max_tokens=400, stop=[])
    flag = threading.Event()
    with model.lock:
        cancelled, stopped = sampler.submit([PROMPT], long), sampler.submit([PROMPT], long, stop_flag=flag)
        waiting = sampler.submit([PROMPT], SamplingParams(max_tokens=3, stop=[]))
    assert cancelled.cancel()
    flag.set()
    assert len(waiting.result(60)[0][0].tokens) == 3
    with pytest.raises(Interrupted):
        stopped.result(60)


# owners --------------------------------------------------------------------------------------------------------------


def finished(futures: dict[str, Any]) -> list[str]:
    order: list[str] = []
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: order.append(name))
    for future in futures.values():
        future.result(100)
    return order


def test_one_with_many_requests_does_not_hold_up_another(model: EngineModel) -> None:
    sampler, short = Sampler(model, max_batch=4), SamplingParams(max_tokens=2, stop=[])
    with model.lock:
        futures = {f"a{i}": sampler.submit([PROMPT], short, owner="a") for i in range(300)}
        futures["b"] = sampler.submit([PROMPT], short, owner="b")
    order = finished(futures)
    assert order.index("b") < 10
    assert [x for x in order if x != "b"] == [f"a{i}" for i in range(300)], "an owner's own requests keep their order"


def test_owners_take_turns_member_by_member(model: EngineModel) -> None:
    sampler, one = Sampler(model, max_batch=1), SamplingParams(max_tokens=1, stop=[])
    with model.lock:
        futures = {"a": sampler.submit([PROMPT], one, n=6, owner="a"), "b": sampler.submit([PROMPT], one, n=2, owner="b"), "none": sampler.submit([PROMPT], one)}
    assert finished(futures) == ["none", "b", "a"]
    assert [len(f.result()[0]) for f in futures.values()] == [6, 2, 1]


def test_an_owner_who_gives_up_leaves_the_turns_of_the_others(model: EngineModel) -> None:
    sampler, one = Sampler(model, max_batch=1), SamplingParams(max_tokens=1, seed=3, stop=[])
    flag = threading.Event()
    with model.lock:
        gone = sampler.submit([PROMPT], one, n=50, owner="gone", stop_flag=flag)
        kept = [sampler.submit([PROMPT], one, n=5, owner=x) for x in "ab"]
        flag.set()
    assert [len(f.result(60)[0]) for f in kept] == [5, 5]
    with pytest.raises(Interrupted):
        gone.result(60)


# adapters ------------------------------------------------------------------------------------------------------------

KINDS = {
    "wide": LoraConfig(rank=7, alpha=9),
    "narrow": LoraConfig(rank=1, alpha=3, train_mlp=False),
    "mlps": LoraConfig(rank=4, train_attn=False),
    "head": LoraConfig(rank=3, train_attn=False, train_mlp=False, train_unembed=True),
    "all": LoraConfig(rank=2, train_unembed=True),
    "one_layer": LoraConfig(rank=2, target_modules=["layers.0.self_attn.q_proj", "up_proj"]),
}


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_adapters_of_all_kinds_in_one_batch(tiny, family: str) -> None:
    model = load_model(tiny(family), dtype="float32")
    kinds = KINDS if family != "gpt2" else {"wide": KINDS["wide"], "all": KINDS["all"]}
    for i, (name, lora) in enumerate(kinds.items()):
        model.add_adapter(name, lora)
        train(model, name, i)
    sampler = Sampler(model)
    params = SamplingParams(max_tokens=10, seed=1, stop=[])
    with model.lock:
        futures = {name: sampler.submit([PROMPT], params, n=2, adapter=name) for name in [None, *kinds]}
    learner = Learner(model)
    seen = []
    for name, future in futures.items():
        for c in future.result(60)[0]:
            whole = [*PROMPT, *c.tokens]
            theirs = table(model, whole, name)[len(PROMPT) - 1 :]
            np.testing.assert_allclose(c.logprobs, theirs[np.arange(10), c.tokens], atol=2e-5)
            mine = learner.forward([Datum(whole[:-1], whole[1:], {"weights": np.ones(len(whole) - 1)})], adapter=name).logprobs[0]
            np.testing.assert_allclose(c.logprobs, mine[len(PROMPT) - 1 :], atol=2e-5)
            seen.append(round(float(theirs.sum()), 2))
    assert len(set(seen)) > len(kinds), "adapters that do the same prove nothing"


def test_tied_weights_are_not_changed_by_an_adapter_of_the_head(tiny) -> None:
    model = load_model(tiny("qwen2"), dtype="float32")
    assert model.base.get_output_embeddings().weight is model.base.get_input_embeddings().weight
    before = table(model, PROMPT)
    model.add_adapter("head", KINDS["head"])
    train(model, "head", 0)
    assert set(model.parameters("head")) == {"lm_head.lora_A.head.weight", "lm_head.lora_B.head.weight"}
    np.testing.assert_array_equal(table(model, PROMPT), before)
    assert np.abs(table(model, PROMPT, "head") - before).max() > 1e-2


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_an_adapter_that_is_removed_ends_its_rows_alone(tiny, family: str) -> None:
    model = load_model(tiny(family), dtype="float32")
    for i, name in enumerate("xyz"):
        model.add_adapter(f"run_{name}", LoraConfig(rank=2 + i))
        train(model, f"run_{name}", i)
    sampler, params = Sampler(model, max_batch=3), SamplingParams(max_tokens=30, seed=5, stop=[])
    names = ["run_x", "run_y", None]
    alone = {n: sampler.sample([PROMPT], params, adapter=n)[0][0].tokens for n in names}
    steps, advance = [0], sampler._advance

    def watched(key, lane):
        advance(key, lane)
        steps[0] += 1
        if steps[0] == 5:
            model.remove_adapter("run_x")
            model.add_adapter("run_w", LoraConfig(rank=5))
            model.remove_adapter("run_z")

    sampler._advance = watched
    with model.lock:
        futures = {n: sampler.submit([PROMPT], params, adapter=n) for n in names}
        late = sampler.submit([PROMPT], params, adapter="run_x")
    for future in (futures["run_x"], late):
        with pytest.raises(ConfigError, match="run_x"):
            future.result(60)
    for n in ("run_y", None):
        assert futures[n].result(60)[0][0].tokens == alone[n]
    with pytest.raises(ConfigError, match="no adapter 'run_x'"):
        sampler.submit([PROMPT], params, adapter="run_x")


def test_the_last_adapter_goes_while_the_base_is_sampled(model: EngineModel) -> None:
    model.add_adapter("only")
    train(model, "only", 0)
    sampler, params = Sampler(model), SamplingParams(max_tokens=40, seed=2, stop=[])
    alone = sampler.sample([PROMPT], params)[0][0].tokens
    advance, steps = sampler._advance, [0]

    def watched(key, lane):
        advance(key, lane)
        steps[0] += 1
        if steps[0] == 5:
            model.remove_adapter("only")
        if steps[0] == 9:
            model.add_adapter("first")

    sampler._advance = watched
    assert sampler.submit([PROMPT], params).result(60)[0][0].tokens == alone
    assert model.adapters == ["first"]


# scores --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_transformers(tiny, family: str, temperature: float) -> None:
    model = load_model(tiny(family), dtype="float32")
    model.add_adapter("run_a", LoraConfig(rank=3, train_unembed=True))
    train(model, "run_a", 0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, 40).tolist()
    targets = rng.integers(-1, 250, (39, 3))
    sampler = Sampler(model)
    for adapter in (None, "run_a"):
        want = table(model, tokens, adapter, temperature)
        got = sampler.score(tokens, adapter, temperature=temperature, top_k=5, targets=targets, draws=2, seed=4)
        np.testing.assert_allclose(got.logprobs[1:], want[np.arange(39), tokens[1:]], atol=2e-5)
        assert np.isnan(got.logprobs[0]) and np.isnan(got.top_logprobs[0]).all() and got.top_ids.shape == (40, 5)
        np.testing.assert_allclose(got.top_logprobs[1:], -np.sort(-want, 1)[:, :5], atol=2e-5)
        np.testing.assert_allclose(got.top_logprobs[1:], np.take_along_axis(want, got.top_ids[1:], 1), atol=2e-5)
        named = np.where(targets < 0, np.nan, np.take_along_axis(want, targets.clip(0), 1))
        np.testing.assert_allclose(got.target_logprobs, named, atol=2e-5)
        np.testing.assert_allclose(got.alt_logprobs, np.take_along_axis(want, got.alt_tokens, 1), atol=2e-5)
        again = sampler.score(tokens, adapter, temperature=temperature, draws=2, seed=4)
        np.testing.assert_array_equal(again.alt_tokens, got.alt_tokens)
        np.testing.assert_allclose(sampler.logprobs([tokens], adapter, temperature)[0], got.logprobs, atol=1e-6)


def test_alternatives_are_drawn_from_the_distribution(model: EngineModel) -> None:
    draws = 20000
    got = Sampler(model).score([1, 2, 3], temperature=0.7, draws=draws, seed=0)
    p = np.exp(table(model, [1, 2, 3], None, 0.7))
    for i in range(2):
        found = np.bincount(got.alt_tokens[i], minlength=p.shape[1])
        chi2 = ((found - draws * p[i]) ** 2 / (draws * p[i])).sum()
        assert abs(chi2 - p.shape[1]) < 6 * (2 * p.shape[1]) ** 0.5
    assert np.corrcoef(got.alt_tokens)[0, 1] < 0.05


def test_scores_from_a_position_on_and_at_the_edges(model: EngineModel) -> None:
    sampler, tokens = Sampler(model), list(range(1, 31))
    whole = sampler.score(tokens, top_k=2)
    part = sampler.score(tokens, top_k=2, first=20)
    assert np.isnan(part.logprobs[:20]).all() and np.isnan(part.top_logprobs[:20]).all() and not part.top_ids[:20].any()
    np.testing.assert_allclose(part.logprobs[20:], whole.logprobs[20:], atol=1e-6)
    np.testing.assert_array_equal(part.top_ids[20:], whole.top_ids[20:])
    late = sampler.score(tokens, top_k=2, first=99)
    assert np.isnan(late.logprobs).all() and late.top_ids.shape == (30, 2)
    one = sampler.score([7], top_k=3, targets=np.zeros((0, 4), np.int64), draws=2)
    assert one.logprobs.shape == (1,) and one.top_ids.shape == (1, 3) and one.target_logprobs.shape == (0, 4) and one.alt_tokens.shape == (0, 2)
    plain = sampler.score(tokens)
    assert plain.top_ids is None and plain.target_logprobs is None and plain.alt_tokens is None
    assert sampler.score(tokens, top_k=10**6).top_ids.shape == (30, model.vocab_size)
    cold = sampler.score(tokens, temperature=0, draws=1, top_k=1)
    np.testing.assert_array_equal(cold.alt_tokens[:, 0], cold.top_ids[1:, 0])
    np.testing.assert_allclose(cold.logprobs, whole.logprobs, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"temperature": -1}, ConfigError, "0 or more"),
        ({"temperature": float("nan")}, ConfigError, "0 or more"),
        ({"top_k": -1}, ConfigError, "0 or more"),
        ({"targets": np.zeros((3, 2), np.int64)}, DataError, r"\[4, K\]"),
        ({"targets": np.zeros(4, np.int64)}, DataError, r"\[4, K\]"),
        ({"targets": np.full((4, 1), 10**6)}, DataError, "1000000"),
        ({"targets": np.zeros((4, 1))}, DataError, "float64"),
        ({"adapter": "x"}, ConfigError, "no adapter 'x'"),
    ],
)
def test_scores_that_cannot_be(model: EngineModel, wrong: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        Sampler(model).score(PROMPT, **wrong)
