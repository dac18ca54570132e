"""Rows and model folders that no one should hand over: refused in words, and never half used."""

from __future__ import annotations

import json

import pytest

from nexrl_sdk import MockBackend, Recipe, Trainer
from nexrl_sdk.engine.model import load_model
from nexrl_sdk.launch.cli import main, message_for
from nexrl_sdk.rollout.data import load_rows
from nexrl_sdk.types import ConfigError, DataError


@pytest.mark.parametrize("name,text,says", [("d.json", "[" * 100_000, "nested too deep"), ("d.jsonl", "[" * 100_000, "line 1: its values are nested"), ("b.jsonl", '{"x": ' + "9" * 5000 + "}\n", "thousands of digits")])
def test_files_that_json_cannot_hold(name, text, says, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says):
        load_rows(tmp_path / name)


def test_rows_that_hold_themselves_or_half_characters_are_trained_on():
    ring: dict = {"prompt": "\ud800"}
    ring["ring"] = ring
    with Trainer(Recipe(model="mock", data={"rows": [ring] * 4, "batch_size": 2}, evaluator=lambda row, answer: float(len(answer)), rollout_worker={"max_tokens": 4}, logger={"backend": []}), MockBackend()) as trainer:
        rollouts = trainer.step().rollouts
        assert len(rollouts.to_polars()) == len(rollouts) and rollouts._repr_html_()


def test_rows_that_are_none():
    with pytest.raises(ConfigError, match=r"data\.rows: rows must be"):
        Recipe(model="mock", data={"rows": None}, evaluator=lambda row, answer: 1.0)


@pytest.mark.parametrize("file,change", [("model.safetensors", lambda b: b[:500]), ("model.safetensors", lambda b: b""), ("config.json", lambda b: b"{"), ("config.json", lambda b: b.replace(b'"hidden_size": 32', b'"hidden_size": 64'))])
def test_damaged_model_folders(file, change, tiny, tmp_path):
    import shutil

    folder = shutil.copytree(tiny("qwen2"), tmp_path / "m")
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(ConfigError, match=r"damaged|could not be loaded"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_validate_reads_a_damaged_config(text, tiny, tmp_path):
    import shutil

    folder = shutil.copytree(tiny("qwen2"), tmp_path / "m")
    (folder / "config.json").write_text(text)
    found = Recipe(model=str(folder), data=[{"prompt": "a"}], evaluator=lambda row, answer: 1.0).validate()
    assert any(f.level == "error" and "config.json is damaged" in f.message for f in found)


def test_messages_of_the_command_line_are_short():
    assert len(message_for(ConfigError("x" * 10**6))) < 4200 and len(message_for(RuntimeError("x" * 10**6))) < 4200
    said = message_for(OSError(36, "File name too long", "y" * 5000))
    assert said.startswith("error: File name too long: yyy") and len(said) < 500


@pytest.mark.parametrize("raised", ["SystemExit(7)", "GeneratorExit()", "type('Odd', (BaseException,), {})()"])
def test_whatever_a_users_file_raises_is_a_message(raised, tmp_path, capsys):
    (tmp_path / "task.py").write_text(f"def rows():\n    raise {raised}\n\ndef reward(row, answer):\n    return 1.0\n")
    (tmp_path / "recipe.yaml").write_text(json.dumps({"model": {"path": "m"}, "data": {"source": "task.py:rows"}, "rollout_worker": {"evaluator_module_path": "task.py:reward"}}))
    with pytest.raises(SystemExit) as left:
        main(["validate", str(tmp_path)])
    shown = capsys.readouterr()
    assert left.value.code and "Traceback" not in shown.err + shown.out and "error" in shown.err + shown.out
