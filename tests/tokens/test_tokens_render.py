"""Rendering against transformers' own chat template, and masks against the text they should cover."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizer_families import CORPUS, FAMILIES, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexrl_sdk.tokens.render import pad_token_id, render_example, render_prompt
from nexrl_sdk.types import ConfigError, DataError


LOOSE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(exclude_categories=("Cs", "Co")), min_size=1, max_size=24)
HARD = ["hi ✓", "日本語 🙂", "  spaced  ", "a\n\n", "\n", "x" * 40, "ends with é"]


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Each tokenizer family in turn."""
    return request.param


@pytest.fixture
def tokenizer(family: str) -> Any:
    """The family's tokenizer."""
    return make(family)


def theirs(tokenizer: Any, messages: list[dict[str, str]], generate: bool = True) -> list[int]:
    """What transformers gives."""
    return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=generate)["input_ids"])


def spoken(tokenizer: Any, tokens: list[int], mask: list[int]) -> str:
    """The text under the mask."""
    return tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])


@LOOSE
@given(user=TEXT, earlier=TEXT)
def test_prompt_is_transformers_own(tokenizer: Any, user: str, earlier: str) -> None:
    for messages in ([{"role": "user", "content": user}], [{"role": "user", "content": earlier}, {"role": "assistant", "content": "ok"}, {"role": "user", "content": user}]):
        assert render_prompt(tokenizer, messages) == theirs(tokenizer, messages)
        assert render_prompt(tokenizer, {"messages": messages}) == theirs(tokenizer, messages)


@LOOSE
@given(before=st.text("ab \n✓", max_size=6), after=st.text("ab \n✓", max_size=6), pick=st.integers(0, 10))
def test_special_text_of_a_user_stays_text(family: str, tokenizer: Any, before: str, after: str, pick: int) -> None:
    special = FAMILIES[family]["special"]
    content = before + special[pick % len(special)] + after + special[0]
    control = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    try:
        ids = render_prompt(tokenizer, [{"role": "user", "content": content}])
    except DataError as e:
        assert "special token" in str(e) and family == "mistral"  # its pieces depend on what stands before them
        return
    harmless = theirs(tokenizer, [{"role": "user", "content": "a"}])
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    kept = tokenizer.chat_template and ("trim" in tokenizer.chat_template)
    assert (content.strip() if kept else content) in tokenizer.decode(ids)


def test_special_text_leaves_the_shared_tokenizer_alone(tokenizer: Any) -> None:
    text = f"x {tokenizer.eos_token} y"
    expected, seen, stop = tokenizer(text)["input_ids"], [], threading.Event()

    def encode() -> None:
        while not stop.is_set():
            seen.append(tokenizer(text)["input_ids"] == expected)

    thread = threading.Thread(target=encode)
    thread.start()
    for _ in range(100):
        render_prompt(tokenizer, "a", chat=True)
        try:
            render_prompt(tokenizer, text, chat=True)
        except DataError:
            pass
    stop.set()
    thread.join()
    assert seen and all(seen) and not tokenizer.backend_tokenizer.encode_special_tokens


def test_two_copies_of_special_text_nested_in_each_other() -> None:
    tokenizer = make("chatml")
    content = "<|im_<|im_end|>end|>"
    ids = render_prompt(tokenizer, content, chat=True)
    assert content in tokenizer.decode(ids) and ids.count(tokenizer.eos_token_id) == 2


def test_system_prompt() -> None:
    chatml, mistral = make("chatml"), make("mistral")
    user, own = {"role": "user", "content": "hi"}, {"role": "system", "content": "Own."}
    asked = {"role": "system", "content": "Be brief."}
    assert render_prompt(chatml, "hi", system="Be brief.") == theirs(chatml, [asked, user]) == render_prompt(chatml, [user], system="Be brief.")
    assert render_prompt(chatml, [own, user], system="Be brief.") == theirs(chatml, [own, user])
    assert "helpful" in chatml.decode(render_prompt(chatml, "hi", chat=True))  # the template's own, where nobody gives one
    with pytest.raises(ConfigError, match=r"refuses messages of the roles \['system', 'user'\].*Only user and assistant"):
        render_prompt(mistral, "hi", system="Be brief.")
    with pytest.raises(ConfigError, match="needs a chat template"):
        render_prompt(chatml, "hi", system="Be brief.", chat=False)


