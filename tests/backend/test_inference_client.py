"""The HTTP client against a server that misbehaves on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from nexrl_sdk.backend.inference import OpenAIInferenceClient
from nexrl_sdk.types import BackendError, ConfigError, Interrupted, SamplingParams

pytestmark = pytest.mark.timeout(60)


class Fake:
    """An OpenAI-compatible server of one function."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, Any]]):
        self.answer, self.seen, self.hang, self.models = answer, [], threading.Event(), {"data": [{"id": "m", "max_model_len": 100}]}
        self.hang.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self, code: int, body: Any) -> None:
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self) -> None:
                fake.hang.wait(20)
                known = {"/v1/models": fake.models, "/health": {}}
                self.reply(200 if self.path in known else 404, known.get(self.path, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.seen.append((self.path, body, self.headers.get("authorization")))
                fake.hang.wait(20)
                code, value = fake.answer(body)
                if code == 0:
                    self.close_connection = True
                    self.connection.close()
                else:
                    self.reply(code, value)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[..., Fake]]:
    made: list[Fake] = []

    def make(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Fake:
        made.append(Fake(answer))
        return made[-1]

    yield make
    for fake in made:
        fake.hang.set()
        fake.server.shutdown()
        fake.server.server_close()


def good(body: dict[str, Any]) -> tuple[int, Any]:
    """As vLLM answers on /v1/completions."""
    row = {"finish_reason": "stop", "token_ids": [5, 1], "logprobs": {"token_logprobs": [-0.5, -0.25], "top_logprobs": [{"token_id:5": -0.5, "token_id:7": -0.4}, {"token_id:1": -0.25}]}}
    return 200, {"choices": [{"index": i, **row, "prompt_logprobs": [None, {"4": {"logprob": -1.5}}]} for i in range(body["n"])]}


def without(*names: str) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        code, value = good(body)
        for choice in value["choices"]:
            for name in names:
                choice.pop(name)
        return code, value

    return answer


def test_completions_route(serve: Any) -> None:
    fake = serve(good)
    with OpenAIInferenceClient(fake.url + "/v1", key="secret") as client:
        rows = client.sample([[3, 4], [3, 4]], SamplingParams(max_tokens=500, top_logprobs=1, prompt_logprobs=True, seed=5), 65)
        assert [len(r) for r in rows] == [65, 65] and "secret" not in repr(client) + client._repr_html_()
        c = rows[0][0]
        assert (c.tokens, c.logprobs, c.top_logprobs, c.weight_version) == ([5, 1], [-0.5, -0.25], [[(7, -0.4)], [(1, -0.25)]], 0)
        np.testing.assert_allclose(c.prompt_logprobs, [np.nan, -1.5])
        np.testing.assert_allclose(client.logprobs([[3, 4], [3], []])[0], [np.nan, -1.5])
    path, body, key = fake.seen[0]
    assert (path, body["prompt"], body["return_token_ids"], body["max_tokens"], key) == ("/v1/completions", [3, 4], True, 98, "Bearer secret")
    assert sorted((b["n"], b["seed"]) for _, b, _ in fake.seen[:4]) == [(1, 69), (1, 69), (64, 5), (64, 5)]
    with pytest.raises(BackendError, match="closed"):
        client.sample([[1]])


@pytest.mark.parametrize(("answer", "message"), [
    (without("token_ids"), "tokenised again"),
    (without("logprobs"), "0 logprobs for 2 tokens"),
    (lambda _: (200, {"choices": [{"index": 0, "token_ids": [5, 1], "logprobs": {"token_logprobs": [-0.5, None]}}]}), "logprobs"),
    (lambda _: (200, {"choices": []}), "without choices"),
    (lambda _: (200, b"{broken"), "broken JSON"),
    (lambda _: (400, {"error": {"message": "too long"}}), "400: too long"),
    (lambda _: (401, {}), "key is missing or wrong"),
    (lambda _: (500, {"error": {"message": "engine died"}}), "500: engine died"),
])  # fmt: skip
def test_answers_that_cannot_be_used(serve: Any, answer: Any, message: str) -> None:
    fake = serve(answer)
    with OpenAIInferenceClient(fake.url) as client, pytest.raises(BackendError, match=message):
        client.sample([[3, 4]])
    assert len(fake.seen) == 1  # not tried again


def test_passing_failures_are_tried_again(serve: Any) -> None:
    codes = iter([503, 0, 429])
    fake = serve(lambda body: (c, {}) if (c := next(codes, 200)) != 200 else good(body))
    with OpenAIInferenceClient(fake.url) as client:
        assert client.sample([[3, 4]])[0][0].tokens == [5, 1] and len(fake.seen) == 4
    never = serve(lambda body: (503, {"detail": "full"}))
    with OpenAIInferenceClient(never.url, max_retries=1, diagnose=lambda: "it is a test") as client, pytest.raises(BackendError, match=r"failed 2 times.*full; it is a test"):
        client.sample([[3, 4]])


def test_nothing_listens() -> None:
    from nexrl_sdk.backend.vllm import free_port

    with OpenAIInferenceClient(f"http://127.0.0.1:{free_port()}", max_retries=1) as client, pytest.raises(BackendError, match="failed 2 times, last with ConnectError"):
        client.sample([[1]])


def test_unknown_model(serve: Any) -> None:
    with OpenAIInferenceClient(serve(good).url, "n") as client, pytest.raises(ConfigError, match=r"does not serve 'n'.*valid: m"):
        client.sample([[1]])


def test_no_endpoints_for_weights(serve: Any) -> None:
    with OpenAIInferenceClient(serve(good).url) as client:
        for call in (client.pause, lambda: client.update_from_folder("/x", 1), lambda: client.begin_broadcast({})):
            with pytest.raises(BackendError, match="no endpoints"):
                call()


def test_silence_is_reported_and_a_flag_ends_the_wait(serve: Any) -> None:
    fake = serve(good)
    with OpenAIInferenceClient(fake.url, stall_timeout=1) as client:
        client.connect()
        fake.hang.clear()
        start = time.monotonic()
        with pytest.raises(BackendError, match="no sign of life for 1 s"):
            client.sample([[3, 4]])
        flag = threading.Event()
        threading.Timer(0.2, flag.set).start()
        with pytest.raises(Interrupted):
            client.sample([[3, 4]], stop_flag=flag)
        assert time.monotonic() - start < 40
        fake.hang.set()
        assert client.sample([[3, 4]])[0][0].tokens == [5, 1]


def test_slow_answer_is_no_silence(serve: Any) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(1.2)
        return good(body)

    with OpenAIInferenceClient(serve(slow).url, stall_timeout=0.6) as client:
        assert client.sample([[3, 4]])[0][0].tokens == [5, 1]
    with OpenAIInferenceClient(serve(slow).url, timeout=0.5) as client, pytest.raises(BackendError, match=r"not answered within|no answer"):
        client.sample([[3, 4]])


def test_many_threads(serve: Any) -> None:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    fake = serve(good)
    with OpenAIInferenceClient(fake.url, concurrency=4) as client, ThreadPoolExecutor(8) as pool:
        assert all(r[0][0].tokens == [5, 1] for r in pool.map(lambda i: client.sample([[i]]), range(40)))

        async def within_a_loop() -> Any:  # as in a notebook
            return await client.sample_async([[1]]), client.sample([[2]])

        assert len(asyncio.run(within_a_loop())) == 2


def changed(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """A good answer whose choices were altered."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        code, value = good(body)
        return code, {"choices": change(value["choices"]) or value["choices"]}

    return answer


def drawn(**more: Any) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    return changed(lambda choices: [{**c, **more} for c in choices])


def logged(*logprobs: Any) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    return drawn(logprobs={"token_logprobs": list(logprobs)})


@pytest.mark.parametrize(("answer", "says"), [
    (changed(lambda c: c[:1]), "asked for 4 completions"), (changed(lambda c: [*c, {**c[0], "index": 4}]), "asked for 4 completions"), (changed(lambda c: [{**x, "index": 0} for x in c]), "asked for 4 completions"),
    (logged(-0.5, float("nan")), "logprobs that are none"), (logged(-0.5, float("-inf")), "logprobs that are none"), (logged(3.0, -1.0), "logprobs that are none"), (logged("nan", -1.0), "logprobs that are none"), (logged(True, -1.0), "logprobs that are none"),
    (drawn(token_ids=[10**10, 1]), "ids that are none"), (drawn(token_ids=[-5, 1]), "ids that are none"), (drawn(token_ids=[1.7, 1]), "ids that are none"), (drawn(token_ids="51"), "ids that are none"),
    (drawn(token_ids=[5] * 50, logprobs={"token_logprobs": [-0.1] * 50}), "at most 4 were asked for"), (drawn(finish_reason="error"), "ended a completion by 'error'"), (drawn(finish_reason=5), "ended a completion by '5'"),
    (drawn(weight_versions=[{"version": "3", "start": 0, "end": 1}]), "weights for 1 of 2"), (drawn(weight_versions=[5]), "as no OpenAI-compatible server does"), (changed(lambda c: ["text"] * 4), "as no OpenAI-compatible server does"),
    (drawn(logprobs=[1]), "as no OpenAI-compatible server does"), (drawn(logprobs={"content": [{}, {}]}), "as no OpenAI-compatible server does"), (lambda body: (200, b"[" * 100_000), "broken JSON"), (lambda body: (302, {}), "a redirect to nowhere"),
])  # fmt: skip
def test_what_cannot_be_trained_on_is_refused(serve: Any, answer: Any, says: str) -> None:
    with OpenAIInferenceClient(serve(answer).url, max_retries=0) as client, pytest.raises(BackendError, match=says):
        client.sample([[3, 4]], SamplingParams(max_tokens=4), 4)


@pytest.mark.parametrize("models", [{}, [], {"data": {}}, {"data": [5]}, {"data": [{"id": "m", "max_model_len": "100"}]}, {"data": [{"id": "m", "max_model_len": -1}]}, b"<html>", b""])
def test_what_lists_its_models_otherwise_is_no_such_server(serve: Any, models: Any) -> None:
    fake = serve(good)
    fake.models = models
    with OpenAIInferenceClient(fake.url, max_retries=0) as client, pytest.raises((BackendError, ConfigError), match=r"/v1/models|does not serve"):
        client.connect()


@pytest.mark.parametrize("url", ["garbage", "http://[::1", "http://127.0.0.1:99999", "ftp://host", "http://user:hunter2@host:1", "http://"])
def test_an_address_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url") as e:
        OpenAIInferenceClient(url)
    assert "hunter2" not in str(e.value)


def test_a_key_of_a_file_is_read_and_one_that_cannot_be_sent_is_not_shown(serve: Any) -> None:
    fake = serve(good)
    with OpenAIInferenceClient(fake.url, key="secret\n") as client:
        client.sample([[3, 4]], SamplingParams(max_tokens=4))
    assert fake.seen[0][2] == "Bearer secret"
    for key in ("top\nsecret", "schlüssel-secret"):
        with pytest.raises(ConfigError, match="header cannot carry") as e:
            OpenAIInferenceClient(fake.url, key=key)
        assert "secret" not in str(e.value)
