"""Requests that no client of ours sends: each is refused by name (400) or for the state that it meets (409), and nothing is changed or written by it."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from serve.service_data import ACTOR, make_batch

import nexrl_sdk.serve.nextrainer as nextrainer
from nexrl_sdk.backend.http import HTTPTrainServiceClient
from nexrl_sdk.serve.nextrainer import TrainService, serve_train
from nexrl_sdk.wire import to_json

KEY = "a-key-for-tests"
HUGE = 10**400
Ask = Callable[..., httpx.Response]
pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("nextrainer")]


def start(root: Path) -> tuple[str, TrainService, threading.Thread]:
    found: list[str] = []
    up = threading.Event()
    service = TrainService(root)
    thread = threading.Thread(target=lambda: serve_train(service, port=0, key=f"{KEY}\n", started=lambda u: (found.append(u), up.set())[1]), daemon=True)  # type: ignore[func-returns-value]
    thread.start()
    assert up.wait(60)
    return found[0], service, thread


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: Path) -> Iterator[SimpleNamespace]:
    """A service with a group, `policy`."""
    url, service, thread = start(tmp_path_factory.mktemp("inputs"))
    with HTTPTrainServiceClient(url, "policy", key=KEY) as client:
        model = {"path": str(tiny_qwen2), "dtype": "float32", "device": "cpu"}
        client.initialize_worker(config_dict={"model": model, "actor": ACTOR})
        client.init_model()
        yield SimpleNamespace(url=url, service=service, root=service.root, client=client, model=model)
        client.shutdown()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def ask(served: SimpleNamespace) -> Ask:
    """`ask("publish", {...})`: a POST with JSON, as Python's json writes it."""

    def post(name: str, body: Any = None, group: str = "policy", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else to_json(body)).encode()
        return httpx.post(f"{served.url}/{name}", params={"identifier": group}, content=content, headers={"authorization": f"Bearer {KEY}", "content-type": "application/json", **headers}, timeout=30, trust_env=False)

    return post


def changed(**tensors: Any) -> dict[str, Any]:
    """The batch of the other tests with some tensors replaced, or, where they are None, left out."""
    batch = make_batch()
    whole = {**batch["tensors"], **tensors}
    return {"batch": {**batch, "tensors": {k: v for k, v in whole.items() if v is not None}}}


