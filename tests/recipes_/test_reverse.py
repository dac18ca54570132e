"""The reversal task: rows, reward, tokenizer, and the model that is made on the spot."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from nexrl_sdk import Recipe

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "reverse"


@pytest.fixture()
def task(monkeypatch):
    """task.py with a warm start of a few steps."""
    spec = importlib.util.spec_from_file_location("reverse_task", RECIPE / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(module.SETTINGS, "warm_start", {**module.SETTINGS["warm_start"], "steps": 3})
    return module


def digest(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_recipe_is_valid():
    assert [f for f in Recipe.load(RECIPE).validate() if f.level == "error"] == []


def test_rows_are_right_distinct_and_held_out(task):
    train, held_out = task.train_rows(), task.val_rows()
    assert all(r["prompt"] == r["answer"][::-1] + ">" and len(r["answer"]) == 5 and set(r["answer"]) <= set("abcdefghij") for r in train + held_out)
    prompts = [r["prompt"] for r in train + held_out]
    assert len(set(prompts)) == len(prompts) and len(held_out) == 512
    assert train == task.train_rows()


def test_warm_start_never_sees_held_out_strings(task):
    seen = []
    real = task.warm_start_batch
    task.warm_start_batch = lambda letters, *rest: (seen.append(letters), real(letters, *rest))[1]
    try:
        task.warm_start(0)
    finally:
        task.warm_start_batch = real
    strings = {"".join(task.VOCABULARY[i] for i in row) for row in seen[0].tolist()}
    assert len(strings) == 100_000 - 512 and not strings & {r["answer"][::-1] for r in task.val_rows()}


@pytest.mark.parametrize(
    ("answer", "value"),
    [("edbac", 1.0), ("", 0.0), ("cabde", 0.2), ("ed", 0.4), ("edbacc", 5 / 6), ("edbacedb", 5 / 8), ("xdbac", 0.8), ("dbac", 0.0)],
)
def test_reward(task, answer, value):
    assert task.reward({"answer": "edbac"}, answer) == pytest.approx(value)


def test_tokenizer_spells_every_prompt_in_single_tokens(task):
    tokenizer = task.build_tokenizer()
    ids = tokenizer("cabde>").input_ids
    assert len(ids) == 6 and tokenizer.decode(ids) == "cabde>" and len(tokenizer) == 64 == len(set(task.VOCABULARY))
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == "cabde>"
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_mixture_holds_what_it_says(task):
    letters = torch.tensor([[task.VOCABULARY.index(c) for c in s] for s in task.strings()[:5000]])
    ids = task.warm_start_batch(letters, 20_000, 0.3, 0.5, torch.Generator().manual_seed(0))
    prompt, mark, answer, end = ids[:, :5], ids[:, 5], ids[:, 6:11], ids[:, 11]
    assert (mark == task.VOCABULARY.index(">")).all() and (end == task.VOCABULARY.index("<eos>")).all()
    assert (prompt.sort(1).values == answer.sort(1).values).all()
    chance = sum((s[::-1] == s) for s in task.strings()) / 100_000
    assert (answer == prompt.flip(1)).all(1).float().mean().item() == pytest.approx(0.3 + 0.35 * chance + 0.35 / 120, abs=0.02)
    assert (answer == prompt).all(1).float().mean().item() == pytest.approx(0.35 + 0.3 * chance + 0.35 / 120, abs=0.02)


def test_model_is_made_once_for_a_seed_and_its_settings(task, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = torch.random.get_rng_state()
    first = task.build_model(0, tmp_path)
    assert torch.equal(rng, torch.random.get_rng_state()), "the caller's random numbers are left alone"
    before = os.stat(first / "model.safetensors").st_mtime_ns
    assert task.build_model(0, tmp_path) == first and os.stat(first / "model.safetensors").st_mtime_ns == before
    other = task.build_model(1, tmp_path)
    again = task.build_model(0, tmp_path / "elsewhere")
    assert digest(again) == digest(first) != digest(other)
    name = task.recipe_of(0)
    monkeypatch.setitem(task.SETTINGS["warm_start"], "right", 0.4)
    assert task.recipe_of(0) != name
    model = AutoModelForCausalLM.from_pretrained(first)
    assert 0.49e6 < model.num_parameters() < 0.51e6 and model.config.model_type == "qwen2"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(first)("ab>").input_ids == task.build_tokenizer()("ab>").input_ids
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_of_two_builders_at_once_the_first_one_stays(task, tmp_path, monkeypatch):
    made, real = [], task.warm_start

    def overtaken(seed):
        monkeypatch.setattr(task, "warm_start", real)
        made.append((task.build_model(seed, tmp_path), digest(task.build_model(seed, tmp_path))))
        return real(seed)

    monkeypatch.setattr(task, "recipe_of", lambda seed: "x")
    monkeypatch.setattr(task, "warm_start", overtaken)
    folder = task.build_model(0, tmp_path)
    assert [(folder, digest(folder))] == made and list(tmp_path.iterdir()) == [folder]


def test_a_failed_build_leaves_nothing(task, tmp_path, monkeypatch):
    monkeypatch.setattr(task, "build_tokenizer", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    monkeypatch.setattr(task, "recipe_of", lambda seed: "x")
    with pytest.raises(OSError, match="No space left"):
        task.build_model(0, tmp_path)
    assert list(tmp_path.iterdir()) == []
