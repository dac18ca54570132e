"""What a run says last."""

from __future__ import annotations

import pytest

from nexrl_sdk.launch.cli import _closing, _own, main, message_for
from nexrl_sdk.launch.runner import summarize
from nexrl_sdk.types import EvaluatorError


def closing(folder, **more):
    return _closing({"reward/before": 0.4, "reward/after": 0.9, "reward/of": "held-out rows", "steps": 20, "seconds": 1.0, "folder": str(folder), **more}, "recipes/reverse", True)


def test_training_further_is_offered_and_a_template_only_where_none_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = closing(tmp_path / "runs/a")
    assert "nexrl resume runs/a --steps 40" in said and "nexrl init my_task" in said
    (tmp_path / "my_task").mkdir()
    assert "nexrl init" not in closing(tmp_path / "runs/a")
    once = _closing({"reward/before": 0.4, "reward/after": 0.9, "reward/of": "held-out rows", "steps": 20, "seconds": 1.0, "folder": "runs/a"}, "recipes/reverse", True, longer=False)
    assert "nexrl resume" not in once and "--seed 1" in once, "the learning rate was to end with the last step"
    assert "next" not in _closing({"reward/before": 0.4, "reward/after": 0.9, "reward/of": "held-out rows", "steps": 20, "seconds": 1.0, "folder": "runs/a"}, None, True, longer=False)


def test_rewards_that_never_differ_are_named(tmp_path):
    lines = [{"step": i, "reward/mean": 1.0, "group/frac_zero_std": 1.0} for i in (1, 2)]
    assert "nothing to learn from" in closing(tmp_path, **{"group/frac_zero_std": summarize(lines, 1.0)["group/frac_zero_std"]})
    assert "nothing to learn from" not in closing(tmp_path, **{"group/frac_zero_std": 0.3})
    alone = [{"step": i, "reward/mean": 1.0, "group/frac_zero_std": 1.0, "group/size": 1.0} for i in (1, 2)]  # one answer a prompt, and a critic
    assert "group/frac_zero_std" not in summarize(alone, 1.0)


def test_supervised_learning_is_not_offered_groups(tmp_path):
    said = closing(tmp_path, **{"reward/before": None, "reward/after": None, "loss/first": 2.0, "loss/last": 1.0})
    assert "group_size" not in said and "trainer.optim.lr" in said and "loss" in said


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("nexrl_sdk ")


def test_the_first_and_last_steps_of_a_short_run_do_not_overlap():
    lines = [{"step": i, "reward/mean": i / 4} for i in range(1, 5)]
    summary = summarize(lines, 1.0)
    assert (summary["reward/before"], summary["reward/after"]) == (0.375, 0.875) and "2 steps" in summary["reward/of"]


def test_an_evaluator_that_has_to_be_changed_needs_a_new_run(tmp_path):
    error = EvaluatorError("64 of 64 rollouts failed")
    error.run_folder = str(tmp_path)
    assert "nexrl resume" in message_for(error) and "begin a new one" in message_for(error)


def test_distillation_says_how_far_the_teacher_is(tmp_path):
    lines = [{"step": i, "reward/mean": 0.5, "distill/reverse_kl": 1.2 / i} for i in (1, 2, 3)]
    said = closing(tmp_path, **{k: v for k, v in summarize(lines, 1.0).items() if k.startswith("reverse_kl")})
    assert "reverse KL       1.200 -> 0.400" in said and "held-out reward" in said


def test_what_is_suggested_keeps_what_was_set() -> None:
    summary = {"reward/before": 0.4, "reward/after": 0.9, "reward/of": "held-out rows", "steps": 20, "seconds": 1.0, "folder": "runs/x"}
    own = _own(["trainer.optim.lr=1e-4", "seed=3", "output_dir=runs/x", "data.data_files=[a b.jsonl]"])
    text = _closing(summary, "recipes/reverse", True, " --train-url http://h:1", own)
    assert "nexrl run recipes/reverse trainer.optim.lr=1e-4 'data.data_files=[a b.jsonl]' --seed 1 --train-url http://h:1" in text
    assert "group_size" in text and "group_size" not in _closing(summary, "recipes/reverse", True, groups=False)


def test_a_second_interrupt_knows_what_the_first_left(tmp_path) -> None:
    def twice(**left):
        first = KeyboardInterrupt()
        for name, value in left.items():
            setattr(first, name, value)
        try:
            try:
                raise first
            finally:
                raise KeyboardInterrupt
        except KeyboardInterrupt as second:
            return message_for(second)

    assert "nexrl resume" in twice(run_folder=str(tmp_path))
    assert "nothing was recorded" in twice(run_folder=None)
    assert twice() == "\ninterrupted", "nothing is claimed of what is not known"
