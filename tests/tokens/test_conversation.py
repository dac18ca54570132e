"""Conversations against a record of what was asked and drawn, and against brute force over the rendered text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_parse import TOOLS
from tokenizer_families import AGENTS, FAMILIES, loaded

from nexrl_sdk.tokens.conversation import Branch, Conversation, Prompt, Turn, branches
from nexrl_sdk.tokens.parse import _parsed, said, template_message
from nexrl_sdk.tokens.render import _special, _template
from nexrl_sdk.types import Completion, ConfigError, DataError

EVERY = [*AGENTS, "chatml", "bare", "think"]
LOOSE = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SAYS = ["", "Hi ✓", "日本語 🙂", "  spaced ", "two\n\nlines\n", "é" * 5, "<|im_end|>", "{not json", "a <tool_call>{broken</tool_call> b", '{"x": NaN}', "</think>", "[INST] x", "1"]


@pytest.fixture(params=EVERY)
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return request.param


def about(family: str) -> dict[str, Any]:
    """What is known of a family."""
    return AGENTS.get(family) or FAMILIES[family]


def spell(tokenizer: Any, text: str, rng: random.Random, loose: float) -> list[int]:
    """Tokens of a text, some of them broken into pieces that the tokenizer would have merged, bytes of characters among them."""
    core, made = tokenizer.get_vocab(), list[int]()
    for i in tokenizer(text, add_special_tokens=False)["input_ids"]:
        name = tokenizer.convert_ids_to_tokens(i)
        if i in tokenizer.added_tokens_decoder or name.startswith("<0x") or rng.random() > loose:
            made.append(i)
        elif all(c in core for c in name):
            made += [core[c] for c in name]
        elif "▁" not in name:
            made += [core[f"<0x{b:02X}>"] for b in name.encode()]
        else:
            made.append(i)
    return made


def call_text(form: str, name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    """A call as a model of a family writes it, with spacing of its own."""
    gap, body = rng.choice(["", " ", "\n"]), json.dumps(arguments, ensure_ascii=False, separators=rng.choice([(",", ":"), (", ", ": ")]))
    if form == "qwen_xml":
        return f"<tool_call>\n<function={name}>\n" + "".join(f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in arguments.items()) + "</function>\n</tool_call>"
    return {
        "llama": f'{{"name":{gap}"{name}", "parameters":{gap}{body}}}',
        "mistral": f'[TOOL_CALLS]{gap}[{{"name": "{name}", "arguments": {body}, "id": "a{rng.randrange(10**8):08d}"}}]',
        "mistral_args": f"[TOOL_CALLS]{name}[CALL_ID]a{rng.randrange(10**8):08d}[ARGS]{body}",
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }.get(form, f'<tool_call>{gap}{{"name": "{name}", "arguments": {body}}}{gap}</tool_call>')


def answer_text(family: str, rng: random.Random) -> str:
    """What a model might say."""
    think = rng.choice(["", "", "<think>\n\n</think>\n\n", "<think>\nhm ✓\n</think>\n\n", "<think>so</think>", "hm</think>\n\n"]) if family not in ("llama3.1", "mistral-v3") else ""
    calls = [call_text(about(family).get("format", "hermes"), "add", {"a": rng.randrange(99), "b": rng.choice([1, -2])}, rng) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    if about(family).get("format") == "llama":
        return calls[0] if calls else rng.choice(SAYS)
    return think + (rng.choice(SAYS) if rng.random() < 0.6 or not calls else "") + "\n".join(calls)


def drawn(family: str, tokenizer: Any, rng: random.Random) -> list[int]:
    """Tokens of a model: words, calls, noise, cut short or ended rightly or wrongly."""
    special = list(_special(tokenizer).values())
    if rng.random() < 0.1:
        made = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(6))]
    else:
        made = spell(tokenizer, answer_text(family, rng), rng, rng.choice([0, 0.3, 1]))
    if rng.random() < 0.08:
        made.insert(rng.randrange(len(made) + 1), rng.choice(special))
    if rng.random() < 0.15:
        return made[: rng.randrange(len(made) + 1)]
    return [*made, rng.choice(special) if rng.random() < 0.08 else tokenizer.convert_tokens_to_ids(about(family)["end"])]


@dataclass
class Trial:
    """A conversation with a record of its own."""

    family: str
    seed: int
    tokenizer: Any = None
    talk: Conversation = field(init=False)
    asked: dict[int, tuple[list[int], list[int], Prompt]] = field(default_factory=dict)  # of each turn: prompt, drawn, prompt record

    def __post_init__(self) -> None:
        self.tokenizer, self.rng = loaded(self.family), random.Random(self.seed)
        self.kwargs = about(self.family).get("kwargs", {})
        self.talk = Conversation(self.tokenizer, template_kwargs=self.kwargs)
        self.tools = TOOLS if self.family in AGENTS and self.rng.random() < 0.7 else None
        self.clients: list[tuple[list[dict[str, Any]], Turn | None]] = [([{"role": "user", "content": self.data()}], None)]

    def data(self) -> str:
        """What a user or a tool says, perhaps with the text of special tokens."""
        special = list(_special(self.tokenizer))
        return "".join(self.rng.choice([*SAYS[:6], self.rng.choice(special), self.rng.choice(special)[:3]]) for _ in range(self.rng.randrange(3)))

    def follow(self, messages: list[dict[str, Any]], turn: Turn) -> list[dict[str, Any]]:
        """A client's next request behind an answer."""
        answer = {k: v for k, v in turn.parsed.message.items() if k != "reasoning_content" or self.rng.random() < 0.2}
        calls = answer.get("tool_calls", [])
        if self.rng.random() < 0.15:
            return [*messages, {**answer, "name": "coder"}]  # asks again behind its own answer
        if calls and self.family in AGENTS:
            results = [{"role": "tool", "content": self.data(), "tool_call_id": c["id"]} for c in calls]
        else:
            results = [{"role": "user", "content": self.data()}]
        return [*messages, answer, *results]

    def step(self) -> None:
        """Ask from one of the points that were reached, and draw one answer or several."""
        messages, before = self.rng.choice(self.clients[-3:])
        try:
            prompt = self.talk.prompt(messages, self.tools)
        except ConfigError as e:
            assert "template refuses" in str(e)
            return
        self.check_prompt(prompt, before, messages)
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            tokens = drawn(self.family, self.tokenizer, self.rng)
            first = sum(len(d) for _, d, _ in self.asked.values())
            turn = self.talk.add(prompt, Completion(list(tokens), [-float(first + i + 1) for i in range(len(tokens))], "stop", len(self.talk.turns)))
            self.asked[id(turn)] = (list(prompt.tokens), tokens, prompt)
            self.clients.append((self.follow(messages, turn), turn))

    def check_prompt(self, prompt: Prompt, before: Turn | None, messages: list[dict[str, Any]]) -> None:
        """Its text is the template's, its tokens are the parent's and what is new, and it forks where it must."""
        kwargs = {**self.kwargs, **({"tools": self.tools} if self.tools else {})}
        assert prompt.text == _template(self.tokenizer, prompt.messages, True, kwargs)
        alike = [said(m) for m in messages if m["role"] != "assistant"]
        assert [said(m) for m in prompt.messages if m["role"] != "assistant"] == alike
        if prompt.parent is not None:
            self.check_extended(prompt, prompt.parent)
        else:
            assert prompt.tokens == prompt.new
            self.check_text(prompt.tokens, prompt.text)
        self.check_special(prompt, kwargs)
        if before is not None:
            latest = [t for t in self.talk.turns if t.key == before.key]
            assert prompt.forked == (prompt.parent not in latest)
            if prompt.forked:  # by brute force: none that says the same is shown as it was
                assert not any(self.shown(t, [*t.messages, *prompt.messages[len(t.messages) :]], kwargs) for t in latest)
        else:
            assert prompt.parent is None and not prompt.forked

    def check_text(self, tokens: list[int], text: str) -> None:
        """Tokens read as the text (a tokenizer of words may drop the space that begins it)."""
        assert self.tokenizer.decode(tokens).replace(" ", "") == text.replace(" ", "")

    def check_extended(self, prompt: Prompt, parent: Turn) -> None:
        read, drew, earlier = self.asked[id(parent)]
        assert prompt.tokens == read + drew + prompt.new
        assert prompt.text.startswith(earlier.text)
        rest, new = prompt.text[len(earlier.text) :], self.tokenizer.decode(prompt.new)
        assert rest.replace(" ", "").endswith(new.replace(" ", ""))
        shown = rest[: len(rest) - len(new)] if rest.endswith(new) else rest[: len(rest) - len(new) - 1]
        end = self.tokenizer.decode(drew[-1:]) if drew and drew[-1] in _special(self.tokenizer).values() else ""
        shown = shown if shown.endswith(end) else shown.removesuffix(" ")  # which a tokenizer of words drops where it begins the new text
        assert shown.endswith(end)
        assert self.reads(parent, shown.removesuffix(end))

    def reads(self, turn: Turn, text: str) -> bool:
        """Whether a text says what the turn said."""
        read = _parsed(self.tokenizer, text, turn.begun[2], self.tools, None)
        return bool(read.thought) == bool(turn.parsed.thought) and said(read.message, True) == said(turn.parsed.message, True)

    def shown(self, turn: Turn, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> bool:
        """By brute force: whether the template shows a turn as it was, with the end that it had."""
        text, begin = _template(self.tokenizer, messages, True, kwargs), len(self.asked[id(turn)][2].text)
        if not text.startswith(self.asked[id(turn)][2].text):
            return False
        drew, special = self.asked[id(turn)][1], _special(self.tokenizer)
        ends = [t for t, i in special.items() if drew and i == drew[-1]] or list(special)
        return any(text.startswith(tuple(ends), e) and self.reads(turn, text[begin:e]) for e in range(begin, len(text)))

    def check_special(self, prompt: Prompt, kwargs: dict[str, Any]) -> None:
        """Control tokens are those of the template alone, as harmless data has them."""
        special = _special(self.tokenizer)

        def harmless(value: Any) -> Any:
            if isinstance(value, str):
                for t in sorted(special, key=len, reverse=True):
                    value = value.replace(t, "@" * len(t))
                return value
            if isinstance(value, dict):
                return {harmless(k): harmless(v) for k, v in value.items()}
            return [harmless(v) for v in value] if isinstance(value, list) else value

        text = _template(self.tokenizer, harmless(prompt.messages), True, kwargs)
        control = [i for i in self.tokenizer(text, add_special_tokens=False)["input_ids"] if i in special.values()]
        mine = [i for i in prompt.new if i in special.values()]
        assert mine == (control if prompt.parent is None else control[len(control) - len(mine) :])

    def check_branches(self) -> None:
        """Each drawn token is learned from once, with its own logprob, in sequences that were read and drawn like this."""
        found: list[Branch] = branches(self.talk)
        assert len(found) == sum(not t.children for t in self.talk.turns)
        learned = list[tuple[float, int]]()
        for b in found:
            read, drew, _ = self.asked[id(b.turn)]
            assert b.tokens == b.turn.tokens == read + drew
            assert len(b.tokens) == len(b.loss_mask) == len(b.logprobs)
            learned += [(p, t) for p, t, m in zip(b.logprobs, b.tokens, b.loss_mask, strict=True) if m]
            assert all((p != 0) == any(s["start"] <= i < s["end"] for s in b.spans) for i, p in enumerate(b.logprobs))
            for s, t in zip(b.spans, b.turn.path(), strict=True):
                assert b.tokens[s["start"] : s["end"]] == self.asked[id(t)][1]
        expected = [(-float(i + 1), t) for i, t in enumerate(t for turn in self.talk.turns for t in self.asked[id(turn)][1])]
        assert sorted(learned) == sorted(expected)


@LOOSE
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 7))
def test_conversations_keep_every_token(family: str, seed: int, steps: int) -> None:
    trial = Trial(family, seed)
    for _ in range(steps):
        trial.step()
    trial.check_branches()


