"""For tests of the capture proxy: a backend that says what it is told to, and one that writes down what another draws."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nexrl_sdk.backend.base import Capabilities
from nexrl_sdk.types import Completion, Interrupted, Trajectory

_found = importlib.util.spec_from_file_location("root_conftest", Path(__file__).parents[1] / "conftest.py")  # folders have conftests of their own
assert _found is not None and _found.loader is not None
_conftest = importlib.util.module_from_spec(_found)
_found.loader.exec_module(_conftest)
make_tokenizer = _conftest.make_tokenizer

AGENT = Path(__file__).with_name("openai_agent.py")
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THREE_TURNS = (
    '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 30}}</tool_call>',
    'Forty-two. Its name?<tool_call>{"name": "name_of", "arguments": {"number": 42}}</tool_call>',
    "It is the answer.",
)


def chat_tokenizer() -> Any:
    """Bytes, with a template that knows tools and reasoning."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Scripted:
    """A backend whose answers are written down; `answer(prompt text, number of the answer)`."""

    def __init__(self, answer: Callable[[str, int], str] | Sequence[str] = ("Good.",), context: int | None = None):
        self.tokenizer = chat_tokenizer()
        self.capabilities = Capabilities(max_length=context)
        self._answer = answer if callable(answer) else (lambda prompt, number: answer[number % len(answer)])
        self.drawn: list[tuple[list[int], Completion]] = []  # prompt and what was sampled
        self.gate: threading.Event | None = None  # awaited before each answer
        self.entered = threading.Semaphore(0)  # released by each call
        self.calls = 0
        self._lock = threading.Lock()

    def sample(self, prompts: Any, params: Any = None, n: int = 1, stop_flag: Any = None) -> list[list[Completion]]:
        """Sample."""
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
        self.entered.release()
        while self.gate is not None and not self.gate.wait(0.02):
            if stop_flag.is_set():
                raise Interrupted("stopped")
        return [[self._one(list(p), params, number + j) for j in range(n)] for p in prompts]

    def _one(self, prompt: list[int], params: Any, number: int) -> Completion:
        text = self._answer(self.tokenizer.decode(prompt), number)
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        ends = [text.find(s) + len(s) for s in stops if s in text]
        text = text[: min(ends)] if ends else f"{text}<|end|>"
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        reason = "stop" if len(tokens) <= params.max_tokens else "length"
        tokens = tokens[: params.max_tokens]
        top = [[(t, -0.25), (t + 1, -1.5)][: params.top_logprobs] for t in tokens] if params.top_logprobs else None
        made = Completion(tokens, [-0.25 - 0.001 * i for i in range(len(tokens))], reason, 3, top_logprobs=top)
        with self._lock:
            self.drawn.append((prompt, made))
        return made


class Written:
    """Another backend, and what it draws."""

    def __init__(self, backend: Any):
        self.backend, self.tokenizer, self.capabilities = backend, backend.tokenizer, backend.capabilities
        self.drawn: list[tuple[list[int], Completion]] = []

    def sample(self, prompts: Any, params: Any = None, n: int = 1, stop_flag: Any = None) -> list[list[Completion]]:
        """Sample, and write it down."""
        found = self.backend.sample(prompts, params, n, stop_flag=stop_flag)
        self.drawn += [(list(p), c) for p, cs in zip(prompts, found, strict=True) for c in cs]
        return found


def assert_exact(drawn: Sequence[tuple[list[int], Completion]], trajectories: Sequence[Trajectory]) -> None:
    """Every token that was sampled is learned from once, behind exactly what the model had read, and nothing else is."""
    spans = [(t, s["start"], s["end"]) for t in trajectories for s in t["turns"] if s["end"] > s["start"] and t.loss_mask[s["start"]]]
    assert len(spans) == len(drawn)
    def one(prompt: Any, tokens: Any, logprobs: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(prompt), tuple(tokens), tuple(logprobs)

    found = Counter(one(t.tokens[:start], t.tokens[start:end], t.logprobs[start:end]) for t, start, end in spans)
    assert found == Counter(one(p, c.tokens, c.logprobs) for p, c in drawn), "a turn that the model has not sampled so"  # two may differ in a logprob's last bit alone
    assert all(list(t.loss_mask[start:end]) == [1] * (end - start) for t, start, end in spans)
    assert sum(sum(t.loss_mask) for t in trajectories) == sum(len(c.tokens) for _, c in drawn)
