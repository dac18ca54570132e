"""Losses against loops in float64: values, gradients by closed form and by finite differences, and what must not matter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk.algo.losses import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    PRESETS,
    REQUIRED_FIELDS,
    AdaptiveKLController,
    FixedKLController,
    LossInput,
    LossOutput,
    add_metrics,
    check_loss,
    compute_loss,
    loss_input,
    mean_metrics,
    register_loss,
    required_fields,
    sequence_mean,
    token_weights,
)
from nexrl_sdk.algo.advantages import ADVANTAGES, TOKEN_ADVANTAGES
from nexrl_sdk.types import ConfigError, DataError, NonFiniteError

POLICY = ["importance_sampling", "ppo", "cispo", "gspo", "dro"]
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "cross_entropy": [{}],
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}, {"dual_clip": 1.3}],
    "cispo": [{}, {"clip_low_threshold": 0.0, "clip_high_threshold": 1.05}],
    "gspo": [{"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}, {}],
    "dro": [{}, {"beta": 0.7}],
}
CASES = [(name, config) for name, configs in CONFIGS.items() for config in configs]
LENGTHS = (3, 1, 6, 4)


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> LossInput:
    """Four packed sequences with prompts (weight 0), of which the last is all prompt."""
    rng = np.random.default_rng(seed)
    n = sum(LENGTHS)
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    mask = rng.random(n) < 0.7
    mask[:5], mask[-4:] = [False, True, True, True, True], False
    t = lambda x: torch.tensor(x, dtype=dtype)
    return LossInput(
        logprobs=t(rng.normal(-1.5, 0.4, n)),
        weights=t(mask * rng.uniform(0.1, 2.0, n)),
        old_logprobs=t(rng.normal(-1.5, 0.4, n)),
        advantages=t(rng.normal(0, 1, n)),
        ref_logprobs=t(rng.normal(-1.5, 0.4, n)),
        seq_ids=torch.tensor(ids),
        entropy=t(rng.uniform(0.5, 2, n)),
        rollout_logprobs=t(rng.normal(-1.5, 0.4, n)),
    )


def per_token(name: str, inp: LossInput, config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Loss and its derivative by the token's logprob, written token by token from the wire's formulas."""
    lp, q, a = inp.logprobs.tolist(), inp.old_logprobs.tolist(), inp.advantages.tolist()
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "gspo":
        low, high = config.get("clip_low_threshold", 1 - 3e-4), config.get("clip_high_threshold", 1 + 4e-4)
    losses, slopes = [], []
    for i in range(len(lp)):
        r = math.exp(lp[i] - q[i])
        if name == "gspo":
            m = inp.weights if inp.sequence_ratio_mask is None else inp.sequence_ratio_mask
            mine = [j for j in range(len(lp)) if inp.seq_ids[j] == inp.seq_ids[i] and m[j] != 0]
            r = math.exp(sum(lp[j] - q[j] for j in mine) / max(len(mine), 1))
        clipped = min(max(r, low), high)
        if name == "cross_entropy":
            loss, slope = -lp[i], -1.0
        elif name == "importance_sampling":
            loss = slope = -r * a[i]
        elif name in ("ppo", "gspo"):
            loss = -min(r * a[i], clipped * a[i])
            slope = -r * a[i] if loss == -r * a[i] else 0.0
            if config.get("dual_clip") and a[i] < 0 and loss > -config["dual_clip"] * a[i]:
                loss, slope = -config["dual_clip"] * a[i], 0.0
        elif name == "cispo":
            loss, slope = -clipped * lp[i] * a[i], -clipped * a[i]
        else:
            beta = config.get("beta", 0.05)
            loss, slope = -(lp[i] * a[i] - 0.5 * beta * (lp[i] - q[i]) ** 2), -(a[i] - beta * (lp[i] - q[i]))
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes


