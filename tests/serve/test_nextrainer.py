"""A training service in a thread of this process, over real HTTP: the numbers of a backend in process, by both forms, and every call once."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from serve.service_data import ACTOR, make_batch, make_datums

import nexrl_sdk.backend.http as wire_http
import nexrl_sdk.serve.nextrainer as nextrainer
from nexrl_sdk.backend.http import HTTPTrainServiceClient, MockTrainServiceClient, create_train_service_client
from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.service import TrainServiceClient
from nexrl_sdk.serve.nextrainer import TrainService, serve_train
from nexrl_sdk.types import AdamParams, BackendError, CheckpointError, ConfigError, DataError, Datum, Interrupted, NonFiniteError

KEY = "a-key-for-tests"
pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("nextrainer")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A service with a key, on a port of its own."""
    found: list[str] = []
    up = threading.Event()
    service = TrainService(tmp_path_factory.mktemp("service"), ("memory://allowed",))
    thread = threading.Thread(target=lambda: serve_train(service, port=0, key=KEY, max_body=64 << 20, started=lambda u: (found.append(u), up.set())[1]), daemon=True)  # type: ignore[func-returns-value]
    thread.start()
    assert up.wait(60)
    yield SimpleNamespace(url=found[0], service=service, root=service.root)
    HTTPTrainServiceClient(found[0], key=KEY).shutdown()
    thread.join(30)
    assert not thread.is_alive() and not service.groups


@pytest.fixture
def make(served: SimpleNamespace, tiny_qwen2: Path) -> Iterator[Callable[..., HTTPTrainServiceClient]]:
    """`make(**options)`: a client of a new group with its model."""
    clients: list[HTTPTrainServiceClient] = []

    def new(actor: dict[str, Any] | None = None, lora: Any = None, role: str = "actor", load: bool = True, **options: Any) -> HTTPTrainServiceClient:
        client = HTTPTrainServiceClient(served.url, f"g{time.monotonic_ns()}", key=KEY, **options)
        clients.append(client)
        client.initialize_worker(config_dict={"model": {"path": str(tiny_qwen2), "dtype": "float32", "device": "cpu", "lora": lora}, "actor": actor or ACTOR}, role=role)
        if load:
            client.init_model()
        return client

    yield new
    for client in clients:
        if client.identifier in served.service.groups:
            client.deregister()
        client.close()


@pytest.fixture
def local(tiny_qwen2: Path) -> Iterator[LocalBackend]:
    with LocalBackend(tiny_qwen2, dtype="float32", device="cpu") as backend:
        backend.train_service.initialize_worker(config_dict={"actor": ACTOR})
        yield backend


def backend_of(served: SimpleNamespace, client: HTTPTrainServiceClient) -> LocalBackend:
    backend = served.service.groups[client.identifier].service.backend
    assert isinstance(backend, LocalBackend)
    return backend


def same_weights(a: LocalBackend, b: LocalBackend) -> bool:
    theirs = b.model.base.state_dict()
    return all(torch.equal(t, theirs[n]) for n, t in a.model.base.state_dict().items())


def one_of_each_call(service: TrainServiceClient, folder: str) -> list[Any]:
    """Five steps, and every other call that has numbers."""
    out: list[Any] = [service.update_actor(make_batch(i)) for i in range(5)]
    out += [service.compute_log_prob(make_batch(9))["tensors"]["old_log_probs"], service.compute_log_prob(make_batch(9), reference=True)["tensors"]["ref_log_probs"]]
    data = make_datums()
    for answer in (service.forward(data), service.forward(data, "ppo", {"clip_high_threshold": 1.1}, reference=True), service.forward_backward(data, "importance_sampling")):
        out += [answer["loss"], answer["metrics"], *answer["logprobs"]]
    out.append(service.optim_step(AdamParams(1e-2, weight_decay=0.1)))
    service.save_checkpoint(f"{folder}/s1", global_step=4)
    service.forward_backward(data, "cross_entropy")
    service.zero_grad()
    out.append(service.update_actor(make_batch(7)))
    out.append(service.load_checkpoint(f"{folder}/s1")["global_step"])
    out += [service.publish(), service.forward(data)["loss"]]
    service.reset()
    out.append(service.forward(data)["loss"])
    return out


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        assert np.array_equal(np.asarray(a), np.asarray(b)) and np.asarray(a).dtype == np.asarray(b).dtype
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_same(a[k], b[k])
    else:
        assert a == b


