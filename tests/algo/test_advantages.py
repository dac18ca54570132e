"""Advantages against loops over plain lists, and what others got wrong: groups of one, equal rewards, missing rewards."""

from __future__ import annotations

import logging
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl_sdk.algo.advantages import (
    ADVANTAGES,
    TOKEN_ADVANTAGES,
    Groups,
    compute_grpo_advantage_for_trajectories,
    discounted_window,
    gae,
    group_advantages,
    make_groups,
    nstep_returns,
    register,
    reinforce_pp_tokens,
    token_advantages,
    whiten,
)
from nexrl_sdk.types import ConfigError, DataError, Trajectory


def oracle(name: str, rewards: list[float], groups: list[str], eps: float = 1e-6) -> list[float]:
    """Every estimator as its paper writes it, one trajectory a run."""
    out = []
    for i, (r, g) in enumerate(zip(rewards, groups)):
        members = rewards if name == "reinforce_pp" else [x for x, h in zip(rewards, groups) if h == g]
        if len(members) < 2:
            out.append(0.0)
        elif name == "rloo":
            others = [x for j, (x, h) in enumerate(zip(rewards, groups)) if h == g and j != i]
            out.append(r - statistics.fmean(others))
        else:
            scale = 1.0 if name == "dr_grpo" else statistics.stdev(members) + eps
            out.append((r - statistics.fmean(members)) / scale)
    return out


batches = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.1, 0.25, 0.7, 1.0, 5.0]), st.sampled_from("abcd")), min_size=1, max_size=24)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=batches)
@settings(max_examples=60, deadline=None)
def test_estimators_against_loops(name: str, batch: list[tuple[float, str]]) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    got = group_advantages(name, rewards, groups)
    np.testing.assert_allclose(got, oracle(name, rewards, groups), atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=batches, holes=st.lists(st.sampled_from([None, float("nan"), float("inf")]), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_missing_rewards_change_nothing_for_the_others(name: str, batch: list[tuple[float, str]], holes: list, seed: int) -> None:
    rows = [(r, g, True) for r, g in batch] + [(h, "abcd"[i % 4], False) for i, h in enumerate(holes)]
    order = np.random.default_rng(seed).permutation(len(rows))
    rows = [rows[i] for i in order]
    got = group_advantages(name, [r for r, _, _ in rows], [g for _, g, _ in rows])
    there = [(r, g) for r, g, ok in rows if ok]
    np.testing.assert_allclose(got[[ok for _, _, ok in rows]], group_advantages(name, [r for r, _ in there], [g for _, g in there]), atol=1e-12)
    assert not got[[not ok for _, _, ok in rows]].any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nothing_to_learn_from(name: str) -> None:
    assert group_advantages(name, [5.0], ["a"]).tolist() == [0.0]  # a group of one does not keep its raw reward
    for value in (0.1, 1 / 3, 1e9 + 0.1, -7.3, 1e-12):
        for size in (2, 3, 7, 101):
            assert not group_advantages(name, [value] * size, ["a"] * size).any(), (value, size)
    assert group_advantages(name, [], []).shape == (0,)
    assert not group_advantages(name, [None, float("nan")], ["a", "a"]).any()
    assert not group_advantages(name, [1.0, None], ["a", "a"]).any()  # one scored member left
    if name != "reinforce_pp":  # groups without an id are groups of one
        assert not group_advantages(name, [1.0, 2.0], [None, None]).any()


def test_one_none_does_not_poison_the_batch() -> None:
    got = group_advantages("grpo", [1.0, 0.0, None, 1.0, 0.0], ["a", "a", "b", "b", "b"])
    np.testing.assert_allclose(got, [0.5**0.5, -(0.5**0.5), 0, 0.5**0.5, -(0.5**0.5)], atol=1e-5)


def runs_oracle(name: str, rewards: list[float], groups: list[str], runs: list[str]) -> list[float]:
    out = []
    for r, g, run in zip(rewards, groups, runs):
        by_run: dict[str, list[float]] = {}
        for x, h, u in zip(rewards, groups, runs):
            if h == g:
                by_run.setdefault(u, []).append(x)
        means = {u: statistics.fmean(v) for u, v in by_run.items()}
        if len(means) < 2 or statistics.stdev(means.values()) < 1e-9:
            out.append(0.0)
        elif name == "rloo":
            out.append(r - statistics.fmean([m for u, m in means.items() if u != run]))
        else:
            out.append((r - statistics.fmean(means.values())) / (statistics.stdev(means.values()) + 1e-6 if name == "grpo" else 1.0))
    return out


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rows=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from("ab"), st.sampled_from("xyz")), min_size=1, max_size=16))
@settings(max_examples=60, deadline=None)
def test_a_run_counts_once(name: str, rows: list[tuple[float, str, str]]) -> None:
    rewards, groups, runs = map(list, zip(*rows))
    np.testing.assert_allclose(group_advantages(name, rewards, groups, runs), runs_oracle(name, rewards, groups, runs), atol=1e-8)