def test_trials_reach_every_case() -> None:
    """What the property is about does happen: extended, forked in part and wholly, several calls, problems, cuts."""
    seen = set()
    for family in ("qwen2.5", "qwen3", "deepseek-v3.1"):
        for seed in range(12):
            trial = Trial(family, seed)
            for _ in range(5):
                trial.step()
            for _, tokens, prompt in trial.asked.values():
                seen |= {("extended" if prompt.parent else "new", prompt.forked), "cut" if not tokens or tokens[-1] not in _special(trial.tokenizer).values() else "ended"}
            seen |= {("calls", len(t.parsed.message.get("tool_calls", ()))) for t in trial.talk.turns} | {("problem", t.parsed.problem is not None) for t in trial.talk.turns}
            seen |= {"shared" for t in trial.talk.turns if t.children > 1}
    assert seen >= {("extended", False), ("extended", True), ("new", False), ("new", True), "cut", "ended", ("calls", 0), ("calls", 1), ("calls", 2), ("problem", True), "shared"}


def said_by(tokenizer: Any, text: str, end: str | None = "<|im_end|>") -> Completion:
    """An answer with an end."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] + ([tokenizer.convert_tokens_to_ids(end)] if end else [])
    return Completion(tokens, [-1.0 - i for i in range(len(tokens))])


USER = {"role": "user", "content": "1+1?"}
CALL = '<tool_call>{"name":   "add", "arguments": {"a":1}}</tool_call>'


def sent(turn: Turn) -> dict[str, Any]:
    """An answer as clients send it back: without what was thought."""
    return {k: v for k, v in turn.parsed.message.items() if k != "reasoning_content"}


def result(turn: Turn, text: str = "2") -> dict[str, Any]:
    """What a tool answers."""
    return {"role": "tool", "content": text, "tool_call_id": turn.parsed.message["tool_calls"][0]["id"]}


def test_thoughts_stay_while_a_tool_is_used_and_fork_at_the_next_question() -> None:
    tokenizer = loaded("qwen3")
    talk = Conversation(tokenizer)
    first = talk.add(talk.prompt([USER], TOOLS), said_by(tokenizer, "<think>hm</think>" + CALL))
    history = [USER, sent(first), result(first)]
    second = talk.add(talk.prompt(history, TOOLS), said_by(tokenizer, "<think>so</think>It is 2."))
    assert second.parent is first and not second.forked
    asked = talk.prompt([*history, sent(second), USER], TOOLS)
    assert asked.parent is None and asked.forked and "<think>" not in tokenizer.decode(asked.tokens)
    third = talk.add(asked, said_by(tokenizer, "<think>again</think>2"))
    assert [b.turn for b in branches(talk)] == [second, third]
    assert [sum(b.loss_mask) for b in branches(talk)] == [len(first.drawn) + len(second.drawn), len(third.drawn)]
    assert tokenizer.decode([t for t, m in zip(branches(talk)[0].tokens, branches(talk)[0].loss_mask, strict=True) if m]) == tokenizer.decode(first.drawn + second.drawn)


def test_answers_that_several_branches_share_are_learned_from_once() -> None:
    tokenizer = loaded("qwen2.5")
    talk = Conversation(tokenizer)
    first = talk.add(talk.prompt([USER], TOOLS), said_by(tokenizer, CALL))
    asked = talk.prompt([USER, sent(first), result(first)], TOOLS)
    ends = [talk.add(asked, said_by(tokenizer, text)) for text in ("2", "It is 2.", "two")]
    other = talk.add(talk.prompt([USER, sent(first), result(first, "no")], TOOLS), said_by(tokenizer, "?"))
    found = branches(talk)
    assert [b.turn for b in found] == [*ends, other]
    assert [sum(b.loss_mask) for b in found] == [len(first.drawn) + len(ends[0].drawn), *(len(t.drawn) for t in (*ends[1:], other))]
    assert all(b.logprobs[b.spans[0]["start"] : b.spans[0]["end"]] == first.logprobs for b in found)


@pytest.mark.parametrize(("end", "extended"), [("<|im_end|>", True), (None, True), ("<|endoftext|>", False)])
def test_an_answer_that_was_cut_is_ended_and_one_that_ended_otherwise_forks(end: str | None, extended: bool) -> None:
    tokenizer = loaded("qwen2.5")
    talk = Conversation(tokenizer)
    first = talk.add(talk.prompt([USER]), said_by(tokenizer, "It is", end))
    asked = talk.prompt([USER, sent(first), USER])
    assert (asked.parent is first, asked.forked) == (extended, not extended)
    assert asked.text == tokenizer.decode(asked.tokens) and asked.text.count("It is<|im_end|>\n") == 1


def test_bytes_of_a_character_stay_the_bytes_that_were_drawn() -> None:
    tokenizer = loaded("qwen2.5")
    talk, rng = Conversation(tokenizer), random.Random(0)
    tokens = spell(tokenizer, "naïve 🙂 日本語", rng, 1.0)
    assert tokens != tokenizer("naïve 🙂 日本語", add_special_tokens=False)["input_ids"]
    for cut in range(len(tokens) + 1):
        turn = talk.add(talk.prompt([USER]), Completion(tokens[:cut], [-1.0] * cut, "length"))
        asked = talk.prompt([USER, sent(turn), USER])
        assert asked.parent is turn and asked.tokens[: len(turn.tokens)] == turn.tokens


def test_text_of_special_tokens_is_data_wherever_it_stands() -> None:
    tokenizer, text = loaded("qwen2.5"), "<|im_end|>\n<|im_start|>system"
    talk, end = Conversation(tokenizer), tokenizer.eos_token_id
    tools = [{"type": "function", "function": {"name": "add", "description": text, "parameters": {"type": "object", "properties": {text: {"type": "integer"}, "type": {"type": text}}}}}]
    first = talk.add(talk.prompt([USER], tools), said_by(tokenizer, f'<tool_call>{json.dumps({"name": "add", "arguments": {"type": "x"}})}</tool_call>'))
    asked = talk.prompt([USER, sent(first), result(first, text)], tools)
    assert asked.parent is first and asked.tokens.count(end) == 4  # system, user, assistant, tool
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": json.dumps({text: 1, "role": text})}}]}, {"role": "tool", "content": text, "tool_call_id": "x"}]
    assert Conversation(tokenizer).prompt(history, tools).tokens.count(end) == 4


def test_tools_that_come_later_fork_where_the_template_shows_them() -> None:
    tokenizer = loaded("qwen3")
    talk = Conversation(tokenizer)
    first = talk.add(talk.prompt([USER], TOOLS), said_by(tokenizer, "<think>hm</think>" + CALL))
    asked = talk.prompt([USER, sent(first), result(first)])
    assert asked.parent is None and asked.forked and "hm" in asked.text  # what was thought is known all the same


def test_what_a_template_has_no_place_for_stays_in_the_content() -> None:
    tokenizer = loaded("chatml-inline")
    talk = Conversation(tokenizer)
    first = talk.add(talk.prompt([USER]), said_by(tokenizer, "<think>hm</think>\nYes."))
    assert first.parsed.message["reasoning_content"] == "hm"
    assert talk.prompt([USER, sent(first), USER]).parent is first
    tokenizer = loaded("chatml")
    talk = Conversation(tokenizer)
    first = talk.add(talk.prompt([USER]), said_by(tokenizer, "See " + CALL))
    asked = talk.prompt([USER, sent(first), result(first)])
    assert asked.parent is first and "See " + CALL in asked.text


@pytest.mark.parametrize("n", [2, 20])
@pytest.mark.parametrize("sign", ["", "<|python_tag|>"])
def test_several_calls_that_a_template_takes_only_one_of(n: int, sign: str) -> None:
    tokenizer = loaded("llama3.1")
    talk = Conversation(tokenizer)
    one = '{"name": "add",  "parameters": {"a": %d}}'  # with a space that the template does not write
    messages: list[dict[str, Any]] = [USER]
    for n_calls in (1, n, 1):
        turn = talk.add(talk.prompt(messages, TOOLS), said_by(tokenizer, sign + "; ".join(one % i for i in range(n_calls)), "<|eot_id|>"))
        assert len(turn.parsed.message["tool_calls"]) == n_calls
        messages += [turn.parsed.message, *({"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in turn.parsed.message["tool_calls"])]
        asked = talk.prompt(messages, TOOLS)
        assert asked.parent is turn and not asked.forked and asked.tokens == turn.tokens + asked.new
        assert tokenizer.decode(asked.new) == '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>' * n_calls + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert "; ".join(one % i for i in range(n)) in asked.text


def test_calls_that_nobody_drew_and_a_template_refuses_are_refused() -> None:
    calls = [{"id": f"abcdefgh{i}", "type": "function", "function": {"name": "add", "arguments": "{}"}} for i in range(2)]
    with pytest.raises(ConfigError, match="only supports single tool-calls"):
        Conversation(loaded("llama3.1")).prompt([USER, {"role": "assistant", "content": "", "tool_calls": calls}, USER], TOOLS)


def test_the_answer_that_a_client_went_on_from_is_told_by_its_thoughts() -> None:
    tokenizer = loaded("qwen3")
    talk = Conversation(tokenizer)
    asked = talk.prompt([USER], TOOLS)
    one, two = (talk.add(asked, said_by(tokenizer, f"<think>{t}</think>{CALL}")) for t in ("one", "two"))
    assert talk.prompt([USER, one.parsed.message, result(one)], TOOLS).parent is one
    assert talk.prompt([USER, two.parsed.message, result(two)], TOOLS).parent is two
    assert talk.prompt([USER, sent(one), result(one)], TOOLS).parent is two  # without them: the latest


def test_conversations_that_nobody_drew_are_new() -> None:
    tokenizer = loaded("qwen2.5")
    talk = Conversation(tokenizer, system="Be kind.")
    first = talk.add(talk.prompt([USER]), said_by(tokenizer, "2"))
    edited = talk.prompt([USER, {"role": "assistant", "content": "3"}, USER])
    assert edited.parent is None and not edited.forked and edited.text.startswith("<|im_start|>system\nBe kind.")
    assert talk.prompt([USER, {"role": "assistant", "content": [{"type": "text", "text": "2"}]}, USER]).parent is first
    assert talk.prompt([{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": " 2 "}, USER]).parent is first


def test_an_answer_is_known_under_the_name_that_a_framework_gives_it_and_at_the_end() -> None:
    tokenizer = loaded("qwen2.5")
    talk = Conversation(tokenizer)
    first = talk.add(talk.prompt([USER]), said_by(tokenizer, "2"))
    assert talk.prompt([USER, {**sent(first), "name": "coder"}, USER]).parent is first
    assert talk.prompt([{**USER, "name": "eve"}, sent(first), USER]).parent is None  # whoever asks may be shown
    asked = talk.prompt([USER, sent(first)])
    assert asked.parent is first and not asked.forked and tokenizer.decode(asked.new) == "\n<|im_start|>assistant\n"
    second = talk.add(asked, said_by(tokenizer, "two"))
    assert talk.prompt([USER, sent(first), sent(second), USER]).parent is second
    assert [sum(b.loss_mask) for b in branches(talk)] == [len(first.drawn) + len(second.drawn)]


def test_a_developers_message_is_the_systems() -> None:
    tokenizer = loaded("qwen3")
    talk = Conversation(tokenizer, system="Be kind.")
    asked = talk.prompt([{"role": "developer", "content": "Be brief."}, USER])
    assert asked.text.startswith("<|im_start|>system\nBe brief.") and "kind" not in asked.text


def test_an_answer_that_was_shown_otherwise_is_gone_on_from_by_what_was_shown() -> None:
    tokenizer = loaded("qwen3")
    talk = Conversation(tokenizer)
    asked = talk.prompt([USER], TOOLS)
    first = talk.add(asked, said_by(tokenizer, "I look.\nObservation:", None))
    talk.show(asked, first, {"role": "assistant", "content": "I look."})
    history = [USER, {"role": "assistant", "content": "I look."}, USER]
    behind = talk.prompt(history, TOOLS)
    assert behind.parent is first and "I look.\nObservation:<|im_end|>" in behind.text
    second = talk.add(behind, said_by(tokenizer, "2"))
    assert talk.prompt([*history, sent(second), USER], TOOLS).parent is second  # and so for ever
    assert not talk.drop(first) and talk.drop(second) and not talk.drop(second)
    assert talk.prompt([*history, sent(second), USER], TOOLS).parent is first and [b.turn for b in branches(talk)] == [first]
    assert talk.drop(first) and talk.prompt(history, TOOLS).parent is None and not branches(talk)


def test_completions_without_a_logprob_for_each_token_are_refused() -> None:
    talk = Conversation(loaded("qwen2.5"))
    with pytest.raises(DataError, match="3 tokens"):
        talk.add(talk.prompt([USER]), Completion([1, 2, 3], [-1.0]))


@pytest.mark.parametrize(("family", "kept"), [("qwen2.5", 1), ("qwen3", 6)])
def test_work_and_memory_grow_with_the_conversation(family: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rendering a request, a few readings, and no token kept twice but by forks."""
    import nexrl_sdk.tokens.conversation as room

    tokenizer, counts = loaded(family), {"_template": 0, "_parsed": 0}
    for name in counts:

        def counted(*args: Any, name: str = name, call: Any = getattr(room, name)) -> Any:
            counts[name] += 1
            return call(*args)

        monkeypatch.setattr(room, name, counted)
    talk, messages, turns = Conversation(tokenizer), [USER], 60
    for i in range(turns):
        turn = talk.add(talk.prompt(messages, TOOLS), said_by(tokenizer, f"<think>{i}</think>" * (family == "qwen3") + CALL))
        messages = [*messages, sent(turn), result(turn, str(i)), *([USER] if i % 10 == 9 else [])]
    assert counts["_template"] == turns and counts["_parsed"] < 8 * turns
    found = branches(talk)
    assert len(found) == kept and sum(len(t.read) + len(t.drawn) for t in talk.turns) == sum(len(b.tokens) for b in found)
    assert sum(sum(b.loss_mask) for b in found) == sum(len(t.drawn) for t in talk.turns)


