"""Recipes that no one should write: each is refused at once, in words, and by its key."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nexrl_sdk import Recipe
from nexrl_sdk.recipe.compose import MOST_VALUES
from nexrl_sdk.types import ConfigError

GOOD = "model: {path: m}\ndata: {data_files: d.jsonl}\nrollout_worker: {evaluator_module_path: 'e.py:f'}\n"
BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"{y}: &{y} [{','.join([f'*{x}'] * 10)}]\n" for x, y in zip("abcdefgh", "bcdefghi"))


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    (folder / "recipe.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    return Recipe.load(folder / "recipe.yaml", overrides)


@pytest.mark.parametrize(
    "text,says",
    [
        (BOMB + GOOD, f"more than {MOST_VALUES} values"),
        ("a: &a {b: *a}\n" + GOOD, "&a holds itself"),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n" + GOOD, "nested more than"),
        ("seed: !!python/object/apply:os.system ['exit 3']\n" + GOOD, "not valid YAML"),
        ("3: 4\n" + GOOD, "3: a key must be text, not int"),
        ("on: 4\n" + GOOD, "True: a key must be text, not bool"),
        ("project_name: ???\n" + GOOD, r"project_name: '\?\?\?' stands for a value that is still to be given.*recipe.yaml"),
        ('project_name: "\\uD800"\n' + GOOD, "project_name: its text holds half a character"),
        ('model: {path: "a\\0b"}\n', r"model.path: its text holds the character U\+0000"),
        ("weight: [1]\n" + GOOD, "weight: must be a section of keys, not a list"),
        ("trainer: {optim: [1]}\n" + GOOD, "trainer.optim: must be a section of keys, not a list"),
        ("validate: {ks: []}\n" + GOOD, "validate.ks: must have 1 entries"),
        ("seed: 99999999999999999999999\n" + GOOD, "seed: must be less than"),
        ("model: {path: m, threads: 1000000}\n", "model.threads: must be .*1024"),
        ("experiment_name: ../../x\n" + GOOD, "experiment_name: '../../x' cannot name a folder"),
        ("experiment_name: ''\n" + GOOD, "experiment_name: '' cannot name a folder"),
        (f"experiment_name: {'x' * 5000}\n" + GOOD, "experiment_name: 'xxx"),
        ("defaults: [recipe]\n" + GOOD, "this file itself"),
        ("algorithm: {correction_cap: 0.5}\n" + GOOD, "algorithm.correction_cap: must be 1 or more, not 0.5"),
        ("service: {train_service: {backend: http, world_size: 10000000000000000000000}}\n" + GOOD, "service.train_service.world_size: must be 4096 or less"),
        ("service: {train_service: {identifier: ../x}}\n" + GOOD, "service.train_service.identifier: must be a name of letters"),
        ("service: {train_service: {identifier: ''}}\n" + GOOD, "service.train_service.identifier: must be a name of letters"),
        ("service: {train_service: {backend: http}, inference_service: {backend: local}}\n" + GOOD, "service.inference_service.backend: 'local' samples from the weights of this process"),
        *(
            (f"service: {{train_service: {{backend: http, url: {url!r}}}}}\n" + GOOD, f"service.train_service.url: .*{says}")
            for url, says in {"garbage": "no address", "http://": "no address", "http://h:99999": "out of range", "http://h:x": "no address", "http://[::1": "Invalid IPv6", "ftp://h": "no address", "http://a b": "no address", "": "no address", "http://u:p@h": "without a user", "http://h?token=x": "without a user"}.items()
        ),
        ("service: {inference_service: {backend: openai, url: 'mock://x'}}\n" + GOOD, "service.inference_service.url: 'mock://x' is no address"),
    ],
)
def test_refused_in_words(text, says, tmp_path):
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, text)
    assert time.perf_counter() - began < 20 and len(str(caught.value)) < 1000


def test_an_address_that_is_refused_is_said_without_its_key(tmp_path):
    for url in ("http://u:opensesame@h", "http://h?token=opensesame", "http://u:opensesame@h:99999", "http://u:opensesame@[::1"):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, f"service: {{train_service: {{backend: http, url: '{url}'}}}}\n" + GOOD)
        assert "opensesame" not in str(caught.value)


def test_a_value_that_is_still_to_be_given_can_be_given(tmp_path):
    assert load(tmp_path, "project_name: ???\n" + GOOD, "project_name=mine").config.project_name == "mine"


def test_anchors_are_welcome(tmp_path):
    recipe = load(tmp_path, "data: &d {data_files: d.jsonl, shuffle: false}\nvalidate: {data: *d}\nmodel: {path: m}\nrollout_worker: {evaluator_module_path: 'e.py:f', stop: [\"\\0\"]}\n")
    assert recipe.config.validate.data.data_files == "d.jsonl" and list(recipe.config.rollout_worker.stop) == ["\0"]


def test_a_folder_of_ones_own_may_lie_anywhere(tmp_path):
    assert load(tmp_path, f"experiment_name: a/b\noutput_dir: {tmp_path / '..' / 'x'}\n" + GOOD).output_dir() == (tmp_path.parent / "x").resolve()