def test_a_long_run_does_not_outweigh_a_short_one() -> None:
    rewards, runs = [1.0, 0.0, 0.0, 0.0, 0.0], ["x", "y", "y", "y", "y"]
    np.testing.assert_allclose(group_advantages("dr_grpo", rewards, ["a"] * 5, runs), [0.5] + [-0.5] * 4)
    np.testing.assert_allclose(group_advantages("dr_grpo", rewards, ["a"] * 5), [0.8] + [-0.2] * 4)
    # the same run name in two groups is two runs
    np.testing.assert_allclose(group_advantages("dr_grpo", [1.0, 0, 5, 7], ["a", "a", "b", "b"], ["x", "y", "x", "y"]), [0.5, -0.5, -1, 1])


def test_equal_runs_with_unequal_parts_do_not_explode() -> None:
    got = group_advantages("grpo", [0.0, 1.0, 1.0, 0.0], ["a"] * 4, ["x", "x", "y", "y"])
    assert not got.any()


def test_any_hashable_is_a_group() -> None:
    keys = [(1, "x"), 3, np.int64(3), "3", None, (1, "x")]
    g = make_groups(np.arange(6.0), keys)
    assert g.groups.tolist() == [0, 1, 1, 2, 3, 0]
    assert make_groups([1.0, 2.0], np.array([7, 7])).groups.tolist() == [0, 0]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rloo'"):
        group_advantages("rlo", [1.0], ["a"])
    with pytest.raises(DataError, match="group_ids must be as many as the rewards, 2, not 1"):
        group_advantages("grpo", [1.0, 2.0], ["a"])
    with pytest.raises(ConfigError, match="at least 1"):
        nstep_returns(torch.ones(1, 2), torch.ones(1, 2), 0)
    with pytest.raises(ConfigError, match="did you mean 'gae'"):
        token_advantages("gaee", torch.ones(1, 2), torch.ones(1, 2), ["a"])


def test_registered_and_passed_estimators() -> None:
    @register(ADVANTAGES, "raw")
    def raw(g: Groups, scale: float = 1.0) -> np.ndarray:
        return g.rewards * scale

    try:
        assert group_advantages("raw", [1.0, None, 3.0], "abc", scale=2.0).tolist() == [2.0, 0.0, 6.0]
        assert group_advantages(raw, [1.0], "a").tolist() == [1.0]
    finally:
        del ADVANTAGES["raw"]


def test_trajectories_get_their_advantages(caplog: pytest.LogCaptureFixture) -> None:
    make = lambda reward, **k: Trajectory(tokens=[1, 2], loss_mask=[0, 1], reward=reward, **k)
    rows = [make(1.0, run_id="p"), make(0.0, run_id="p"), make(None, run_id="p", status="unscored"), make(9.0, status="failed", run_id="p"), make(3.0)]
    with caplog.at_level(logging.WARNING):
        got = compute_grpo_advantage_for_trajectories(rows, logger=logging.getLogger("t"), use_run_ids=True)
    assert all(a is b for a, b in zip(rows, got))
    np.testing.assert_allclose([t.advantage for t in rows], [0.5**0.5, -(0.5**0.5), 0, 0, 0], atol=1e-5)
    assert "2 of 5" in caplog.text
    # with groups, run_ids name the rollouts
    rows = [make(r, group_id="g", run_id=u) for r, u in [(1.0, "x"), (0.0, "y"), (0.0, "y")]]
    compute_grpo_advantage_for_trajectories(rows, use_run_ids=True)
    np.testing.assert_allclose([t.advantage for t in rows], [0.5**0.5, -(0.5**0.5), -(0.5**0.5)], atol=1e-5)
    compute_grpo_advantage_for_trajectories(rows)
    np.testing.assert_allclose([t.advantage for t in rows], [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], atol=1e-5)
    assert compute_grpo_advantage_for_trajectories([]) == []


# token level


