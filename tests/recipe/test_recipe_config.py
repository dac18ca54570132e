"""Recipes from cells, files and overrides: equal where they say the same, refused where they cannot be honoured."""

from __future__ import annotations

import string
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nexrl_sdk import Recipe
from nexrl_sdk.recipe.config import mask
from nexrl_sdk.recipe.schema import defaults
from nexrl_sdk.types import ConfigError

ROWS = [{"prompt": "ab>", "answer": "ba"}, {"prompt": "cd>", "answer": "dc"}]


def exact(row, answer):
    return float(answer == row["answer"])


def cell(**sections):
    return Recipe(**{"model": "models/tiny", "data": ROWS, "evaluator": exact, **sections})


@pytest.fixture
def task(tmp_path):
    """The same recipe as `cell()`, as files."""
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{r["prompt"]}", "answer": "{r["answer"]}"}}\n' for r in ROWS))
    (folder / "task.py").write_text('"""A task."""\nimport math\n\n\ndef exact(row, answer):\n    # all or nothing\n    return float(answer == row["answer"])\n')
    (folder / "task.yaml").write_text("model: {path: models/tiny}\ndata: {data_files: rows.jsonl}\nrollout_worker: {evaluator_module_path: 'task.py:exact'}\n")
    return folder


def complaint(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as e:
        function(*args, **kwargs)
    return str(e.value)


def test_cell_and_file_are_equal(task):
    loaded = Recipe.load(task)
    assert loaded == cell() and loaded.fingerprint() == cell().fingerprint()
    assert Recipe.load(task / "task.yaml") == Recipe.load(task / "task") == loaded
    assert loaded != Recipe.load(task, ["seed=1"])


def test_where_files_lie_does_not_matter_and_what_they_hold_does(task, tmp_path):
    before = Recipe.load(task).fingerprint()
    moved = task.rename(tmp_path / "elsewhere")
    (moved / "task.yaml").rename(moved / "elsewhere.yaml")
    assert Recipe.load(moved).fingerprint() == before
    (moved / "task.py").write_text((moved / "task.py").read_text().replace("all or nothing", "a comment") + "\n\nUNUSED = 3\n")
    assert Recipe.load(moved).fingerprint() == before
    (moved / "task.py").write_text((moved / "task.py").read_text().replace("float(", "2 * float("))
    assert Recipe.load(moved).fingerprint() != before
    (moved / "task.py").write_text((moved / "task.py").read_text().replace("2 * float(", "float("))
    (moved / "rows.jsonl").write_text((moved / "rows.jsonl").read_text().replace("ba", "bb"))
    assert Recipe.load(moved).fingerprint() != before


def test_short_forms_say_the_same(task):
    same = [
        cell(), cell(data=pd.DataFrame(ROWS).to_dict("records")), cell(data={"rows": ROWS}), cell(data={"data_files": ROWS}), cell(algorithm="grpo"), cell(model={"path": "models/tiny"}), cell(model=Path("models/tiny")),
        Recipe(model="models/tiny", data="rows.jsonl", evaluator="task.py:exact", base_dir=task), Recipe(model="models/tiny", data=["rows.jsonl"], evaluator="task.py:exact", base_dir=task),
        Recipe.from_dict({"model": {"path": "models/tiny"}, "data": {"data_files": "rows.jsonl"}, "rollout_worker": {"evaluator_module_path": "task.py:exact"}}, base_dir=task),
    ]  # fmt: skip
    assert len({r.fingerprint() for r in same[:-2]}) == 1
    assert same[-2].config.data.data_files == ["rows.jsonl"]
    assert cell(data="hf:openai/gsm8k").config.data.hub == "openai/gsm8k"
    assert cell(data="task.py:rows").config.data.source == "task.py:rows"
    assert cell(validate=ROWS).has_validation() and not cell().has_validation()


def test_reads_attributes_and_get():
    recipe = cell(trainer={"optim": {"lr": 5e-4}})
    assert recipe.config.trainer.optim.lr == 5e-4
    assert recipe.config.algorithm.get("my_param", 0.5) == 0.5
    with pytest.raises(Exception, match=r"read.?only"):
        recipe.config.seed = 3


@pytest.mark.parametrize(
    "sections,expected",
    [
        ({"trainer": {"optim": {"lrr": 1e-4}}}, "trainer.optim.lrr: unknown key; did you mean 'lr'?"),
        ({"trainr": {}}, "trainr: unknown key; did you mean 'trainer'?"),
        ({"learning_rate": 1e-4}, "learning_rate: unknown key; did you mean trainer.optim.lr?"),
        ({"algorithm": {"my_param": 2}}, "algorithm.my_param: unknown key"),
        ({"algorithm": {"my_param": 2}}, "pass trainer_class= to Recipe"),
        ({"algorithm": "grppo"}, "algorithm.type: 'grppo' is not known; did you mean 'grpo'?"),
        ({"trainer": {"optim": {"lr": 0.0}}}, "trainer.optim.lr: must be greater than 0, not 0.0"),
        ({"trainer": {"optim": {"lr": "1e-4"}}}, "trainer.optim.lr: must be a number, not '1e-4'"),
        ({"trajectory_pool": {"group_size": 0}}, "trajectory_pool.group_size: must be 1 or more, not 0"),
        ({"trainer": {"total_train_steps": 2.5}}, "trainer.total_train_steps: must be a whole number, not 2.5"),
        ({"trainer": {"total_train_steps": True}}, "trainer.total_train_steps: must be a whole number, not True"),
        ({"data": {"rows": ROWS, "shuffle": "yes"}}, "data.shuffle: must be true or false, not 'yes'"),
        ({"rollout_worker": {"top_p": 0.0}}, "rollout_worker.top_p: must be greater than 0, not 0.0"),
        ({"trainer": {"optim": {"betas": [0.9]}}}, "trainer.optim.betas: must have 2 entries"),
        ({"trainer": {"optim": {"lr": float("nan")}}}, "trainer.optim.lr: must be"),
        ({"model": {"path": "m", "threads": 0}}, "model.threads: must be 'auto' or 1 or more, not 0"),
        ({"model": {"path": "m", "lora": {"rnk": 4}}}, "model.lora.rnk: unknown key; did you mean 'rank'?"),
        ({"trainer": 3}, "trainer: must be a section of keys, not 3"),
        ({"logger": {"backend": ["wandbb"]}}, "'wandbb' is not known; did you mean 'wandb'?"),
        ({"trajectory_pool": {"batch_size": 30}}, "30 trajectories a step are not data.batch_size x trajectory_pool.group_size = 16 x 8 = 128"),
        ({"seed": cell}, "cell cannot be a value of a recipe"),
    ],
)
def test_refusals_name_the_key_the_value_and_what_is_valid(sections, expected):
    assert expected in complaint(cell, **sections)


def test_missing_parts_are_named():
    message = complaint(Recipe)
    assert all(key in message for key in ("model.path: missing", "data: missing", "rollout_worker.evaluator_module_path: missing"))
    assert Recipe(model="m", data=ROWS, algorithm="cross_entropy").evaluator() is None


def test_errors_name_the_file_and_the_override(task):
    (task / "task.yaml").write_text((task / "task.yaml").read_text() + "trainer: {optim: {lrr: 1.0e-4}}\n")
    message = complaint(Recipe.load, task, ["seed=-1"])
    assert "lrr: unknown key; did you mean 'lr'?" in message and f"(in {task / 'task.yaml'})" in message
    assert "seed: must be 0 or more, not -1 (in the override 'seed=-1')" in message and message.startswith("2 problems")


@pytest.mark.parametrize("text,expected", [("model: [", "is not valid YAML"), ("- a\n- b\n", "must hold sections"), ("seed: 1\nseed: 2\n", "uplicate")])
def test_broken_files(text, expected, task):
    (task / "task.yaml").write_text(text)
    assert expected in complaint(Recipe.load, task)


def test_missing_files_name_the_nearest(task):
    assert "did you mean 'task.yaml'?" in complaint(Recipe.load, task / "tusk.yaml")
    assert "did you mean 'task'?" in complaint(Recipe.load, task.parent / "tasks")
    (task.parent / "empty").mkdir()
    assert "holds no recipe.yaml and no empty.yaml" in complaint(Recipe.load, task.parent / "empty")


def test_own_keys_where_an_own_class_reads_them(task):
    (task / "mine.py").write_text("class MyTrainer:\n    pass\n\n\nclass MyWorker:\n    pass\n")
    recipe = Recipe.load(task, ["trainer.custom_trainer_module_path=mine.py", "trainer.custom_trainer_class_name=MyTrainer", "+algorithm.my_param=2", "algorithm.deep.er=[1,2]"])
    assert recipe.config.algorithm.my_param == 2 and recipe.config.algorithm.deep.er == [1, 2] and recipe.trainer_class().__name__ == "MyTrainer"
    assert "rollout_worker.my_param: unknown key" in complaint(recipe.override, "rollout_worker.my_param=1")
    again = recipe.override("algorithm.my_param=3")
    assert again.config.algorithm.my_param == 3 and again != recipe

    class Mine:
        pass

    assert cell(algorithm={"my_param": 2}, trainer_class=Mine).config.algorithm.my_param == 2
    assert cell(rollout_worker={"turns": 2}, worker_class="mine.py:MyWorker", base_dir=task).worker_class().__name__ == "MyWorker"
    message = complaint(Recipe.load(task, ["trainer.custom_trainer_module_path=mine.py"]).trainer_class)
    assert "the class name is missing" in message


def test_reference_errors_name_the_nearest(task):
    assert "tusk.py does not exist; did you mean 'task.py'?" in complaint(Recipe.load(task, ["rollout_worker.evaluator_module_path=tusk.py:exact"]).evaluator)
    assert "did you mean 'exact'?" in complaint(Recipe.load(task, ["rollout_worker.evaluator_module_path=task.py:exct"]).evaluator)
    assert "must be 'file.py:Name'" in complaint(Recipe.load(task, ["rollout_worker.evaluator_module_path=task.py"]).evaluator)
    assert "module 'tusk' cannot be imported" in complaint(Recipe.load(task, ["rollout_worker.evaluator_module_path=tusk:exact"]).evaluator)
    assert Recipe.load(task, ["rollout_worker.evaluator_module_path=math:sqrt"]).evaluator()(4) == 2
    (task / "task.py").write_text("import no_such_module\n")
    assert "cannot be imported: ModuleNotFoundError" in complaint(Recipe.load(task).evaluator)


def test_a_changed_file_is_imported_again_and_neighbours_can_be_imported(task):
    recipe = Recipe.load(task)
    assert recipe.evaluator()(ROWS[0], "ba") == 1.0
    (task / "helper.py").write_text("HALF = 0.5\n")
    (task / "task.py").write_text("from .helper import HALF\n\n\ndef exact(row, answer):\n    return HALF\n")
    assert recipe.evaluator()(ROWS[0], "ba") == 0.5


def test_a_list_of_rewards(task, tmp_path):
    def short(row, answer):
        return 1.0 / (1 + len(answer))

    recipe = cell(evaluator=[exact, short])
    recipe.save(tmp_path / "saved")
    again = Recipe.load(tmp_path / "saved")
    assert again == recipe and [f.__name__ for f in again.evaluator()] == ["exact", "short"]
    assert again.config.rollout_worker.evaluator_module_path == ["evaluator_1.py:exact", "evaluator_2.py:short"]
    again.save(tmp_path / "third")
    assert Recipe.load(tmp_path / "third") == recipe == cell(evaluator=["evaluator_1.py:exact", "evaluator_2.py:short"], base_dir=tmp_path / "saved")


def test_paths_are_relative_to_the_file_and_then_to_the_working_directory(task, monkeypatch):
    monkeypatch.chdir(task.parent)
    Path("here.jsonl").write_text("{}\n")
    recipe = Recipe.load(task)
    assert recipe.resolve_path("rows.jsonl") == task / "rows.jsonl" and recipe.resolve_path("here.jsonl") == task.parent / "here.jsonl"
    assert recipe.output_dir() == task.parent / "runs" / "run"


def test_builder_is_called_once_with_seed_and_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEXRL_CACHE", str(tmp_path / "cache"))
    calls = []

    def build(seed, cache_dir):
        calls.append((seed, cache_dir))
        (cache_dir / "m").mkdir(parents=True)
        (cache_dir / "m" / "config.json").write_text("{}")
        return cache_dir / "m"

    recipe = cell(model={"builder": build}, seed=5)
    assert recipe.model_path() == recipe.model_path() == str(tmp_path / "cache" / "m") and calls == [(5, tmp_path / "cache")]
    assert "holds no transformers model" in complaint(cell(model={"builder": lambda seed, cache_dir: tmp_path}).model_path)
    assert cell(model="org/name").model_path() == "org/name"
    assert "there is no folder" in complaint(cell(model="./nowhere").model_path)


def test_secrets_are_neither_shown_nor_stored(task, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hunter2hunter2")
    (task / "task.yaml").write_text((task / "task.yaml").read_text() + "logger: {backend: [file], wandb: {api_key: '${oc.env:MY_KEY}', project: p, anonymous_token: abcdef}}\n")
    recipe = Recipe.load(task)
    assert recipe.config.logger.wandb.api_key == "hunter2hunter2"
    texts = [recipe.to_yaml(), recipe.to_yaml(full=True), repr(recipe), str(recipe.canonical()), str(recipe.shown())]
    assert not any("hunter2" in t or "abcdef" in t for t in texts)
    assert "api_key: ${oc.env:MY_KEY}" in recipe.to_yaml() and "project: p" in recipe.to_yaml()
    assert "prompt_key: prompt" in recipe.to_yaml(full=True) and "max_tokens: 128" in recipe.to_yaml(full=True)


@pytest.mark.parametrize(
    "value,shown",
    [
        ({"headers": {"Authorization": "Bearer x"}}, {"headers": {"Authorization": "***"}}),
        ({"x-api-key": "x", "max_tokens": 3}, {"x-api-key": "***", "max_tokens": 3}),
        ({"args": ["--api-key", "x", "y", "--seed", "3", "--hf-token=x"]}, {"args": ["--api-key", "***", "***", "--seed", "3", "--hf-token=***"]}),
        ("https://user:x@host/a?b=1", "https://***@host/a?b=1"),
        ("http://x@host", "http://***@host"),
        ("s3://bucket/f?X-Amz-Signature=x&page=2#top", "s3://bucket/f?X-Amz-Signature=***&page=2#top"),
        ("hdfs://user@host/data", "hdfs://user@host/data"),
        ("Answer with http://user:x@host and nothing else.", "Answer with http://user:x@host and nothing else."),
    ],
)
def test_what_is_hidden(value, shown):
    assert mask(value) == shown


def test_a_key_that_was_written_out_is_absent_when_the_stored_recipe_is_read(task, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "hunter2hunter2")
    (task / "task.yaml").write_text(
        (task / "task.yaml").read_text()
        + "service: {train_service: {backend: http, url: 'HTTP://x:1', api_key: opensesame}, inference_service: {backend: vllm, args: [--hf-token, '${oc.env:MY_KEY}']}}\nlogger: {backend: [file], wandb: {api_key: opensesame, project: p}}\n"
    )
    recipe = Recipe.load(task)
    assert recipe.config.service.train_service.api_key == "opensesame" and recipe.config.service.train_service.url == "http://x:1"
    recipe.keep(tmp_path)
    text = (tmp_path / "recipe.yaml").read_text()
    assert "opensesame" not in text and "hunter2" not in text
    again = Recipe.load(tmp_path / "recipe.yaml").config
    assert again.service.train_service.api_key is None and again.logger.wandb == {"project": "p"}
    assert list(again.service.inference_service.args) == ["--hf-token", "hunter2hunter2"]


def test_objects_that_no_file_holds_are_equal_to_themselves_only():
    def make():
        return lambda row, answer: 1.0

    one = make()
    assert cell(evaluator=one) == cell(evaluator=one) and cell(evaluator=one) != cell(evaluator=make())
    assert cell(evaluator=one).fingerprint() == cell(evaluator=make()).fingerprint() != cell().fingerprint()


_names = st.text(string.ascii_letters + string.digits + " ${}\\'\"#:é\n>|&*-", max_size=24)


@settings(max_examples=15, deadline=None)
@given(_names, st.integers(1, 64), st.floats(1e-9, 1.0), st.sampled_from(["grpo", "rloo", "ppo"]))
def test_any_text_survives_yaml(prompt, group, lr, algorithm):
    recipe = cell(rollout_worker={"system_prompt": prompt.replace("${", "$ {")}, trajectory_pool={"group_size": group}, trainer={"optim": {"lr": lr}}, algorithm=algorithm)
    for full in (False, True):
        values = OmegaConf.to_container(OmegaConf.create(recipe.to_yaml(full)))
        again = Recipe.from_dict(values | {"data": {"data_files": "x.jsonl"}, "rollout_worker": values.get("rollout_worker", {}) | {"evaluator_module_path": "a.py:b"}})
        assert again.config.rollout_worker.system_prompt == recipe.config.rollout_worker.system_prompt
        assert again.config.trajectory_pool.group_size == group and float(again.config.trainer.optim.lr) == lr


def test_text_that_looks_like_an_interpolation_survives(tmp_path):
    recipe = cell(rollout_worker={"system_prompt": r"Cost: \${price} or \\\${x}"})
    assert recipe.config.rollout_worker.system_prompt.startswith("Cost: ${price}")
    recipe.save(tmp_path / "saved")
    again = Recipe.load(tmp_path / "saved")
    assert again.config.rollout_worker.system_prompt == recipe.config.rollout_worker.system_prompt and again == recipe


def test_every_default_is_accepted_when_written_out(task):
    recipe = Recipe.load(task)
    values = recipe.to_dict()
    assert Recipe.from_dict(values, base_dir=task) == recipe
    assert set(values) == set(defaults())


def test_import_is_light():
    code = "import sys; from nexrl_sdk import Recipe, Run; Recipe(model='m', data=[{'prompt': 'a'}], evaluator='a.py:b'); print([m for m in ('torch', 'transformers', 'polars', 'pandas', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_recipe_that_is_not_there_names_the_nearest(tmp_path, monkeypatch):
    """Beside the path, or in recipes/ where the path leads elsewhere."""
    (tmp_path / "recipes" / "reverse").mkdir(parents=True)
    (tmp_path / "recipes" / "reverse" / "recipe.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    for path, said in (("recipes/revers", "did you mean 'reverse'"), ("reverse", "did you mean 'recipes/reverse'"), ("recipies/reverse", "did you mean 'recipes/reverse'"), ("zzz", "there is no recipe zzz")):
        with pytest.raises(ConfigError, match=said):
            Recipe.load(path)


def test_distillation_needs_no_evaluator(tmp_path):
    recipe = Recipe(model="m", data=[{"prompt": "a"}], algorithm="opd", service={"teacher_service": {"path": "t"}})
    assert recipe.evaluator() is None
