"""The calculator recipe: tools, questions, the judge, the model that is made, and what a few steps of reinforcement bring out."""

from __future__ import annotations

import json
import os
import random
import warnings
from pathlib import Path

import pytest
import torch

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.rollout.agent_config import AgentConfig
from nexrl_sdk.rollout.code import load_module
from nexrl_sdk.rollout.evaluator import NexAUEvaluationTarget

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "calculator"


@pytest.fixture()
def task():
    return load_module(RECIPE / "task.py")


@pytest.fixture()
def tools():
    return load_module(RECIPE / "tools.py")


# -- tools and questions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [("371*46", 17066), ("-3*(4+5)", -27), ("17//5", 3), ("17 % 5", 2), ("2--2", 4), ("999999*999999", 999998000001)],
)
def test_calculate(tools, expression, value):
    assert tools.calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [("", "no numbers"), ("tob*46", "no numbers"), ("__import__('os')", "no numbers"), ("1_000*2", "no numbers"), ("1.5*2", "no numbers"), ("1+" * 150 + "1", "no numbers"), ("9**9", "no value"), ("3/4", "no value"), ("5(3)", "no value"), ("3*", "no value"), ("007*2", "no value"), ("5//0", "no value"), ("5%0", "no value"), ("(" * 199 + "1", "no value"), ("9" * 13, "too large"), ("999999*9999999", "too large")],
)  # fmt: skip
def test_calculate_refuses_everything_else_in_few_words(tools, expression, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=rf"^{reason}$"):
            tools.calculate(expression)


def test_prices_are_always_the_same(tools):
    prices = dict(tools.price_list())
    tools.price_list.cache_clear()
    assert tools.price_list() == prices and len(prices) == 18 * 5 * 18 and all(100 <= p < 1000 and len(name) == 3 for name, p in prices.items())
    name = next(iter(prices))
    assert tools.price(name) == prices[name]
    with pytest.raises(ValueError, match=r"^no such item$"):
        tools.price("xxx")


def test_rows_are_right_distinct_and_their_first_factors_held_out(task, tools):
    train, held_out = task.train_rows(), task.val_rows()
    assert (len(train), len(held_out)) == (8192, 256) and train == task.train_rows()
    prompts = [r["prompt"] for r in train + held_out]
    assert len(set(prompts)) == len(prompts)
    for r in train + held_out:
        first, second = r["prompt"].split("*")
        factor = tools.price_list()[first] if first.isalpha() else int(first)
        assert r["answer"] == str(factor * int(second)) and r["calls"] == (2 if first.isalpha() else 1)
    assert not {r["prompt"].split("*")[0] for r in train} & {r["prompt"].split("*")[0] for r in held_out}
    assert 0.4 < sum(r["calls"] == 2 for r in held_out) / 256 < 0.6


def trace_of(*calls):
    return [{"trace": {"type": "AGENT", "children": [{"type": "LLM", "name": "model", "error": None}, *({"type": "TOOL", "name": name, "error": error} for name, error in calls)]}}]


@pytest.mark.parametrize(
    ("answer", "calls", "reward", "called"),
    [
        ("17066", [("calculate", None)], 1.0, 1.0),
        (" 17066", [("price", None), ("calculate", None)], 1.0, 1.0),
        ("17065", [("calculate", None)], 0.0, 1.0),
        ("17066", [], 0.0, 0.0),
        ("17066", [("price", None)], 0.0, 0.0),
        ("17066", [("calculate", "ValueError: no value")], 0.0, 0.0),
    ],
)
def test_only_what_was_calculated_counts(task, answer, calls, reward, called):
    found = task.Judge().evaluate({"answer": "17066", "calls": 2}, NexAUEvaluationTarget(answer, trace_of(*calls)))
    assert found.reward == reward and found.metrics == {"success": reward, "success_of_2": reward, "called": called}


# -- the model that is made -----------------------------------------------------------------------------------------


def messages_of(script):
    """A script's tokens as a chat, read independently of how it was written."""
    out = []
    for part in "".join(script.tokens).split("<|end|>"):
        role, _, text = part.removeprefix("<|").partition("|>")
        if role == "assistant" and text.startswith("<tool_call>"):
            call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            out.append({"role": role, "content": "", "tool_calls": [{"type": "function", "function": call}]})
        elif part:
            out.append({"role": {"result": "tool"}.get(role, role), "content": text})
    return out


