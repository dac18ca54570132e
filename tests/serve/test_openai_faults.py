"""The capture proxy where things go wrong: answers that nobody gets, requests that are repeated, wrong, large or hostile, agents that do not end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pydantic
import pytest
from proxy_data import Scripted, assert_exact

openai = pytest.importorskip("openai", reason="the openai client is not installed")

from nexrl_sdk.rollout.session import Session, SessionClosed
from nexrl_sdk.serve.agent_run import AgentError
from nexrl_sdk.serve.openai import CaptureProxy, proxied
from nexrl_sdk.types import BackendError, ConfigError, SamplingParams

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
ASK = [{"role": "user", "content": "How are you?"}]
BODY = {"model": "m", "messages": ASK}


class Form(pydantic.BaseModel):
    """An answer that an agent wants parsed."""

    mood: str


def until(condition: Callable[[], Any]) -> None:
    """Wait for something to become true."""
    while not condition():
        time.sleep(0.01)


@pytest.fixture
def proxies() -> Iterator[Callable[..., CaptureProxy]]:
    made: list[CaptureProxy] = []

    def make(backend: Any, **options: Any) -> CaptureProxy:
        made.append(CaptureProxy(backend, **{"sampling": SamplingParams(max_tokens=100), **options}).start())
        return made[-1]

    yield make
    for proxy in made:
        proxy.stop()


class Counted:
    """A client that counts the requests which it sends."""

    def __init__(self, url: str, **options: Any):
        self.requests = 0
        self.client = openai.OpenAI(base_url=url, **{"api_key": "x", "timeout": 60, "max_retries": 3, **options}, http_client=openai.DefaultHttpxClient(event_hooks={"request": [self._count]}))

    def _count(self, request: Any) -> None:
        self.requests += 1

    def ask(self, **more: Any) -> Any:
        """One request."""
        return self.client.chat.completions.create(**{**BODY, **more})


def gated(answers: Any = ("Good.",)) -> tuple[Scripted, threading.Event]:
    """A backend that waits before it answers."""
    backend = Scripted(answers)
    backend.gate = threading.Event()
    return backend, backend.gate


def running(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A call in a thread, and what came of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


# ---------------------------------------------------------------- answers that nobody gets


def test_a_repeated_request_is_one_turn(proxies: Any) -> None:
    backend, gate = gated()
    place = proxies(backend).session()
    counted = Counted(place.url, timeout=0.3, max_retries=500)
    thread, found = running(counted.ask)
    until(lambda: counted.requests >= 2)  # it has given up on the answer and asked again
    counted.client.timeout = 60
    gate.set()
    thread.join()
    assert found[0].choices[0].message.content == "Good." and backend.calls == 1
    trajectories = place.trajectories()
    assert_exact(backend.drawn, trajectories)
    assert "unreceived" not in place.session.meta


def test_an_answer_that_nobody_gets_is_no_turn(proxies: Any) -> None:
    backend, gate = gated(["First.", "Lost.", "Second."])
    place = proxies(backend).session()
    gate.set()
    counted = Counted(place.url, max_retries=0)
    first = counted.ask().choices[0].message
    gate.clear()
    talk = [*ASK, first, {"role": "user", "content": "More?"}]
    with pytest.raises(openai.APITimeoutError):
        counted.ask(messages=talk, timeout=0.3)
    flight = place.flights._all[-1]
    until(lambda: flight.lost)
    gate.set()
    until(lambda: flight.ended)
    counted.ask(messages=[*ASK, first, {"role": "user", "content": "Else?"}])
    (trajectory,) = place.trajectories()
    assert_exact([backend.drawn[0], backend.drawn[2]], [trajectory])
    (lost,) = place.session.meta["unreceived"]
    assert lost.drawn == backend.drawn[1][1].tokens


def test_the_same_question_asked_twice_is_two_samples(proxies: Any) -> None:
    backend, gate = gated(["One.", "Two."])
    place = proxies(backend).session()
    counted = Counted(place.url)
    threads = [running(counted.ask) for _ in range(2)]
    until(lambda: backend.calls == 2)
    gate.set()
    for thread, _ in threads:
        thread.join()
    assert {found[0].choices[0].message.content for _, found in threads} == {"One.", "Two."}
    counted.ask()
    assert_exact(backend.drawn, place.trajectories())


def test_a_failed_one_of_two_samples_is_drawn_again(proxies: Any) -> None:
    def answer(prompt: str, number: int) -> str:
        if number == 1:
            raise BackendError("the server is away")
        return f"Answer {number}."

    backend = Scripted(answer)
    place = proxies(backend).session()
    first = Counted(place.url)
    assert first.ask().choices[0].message.content == "Answer 0."
    assert Counted(place.url).ask().choices[0].message.content == "Answer 2."  # repeated after an error: not the first one's
    assert backend.calls == 3
    assert_exact(backend.drawn, place.trajectories())


def test_a_lost_answer_is_found_by_any_client(proxies: Any) -> None:
    backend, gate = gated()
    place = proxies(backend).session()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{place.url}/chat/completions", json=BODY, timeout=0.3)
    until(lambda: place.flights._all[0].lost)
    gate.set()
    assert httpx.post(f"{place.url}/chat/completions", json=BODY, timeout=60).json()["choices"][0]["message"]["content"] == "Good."
    assert backend.calls == 1
    assert_exact(backend.drawn, place.trajectories())


def test_a_stream_that_is_left(proxies: Any) -> None:
    backend = Scripted(["One two three."])
    place = proxies(backend).session()
    stream = Counted(place.url).ask(stream=True)
    next(iter(stream))
    stream.close()  # part of the answer was there: the agent has seen it
    assert_exact(backend.drawn, place.trajectories())


def test_a_stream_that_is_left_before_its_answer(proxies: Any) -> None:
    backend, gate = gated()
    place = proxies(backend, keep_alive=0.05).session()
    with httpx.stream("POST", f"{place.url}/chat/completions", json={**BODY, "stream": True}, timeout=60) as response:
        assert next(response.iter_lines()).startswith(":")  # a sign of life
    flight = place.flights._all[0]
    until(lambda: flight.lost)
    gate.set()
    until(lambda: flight.ended)
    assert place.trajectories() == [] and len(place.session.meta["unreceived"]) == 1


def test_a_stream_lives_until_its_answer(proxies: Any) -> None:
    backend, gate = gated()
    place = proxies(backend, keep_alive=0.05).session()
    lines = []
    with httpx.stream("POST", f"{place.url}/chat/completions", json={**BODY, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)
            gate.set()
    assert lines[0].startswith(":") and lines[-2] == "data: [DONE]" and response.headers["content-type"].startswith("text/event-stream")
    assert_exact(backend.drawn, place.trajectories())


def test_an_error_in_a_stream(proxies: Any) -> None:
    backend, _ = gated()
    place = proxies(backend, keep_alive=0.05).session()
    stream = Counted(place.url).ask(stream=True)
    thread, found = running(lambda: list(stream))
    until(lambda: backend.calls)
    place.session.close()
    thread.join()
    assert isinstance(found[0], openai.APIError) and "rollout" in str(found[0])
    with pytest.raises(openai.APIStatusError) as caught:
        Counted(place.url).ask(stream=True)  # early enough for a status
    assert caught.value.status_code == 410


# ---------------------------------------------------------------- a backend that fails


def test_a_failing_backend_is_asked_again(proxies: Any) -> None:
    def answer(prompt: str, number: int) -> str:
        if number == 0:
            raise BackendError("the server is away")
        if number == 1:
            raise RuntimeError("a fault")
        return "Good."

    backend = Scripted(answer)
    place = proxies(backend).session()
    counted = Counted(place.url)
    assert counted.ask().choices[0].message.content == "Good." and counted.requests == 3
    assert_exact(backend.drawn, place.trajectories())


def test_failures_have_a_status(proxies: Any) -> None:
    def answer(prompt: str, number: int) -> str:
        raise BackendError("the server is away")

    place = proxies(Scripted(answer)).session()
    with pytest.raises(openai.InternalServerError, match="the server is away") as caught:
        Counted(place.url, max_retries=0).ask()
    assert caught.value.status_code == 503 and caught.value.code == "backend_error"


def test_a_context_that_overflows(proxies: Any) -> None:
    place = proxies(Scripted(context=64)).session()
    counted = Counted(place.url)
    with pytest.raises(openai.BadRequestError) as caught:
        counted.ask(messages=[{"role": "user", "content": "long " * 40}])
    assert caught.value.code == "context_length_exceeded" and counted.requests == 1
    assert counted.ask().choices[0].finish_reason == "stop" and len(place.trajectories()) == 1


def test_a_closed_session_is_not_asked_again(proxies: Any) -> None:
    proxy = proxies(Scripted())
    place, over, mine = proxy.session(max_calls=1), proxy.session(), proxy.session(cancel=threading.Event())
    over.close()
    Counted(place.url).ask()
    mine.session.cancel.set()
    for url, code in ((place.url, "session_closed"), (over.url, "session_closed"), (mine.url, "session_closed")):
        counted = Counted(url)
        with pytest.raises(openai.APIStatusError) as caught:
            counted.ask()
        assert (caught.value.status_code, caught.value.code, counted.requests) == (410, code, 1)
    with pytest.raises(openai.NotFoundError) as missing:
        Counted(f"{proxy.url}/session/nobody/v1").ask()
    assert missing.value.code == "session_not_found"


def test_a_rollout_that_ends_while_the_model_answers(proxies: Any) -> None:
    backend, _ = gated()
    place = proxies(backend).session()
    thread, found = running(Counted(place.url).ask)
    until(lambda: backend.calls)
    place.close()
    thread.join()
    assert found[0].status_code == 410 and backend.drawn == []


# ---------------------------------------------------------------- requests that are wrong


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "add"}]}]}, "messages.0.tool_calls.0"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}, "messages.0.function_call"),
        ({"messages": ASK, "max_tokens": "5"}, "max_tokens"),
        ({"messages": ASK, "max_tokens": 0}, "max_tokens"),
        ({"messages": ASK, "max_tokens": True}, "max_tokens"),
        ({"messages": ASK, "n": 10**9}, "n"),
        ({"messages": ASK, "temperature": -1}, "temperature"),
        ({"messages": ASK, "stop": ""}, "stop.0"),
        ({"messages": ASK, "stop": ["a", 5]}, "stop.1"),
        ({"messages": ASK, "stream": "yes"}, "stream"),
        ({"messages": ASK, "top_logprobs": 1000}, "top_logprobs"),
        ({"messages": ASK, "tools": [{"type": "custom", "custom": {}}]}, "tools.0"),
        ({"messages": ASK, "tool_choice": "any"}, "tool_choice"),
        ({"messages": ASK, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": ASK, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"messages": ASK, "functions": [{"name": "f"}]}, "functions"),
        ({"messages": ASK, "audio": {}}, "audio"),
        ({"messages": ASK, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": ASK, "prediction": {}}, "prediction"),
        ({"messages": ASK, "store": True}, "store"),
        ({"messages": ASK, "stream_options": {"include": True}}, "stream_options"),
        ({"messages": ASK, "max_token": 5}, "max_token"),
    ],
)
def test_what_is_wrong_is_named(wrongs: Any, http: httpx.Client, body: Any, named: str) -> None:
    answer = http.post(f"{wrongs.url}/chat/completions", json={"model": "m", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == named and error["type"] == "invalid_request_error", error
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("body", "named"),
    [({"prompt": ""}, "prompt"), ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": [5, 10**9]}, "prompt"), ({"prompt": [1.5]}, "prompt"), ({"prompt": {}}, "prompt"), ({}, "prompt"),
     ({"prompt": "a", "echo": True}, "echo"), ({"prompt": "a", "best_of": 3}, "best_of"), ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "logprobs": True}, "logprobs"), ({"prompt": "a", "messages": []}, "messages")],
)  # fmt: skip
def test_what_is_wrong_with_a_text_is_named(wrongs: Any, http: httpx.Client, body: Any, named: str) -> None:
    answer = http.post(f"{wrongs.url}/completions", json={"model": "m", **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == named, answer.text


def test_what_is_not_here_is_said_with_what_is(wrongs: Any) -> None:
    mine = openai.OpenAI(base_url=wrongs.url, api_key=wrongs.api_key, max_retries=0)
    for ask, named in ((lambda: mine.responses.create(model="m", input="hi"), "chat.completions.create"), (lambda: mine.embeddings.create(model="m", input="hi"), "POST embeddings here: the addresses are POST chat/completions")):
        with pytest.raises(openai.NotFoundError, match=named):
            ask()
    with pytest.raises(openai.NotFoundError, match="below /session/ID/v1"):
        mine.with_options(base_url=wrongs.url.removesuffix("/v1")).chat.completions.create(model="m", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="read it from the text"):
        mine.chat.completions.parse(model="m", messages=ASK, response_format=Form)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def wrongs() -> Iterator[Any]:
    with CaptureProxy(Scripted(), max_body=1 << 20) as proxy:
        place = proxy.session()
        yield place
        assert place.session.calls == 0 or not place.trajectories()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400), (b"{", 400), (b"[1, 2]", 400), (b"null", 400), (b'"text"', 400), (b"\xff\xfe", 400), (b'{"messages": NaN}', 400),
        (b"[" * 100_000, 400), (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400), (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", 400),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * (1 << 20) + b'"}]}', 413),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    ],
)  # fmt: skip
def test_bodies_that_are_none(wrongs: Any, http: httpx.Client, content: bytes, status: int) -> None:
    answer = http.post(f"{wrongs.url}/chat/completions", content=content)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def raw(url: str, request: bytes) -> bytes:
    """The first bytes of the answer to bytes."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=60) as wire:
        wire.sendall(request)
        return wire.recv(1 << 16)