@pytest.mark.parametrize("options", [{}, {"wire": "json"}, {"max_part": 2000}])
def test_the_same_numbers_as_in_process(make: Any, local: LocalBackend, served: SimpleNamespace, tmp_path: Path, options: dict[str, Any]) -> None:
    client = make(**options)
    ours, theirs = one_of_each_call(client, f"same{len(options)}"), one_of_each_call(local.train_service, str(tmp_path))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert_same(b, a)
    assert same_weights(local, backend_of(served, client))


def test_what_the_document_sends(make: Any, local: LocalBackend, served: SimpleNamespace) -> None:
    """Base64 in JSON, without our client."""
    client = make()
    batch = make_batch()
    body = {**batch, "tensors": {k: {"data": base64.b64encode(v.numpy().tobytes()).decode(), "dtype": str(v.dtype), "shape": list(v.shape)} for k, v in batch["tensors"].items()}, "metadata": {"batch_size": 6}}
    with httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {KEY}"}, params={"identifier": client.identifier}, trust_env=False) as http:
        answer = http.post("/update_actor", json=body).json()
        assert answer["metrics"]["loss"] == pytest.approx(local.train_service.update_actor(batch)["metrics"]["loss"], rel=1e-6)
        sent = http.post("/compute_log_prob", json=body).json()["tensors"]["old_log_probs"]
        theirs = np.frombuffer(base64.b64decode(sent["data"]), sent["dtype"]).reshape(sent["shape"])
        assert np.array_equal(theirs, local.train_service.compute_log_prob(batch)["tensors"]["old_log_probs"].numpy())
        assert http.get("/health").json()["status"] == "ok" and http.get("/worker_info").json()["identifier"] == client.identifier
        assert http.post("/save_checkpoint", json={"local_path": "doc/step_1", "global_step": 1}).json()["path"].startswith(str(served.root))
        assert http.post("/publish").json() == {"weight_version": 1}


def test_several_groups_in_one_service(make: Any, served: SimpleNamespace) -> None:
    student, teacher = make(), make(lora={"rank": 2}, role="teacher")
    before = teacher.forward(make_datums())["loss"]
    student.update_actor(make_batch())
    assert teacher.forward(make_datums())["loss"] == before != student.forward(make_datums())["loss"]
    models = student.get_models()
    assert models[teacher.identifier]["role"] == "teacher" and models[student.identifier]["state"] == "ready" and student.health_check()["groups"][student.identifier] == "ready"
    assert student.worker_info()["weight_version"] == 0 and student.worker_info()["world_size"] == 1
    with pytest.raises(ConfigError, match="which group"):
        HTTPTrainServiceClient(served.url, key=KEY).worker_info()
    with pytest.raises(ConfigError, match=f"there is no group '{student.identifier}x'.*did you mean"):
        HTTPTrainServiceClient(served.url, f"{student.identifier}x", key=KEY).worker_info()
    with pytest.raises(AttributeError):
        student.identifier = "other"  # type: ignore[misc]


def test_weights_leave_the_service(make: Any, served: SimpleNamespace) -> None:
    from transformers import AutoModelForCausalLM

    client = make(lora={"rank": 2})
    client.update_actor(make_batch())
    client.publish()
    full, adapter = client.export_weights("w/full"), client.export_weights("w/adapter", "adapter")
    assert full["weight_version"] == 1 and full["seconds"] > 0 and Path(adapter["path"], "adapter_model.safetensors").exists()
    merged = dict(backend_of(served, client).named_weights())
    theirs = AutoModelForCausalLM.from_pretrained(full["path"]).state_dict()
    assert all(torch.equal(t, theirs[n]) for n, t in merged.items())
    assert client.broadcast_weights({"plan": True})["names"] == list(merged)
    client.save_checkpoint("w/c", hdfs_path="memory://allowed/c")
    assert client.load_checkpoint("memory://allowed/c")["global_step"] == 0
    assert Path(client.convert_checkpoint_to_huggingface("w/c", "w/hf")["path"]) == served.root / "w/hf"


# ---- every call once


