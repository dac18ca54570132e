"""The pig latin recipe: words, answers, the judge, the model that is made, and what all weights and an adapter learn."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

import pytest
import torch

from nexrl_sdk import LocalBackend, Recipe, RemoteApiCrossEntropyTrainer, SelfHostedCrossEntropyTrainer, Trainer
from nexrl_sdk.engine.model import LoraConfig
from nexrl_sdk.trainer.base import trainer_class

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
RECIPE = RECIPES / "pig_latin"


@pytest.fixture()
def task():
    spec = importlib.util.spec_from_file_location("pig_latin_task", RECIPE / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The model of seed 0, made once."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("NEXRL_CACHE", os.environ.get("NEXRL_CACHE", str(tmp_path_factory.mktemp("cache"))))
        return Recipe.load(RECIPE).model_path()


@pytest.mark.parametrize(("word", "answer"), [("string", "ingstray"), ("pig", "igpay"), ("ark", "arkway"), ("chring", "ingchray"), ("oats", "oatsway"), ("latin", "atinlay")])
def test_pig_latin(task, word, answer):
    assert task.pig_latin(word) == answer and task.as_row(word) == {"prompt": f"{word}>", "answer": answer}
    assert task.exact({"answer": answer}, answer) == 1.0 and task.exact({"answer": answer}, answer[:-1]) == task.exact({"answer": answer}, "") == 0.0


def test_words_are_distinct_held_out_and_always_the_same(task):
    train, held_out = task.train_rows(), task.val_rows()
    prompts = [r["prompt"] for r in train + held_out]
    assert len(set(prompts)) == len(prompts) == 4608 and len(held_out) == 512
    words = [p[:-1] for p in prompts]
    assert all(3 <= len(w) <= 7 and len(set(w)) == len(w) and set(w) & set("aeiou") for w in words)
    assert 0.1 < sum(w[0] in "aeiou" for w in words) / len(words) < 0.3
    task.words.cache_clear()
    assert train == task.train_rows()


def test_the_warm_start_says_strings_again_and_no_pig_latin(task):
    ids, targets = task.warm_start_batch(256, random.Random(0))
    starts = []
    for row, target in zip(ids.tolist(), targets.tolist()):
        said = "".join(task.VOCABULARY[i] for i in row if i > 1)
        word, _, again = said.partition(">")
        assert sorted(again) == sorted(word) and again in word + word and len(set(word)) == len(word)
        assert [t for t in target if t >= 0] == [*map(task.VOCABULARY.index, again), 1]
        starts.append(word.index(again[0]) / (len(word) - 1))
    assert 0.4 < sum(starts) / len(starts) < 0.6, "from any letter on"


def test_tokenizer_and_model(task, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setitem(task.SETTINGS, "warm_start", {**task.SETTINGS["warm_start"], "steps": 2})
    rng = torch.random.get_rng_state()
    folder = task.build_model(3, tmp_path)
    assert torch.equal(rng, torch.random.get_rng_state()), "the caller's random numbers are left alone"
    assert task.build_model(3, tmp_path) == folder and task.build_model(4, tmp_path) != folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 7e4 < model.num_parameters() < 9e4 and tokenizer.decode(tokenizer("string>").input_ids) == "string>"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


@pytest.mark.parametrize("name", ["recipe", "tinker", "weaver"])
@pytest.mark.parametrize("folder", ["pig_latin", "reverse"])
def test_the_recipes_are_valid(folder, name):
    recipe = Recipe.load(RECIPES / folder / f"{name}.yaml")
    assert [f for f in recipe.validate() if f.level == "error" and "not installed" not in f.message] == []
    kind = {"pig_latin": "CrossEntropyTrainer", "reverse": "GrpoTrainer"}[folder]
    assert trainer_class(recipe).__name__ == ("SelfHosted" if name == "recipe" else "RemoteApi") + kind
    lora = recipe.config.model.lora
    assert lora is None if name == "recipe" else (lora.rank, lora.alpha, recipe.config.service.inference_service.backend) == (32, 32.0, name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["recipe", "tinker"])
def test_held_out_words_are_learned(place, made):
    """All weights by the local recipe, and an adapter as the APIs train it by Tinker's, in this process: 0 of 128 before, and more than nine of ten after a fourth of the steps."""
    recipe = Recipe.load(RECIPE / f"{place}.yaml", ["validate.max_samples=128", "logger.backend=[file]", "trainer.save_freq=0"])
    lora = None if place == "recipe" else LoraConfig(rank=recipe.config.model.lora.rank, alpha=32.0, train_unembed=True)
    with LocalBackend(made, dtype="float32", lora=lora) as backend, Trainer(recipe, backend) as trainer:
        assert type(trainer) is (SelfHostedCrossEntropyTrainer if place == "recipe" else RemoteApiCrossEntropyTrainer)
        assert trainer.evaluate().metrics["val/reward/mean"] == 0.0
        trainer.fit(60, progress=False)
        after = trainer.evaluate()
    assert after.metrics["val/reward/mean"] > 0.9
    assert next(t for t in after.rollouts if t.reward == 1.0).response in {r["answer"] for r in recipe.rows(validation=True)}
