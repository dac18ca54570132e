"""Code and commands written for NexRL find what they name, unless NexRL itself is there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nexrl_sdk import compat
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *first: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with these folders, and then this package, on its path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*first, ROOT]))}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, cwd=cwd or "/")


@pytest.fixture()
def fresh():
    """Aliases are imported anew in the test."""
    compat.uninstall()
    yield
    compat.install()


@pytest.mark.parametrize("name", compat.MODULES)
def test_every_module_gives_our_very_objects(name, fresh):
    with compat.installed():
        module = importlib.import_module(name)
        assert sys.modules[name] is module and module.__name__ == name
        target = compat.MODULES[name].partition(":")[0]
        if not target:
            return
        ours = importlib.import_module(target)
        assert compat._offered(name)
        for each in compat._offered(name):
            assert getattr(module, each) is getattr(ours, each)
            space: dict = {}
            exec(f"from {name} import {each}", space)
            assert space[each] is getattr(ours, each)


def test_isinstance_across_both_names():
    from nexrl.nexrl_types import Trajectory  # type: ignore[import-not-found]
    from nexrl.trainer import SelfHostedTrainer  # type: ignore[import-not-found]

    import nexrl_sdk

    assert isinstance(nexrl_sdk.Trajectory(tokens=[1], loss_mask=[1]), Trajectory) and issubclass(nexrl_sdk.SelfHostedGrpoTrainer, SelfHostedTrainer)


@pytest.mark.parametrize(
    "code,expected",
    [
        ("import nexrl.trainr", "did you mean 'trainer'?"),
        ("from nexrl import trainr", "did you mean 'trainer'?"),
        ("from nexrl.trainer import SelfHostedGrpoTrainr", "did you mean 'SelfHostedGrpoTrainer'?"),
        ("import nexrl.trainer; nexrl.trainer.BaseTrainr", "did you mean 'BaseTrainer'?"),
        ("import nexrl.controller", "stands in for nexrl, and has no 'controller' in it"),
        ("from nexrl.mock import MockTrainService", "did you mean 'MockTrainServiceClient'?"),
        ("from nexau.archs.tracer.adapters import LangfuseTracer", "has no 'LangfuseTracer' in it (valid: InMemoryTracer, in_memory)"),
        ("import nexau.archs.llm", "has no 'llm' in it (valid: tracer)"),
    ],
)
def test_what_is_not_here_is_named_with_the_nearest(code, expected):
    with pytest.raises((ModuleNotFoundError, AttributeError)) as e:
        exec(code, {})
    assert expected in str(e.value)


def test_probing_for_a_name_is_no_error():
    import nexrl.trainer  # type: ignore[import-not-found]

    assert not hasattr(nexrl.trainer, "nothing") and getattr(nexrl.trainer, "__file__", None) is None
    assert {"SelfHostedTrainer", "base_trainer"} <= set(dir(nexrl.trainer))
    space: dict = {}
    exec("from nexrl.trainer import *", space)
    assert "SelfHostedTrainer" in space


def test_tools_that_look_at_modules_find_nothing_strange():
    import inspect
    import pickle
    import pydoc
    from unittest.mock import patch

    import nexrl  # type: ignore[import-not-found]

    from nexrl_sdk.trainer import SelfHostedTrainer

    assert nexrl.utils.torch_functional.padding_data and nexrl.trainer.base_trainer.BaseTrainer  # a package's modules are its attributes
    assert importlib.reload(nexrl.trainer) is nexrl.trainer
    assert pickle.loads(pickle.dumps(nexrl.trainer.SelfHostedTrainer)) is SelfHostedTrainer
    assert inspect.getmodule(SelfHostedTrainer).__name__ == "nexrl_sdk.trainer.self_hosted"  # type: ignore[union-attr]
    assert "SelfHostedTrainer" in pydoc.render_doc(nexrl.trainer)
    with patch("nexrl.trainer.SelfHostedTrainer", 1):
        assert nexrl.trainer.SelfHostedTrainer == 1
    assert nexrl.trainer.SelfHostedTrainer is SelfHostedTrainer


@pytest.mark.timeout(60)
def test_looking_at_an_alias_imports_nothing():
    done = python("import sys, inspect, nexrl.trainer, nexrl.mock; [hasattr(m, '__file__') for m in list(sys.modules.values())]; inspect.getmodule(len); print('torch' in sys.modules, 'nexrl_sdk.trainer' in sys.modules)")
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.timeout(60)
def test_many_threads_load_files_that_say_nexrl(tmp_path, fresh):
    import concurrent.futures

    for i in range(16):
        (tmp_path / f"task{i}.py").write_text(f"from nexrl.utils.logging_utils import log_grpo_metrics\nfrom nexrl.rollout_worker import Evaluator\nimport nexau.archs.tracer.adapters\n\nclass E{i}(Evaluator):\n    pass\n")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: load_object(f"task{i}.py:E{i}", tmp_path), range(16)))
    assert len({c.__mro__[1] for c in found}) == 1


def test_install_twice_and_undo(fresh):
    compat.install()
    compat.install()
    assert sum(f is compat._FINDER for f in sys.meta_path) == 1
    importlib.import_module("nexrl.trainer")
    compat.uninstall()
    compat.uninstall()
    assert not any(n.split(".")[0] in compat.PACKAGES for n in sys.modules) and compat._FINDER not in sys.meta_path
    with compat.installed():
        assert importlib.import_module("nexrl.mock").MockTrainServiceClient
    assert compat._FINDER not in sys.meta_path


# -- files of recipes -------------------------------------------------------------------------------


def test_a_recipes_file_needs_no_change(tmp_path, fresh):
    (tmp_path / "evaluator.py").write_text(
        "from nexrl.rollout_worker import BaseEvaluationTarget, EvaluationRunResult, Evaluator\n\n"
        "class MyEvaluator(Evaluator):\n    def evaluate(self, data, evaluation_target):\n"
        "        from nexrl.utils.logging_utils import log_grpo_metrics  # found when it is called, too\n"
        "        return EvaluationRunResult(reward=float(evaluation_target.final_answer == data['answer']))\n"
    )
    from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget, Evaluator

    cls = load_object("evaluator.py:MyEvaluator", tmp_path)
    assert issubclass(cls, Evaluator) and cls().evaluate({"answer": "4"}, BaseEvaluationTarget("4")).reward == 1.0


def test_a_name_that_is_missing_is_said_with_file_and_line(tmp_path):
    (tmp_path / "worker.py").write_text("\nfrom nexrl.rollout_worker import BaseNexAUWorker\n")
    with pytest.raises(ConfigError, match=r"worker.py cannot be imported: .*did you mean 'BaseNexAURolloutWorker'.* \(line 2\)"):
        load_object("worker.py:x", tmp_path)


# -- NexRL itself -----------------------------------------------------------------------------------

PROBE = """
    import nexrl_sdk.compat
    import nexrl, nexrl.trainer
    print(nexrl.__name__, getattr(nexrl, "REAL", False), getattr(nexrl.trainer, "REAL", False))
    from nexau.archs.tracer import adapters
    print(getattr(adapters, "REAL", False))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("here,nexrl,nexau", [("none", "nexrl False False", "False"), ("before", "nexrl True True", "True"), ("folder", "nexrl False False", "False")])
