"""Faults and hostile input: a server that dies, a client that vanishes, requests that are wrong, large or many."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tinker_data import INPUTS, random_batch

tinker = pytest.importorskip("tinker", reason="the tinker client is not installed")
from tinker import types

from nexrl_sdk import serve
from nexrl_sdk.backend.api_server import start_api_server
from nexrl_sdk.backend.vllm import free_port
from nexrl_sdk.serve.hub import Limits
from nexrl_sdk.serve.proto import messages
from nexrl_sdk.types import ConfigError

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Any]:
    with serve("tinker", models={"tiny": model}, max_body=1 << 20, limits=Limits(samples=64, rank=64, snapshots=2, adapters=2)) as running:
        yield running


class Raw:
    """Requests without the client."""

    def __init__(self, url: str, **headers: str):
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", **({"json": body} if "content" not in options else {}), **options)

    def session(self) -> str:
        return str(self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}).json()["session_id"])

    def result(self, answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        for _ in range(20):
            found = self.post("retrieve_future", {"request_id": answer.json()["request_id"]})
            if found.status_code != 408:
                return found.json() if "json" in found.headers["content-type"] else found.content
        raise AssertionError("no result")

    def model(self, session: str, seq: int = 0, **lora: Any) -> str:
        made = self.post("create_model", {"session_id": session, "model_seq_id": seq, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1, **lora}})
        return str(self.result(made)["model_id"])

    def train(self, model: str, seq: int, loss: str = "cross_entropy", data: int = 1, forward_only: bool = False, token: int = 5) -> httpx.Response:
        return self.post("forward_backward", content=body(model, seq, loss, data, forward_only, token), headers={"content-type": "application/x-protobuf"})


def body(model: str, seq: int, loss: str = "cross_entropy", data: int = 1, forward_only: bool = False, token: int = 5) -> bytes:
    known = messages()
    request = known["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for d in random_batch(seq, data):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.full(len(d["tokens"]), token, np.int32).tobytes()
        for k in INPUTS["cross_entropy"]:
            tensor = datum.loss_fn_inputs[k]
            tensor.dense, tensor.dtype = d[k].tobytes(), 2 if k == "target_tokens" else 1
            tensor.shape.append(len(d[k]))
    return bytes(request.SerializeToString())


@pytest.fixture
def raw(server: Any) -> Raw:
    return Raw(server.url)


# what one client cannot do to another ---------------------------------------------------------------------------------


def test_numbers_that_are_used_twice(raw: Raw, server: Any) -> None:
    """A repetition is the same call; another call of its number is refused, and the first keeps its answer."""
    session = raw.session()
    model = raw.model(session)
    first = raw.train(model, 1)
    again = raw.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    assert again.status_code == 409 and "number of another call" in again.json()["message"] and isinstance(raw.result(first), bytes)
    create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    assert raw.result(raw.post("create_model", create))["model_id"] == model
    server.hub.ops._ops.pop(f"{model}:0")  # as when its answer was forgotten
    assert raw.post("create_model", create).status_code == 409
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    ident = raw.post("create_sampling_session", sampler).json()["sampling_session_id"]
    assert raw.post("create_sampling_session", sampler).json()["sampling_session_id"] == ident
    assert "there already" in raw.result(raw.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}))["error"]
    sample = {"sampling_session_id": ident, "seq_id": 1, "num_samples": 1, "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 3}}
    assert raw.post("asample", sample).status_code == 200 and raw.post("asample", {**sample, "num_samples": 5}).status_code == 409


def test_settings_that_cannot_be_heard_are_refused(raw: Raw) -> None:
    model = raw.model(raw.session())
    for seq, more in enumerate(({"ttl_seconds": 3600}, {"user_metadata": {"a": "b"}}), 1):
        answer = raw.post("save_weights_for_sampler", {"model_id": model, "seq_id": seq, "sampling_session_seq_id": 0, **more})
        assert answer.status_code == 400 and f"{next(iter(more))} is for weights with a name" in answer.json()["message"]
    assert raw.result(raw.post("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}))["sampling_session_id"]


def test_models_on_their_way_count(model: Path) -> None:
    with serve("tinker", models={"tiny": model}, limits=Limits(models=2)) as running:
        raw = Raw(running.url)
        session = raw.session()
        ask = [raw.post("create_model", {"session_id": session, "model_seq_id": i, "base_model": "tiny", "lora_config": {"rank": 4}}) for i in range(6)]
        assert [a.status_code for a in ask] == [200, 200, 429, 429, 429, 429]
        assert all(raw.result(a)["model_id"] for a in ask[:2]) and not running.hub._making


def test_a_wrong_sample_is_its_own_fault_alone(raw: Raw) -> None:
    session = raw.session()
    ident = raw.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}).json()["sampling_session_id"]
    sample = {"sampling_session_id": ident, "num_samples": 1, "prompt": {"chunks": [{"tokens": [5]}]}}
    stops: list[Any] = [None, [1 << 70], None, list(range(1001)), None, [-1], None, ["\ud800"], None]
    answers = [raw.post("asample", content=json.dumps({**sample, "seq_id": i, "sampling_params": {"max_tokens": 30, "stop": s}}).encode()) for i, s in enumerate(stops)]
    for stop, answer in zip(stops, answers, strict=True):
        if stop is None:
            assert isinstance(raw.result(answer), bytes)
        else:
            assert answer.status_code == 422 or raw.result(answer)["category"] == "user", (stop, answer.text)


def test_small_requests_that_would_become_large(raw: Raw) -> None:
    model = raw.model(raw.session())
    request = messages()["ForwardBackwardRequest"].FromString(body(model, 1))
    inputs = request.data[0].loss_fn_inputs
    length, target = len(inputs["weights"].dense) // 4, inputs["target_tokens"]
    target.Clear()
    target.dtype = 2
    target.sparse_csr.crow_indices = np.zeros(length + 1, np.int64).tobytes()
    target.shape.extend([length, 1 << 22])
    answer = raw.post("forward_backward", content=request.SerializeToString(), headers={"content-type": "application/x-protobuf"})
    assert "numbers" in raw.result(answer)["error"]
    cases: list[tuple[str, bytes, int]] = [
        ("session_heartbeat", b"[1]", 422),
        ("get_info", b"3", 422),
        ("retrieve_future", b'{"request_id": NaN}', 422),
        ("create_session", b'{"tags": [], "user_metadata": {"x": "' + b"y" * 100_000 + b'"}}', 413),
    ]
    for path, content, status in cases:
        assert raw.post(path, content=content).status_code == status, path
    assert raw.http.get("/api/v1/checkpoints?limit=" + "0" * 20 + "9" * 4400).status_code == 422
    step = raw.post("optim_step", content=b'{"model_id": "%b", "seq_id": 2, "adam_params": {"learning_rate": 1%b}}' % (model.encode(), b"0" * 400))
    assert step.status_code == 422 or raw.result(step)["category"] == "user"


def test_a_checkpoint_that_cannot_be_read_leaves_no_model(raw: Raw, server: Any) -> None:
    session = raw.session()
    model = raw.model(session)
    path = raw.result(raw.post("save_weights", {"model_id": model, "path": "cut", "seq_id": 1}))["path"]
    state = server.hub.store.find(model, "weights", "cut").folder / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    made = raw.post("load_weights", {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": True})
    assert "state.safetensors" in raw.result(made)["error"]
    assert raw.post("get_info", {"model_id": f"{session}:train:5"}).status_code == 404


def test_records_that_are_damaged(model: Path, tmp_path: Path) -> None:
    """A torn line swallows no other, a damaged record hides no other, and a folder has one server."""
    with serve("tinker", models={"tiny": model}, root=tmp_path) as running:
        raw = Raw(running.url)
        session = raw.session()
        trained = raw.model(session)
        raw.result(raw.post("save_weights", {"model_id": trained, "path": "a", "seq_id": 1}))
        raw.result(raw.post("save_weights", {"model_id": trained, "path": "b", "seq_id": 2}))
        with pytest.raises(ConfigError, match="another server's folder"), serve("tinker", models={"tiny": model}, root=tmp_path):
            pass
    record = tmp_path / "sessions" / f"{session}.jsonl"
    record.write_bytes(record.read_bytes() + b'{"event": "sampler", "id\xff')
    next(tmp_path.glob("runs/*/weights/a/info.json")).write_text('{"run_id": ')
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{}")
    with serve("tinker", models={"tiny": model}, root=tmp_path) as running:
        raw = Raw(running.url)
        assert raw.post("session_heartbeat", {"session_id": session}).status_code == 200
        made = raw.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 3, "base_model": "tiny"})
        assert [c["checkpoint_id"] for c in raw.http.get("/api/v1/checkpoints").json()["checkpoints"]] == ["weights/b"]
        assert raw.http.get("/api/v1/training_runs").json()["cursor"]["total_count"] == 1
        assert raw.http.delete(f"/api/v1/training_runs/{trained}/checkpoints/weights/a").status_code == 204
    with serve("tinker", models={"tiny": model}, root=tmp_path) as running:
        assert Raw(running.url).http.get(f"/api/v1/samplers/{made.json()['sampling_session_id']}").status_code == 200


# order and repetition ------------------------------------------------------------------------------------------------


def test_calls_run_by_their_numbers_and_once(raw: Raw) -> None:
    model = raw.model(raw.session())
    step = raw.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.01}})
    second, first = raw.train(model, 2), raw.train(model, 1)
    again = [raw.train(model, 1).json(), raw.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.01}}).json()]
    assert again == [first.json(), step.json()]
    assert isinstance(raw.result(second), bytes)
    norm = raw.result(step)["metrics"]["grad_norm"]
    assert raw.result(step)["metrics"]["grad_norm"] == norm > 0
    assert "no gradients to step on" in raw.result(raw.post("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}}))["error"]


def test_a_call_whose_forerunner_never_comes_is_given_up(model: Path) -> None:
    with serve("tinker", models={"tiny": model}, limits=Limits(gap=0.5)) as running:
        raw = Raw(running.url)
        late = raw.train(raw.model(raw.session()), 2)
        answer = raw.result(late)
        assert answer["category"] == "user" and "call 1" in answer["error"] and "never came" in answer["error"]


def test_a_part_that_fails_takes_the_step_with_it(raw: Raw) -> None:
    """No half step, and all is well with the next batch."""
    model = raw.model(raw.session())
    good, bad, more = raw.train(model, 1), raw.train(model, 2, token=100_000), raw.train(model, 3)
    step = raw.post("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.1}})
    assert isinstance(raw.result(good), bytes)
    assert "outside the model's vocabulary" in raw.result(bad)["error"]
    assert "not run" in raw.result(more)["error"]
    refused = raw.result(step)
    assert "no step was made" in refused["error"] and refused["category"] == "user"
    assert isinstance(raw.result(raw.train(model, 5)), bytes)
    assert raw.result(raw.post("optim_step", {"model_id": model, "seq_id": 6, "adam_params": {}}))["metrics"]["grad_norm"] > 0


# wrong requests ------------------------------------------------------------------------------------------------------


def test_wrong_bodies_are_refused_by_name(raw: Raw) -> None:
    session = raw.session()
    model = raw.model(session)
    sampler = raw.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}).json()["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 3}}
    create = {"session_id": session, "model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 4}}
    cases: list[tuple[str, Any, int, str]] = [
        ("create_model", {**create, "base_model": "tinny"}, 404, "did you mean 'tiny'"),
        ("create_model", {**create, "lora_config": None}, 400, "LoRA"),
        ("create_model", {**create, "lora_config": {"rank": 0}}, 422, "rank"),
        ("create_model", {**create, "lora_config": {"rank": 65}}, 400, "1 to 64"),
        ("create_model", {**create, "lora_config": {"rank": 4, "alpha": 3}}, 422, "alpha"),
        ("create_model", {**create, "optimizer_config": {"type": "dimuon"}}, 422, "optimizer_config"),
        ("create_model", {**create, "session_id": "nobody"}, 404, "no session"),
        ("create_model", {**create, "session_id": "../../etc/passwd"}, 404, "no session"),
        ("create_model", [1], 422, "object"),
        ("optim_step", {"model_id": model, "seq_id": "one"}, 422, "seq_id"),
        ("optim_step", {"model_id": model, "seq_id": 0}, 400, "1 or more"),
        ("optim_step", {"model_id": "x:train:0", "seq_id": 1}, 404, "no session"),
        ("optim_step", {"model_id": f"{session}:train:7", "seq_id": 1}, 404, "not in training"),
        ("asample", {**sample, "num_samples": 65}, 400, "1 to 64"),
        ("asample", {**sample, "num_samples": 0}, 422, "num_samples"),
        ("asample", {**sample, "sampling_params": {"max_tokens": 3, "min_p": 0.1}}, 422, "min_p"),
        ("asample", {**sample, "sampling_params": {"max_tokens": 3, "temperature": -1}}, 400, "temperature"),
        ("asample", {**sample, "sampling_params": {"max_tokens": 3, "top_p": 7}}, 400, "top_p"),
        ("asample", {**sample, "prompt": {"chunks": [{"type": "image", "data": ""}]}}, 422, "chunks"),
        ("asample", {**sample, "sampling_session_id": f"{session}:sample:99"}, 404, "never made"),
        ("asample", {**sample, "record_stability_info": True}, 400, "stable_reinforce"),
        ("asample", {**sample, "prompt_logprobs": True, "prompt_logprobs_last_n": 5}, 400, "last_n"),
        ("asample", {**sample, "target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]}}, 400, "len(prompt) - 1"),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 5, "model_path": "tinker://a/b"}, 400, "no checkpoint's path"),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 5, "model_path": "tinker://../sampler_weights/x"}, 400, "a run's id"),
        ("load_weights", {"model_id": model, "path": "tinker://x/weights/y", "optimizer": True}, 400, "seq_id"),
        ("load_weights", {"session_id": session, "model_seq_id": 3, "path": f"tinker://{model}/weights/none", "optimizer": True}, 404, "no checkpoint"),
        ("load_weights", {"session_id": session, "model_seq_id": 3, "path": f"tinker://{model}/weights/none", "optimizer": True, "weights_access_token": "x"}, 422, "weights_access_token"),
        ("copy_weights", {}, 404, "not part of this server"),
        ("billing/usage/events", {}, 404, "not part of this server"),
    ]
    for path, given, status, words in cases:
        answer = raw.post(path, given)
        assert (answer.status_code, words in answer.json()["message"]) == (status, True), (path, given, answer.status_code, answer.text)
    for seq, (name, words) in enumerate([("../../up", "letters, digits"), ("a/b", "letters, digits"), ("x" * 300, "letters, digits"), ("", "letters, digits")], 1):
        assert words in raw.result(raw.post("save_weights", {"model_id": model, "path": name, "seq_id": seq}))["error"]
    assert "learning_rate" in raw.result(raw.post("optim_step", {"model_id": model, "seq_id": 5, "adam_params": {"learning_rate": "much"}}))["error"]
    assert "dimuon" in raw.result(raw.post("optim_step", {"model_id": model, "seq_id": 6, "optimizer_params": {"type": "dimuon"}}))["error"]


def test_bodies_that_are_no_requests(raw: Raw) -> None:
    model = raw.model(raw.session())
    proto = {"content-type": "application/x-protobuf"}
    cases = [
        (b"\xff\xff\xff", proto, 400, "no ForwardBackwardRequest"),
        (b"", proto, 400, "names no model_id"),
        (b"x" * ((1 << 20) + 1), proto, 413, "may be"),
        (b"\x28\xb5\x2f\xfd garbage", {**proto, "content-encoding": "zstd"}, 400, "zstd"),
        (b"x", {**proto, "content-encoding": "br"}, 415, "zstd"),
    ]
    for content, headers, status, words in cases:
        answer = raw.post("forward_backward", content=content, headers=headers)
        assert answer.status_code == status and words in answer.json()["message"], answer.text
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    assert raw.post("forward_backward", content=bomb, headers={**proto, "content-encoding": "zstd"}).status_code == 413
    for content in (b"{", b"[" * 100_000, b"\xff"):
        assert raw.post("optim_step", content=content).status_code in (400, 422)
    known = messages()
    for change in ("short", "columns", "huge", "dtype", "name", "image"):
        request = known["ForwardBackwardRequest"].FromString(body(model, 1))
        request.seq_id = 1 + ["short", "columns", "huge", "dtype", "name", "image"].index(change)
        target = request.data[0].loss_fn_inputs["target_tokens"]
        if change == "short":
            target.dense = target.dense[:-8]
        elif change == "columns":
            target.shape[:] = [2, 2]
        elif change == "huge":
            target.shape[:] = [1 << 40, 1 << 40]
        elif change == "dtype":
            target.dtype = 9
        elif change == "name":
            request.data[0].loss_fn_inputs["adventages"].CopyFrom(target)
        else:
            request.data[0].model_input[0].image.data = b"png"
        answer = raw.result(raw.post("forward_backward", content=request.SerializeToString(), headers=proto))
        assert answer["category"] == "user" and ("datum 0" in answer["error"] or change == "huge"), answer


def test_keys_and_browsers(model: Path) -> None:
    with serve("tinker", models={"tiny": model}, key="tml-secret") as running:
        assert "tml-secret" not in repr(running)
        for headers, status in (({}, 401), ({"x-api-key": "tml-wrong"}, 401), ({"x-api-key": "tml-secret"}, 200), ({"x-api-key": "tml-secret", "origin": "http://evil"}, 403)):
            answer = Raw(running.url, **headers).post("client/config", {"sdk_version": "0"})
            assert answer.status_code == status and "tml-secret" not in answer.text
        with tinker.ServiceClient() as client:
            path = client.create_lora_training_client("tiny", rank=2).result().save_weights_external("x").result().path
        urls = tinker.RestClient(base_url=os.environ["TINKER_BASE_URL"]).get_external_weights_urls(path).result().urls
        _, url = next(iter(urls.items()))
        assert httpx.get(url).status_code == 200 and httpx.get(url.split("?")[0]).status_code == 401
        assert httpx.get(url.replace("sig=", "sig=0")).status_code == 401
        with pytest.raises(tinker.AuthenticationError):
            tinker.ServiceClient(api_key="tml-other").create_sampling_client(base_model="tiny").result()
    with pytest.raises(ConfigError, match="tml-"), serve("tinker", models={"tiny": model}, key="secret"):
        pass


# many, and gone ------------------------------------------------------------------------------------------------------


def test_two_hundred_requests_at_once(server: Any, raw: Raw) -> None:
    """From the client: samples of several samplers and training together; every one is answered, and nothing stays."""
    base = server.hub.bases["tiny"]
    before = len(base.model.adapters)
    with tinker.ServiceClient() as client:
        trainers = [client.create_lora_training_client("tiny", rank=2, seed=i).result() for i in range(4)]
        samplers = [t.save_weights_and_get_sampling_client().result() for t in trainers]
        futures: list[Any] = []
        for i in range(40):
            futures += [s.sample(types.ModelInput.from_ints([5, i + 2]), 2, types.SamplingParams(max_tokens=8, seed=i)) for s in samplers]
            data = [types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7], "weights": [1.0, 1.0]})]
            futures.append(trainers[i % 4].forward_backward(data, "cross_entropy"))
        answers = [f.result() for f in futures]
    assert len(answers) == 200 and all(len(a.sequences) == 2 for a in answers if hasattr(a, "sequences"))
    deadline = time.monotonic() + 20
    while len(base.model.adapters) > before + 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(base.model.adapters) <= before + 4 and base.under_way == 0 and not base.slots._pins


def test_too_many_requests_are_told_to_wait(model: Path) -> None:
    """429 where the line is full, which the client waits out."""
    with serve("tinker", models={"tiny": model}, limits=Limits(requests=4, payload=100)) as running:
        raw = Raw(running.url)
        session = raw.session()
        sampler = raw.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}).json()["sampling_session_id"]
        sample = {"sampling_session_id": sampler, "num_samples": 4, "prompt": {"chunks": [{"tokens": [5] * 20}]}, "sampling_params": {"max_tokens": 200, "stop": []}}
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            statuses = list(pool.map(lambda i: raw.post("asample", {**sample, "seq_id": i}).status_code, range(16)))
        assert set(statuses) == {200, 429}
        trained = raw.model(session)
        assert raw.train(trained, 3).status_code == 429
        assert isinstance(raw.result(raw.train(trained, 1)), bytes)
        with tinker.ServiceClient() as client:
            own = client.create_sampling_client(base_model="tiny").result()
            futures = [own.sample(types.ModelInput.from_ints([5, i]), 1, types.SamplingParams(max_tokens=4)) for i in range(12)]
            assert all(f.result().sequences for f in futures)


def test_a_client_that_vanishes_leaves_nothing(model: Path) -> None:
    with serve("tinker", models={"tiny": model}, limits=Limits(session=5.0)) as running:
        raw, base = Raw(running.url), running.hub.bases["tiny"]
        session = raw.session()
        trained = raw.model(session)
        raw.result(raw.post("save_weights", {"model_id": trained, "path": "kept", "seq_id": 1}))
        snapshot = raw.result(raw.post("save_weights_for_sampler", {"model_id": trained, "seq_id": 2, "sampling_session_seq_id": 0}))["sampling_session_id"]
        for i in range(8):
            raw.post("asample", {"sampling_session_id": snapshot, "seq_id": i, "num_samples": 64, "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 250, "stop": []}})
        raw.train(trained, 9)
        assert base.model.adapters
        deadline = time.monotonic() + 40
        while (base.model.adapters or base.under_way) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not base.model.adapters and base.under_way == 0 and not list((running.hub.store.root / "snapshots").glob("*"))
        gone = raw.train(trained, 3)
        assert gone.status_code == 410 and "no sign of life" in gone.json()["message"]
        assert raw.post("session_heartbeat", {"session_id": session}).status_code == 410
        assert [c.name for c in running.hub.store.list(trained)] == ["kept"]


def test_old_unnamed_weights_go_and_say_so(raw: Raw, server: Any) -> None:
    model = raw.model(raw.session())
    made = [raw.result(raw.post("save_weights_for_sampler", {"model_id": model, "seq_id": i + 1, "sampling_session_seq_id": i}))["sampling_session_id"] for i in range(4)]
    request = {"seq_id": 1, "num_samples": 1, "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 2}}
    old = raw.post("asample", {**request, "sampling_session_id": made[0]})
    assert old.status_code == 404 and "the newest 2" in old.json()["message"]
    assert isinstance(raw.result(raw.post("asample", {**request, "sampling_session_id": made[3]})), bytes)


def test_a_server_that_is_killed_between_gradient_and_step(model: Path, tmp_path: Path) -> None:
    """The client is told, no half step is made, samplers go on, and a resume is exact."""
    port = free_port()
    options: dict[str, Any] = {"port": port, "key": "tml-kill", "args": ["--dtype", "float32"]}
    server = start_api_server("tinker", {"tiny": model}, tmp_path, **options)
    try:
        with tinker.ServiceClient(base_url=server.url, api_key="tml-kill") as client:
            trainer = client.create_lora_training_client("tiny", rank=4, seed=1).result()
            data = [types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0] * 3})]
            trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
            path = trainer.save_state("mid").result().path
            sampler = trainer.save_weights_and_get_sampling_client().result()
            draw = types.SamplingParams(max_tokens=8, seed=3)
            before = [s.tokens for s in sampler.sample(types.ModelInput.from_ints([5]), 3, draw).result().sequences]
            expected = trainer.forward(data, "cross_entropy").result().metrics["loss:sum"]
            trainer.forward_backward(data, "cross_entropy").result()
            os.kill(server.pid, signal.SIGKILL)
            server.close()
            server = start_api_server("tinker", {"tiny": model}, tmp_path, **options)
            with pytest.raises(tinker.NotFoundError, match=r"server was started again.*weights/mid"):
                trainer.optim_step(types.AdamParams(learning_rate=0.01)).result(timeout=60)
            assert [s.tokens for s in sampler.sample(types.ModelInput.from_ints([5]), 3, draw).result(timeout=60).sequences] == before
            again = client.create_training_client_from_state_with_optimizer(path).result(timeout=60)
            assert again.forward(data, "cross_entropy").result(timeout=60).metrics["loss:sum"] == expected
    finally:
        server.close()
