"""Several targets a token: loss and gradient against float64 autograd over transformers' logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk.algo.losses import LOSSES, compute_loss, loss_input
from nexrl_sdk.engine.layout import lay_out, layouts, split_by_budget
from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.logprobs import fused_logprobs
from nexrl_sdk.engine.model import EngineModel, LoraConfig, load_model
from nexrl_sdk.tokens.pack import pack_datums
from nexrl_sdk.types import AdamParams, ConfigError, DataError, Datum, NonFiniteError

torch.set_num_threads(1)
Tiny = Callable[..., Path]


def several(k: int | None, count: int = 6, seed: int = 0) -> list[Datum]:
    """Answers to two prompts; k targets a token, some of weight 0, some of them twice in a row."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 250, 9), rng.integers(0, 250, 6)]
    out = []
    for i in range(count):
        tokens = np.concatenate([prompts[i % 2], rng.integers(0, 250, rng.integers(2, 8))])
        n = len(tokens)
        shape = (n,) if k is None else (n, k)
        targets, weights = rng.integers(0, 250, shape), rng.uniform(size=shape) * (rng.uniform(size=shape) > 0.3)
        if i < 4:  # a teacher's choices at the prompt are the same for all its answers
            same = np.random.default_rng(i % 2).integers(0, 250, (9, *shape[1:]))
            targets[: len(prompts[i % 2])] = same[: len(prompts[i % 2])]
        if k is not None and k > 1:
            targets[0, 1] = targets[0, 0]
        out.append(Datum(tokens, targets, {"weights": weights}))
    return out


def oracle(model: EngineModel, data: list[Datum], adapter: str | None, temperature: float = 1.0) -> tuple[float, dict[str, torch.Tensor], list[np.ndarray]]:
    params = model.parameters(adapter)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    with model.adapter(adapter):
        for d in data:
            table = (model.module(input_ids=torch.from_numpy(d.tokens)[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
            targets = torch.from_numpy(d.targets.reshape(len(d), -1))
            lp = table.gather(1, targets)
            total = total - (torch.from_numpy(d.fields["weights"].reshape(len(d), -1)).double() * lp).sum()
            logprobs.append(lp.detach().numpy().reshape(d.targets.shape))
        grads = torch.autograd.grad(total, list(params.values()))
    return total.item(), dict(zip(params, grads)), logprobs


def in_float64(tiny: Tiny, family: str) -> EngineModel:
    module: Any = load_model(tiny(family), dtype="float32").base
    again = type(module)(module.config).double()
    again.load_state_dict(module.state_dict())
    return EngineModel(again)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 40, 10000])
def test_loss_and_gradient(tiny: Tiny, family: str, share: bool, budget: int) -> None:
    model = in_float64(tiny, family)
    data = several(4)
    learner = Learner(model, token_budget=budget, share_prefixes=share, head_chunk=7)
    want, grads, logprobs = oracle(model, data, None)
    for out in (learner.forward(data), learner.forward_backward(data)):
        assert out.loss == pytest.approx(want, rel=1e-6)
        assert [x.shape for x in out.logprobs] == [d.targets.shape for d in data]
        for a, b in zip(out.logprobs, logprobs):
            np.testing.assert_allclose(a, b, rtol=2e-6)  # given in float32
    found = learner.gradients()
    assert found.keys() == grads.keys()
    for n, g in grads.items():
        torch.testing.assert_close(found[n], g, rtol=1e-5, atol=1e-6 * float(g.abs().max()))  # normalisation is in float32


def test_an_adapter_of_the_tied_head_at_a_temperature(tiny: Tiny) -> None:
    model = in_float64(tiny, "qwen2")
    model.add_adapter("run_a", LoraConfig(rank=3, train_unembed=True))
    learner, data = Learner(model), several(3)
    learner.forward_backward(data, adapter="run_a")
    learner.optim_step(AdamParams(learning_rate=0.1), adapter="run_a")
    want, grads, _ = oracle(model, data, "run_a", 0.7)
    assert learner.forward_backward(data, "cross_entropy", {"temperature": 0.7}, "run_a").loss == pytest.approx(want, rel=1e-6)
    for n, g in learner.gradients("run_a").items():
        torch.testing.assert_close(g, grads[n], rtol=1e-5, atol=1e-6 * float(g.abs().max()))


def test_one_call_takes_datums_of_different_numbers_of_targets(tiny: Tiny) -> None:
    model = in_float64(tiny, "qwen2")
    data = [d for four in zip(several(None), several(1), several(5, seed=1)) for d in four]
    groups = split_by_budget(data, 30)
    assert sorted(i for g in groups for i in g) == list(range(len(data)))
    assert all(len({data[i].targets.shape[1:] for i in g}) == 1 for g in groups)
    learner = Learner(model, token_budget=30)
    want, grads, logprobs = oracle(model, data, None)
    out = learner.forward_backward(data)
    assert out.loss == pytest.approx(want, rel=1e-6)
    for a, b in zip(out.logprobs, logprobs):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-6)
    for n, g in grads.items():
        torch.testing.assert_close(learner.gradients()[n], g, rtol=1e-5, atol=1e-6 * float(g.abs().max()))
    with pytest.raises(DataError, match="equally many targets"):
        pack_datums(data[:3])