def gradient(name: Any, inp: LossInput, config: dict[str, Any] | None = None) -> tuple[LossOutput, torch.Tensor]:
    lp = inp.logprobs.clone().requires_grad_()
    out = compute_loss(name, replace(inp, logprobs=lp), config)
    return out, torch.autograd.grad(out.loss, lp)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "config"), CASES)
def test_value_and_gradient(name: str, config: dict[str, Any], seed: int) -> None:
    inp = batch(seed)
    losses, slopes = per_token(name, inp, config)
    out, grad = gradient(name, inp, config)
    w = inp.weights.numpy()
    assert out.loss.item() == pytest.approx(float(np.dot(w, losses)), rel=1e-12)
    np.testing.assert_allclose(grad.numpy(), w * slopes, atol=1e-12)
    assert all(not s.requires_grad and not c.requires_grad for s, c in out.metrics.values())


@pytest.mark.parametrize(("name", "config"), [c for c in CASES if c[0] not in ("cispo", "gspo")])
def test_gradient_by_finite_differences(name: str, config: dict[str, Any]) -> None:
    inp = batch(7)
    more = {"kl_coef": 0.3, "entropy_coef": 0.0, **({"correction": "tis"} if name != "cross_entropy" else {})}
    f = lambda lp: LOSSES[name](replace(inp, logprobs=lp), **config, **more).loss
    assert torch.autograd.gradcheck(f, (inp.logprobs.clone().requires_grad_(),))


@pytest.mark.parametrize("name", POLICY)
def test_first_step_is_the_policy_gradient(name: str) -> None:
    inp = batch()
    inp = replace(inp, old_logprobs=inp.logprobs)
    out, grad = gradient(name, inp)
    np.testing.assert_allclose(grad, -(inp.weights * inp.advantages), atol=1e-12)
    means = mean_metrics(out.metrics)
    assert means["policy/ratio_mean"] == 1 and means["policy/kl"] == 0 and means["policy/approx_kl"] == 0 and means.get("policy/clip_frac", 0) == 0