class Lossy(httpx.BaseTransport):
    """Loses the answers of some requests after the service has had them."""

    def __init__(self, inner: httpx.BaseTransport, lose: Callable[[httpx.Request], bool]):
        self.inner, self.lose, self.lost, self.seen = inner, lose, 0, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen += 1
        response = self.inner.handle_request(request)
        if self.lose(request):
            self.lost += 1
            response.close()
            raise httpx.ReadError("the answer was lost")
        return response


def lossy(client: HTTPTrainServiceClient, lose: Callable[[httpx.Request], bool]) -> Lossy:
    old = client._caller._http
    transport = Lossy(httpx.HTTPTransport(), lose)
    client._caller._http = httpx.Client(base_url=old.base_url, transport=transport)
    old.close()
    return transport


def every_third() -> Callable[[httpx.Request], bool]:
    count = iter(range(10_000))
    return lambda request: next(count) % 3 == 1


@pytest.mark.parametrize("options", [{}, {"max_part": 2000}])
def test_a_call_whose_answer_was_lost_is_applied_once(make: Any, local: LocalBackend, served: SimpleNamespace, options: dict[str, Any]) -> None:
    client = make(**options)
    transport = lossy(client, every_third())
    theirs = local.train_service
    for i in range(2):
        assert client.update_actor(make_batch(i))["metrics"] == theirs.update_actor(make_batch(i))["metrics"]
        for service in (client, theirs):
            service.forward_backward(make_datums(i), "ppo")
            service.forward_backward(make_datums(i + 5), "ppo")
        assert client.optim_step(AdamParams(1e-3)) == theirs.optim_step(AdamParams(1e-3))
        assert client.publish() == theirs.publish() == {"weight_version": i + 1}
    assert transport.lost >= 4 and same_weights(local, backend_of(served, client))
    client.deregister()
    assert client.identifier not in served.service.groups