def test_requests_of_no_client(wrongs: Any) -> None:
    path = httpx.URL(wrongs.url).path.encode()
    assert b" 413 " in raw(wrongs.url, b"POST %s/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999\r\n\r\n{" % path)
    assert b" 400 " in raw(wrongs.url, b"POST %s/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{" % path)
    assert b" 403 " in raw(wrongs.url, b"GET %s/models HTTP/1.1\r\nhost: x\r\norigin: http://evil\r\n\r\n" % path)
    for ident in (b"..", b"%2e%2e", b"..%2f..%2fetc", b"%00", b"%0d%0aset-cookie:%20a=b", b"a" * 5000, b"*", "é".encode()):
        answer = raw(wrongs.url, b"GET /session/%s/v1/models HTTP/1.1\r\nhost: x\r\n\r\n" % ident)
        assert b" 404 " in answer or b" 400 " in answer
        assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0]
    for method, path in (("GET", "/v1/models"), ("GET", "/session"), ("PUT", f"{httpx.URL(wrongs.url).path}/models"), ("POST", f"{httpx.URL(wrongs.url).path}/embeddings")):
        answer = httpx.request(method, str(httpx.URL(wrongs.url).copy_with(path=path)))
        assert answer.status_code in (404, 405) and answer.json()["error"]["message"]
    answer = httpx.post(f"{wrongs.url}/chat/completions", json={**BODY, "n": 999}, headers={"x-stainless-retry-count": "9" * 500})
    assert answer.status_code == 400


