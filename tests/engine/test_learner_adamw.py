"""AdamW against torch's, and the schedules."""

from __future__ import annotations

import math

import pytest
import torch

from nexrl_sdk.engine.adamw import AdamW, lr_schedule
from nexrl_sdk.types import AdamParams, ConfigError, NonFiniteError

SETTINGS = [
    AdamParams(1e-2),
    AdamParams(3e-3, 0.8, 0.99, 1e-12, 0.1),
    AdamParams(1e-1, 0.0, 0.5, 1e-3, 0.01, grad_clip_norm=0.5),
]


def params(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {f"p{i}": torch.randn(shape, generator=g).to(dtype).requires_grad_() for i, shape in enumerate([(7, 5), (3,), (2, 2, 2)])}


@pytest.mark.parametrize("adam", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(adam: AdamParams, dtype: torch.dtype) -> None:
    ours, theirs = params(dtype), params(dtype)
    state = AdamW(ours)
    peer = torch.optim.AdamW(theirs.values(), lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay)
    for step in range(10):
        g = torch.Generator().manual_seed(step)
        grads = [torch.randn(p.shape, generator=g).to(dtype) for p in ours.values()]
        for p, x in zip(theirs.values(), grads):
            p.grad = x.clone()
        lr = adam.learning_rate * (1 + step)
        peer.param_groups[0]["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), adam.grad_clip_norm or math.inf)
        peer.step()
        got = state.step([x.clone() for x in grads], AdamParams(lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm))
        assert got == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(ours.values(), theirs.values()):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    ours = params()
    before = ours["p1"].detach().clone()
    state = AdamW(ours)
    state.step([torch.ones(7, 5), None, torch.ones(2, 2, 2)], AdamParams(0.1, weight_decay=0.5))
    assert torch.equal(ours["p1"], before) and [int(s) for s in state.steps] == [1, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    ours = params()
    state = AdamW(ours)
    state.step([torch.ones_like(p) for p in ours.values()], AdamParams())
    before = [t.clone() for t in (*ours.values(), *state.tensors().values())]
    grads = [torch.ones_like(p) for p in ours.values()]
    grads[1][2] = bad
    with pytest.raises(NonFiniteError, match="in p1"):
        state.step(grads, AdamParams(grad_clip_norm=1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, (*ours.values(), *state.tensors().values())))


def test_small_steps_on_bfloat16_weights_add_up() -> None:
    weight = torch.ones(100, dtype=torch.bfloat16).requires_grad_()
    state = AdamW({"w": weight})
    for _ in range(100):
        state.step([torch.ones(100)], AdamParams(1e-4))  # each step is far below a bfloat16's spacing at 1
    assert weight.detach().float() == pytest.approx(0.99, abs=4e-3) and state.masters[0].dtype == torch.float32
    assert torch.equal(weight.detach(), state.masters[0].bfloat16()) and state.exp_avg[0].dtype == torch.float32


def test_schedules() -> None:
    assert [lr_schedule("constant", i, 10, 4, 1.0) for i in (0, 1, 3, 4, 9, 99)] == [0.25, 0.5, 1, 1, 1, 1]
    assert [lr_schedule("linear", i, 10, 0, 2.0) for i in (0, 5, 10, 20)] == [2, 1, 0, 0]
    assert lr_schedule("cosine", 6, 10, 2, 1.0) == pytest.approx(0.5) and lr_schedule("cosine", 10, 10, 2, 1.0) == pytest.approx(0)
    assert lr_schedule("linear", 0, 0) == 1.0
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        lr_schedule("cosin", 0, 10)
