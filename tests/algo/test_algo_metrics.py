"""Metrics against counting by hand, and pass@k against all subsets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nexrl_sdk.algo.metrics import (
    compute_grpo_advantage_for_trajectories,
    log_grpo_metrics,
    log_rollout_metrics,
    pass_at_k,
    reduce_metrics,
    rollout_metrics,
    val_metrics,
)
from nexrl_sdk.types import ConfigError, Trajectory


def make(reward: float | None = None, **fields: object) -> Trajectory:
    return Trajectory({"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "reward": reward, **fields})


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    p, n, k = 0.3, 8, 3
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_is_exact_for_many_and_refuses_nonsense() -> None:
    by_product = 1 - math.prod(1 - 100 / i for i in range(991, 1001))
    assert pass_at_k(1000, 10, 100) == pytest.approx(by_product, rel=1e-12)
    assert pass_at_k(10**6, 1, 1) == 1e-6
    for n, c, k in [(2, 3, 1), (2, 1, 3), (2, 1, 0), (2, -1, 1)]:
        with pytest.raises(ConfigError, match="pass@k needs"):
            pass_at_k(n, c, k)


def test_empty_and_all_failed_have_no_rewards_and_no_nan() -> None:
    assert rollout_metrics([]) == {"errors/failed": 0, "errors/unscored": 0, "errors/evaluator": 0, "errors/frac": 0, "rollouts/count": 0}
    broken = [Trajectory(status="failed", error="x"), make(status="error"), make(None), make(float("nan"))]
    m = rollout_metrics(broken)
    assert not any(k.startswith(("reward/", "group/", "eval/")) for k in m) and all(map(math.isfinite, m.values()))
    assert (m["errors/failed"], m["errors/evaluator"], m["errors/unscored"], m["errors/frac"]) == (1, 1, 2, 1)
    assert "val/pass@1" not in val_metrics(broken)


def test_failures_are_no_reward_of_zero() -> None:
    m = rollout_metrics([make(1.0, group_id="a"), make(0.5, group_id="a"), Trajectory(status="failed", group_id="a", reward=0.0), make(0.0, status="error", group_id="a")])
    assert m["reward/mean"] == 0.75 and m["reward/min"] == 0.5 and m["group/size"] == 2 and m["errors/frac"] == 0.5
    assert val_metrics([make(1.0, group_id="a"), make(None, group_id="a", status="unscored")])["val/pass@1"] == 1.0


def test_rollout_metrics_by_hand() -> None:
    rows = [
        make(1.0, group_id="a", run_id="a/0", metrics={"ok": True, "text": "no number", "bad": float("nan")}, finish_reason="stop"),
        make(1.0, group_id="a", run_id="a/0", metrics={"ok": False}),
        make(0.0, group_id="a", run_id="a/1", finish_reason="length", tokens=[1] * 10, loss_mask=[0] * 4 + [1, 1, 0, 1, 1, 1]),
        make(0.3, group_id="b", run_id="b/0"),
    ]
    m = rollout_metrics(rows)
    assert m["reward/mean"] == pytest.approx(1.3 / 3) and m["reward/std"] == pytest.approx(np.std([1, 0, 0.3])) and m["reward/max"] == 1  # the run of two sequences counts once
    assert m["rollouts/count"] == 3 and m["errors/frac"] == 0
    assert m["group/count"] == 2 and m["group/size"] == 1.5 and m["group/frac_zero_std"] == 0.5
    assert m["tokens/prompt_mean"] == 7 / 4 and m["tokens/response_mean"] == 11 / 4 and m["tokens/response_max"] == 5 and m["tokens/total"] == 19
    assert m["tokens/truncated_frac"] == 0.25 and m["eval/ok"] == 1 and "eval/text" not in m and "eval/bad" not in m
    assert all(type(v) is float for v in m.values())


def test_val_metrics() -> None:
    rows = [make(r, group_id=g, is_val=True) for g, rs in {"a": [1, 0, 0, 1], "b": [0, 0, 0, 0], "c": [1, 0.99]}.items() for r in rs]
    m = val_metrics(rows, ks=[1, 2, 4, 8])
    assert m["val/pass@1"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert m["val/pass@2"] == pytest.approx((pass_at_k(4, 2, 2) + 0 + 1) / 3)
    assert m["val/pass@4"] == pytest.approx(0.5) and "val/pass@8" not in m
    assert val_metrics(rows, success=0.9)["val/pass@1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert m["val/reward/mean"] == pytest.approx(3.99 / 10)
    pieces = [make(1.0, group_id="a", run_id="0") for _ in range(3)] + [make(0.0, group_id="a", run_id="1"), make(None, group_id="a", run_id="2", status="failed"), make(None, group_id="a", run_id="2", status="failed")]
    by_run = val_metrics(pieces, ks=[1, 2, 4])
    assert by_run["val/pass@1"] == 0.5 and by_run["val/pass@2"] == 1 and "val/pass@4" not in by_run
    assert by_run["val/errors/failed"] == 1 and by_run["val/rollouts/count"] == 3 and by_run["val/errors/frac"] == pytest.approx(1 / 3)
    # without a group, every trajectory is a prompt of its own
    assert val_metrics([make(1.0), make(0.0)], ks=[1, 2]).keys() & {"val/pass@1", "val/pass@2"} == {"val/pass@1"}


def test_reduce_metrics() -> None:
    rows = [{"loss": 1.0, "errors/failed": 1, "errors/frac": 0.5, "time/x": 1.0, "reward/min": 2, "only": 4.0}, {"loss": 3.0, "errors/failed": 2, "errors/frac": 0.1, "time/x": 2.0, "reward/min": 1, "none": None}]
    assert reduce_metrics(rows) == {"loss": 2.0, "errors/failed": 3.0, "errors/frac": 0.3, "time/x": 3.0, "reward/min": 1.0, "only": 4.0}
    assert reduce_metrics([]) == {}


def test_names_of_the_documents() -> None:
    rows = [make(1.0, run_id="p"), make(0.0, run_id="p"), make(None, run_id="p")]
    metrics: dict[str, float] = {"kept": 1.0}
    log_grpo_metrics(compute_grpo_advantage_for_trajectories(rows, use_run_ids=True), metrics)
    log_rollout_metrics(rows, metrics)
    assert metrics["kept"] == 1 and metrics["advantage/max"] == pytest.approx(0.5**0.5, abs=1e-5) and metrics["advantage/mean"] == pytest.approx(0)
    assert metrics["rollout/reward/mean"] == metrics["reward/mean"] == 0.5 and metrics["group/size"] == 2
    log_grpo_metrics([], {})
