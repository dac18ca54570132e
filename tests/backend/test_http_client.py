"""The client of a training service before one that is none: other answers, other addresses, keys that no header can carry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nexrl_sdk.backend.http import JSON, HTTPTrainServiceClient
from nexrl_sdk.types import BackendError, ConfigError

pytestmark = pytest.mark.timeout(60)


class Stranger(BaseHTTPRequestHandler):
    """Gives every request the answer that a test chose."""

    answer: tuple[int, dict[str, str], bytes] = (200, {}, b"")

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, headers, body = self.answer
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[HTTPTrainServiceClient]:
    """A client of a server that is no training service."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        with HTTPTrainServiceClient(f"http://127.0.0.1:{server.server_address[1]}", "g", key="k", request_timeout=5, retries=0) as client:
            yield client
        server.shutdown()
        thread.join(10)


CALLS: list[Callable[[HTTPTrainServiceClient], Any]] = [lambda c: c.load_checkpoint("a"), lambda c: c.reset(), lambda c: c.health_check(), lambda c: c.publish(), lambda c: c.zero_grad(), lambda c: c.initialize_worker(config_dict={})]


@pytest.mark.parametrize(("answer", "says"), [
    ((302, {"location": "http://other.example/login"}, b""), "302 to http://other.example/login; give the service's own address"), ((204, {}, b""), "with 204"), ((200, {}, b""), "is empty"), ((201, {"content-type": JSON}, b"{}"), "with 201"),
    ((200, {"content-type": JSON}, b"[1]"), r"no mapping but '\[1\]'"), ((200, {"content-type": JSON}, b"null"), "is empty"), ((200, {"content-type": "text/html"}, b"<html>"), "cannot be read"), ((200, {"content-type": JSON}, b'{"a": {"data": "", "dtype": "int64", "shape": [1e400]}}'), "cannot be read"),
    ((404, {"content-type": JSON}, b"[]"), "answered 404"), ((302, {}, b"moved"), "with 302"),
])  # fmt: skip
def test_what_is_no_answer_is_an_error(elsewhere: HTTPTrainServiceClient, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, dict[str, str], bytes], says: str) -> None:
    monkeypatch.setattr(Stranger, "answer", answer)
    for call in CALLS:
        with pytest.raises(BackendError, match=says):
            call(elsewhere)


def test_a_group_without_a_name_is_no_group(elsewhere: HTTPTrainServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stranger, "answer", (200, {"content-type": JSON}, b'{"status": "ok"}'))
    assert elsewhere.zero_grad() == {"status": "ok"}
    with pytest.raises(BackendError, match="no identifier and state"):
        elsewhere.initialize_worker(config_dict={})


@pytest.mark.parametrize(("key", "sent"), [("secret\n", "Bearer secret"), (" a secret\r\n", "Bearer a secret"), ("\n", None), (None, None)])
def test_keys_are_read_without_their_white_space(key: str | None, sent: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEXRL_TRAIN_KEY", raising=False)
    with HTTPTrainServiceClient("http://localhost:1", key=key) as client:
        assert client._caller._headers.get("authorization") == sent


@pytest.mark.parametrize("key", ["sec\nret", "sécret", "sec\x00ret", "sec\ud800ret"])
def test_keys_that_no_header_carries_are_refused_unseen(key: str) -> None:
    with pytest.raises(ConfigError, match=r"a character at place [24]") as e:
        HTTPTrainServiceClient("http://localhost:1", key=key)
    assert "sec" not in str(e.value) and "ret" not in str(e.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999", "http://h:0", "garbage", "http://", "http:///x", "http://a b", "http://h\n", "http://h\ud800", "http://h?x=1", "ftp://h", "http://me:hidden@h", "http://hidden@h:1", "http://me:hid/den@h", "http://hidden@[::1"])
def test_addresses_that_cannot_be_are_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url") as e:
        HTTPTrainServiceClient(url, key="k")
    assert "hid" not in str(e.value)


@pytest.mark.parametrize("url", ["HTTP://localhost:5", "https://host/prefix/", "http://[::1]:8000"])
def test_addresses_that_can_be(url: str) -> None:
    with HTTPTrainServiceClient(url, key="k") as client:
        assert client.base_url == url.rstrip("/")