def at(name: str, value: float, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The batch with one value in row 1, token 2 replaced."""
    t = make_batch()["tensors"][name].clone()
    t = t.to(dtype) if dtype is not None else t
    t[1, 2] = value
    return changed(**{name: t})


IDS = make_batch()["tensors"]["input_ids"]
ROW = r"in row 1, token 2"
BATCHES: list[tuple[dict[str, Any], str]] = [
    (changed(input_ids=IDS[:, 0]), "input_ids is"), (changed(input_ids=IDS[:, :, None]), "input_ids is"), (changed(input_ids=IDS[:, :0]), "input_ids is"), (changed(input_ids=IDS.float() + 0.5), "whole numbers alone"), (changed(input_ids=IDS.bool()), "whole numbers alone"),
    (at("input_ids", 1.7, torch.float64), f"input_ids holds 1.7 {ROW}"), (at("input_ids", float("nan"), torch.float64), f"holds nan {ROW}"), (at("input_ids", 1e300, torch.float64), f"{ROW}; it holds whole numbers"), (changed(input_ids=IDS.tolist()[:-1] + [["1"] * 14]), "input_ids is no tensor"),
    (changed(input_ids=[[10**30] * 14] * 6), "input_ids is no tensor"), (changed(advantages=None), "with advantages"), (changed(loss_mask=None), "with loss_mask"), (changed(position_ids=torch.zeros(6, 3)), "position_ids is"), (changed(position_ids=torch.zeros(6, 14) + 0.5), "position_ids holds 0.5"),
    (changed(attention_mask=torch.ones(6, 13)), "attention_mask is"), (changed(loss_mask=torch.ones(6)), "loss_mask is"), (at("loss_mask", -1), f"loss_mask holds -1 {ROW}; it holds 0 and 1"), (at("loss_mask", 2), f"loss_mask holds 2 {ROW}"), (at("loss_mask", 0.3, torch.float32), ROW), (at("loss_mask", float("nan"), torch.float32), ROW),
    (at("attention_mask", 0.5, torch.float32), f"attention_mask holds 0.5 {ROW}"), (at("attention_mask", 7), f"attention_mask holds 7 {ROW}"), (changed(attention_mask={"a": 1}), "attention_mask is no tensor"), (changed(advantages=torch.zeros(6, 3)), "advantages has shape"),
    *(({"batch": {**make_batch(), "metadata": {"global_step": x}}}, "metadata.global_step must be") for x in (-5, HUGE, True, 1.5, "3", None)), *(({"batch": {**make_batch(), "metadata": {"batch_size": x}}}, "a batch cannot be read") for x in ("six", [1], float("inf"))),
    ({"batch": {**make_batch(), "metadata": {"rewards": ["x"]}}}, "a batch cannot be read"), ({"batch": {**make_batch(), "values": {"loss_mask": [1] * 6}}}, "values hold 'loss_mask'"), ({"batch": {**make_batch(), "values": {"advantages": [1] * 6}}}, "values hold 'advantages'"), ({"batch": {**make_batch(), "values": [1]}}, "are mappings"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), BATCHES)
def test_batches_that_cannot_be(served: SimpleNamespace, ask: Ask, body: dict[str, Any], says: str) -> None:
    before = served.service.groups["policy"].service.steps
    answer = ask("update_actor", body)
    assert answer.status_code == 400, answer.text
    assert re.search(says, answer.json()["error"]["message"]), answer.text
    assert served.service.groups["policy"].service.steps == before


@pytest.mark.parametrize("body", [changed(), changed(input_ids=IDS.float()), changed(loss_mask=make_batch()["tensors"]["loss_mask"].bool(), attention_mask=make_batch()["tensors"]["attention_mask"].float()), changed(position_ids=None)])
def test_batches_that_can_be(served: SimpleNamespace, ask: Ask, body: dict[str, Any]) -> None:
    losses = []
    for each in (body, changed()):
        ask("reset")
        losses.append(ask("update_actor", each).json()["metrics"]["loss"])
    assert losses[0] == losses[1]


DEEP = "a/" * 2000 + "a"
CALLS: list[tuple[str, Any, int, str]] = [
    ("optim_step", {"adam": {"learning_rate": HUGE}}, 400, "finite"), ("optim_step", {"adam": [1]}, 400, "a mapping"), ("optim_step", {}, 409, "no gradients"), ("forward", {"datums": [{"tokens": [10**30], "targets": [1], "fields": {}}]}, 400, "no datum"),
    ("forward", {"datums": [{"tokens": [1.7], "targets": [1], "fields": {}}]}, 400, "whole numbers, not 1.7"), ("forward", {"datums": [{"tokens": [1], "targets": [1], "fields": {"weights": [HUGE]}}]}, 400, "weights"), ("forward", {"datums": [], "loss_fn": ["ppo"]}, 400, "loss_fn must be str"),
    ("forward", b'{"datums": [{"data": "", "dtype": "float32", "shape": [1e400]}]}', 400, "a tensor in JSON"), ("save_checkpoint", {"local_path": "k/c", "keep_last": 0}, 400, "keep_last must be 1 to"), ("save_checkpoint", {"local_path": "k/c", "keep_last": True}, 400, "keep_last must be int"),
    ("save_checkpoint", {"local_path": "k/c", "global_step": HUGE}, 400, "global_step must be"), ("save_checkpoint", {"local_path": "k/c", "global_step": -1}, 400, "global_step must be"), ("save_checkpoint", {"local_path": "k/\ud800"}, 400, "is no path"), ("save_checkpoint", {"local_path": DEEP}, 400, "at most 64 folders"),
    ("load_checkpoint", {"path": DEEP}, 400, "at most 64 folders"), ("load_checkpoint", {"path": "x" * 5000}, 400, "200 characters"), ("load_checkpoint", {"path": "loop"}, 400, "is no path"), ("publish", b'{"a": ' + b"9" * 5000 + b"}", 400, "JSON"),
    *((call, {key: place, **more}, 400, "the service's own") for place in ("logs", "logs/policy", "service.log", "service.log/x", "notes.txt", "notes.txt/x", "to_logs/x", "LOGS/../logs") for call, key, more in (("save_checkpoint", "local_path", {}), ("export_weights", "path", {}), ("convert_checkpoint_to_huggingface", "target", {"path": "k/c"}))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "status", "says"), CALLS)
def test_calls_that_cannot_be(served: SimpleNamespace, ask: Ask, name: str, body: Any, status: int, says: str) -> None:
    root = served.root
    (root / "logs").mkdir(exist_ok=True)
    (root / "notes.txt").write_text("kept")
    for link, to in (("to_logs", "logs"), ("loop", "loop")):
        if not (root / link).is_symlink():
            (root / link).symlink_to(to)
    answer = ask(name, body)
    assert answer.status_code == status and says in answer.json()["error"]["message"], answer.text
    assert not (root / "k").exists() and not list((root / "logs").iterdir()) and (root / "notes.txt").read_text() == "kept"


CPUS = os.cpu_count() or 1
MODEL = {"path": "some/model"}
GROUPS: list[tuple[dict[str, Any], str]] = [
    *(({"config_dict": {"model": MODEL}, "world_size": n}, "more than this machine can run") for n in (1000, 10**30, HUGE)), *(({"config_dict": {"model": MODEL}, "world_size": n}, "1 or more") for n in (True, 1.0, -1, [2])), ({"config_dict": {"model": MODEL, "resource": {"world_size": 1000}}}, "more than this"),
    *(({"config_dict": {"model": {**MODEL, "threads": n}}}, "model.threads must be") for n in (0, CPUS + 1, 1_000_000, True, "many", 1.0, None)), *(({"config_dict": {"model": {**MODEL, "max_length": n}}}, "model.max_length must be") for n in (0, "x", True, HUGE, [1])),
    *(({"config_dict": {"model": {**MODEL, "lora": x}}}, "lora|LoRA") for x in ([1], "x", 5, {"rnk": 2}, {"rank": "x"}, {"rank": 0}, {"alpha": HUGE})), ({"config_dict": {"model": {"path": ["x"]}}}, "model.path must be str"), ({"config_dict": {"model": {"path": "a\0b"}}}, "no name or path"), ({"config_dict": {"model": {"path": "\ud800"}}}, "no name or path"),
    ({"config_dict": {"model": {**MODEL, "seed": -1}}}, "model.seed"), ({"config_dict": {"model": {**MODEL, "gradient_checkpointing": "yes"}}}, "must be bool"), ({"config_dict": {"model": ["x"]}}, "model must be"), ({"config_dict": {"model": "x"}}, "model must be"), ({"config_dict": {"actor": "x"}}, "actor must be"), ({"config_dict": {"actor": [1]}}, "actor must be"),
    ({"config_dict": {"model": MODEL, "resource": [1]}}, "resource must be"), ({"config_dict": {"model": MODEL, "autocast": ["x"]}}, "autocast"), ({"config_dict": {"model": MODEL, "token_budget": HUGE}}, "token_budget"), ({"config_dict": [1]}, "config_dict must be a mapping"), ({"config_path": 5}, "config_path must be str"), ({"role": ["actor"]}, "role must be str"), ({"dispatch_mode": 3}, "dispatch_mode must be"),
    *(({"config_dict": {"model": MODEL, "actor": x}}, "") for x in ({"lr": HUGE}, {"lr": None}, {"grad_clip": None}, {"ppo_epochs": float("inf")}, {"loss_fn": ["ppo"]}, {"loss_fn": {}}, {"loss_agg_mode": ["x"]}, {"optim": [1]}, {"optim": "x"}, {"loss_config": [1]}, {"loss_config": "x"}, {"betas": 3}, {"clip_ratio": HUGE})),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), GROUPS)
def test_groups_that_cannot_be(served: SimpleNamespace, ask: Ask, body: dict[str, Any], says: str) -> None:
    answer = ask("initialize_worker", body, group="never")
    assert answer.status_code == 400 and re.search(says, answer.json()["error"]["message"]), answer.text
    assert "never" not in served.service.groups


FILES = {
    "secret": ("actor: {optim: {lr: 1e-3}, loss_fn: '${oc.env:NEXRL_TRAIN_KEY}'}", "replaces no"), "refers": ("a: 1\nactor: {lr: '${a}'}", "replaces no"), "in a key": ("actor: {'${oc.env:HOME}': 1}", "replaces no"), "broken": ("actor: [1", "not valid YAML"), "object": ("actor: !!python/object:os.system {}", "not valid YAML"),
    "twice": ("actor: {lr: 1}\nactor: {lr: 2}", "not valid YAML|duplicate"), "itself": ("actor: &a {lr: *a}", "holds itself"), "deep": ("[" * 5000, "deep"), "bomb": ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"{y}: &{y} [{','.join([f'*{x}'] * 10)}]\n" for x, y in zip("abcdef", "bcdefg", strict=True)), "more than"),
    "a list": ("[1]", "mapping|list"), "no text": ("\udcff", "cannot be read"), "empty": ("", "no group"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be(served: SimpleNamespace, ask: Ask, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NEXRL_TRAIN_KEY", KEY)
    text, says = FILES[name]
    (served.root / "given.yaml").write_text(text, errors="surrogateescape")
    answer = ask("initialize_worker", {"config_path": "given.yaml"}, group="never")
    assert answer.status_code == 400 and re.search(says, answer.json()["error"]["message"]) and KEY not in answer.text, answer.text
    assert "never" not in served.service.groups


def test_a_group_keeps_its_role(served: SimpleNamespace, ask: Ask) -> None:
    group = served.service.groups["policy"]
    before = group.service.config
    for body in ({"role": "teacher"}, {"role": "critic", "config_dict": {"actor": {"grad_clip": 2.0}}}, {"role": "teacher", "config_dict": {"model": served.model}}):
        answer = ask("initialize_worker", body)
        assert answer.status_code == 400 and f"role '{body['role']}', not 'actor'" in answer.text, answer.text
    assert group.service.config == before and group.service.role == "actor"
    assert ask("initialize_worker", {"config_dict": {"actor": ACTOR}}).json()["role"] == "actor" and group.service.config == before


def test_what_waits_for_a_model_is_told_so(served: SimpleNamespace, ask: Ask) -> None:
    ask("initialize_worker", {"config_dict": {"model": served.model}}, group="empty")
    answer = ask("publish", group="empty")
    assert answer.status_code == 409 and "call init_model first" in answer.text
    ask("deregister", group="empty")


def test_an_answer_is_remembered_for_its_group_alone(served: SimpleNamespace, ask: Ask) -> None:
    for name in ("g1", "g2"):
        ask("initialize_worker", {"config_dict": {"model": served.model}}, group=name)
    same = {"x-request-id": "one-id"}
    for _ in range(2):  # the second is a repeat
        assert ask("deregister", group="g1", **same).json() == {"deregistered": "g1"}
    assert "g2" in served.service.groups and ask("deregister", group="g2", **same).json() == {"deregistered": "g2"}
    assert not {"g1", "g2"} & served.service.groups.keys()


def test_parts_that_disagree_are_refused(served: SimpleNamespace, ask: Ask) -> None:
    assert ask("publish", b"x", **{"x-part": "q 5 10"}).status_code == 206
    answer = ask("publish", b"x", **{"x-part": "q 0 2"})
    assert answer.status_code == 400 and "cannot be" in answer.text


def test_half_a_request_is_not_waited_for(served: SimpleNamespace, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nextrainer, "HEADERS", 0.5)
    where = httpx.URL(served.url)
    whole = f"GET /health HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()

    def left(*pieces: bytes) -> bytes:
        """What a connection gives until it is closed, where each piece but the last is answered."""
        got = b""
        with socket.create_connection((where.host, where.port), timeout=20) as s:
            for i, piece in enumerate(pieces):
                s.sendall(piece)
                got += s.recv(4096) if i < len(pieces) - 1 else b""
            while more := s.recv(4096):
                got += more
        return got

    assert left(b"") == left(whole[:30]) == b""
    assert left(whole, whole[:20]).startswith(b"HTTP/1.1 200")
    with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {KEY}"}) as http:  # one that rests between whole requests is kept
        first = http.get(f"{served.url}/health").extensions["network_stream"].get_extra_info("client_addr")
        time.sleep(0.8)
        assert http.get(f"{served.url}/health").extensions["network_stream"].get_extra_info("client_addr") == first
    monkeypatch.undo()
    assert ask("publish").status_code == 200


def test_a_call_under_way_when_the_service_ends_is_told(tmp_path: Path, tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import uvicorn

    real, answers, go, begun = uvicorn.Config, [], threading.Event(), threading.Event()
    monkeypatch.setattr(uvicorn, "Config", lambda *a, **k: real(*a, **{**k, "timeout_graceful_shutdown": 1}))
    url, service, thread = start(tmp_path)
    with HTTPTrainServiceClient(url, "g", key=KEY) as client:
        client.initialize_worker(config_dict={"model": {"path": str(tiny_qwen2), "device": "cpu"}})
        monkeypatch.setattr(service.groups["g"], "load", lambda: (begun.set(), go.wait(60), {})[-1])
        call = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/init_model", params={"identifier": "g"}, headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False)), daemon=True)
        call.start()
        assert begun.wait(20)
        client.shutdown()
    call.join(30)
    go.set()
    thread.join(30)
    assert not thread.is_alive() and answers[0].status_code == 503 and "the service is ending" in answers[0].json()["error"]["message"]
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.timeout(60)
def test_a_group_works_for_one_run_at_a_time(tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another is refused while the first is heard of, and afterwards takes over; a client that says no name is somebody at a prompt."""
    from starlette.testclient import TestClient

    service = nextrainer.TrainService(tmp_path / "root")
    with TestClient(nextrainer.create_app(service)) as http:

        def call(name: str, owner: str | None, **arguments: Any) -> tuple[int, str]:
            answer = http.post(f"/{name}?identifier=policy", json=arguments, headers={"x-owner": owner} if owner else {})
            return answer.status_code, answer.text

        settings = {"config_dict": {"model": {"path": str(tiny_qwen2), "dtype": "float32"}, "actor": {"lr": 0.01}}}
        assert call("initialize_worker", "a", **settings)[0] == call("init_model", "a")[0] == 200
        status, said = call("initialize_worker", "b", config_dict={**settings["config_dict"], "actor": {"lr": 0.5}})
        assert status == 400 and "works for another run" in said and "identifier" in said
        assert service.groups["policy"].actor == {"lr": 0.01}
        assert call("publish", "b")[0] == call("deregister", "b")[0] == 409 and "policy" in service.groups
        assert http.get("/worker_info?identifier=policy", headers={"x-owner": "b"}).status_code == call("publish", None)[0] == call("publish", "a")[0] == 200
        monkeypatch.setattr(nextrainer, "SILENT", -1.0)
        assert call("initialize_worker", "b", **settings)[0] == call("publish", "b")[0] == 200
        assert call("publish", "a")[0] == 409
        assert call("deregister", "b")[0] == 200