def test_one_target_a_token_is_the_same_in_either_shape(tiny: Tiny) -> None:
    model = load_model(tiny("qwen2"), dtype="float32")
    flat = several(None)
    column = [Datum(d.tokens, d.targets[:, None], {"weights": d.fields["weights"][:, None]}) for d in flat]
    outs, grads = [], []
    for data in (flat, column):
        learner = Learner(model)
        outs.append(learner.forward_backward(data))
        grads.append(learner.gradients())
    assert outs[0].loss == pytest.approx(outs[1].loss, rel=1e-6) and outs[0].metrics == pytest.approx(outs[1].metrics)
    for a, b in zip(outs[0].logprobs, outs[1].logprobs):
        np.testing.assert_allclose(a, b[:, 0], rtol=1e-6)
    for n, g in grads[0].items():
        torch.testing.assert_close(g, grads[1][n])


def test_shared_prefixes_compute_equal_predictions_once() -> None:
    (one,) = layouts(several(3), 10000, vocab=250)
    assert one.pairs is not None and one.saved > 0.3
    rows, targets, which = one.pairs
    assert torch.equal(targets[which], one.packed.targets) and targets.shape == (len(rows), 3)
    assert len(rows) < len(which), "the prompt's predictions are the same for its answers"
    plain = lay_out(several(3), list(range(6)), share=False)
    assert plain.pairs is None and plain.packed.targets.shape[1] == 3


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tiles", [(1000, 1000), (4, 16), (3, 7)])
@pytest.mark.parametrize("shape", [{}, {"scale": 0.25, "softcap": 3.0, "temperature": 1.3}])
def test_tiles_in_float64(entropy: bool, tiles: tuple[int, int], shape: dict[str, float]) -> None:
    g = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((10, 8), (50, 8), (50,)))
    t, by = torch.randint(50, (10, 4), generator=g), torch.randn(10, 4, generator=g, dtype=torch.float64)
    t[:, 3] = t[:, 0]
    by[2:5] = 0
    logits = (h @ w.T + b) * shape.get("scale", 1.0)
    cap = shape.get("softcap", math.inf)
    logits = logits if cap == math.inf else cap * torch.tanh(logits / cap)
    logp = (logits / shape.get("temperature", 1.0)).log_softmax(-1)
    found: Any = fused_logprobs(h, w, t, entropy=entropy, bias=b, chunk=tiles[0], block=tiles[1], keep=3000, **shape)  # type: ignore[call-overload]
    ours = (found[0] * by).sum() + found[1].sum() if entropy else (found * by).sum()
    theirs = (logp.gather(1, t) * by).sum() + (-(logp.exp() * logp).sum() if entropy else 0)
    torch.testing.assert_close(found[0] if entropy else found, logp.gather(1, t), rtol=1e-12, atol=1e-12)
    for a, c in zip(torch.autograd.grad(ours, (h, w, b)), torch.autograd.grad(theirs, (h, w, b))):
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"cross_entropy", "value"}))
def test_other_losses_refuse_them_by_name(tiny: Tiny, loss: str) -> None:
    learner = Learner(load_model(tiny("qwen2"), dtype="float32"))
    data = [Datum(d.tokens, d.targets, {**d.fields, "logprobs": np.zeros(len(d)), "advantages": np.ones(len(d))}) for d in several(2)]
    with pytest.raises(ConfigError, match=rf"{loss}.*one target a token"):
        learner.forward_backward(data, loss)
    with pytest.raises(ConfigError, match=rf"{loss}.*one target a token"):
        compute_loss(loss, loss_input(torch.zeros(3, 2), {"weights": torch.ones(3, 2)}))
    assert learner.gradients() == {}


@pytest.mark.parametrize("config", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"correction": "tis"}])
def test_what_is_about_one_target_is_refused(tiny: Tiny, config: dict[str, Any]) -> None:
    learner = Learner(load_model(tiny("qwen2"), dtype="float32"))
    data = [Datum(d.tokens, d.targets, {**d.fields, **{f: np.zeros(len(d)) for f in ("logprobs", "ref_logprobs", "rollout_logprobs")}}) for d in several(2)]
    with pytest.raises(ConfigError, match=next(iter(config))):
        learner.forward(data, "cross_entropy", config)


def test_bad_tokens_and_shapes_are_named(tiny: Tiny) -> None:
    learner = Learner(load_model(tiny("qwen2"), dtype="float32"))
    bad = several(2)
    bad[3].targets[4, 1] = 10**6
    with pytest.raises(DataError, match="datum 3 has target 1000000 at position 4"):
        learner.forward(bad)
    nan = several(2)
    nan[1].fields["weights"][2, 0] = np.nan
    with pytest.raises(NonFiniteError):
        learner.forward_backward(nan)
    for targets, weights in (((3, 2), (3,)), ((3,), (3, 2)), ((4, 2), (4, 2)), ((3, 2), (3, 3)), ((3, 0), (3, 0)), ((3, 1, 1), (3, 1, 1))):
        with pytest.raises(DataError, match="as long as its tokens"):
            Datum([1, 2, 3], np.zeros(targets), {"weights": np.zeros(weights)})
    no_weights = [Datum(d.tokens, d.targets, {}) for d in several(2)]
    want = -sum(float(x.sum()) for x in learner.forward(no_weights).logprobs)
    assert learner.forward(no_weights).loss == pytest.approx(want, rel=1e-5)
