"""The producer under uneven answers, stops and restarts: every prompt once, none too old, and no wait without an end."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter

import pytest

from nexrl_sdk.rollout.data import DataStream
from nexrl_sdk.rollout.pool import TrajectoryPool
from nexrl_sdk.rollout.producer import RolloutProducer
from nexrl_sdk.rollout.rollouts import Rollouts
from nexrl_sdk.rollout.sync import StopFlag, WeightSyncController
from nexrl_sdk.types import BackendError, ConfigError, DataError, EvaluatorError, Interrupted, Trajectory

pytestmark = pytest.mark.timeout(60)
BATCH, GROUP = 4, 2


class World:
    """A producer with a fake worker whose answers carry the version of the weights at which they began."""

    def __init__(self, mode="batch-async", threshold=1, rows=60, epochs=1, stale="regenerate", ready="batch_size", incomplete="flush", slowest=0.01, seed=0, fails=0.0, **more):
        self.stream = DataStream([{"prompt": str(i)} for i in range(rows)], seed=seed, epochs=epochs)
        self.controller = WeightSyncController(mode, threshold, stale=stale)
        self.pool = TrajectoryPool(BATCH * GROUP, group_size=GROUP, ready=ready, incomplete=incomplete, max_staleness=self.controller.bound, changed=self.controller.changed)
        self.producer = RolloutProducer(self.stream, self.answer, self.pool, self.controller, **more)
        self.random, self.slowest, self.fails = random.Random(seed), slowest, fails
        self.asked, self.at_once, self.most, self.lock = Counter(), 0, 0, threading.Lock()
        self.stop = StopFlag()
        self.stop.wakes(self.controller.changed)

    def answer(self, items, batch, stop):
        version = self.controller.version
        with self.lock:
            self.at_once += len(items)
            self.most = max(self.most, self.at_once)
            self.asked.update(f"{i.epoch}:{i.index}" for i in items)
            wait, failed = self.random.random() ** 4 * self.slowest, self.random.random() < self.fails
        try:
            if stop.wait(wait):
                raise Interrupted("stopped")
        finally:
            with self.lock:
                self.at_once -= len(items)
        status = {"status": "failed", "error": "no answer"} if failed else {"reward": 1.0}
        return Rollouts(Trajectory(group_id=f"{i.epoch}:{i.index}", run_id=f"{i.epoch}:{i.index}/{j}", weight_versions=[version], step=batch, **status) for i in items for j in range(GROUP))

    def step(self):
        batch = self.producer.take(self.stop)
        if not batch:
            return None
        behind = self.controller.staleness(batch)
        assert self.controller.bound is None or max(behind, default=0) <= self.controller.bound
        assert all(len(g) == GROUP for g in batch.groups().values())
        done = self.producer.trained()
        assert done["trained"] == list(batch.groups())
        self.producer.published(self.controller.version + 1)
        return done

    def run(self, steps=10**6):
        done = []
        self.producer.start(steps)
        try:
            while len(done) < steps and (line := self.step()) is not None:
                done.append(line)
        finally:
            self.producer.stop(10)
        return done

    def every(self, epochs=1):
        return sorted(f"{e}:{i}" for e in range(epochs) for i in range(len(self.stream)))


MODES = [("batch-async", 0), ("batch-async", 1), ("batch-async", 3), ("fully-async", 0)]


@pytest.mark.parametrize("mode,threshold", MODES)
@pytest.mark.parametrize("ready", ["batch_size", "loaded_batch_finished", ["batch_size", "loaded_batch_finished"]])
@pytest.mark.parametrize("slowest", [0.0, 0.05])
def test_every_prompt_comes_once(mode, threshold, ready, slowest):
    world = World(mode, threshold, rows=30, epochs=2, ready=ready, slowest=slowest)
    done = world.run()
    assert sorted(k for line in done for k in line["trained"]) == world.every(2) and [len(line["trained"]) for line in done] == [4] * 15
    assert world.most <= 2 * BATCH and not any(line["stale"] or line["incomplete"] for line in done)
    assert sum(world.asked.values()) == 60 + world.producer.counts["regenerated"]


@pytest.mark.parametrize("seed", range(6))
def test_stopped_stored_and_started_again(seed):
    """Stops at random moments; the state goes through JSON into a new world, and finished answers with it."""
    draw, mode = random.Random(seed), MODES[seed % len(MODES)]
    world, done = World(*mode, seed=seed), []
    for _ in range(40):
        world.producer.start(10**6)
        timer = threading.Timer(draw.uniform(0.0, 0.03), world.stop.set)
        timer.start()
        try:
            while (line := world.step()) is not None:
                done.append(line)
            break
        except Interrupted:
            world.stop.clear()
        finally:
            timer.join()
            world.producer.stop(10)
        state, old = json.loads(json.dumps(world.producer.state_dict())), world
        world = World(*mode, seed=seed)
        world.stream.load_state_dict(state["stream"])
        world.producer.load_state_dict(world.stream, state, old.controller.version)
        finished = {str(k): list(g) for g in [old.pool.state_dict()["complete"]] for line in g for k, g in Rollouts(json.loads(x) for x in line).groups().items()}
        world.producer.recover(finished)
        assert len(world.pool) == GROUP * len(finished)
    assert sorted(k for line in done for k in line["trained"]) == world.every()


def test_a_step_that_was_undone_gives_its_prompts_back():
    world = World()
    world.producer.start(3)
    first = world.producer.take(world.stop)
    world.producer.put_back()
    assert set(world.producer.take(world.stop).groups()) == set(first.groups())
    world.producer.put_back()
    world.producer.stop()
    assert sorted(k for line in world.run() for k in line["trained"]) == world.every()


@pytest.mark.parametrize("mode,threshold", MODES)
def test_nothing_is_begun_that_the_steps_do_not_need(mode, threshold):
    world = World(mode, threshold)
    assert len(world.run(3)) == 3 and sum(world.asked.values()) - world.producer.counts["regenerated"] == 3 * BATCH
    assert not world.producer.tickets.all and len(world.pool) == 0


def test_failing_answers_are_retried_so_often_and_then_trained_on():
    world = World(fails=0.5, incomplete="retry", retries=2, slowest=0.0)
    done = world.run()
    assert sorted(k for line in done for k in line["trained"]) == world.every()
    assert max(world.asked.values()) <= 3 + max(1, world.producer.counts["regenerated"]) and world.producer.counts["retried"] > 10


def test_dropped_groups_make_room_for_others_and_an_endless_row_of_them_is_an_error():
    world = World(fails=0.3, incomplete="drop", slowest=0.0)
    done = world.run()
    gone = [k for line in done for k in line["incomplete"]] + world.producer._dropped["incomplete"]
    assert gone and sorted([k for line in done for k in line["trained"]] + gone) == world.every()
    with pytest.raises(EvaluatorError, match=r"the last 8 groups lacked answers.*\nno answer"):
        World(fails=1.0, incomplete="drop").run()


def test_stale_answers_are_dropped_or_stopped_on_the_way():
    world = World(stale="drop", slowest=0.2)
    done = world.run()
    gone = [k for line in done for k in line["stale"]] + world.producer._dropped["stale"]
    assert gone and sorted([k for line in done for k in line["trained"]] + gone) == world.every()


def test_a_worker_that_does_not_stop_is_given_up_and_its_late_answer_ignored():
    let_go = threading.Event()
    world = World()
    plain, world.producer.answer = world.answer, lambda items, batch, stop: let_go.wait(20) and plain(items, batch, threading.Event())
    world.producer.start(2)
    while not world.producer._answering:
        time.sleep(0.001)
    began = time.perf_counter()
    world.producer.stop(timeout=0.1)
    assert time.perf_counter() - began < 15 and not world.producer._answering and len(world.producer.tickets.queue) == 2 * BATCH
    world.producer.answer = plain
    let_go.set()
    assert sorted(k for line in world.run() for k in line["trained"]) == world.every()


def test_errors_of_a_worker_and_wrong_answers_are_raised_where_the_batch_is_awaited():
    world = World()
    for broken, error, words in (
        (lambda *a: 1 / 0, ZeroDivisionError, "division"),
        (lambda *a: Rollouts([Trajectory(group_id="other")]), DataError, "carry the group_id of their task"),
    ):
        world.producer.answer = broken
        with pytest.raises(error, match=words):
            world.run()
    world.producer.answer = lambda items, batch, stop: Rollouts()
    world.producer.start(1)
    batch = world.producer.take(world.stop)
    world.producer.put_back()
    world.producer.stop()
    assert [t.status for t in batch] == ["failed"] * BATCH, "no answer at all is a failure that is seen"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("refused", ["nexrl-rollouts", "nexrl-rollout"])
def test_a_thread_that_cannot_be_started_ends_the_wait_and_loses_no_prompt(refused, monkeypatch):
    world, start = World(), threading.Thread.start

    def no_more(thread):
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_more)
        with pytest.raises(BackendError, match=r"could not be started.*max_in_flight"):
            world.run()
    assert not world.producer._answering
    assert sorted(k for line in world.run() for k in line["trained"]) == world.every()


@pytest.mark.timeout(60)
def test_a_dispatcher_that_ended_ends_the_wait():
    world = World()
    world.producer._next = lambda: None
    with pytest.raises(BackendError, match="has ended"):
        world.run()


def test_a_batch_that_can_never_be_ready_is_said_to_be():
    world = World(ready=lambda s: 0)
    with pytest.raises(BackendError, match="is never satisfied"):
        world.run()


def test_a_paused_producer_finishes_what_it_began():
    world = World(slowest=0.05)
    world.producer.start(10)
    world.step()
    world.producer.pause()
    until = time.monotonic() + 10
    while world.producer._answering and time.monotonic() < until:
        time.sleep(0.005)
    asked = sum(world.asked.values())
    time.sleep(0.05)
    assert sum(world.asked.values()) == asked and world.at_once == 0
    world.producer.pause(False)
    assert len(world.step()["trained"]) == BATCH
    world.producer.stop()


def test_waiting_costs_no_processor_time():
    world = World(slowest=0.0)
    world.producer.answer = lambda items, batch, stop: stop.wait(20) and Rollouts()
    world.producer.start(2)

    def wait():
        with pytest.raises(Interrupted):
            world.producer.take(world.stop)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    time.sleep(0.1)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.3
    world.stop.set()
    waiter.join(10)
    assert not waiter.is_alive()
    world.producer.stop()


def test_the_controllers_arguments():
    with pytest.raises(ConfigError, match="batch-async"):
        WeightSyncController("batch_async")
    with pytest.raises(ConfigError, match="0 or more"):
        WeightSyncController("batch-async", -1)
    with pytest.raises(ConfigError, match="regenerate"):
        WeightSyncController("batch-async", stale="regenrate")
    assert WeightSyncController("sync").bound == 0 and WeightSyncController("fully-async").bound is None and not WeightSyncController("batch-async", 0).overlaps