def gae_loop(r: np.ndarray, v: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    out = np.zeros_like(r)
    for b in range(len(r)):
        following_value, following_advantage = 0.0, 0.0
        for t in reversed(range(r.shape[1])):
            if mask[b, t]:
                delta = r[b, t] + gamma * following_value - v[b, t]
                following_advantage = out[b, t] = delta + gamma * lam * following_advantage
                following_value = v[b, t]
    return out


def nstep_loop(r: np.ndarray, mask: np.ndarray, n: int, gamma: float, v: np.ndarray | None) -> np.ndarray:
    out = np.zeros_like(r)
    for b in range(len(r)):
        at = np.flatnonzero(mask[b])
        for i, t in enumerate(at):
            out[b, t] = sum(gamma**j * r[b, at[i + j]] for j in range(min(n, len(at) - i)))
            if v is not None and i + n < len(at):
                out[b, t] += gamma**n * v[b, at[i + n]]
    return out


@pytest.fixture(params=range(6))
def tokens(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(request.param)
    shape = [(1, 1), (3, 7), (4, 33), (2, 64), (5, 0), (3, 12)][request.param]
    mask = rng.random(shape) < 0.7
    if request.param == 5:
        mask[1] = False  # a row without a sampled token
    r, v = rng.normal(size=shape), rng.normal(size=shape)
    r[~mask], v[~mask] = np.nan, np.nan  # what is masked out may hold anything
    return r, v, mask


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_against_the_recursion(tokens: tuple, gamma: float, lam: float) -> None:
    r, v, mask = tokens
    advantages, returns = gae(torch.tensor(r), torch.tensor(v), torch.tensor(mask).long(), gamma, lam)
    want = gae_loop(r, v, mask, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), want, atol=1e-10)
    np.testing.assert_allclose(returns.numpy(), np.where(mask, want + v, 0.0), atol=1e-10)
    assert gae(torch.tensor(r).float(), torch.tensor(v).float(), torch.tensor(mask))[0].dtype == torch.float32


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("critic", [False, True])
def test_nstep_against_the_sum(tokens: tuple, n: int, critic: bool) -> None:
    r, v, mask = tokens
    got = nstep_returns(torch.tensor(r), torch.tensor(mask), n, 0.9, torch.tensor(v) if critic else None)
    np.testing.assert_allclose(got.numpy(), nstep_loop(r, mask, n, 0.9, v if critic else None), atol=1e-10)


def test_nstep_as_the_documents_compute_it() -> None:
    rewards, n, gamma = [1.0, 2.0, 3.0, 4.0], 2, 0.5
    want = [sum(gamma**j * rewards[i + j] for j in range(min(n, len(rewards) - i))) for i in range(len(rewards))]
    assert nstep_returns(torch.tensor([rewards]), torch.ones(1, 4), n, gamma)[0].tolist() == want


@given(st.integers(1, 40), st.integers(0, 50), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=50, deadline=None)
def test_window(length: int, n: int, discount: float) -> None:
    x = np.random.default_rng(length).normal(size=(2, length))
    want = [[sum(discount**j * row[t + j] for j in range(min(n, length - t))) for t in range(length)] for row in x]
    np.testing.assert_allclose(discounted_window(torch.tensor(x), n, discount), want, atol=1e-12)


def test_whitening_counts_tokens_and_survives_equal_values() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.normal(3, 2, (4, 9)), rng.random((4, 9)) < 0.6
    got = whiten(torch.tensor(x), torch.tensor(mask)).numpy()
    kept = x[mask]
    np.testing.assert_allclose(got[mask], (kept - kept.mean()) / (kept.std(ddof=1) + 1e-6))
    assert not got[~mask].any()
    assert not whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)).any()
    assert not whiten(torch.tensor([[4.0, 5.0]]), torch.tensor([[1, 0]])).any()
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_reinforce_pp_tokens_is_the_whitened_reward_to_come(tokens: tuple) -> None:
    r, _, mask = tokens
    got = reinforce_pp_tokens(torch.tensor(r), torch.tensor(mask), 0.9).numpy()
    returns = nstep_loop(r, mask, 10_000, 0.9, None)
    kept = returns[mask]
    want = np.where(mask, (returns - kept.mean()) / (kept.std(ddof=1) + 1e-6), 0) if kept.size > 1 else np.zeros_like(returns)
    np.testing.assert_allclose(got, want, atol=1e-9)


def test_token_advantages_of_both_kinds() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [1, 1, 1], [1, 0, 1]])
    rewards = torch.zeros(4, 3)
    rewards[0, 2], rewards[2, 2], rewards[3, 2] = 1.0, 2.0, float("nan")
    groups = ["a", "a", "b", "b"]
    for name in ADVANTAGES:
        if name not in TOKEN_ADVANTAGES:
            per_row = group_advantages(name, [1.0, 0.0, 2.0, None], groups)
            np.testing.assert_allclose(token_advantages(name, rewards, mask, groups), per_row[:, None] * mask.numpy(), atol=1e-6)
    for name, config in [("reinforce_pp", {"gamma": 0.9}), ("gae", {"lam": 0.9}), ("nstep", {"n": 2, "gamma": 0.5})]:
        got = token_advantages(name, rewards, mask, groups, **config)
        assert torch.isfinite(got).all() and not got[3].any() and not got[mask == 0].any() and got[0].any()
    values = torch.ones(4, 3)
    got = token_advantages("nstep", rewards, mask, groups, values_BT=values, n=1)
    assert got[0].tolist() == [0.0, 0.0, 0.0] and got[2].tolist() == [0.0, 0.0, 1.0]  # r + V(next) - V, and no V past the end


def test_100_000_trajectories_need_no_patience() -> None:
    rng = np.random.default_rng(0)
    rewards, groups = rng.random(100_000), np.repeat(np.arange(12_500), 8)
    got = group_advantages("grpo", rewards, groups)
    block = rewards.reshape(-1, 8)
    np.testing.assert_allclose(got.reshape(-1, 8), (block - block.mean(1, keepdims=True)) / (block.std(1, ddof=1, keepdims=True) + 1e-6), atol=1e-9)
