"""The command line without a model: help, messages, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nexrl_sdk import Recipe, Run
from nexrl_sdk.launch.cli import exit_code, main, message_for
from nexrl_sdk.launch.template import write_template
from nexrl_sdk.types import BackendError, ConfigError, DataError, EvaluatorError, Interrupted, RunFolderError


def nexrl(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as e:
        main(list(arguments))
    captured = capsys.readouterr()
    return e.value.code, captured.out, captured.err


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_template(tmp_path / "my_task")
    return tmp_path / "my_task"


def test_help_imports_nothing_heavy():
    code = "import sys\nfrom nexrl_sdk.launch.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\nprint([m for m in ('torch', 'transformers', 'pydantic', 'omegaconf', 'polars', 'rich') if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]" and "nexrl run my_task" in done.stdout


def test_the_help_names_the_documents_commands_and_they_are_there(task, capsys):
    _, out, _ = nexrl(capsys, "-h")
    shown = [line.split("    ")[0].split() for line in out.partition("NexRL's documents")[2].partition("Options:")[0].splitlines() for line in [line.strip()] if line.startswith(("nexrl ", "python "))]
    assert [words[0:3:2] for words in shown] == [["nexrl", "self-hosted"], ["python", "nexrl.main"], ["python", "nexrl.validator"]]
    task.rename(task.parent / "moved")
    (task.parent / "recipe").mkdir()
    (task.parent / "moved").rename(task.parent / "recipe" / "my_task")
    (task.parent / "recipe" / "my_task" / "recipe.yaml").rename(task.parent / "recipe" / "my_task" / "my_task.yaml")
    done = subprocess.run([sys.executable, *shown[2][1:]], capture_output=True, text=True, cwd=task.parent, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 0 and "no errors" in done.stdout, done.stderr
    code, out, _ = nexrl(capsys, *[w for w in shown[0][1:] if w != "-r"])
    assert code == 0 and "no errors" in out


@pytest.mark.parametrize("command", ["run", "resume", "validate", "report", "init"])
def test_every_command_shows_examples(command, capsys):
    code, out, _ = nexrl(capsys, command, "--help")
    assert code == 0 and f"nexrl {command} " in out and "Example" in out


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (["run", "nowhere"], "there is no recipe nowhere (valid: my_task)"),
        (["run", "my_taks"], "there is no recipe my_taks; did you mean 'my_task'?"),
        (["run", "my_task", "trainer.optim.lrr=1"], "trainer.optim.lrr: unknown key; did you mean 'lr'?"),
        (["run", "my_task", "--steps", "-1"], "trainer.total_train_steps: must be 0 or more, not -1"),
        (["run", "my_task", "lr"], "override 'lr' must be key=value"),
        (["resume", "nowhere"], "nowhere is not a run folder"),
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["init", "my_task"], "exists already, and nothing was written"),
        (["rnu"], "No such command 'rnu'"),
        (["run"], "Missing argument"),
        (["run", "my_task", "--stepz", "3"], "No such option"),
        (["run", "my_task", "algorithm.mini_batch_size=5"], "algorithm.mini_batch_size: 5 does not divide the 64 trajectories"),
        (["run", "my_task", "data.prompt_key=question"], "no column 'question'"),
        (["run", "my_task", "logger.backend=[no_such]"], "'no_such' is not known"),
    ],
)
def test_bad_input_is_one_message_and_code_2(arguments, expected, task, capsys):
    code, _, err = nexrl(capsys, *arguments)
    assert code == 2 and expected in err and "Traceback" not in err
    assert not (task.parent / "runs").exists()


def test_debug_shows_the_traceback(task):
    with pytest.raises(ConfigError):
        main(["--debug", "run", "nowhere"])


def test_init_writes_what_validate_accepts(task, capsys):
    code, out, _ = nexrl(capsys, "validate", "my_task")
    assert code == 0 and "no errors; run it: nexrl run my_task" in out and "warning" not in out
    code, out, _ = nexrl(capsys, "validate", "my_task", "trajectory_pool.group_size=1")
    assert code == 2 and "error: trajectory_pool.group_size: grpo compares" in out
    code, out, _ = nexrl(capsys, "init", "another")
    assert code == 0 and "nexrl validate another" in out and Recipe.load("another") != Recipe.load("my_task")


def test_another_recipes_folder(task, capsys):
    recipe = Recipe.load("my_task")
    Run.create("runs/x", recipe).close()
    code, _, err = nexrl(capsys, "run", "my_task", "--seed", "3", "--out", "runs/x")
    assert code == 2 and "seed is 0 there and 3 here" in err
    code, _, err = nexrl(capsys, "resume", "runs/x", "seed=3")
    assert code == 2 and "seed is 0 there and 3 here" in err
    with Run.open("runs/x"):
        code, _, err = nexrl(capsys, "resume", "runs/x")
    assert code == 2 and "is in use by" in err


def test_codes_and_messages():
    codes = {ConfigError("x"): 2, DataError("x"): 2, RunFolderError("x"): 2, EvaluatorError("x"): 1, BackendError("x"): 1, ZeroDivisionError("x"): 1, KeyboardInterrupt(): 130, Interrupted("x"): 130}
    assert {type(e): exit_code(e) for e in codes} == {type(e): c for e, c in codes.items()}
    error = BackendError("5 of 8 rollouts failed")
    error.run_folder = "/elsewhere/runs/x"
    assert message_for(error) == "error: 5 of 8 rollouts failed\ngo on with it: nexrl resume /elsewhere/runs/x"
    assert "nexrl --debug" in message_for(ZeroDivisionError("division by zero"))
    stopped = KeyboardInterrupt()
    stopped.run_folder = None
    assert "no run folder is left" in message_for(stopped) and message_for(KeyboardInterrupt()) == "\ninterrupted"