def test_a_package_that_is_really_there_comes_first(here, nexrl, nexau, tmp_path):
    for module in ("nexrl/trainer", "nexau/archs/tracer/adapters"):
        folder = tmp_path / module
        folder.mkdir(parents=True)
        if here == "before":
            for p in [folder, *folder.parents][: len(Path(module).parts)]:
                (p / "__init__.py").write_text("REAL = True\n")
    done = python(PROBE, *([] if here == "none" else [tmp_path]))
    assert done.stdout.split("\n")[:2] == [nexrl, nexau], done.stderr


@pytest.mark.timeout(120)
def test_nexrl_after_this_package_on_the_path_comes_first_too(tmp_path):
    (tmp_path / "nexrl").mkdir()
    (tmp_path / "nexrl" / "__init__.py").write_text("REAL = True\n")
    for first in ("", "import nexrl_sdk.compat; "):  # found by the module that stands in, or by the finder
        done = python(f"import sys; sys.path.append({str(tmp_path)!r}); {first}import nexrl; print(nexrl.REAL, sys.modules['nexrl'] is nexrl)")
        assert done.stdout == "True True\n", done.stderr


@pytest.mark.timeout(120)
def test_a_finder_of_an_older_kind_is_passed_over_and_one_that_finds_it_comes_first(tmp_path):
    (tmp_path / "real.py").write_text("REAL = True\n")
    finder = f"""
import sys, importlib.util
class Old:
    def find_module(self, name, path=None): ...  # what finders had before find_spec
class Editable:  # as an editable installation puts one at the end
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {str(tmp_path / "real.py")!r}) if name == "nexrl" else None
sys.meta_path[:0] = [Old()]
"""
    done = python(f"{finder}\nimport nexrl_sdk.compat, nexrl\nprint(getattr(nexrl, 'REAL', False))")
    assert done.stdout == "False\n", done.stderr
    for first in ("", "import nexrl_sdk.compat"):
        done = python(f"{finder}\nsys.meta_path.append(Editable())\n{first}\nimport nexrl\nprint(nexrl.REAL)")
        assert done.stdout == "True\n", done.stderr


@pytest.mark.timeout(120)
def test_the_name_leads_here_without_any_other_import():
    done = python("from nexrl.nexrl_types import Trajectory; import nexrl_sdk; print(Trajectory is nexrl_sdk.Trajectory)")
    assert done.stdout == "True\n", done.stderr


