"""A backend that says what a function tells it to, and a check that trajectories hold exactly what was drawn."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nexrl_sdk.backend.base import Capabilities
from nexrl_sdk.types import Completion, Interrupted, SamplingParams, Trajectory

ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (  # what was thought is shown only behind the last question
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tokenizer(template: str = PLAIN) -> Any:
    """One token a character, and one for each role."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*ROLES, *(chr(i) for i in range(10, 127))])}, unk_token="?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=ROLES[:4])
    made.chat_template = template
    return made


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Scripted:
    """Says what `say(text, params)` returns to the text of a prompt; an exception that it returns is raised."""

    def __init__(self, say: Callable[..., Any] | Sequence[Any], *, template: str = PLAIN, max_length: int | None = None, version: int = 3):
        script = None if callable(say) else list(say)
        self.say = say if callable(say) else lambda text, params: script[min(text.count("<|assistant|>") - 1, len(script) - 1)]
        self.tokenizer, self.version = tokenizer(template), version
        self.capabilities = Capabilities(max_length=max_length)
        self.drawn: list[tuple[list[int], SamplingParams, Completion]] = []
        self.lock = threading.Lock()

    def sample(self, prompts: Any, params: Any, n: int = 1, stop_flag: Any = None) -> list[list[Completion]]:
        (prompt,) = prompts
        found = []
        for _ in range(n):
            said = self.say(self.tokenizer.decode(prompt), params)
            if isinstance(said, BaseException):
                raise said
            if said is None:  # never answers
                while not stop_flag.wait(5):
                    pass
                raise Interrupted("stopped")
            tokens = self.tokenizer.encode(said + "<|end|>", add_special_tokens=False)
            ended = "stop" if len(tokens) <= params.max_tokens else "length"
            tokens = tokens[: params.max_tokens]
            with self.lock:
                at = len(self.drawn)
                made = Completion(tokens, [-0.001 * at - 0.0001 * i for i in range(len(tokens))], ended, self.version)
                self.drawn.append((list(prompt), params, made))
            found.append(made)
        return [found]


class Recorded:
    """Another backend, of which it is kept what was asked and given."""

    def __init__(self, inner: Any):
        self.inner, self.tokenizer, self.capabilities = inner, inner.tokenizer, inner.capabilities
        self.drawn: list[tuple[list[int], SamplingParams, Completion]] = []
        self.lock = threading.Lock()

    def sample(self, prompts: Any, params: Any, n: int = 1, stop_flag: Any = None) -> list[list[Completion]]:
        found = self.inner.sample(prompts, params, n, stop_flag=stop_flag)
        with self.lock:
            self.drawn += [(list(p), params, c) for p, group in zip(prompts, found) for c in group]
        return found


def check_exact(drawn: Sequence[tuple[list[int], SamplingParams, Completion]], trajectories: Sequence[Trajectory]) -> None:
    """Each draw stands in a trajectory behind the very prompt that was asked, and is learned from exactly once."""
    for t in trajectories:
        t.check()
        assert len(t.logprobs) == len(t.tokens) and all(lp == 0.0 for lp, m, i in zip(t.logprobs, t.loss_mask, range(len(t.tokens))) if not m and not any(s["start"] <= i < s["end"] for s in t["turns"]))
    places = [(t, turn) for t in trajectories for turn in t["turns"] if turn["learned"]]
    for prompt, _, c in drawn:
        found = [
            (t, turn) for t, turn in places
            if list(t.tokens[: turn["start"]]) == prompt and list(t.tokens[turn["start"] : turn["end"]]) == list(c.tokens) and list(t.logprobs[turn["start"] : turn["end"]]) == list(c.logprobs)
        ]  # fmt: skip
        assert found, (prompt, c)
        t, turn = found[0]
        places = [p for p in places if p[1] is not turn]
        assert all(t.loss_mask[turn["start"] : turn["end"]]) and c.weight_version in t.weight_versions
    assert not places
    assert sum(sum(t.loss_mask) for t in trajectories) == sum(len(c.tokens) for _, _, c in drawn)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Until something is so."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


EARLIER: list[threading.Thread] = []  # threads of other tests


def threads_named(*prefixes: str) -> list[threading.Thread]:
    """Threads of this test that still run."""
    return [t for t in threading.enumerate() if t.name.startswith(prefixes) and t not in EARLIER]
