"""What a tool or a model has said stays data, whatever characters it is made of."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import AGENTS, FAMILIES, make

from nexrl_sdk.tokens.conversation import Conversation
from nexrl_sdk.tokens.render import _BEFORE, _special, render_prompt
from nexrl_sdk.types import Completion

EVERY = {**FAMILIES, **AGENTS}
SIXTEEN = "".join(map(chr, range(0xE0F0, 0xE100)))
PRIVATE = st.sampled_from(["\ue0ef", "\ue0f0", "\ue0ff", "\ue000", "\uf8ff", "\U000f0000", "\U0010fffd", SIXTEEN, "".join(map(chr, range(0xE000, 0xE200)))])
ORDINARY = st.one_of(st.text("ab <>|[]/_\n\t✓日▁", min_size=1, max_size=5), st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=3))
CALLS = {
    "hermes": '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>', "qwen_xml": "<tool_call>\n<function=look>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "llama": '{{"name": "look", "parameters": {}}}', "mistral": '[TOOL_CALLS] [{{"name": "look", "arguments": {}}}]', "mistral_args": "[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{}",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}  # fmt: skip


@st.composite
def outside(draw: st.DrawFn, family: str) -> str:
    """A text of special tokens, parts of them, private-use characters and others."""
    specials = st.sampled_from([*EVERY[family]["special"], *EVERY[family].get("added", ())])
    parts = st.builds(lambda t, i, front: t[: i % len(t)] if front else t[i % len(t) :], specials, st.integers(0, 20), st.booleans())
    return "".join(draw(st.lists(st.one_of(specials, parts, PRIVATE, ORDINARY), max_size=8)))


def control(tokenizer: Any, ids: list[int]) -> list[int]:
    """The special tokens among the ids."""
    known = set(_special(tokenizer).values())
    return [i for i in ids if i in known]


def readable(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids; spaces left out, which some tokenizers put and take away at the edges."""
    return squeezed(str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)))


def squeezed(text: str) -> str:
    """Without spaces, in either of their spellings."""
    return text.replace(" ", "").replace("▁", "")


def asked(family: str, result: str, arguments: str = "{}") -> tuple[Any, Any]:
    """The prompt behind a tool's result, and the turn that called the tool."""
    tokenizer = make(family)
    conversation = Conversation(tokenizer, template_kwargs=AGENTS[family].get("kwargs"), format=AGENTS[family]["format"])
    first = conversation.prompt([{"role": "user", "content": "Look."}])
    text = ("</think>" if family in ("qwen3-thinking", "deepseek-r1") else "") + CALLS[AGENTS[family]["format"]].format(arguments)
    drawn = tokenizer.encode(text, add_special_tokens=False) + tokenizer.encode(AGENTS[family]["end"], add_special_tokens=False)[-1:]
    turn = conversation.add(first, Completion(drawn, [-0.5] * len(drawn), "stop", 0))
    calls = turn.parsed.message.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": c["id"], "name": "look", "content": result} for c in calls] or [{"role": "user", "content": result}]
    return conversation.prompt([{"role": "user", "content": "Look."}, turn.parsed.message, *results]), turn


@pytest.mark.parametrize("family", [f for f in AGENTS if f not in ("qwen3-no-think", "qwen3-thinking")])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_tools_result_is_data(family: str, data: st.DataObject) -> None:
    result, tokenizer = data.draw(outside(family)), make(family)
    prompt, turn = asked(family, result)
    plain, _ = asked(family, "x")
    assert control(tokenizer, prompt.tokens) == control(tokenizer, plain.tokens)
    assert max(prompt.tokens) < len(tokenizer)
    assert squeezed(prompt.text).endswith(readable(tokenizer, prompt.new))
    assert prompt.parent is not turn or prompt.tokens[: len(turn.tokens)] == turn.tokens


@pytest.mark.parametrize("family", sorted(EVERY))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_question_is_data(family: str, data: st.DataObject) -> None:
    question, tokenizer = data.draw(outside(family)), make(family)
    ids, plain = (render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in (question, "x"))
    assert control(tokenizer, ids) == control(tokenizer, plain)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    assert readable(tokenizer, ids) == squeezed(shown)


@pytest.mark.parametrize("family", sorted(AGENTS))
@pytest.mark.parametrize("result", ["{}\ue0ef", "\ue0ef{}", SIXTEEN + "{}", "{}" + "".join(map(chr, range(0xE000, 0xF900)))], ids=["before", "behind", "sixteen", "plane"])
def test_private_characters_beside_special_tokens(family: str, result: str) -> None:
    text = result.replace("{}", AGENTS[family]["end"])
    tokenizer, (prompt, _) = make(family), asked(family, text)
    plain, _ = asked(family, "x")
    assert control(tokenizer, prompt.tokens) == control(tokenizer, plain.tokens)
    assert squeezed(text) in readable(tokenizer, prompt.tokens)


@pytest.mark.parametrize("family", sorted(AGENTS))
@pytest.mark.parametrize("written", ["{}\ue0ef", SIXTEEN + "{}"], ids=["before", "sixteen"])
def test_private_characters_in_what_a_model_calls_with(family: str, written: str) -> None:
    value = written.replace("{}", AGENTS[family]["end"])
    (prompt, turn), (plain, before) = (asked(family, "x", v if AGENTS[family]["format"] == "qwen_xml" else json.dumps({"a": v}, ensure_ascii=False)) for v in (value, "b"))
    assert value in turn.parsed.message["tool_calls"][0]["function"]["arguments"]
    assert max(prompt.tokens) < len(make(family))
    assert (prompt.parent is turn) == (plain.parent is before)


@pytest.mark.parametrize("sides", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_special_tokens_that_take_the_space_beside_them(sides: dict[str, bool], data: st.DataObject) -> None:
    """Phi's end of turn takes the newline behind it."""
    question, tokenizer = data.draw(outside("chatml")), greedy(**sides)
    ids, plain = (render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in (question, "x"))
    assert control(tokenizer, ids) == control(tokenizer, plain)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    assert "".join(readable(tokenizer, ids).split()) == "".join(squeezed(shown).split())
    harmless = question.replace("<|", "< |").replace("|>", "| >")
    ours = render_prompt(tokenizer, [{"role": "user", "content": harmless}])
    assert ours == tokenizer.apply_chat_template([{"role": "user", "content": harmless}], add_generation_prompt=True)["input_ids"]
    assert ids != ours or question == harmless


@functools.cache
def greedy(**sides: bool) -> Any:
    """ChatML, whose special tokens take the space beside them."""
    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(make("chatml"))
    tokens = [AddedToken(t, special=True, normalized=False, **sides) for t in FAMILIES["chatml"]["special"]]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens, "eos_token": tokens[2]})
    return tokenizer


def test_no_text_can_hold_what_stands_before_a_text() -> None:
    assert len(_BEFORE) > 20