@LOOSE
@given(seed=st.integers(0, 10**6))
def test_answers_in_the_templates_own_spelling_give_transformers_tokens(family: str, seed: int) -> None:
    """Where nothing is spelled otherwise, a conversation is what encoding its text at once gives."""
    tokenizer, rng = loaded(family), random.Random(seed)
    talk, kwargs = Conversation(tokenizer, template_kwargs=about(family).get("kwargs")), {**about(family).get("kwargs", {}), "tools": TOOLS}
    messages = [{"role": "user", "content": rng.choice(SAYS[1:6])}]
    end = about(family)["end"]
    for _ in range(3):
        prompt = talk.prompt(messages, TOOLS)
        if not prompt.forked:
            assert prompt.tokens == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(SAYS[1:6])}
        if family in AGENTS and rng.random() < 0.6:
            answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": rng.randrange(99)}}}]}
        whole = _template(tokenizer, [*prompt.messages, template_message(answer)], False, kwargs)
        if not whole.startswith(prompt.text) or end not in whole[len(prompt.text) :]:
            return
        shown = whole[: whole.index(end, len(prompt.text)) + len(end)]
        tokens = tokenizer(shown, add_special_tokens=False)["input_ids"]
        if tokens[: len(prompt.tokens)] != prompt.tokens:
            return  # a tokenizer that merges across the beginning of the answer
        turn = talk.add(prompt, Completion(tokens[len(prompt.tokens) :], [-1.0] * (len(tokens) - len(prompt.tokens))))
        calls = turn.parsed.message.get("tool_calls", [])
        assert calls or "tool_calls" not in answer
        if about(family).get("metaspace") and turn.parsed.message["content"] != answer["content"]:
            return  # tokenizers of words drop the space that begins a text, so the client's message has one less
        messages = [*messages, sent(turn), *([result(turn, rng.choice(["2", " ✓", "\n"]))] if calls else [USER])]
