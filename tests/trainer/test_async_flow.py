"""Stop, pause, go back, validate and fail while rollouts run ahead; a backend without a model makes it quick."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nexrl_sdk import MockBackend, Recipe, Run, Trainer
from nexrl_sdk.rollout.pool import TrajectoryPool
from nexrl_sdk.rollout.sync import WeightSyncController
from nexrl_sdk.rollout.worker import SimpleRolloutWorker
from nexrl_sdk.types import BackendError, ConfigError, DataError, EvaluatorError, Interrupted, SamplingParams

pytestmark = pytest.mark.timeout(90)
PROMPTS, GROUP, ROWS = 4, 2, 40
MODES = ["sync", "batch-async", "fully-async"]


def score(row, answer):
    return float(len(answer))


class Slow(MockBackend):
    """Takes a while for a call, uneven, and can be stopped."""

    def __init__(self, slowest=0.01, **kwargs):
        super().__init__(**kwargs)
        self.slowest = slowest

    def sample(self, prompts, params=None, n=1, stop_flag=None):
        seconds = max(random.Random(p.seed).random() ** 3 * self.slowest for p in params)
        if (stop_flag or threading.Event()).wait(seconds):
            raise Interrupted("stopped while it sampled")
        return super().sample(prompts, params, n, stop_flag)


def make(mode="batch-async", folder=None, backend=None, rows=ROWS, threshold=1, weight=None, pool=None, callbacks=(), evaluator=score, **more):
    data = {"rows": [{"prompt": f"{i}: "} for i in range(rows)], "batch_size": PROMPTS, **more.pop("data", {})}
    trainer = {"total_train_steps": 8, "save_freq": 2, **more.pop("trainer", {})}
    recipe = Recipe(model="mock", data=data, evaluator=evaluator, rollout_worker={"max_tokens": 6, "retries": 1, "num_workers": 3}, trajectory_pool={"group_size": GROUP, **(pool or {})},
                    weight={"sync_mode": mode, "staleness_threshold": threshold, **(weight or {})}, trainer=trainer, **more)  # fmt: skip
    run = None if folder is None else Run.open(folder, recipe) if (folder / "run.json").exists() else Run.create(folder, recipe)
    return Trainer(recipe, backend or Slow(), run=run, callbacks=callbacks)


def trained(run):
    return [key for line in run.ledger() for key in line["trained"]]


def prefix(trainer, steps):
    return sorted(f"{i.epoch}:{i.index}" for i in trainer._recipe("data").make_stream().next(steps * PROMPTS))


def nothing_runs(trainer):
    time.sleep(0.05)
    before = trainer.backend.calls["sample"]
    time.sleep(0.1)
    return trainer.backend.calls["sample"] == before


@pytest.mark.parametrize("mode", ["batch-async", "fully-async"])
def test_ctrl_c_undoes_the_step_and_loses_nothing(mode, tmp_path):
    with make(mode, tmp_path / "run", Slow(0.05)) as trainer:
        for _ in range(3):
            threading.Timer(0.12, os.kill, [os.getpid(), signal.SIGINT]).start()
            with pytest.raises(Interrupted):
                trainer.fit(40, progress=False)
            assert nothing_runs(trainer) and not trainer._stop_event.is_set()
        trainer.save()
        trainer.fit(4, progress=False)
        assert sorted(trained(trainer.run_folder)) == prefix(trainer, trainer.step_count)


def test_an_interrupted_update_gives_its_batch_back(tmp_path):
    class Stops(Slow):
        def forward_backward(self, datums, loss_fn="", loss_config=None, *, stop_flag=None):
            if not getattr(self, "stopped", False) and self.weight_version == 2:
                self.stopped = True
                raise Interrupted("stopped between micro-batches")
            return super().forward_backward(datums, loss_fn, loss_config)

    seen = []
    with make("batch-async", tmp_path / "run", Stops(), callbacks=[lambda event, p: event == "rollout" and seen.append(set(p["rollouts"].groups()))]) as trainer:
        with pytest.raises(Interrupted):
            trainer.fit(progress=False)
        assert trainer.step_count == 2
        trainer.fit(progress=False)
        assert sorted(trained(trainer.run_folder)) == prefix(trainer, 8) and seen[2] <= seen[3] | seen[4], "the batch is among the next ones"


@pytest.mark.parametrize("mode", MODES)
def test_background_pause_resume_and_stop(mode, tmp_path):
    with make(mode, tmp_path / "run", Slow(0.03)) as trainer:
        handle = trainer.start(10, progress=False)
        while trainer.step_count < 2:
            time.sleep(0.005)
        assert handle.pause(timeout=20).status == "paused"
        at = trainer.step_count
        time.sleep(0.1)
        assert trainer.step_count == at and nothing_runs(trainer)
        handle.resume()
        while trainer.step_count < at + 2:
            time.sleep(0.005)
        handle.stop(timeout=20)
        assert handle.status == "stopped" and nothing_runs(trainer)
        if mode != "sync":
            trainer.fit(10 - trainer.step_count, progress=False)
            assert sorted(trained(trainer.run_folder)) == prefix(trainer, 10)


@pytest.mark.parametrize("mode", MODES)
def test_rewind_and_resume(mode, tmp_path):
    with make(mode, tmp_path / "run", data={"epochs": 1}) as trainer:
        trainer.fit(7, progress=False)
        assert trainer.rewind(3) == 3 and trainer.backend.weight_version == 3
        trainer.fit(5, progress=False)
        steps = trainer.run_folder.ledger()
        assert mode == "sync" or ([x["step"] for x in steps] == list(range(1, 9)) and sorted(trained(trainer.run_folder)) == prefix(trainer, 8))
        assert trainer.rewind(0) == 0
        trainer.fit(3, progress=False)
    with make(mode, tmp_path / "run", data={"epochs": 1}) as trainer:
        assert trainer.resume() == 2
        trainer.fit(8, progress=False)
        with pytest.raises(DataError, match="epochs are used up after 10 steps"):
            trainer.step()
        assert mode == "sync" or sorted(trained(trainer.run_folder)) == prefix(trainer, 10)


@pytest.mark.parametrize("mode", MODES)
def test_validation_is_of_one_version_and_does_not_disturb(mode, tmp_path):
    seen = []
    rows = [{"prompt": f"v{i}: "} for i in range(5)]
    with make(mode, tmp_path / "run", validate={"data": {"rows": rows}, "eval": {"compute_interval": 3}}, callbacks=[lambda event, p: event == "eval" and seen.append(p["result"])]) as trainer:
        trainer.fit(6, progress=False)
        assert [r.step for r in seen] == [0, 3, 6]
        assert all({v for t in r.rollouts for v in t.weight_versions} == {r.step} and len(r.rollouts) == 5 for r in seen)
        assert mode == "sync" or sorted(trained(trainer.run_folder)) == prefix(trainer, 6)


@pytest.mark.parametrize("ready", ["batch_size", "batch_size_reached", "loaded_batch_finished", ["batch_size", "loaded_batch_finished"]])
def test_the_last_epoch_ends_with_what_is_left(ready, tmp_path):
    with make("batch-async", tmp_path / "run", rows=10, data={"epochs": 1}, pool={"check_batch_ready_function": ready}, threshold=2) as trainer:
        with pytest.raises(DataError, match="epochs are used up after 3 steps"):
            trainer.fit(5, progress=False)
        assert [len(line["trained"]) for line in trainer.run_folder.ledger()] == [4, 4, 2] and len(set(trained(trainer.run_folder))) == 10


def test_loaded_batches_are_trained_in_the_order_of_the_data(tmp_path):
    with make("batch-async", tmp_path / "run", Slow(0.05), pool={"check_batch_ready_function": "loaded_batch_finished"}, threshold=2) as trainer:
        trainer.fit(progress=False)
        order = [f"0:{i}" for i in trainer._recipe("data").make_stream().order(0)]
        assert [line["trained"] for line in trainer.run_folder.ledger()] == [order[i : i + PROMPTS] for i in range(0, 8 * PROMPTS, PROMPTS)]


def test_one_slow_prompt_is_regenerated_waited_for_and_counted(tmp_path):
    class OneSlow(Slow):
        def sample(self, prompts, params=None, n=1, stop_flag=None):
            slow = any(self.tokenizer.decode(p) == "7: " for p in prompts)
            self.slowest = 0.0
            if slow and stop_flag.wait(0.25):
                self.again = getattr(self, "again", 0) + 1
                raise Interrupted("stopped while it sampled")
            return super().sample(prompts, params, n, stop_flag)

    backend = OneSlow()
    with make("batch-async", tmp_path / "run", backend, data={"shuffle": False}, trainer={"total_train_steps": 10}) as trainer:
        trainer.fit(progress=False)
        last = trainer.history[-1]
        assert sorted(trained(trainer.run_folder)) == prefix(trainer, 10) and backend.again == last["pool/regenerated"] == 1
        assert last["pool/stale"] == GROUP and max(h["staleness/max"] for h in trainer.history) <= 1


def test_stale_prompts_are_left_out_where_the_recipe_says_so(tmp_path):
    class OneSlow(Slow):
        def sample(self, prompts, params=None, n=1, stop_flag=None):
            if any(self.tokenizer.decode(p) == "7: " for p in prompts):
                stop_flag.wait(5)
            return super().sample(prompts, params, n, stop_flag)

    with make("batch-async", tmp_path / "run", OneSlow(0.001), data={"shuffle": False}, weight={"stale": "drop"}) as trainer:
        trainer.fit(progress=False)
        ledger = trainer.run_folder.ledger()
        assert [k for line in ledger for k in line["stale"]] == ["0:7"] and sorted(trained(trainer.run_folder)) == sorted(f"0:{i}" for i in range(8 * PROMPTS + 1) if i != 7)


class Flaky(SimpleRolloutWorker):
    """One of the answers to prompts 3 and 5 fails, the first `times` times."""

    times, asked = 10**9, None

    def answer(self, tasks, n, sampling, stop_flag):
        found = super().answer(tasks, n, sampling, stop_flag)
        for task, group in zip(tasks, found):
            self.asked[task.item.index] = self.asked.get(task.item.index, 0) + 1
            if task.item.index in (3, 5) and self.asked[task.item.index] <= self.times:
                group[0].update(status="failed", error="no connection")
        return found


def flaky(trainer, times=10**9):
    worker = Flaky(trainer.backend, score, group_size=GROUP, sampling=SamplingParams(max_tokens=6))
    worker.times, worker.asked = times, {}
    trainer.worker = worker
    return trainer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["flush", "drop", "retry"])
def test_groups_that_lack_answers(policy, mode, tmp_path):
    with flaky(make(mode, tmp_path / "run", pool={"incomplete": policy}, data={"shuffle": False}), times=1 if policy == "retry" else 10**9) as trainer:
        trainer.fit(3, progress=False)
        rollouts = [t for s in (1, 2, 3) for t in trainer.run_folder.rollouts(s)]
        groups, failed = {t.group_id for t in rollouts}, [t for t in rollouts if t.status == "failed"]
        assert len(failed) == (2 if policy == "flush" else 0)
        if policy == "drop":
            assert not groups & {"0:3", "0:5"} and len(groups) == (10 if mode == "sync" else 12)
            assert mode == "sync" or sorted(k for line in trainer.run_folder.ledger() for k in line["incomplete"]) == ["0:3", "0:5"] or mode == "fully-async"
        else:
            assert groups == {f"0:{i}" for i in range(12)}
        assert trainer.worker.asked[3] == (2 if policy == "retry" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_retries_end_and_drops_do_not_go_on_for_ever(mode, tmp_path):
    with flaky(make(mode, tmp_path / "a", pool={"incomplete": "retry"}, data={"shuffle": False})) as trainer:
        trainer.fit(2, progress=False)
        assert trainer.worker.asked[3] == 2, "once more, as rollout_worker.retries says; then what there is"
    failing = make(mode, tmp_path / "b", backend=Slow(fail=lambda call: 1 / 0), pool={"incomplete": "drop"}, evaluator=score)
    failing.worker.retries = 0
    with failing as trainer, pytest.raises((BackendError, EvaluatorError), match="ZeroDivisionError"):
        trainer.fit(progress=False)


@pytest.mark.parametrize("mode", ["batch-async", "fully-async"])
def test_a_workers_error_reaches_the_step_and_can_be_mended(mode, tmp_path):
    def broken(row):
        raise DataError("the row has no prompt")

    with make(mode, tmp_path / "run") as trainer:
        trainer.fit(2, progress=False)
        trainer.worker.format_task_query = broken
        with pytest.raises(DataError, match="the row has no prompt"):
            trainer.fit(3, progress=False)
        assert nothing_runs(trainer)
        del trainer.worker.format_task_query
        trainer.fit(5 - trainer.step_count, progress=False)
        assert sorted(trained(trainer.run_folder)) == prefix(trainer, 5)


def test_a_trainer_fed_by_workers_of_ones_own(tmp_path):
    """As the documents have it: a pool, a controller, and workers that wait for the weights they need."""
    with make("sync", tmp_path / "run") as trainer:
        controller = WeightSyncController("batch-async", 1)
        pool = TrajectoryPool(PROMPTS * GROUP, group_size=GROUP, max_staleness=1, changed=controller.changed)
        trainer.set_module_references(pool, controller)
        items = trainer._recipe("data").make_stream().next(5 * PROMPTS)

        def work():
            for b in range(5):
                assert controller.wait_for(b - 1, timeout=20)
                pool.put(trainer.worker.run(items[b * PROMPTS : (b + 1) * PROMPTS], step=b))

        thread = threading.Thread(target=work)
        thread.start()
        trainer.fit(5, progress=False)
        thread.join(20)
        assert controller.version == 5 and trained(trainer.run_folder) == [f"{i.epoch}:{i.index}" for i in items]
        assert all(h["staleness/max"] <= 1 for h in trainer.history)
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(Interrupted):
            trainer.step()


def test_by_hand_there_is_nothing_ahead(tmp_path):
    with make("batch-async", tmp_path / "run") as trainer:
        trainer.step()
        assert nothing_runs(trainer) and trainer.backend.calls["sample"] == PROMPTS and trainer.history[-1]["staleness/max"] == 0
        rollouts = trainer.rollout(3)
        trainer.train(rollouts)
        trainer.publish()
        trainer.fit(2, progress=False)
        assert [len(line["trained"]) for line in trainer.run_folder.ledger()] == [4, 3, 4, 4] and len(set(trained(trainer.run_folder))) == 15


def test_threads_that_ask_at_once_get_one_worker(monkeypatch):
    real, made, together = Recipe.make_worker, [], threading.Barrier(8, timeout=60)

    def slowly(self, backend):
        time.sleep(0.05)
        made.append(real(self, backend))
        return made[-1]

    monkeypatch.setattr(Recipe, "make_worker", slowly)
    with make() as trainer, ThreadPoolExecutor(8) as pool:
        assert {id(w) for w in pool.map(lambda _: together.wait() + 1 and trainer.worker, range(8))} == {id(made[0])} and len(made) == 1


def test_evaluators_at_once_are_as_many_as_the_recipe_says(tmp_path):
    now, most, lock = [0], [0], threading.Lock()

    def judge(row, answer):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.03)
        with lock:
            now[0] -= 1
        return 1.0

    with make("fully-async", evaluator=judge) as trainer:
        trainer.fit(3, progress=False)
    assert most[0] == 3


def test_what_does_not_fit_is_refused():
    from nexrl_sdk.trainer.cross_entropy import SelfHostedCrossEntropyTrainer

    recipe = Recipe(model="mock", data={"rows": [{"prompt": "a", "response": "b"}]}, algorithm="cross_entropy", weight={"sync_mode": "fully-async"})
    with SelfHostedCrossEntropyTrainer(recipe, MockBackend()) as trainer, pytest.raises(ConfigError, match="makes its rollouts itself"):
        trainer.fit(1, progress=False)
    with make("batch-async") as trainer:
        handle = trainer.start(50, progress=False)
        with pytest.raises(BackendError, match="in the background"):
            trainer.set_module_references(TrajectoryPool(8), WeightSyncController())
        handle.stop()


def test_off_policy_defaults():
    with make("batch-async") as trainer:
        assert trainer._config.algorithm.correction == "tis" and trainer._config.algorithm.do_old_log_prob_compute
    with make("batch-async", algorithm={"type": "rloo"}) as trainer:
        assert trainer._config.algorithm.loss_fn == "ppo", "the loss is clipped"
    with make("batch-async", algorithm={"type": "grpo", "correction": "none"}) as trainer:
        assert trainer._config.algorithm.correction == "none" and not trainer._config.algorithm.do_old_log_prob_compute
    for mode, threshold in (("sync", 1), ("batch-async", 0)):
        with make(mode, threshold=threshold) as trainer:
            assert trainer._config.algorithm.correction is None
