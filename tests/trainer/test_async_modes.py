"""Rollouts beside training: the same numbers where nothing may run ahead, the bound kept where it may, every prompt once."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from async_runs import GROUP, PROMPTS, STEPS, make_recipe, make_trainer

from nexrl_sdk import Run

pytestmark = pytest.mark.timeout(120)
CLOCKS = ("time/", "tokens/per_second", "staleness/", "pool/")


@pytest.fixture(scope="module")
def model(tiny):
    return str(tiny("qwen2", kind="char", chat=False))


def numbers(trainer):
    return [{k: v for k, v in line.items() if not k.startswith(CLOCKS)} for line in trainer.history]


def tokens(run):
    return [[(t.run_id, t.tokens, t.logprobs, t.reward, t.weight_versions) for t in run.rollouts(s)] for s in range(1, run.last_step + 1)]


def weights(trainer):
    state, _ = trainer.backend.learner.state_dict()
    return {k: v.clone() for k, v in state.items()}


def test_a_bound_of_zero_is_sync_to_the_last_bit(model, tmp_path):
    found = []
    for mode in ("sync", "batch-async"):
        run = Run.create(tmp_path / mode, recipe := make_recipe(model, mode, threshold=0))
        with make_trainer(recipe, run) as trainer:
            trainer.fit(2, progress=False)
            trainer.step()
            trainer.fit(progress=False)
            found.append((numbers(trainer), tokens(run), weights(trainer)))
    (a, b) = found
    assert a[0] == b[0] and a[1] == b[1] and len(a[0]) == STEPS
    assert a[2].keys() == b[2].keys() and all((a[2][k] == b[2][k]).all() for k in a[2])


@pytest.mark.parametrize("mode,threshold", [("batch-async", 1), ("batch-async", 3), ("fully-async", 0)])
def test_every_prompt_is_trained_once_and_none_is_too_old(mode, threshold, model, tmp_path):
    run = Run.create(tmp_path / "run", recipe := make_recipe(model, mode, threshold))
    with make_trainer(recipe, run) as trainer:
        order = [f"0:{i}" for i in trainer.stream.order(0)]
        trainer.fit(progress=False)
        history = trainer.history
    ledger = run.ledger()
    trained = [key for line in ledger for key in line["trained"]]
    assert sorted(trained) == sorted(order[: STEPS * PROMPTS]) and [line["step"] for line in ledger] == list(range(1, STEPS + 1))
    for step, line in enumerate(ledger, start=1):
        rollouts = run.rollouts(step)
        assert list(rollouts.groups()) == line["trained"] and all(len(g) == GROUP for g in rollouts.groups().values())
        behind = [step - 1 - min(t.weight_versions) for t in rollouts]
        assert history[step - 1]["staleness/max"] == max(behind) and (mode == "fully-async" or max(behind) <= threshold)
        assert "policy/mismatch_kl" in history[step - 1] and "policy/correction_mean" in history[step - 1]
    assert any(h["staleness/max"] for h in history), "rollouts ran ahead"


def test_an_adapter_learns_while_it_samples(model, tmp_path):
    run = Run.create(tmp_path / "run", recipe := make_recipe({"path": model, "lora": {"rank": 4}}, "fully-async"))
    with make_trainer(recipe, run) as trainer:
        trainer.fit(4, progress=False)
        assert sorted(k for line in run.ledger() for k in line["trained"]) == sorted(f"0:{i}" for i in trainer.stream.order(0)[: 4 * PROMPTS])
        assert all(h["policy/correction_mean"] > 0 and h["grad_norm"] >= 0 for h in trainer.history)
