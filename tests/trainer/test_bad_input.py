"""What users and evaluators get wrong: each with a message that says what to do, and nothing lost."""

from __future__ import annotations

import math
import signal
import threading

import pytest

from nexrl_sdk import MockBackend, NexRLError, Recipe, Trainer
from nexrl_sdk.types import BackendError, CheckpointError, ConfigError, DataError, EvaluatorError, Interrupted


def right(row, answer):
    return float(len(answer) % 2)


def make(evaluator=right, rows=None, backend=None, **sections):
    settings = {
        "data": {"data_files": rows or [{"prompt": f"say {i}"} for i in range(12)], "batch_size": 3},
        "trajectory_pool": {"group_size": 4},
        "rollout_worker": {"max_tokens": 6, "num_workers": 2},
        "trainer": {"total_train_steps": 5, "save_freq": 1},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values} if isinstance(values, dict) else values
    return Trainer(Recipe(model="mock", evaluator=evaluator, algorithm="grpo", **settings), backend or MockBackend())


def test_evaluator_that_raises_stops_the_run_with_its_cause():
    def broken(row, answer):
        raise RuntimeError("no such oracle")

    trainer = make(broken)
    with pytest.raises(EvaluatorError, match=r"(?s)12 of 12 rollouts failed.*error_budget.*no such oracle"):
        trainer.step()
    assert trainer.step_count == 0 and trainer.backend.calls["optim_step"] == 0


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "0.5", [1.0]])
def test_odd_rewards_are_never_zero_and_never_spread(value):
    """A quarter of the answers gets an odd reward: the rest is trained on, the odd ones are counted."""
    seen = []

    def odd(row, answer):
        seen.append(answer)
        return value if len(seen) % 4 == 0 else float(len(seen) % 3)

    trainer = make(odd, rollout_worker={"num_workers": 1})
    result = trainer.step()
    metrics = result.metrics
    assert sum(not t.scored for t in result.rollouts) == 3
    assert all(t.reward is None or t.scored for t in result.rollouts if t.status != "ok")
    assert math.isfinite(metrics["reward/mean"]) and metrics["batch/sequences"] == 9
    counted = metrics["errors/unscored"] if value is None else metrics["errors/evaluator"]
    assert counted == 3


def test_what_ended_a_run_is_said_by_its_error_alone(capsys):
    def fail(call):
        raise ConnectionError("engine is gone")

    with pytest.raises(BackendError, match=r"12 of 12 rollouts failed.*(?s:.*)engine is gone"):
        make(backend=MockBackend(fail=fail)).fit(progress=True)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("failed: BackendError")


def test_a_backend_that_fails_loses_no_prompt():
    def fail(call):
        if call <= 10:
            raise ConnectionError("engine is gone")

    trainer = make(backend=MockBackend(fail=fail))
    with pytest.raises(BackendError, match="engine is gone"):
        trainer.step()
    assert trainer.step_count == 0
    whole = make()
    trainer.backend.fail = None
    assert [t.group_id for t in trainer.step().rollouts] == [t.group_id for t in whole.step().rollouts]


def test_used_up_data():
    trainer = make(data={"epochs": 1, "batch_size": 12})
    trainer.step()
    with pytest.raises(DataError, match=r"used up after 1 steps; raise data\.epochs"):
        trainer.step()


def test_rewind_says_what_is_possible():
    trainer = make()
    trainer.fit(2, progress=False)
    with pytest.raises(ConfigError, match="from 0 to 2, not 3"):
        trainer.rewind(3)
    assert trainer.rewind(1) == 1 and len(trainer.history) == 1


def test_no_run_folder_no_checkpoint():
    with pytest.raises(CheckpointError, match="run='runs/NAME'"):
        make().save()


def test_bare_configuration_says_what_is_missing():
    with pytest.raises(ConfigError, match="takes a Recipe"):
        Trainer({"trainer": {}})


def test_unknown_trainer_type_names_the_nearest():
    with pytest.raises(ConfigError, match="self_hosted_grpo"):
        make(trainer={"type": "self_hosted_grp"})


def test_stop_flag_undoes_the_step():
    """As the first Ctrl-C does: the step is undone, the same prompts come again."""
    trainer, handler = make(), signal.getsignal(signal.SIGINT)

    def stop(event, payload):
        if event == "rollout" and trainer.step_count == 1:
            signal.raise_signal(signal.SIGINT)

    trainer.callbacks.append(stop)
    with pytest.raises(Interrupted, match="stopped"):
        trainer.fit(3, progress=False)
    trainer.callbacks.clear()
    assert trainer.step_count in (1, 2) and signal.getsignal(signal.SIGINT) is handler
    left = trainer.step()
    whole = make()
    whole.fit(left.step, progress=False)
    assert [t.tokens for t in left.rollouts] == [t.tokens for t in _last_rollouts(make(), left.step)]


def _last_rollouts(trainer, steps):
    for _ in range(steps):
        result = trainer.step()
    return result.rollouts


def test_second_interrupt_raises_at_once_and_asks_for_a_rewind():
    trainer = make()
    trainer.step()

    class Hard(MockBackend):
        def optim_step(self, adam=None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            return super().optim_step(adam)

    trainer.backend.__class__ = Hard
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    trainer.backend.__class__ = MockBackend
    with pytest.raises(BackendError, match=r"rewind\(1\)"):
        trainer.step()
    assert trainer.rewind(1) == 1 and trainer.step().step == 2


def test_background_run_pauses_stops_and_reports():
    trainer = make(trainer={"total_train_steps": 10_000})
    handle = trainer.start(progress=False)
    with pytest.raises(BackendError, match="already training"):
        trainer.start()
    handle.pause()
    for _ in range(100):
        if handle.status == "paused":
            break
    assert handle.status == "paused"
    handle.resume().stop(30)
    assert handle.status == "stopped" and trainer.step_count < 10_000
    done = trainer.step_count
    assert trainer.step().step == done + 1


def test_background_error_is_raised_by_wait():
    def broken(row, answer):
        raise RuntimeError("no such oracle")

    handle = make(broken).start(progress=False)
    with pytest.raises(EvaluatorError, match="no such oracle"):
        handle.wait(30)
    assert handle.status == "failed" and "oracle" in repr(handle)


def test_documented_run_and_stop():
    trainer = make(trainer={"total_train_steps": 3})
    trainer.run()
    trainer.handle.wait(30)
    trainer.stop()
    assert trainer.step_count == 3 and not [t for t in threading.enumerate() if t.name == "nexrl-trainer"]


def test_every_error_is_one_of_ours():
    assert all(issubclass(e, NexRLError) for e in (BackendError, CheckpointError, ConfigError, DataError, EvaluatorError))


def test_a_truncated_distribution_is_refused_in_a_cell_too():
    from nexrl_sdk import Recipe, Trainer
    from nexrl_sdk.types import ConfigError

    recipe = Recipe.load("recipes/reverse", ["rollout_worker.top_p=0.9"])
    with pytest.raises(ConfigError, match=r"rollout_worker\.top_p=0\.9 leaves out tokens"):
        Trainer(recipe)
    with Trainer(recipe.override("rollout_worker.allow_truncated_sampling=true")) as trainer:
        assert trainer.rollout(1)
