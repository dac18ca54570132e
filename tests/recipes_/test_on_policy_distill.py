"""The distillation recipe: rows, reward, both models, and a student that comes five times closer to its teacher."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from nexrl_sdk import Recipe, Trainer

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "on_policy_distill"


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("distill_task", RECIPE / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exact_reverse_kl(student, teacher, trajectories):
    """Mean over the student's tokens of the KL over the whole vocabulary, by transformers."""
    total, count = 0.0, 0
    with torch.no_grad():
        for t in trajectories:
            lp, lq = (torch.log_softmax(m(torch.tensor([t.tokens])).logits[0, :-1].double(), -1) for m in (student, teacher))
            mask = torch.tensor(t.loss_mask[1:]).bool()
            total, count = total + float((lp.exp() * (lp - lq)).sum(-1)[mask].sum()), count + int(mask.sum())
    return total / count


def test_recipe_is_valid_and_rows_are_held_out(task):
    assert [f for f in Recipe.load(RECIPE).validate() if f.level == "error"] == []
    train, held_out = task.train_rows(), task.val_rows()
    after = dict(zip("abcdefghij", "bcdefghija"))
    assert all(r["answer"] == "".join(after[c] for c in r["prompt"][:-1]) for r in train + held_out)
    prompts = [r["prompt"] for r in train + held_out]
    assert len(set(prompts)) == len(prompts) and len(held_out) == 256
    assert task.reward(held_out[0], held_out[0]["answer"]) == 1.0 and task.reward(held_out[0], "") == 0.0


@pytest.mark.timeout(180)
def test_reverse_kl_falls_five_times(tmp_path, monkeypatch):
    """Measured by the trainer on held-out prompts, and over the whole vocabulary by transformers on what the student wrote."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("NEXRL_CACHE", str(tmp_path / "cache"))
    recipe = Recipe.load(RECIPE, ["validate.max_samples=64", "logger.backend=[file]"])
    teacher = AutoModelForCausalLM.from_pretrained(recipe.service_model("teacher")).eval()
    with Trainer(recipe, run=tmp_path / "run") as trainer:
        before, student = trainer.evaluate(), AutoModelForCausalLM.from_pretrained(recipe.model_path()).eval()
        start = exact_reverse_kl(student, teacher, before.rollouts)
        trainer.fit(progress=False)
        after = trainer.evaluate()
        student = AutoModelForCausalLM.from_pretrained(trainer.backend.export(tmp_path / "out")).eval()
        end = exact_reverse_kl(student, teacher, after.rollouts)
    assert before.metrics["val/distill/reverse_kl"] == pytest.approx(start, rel=0.25)
    assert end < start / 5 and after.metrics["val/distill/reverse_kl"] < before.metrics["val/distill/reverse_kl"] / 5
    assert after.metrics["val/reward/mean"] > 0.8 > 0.4 > before.metrics["val/reward/mean"]
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("val/distill/reverse_kl" in line for line in logged) and all("distill/reverse_kl" in line for line in logged if "loss" in line)