@pytest.mark.parametrize("name", ["cross_entropy", *POLICY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_weight_0_may_hold_anything(name: str, dtype: torch.dtype) -> None:
    inp = batch(1, dtype)
    config = {"kl_coef": 0.1, "entropy_coef": 0.01, **({"correction": "tis"} if name != "cross_entropy" else {})}
    want, want_grad = gradient(name, inp, config)
    out = inp.weights == 0
    for junk in (float("nan"), float("inf"), -float("inf"), 1e30):
        fields = ("logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy", "rollout_logprobs")
        dirty = replace(inp, **{f: torch.where(out, junk, getattr(inp, f)) for f in fields})
        got, grad = gradient(name, dirty, config)
        assert got.loss == want.loss and torch.equal(grad, want_grad)
        assert {k: tuple(map(float, v)) for k, v in got.metrics.items()} == {k: tuple(map(float, v)) for k, v in want.metrics.items()}


@pytest.mark.parametrize("name", ["cross_entropy", *POLICY])
def test_a_nan_that_counts_is_not_hidden(name: str) -> None:
    inp = batch(1)
    at = int(torch.nonzero(inp.weights)[0])
    for field in ["logprobs"] if name == "cross_entropy" else ["logprobs", "advantages", "old_logprobs"]:
        broken = getattr(inp, field).clone()
        broken[at] = float("nan")
        assert compute_loss(name, replace(inp, **{field: broken})).loss.isnan(), field


@pytest.mark.parametrize("name", ["cross_entropy", *POLICY])
def test_empty_and_all_masked(name: str) -> None:
    none = torch.zeros(0)
    out, grad = gradient(name, LossInput(none, none, none, none, seq_ids=none.long()))
    assert out.loss == 0 and grad.shape == (0,) and mean_metrics(out.metrics) == {}
    x = torch.full((3,), float("nan"))
    out, grad = gradient(name, LossInput(x, torch.zeros(3), x, x, seq_ids=torch.tensor([0, 0, 2])))
    assert out.loss == 0 and not grad.any() and mean_metrics(out.metrics) == {}


@pytest.mark.parametrize(("name", "config"), CASES)
def test_micro_batches_add_up(name: str, config: dict[str, Any]) -> None:
    inp = batch(3)
    config = {**config, "kl_coef": 0.2, "entropy_coef": 0.1, **({"correction": "masked"} if name != "cross_entropy" else {})}
    whole, whole_grad = gradient(name, inp, config)
    parts, grads, start = [], [], 0
    for seqs in ([0, 1], [2], [3]):
        n = sum(LENGTHS[s] for s in seqs)
        cut = lambda x: x[start : start + n]  # noqa: B023
        part = LossInput(**{f: cut(getattr(inp, f)) for f in ("logprobs", "weights", "old_logprobs", "advantages", "ref_logprobs", "entropy", "rollout_logprobs")},
                         seq_ids=cut(inp.seq_ids) - seqs[0])  # fmt: skip
        out, grad = gradient(name, part, config)
        parts.append(out)
        grads.append(grad)
        start += n
    assert float(sum(p.loss for p in parts)) == pytest.approx(float(whole.loss), rel=1e-12)
    np.testing.assert_allclose(torch.cat(grads), whole_grad, atol=1e-14)
    summed = mean_metrics(add_metrics(p.metrics for p in parts))
    assert summed == pytest.approx(mean_metrics(whole.metrics), rel=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", *POLICY])
@pytest.mark.parametrize("gap", [-500.0, -30.0, 30.0, 500.0])
def test_absurd_ratios_stay_finite(name: str, gap: float) -> None:
    old = torch.tensor([-600.0, -600.0])
    inp = LossInput(old + gap, torch.ones(2), old, torch.tensor([1.0, -1.0]), ref_logprobs=old, seq_ids=torch.zeros(2).long(), rollout_logprobs=old - gap)
    config = {"kl_coef": 0.1, **({"correction": "tis"} if name != "cross_entropy" else {})}
    out, grad = gradient(name, inp, config)
    assert out.loss.isfinite() and grad.isfinite().all() and all(map(math.isfinite, mean_metrics(out.metrics).values()))


# gspo


def test_gspo_averages_the_log_ratio_and_does_not_sum_it() -> None:
    lp = torch.full((50,), -1.0, dtype=torch.float64)
    one = LossInput(lp, torch.ones(50).double(), lp - 0.05, torch.ones(50).double())
    out = compute_loss("gspo", one, {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9})
    assert mean_metrics(out.metrics)["policy/ratio_mean"] == pytest.approx(math.exp(0.05))  # the sum would be exp(2.5)


def test_gspo_mask_of_the_ratio() -> None:
    inp = batch(5)
    mask = torch.zeros_like(inp.weights)
    mask[[1, 3, 6, 8]] = 1.0  # some of these have weight 0: the ratio's tokens and the loss's are independent
    inp = replace(inp, sequence_ratio_mask=mask)
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    losses, slopes = per_token("gspo", inp, config)
    out, grad = gradient("gspo", inp, config)
    assert out.loss.item() == pytest.approx(float(np.dot(inp.weights, losses)))
    np.testing.assert_allclose(grad, inp.weights.numpy() * slopes, atol=1e-12)


def test_gspo_sequences_do_not_see_each_other() -> None:
    inp = batch(2)
    other = inp.logprobs.clone()
    other[inp.seq_ids == 2] -= 1.0
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 99.0}
    _, a = gradient("gspo", inp, config)
    _, b = gradient("gspo", replace(inp, logprobs=other), config)
    assert torch.equal(a[inp.seq_ids != 2], b[inp.seq_ids != 2]) and not torch.equal(a[inp.seq_ids == 2], b[inp.seq_ids == 2])


def test_gspo_equals_the_sequence_objective() -> None:
    """With one advantage a sequence, gradients of GSPO-token and of GSPO (equation 5 of the paper) agree."""
    inp = batch(4)
    inp = replace(inp, advantages=torch.tensor([0.5, -1.0, 2.0, 1.0]).double()[inp.seq_ids], weights=(inp.weights != 0).double())
    per_sequence = torch.tensor([1 / max(int(inp.weights[inp.seq_ids == s].sum()), 1) for s in range(4)]).double()
    lp = inp.logprobs.clone().requires_grad_()
    objective = torch.zeros(())
    for s in range(4):
        m = (inp.seq_ids == s) & (inp.weights != 0)
        if m.any():
            ratio, a = torch.exp((lp - inp.old_logprobs)[m].mean()), inp.advantages[m][0]
            objective = objective - torch.minimum(ratio * a, ratio.clamp(0.95, 1.05) * a)
    want = torch.autograd.grad(objective, lp)[0]
    weighted = replace(inp, weights=inp.weights * per_sequence[inp.seq_ids])
    out, grad = gradient("gspo", weighted, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05})
    np.testing.assert_allclose(grad, want, atol=1e-12)
    assert out.loss.item() == pytest.approx(float(objective))


def test_sequence_mean_with_gaps_in_the_ids() -> None:
    x, ids = torch.tensor([1.0, 3.0, 5.0, float("nan")]), torch.tensor([4, 4, 1, 1])
    assert sequence_mean(x, torch.tensor([True, True, True, False]), ids).tolist() == [2, 2, 5, 5]


# clipping


def test_clip_metrics_count_what_was_clipped() -> None:
    ratio, a = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5, 9.0]), torch.tensor([1.0, -1, 1, 1, -1, -1])
    inp = LossInput(ratio.log(), torch.ones(6), torch.zeros(6), a)
    m = mean_metrics(compute_loss("ppo", inp, {"dual_clip": 3.0}).metrics)
    assert m["policy/clip_frac_low"] == pytest.approx(1 / 6) and m["policy/clip_frac_high"] == pytest.approx(1 / 6) and m["policy/clip_frac"] == pytest.approx(1 / 3)
    assert m["policy/dual_clip_frac"] == pytest.approx(1 / 6) and m["policy/ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert m["policy/kl"] == pytest.approx(float(-ratio.log().mean())) and m["policy/approx_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()))
    m = mean_metrics(compute_loss("cispo", inp).metrics)
    assert m["policy/clip_frac_low"] == pytest.approx(2 / 6) and m["policy/clip_frac_high"] == pytest.approx(3 / 6)


