"""Tiled log-probabilities against autograd through all logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nexrl_sdk.engine.logprobs import fused_logprobs
from nexrl_sdk.types import ConfigError

SHAPES = [{}, {"temperature": 0.6}, {"bias": True}, {"scale": 0.25, "softcap": 3.0, "temperature": 1.3}, {"softcap": 2.0, "bias": True}]
TILES = [(1000, 1000), (4, 16), (3, 7), (1, 1000)]


def make(n: int, v: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n * 1000 + v)
    h = torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return h, w, torch.randint(v, (n,), generator=g)


def textbook(h: Tensor, w: Tensor, t: Tensor, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = (h @ w.T + (0 if bias is None else bias)) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def with_bias(shape: dict, v: int, dtype: torch.dtype = torch.float64) -> dict:
    return {**shape, "bias": torch.linspace(-1, 1, v, dtype=dtype).requires_grad_()} if shape.get("bias") else dict(shape)


@pytest.mark.parametrize("keep", [0, 1000, 1 << 28])  # bytes of tiles kept for backward: none, some, all
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_in_float64(shape: dict, tiles: tuple[int, int], keep: int) -> None:
    h, w, t = make(10, 50, 8)
    kw = with_bias(shape, 50)
    inputs = [h, w] + ([kw["bias"]] if "bias" in kw else [])
    by = torch.linspace(-1, 2, 10, dtype=torch.float64), torch.linspace(0.5, -1.5, 10, dtype=torch.float64)
    ours, theirs = fused_logprobs(h, w, t, entropy=True, chunk=tiles[0], block=tiles[1], keep=keep, **kw), textbook(h, w, t, **kw)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(sum((x * y).sum() for x, y in zip(pair, by)), inputs) for pair in (ours, theirs)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradcheck(shape: dict) -> None:
    h, w, t = make(4, 9, 3)
    kw = with_bias(shape, 9)
    bias = kw.pop("bias", None)
    inputs = (h, w) if bias is None else (h, w, bias)
    assert torch.autograd.gradcheck(lambda h, w, b=None: fused_logprobs(h, w, t, entropy=True, bias=b, chunk=3, block=4, **kw), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_changes_no_bit_and_backward_can_run_twice(dtype: torch.dtype) -> None:
    h, w, t = make(40, 300, 16, dtype)
    mask = (torch.arange(40) % 3 > 0).float()
    found = []
    for keep in (0, 5000, 1 << 28):
        out = (fused_logprobs(h, w, t, chunk=16, block=64, keep=keep) * mask).sum()
        found += [torch.autograd.grad(out, (h, w), retain_graph=True), torch.autograd.grad(out, (h, w))]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other)) or dtype is torch.float32
        for a, b in zip(found[0], other):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_values_where_float_is_a_no_op(dtype: torch.dtype) -> None:
    """In float32 `.float()` returns its argument: something done in place after it would change what is read later."""
    h, w, t = make(40, 300, 16, dtype)
    before = h.detach().clone(), w.detach().clone()
    ours = fused_logprobs(h, w, t, entropy=True, chunk=16, block=64)
    again = fused_logprobs(h, w, t, entropy=True, chunk=16, block=64)
    theirs = textbook(h.detach().double(), w.detach().double(), t)
    assert torch.equal(h, before[0]) and torch.equal(w, before[1])
    for a, b, c in zip(ours, again, theirs):
        assert a.dtype == torch.float32 and torch.equal(a, b)
        torch.testing.assert_close(a.double(), c, rtol=2e-5 if dtype is torch.float32 else 2e-2, atol=1e-5 if dtype is torch.float32 else 0.1)


def test_gradients_in_bfloat16_are_as_good_as_autograds() -> None:
    h, w, t = make(64, 500, 32, torch.bfloat16)
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    exact = torch.autograd.grad(textbook(h64, w64, t)[0].sum(), (h64, w64))
    peer = torch.autograd.grad((h @ w.T).float().log_softmax(-1).gather(1, t[:, None]).sum(), (h, w))
    ours = torch.autograd.grad(fused_logprobs(h, w, t, chunk=16, block=64).sum(), (h, w))
    for e, p, o in zip(exact, peer, ours):
        assert o.dtype == torch.bfloat16
        assert (o.double() - e).norm() <= 1.5 * (p.double() - e).norm() + 1e-3 * e.norm()


def test_autocast_multiplies_in_bfloat16_and_returns_float32_gradients() -> None:
    h, w, t = make(32, 200, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = fused_logprobs(h, w, t)
    narrow = fused_logprobs(h.detach().bfloat16(), w.detach().bfloat16(), t)
    assert torch.equal(ours, narrow) and not torch.equal(ours, fused_logprobs(h, w, t))
    gh, gw = torch.autograd.grad(ours.sum(), (h, w))
    assert gh.dtype == gw.dtype == torch.float32


def test_rows_without_gradient_change_nothing() -> None:
    h, w, t = make(20, 60, 8)
    mask = (torch.arange(20) % 5 == 0).double()
    ours = torch.autograd.grad((fused_logprobs(h, w, t, chunk=4, block=16) * mask).sum(), (h, w))
    theirs = torch.autograd.grad((textbook(h, w, t)[0] * mask).sum(), (h, w))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)
    none = torch.autograd.grad((fused_logprobs(h, w, t) * 0).sum(), (h, w))
    assert all(not x.any() for x in none)


def test_only_what_needs_a_gradient_gets_one() -> None:
    h, w, t = make(12, 30, 8)
    fused_logprobs(h, w.detach(), t).sum().backward()
    assert h.grad is not None and w.grad is None
    h.grad = None
    fused_logprobs(h.detach(), w, t).sum().backward()
    assert h.grad is None and w.grad is not None
    assert not fused_logprobs(h.detach(), w.detach(), t).requires_grad


def test_gradient_of_the_entropy_alone() -> None:
    h, w, t = make(12, 30, 8)
    ours = torch.autograd.grad(fused_logprobs(h, w, t, entropy=True, chunk=5, block=7)[1].sum(), (h, w))
    theirs = torch.autograd.grad(textbook(h, w, t)[1].sum(), (h, w))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_extreme_logits_stay_finite(size: float) -> None:
    h, w, t = make(8, 40, 4, torch.float32)
    logprobs, entropy = fused_logprobs(h * size, w, t, entropy=True, block=7)
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all() and (logprobs <= 1e-3).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(logprobs.sum() + entropy.sum(), (h, w)))


def test_a_vocabulary_of_one_and_no_rows() -> None:
    h, w, t = make(5, 1, 4)
    assert torch.equal(fused_logprobs(h, w, t), torch.zeros(5, dtype=torch.float64))
    h, w, t = make(5, 7, 4)
    empty = fused_logprobs(h[:0], w, t[:0])
    assert empty.shape == (0,) and not torch.autograd.grad(empty.sum(), w)[0].any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_must_be_above_zero(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature above 0"):
        fused_logprobs(*make(2, 3, 2), temperature=temperature)


@pytest.mark.parametrize("keep", [0, 300_000])
def test_nothing_as_large_as_the_logits_is_ever_held(keep: int) -> None:
    n, v = 256, 8192
    h, w, t = make(n, v, 8, torch.float32)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor))
            return out

    with Watch():
        out = fused_logprobs(h, w, t, chunk=64, block=512, keep=keep)
        kept = sum(x.numel() * x.element_size() for x in out.grad_fn.kept.tiles.values())
        out.sum().backward()
    assert (kept == 0) if keep == 0 else (0 < kept <= keep)
    assert not out.grad_fn.kept.tiles
    assert max(seen) <= max(64 * 512, v * 8) < n * v / 30