def test_parts_that_the_service_lost_are_sent_again(make: Any, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from nexrl_sdk.wire import Parts

    client, real, drop = make(max_part=1500), Parts.add, [True]

    def forgetful(self: Parts, mark: str, part: bytes) -> bytes | None:
        if mark.split(" ")[1] == "1" and drop:
            drop.clear()
            return None
        return real(self, mark, part)

    monkeypatch.setattr(Parts, "add", forgetful)
    assert client.update_actor(make_batch())["meta_info"]["global_step"] == 1 and not drop
    assert client.update_actor(make_batch())["meta_info"]["global_step"] == 2
    monkeypatch.setattr(Parts, "add", lambda *a: None)
    with pytest.raises(BackendError, match="three times"):
        client.update_actor(make_batch())


def test_a_repeat_while_the_first_is_under_way_waits_for_it(make: Any, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make()
    service, begun, go = served.service.groups[client.identifier].service, [], threading.Event()
    monkeypatch.setattr(service, "publish", lambda: (begun.append(1), go.wait(20), {"weight_version": 41 + len(begun)})[-1])
    answers: list[int] = []

    def ask() -> None:
        r = httpx.post(f"{served.url}/publish", params={"identifier": client.identifier}, headers={"authorization": f"Bearer {KEY}", "x-request-id": "the-same"}, json={}, trust_env=False, timeout=20)
        answers.append(r.json()["weight_version"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.3)
    go.set()
    for t in threads:
        t.join(20)
    assert answers == [42, 42, 42] and len(begun) == 1
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "the-same"}
    other = httpx.post(f"{served.url}/zero_grad", params={"identifier": client.identifier}, headers=headers, json={}, trust_env=False)
    assert other.status_code == 400 and "used for another call" in other.text


def test_old_answers_are_forgotten_and_new_ones_are_not(make: Any, served: SimpleNamespace) -> None:
    client = make()
    group = served.service.groups[client.identifier]
    for _ in range(100):
        client.zero_grad()
    assert len(group._calls) <= group.KEPT + 2
    group.KEPT_BYTES = 10_000
    for i in range(20):
        client.compute_log_prob(make_batch(i, rows=30, width=40))
    assert len(group._calls) <= 10
    unknown = httpx.get(f"{served.url}/result/none", params={"identifier": client.identifier}, headers={"authorization": f"Bearer {KEY}"}, trust_env=False)
    assert unknown.status_code == 400 and "load the last checkpoint" in unknown.text


def test_long_calls_are_asked_for(make: Any, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make()
    monkeypatch.setattr(wire_http, "WAIT", 0.1)
    third = every_third()
    transport = lossy(client, lambda request: request.method == "GET" and third(request))
    service = served.service.groups[client.identifier].service
    monkeypatch.setattr(service, "publish", lambda: (time.sleep(1.0), {"weight_version": 5})[1])
    assert client.publish() == {"weight_version": 5} and transport.seen >= 4 and transport.lost
    transport.lose = lambda request: False
    client.request_timeout = 0.4
    began = time.monotonic()
    with pytest.raises(BackendError, match=r"publish had no answer within 0\.4 s"):
        client.publish()
    assert time.monotonic() - began < 30 and client.request_timeout == 0.4


# ---- isolation


def test_a_slow_group_holds_up_nobody(make: Any, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = make(), make()
    go = threading.Event()
    monkeypatch.setattr(served.service.groups[slow.identifier].service, "publish", lambda: (go.wait(60), {"weight_version": 1})[1])
    waiting = threading.Thread(target=slow.publish, daemon=True)
    waiting.start()
    deadline = time.monotonic() + 10
    while not slow.worker_info()["pending"]:
        assert time.monotonic() < deadline
    assert other.update_actor(make_batch())["meta_info"]["global_step"] == 1
    assert slow.health_check()["status"] == "ok" and slow.worker_info()["pending"] == 1 and waiting.is_alive()
    go.set()
    waiting.join(20)
    assert slow.worker_info()["pending"] == 0


def test_a_failing_group_fails_alone_and_its_error_is_its_own(make: Any, served: SimpleNamespace, tiny_qwen2: Path) -> None:
    good, bad = make(), HTTPTrainServiceClient(served.url, "bad", key=KEY)
    bad.initialize_worker(config_dict={"model": {"path": "/nowhere/at/all"}})
    with pytest.raises(ConfigError, match="nowhere"):
        bad.init_model()
    assert bad.worker_info()["state"] == "failed" and "nowhere" in bad.worker_info()["cause"]
    with pytest.raises(BackendError, match=r"has no model: .*nowhere"):
        bad.update_actor(make_batch())
    assert good.update_actor(make_batch())["meta_info"]["global_step"] == 1
    poisoned = make_batch()
    poisoned["tensors"]["advantages"][:] = float("inf")
    with pytest.raises(NonFiniteError, match="no weight changed"):
        good.update_actor(poisoned)
    with pytest.raises(DataError, match="vocabulary"):
        good.forward([Datum([9999], [1])])
    with pytest.raises(CheckpointError, match="does not exist"):
        good.load_checkpoint("nothing/here")
    assert good.update_actor(make_batch())["meta_info"]["global_step"] == 2
    bad.deregister()
    fresh = HTTPTrainServiceClient(served.url, "bad", key=KEY)
    fresh.initialize_worker(config_dict={"model": {"path": str(tiny_qwen2)}})
    with pytest.raises(BackendError, match="call init_model first"):
        fresh.publish()
    assert fresh.init_model()["state"] == "ready" == fresh.init_model()["state"]
    fresh.deregister()


def test_what_waits_in_line_of_a_group_that_ends_is_told(make: Any, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make()
    go, errors = threading.Event(), []
    monkeypatch.setattr(served.service.groups[client.identifier].service, "publish", lambda: (go.wait(30), {"weight_version": 1})[1])

    def ask() -> None:
        try:
            client.publish()
        except BackendError as e:
            errors.append(str(e))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    deadline = time.monotonic() + 10
    while client.worker_info()["pending"] < 3:
        assert time.monotonic() < deadline
    HTTPTrainServiceClient(served.url, client.identifier, key=KEY).deregister()
    go.set()
    for t in threads:
        t.join(20)
    assert len(errors) == 2 and all("deregistered" in e for e in errors)


def test_a_group_that_ends_while_it_loads_leaves_no_model(served: SimpleNamespace, tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nexrl_sdk.serve.nextrainer import GroupSpec

    made, real, go = [], GroupSpec.make, threading.Event()
    monkeypatch.setattr(GroupSpec, "make", lambda self, logs: (go.wait(30), made.append(real(self, logs)), made[-1])[-1])
    client = HTTPTrainServiceClient(served.url, "loading", key=KEY)
    client.initialize_worker(config_dict={"model": {"path": str(tiny_qwen2)}})
    group, errors = served.service.groups["loading"], []

    def load() -> None:
        try:
            client.init_model()
        except BackendError as e:
            errors.append(str(e))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while group.state != "loading":
        assert time.monotonic() < deadline
    HTTPTrainServiceClient(served.url, "loading", key=KEY).deregister()
    go.set()
    thread.join(30)
    assert "while its model was loading" in errors[0] and made[0]._closed and group.service is None


# ---- what is refused


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"config_dict": {}}, "names no model"), ({"config_dict": {"modle": {"path": "x"}}}, "actor.modle is not known"), ({"config_dict": {"model": {"pth": "x"}}}, "did you mean 'path'"), ({"config_dict": {"model": {"dtype": "float32"}}}, "needs a model"),
    ({"config_dict": {"actor": {"clip_ratoi": 1}, "model": {"path": "x"}}}, "did you mean 'clip_ratio'"), ({"config_dict": {"model": {"path": "x"}, "actor": {}, "modell": 1}}, "config_dict.modell"), ({"config_dict": [1]}, "must be a mapping"),
    ({"config_dict": {"model": {"path": "x"}}, "world_size": 0}, "1 or more"), ({"config_dict": {"model": {"path": "x"}}, "world_size": "2"}, "1 or more"), ({"config_dict": {"model": {"path": "x"}}, "dispatch_mode": "brodcast"}, "did you mean 'broadcast'"),
    ({"config_dict": {"model": {"path": "x"}}, "role": "critc"}, "did you mean .critic."), ({"config_dict": {"model": {"path": "x", "trust_remote_code": True}}}, "--trust-remote-code"), ({"config_dict": {"model": {"path": "x"}}, "zmq_base_port": 5555}, "leave it out"),
    ({"config_path": "/etc/passwd"}, "below the service's root"), ({"config_path": "none.yaml"}, "none.yaml"), ({"config_dict": {"model": {"path": "x"}, "token_budget": 0}}, "token_budget"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), REFUSED)
def test_groups_that_cannot_be(served: SimpleNamespace, arguments: dict[str, Any], says: str) -> None:
    with HTTPTrainServiceClient(served.url, "never", key=KEY) as client, pytest.raises(ConfigError, match=says):
        client.initialize_worker(**arguments)
    assert "never" not in served.service.groups


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "x" * 101, "a b"])
def test_identifiers_that_are_no_names(served: SimpleNamespace, name: str) -> None:
    with HTTPTrainServiceClient(served.url, name, key=KEY) as client, pytest.raises(ConfigError, match="an identifier is"):
        client.initialize_worker(config_dict={"model": {"path": "x"}})


def test_a_group_is_made_once_and_told_again(make: Any, served: SimpleNamespace, tiny_qwen2: Path) -> None:
    client = make()
    model = {"path": str(tiny_qwen2), "dtype": "float32", "device": "cpu", "lora": None}
    client.initialize_worker(config_dict={"model": model, "actor": {"lr": 0.5}})
    assert served.service.groups[client.identifier].service.config.lr == 0.5
    client.initialize_worker(config_dict={"actor": {"ppo_epochs": 3}})
    assert served.service.groups[client.identifier].service.config.ppo_epochs == 3
    with pytest.raises(ConfigError, match=r"this asks for model\.dtype 'bfloat16', not 'float32'"):
        client.initialize_worker(config_dict={"model": {**model, "dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match="role 'teacher', not 'actor'"):
        client.initialize_worker(config_dict={"model": model}, role="teacher")
    with pytest.raises(ConfigError, match="computes 4096 tokens at once"):
        client.initialize_worker(config_dict={"actor": {"ppo_max_token_len_per_gpu": 99}})
    (served.root / "actor.yaml").write_text("actor: {optim: {lr: 2e-3}}\n")
    client.initialize_worker(config_path="actor.yaml")
    assert served.service.groups[client.identifier].service.config.lr == 2e-3


def test_arguments_that_cannot_be(make: Any) -> None:
    client = make()
    for name, arguments, says in [("forward", {"datum": []}, "did you mean 'datums'"), ("forward", {"datums": ["x"]}, "list of datums"), ("update_actor", {"batch": {"tensors": {}}}, "a batch has tensors"), ("update_actor", {}, "a batch has tensors"),
                                  ("update_actor", {"batch": {"tensors": {"input_ids": torch.ones(2, 3), "loss_mask": torch.ones(3, 3)}}}, "as many rows"), ("optim_step", {"adam": {"lr": 1}}, "adam:"), ("save_checkpoint", {}, "local_path"),
                                  ("save_checkpoint", {"local_path": 5}, "local_path must be str, not int"), ("save_checkpoint", {"local_path": "a", "keep_last": "x"}, "keep_last must be int or null"), ("forward", {"datums": [], "loss_config": {"kl_coef": [1]}}, "kl_coef must be a number"),
                                  ("optim_step", {"adamx": {}}, "did you mean 'adam'"), ("update_actor", {"batch": {}, "epochs": 2}, "takes no 'epochs'"), ("init_model", {"path": "x"}, "takes no 'path'"), ("initialize_worker", {"config": {}}, "did you mean"), ("optim_step", {"adam": {"beta1": "x"}}, "its values are numbers"), ("update_actor", {"batch": {"tensors": {"input_ids": [[1, 2], [3]]}}}, "tensors.input_ids is no tensor"), ("export_weights", {"path": "w", "kind": ["full"]}, "kind must be str"),
                                  ("update_actor", {"batch": {"tensors": {"input_ids": [[1, 2]]}}}, "loss_mask"), ("update_actor", {"batch": {"tensors": {"input_ids": [[1, 2]]}, "metadata": {"global_step": "x"}}}, "global_step"), ("broadcast_weights", {"spec": 3}, "spec must be a mapping"), ("publish", {"stop_flag": 1}, "takes no 'stop_flag'")]:  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=says):
            client._caller.call(name, arguments)


def test_a_stopped_trainer_sends_nothing(make: Any) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted, match="nothing was trained on"):
        make(load=False).update_actor(make_batch(), stop_flag=stop)


# ---- by name, and without a service


def test_the_factory() -> None:
    for backend in ("http", "self-hosted", "nextrainer", "direct-zmq"):
        client = create_train_service_client(backend, "http://localhost:5000", identifier="nexrl0", request_timeout=5.0)
        assert isinstance(client, HTTPTrainServiceClient) and client.identifier == "nexrl0" and client.base_url == "http://localhost:5000" and client.request_timeout == 5
    assert isinstance(create_train_service_client("mock", "mock://localhost"), MockTrainServiceClient)
    for arguments, says in [(("local",), "LocalBackend"), (("htpp", "http://x"), "did you mean 'http'"), (("http", "localhost:5"), "must begin with http://")]:
        with pytest.raises(ConfigError, match=says):
            create_train_service_client(*arguments)
    with pytest.raises(ConfigError, match="did you mean 'request_timeout'"):
        create_train_service_client("http", "http://x", None, request_timeut=3)
    with pytest.raises(ConfigError, match="safetensors"):
        HTTPTrainServiceClient(wire="safetensor")


def test_the_mock_answers_as_the_service_does(make: Any) -> None:
    mock, real = MockTrainServiceClient(url="mock://localhost"), make()
    assert mock.update_actor(make_batch()) == {"metrics": {"loss": 0.5}, "meta_info": {}}
    for name, arguments in [("compute_log_prob", (make_batch(),)), ("forward", (make_datums(),)), ("forward_backward", (make_datums(), "ppo")), ("optim_step", ()), ("publish", ()), ("save_checkpoint", ("mock/c",)), ("export_weights", ("mock/w",)), ("broadcast_weights", ({"plan": True},)), ("health_check", ())]:
        a, b = getattr(mock, name)(*arguments), getattr(real, name)(*arguments)
        assert a.keys() <= b.keys(), name
    shapes = [v.shape for v in mock.forward(make_datums())["logprobs"]]
    assert shapes == [v.shape for v in real.forward(make_datums())["logprobs"]] and [c[0] for c in mock.calls][:2] == ["update_actor", "compute_log_prob"]
    assert set(TrainServiceClient.__abstractmethods__) <= set(dir(MockTrainServiceClient))


def test_a_body_that_stalls_is_given_up(make: Any, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nextrainer, "STALLED", 0.3)
    at = httpx.URL(served.url)
    with socket.create_connection((at.host, at.port), timeout=20) as s:
        s.sendall(f"POST /publish HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert b" 408 " in s.recv(4096)
    assert make().publish() == {"weight_version": 1}
