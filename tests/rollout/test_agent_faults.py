"""Agents under faults: what fails is recorded with its cause, nothing is scored by accident, and nothing stops a run that should go on."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import numpy as np
import pytest
import torch
from agent_world import EARLIER, PLAIN, Recorded, Scripted, call, check_exact, threads_named, wait_for

from nexrl_sdk import LocalBackend, Recipe, Trainer
from nexrl_sdk.rollout.agent import AgentRolloutWorker, RolloutRunner
from nexrl_sdk.rollout.agent_config import AgentConfig
from nexrl_sdk.rollout.evaluator import EvaluationRunResult
from nexrl_sdk.rollout.session import SessionClosed
from nexrl_sdk.types import BackendError, ConfigError, DataError, EvaluatorError, Interrupted, NonFiniteError, SamplingParams

pytestmark = pytest.mark.timeout(120)
ROW = {"prompt": "20+22?", "answer": "42"}


def right(row, answer):
    return float(answer == row["answer"])


def ask(query, session):
    return session.complete([{"role": "user", "content": query}]).message["content"]


@pytest.fixture(autouse=True)
def _others():
    EARLIER[:] = threading.enumerate()


def worker(agent, say=("42",), **settings):
    settings = {"group_size": 2, "retries": 0, "evaluator": right, **settings}
    return AgentRolloutWorker(Scripted(say if callable(say) else list(say)), settings.pop("evaluator"), agent=agent, **settings)


# -- deadlines ---------------------------------------------------------------------------------------


def test_an_agent_that_waits_for_ever_is_told_to_stop():
    def agent(query, session, cancel):
        cancel.wait()
        return ask(query, session)

    found = worker(agent, timeout=0.2, retries=3).run([ROW])
    assert all(t.status == "failed" and t.error == "TimeoutError: the rollout took longer than 0.2 s (timeout)" for t in found)
    assert found[0].reward is None and "attempts" not in found[0] and found[0].prompt == "20+22?" and found[0]["data"] == ROW and found[0]["agent"]["ended"] == "failed"


def test_an_agent_that_asks_for_ever_is_stopped_with_what_it_drew():
    def agent(query, session):
        while True:
            try:
                ask(query, session)
            except Exception:  # as careless agents do
                continue

    found = worker(agent, timeout=2).run([ROW])
    assert {t.status for t in found} == {"failed"} and all(t.error.startswith("TimeoutError") and sum(t.loss_mask) and t["agent"]["turns"] for t in found)


def test_one_that_ends_as_if_nothing_had_happened_is_late_nevertheless():
    def agent(query, session, cancel):
        said = ask(query, session)
        cancel.wait()
        return said

    found = worker(agent, timeout=0.2).run([ROW])
    assert [t.status for t in found] == ["failed"] * 2 and all("TimeoutError" in t.error and t.reward is None for t in found)


def test_one_that_does_not_stop_is_given_up_and_another_takes_its_place(monkeypatch):
    release, ended, closed = threading.Event(), threading.Event(), []

    def agent(query, session, data):
        if data["index"]:
            return ask(query, session)
        said = ask(query, session)
        release.wait()
        try:
            ask(query, session)
        except SessionClosed as e:
            closed.append(e)
        data["answer"] = "changed"
        ended.set()
        return said

    rows = [{**ROW, "index": i} for i in range(4)]
    made, begin = worker(agent, timeout=3, rollouts_at_once=1, group_size=1), RolloutRunner.__init__
    monkeypatch.setattr(RolloutRunner, "__init__", lambda self, *a, **k: begin(self, *a, **{**k, "grace": 0.1}))
    found = made.run(rows)
    assert [t.status for t in found] == ["failed", "ok", "ok", "ok"] and "did not stop when it was told to, and was given up" in found[0].error
    before = [dict(t) for t in found]
    release.set()
    assert ended.wait(60)
    wait_for(lambda: not threads_named("rollout-"))
    assert closed and [dict(t) for t in found] == before and rows[0]["answer"] == "42" and len(made.backend.drawn) == 4


def test_async_agents_have_deadlines_too():
    cleaned = []

    async def agent(query, session):
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(query)

    found = worker(agent, timeout=2).run([ROW])
    assert all(t.error.startswith("TimeoutError: the rollout took longer than 2 s") for t in found) and len(cleaned) == 2


def test_a_hanging_model_is_broken_off_at_the_deadline():
    found = worker(ask, say=lambda text, params: None, timeout=0.2).run([ROW])
    assert all(t.error.startswith("TimeoutError") for t in found)
    wait_for(lambda: not threads_named("rollout-"))


def test_a_hanging_tool_ends_with_its_rollout():
    release = threading.Event()

    def hang() -> str:
        release.wait(60)
        return "late"

    found = worker(AgentConfig.make("x", tools=[hang], tool_timeout=50), say=[call("hang"), "42"], timeout=0.3).run([ROW])
    release.set()
    assert all(t.error.startswith("TimeoutError") and t["agent"]["turns"] <= 1 for t in found)


# -- stops -------------------------------------------------------------------------------------------


def test_the_stop_flag_ends_everything():
    stop, running = threading.Event(), threading.Semaphore(0)

    def agent(query, session, cancel, data):
        running.release()
        if data["kind"] == "asks":
            while True:
                ask(query, session)
        if data["kind"] == "waits":
            cancel.wait()
        return session.complete([{"role": "user", "content": "never"}]).message["content"]

    made = worker(agent, say=lambda text, params: None if "never" in text else "42", rollouts_at_once=9, group_size=3)
    caught = []

    def run():
        try:
            made.run([{**ROW, "kind": k} for k in ("asks", "waits", "hangs", "more")], stop_flag=stop)
        except Interrupted as e:
            caught.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for _ in range(9):
        assert running.acquire(timeout=60)
    assert not caught
    stop.set()
    thread.join(60)
    assert str(caught[0]) == "stopped while rollouts were under way"
    wait_for(lambda: not threads_named("rollout-"))
    assert all(t.daemon for t in threading.enumerate() if t is not threading.main_thread() and t not in EARLIER)


def test_a_flag_that_is_set_already_starts_nothing():
    stop = threading.Event()
    stop.set()
    made = worker(ask)
    with pytest.raises(Interrupted):
        made.run([ROW], stop_flag=stop)
    assert not made.backend.drawn


def test_what_a_rollout_left_running_draws_no_more():
    tried, release, others = threading.Event(), threading.Event(), []

    def agent(query, session):
        def later():
            release.wait(60)
            try:
                ask(query, session)
            except SessionClosed:
                tried.set()

        others.append(threading.Thread(target=later, daemon=True))
        others[-1].start()
        return ask(query, session)

    made = worker(agent, group_size=1)
    made.run([ROW])
    release.set()
    assert tried.wait(60) and len(made.backend.drawn) == 1


# -- failures and retries ----------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize("error", [ValueError("x" * 10**6), Mute(), SystemExit(3), GeneratorExit(), asyncio.CancelledError(), MemoryError(), StopIteration(), RuntimeError("\ud800")])
def test_whatever_an_agent_raises_is_the_rollouts_cause(error, tmp_path):
    def agent(query, session, data):
        ask(query, session)
        if data["bad"]:
            raise error

    found = worker(agent).run([{**ROW, "bad": True}, {**ROW, "bad": False}])
    assert [t.status for t in found] == ["failed", "failed", "ok", "ok"]
    assert type(error).__name__ in found[0].error and len(found[0].error) < 2200 and type(error).__name__ in found[0]["traceback"] and sum(found[0].loss_mask) == 3
    assert len(type(found)(found).load(found.save(tmp_path / "r.jsonl"))) == 4


class Unsaid(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Unsaid()])
def test_a_ctrl_c_reaches_the_main_thread_and_what_an_agent_raises_is_its_own(error):
    def agent(query, session):
        raise error

    found = worker(agent, retries=0).run([ROW])
    assert {t.status for t in found} == {"failed"} and type(error).__name__ in found[0].error


def test_an_agent_that_is_stopped_ends_the_run():
    def agent(query, session):
        raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        worker(agent).run([ROW])


def test_failures_are_tried_again_with_another_seed_and_their_causes_kept():
    tries, lock = {}, threading.Lock()

    def agent(query, session, data):
        with lock:
            tries[data["kind"]] = tries.get(data["kind"], 0) + 1
            mine = tries[data["kind"]]
        said = ask(query, session)
        if data["kind"] == "never" or (data["kind"] == "third" and mine < 3):
            raise ValueError(f"try {mine}")
        return said

    made = worker(agent, retries=2, group_size=1)
    found = made.run([{**ROW, "kind": k} for k in ("first", "third", "never")])
    assert [t.status for t in found] == ["ok", "ok", "failed"] and tries == {"first": 1, "third": 3, "never": 3}
    assert ["attempts" in t for t in found] == [False, True, True]
    assert found[1]["attempts"] == ["ValueError: try 1", "ValueError: try 2"] == found[2]["attempts"] and found[2].error == "ValueError: try 3"
    assert len({p.seed for _, p, _ in made.backend.drawn}) == 7 and found[1]["agent"]["turns"] == 1


def test_a_backend_that_fails_at_times_costs_a_try():
    left = [BackendError("gone"), ConnectionError("lost")]
    (t,) = worker(AgentConfig.make("x"), say=lambda text, params: left.pop() if left else "42", retries=2, group_size=1).run([ROW])
    assert t.reward == 1.0 and t["attempts"] == ["ConnectionError: lost", "BackendError: gone"]


@pytest.mark.parametrize("error", [ConfigError("no"), DataError("no")])
def test_what_another_try_would_not_mend_ends_the_run_and_names_the_row(error):
    def agent(query, session, data):
        if data["i"] == 2:
            raise error
        while True:
            ask(query, session)

    made = worker(agent, retries=5)
    with pytest.raises(type(error), match="row 2: no"):
        made.run([{**ROW, "i": i} for i in range(4)])
    wait_for(lambda: not threads_named("rollout-"))


REFUSES = PLAIN.replace("{% for m in messages %}", "{% for m in messages %}{% if 'boo' in m.content %}{{ raise_exception('no boo') }}{% endif %}")


def test_what_a_model_or_a_tool_says_fails_its_rollout_and_not_the_run():
    def look() -> str:
        """Look."""
        return results.pop()

    results = ["boo", "fine", "boo", "fine"]
    backend = Scripted([call("look"), "42"], template=REFUSES)
    made = AgentRolloutWorker(backend, right, agent=AgentConfig.make("x", tools=[look]), group_size=1, rollouts_at_once=1, retries=2)
    found = made.run([ROW] * 4)
    assert [t.status for t in found] == ["ok", "failed", "ok", "failed"] and not results
    assert all("template refuses messages" in t.error and "no boo" in t.error and sum(t.loss_mask) and "attempts" not in t for t in found[1::2])
    with pytest.raises(ConfigError, match=r"row 0: .* no boo"):
        made.run([{**ROW, "prompt": "boo"}])


@pytest.mark.parametrize(("error", "ends"), [(ConfigError("no"), False), (DataError("no"), False), (NonFiniteError("no"), True)])
def test_errors_behind_the_first_answer_end_a_run_only_where_the_weights_are_broken(error, ends):
    def agent(query, session, data):
        ask(query, session)
        if data["i"] == 1:
            raise error
        return "42"

    made = worker(agent, group_size=1)
    if ends:
        with pytest.raises(NonFiniteError, match="row 1: no"):
            made.run([{**ROW, "i": i} for i in range(2)])
    else:
        assert [t.error for t in made.run([{**ROW, "i": i} for i in range(2)])] == [None, f"{type(error).__name__}: no"]


def test_an_agent_that_never_asks_has_failed():
    found = worker(lambda query, session: "42").run([ROW])
    assert all(t.status == "failed" and "ended without asking the model anything" in t.error and not len(t.tokens) for t in found)


def test_a_worker_that_returns_none_has_failed_with_what_it_passed_over():
    class Careless(AgentRolloutWorker):
        def run_agent(self, task):
            try:
                if task["kind"] == "model":
                    self.client.complete([{"role": "user", "content": "boom"}])
                if task["kind"] == "config":
                    self.client.complete([{"role": "user", "content": "x"}], what=1)
            except Exception:  # as the documents' worker does
                pass

    made = Careless(Scripted(lambda text, params: BackendError("the server is gone")), right, group_size=1, retries=1)
    none, model = made.run([{**ROW, "kind": "none"}, {**ROW, "kind": "model"}])
    assert "run_agent returned None, which says that the rollout has failed" in none.error and model.error == "BackendError: the server is gone" and model["attempts"] == [model.error]
    with pytest.raises(ConfigError, match=r"row 0: .* not 'what'"):
        made.run([{**ROW, "kind": "config"}])


def test_no_more_threads_is_no_end(monkeypatch):
    """A runner goes on with as many rollouts as there are threads for."""
    start, most, refused = threading.Thread.start, [3], threading.Event()

    def limited(self):
        if self.name.startswith("rollout-") and len(threads_named("rollout-")) >= most[0]:
            refused.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)

    def work(item, cancel):
        assert refused.wait(60)
        return item

    wait_for(lambda: not threads_named("rollout-"))
    assert RolloutRunner(work, lambda item: None, concurrency=99).run(list(range(20))) == list(range(20))
    most[0] = 0
    with pytest.raises(BackendError, match="not one thread can be started"):
        RolloutRunner(work, lambda item: None).run([1])


# -- evaluators --------------------------------------------------------------------------------------


def forks(query, session):
    """A run of three sequences."""
    said = session.complete_many([{"role": "user", "content": query}], n=2)
    session.child("sub").complete([{"role": "user", "content": query}])
    return said[0].message["content"]


@pytest.mark.parametrize(
    ("value", "status", "told"),
    [
        (ZeroDivisionError("oh"), "error", "the evaluator raised ZeroDivisionError: oh"), (None, "unscored", "no reward"), (math.nan, "error", "must be finite"),
        (math.inf, "error", "must be finite"), ("0.5", "error", "must be a number, not str"), (0.5, "ok", None), ({}, "error", "without 'reward'"), (EvaluationRunResult(0.5), "ok", None),
    ],
)  # fmt: skip
def test_evaluators_have_three_states_on_every_sequence_of_a_run(value, status, told):
    def judge(row, answer):
        if isinstance(value, Exception):
            raise value
        return value

    made = worker(forks, evaluator=judge)
    found = made.run([ROW])
    check_exact(made.backend.drawn, found)
    assert len(found) == 6 and {t.status for t in found} == {status} and {t.reward for t in found} == {0.5 if status == "ok" else None}
    assert all((t.error is None) if told is None else told in t.error for t in found) and all(t.get("traceback") is None or status == "error" for t in found)


def test_an_evaluator_that_hangs_is_given_up():
    release = threading.Event()
    found = worker(forks, evaluator=lambda row, answer: release.wait(60), eval_timeout=0.05).run([ROW])
    release.set()
    assert {t.status for t in found} == {"error"} and all("took longer than 0.05 s (eval_timeout)" in t.error for t in found)


# -- through the trainer -----------------------------------------------------------------------------


def trainer_of(folder, agent, evaluator, *, group=2, **sections):
    recipe = Recipe(model={"path": str(folder)}, data={"rows": [{"prompt": f"row {i}", "i": i} for i in range(12)], "batch_size": 3, "shuffle": False}, evaluator=evaluator, algorithm="grpo",
                    trajectory_pool={"group_size": group}, trainer={"total_train_steps": 3, "optim": {"lr": 1e-2}, **sections})  # fmt: skip
    trainer = Trainer(recipe)
    backend = Recorded(trainer.backend)
    trainer.worker = AgentRolloutWorker(backend, evaluator, agent=agent, group_size=group, retries=0, sampling=SamplingParams(max_tokens=6))
    return trainer, backend


def some(query, session, data):
    if data["i"] % 3 == 0:
        raise ValueError(f"row {data['i']} fails")
    forks(query, session)
    return query


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.backend.model.parameters().items()}


def test_a_group_that_failed_is_left_out_and_counted_and_the_run_goes_on(tiny):
    rewards = iter(range(999))
    trainer, _ = trainer_of(tiny("qwen2", max_position_embeddings=512), some, lambda row, answer: float(next(rewards)))
    with trainer:
        before = weights(trainer)
        for _ in range(2):
            step = trainer.step()
            failed = [t for t in step.rollouts if t.status == "failed"]
            assert len(failed) == 2 and all("fails" in t.error and not t.advantage for t in failed) and step.metrics["errors/failed"] == 2.0
            assert sum(t.status == "ok" for t in step.rollouts) == 12 and step.metrics["eval/turns"] == 3.0
            assert all(np.ptp([t.advantage for t in step.rollouts if t.run_id == r]) < 1e-6 for r in {t.run_id for t in step.rollouts if t.status == "ok"})
        assert any(not torch.equal(before[n], after) for n, after in weights(trainer).items())


def test_a_batch_that_failed_ends_the_run_by_the_error_budget_and_trains_nothing(tiny):
    def agent(query, session):
        ask(query, session)
        raise ValueError("boom")

    for budget in (0.5, 1.0):
        trainer, _ = trainer_of(tiny("qwen2", max_position_embeddings=512), agent, lambda row, answer: 1.0, error_budget=budget)
        with trainer:
            before = weights(trainer)
            if budget < 1.0:
                with pytest.raises(BackendError, match=r"6 of 6 rollouts failed, more than trainer.error_budget=0.5 allows[\s\S]*ValueError: boom"):
                    trainer.step()
            else:
                assert trainer.step().metrics["errors/failed"] == 6.0
            assert all(torch.equal(before[n], after) for n, after in weights(trainer).items())


def test_a_group_of_one_has_nothing_to_compare_with(tiny):
    trainer, _ = trainer_of(tiny("qwen2", max_position_embeddings=512), forks, lambda row, answer: 1.0 + row["i"], group=1)
    with trainer:
        before = weights(trainer)
        step = trainer.step()
        assert {t.advantage for t in step.rollouts} == {0.0} and len(step.rollouts) == 9
        assert all(torch.allclose(before[n], after, atol=1e-6) for n, after in weights(trainer).items())


def test_many_rollouts_leave_no_thread_behind():
    before = set(threading.enumerate())
    made = worker(AgentConfig.make("x"), rollouts_at_once=64, group_size=8, timeout=60)
    assert len(made.run([ROW] * 25)) == 200
    wait_for(lambda: not [t for t in threading.enumerate() if t not in before and t.name.startswith(("rollout", "tool"))])