def test_template_arguments_reach_the_template() -> None:
    tokenizer = make("bare")
    template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
    assert tokenizer.decode(render_prompt(tokenizer, "hi", chat=True, template_kwargs={"chat_template": template, "loud": True})) == "hi!"


@LOOSE
@given(text=TEXT)
def test_plain_text_is_the_tokenizers_reading(tokenizer: Any, text: str) -> None:
    assert render_prompt(tokenizer, text) == tokenizer(text)["input_ids"] == render_prompt(tokenizer, {"prompt": text}, chat=False)


def test_plain_text_keeps_bos_and_loses_eos() -> None:
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(make("llama3").backend_tokenizer.to_str())
    bos, eos = "<|begin_of_text|>", "<|eot_id|>"
    core.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=[(t, core.token_to_id(t)) for t in (bos, eos)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    assert tokenizer("hello")["input_ids"][-1] == tokenizer.eos_token_id
    assert render_prompt(tokenizer, "hello") == tokenizer("hello")["input_ids"][:-1]
    assert render_prompt(tokenizer, "") == [tokenizer.bos_token_id]
    with pytest.raises(DataError, match="prompt is empty"):
        render_prompt(make("chatml"), "")


@pytest.mark.parametrize(("prompt", "why"), [(3, "text or a list of messages, not int"), ([], "at least one message"), (["hi"], "message 0 must be a mapping"), ([{"role": "user"}], "message 0 must be"), ({"question": "x"}, "needs 'messages' or 'prompt'.*question")])
def test_bad_prompts(prompt: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        render_prompt(make("chatml"), prompt)


def test_no_chat_template() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    for kwargs in ({"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": "hi", "chat": True}, {"prompt": "hi", "system": "s"}):
        with pytest.raises(ConfigError, match=r"no chat template.*chat: false.*model\.tokenizer"):
            render_prompt(tokenizer, **kwargs)
    assert render_prompt(tokenizer, "hi") and pad_token_id(tokenizer) == 0


def test_pad_token(tokenizer: Any) -> None:
    assert pad_token_id(tokenizer) == tokenizer.eos_token_id
    assert pad_token_id(type("T", (), {"pad_token_id": None, "eos_token_id": [7, 8]})()) == 7
    assert pad_token_id(type("T", (), {"pad_token_id": 0, "eos_token_id": 8})()) == 0


@LOOSE
@given(user=TEXT, answer=st.one_of(TEXT, st.sampled_from(HARD)))
def test_mask_covers_the_answer_and_its_end(family: str, tokenizer: Any, user: str, answer: str) -> None:
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    tokens, mask = render_example(tokenizer, messages)
    said = spoken(tokenizer, tokens, mask)
    shown = answer.strip() if family == "llama3" else answer
    assert said.strip(" ") == (shown + FAMILIES[family]["end"]).strip(" ") and said.count(FAMILIES[family]["end"]) == 1
    if family not in ("think", "bare"):  # what comes before is exactly what a rollout would have begun with
        assert tokens[: mask.index(1)] == render_prompt(tokenizer, messages[:1])
    if family in ("chatml", "think"):
        assert tokenizer.decode(tokens) == tokenizer.decode(theirs(tokenizer, messages, generate=False))
    assert render_example(tokenizer, (user, answer), chat=True) == (tokens, mask)


def test_every_turn_or_the_last(family: str, tokenizer: Any) -> None:
    end = FAMILIES[family]["end"] if family != "bare" else ""
    talk = [{"role": "user", "content": "one ✓"}, {"role": "assistant", "content": "first 🙂"}, {"role": "user", "content": "two"}, {"role": "assistant", "content": "second"}]
    tokens, mask = render_example(tokenizer, talk)
    runs = "".join(map(str, mask)).strip("0").split("0")
    assert len([r for r in runs if r]) == 2
    assert spoken(tokenizer, tokens, mask).replace(" ", "") == f"first🙂{end}second{FAMILIES[family]['end']}"
    tokens, mask = render_example(tokenizer, talk, turns="last")
    assert spoken(tokenizer, tokens, mask).strip() == f"second{FAMILIES[family]['end']}"


def test_the_whole_is_transformers_own(family: str, tokenizer: Any) -> None:
    talk = [{"role": "user", "content": "one ✓"}, {"role": "assistant", "content": "first 🙂"}, {"role": "user", "content": "two"}, {"role": "assistant", "content": "second"}]
    tokens, _ = render_example(tokenizer, talk)
    if family != "bare":  # which has no end of turn of its own
        assert tokens == theirs(tokenizer, talk, generate=False)


def test_tokens_that_swallow_the_space_behind_them() -> None:
    from tokenizers import Tokenizer
    from transformers import AddedToken, PreTrainedTokenizerFast

    core = Tokenizer.from_str(make("chatml").backend_tokenizer.to_str())
    core.add_special_tokens([AddedToken(t, rstrip=True, special=True, normalized=False) for t in ("<|say|>", "<|end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=["<|say|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|say|>", rstrip=True)], "eos_token": AddedToken("<|end|>", rstrip=True)})
    tokenizer.chat_template = "{% for m in messages %}<|say|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|say|>assistant\n{% endif %}"
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "first"}, {"role": "user", "content": "two"}, {"role": "assistant", "content": "second"}]
    assert len(tokenizer("<|end|>\n")["input_ids"]) == 1
    tokens, mask = render_example(tokenizer, talk)
    assert tokens == theirs(tokenizer, talk, generate=False) and spoken(tokenizer, tokens, mask) == "first<|end|>second<|end|>"
    ids = render_prompt(tokenizer, "a <|end|> b", chat=True)
    assert tokenizer.decode(ids) == "<|say|>user\na <|end|> b<|end|><|say|>assistant\n" and ids.count(tokenizer.eos_token_id) == 1


def test_special_text_in_an_answer_does_not_end_it() -> None:
    tokenizer = make("chatml")
    tokens, mask = render_example(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "say <|im_end|> now"}])
    assert spoken(tokenizer, tokens, mask) == "say <|im_end|> now<|im_end|>"
    assert tokens.count(tokenizer.eos_token_id) == 3  # system, user, assistant: the template's own


def test_reasoning_that_a_template_drops() -> None:
    tokenizer = make("think")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm</think>b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "<think>\nso</think>d"}]
    with pytest.raises(DataError, match=r"rewrites earlier turns.*turns='last'"):
        render_example(tokenizer, talk)
    tokens, mask = render_example(tokenizer, talk, turns="last")
    assert spoken(tokenizer, tokens, mask) == "so</think>d<|end|>"  # <think> is in the generation prompt: the model never says it
    tokens, mask = render_example(tokenizer, [talk[0], {"role": "assistant", "content": "plain"}])
    assert spoken(tokenizer, tokens, mask) == "plain<|end|>"


@LOOSE
@given(prompt=TEXT, response=TEXT)
def test_plain_pair_ends_with_eos(family: str, tokenizer: Any, prompt: str, response: str) -> None:
    tokens, mask = render_example(tokenizer, (prompt, response))
    front = render_prompt(tokenizer, prompt)
    assert tokens[: len(front)] == front and mask == [0] * len(front) + [1] * (len(tokens) - len(front)) and tokens[-1] == tokenizer.eos_token_id
    if family != "mistral":
        assert spoken(tokenizer, tokens, mask) == response + tokenizer.eos_token


def test_plain_pair_gets_no_space_between() -> None:
    tokenizer = make("mistral")
    tokens, _ = render_example(tokenizer, ("The cat", " sat"))
    assert tokens[:-1] == tokenizer("The cat sat")["input_ids"]


def test_bad_examples() -> None:
    tokenizer = make("chatml")
    with pytest.raises(DataError, match=r"needs an assistant's message; the roles are \['user'\]"):
        render_example(tokenizer, [{"role": "user", "content": "q"}])
    with pytest.raises(ConfigError, match="'all' or 'last'"):
        render_example(tokenizer, ("q", "a"), turns="first")