def test_cispo_keeps_every_gradient_where_ppo_drops_it() -> None:
    inp = LossInput(torch.tensor([1.0]), torch.ones(1), torch.zeros(1), torch.ones(1))
    assert gradient("ppo", inp)[1] == 0 and gradient("cispo", inp)[1] == pytest.approx(-1.2)


def test_thresholds_of_the_data_win() -> None:
    inp = batch(6)
    high = torch.full_like(inp.weights, 1.05)
    want = compute_loss("ppo", inp, {"clip_high_threshold": 1.05}).loss
    assert compute_loss("ppo", replace(inp, extra={"clip_high_threshold": high})).loss == want
    assert compute_loss("ppo", inp).loss != want


def test_a_threshold_of_exactly_1_keeps_the_first_gradient() -> None:
    lp = torch.tensor([-1.0, -1.0])
    inp = LossInput(lp, torch.ones(2), lp, torch.tensor([1.0, -1.0]))
    assert gradient("ppo", inp, {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})[1].tolist() == [-1, 1]


# KL, entropy, corrections


def test_kl_estimators_by_formula() -> None:
    rng = np.random.default_rng(0)
    lp, ref = rng.normal(-2, 0.5, 100), rng.normal(-2, 0.5, 100)
    d = lp - ref
    want = {"kl": d, "abs": abs(d), "mse": d**2 / 2, "low_var_kl": np.exp(-d) - 1 + d}
    for name, fn in KL_ESTIMATORS.items():
        np.testing.assert_allclose(fn(torch.tensor(lp), torch.tensor(ref)), want[name], atol=1e-12)
        assert not fn(torch.tensor(lp), torch.tensor(lp)).any()
        assert torch.autograd.gradcheck(lambda x, fn=fn: fn(x, torch.tensor(ref)), (torch.tensor(lp, requires_grad=True),))