# -- commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given,expected",
    [
        ("-m self-hosted -c recipe/a.yaml --run-nexrl", "run recipe/a.yaml"),
        ("--mode self-hosted --train-config recipe/a.yaml --run-nexrl", "run recipe/a.yaml"),
        ("-m training-service -c recipe/a.yaml -r -t exp-v2", "run recipe/a.yaml --out runs/exp-v2"),
        ("-m self-hosted -c recipe/a.yaml -r --inference-url my-service:8000", "run recipe/a.yaml --inference-url http://my-service:8000"),
        ("-m self-hosted -c recipe/a.yaml -r seed=3 --inference-url https://x:1", "run recipe/a.yaml seed=3 --inference-url https://x:1"),
        ("-c recipe/a.yaml -m self-hosted", "validate recipe/a.yaml"),
    ],
)
def test_the_launchers_options(given, expected):
    assert " ".join(compat.launch_arguments(given.split())) == expected


@pytest.mark.parametrize(
    "given,expected",
    [
        ("-m self-hostd -c a.yaml", "--mode 'self-hostd' is not known; did you mean 'self-hosted'?"),
        ("-m self-hosted", "the following arguments are required: -c/--train-config"),
        ("-m self-hosted -c a.yaml -r -t ../x", "--tag '../x' names the run's folder in runs/"),
        ("-c a.yaml", "the following arguments are required: -m/--mode"),
        ("-m self-hosted -c a.yaml --runn", "unrecognized arguments: --runn"),
    ],
)
def test_wrong_options_of_the_launcher(given, expected):
    with pytest.raises(ConfigError) as e:
        compat.launch_arguments(given.split())
    assert expected in str(e.value)


@pytest.fixture()
def workspace(tmp_path, monkeypatch, tiny):
    """A recipe in NexRL's layout that can be checked."""
    folder = tmp_path / "recipe" / "my_task"
    folder.mkdir(parents=True)
    (folder / "my_task.yaml").write_text(f"model: {{path: {tiny('qwen2', kind='char', chat=False)}}}\ndata: {{data_files: rows.jsonl, batch_size: 2}}\nrollout_worker: {{max_tokens: 3, evaluator_module_path: 'evaluator.py:reward'}}\ntrainer: {{total_train_steps: 1}}\ntrajectory_pool: {{group_size: 2}}\n")
    (folder / "evaluator.py").write_text("from nexrl.rollout_worker import EvaluationRunResult\n\ndef reward(row, answer):\n    return EvaluationRunResult(reward=len(answer) / 10)\n")
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_validator_checks_it(workspace, capsys):
    from nexrl_sdk import validator

    with pytest.raises(SystemExit) as e:
        validator.main(["recipe=my_task/my_task", "seed=2"])
    assert e.value.code == 0 and "no errors; run it: nexrl run recipe/my_task/my_task.yaml" in capsys.readouterr().out


def test_a_recipe_by_its_name(workspace):
    assert compat.recipe_arguments(["recipe=my_task/my_task", "seed=1"]) == ["recipe/my_task/my_task.yaml", "seed=1"]
    assert compat.recipe_arguments(["seed=1", "recipe=recipe/my_task/my_task.yaml"]) == ["recipe/my_task/my_task.yaml", "seed=1"]
    for given, expected in ((["recipe=my_task/my_tsk"], "did you mean 'my_task/my_task'?"), (["recipe=a", "recipe=b"], "2 arguments say recipe=")):
        with pytest.raises(ConfigError) as e:
            compat.recipe_arguments(given)
        assert expected in str(e.value)


def test_a_mode_that_is_not_the_recipes(workspace):
    with pytest.raises(ConfigError, match=r"the recipe's service.train_service.backend is 'local', which is of mode 'self-hosted'"):
        compat.translated(["-m", "training-service", "-c", "recipe/my_task/my_task.yaml", "-r"])
    assert compat.translated(["-m", "self-hosted", "-c", "recipe/my_task/my_task.yaml", "-r"]) == ["run", "recipe/my_task/my_task.yaml"]
    assert compat.translated(["report", "runs/a"]) == ["report", "runs/a"] and compat.translated([]) == []


@pytest.mark.timeout(120)
def test_the_documents_commands_in_processes_of_their_own(workspace):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command, code, said in (
        ("nexrl.validator recipe=my_task/my_tsk", 2, "did you mean 'my_task/my_task'?"),
        ("nexrl.main recipe=my_task/my_task trainer.total_train_stepz=2", 2, "did you mean 'total_train_steps'?"),
        ("nexrl_sdk.main seed=1", 2, "seed=1"),
        ("nexrl_sdk.launch.cli -m self-hostd -c recipe/my_task/my_task.yaml", 2, "did you mean 'self-hosted'?"),
    ):
        done = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True, env=env)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), (command, done.stdout, done.stderr)