def test_a_key_where_others_can_reach_it(proxies: Any) -> None:
    with pytest.raises(ConfigError, match="needs a key"):
        CaptureProxy(Scripted(), host="0.0.0.0")
    proxy = proxies(Scripted(), host="0.0.0.0", key="secret", address="127.0.0.1")
    place = proxy.session()
    assert place.api_key == "secret" and "0.0.0.0" not in place.url
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        Counted(place.url, api_key="wrong").ask()
    assert httpx.get(f"{place.url}/models").status_code == 401
    assert Counted(place.url, api_key=place.api_key).ask().choices[0].message.content == "Good."


def test_a_proxy_ends(proxies: Any) -> None:
    backend, _ = gated()
    proxy = proxies(backend)
    place = proxy.session()
    thread, found = running(Counted(place.url, max_retries=0).ask)
    until(lambda: backend.calls)
    proxy.stop()
    thread.join()
    assert isinstance(found[0], openai.OpenAIError) and place.session.cancel.is_set()
    proxy.stop()
    with pytest.raises(ConfigError, match="make a new one"):
        proxy.session()
    with pytest.raises(ConfigError, match="no backend"):
        proxies(None).session()
    with pytest.raises(BackendError, match="is the port taken"):
        CaptureProxy(backend, port=proxies(None)._server.servers[0].sockets[0].getsockname()[1]).start()


