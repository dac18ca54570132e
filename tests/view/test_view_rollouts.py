"""Rollouts and records: what is shown is what was sampled; whatever it holds, the page stays whole."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from view_oracle import ATTACKS, check

from nexrl_sdk.types import Completion, ConfigError, Datum, Trajectory
from nexrl_sdk.view import rollouts as r


class ByteTokenizer:
    """One byte, one token; 256 ends."""

    all_special_ids = (256,)

    def decode(self, ids, skip_special_tokens=False):
        return "<end>" if ids == [256] else bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


TOK = ByteTokenizer()


def trajectory(prompt="p>", response="ok", reward=1.0, group="0:0", logprob=-0.5, **more):
    p, a = list(prompt.encode("utf-8", "replace"))[:5000], [*list(response.encode("utf-8", "replace"))[:5000], 256]
    return Trajectory(
        tokens=p + a, loss_mask=[0] * len(p) + [1] * len(a), logprobs=[0.0] * len(p) + [logprob] * len(a), reward=reward, group_id=group, prompt=prompt, response=response, **more
    )  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=[str(i) for i in range(len(ATTACKS))])
def test_attacks_are_inert_in_every_view(attack):
    ok = trajectory(attack, attack, group=attack, run_id=attack, ground_truth=attack, data={"x": attack}, finish_reason=attack)
    bad = Trajectory(status="error", error=attack, prompt=attack, group_id=attack)
    step = SimpleNamespace(step=3, metrics={attack or "k": 1.0, "a/" + attack[:50]: math.nan}, rollouts=[ok, bad])
    trainer = SimpleNamespace(history=[{attack or "k": 1.0}], recipe=attack, backend=attack, run_folder=attack, step_count=1)
    views = [
        r.rollouts_html([ok, bad]), r.rollouts_html([ok, bad], TOK), r.trajectory_html(ok), r.trajectory_html(bad), r.trajectory_html(ok, TOK, by="advantage"),
        r.step_html(step), r.recipe_html({"experiment_name": attack, "model": {"path": attack}, attack or "k": {attack or "k": [attack]}}), r.trainer_html(trainer),
        r.backend_html(SimpleNamespace(card=lambda: {attack or "k": attack})), r.completion_html(Completion([1], [0.0], attack)),
    ]  # fmt: skip
    for view in views:
        check(str(view), limit=400_000)


def test_each_sampled_token_is_shown_once_in_order_with_its_probability():
    text = "naïve 日本 🙂\n\tdone"
    page = check(str(r.trajectory_html(trajectory("p>", text, logprob=math.log(0.25)), TOK)))
    spans = [a for t, a in page.tags if t == "i" and "id " in (a.get("title") or "")]
    ids = [int(i) for a in spans for i in a["title"].split("id ")[1].split()]
    assert ids == [*b"p>", *text.encode(), 256]
    assert [a.get("class") for a in spans[:2]] == ["d", "d"] and all("p 0.25" in a["title"] for a in spans[2:])
    shown = page.text.replace("↵", "").replace("⇥", "")
    assert f"p>{text}<end>" in shown
    assert spans[-1]["class"].split() == ["p3", "z"]


def test_multi_turn_masks_leave_what_the_tool_said_grey():
    t = Trajectory(tokens=[65, 66, 67, 68], loss_mask=[0, 1, 0, 1], logprobs=[0, -3.0, 0, -3.0])
    page = check(str(r.rollouts_html([t], TOK)))
    assert [a.get("class") for tag, a in page.tags if tag == "i" and "id 6" in (a.get("title") or "")][-3:] == ["p5", "d", "p5"]


def test_without_a_tokenizer_there_are_texts_or_ids():
    page = check(str(r.rollouts_html([trajectory(response="hello")])))
    assert "hello" in page.text and sum("p 0.607" == (a.get("title") or "") for _, a in page.tags) == 6
    page = check(str(r.rollouts_html([Trajectory(tokens=[7001, 7002], loss_mask=[0, 1], logprobs=[0, -1.0])])))
    assert "7001" in page.text and "7002" in page.text


def test_groups_rewards_and_advantages():
    found = [trajectory(reward=x, group=g) for g, x in (("a", 1.0), ("b", 0.5), ("a", 0.0), ("b", 0.5), ("c", -2.0))]
    page = check(str(r.rollouts_html(found, TOK)))
    assert "5 answers to 3 prompts" in page.text and "all equal" in page.text and "against the mean" in page.text
    assert r.leanings([r.record(found[0]), r.record(found[2])], known=False) == [0.5, -0.5]
    assert r.leanings([found[4]], known=False) == [None]  # alone, it is compared with nothing
    found[0].advantage = 0.7
    assert ">advantage<" in r.rollouts_html(found, TOK)
    assert r.advantage_of({"loss_mask": [0, 1, 1], "advantages": [9.0, 1.0, 2.0]}) == 1.5


def test_failures_are_shown_with_their_cause_and_never_as_zero():
    found = [trajectory(reward=0.0), Trajectory(status="failed", error="TimeoutError: 3 tries", group_id="0:0"), Trajectory(status="unscored", reward=None, group_id="0:0")]
    page = check(str(r.rollouts_html(found)))
    assert "TimeoutError: 3 tries" in page.text and "1 failed" in page.text and "1 unscored" in page.text and "2 without a reward" in page.text
    assert page.text.count("0.00") == 3  # of the whole, of the group, and of the one answer that was judged
    assert r.reward_of({"status": "error", "reward": 0.0}) is None and r.reward_of({"reward": math.nan}) is None


def test_nothing_is_also_a_view():
    for found in ([], (), [Trajectory()], [{}], [None], [{"tokens": None, "loss_mask": None, "logprobs": None, "reward": None}]):
        check(str(r.rollouts_html(found)))
    check(str(r.rollouts_html(t for t in [trajectory()])))
    check(str(r.trajectory_html({})))
    check(str(r.step_html(SimpleNamespace(step=1, metrics={}, rollouts=None))))
    check(str(r.recipe_html({})))
    check(str(r.completion_html(Completion([], []))))
    check(str(r.datum_html(Datum(np.zeros(0), np.zeros(0)))))


def test_millions_of_tokens_are_cut():
    n = 3_000_000
    t = {"tokens": np.arange(n) % 256, "loss_mask": np.r_[np.zeros(n // 2), np.ones(n - n // 2)], "logprobs": np.full(n, -1.0), "reward": 0.5, "prompt": None}
    page = check(str(r.trajectory_html(t, TOK)), limit=200_000)
    assert "1,499,200 more tokens" in page.text.replace("… ", "") and "1,499,800 more tokens before" in page.text.replace("… ", "")
    check(str(r.rollouts_html([t] * 8, TOK)), limit=400_000)
    many = [trajectory(response="x" * 2000, group=str(i // 8)) for i in range(4000)]
    page = check(str(r.rollouts_html(many, TOK)), limit=400_000)
    assert "4,000 answers to 500 prompts" in page.text and "… 494 more prompts" in page.text


hostile = st.recursive(st.none() | st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.text(max_size=8), lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=4), x, max_size=3), max_leaves=8)
FIELDS = ["tokens", "loss_mask", "logprobs", "reward", "advantage", "advantages", "status", "error", "prompt", "response", "group_id", "run_id", "finish_reason", "ground_truth", "is_val"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), hostile, max_size=15), max_size=4))
def test_records_from_a_file_may_hold_anything(found):
    for by in r.COLOR_BY:
        check(str(r.rollouts_html(found, TOK, by=by)))
    check(str(r.rollouts_html(found)))
    for t in found:
        check(str(r.trajectory_html(t)))


def test_a_tokenizer_that_raises_leaves_ids():
    class Broken:
        all_special_ids = None

        def decode(self, ids, **_):
            raise KeyError(ids)

        def convert_ids_to_tokens(self, i):
            raise KeyError(i)

    page = check(str(r.rollouts_html([trajectory()], Broken())))
    assert [a["title"].split("id ")[1] for t, a in page.tags if t == "i" and "id " in (a.get("title") or "")] == ["111", "107", "256"]


def test_sentencepiece_keeps_its_spaces():
    class Pieces:
        def decode(self, ids, skip_special_tokens=False):
            return "".join(["hello", "world"][i] for i in ids)

        def convert_ids_to_tokens(self, i):
            return ["hello", "▁world"][i]

    assert r.Pieces(Pieces()).split([0, 1]) == [("hello", 1), (" world", 1)]


def test_a_real_tokenizer_reads_back(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers
    from transformers import PreTrainedTokenizerFast

    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(["hello world 日本"], trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<eos>")
    text = "hello 日本 <eos>🙂é"
    ids = tok.encode(text)
    pieces = r.Pieces(tok).split(ids)
    assert "".join(p for p, _ in pieces) == text and sum(n for _, n in pieces) == len(ids)
    assert tok.eos_token_id in r.Pieces(tok).special


def test_colours_follow_the_scale():
    levels = [r.surprise(math.log(p)) for p in (1.0, 0.91, 0.89, 0.69, 0.49, 0.19, 0.049, 0.009)]
    assert levels == ["", "", "p1", "p2", "p3", "p4", "p5", "p6"]
    assert [r.surprise(x) for x in (None, math.nan, -math.inf, "a")] == ["x"] * 4
    with pytest.raises(ConfigError, match="did you mean 'logprob'"):
        r.rollouts_html([], by="logprobs")


def test_a_batch_shows_where_things_lie():
    class Batch:
        values: ClassVar = {
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]), "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
            "rollout_log_probs": torch.tensor([[0.0, float("nan")]], dtype=torch.bfloat16), "names": ["<b>"],
        }  # fmt: skip
        metadata: ClassVar = {"group_ids": ["<i>"]}

        def __len__(self):
            return 2

    page = check(str(r.batch_html(Batch())))
    bars = [(float(a["x"]), float(a["width"])) for t, a in page.tags if t == "rect"]
    assert bars == [(150.0, 150.0), (300.0, 300.0), (0.0, 300.0), (300.0, 150.0)]
    assert "2x4" in page.text and "bfloat16" in page.text and "1 not finite" in page.text


def test_a_datum_is_shifted():
    t = trajectory("ab", "cd")
    page = check(str(r.datum_html(t.to_datum(), TOK)))
    ids = [a["title"].removeprefix("id ") for tag, a in page.tags if tag == "i"]
    assert [(int(x), int(y)) for x, y in zip(ids[::2], ids[1::2])] == [(97, 98), (98, 99), (99, 100), (100, 256)]


@pytest.mark.parametrize("key", ["api_key", "apiKey", "API_KEY", "hf_token", "token", "password", "client_secret", "wandb.api_key", "access_token", "Authorization", "aws_secret_access_key"])
def test_secrets_stay_hidden(key):
    assert "s3cr3t" not in r.recipe_html({"logger": {key: "s3cr3t", "deep": [{key: "s3cr3t"}]}})


@pytest.mark.parametrize("key", ["max_tokens", "tokenizer", "micro_batch_tokens", "pad_token_id", "prompt_key", "keep_last"])
def test_what_only_sounds_secret_is_shown(key):
    assert "plain-value" in r.recipe_html({"x": {key: "plain-value"}})


def test_a_recipe_object_folds_its_defaults():
    class Recipe:
        live: ClassVar = {"evaluator": len}
        to_dict = lambda self: {"experiment_name": "e", "trainer": {"total_train_steps": 3, "save_freq": 20}}
        changed = lambda self: {"trainer": {"total_train_steps": 3}}
        fingerprint = lambda self: "ab12"

    page = check(str(r.recipe_html(Recipe())))
    front = page.text.split("every value")[0]
    assert "total_train_steps" in front and "save_freq" not in front and "save_freq" in page.text and "ab12" in front and "from this notebook" in page.text


def test_a_validation_is_named_as_such():
    page = check(str(r.step_html(SimpleNamespace(step=40, metrics={"val/reward/mean": 0.5, "val/pass@1": 0.2}, rollouts=[]))))
    assert "Validation after step 40" in page.text and "held-out reward" in page.text