def test_low_var_kl_is_capped_and_precise_near_0() -> None:
    lp = torch.tensor([-50.0, -1.0, -1000.0], requires_grad=True)
    kl = KL_ESTIMATORS["low_var_kl"](lp, torch.tensor([0.0, -1.0, 0.0]))
    assert kl.tolist() == [10, 0, 10] and not torch.autograd.grad(kl.sum(), lp)[0].any()
    d = torch.tensor(1e-4)
    assert float(KL_ESTIMATORS["low_var_kl"](d, torch.tensor(0.0))) == pytest.approx(0.5e-8, rel=1e-3)  # not lost to cancellation in f32


def test_kl_gradients_in_expectation() -> None:
    """Over the policy's own draws, k2's gradient is the KL's, and k1's is 0: why k1 belongs in the reward."""
    theta, q = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True), torch.tensor([0.2, 0.5, 0.3]).double()
    lp = theta.log_softmax(0)
    p = lp.exp().detach()
    exact = torch.autograd.grad((lp.exp() * (lp - q.log())).sum(), theta, retain_graph=True)[0]
    grads = {name: torch.autograd.grad((p * fn(lp, q.log())).sum(), theta, retain_graph=True)[0] for name, fn in KL_ESTIMATORS.items()}
    np.testing.assert_allclose(grads["mse"], exact, atol=1e-12)
    np.testing.assert_allclose(grads["kl"], 0, atol=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", *POLICY])
def test_penalties_and_bonuses(name: str) -> None:
    inp = batch(8)
    base, base_grad = gradient(name, inp)
    for estimator, fn in KL_ESTIMATORS.items():
        out, grad = gradient(name, inp, {"kl_coef": 0.3, "kl_estimator": estimator})
        lp = inp.logprobs.clone().requires_grad_()
        penalty = 0.3 * (inp.weights * fn(lp, inp.ref_logprobs)).sum()
        assert float(out.loss - base.loss) == pytest.approx(float(penalty))
        np.testing.assert_allclose(grad - base_grad, torch.autograd.grad(penalty, lp)[0], atol=1e-12)
        keep = inp.weights != 0
        assert mean_metrics(out.metrics)["policy/ref_kl"] == pytest.approx(float(fn(inp.logprobs, inp.ref_logprobs)[keep].mean()))
    out = compute_loss(name, inp, {"entropy_coef": 0.2})
    assert float(base.loss - out.loss) == pytest.approx(0.2 * float((inp.weights * inp.entropy).sum()))
    assert mean_metrics(base.metrics)["policy/entropy"] == pytest.approx(float(inp.entropy[inp.weights != 0].mean()))


def test_entropy_bonus_has_a_gradient() -> None:
    entropy = torch.tensor([1.0, 2.0], requires_grad=True)
    inp = LossInput(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.zeros(2), torch.zeros(2), entropy=entropy)
    assert torch.autograd.grad(compute_loss("ppo", inp, {"entropy_coef": 0.5}).loss, entropy)[0].tolist() == [-0.5, 0]


@pytest.mark.parametrize("name", POLICY)
def test_corrections_weigh_the_policy_term_alone(name: str) -> None:
    inp = batch(9)
    inp = replace(inp, old_logprobs=inp.logprobs.clone())
    raw = np.exp((inp.old_logprobs - inp.rollout_logprobs).numpy())
    want = {"none": np.ones_like(raw), "tis": np.minimum(raw, 1.3), "masked": np.where((raw <= 1.3) & (raw >= 1 / 1.3), raw, 0)}
    _, base = gradient(name, inp)
    keep = (inp.weights != 0).numpy()
    for correction, weight in want.items():
        out, grad = gradient(name, inp, {"correction": correction, "correction_cap": 1.3, "kl_coef": 0.1})
        _, kl = gradient(name, inp, {"kl_coef": 0.1})
        np.testing.assert_allclose(grad, base.numpy() * weight + (kl - base).numpy(), atol=1e-12)
        np.testing.assert_allclose(CORRECTIONS[correction](inp.rollout_logprobs, inp.old_logprobs, 1.3), weight)
        if correction != "none":
            m = mean_metrics(out.metrics)
            assert m["policy/correction_mean"] == pytest.approx(weight[keep].mean()) and m["policy/correction_frac"] == pytest.approx((weight != raw)[keep].mean())


# registry and configuration


def test_a_loss_of_ones_own() -> None:
    def mine(inp: LossInput, *, power: float = 1.0) -> torch.Tensor:
        return -(inp.weights * inp.extra["bonus"] ** power * inp.logprobs).sum()

    inp = loss_input(torch.tensor([-1.0, -2.0]), {"weights": torch.ones(2), "bonus": torch.tensor([1.0, 2.0])})
    assert compute_loss(mine, inp, {"power": 2.0}).loss == 9.0 and required_fields(mine) == ()
    register_loss("mine", requires=("weights", "bonus"))(mine)
    try:
        assert compute_loss("mine", inp).loss == 5.0 and required_fields("mine") == required_fields(mine) == ("weights", "bonus")
        with pytest.raises(ConfigError, match="did you mean 'power'"):
            check_loss("mine", {"powr": 1.0})
    finally:
        del LOSSES["mine"], REQUIRED_FIELDS["mine"]
    assert check_loss(lambda inp, **kw: inp.logprobs.sum(), {"anything": 1})


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("pppo", {}, "did you mean 'ppo'"),
        ("ppo", {"clip_hi_threshold": 1.2}, "did you mean 'clip_high_threshold'"),
        ("gspo", {"dual_clip": 3.0}, "takes no 'dual_clip'"),
        ("ppo", {"clip_low_threshold": 1.2}, "clip_low_threshold must be in"),
        ("ppo", {"clip_high_threshold": 0.2}, "at least 1"),
        ("ppo", {"dual_clip": 0.5}, "over 1"),
        ("ppo", {"kl_coef": -1.0}, "kl_coef must be 0 or more"),
        ("ppo", {"kl_coef": float("nan")}, "kl_coef must be a finite number"), ("ppo", {"clip_low_threshold": "x"}, "finite number"), ("ppo", {"clip_low_threshold": None}, "finite number"), ("ppo", {"entropy_coef": True}, "finite number"), ("ppo", {"correction_cap": 10**400}, "finite number"),
        ("ppo", {"kl_estimator": "low_var"}, "low_var_kl"),
        ("ppo", {"correction": "mask"}, "did you mean 'masked'"),
        ("ppo", {"correction_cap": 0.5}, "at least 1"),
        ("dro", {"beta": -1}, "beta must be 0 or more"),
        ("cross_entropy", {"beta": 1}, "takes no 'beta'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(loss: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_loss(loss, config)


@pytest.mark.parametrize(
    ("config", "field"),
    [({}, "advantages"), ({}, "old_logprobs"), ({"kl_coef": 0.1}, "ref_logprobs"), ({"entropy_coef": 0.1}, "entropy"), ({"correction": "tis"}, "rollout_logprobs")],
)
def test_missing_data_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError, match="logprobs" if field == "old_logprobs" else field):
        compute_loss("ppo", replace(batch(), **{field: None}), config)


def test_required_fields() -> None:
    assert required_fields("cross_entropy") == ("weights",) and required_fields("gspo") == ("logprobs", "advantages")
    assert required_fields("ppo", {"kl_coef": 0.1, "correction": "tis"}) == ("logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
    assert set(REQUIRED_FIELDS) == set(LOSSES)


def test_fields_without_weights_count_where_something_was_sampled() -> None:
    fields = {"logprobs": torch.tensor([0.0, 0.0, -0.5, -0.1]), "advantages": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    inp = loss_input(torch.full((4,), -1.0), fields, torch.zeros(4).long())
    assert inp.weights.tolist() == [0, 1, 1, 1]  # a token with probability 1 still counts by its advantage; a prompt's does not
    assert loss_input(torch.zeros(2), {}).weights.tolist() == [1, 1]


def test_presets_name_what_exists() -> None:
    assert set(PRESETS) == {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "ppo"}
    for preset in PRESETS.values():
        check_loss(preset.loss_fn, preset.loss_config)
        assert preset.advantage in {**ADVANTAGES, **TOKEN_ADVANTAGES} and preset.loss_agg_mode in AGGREGATIONS


# aggregation


def masks(seed: int) -> np.ndarray:
    mask = np.random.default_rng(seed).random((5, 9)) < 0.5
    mask[3] = False
    return mask


def aggregate(name: str, losses: np.ndarray, mask: np.ndarray) -> float:
    rows = [x[m] for x, m in zip(losses, mask) if m.any()]
    if not rows:
        return 0.0
    return {
        "token-mean": lambda: np.concatenate(rows).mean(),
        "seq-mean-token-sum": lambda: np.mean([r.sum() for r in rows]),
        "seq-mean-token-mean": lambda: np.mean([r.mean() for r in rows]),
        "token-sum": lambda: np.concatenate(rows).sum(),
        "dr_grpo": lambda: np.mean([r.sum() / 16 for r in rows]),
    }[name]()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations_by_definition(name: str) -> None:
    config = {"max_tokens": 16} if name == "dr_grpo" else {}
    for seed in range(4):
        mask, losses = masks(seed), np.random.default_rng(seed).normal(size=(5, 9))
        w = token_weights(name, mask, **config)
        assert w.dtype == np.float32 and w.shape == mask.shape and not w[~mask].any()
        assert float((w * losses).sum()) == pytest.approx(aggregate(name, losses, mask), rel=1e-5)
        rows = token_weights(name, [m[: 9 - i] for i, m in enumerate(np.pad(mask, ((0, 0), (0, 9)))[:, :9])], **config)
        assert [len(r) for r in rows] == [9, 8, 7, 6, 5]
        tensor = token_weights(name, torch.tensor(mask).long(), **config)
        assert isinstance(tensor, torch.Tensor) and np.array_equal(tensor.numpy(), w)
        padded = token_weights(name, np.pad(mask, ((0, 3), (4, 2))), **config)  # padding of either kind changes nothing
        assert np.array_equal(padded[:5, 4:-2], w) and not padded[5:].any()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations_of_nothing(name: str) -> None:
    config = {"max_tokens": 16} if name == "dr_grpo" else {}
    assert not token_weights(name, np.zeros((2, 3)), **config).any() and token_weights(name, np.zeros((0, 3)), **config).shape == (0, 3)
    assert token_weights(name, [], **config) == []


def test_aggregation_errors() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        token_weights("dr_grpo", np.ones((1, 1)))
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        token_weights("token_mean", np.ones((1, 1)))
    assert token_weights(lambda lengths: lengths, [np.ones(3)])[0].tolist() == [3, 3, 3]


# controllers


def test_controllers() -> None:
    fixed = FixedKLController(0.3)
    fixed.update(99.0, 10)
    assert fixed.value == 0.3
    control = AdaptiveKLController(0.1, 6.0, 10_000)
    for kl, n in [(60.0, 256), (6.6, 100), (0.0, 64)]:
        before, error = control.value, min(max(kl / 6.0 - 1, -0.2), 0.2)
        control.update(kl, n)
        assert control.value == pytest.approx(before * (1 + error * n / 10_000))
    again = AdaptiveKLController(0.5, 6.0, 10_000)
    again.load_state_dict(control.state_dict())
    control.update(3.0, 5)
    again.update(3.0, 5)
    assert again.value == control.value
    with pytest.raises(NonFiniteError, match="the coefficient stays"):
        control.update(float("nan"), 5)
    assert control.value == again.value
    with pytest.raises(ConfigError, match="over 0"):
        AdaptiveKLController(0.1, target=0.0)