# ---------------------------------------------------------------- agents that do not end


def test_functions_that_do_not_end(proxies: Any) -> None:
    proxy, ended = proxies(Scripted()), threading.Event()

    async def waits(base_url: str, row: Any) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    def asks_again(base_url: str, row: Any) -> str:
        counted = Counted(base_url)
        try:
            while True:
                counted.ask()
        finally:
            ended.set()

    with pytest.raises(AgentError, match=r"within 0\.2 s"):
        proxy.rollout(waits, {}, timeout=0.2)
    assert ended.wait(60)
    ended.clear()
    with pytest.raises(AgentError, match=r"within 1 s") as caught:
        proxy.rollout(asks_again, {}, timeout=1)
    assert caught.value.trajectories and ended.wait(60)  # refused, it has ended
    cancel = threading.Event()
    thread, found = running(lambda: closed(lambda: proxied(waits, proxy=proxy)("q", session=Session(Scripted(), cancel=cancel), data={}, cancel=cancel)))
    until(lambda: proxy.places.open)
    cancel.set()
    thread.join()
    assert found == ["closed"] and not proxy.places.open


def closed(work: Callable[[], Any]) -> Any:
    """What becomes of a call whose rollout ends."""
    try:
        return work()
    except SessionClosed:
        return "closed"


FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}\\n")
if sys.argv[2] == "stay":
    time.sleep(1000)
print("done")
"""


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("how", ["deadline", "cancel", "leaves"])
def test_processes_end_with_all_they_started(proxies: Any, tmp_path: Any, how: str) -> None:
    session, note = Session(Scripted()), tmp_path / "pids"
    agent = proxied([sys.executable, "-S", "-c", FAMILY, str(note), "go" if how == "leaves" else "stay"], proxy=proxies(None), timeout=1.5 if how == "deadline" else None)
    thread, found = running(lambda: closed(lambda: agent("q", session=session, data={}, cancel=session.cancel)))
    until(lambda: (note.exists() and note.read_text().endswith("\n")) or not thread.is_alive())
    if how == "cancel":
        session.close()
    thread.join()
    assert isinstance(found[0], AgentError) if how == "deadline" else found == [{"cancel": "closed", "leaves": "done"}[how]]
    if note.exists():  # else: the deadline came before it had begun
        for pid in map(int, note.read_text().split()):
            until(lambda pid=pid: gone(pid))


def test_a_web_proxy_does_not_stand_between(proxies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    code = "import openai; print(openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}]).choices[0].message.content)"
    session = Session(Scripted())
    assert proxied([sys.executable, "-c", code], proxy=proxies(None))("q", session=session, data={}, cancel=session.cancel) == "Good."