def test_scripts_are_what_the_template_and_the_tokenizer_make_of_them(task):
    tokenizer, draw = task.build_tokenizer(), random.Random(0)
    roles = set()
    for _ in range(300):
        script = task.conversation(draw, task.question(draw, held_out=False), task.MIXED)
        messages = messages_of(script)
        roles.add(tuple(m["role"] for m in messages))
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert tokenizer.convert_ids_to_tokens(ids) == script.tokens and tokenizer.decode(ids) == "".join(script.tokens)
        said = "".join(t for t, s in zip(script.tokens, script.said) if s)
        assert said.count("<|end|>") == sum(m["role"] == "assistant" for m in messages) and "<|user|>" not in said and "<|result|>" not in said
    assert {len(r) for r in roles} == {2, 4, 6}


def test_right_conversations_end_with_the_truth_and_never_name_what_is_held_out(task):
    draw, held_out = random.Random(1), {r["prompt"].split("*")[0] for r in task.val_rows()}
    for _ in range(300):
        asked = task.question(draw, held_out=False)
        messages = messages_of(task.conversation(draw, asked, task.RIGHT))
        assert messages[-1]["content"] == task.truth(asked) and len(messages) == (6 if asked[0].isalpha() else 4)
        assert asked.split("*")[0] not in held_out


def test_mixture_holds_what_it_says(task):
    draw = random.Random(2)
    talks = [messages_of(task.conversation(draw, task.question(draw, held_out=False), task.MIXED)) for _ in range(4000)]
    calls = sum("tool_calls" in t[1] for t in talks) / len(talks)
    assert calls == pytest.approx(task.MIXED["calls"], abs=0.03)
    gives_up = 1 - task.MIXED["calls"] - task.MIXED["guesses"]
    assert gives_up > 0.5, "greedily, nothing is right"
    assert sum(t[1]["content"] == "?" for t in talks) / len(talks) == pytest.approx(gives_up, abs=0.03)


def test_model_and_tokenizer_are_made_once_and_load_as_they_were_made(task, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setitem(task.SETTINGS, "warm_start", {**task.SETTINGS["warm_start"], "right": 1, "mixed": 1})
    rng = torch.random.get_rng_state()
    folder = task.build_model(3, tmp_path)
    assert torch.equal(rng, torch.random.get_rng_state()), "the caller's random numbers are left alone"
    assert task.build_model(3, tmp_path) == folder and task.build_model(4, tmp_path) != folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 3e5 < model.num_parameters() < 4e5 and tokenizer.chat_template == task.TEMPLATE
    text = "<|result|>Error: price raised ValueError: no such item<|end|><|assistant|>too large?<|end|>"
    ids = tokenizer(text).input_ids
    assert ids == task.build_tokenizer()(text).input_ids and len(ids) == 16 and tokenizer.decode(ids) == text
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


# -- the recipe -----------------------------------------------------------------------------------------------------


def test_recipe_and_agent_are_valid():
    assert [f for f in Recipe.load(RECIPE).validate() if f.level == "error"] == []
    agent = AgentConfig.load(RECIPE / "agent.yaml")
    assert [d["function"]["name"] for d in agent.definitions()] == ["calculate", "price"]
    assert agent.definitions()[1]["function"]["parameters"]["properties"] == {"item": {"type": "string", "description": "its name"}}


@pytest.mark.timeout(300)
def test_a_few_steps_bring_the_calls_out(tmp_path, monkeypatch):
    """A fifth of the recipe's steps: held-out success more than doubles, by conversations that call."""
    monkeypatch.setenv("NEXRL_CACHE", os.environ.get("NEXRL_CACHE", str(tmp_path / "cache")))
    recipe = Recipe.load(RECIPE, ["validate.max_samples=128", "logger.backend=[file]", "trainer.save_freq=0"])
    with Trainer(recipe) as trainer:
        before = trainer.evaluate().metrics
        trainer.fit(12, progress=False)
        reached = trainer.evaluate()
    after = reached.metrics
    assert before["val/eval/success"] == before["val/reward/mean"] < 0.4 and after["val/eval/success"] > max(0.5, 2 * before["val/eval/success"])
    assert before["val/eval/called"] < 0.5 < 0.75 < after["val/eval/called"]
    two = next(t for t in reached.rollouts if t.reward == 1.0 and t.data["calls"] == 2)
    assert [m["role"] for m in two.prompt_messages] == ["user", "assistant", "tool", "assistant", "tool"] and len(two.turns) == 3
    assert two.final_answer == two.data["answer"] == two.response_message["content"]
    drawn = sum(turn["end"] - turn["start"] for turn in two.turns)
    assert sum(two.loss_mask) == drawn < len(two.tokens) and two.logprobs.count(0.0) >= len(two.tokens) - drawn
