"""The pool under many threads and every order of arrival: each rollout comes out once, in whole groups, or is counted."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from nexrl_sdk.rollout.pool import PoolClosed, PoolStatus, TrajectoryPool
from nexrl_sdk.rollout.rollouts import Rollouts
from nexrl_sdk.types import ConfigError, DataError, Trajectory


def rollout(group, member, parts=1, version=0, **more):
    return [Trajectory(group_id=f"g{group}", run_id=f"g{group}/{member}", part=p, tokens=[1], loss_mask=[1], weight_versions=[version], **more) for p in range(parts)]


def runs(batch):
    return {t.run_id for t in batch}


@settings(max_examples=80, deadline=None)
@given(groups=st.integers(1, 6), size=st.integers(1, 4), per_batch=st.integers(1, 3), parts=st.integers(1, 2), seed=st.integers(0, 999), missing=st.integers(0, 3), incomplete=st.sampled_from(["flush", "drop"]), cut=st.integers(0, 30))
def test_any_order_of_arrival(groups, size, per_batch, parts, seed, missing, incomplete, cut):
    """Each put is one rollout; some never come; the pool is stored and loaded half-way."""
    arriving = [(g, m) for g in range(groups) for m in range(size)]
    random.Random(seed).shuffle(arriving)
    arriving = arriving[: max(0, len(arriving) - missing)]
    make = lambda: TrajectoryPool(per_batch * size, group_size=size, incomplete=incomplete)
    pool, batches = make(), []
    for k, (g, m) in enumerate(arriving):
        if k == cut:
            other = make()
            other.load_state_dict(json.loads(json.dumps(pool.state_dict())))
            assert other.metrics() == pool.metrics() and other.status == pool.status
            pool = other
        pool.put(rollout(g, m, parts))
        while (batch := pool.get_batch_nowait()) is not None:
            assert len(runs(batch)) == per_batch * size and len(batch) == per_batch * size * parts
            batches.append(batch)
    pool.close()
    while True:
        try:
            batches.append(pool.get_batch_nowait())
        except PoolClosed:
            break
    here, whole = Counter(g for g, _ in arriving), {g for g, n in Counter(g for g, _ in arriving).items() if n == size}
    expected = {f"g{g}/{m}" for g, m in arriving if incomplete == "flush" or g in whole}
    out = [t.run_id for b in batches for t in b if t.part == 0]
    assert sorted(out) == sorted(expected) and pool.counts["incomplete"] == (0 if incomplete == "flush" else sum(n for g, n in here.items() if g not in whole))
    for b in batches:
        for g, members in b.groups().items():
            assert len(runs(members)) == (size if int(g[1:]) in whole else here[int(g[1:])]), "a group is never split"


@pytest.mark.parametrize("size", [None, 4])
def test_many_threads_put_and_take(size):
    producers, each, consumers = 6, 120, 3
    pool = TrajectoryPool(8, group_size=size)
    got, lock = [], threading.Lock()
    work = [(g, m) for g in range(producers * each // 4) for m in range(4)]
    random.Random(0).shuffle(work)

    def produce(k):
        for g, m in work[k::producers]:
            pool.put(rollout(g, m))

    def consume():
        while True:
            try:
                batch = pool.get_batch_blocking()
            except PoolClosed:
                return
            with lock:
                got.append(batch)

    takers = [threading.Thread(target=consume) for _ in range(consumers)]
    makers = [threading.Thread(target=produce, args=(k,)) for k in range(producers)]
    for t in takers + makers:
        t.start()
    for t in makers:
        t.join(30)
    pool.close()
    for t in takers:
        t.join(30)
        assert not t.is_alive()
    out = [t.run_id for b in got for t in b]
    assert len(out) == len(set(out)) == producers * each == pool.counts["put"] == pool.counts["taken"]
    if size:
        assert all(len(g) == 4 for b in got for g in b.groups().values())


def test_a_waiter_is_woken_by_put_by_close_and_by_time():
    for wake, expected in ((lambda p: p.put(rollout(0, 0)), Rollouts), (lambda p: p.close(), PoolClosed)):
        pool, found = TrajectoryPool(1), []

        def wait(pool=pool, found=found):
            try:
                found.append(type(pool.get_batch_blocking()))
            except PoolClosed as e:
                found.append(type(e))

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        time.sleep(0.02)
        wake(pool)
        waiter.join(10)
        assert found == [expected]
    pool = TrajectoryPool(4, group_size=2)
    pool.put(rollout(0, 0) + rollout(0, 1) + rollout(1, 0))
    with pytest.raises(TimeoutError, match=r"no batch was ready within 0.01 s: 2 of 4 rollouts are in complete groups, 1 groups are incomplete"):
        pool.get_batch_blocking(timeout=0.01)
    with pytest.raises(TimeoutError):
        pool.get_batch_blocking(timeout=0)


def test_waiting_costs_no_processor_time():
    pool = TrajectoryPool(1)
    calls = []
    ready = pool.ready
    pool.ready = lambda s: calls.append(1) or ready(s)
    waiter = threading.Thread(target=pool.get_batch_blocking, daemon=True)
    waiter.start()
    time.sleep(0.2)
    assert len(calls) <= 2
    pool.put(rollout(0, 0))
    waiter.join(10)
    assert not waiter.is_alive() and len(calls) <= 4


def test_closed_for_good():
    pool = TrajectoryPool(2, group_size=2, incomplete="drop", on_drop=(told := []).append and (lambda r, why: told.append((len(r), why))))
    pool.put(rollout(0, 0))
    pool.close()
    pool.close()
    assert told == [(1, "incomplete")] and pool.counts["incomplete"] == 1 and "closed" in repr(pool)
    with pytest.raises(PoolClosed, match="everything in it has been taken"):
        pool.get_batch_blocking()
    with pytest.raises(PoolClosed, match="nothing can be put"):
        pool.put(rollout(0, 1))


def test_what_is_left_can_be_taken_after_close():
    pool = TrajectoryPool(4, group_size=2)
    pool.put([t for g in range(3) for m in range(2) for t in rollout(g, m)] + rollout(9, 0))
    pool.close()
    sizes = [len(pool.get_batch_blocking()) for _ in range(2)]
    assert sizes == [4, 3]
    with pytest.raises(PoolClosed):
        pool.get_batch_nowait()


@pytest.mark.parametrize("incomplete,sizes", [("flush", 7), ("drop", 6)])
def test_a_loaded_batch_is_finished_when_all_that_was_announced_is_here(incomplete, sizes):
    pool = TrajectoryPool(2, group_size=2, ready="loaded_batch_finished", incomplete=incomplete)
    assert pool.get_batch_nowait() is None
    pool.expect(7)
    for k, (g, m) in enumerate([(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1), (3, 0)]):
        assert pool.get_batch_nowait() is None and pool.status.expected == 7 - k
        pool.put(rollout(g, m, parts=2))
    assert len(runs(pool.get_batch_blocking(timeout=1))) == sizes and pool.get_batch_nowait() is None
    assert pool.counts["incomplete"] == 7 - sizes


def test_a_readiness_of_ones_own():
    seen = []

    def two_groups(s: PoolStatus) -> int:
        seen.append(s)
        return s.rollouts if s.groups >= 2 else 0

    pool = TrajectoryPool(100, group_size=1, ready=two_groups)
    pool.put(rollout(0, 0))
    assert pool.get_batch_nowait() is None
    pool.put(rollout(1, 0))
    assert len(pool.get_batch_nowait()) == 2 and seen[-1] == PoolStatus(100, 2, 2, 0, 0, arrived=2)


def test_stale_groups_are_let_go_and_counted():
    told = []
    pool = TrajectoryPool(2, group_size=2, max_staleness=1, on_drop=lambda r, why: told.append((sorted(runs(r)), why)))
    pool.put(rollout(0, 0, version=3) + rollout(0, 1, version=5))
    pool.put(rollout(1, 0, version=4) + rollout(1, 1, version=5))
    pool.set_weight_version(4)
    assert len(pool) == 4 and not told
    pool.set_weight_version(5)
    assert told == [(["g0/0", "g0/1"], "stale")] and len(pool) == 2
    pool.put(rollout(2, 0, version=3) + rollout(2, 1, version=5))
    assert told[1:] == [(["g2/0", "g2/1"], "stale")] and pool.counts["stale"] == 4, "also one that is stale when it is completed"
    assert runs(pool.get_batch_nowait()) == {"g1/0", "g1/1"}


def test_groups_by_keys():
    pool = TrajectoryPool(2, group_size=2, key_list=["query"])
    pool.put([Trajectory(query="a", run_id=1), Trajectory(data={"query": "b"}, run_id=2), Trajectory(query="b", run_id=3)])
    assert [t.run_id for t in pool.get_batch_nowait()] == [2, 3]
    with pytest.raises(DataError, match=r"trajectory 9 has no 'query', which the pool groups by; did you mean 'querry'\?"):
        pool.put(Trajectory(querry="a", run_id=9))
    assert pool.status.incomplete == 1, "nothing of a bad put stays"


def test_failed_rollouts_complete_a_group_and_unnamed_ones_count_singly():
    pool = TrajectoryPool(2, group_size=2)
    pool.put([Trajectory(group_id="g", status="failed", error="x"), Trajectory(group_id="g")])
    assert [t.status for t in pool.get_batch_nowait()] == ["failed", "ok"]
    loose = TrajectoryPool(3)
    loose.put([Trajectory(), Trajectory(), Trajectory()])
    assert len(loose.get_batch_nowait()) == 3


def test_settings_are_checked():
    for kw, expected in (
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 10, "group_size": 4}, "must be a multiple of group_size=4, such as 8 or 12"),
        ({"batch_size": 3, "group_size": 4}, "such as 4 or 4"),
        ({"batch_size": 4, "key_list": ["q"]}, "needs group_size"),
        ({"batch_size": 4, "ready": "batch_sise"}, "did you mean 'batch_size'"),
        ({"batch_size": 4, "incomplete": "keep"}, "incomplete='keep' is not known"),
    ):
        with pytest.raises(ConfigError, match=expected):
            TrajectoryPool(**kw)


def test_one_at_a_time_is_not_quadratic():
    """Counted, not timed: taking a rollout looks at no other one."""
    touched = Counter()

    class Watched(Trajectory):
        def __getattr__(self, name):
            touched[name] += 1
            return super().__getattr__(name)

    pool = TrajectoryPool(1)
    pool.put([Watched(group_id=f"g{i}", run_id=f"r{i}") for i in range(2000)])
    before = sum(touched.values())
    for _ in range(2000):
        assert len(pool.get_batch_nowait()) == 1
    assert sum(touched.values()) - before < 20_000
