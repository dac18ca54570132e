"""A training service in processes of its own: hostile requests, a full disk, stopped and killed processes; nothing hangs, and the message says what happened."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve.service_data import ACTOR, make_batch, make_datums

from nexrl_sdk.backend.http import HTTPTrainServiceClient
from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.train_server import RunningService, start_train_service
from nexrl_sdk.types import BackendError, CheckpointError, ConfigError, DataError


pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("nextrainer")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service that takes bodies of 8 MiB."""
    with start_train_service(tmp_path_factory.mktemp("service") / "root", args=["--max-body-mb", "8"]) as service:
        yield service


@pytest.fixture(scope="module")
def client(running: RunningService, tiny_qwen2: Path) -> Iterator[HTTPTrainServiceClient]:
    """Its group, with a model."""
    with running.client("policy", request_timeout=60) as c:
        register(c, tiny_qwen2)
        yield c


def register(client: HTTPTrainServiceClient, model: Path, world_size: int = 1) -> None:
    client.initialize_worker(config_dict={"model": {"path": str(model), "dtype": "float32", "device": "cpu"}, "actor": ACTOR}, world_size=world_size)
    client.init_model()


def raw(running: RunningService, method: str, path: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {running.key}", **options.pop("headers", {})}
    return httpx.request(method, f"{running.url}{path}", headers=headers, timeout=20, trust_env=False, **options)


def gone(pids: list[int], within: float = 20) -> bool:
    """Whether these processes end in time."""

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def below(pid: int) -> list[int]:
    """All processes that a process started, and those that these started."""
    own = [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    return own + [p for child in own for p in below(child)]


# ---- hostile requests


@pytest.mark.parametrize("method_path", ["GET /health", "GET /worker_info", "GET /get_models", "GET /result/x", "POST /update_actor", "POST /shutdown", "POST /deregister", "POST /initialize_worker"])
@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic QQ=="}, {"authorization": "Bearer é".encode("latin-1")}])
def test_without_the_key_nothing_is_answered(running: RunningService, client: HTTPTrainServiceClient, method_path: str, given: dict[str, Any]) -> None:
    method, path = method_path.split()
    answer = httpx.request(method, f"{running.url}{path}", headers=given, timeout=20, trust_env=False, params={"identifier": "policy"})
    assert answer.status_code == 401 and "NEXRL_TRAIN_KEY" in answer.json()["error"]["message"] and running.key not in answer.text


def test_a_client_with_another_key_is_told(running: RunningService, client: HTTPTrainServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPTrainServiceClient(running.url, "policy", key="other") as other, pytest.raises(ConfigError, match="key is missing or wrong"):
        other.publish()
    monkeypatch.setenv("NEXRL_TRAIN_KEY", running.key)
    with HTTPTrainServiceClient(running.url, "policy") as by_environment:
        assert by_environment.health_check()["status"] == "ok" and running.key not in repr(by_environment) + repr(vars(by_environment))
    assert running.key not in repr(running) and running.key not in Path(f"/proc/{running.pid}/cmdline").read_text() and running.key not in running.log_path.read_text()


def test_a_pickle_is_not_read(running: RunningService, client: HTTPTrainServiceClient, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "unpickled"),)

    for kind, status in [("application/octet-stream", 400), ("application/vnd.safetensors", 400), ("application/json", 400), ("application/x-pickle", 415), ("text/plain", 415)]:
        answer = raw(running, "POST", "/update_actor?identifier=policy", content=pickle.dumps(Bomb()), headers={"content-type": kind})
        assert answer.status_code == status, kind
    in_json = {"tensors": {"input_ids": {"data": __import__("base64").b64encode(pickle.dumps(Bomb())).decode(), "dtype": "int64", "shape": [1, 2]}}}
    assert "pickle, which is never read" in raw(running, "POST", "/update_actor?identifier=policy", json=in_json).text
    assert not (tmp_path / "unpickled").exists()


def test_a_body_of_a_gigabyte_is_not_taken(running: RunningService, client: HTTPTrainServiceClient) -> None:
    def resident() -> int:
        return int(next(x for x in Path(f"/proc/{running.pid}/status").read_text().splitlines() if x.startswith("VmRSS")).split()[1]) >> 10

    before, host = resident(), httpx.URL(running.url)
    head = f"POST /update_actor?identifier=policy HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {running.key}\r\ncontent-type: application/octet-stream\r\n"
    with socket.create_connection((host.host, host.port), timeout=20) as s:  # announced
        s.sendall(f"{head}content-length: {1 << 30}\r\n\r\n".encode())
        assert b" 413 " in s.recv(4096)
    for garbage in ("-1", "9" * 5000, "1e9"):
        with socket.create_connection((host.host, host.port), timeout=20) as s:
            s.sendall(f"{head}content-length: {garbage}\r\n\r\n".encode())
            assert s.recv(4096)[9:10] in (b"4", b"")
    sent, piece = 0, b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    with socket.create_connection((host.host, host.port), timeout=20) as s:  # not announced
        s.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        try:
            while sent < 1 << 30:
                s.sendall(piece)
                sent += 1 << 20
        except OSError:
            pass
    assert sent < 512 << 20 and resident() - before < 150
    large = {"values": {"x": torch.zeros(3 << 20)}}
    with pytest.raises(DataError, match="in all its parts"):
        small_parts = running.client("policy", max_part=4 << 20)
        small_parts._caller.call("update_actor", {"batch": large})
    with pytest.raises(ConfigError, match="8,388,608 bytes"):
        client._caller.call("update_actor", {"batch": large})
    assert client.health_check()["status"] == "ok"


OUTSIDE = ["../out", "/etc/out", "a/../../out", "link/out", ".", "", "a\0b", "file:///tmp/out", "memory://x", "s3://bucket/x", "simplecache::file:///tmp/x"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_stay_below_the_root(running: RunningService, client: HTTPTrainServiceClient, path: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside, link = running.root.parent / "elsewhere", running.root / "link"
    outside.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(outside)
    calls: list[Callable[[], Any]] = [lambda: client.save_checkpoint(path), lambda: client.load_checkpoint(path, del_local_after_load=True), lambda: client.export_weights(path), lambda: client.convert_checkpoint_to_huggingface("x", path), lambda: client.convert_checkpoint_to_huggingface(path, "x")]
    if path:
        calls.append(lambda: client.save_checkpoint("fine", hdfs_path=path if "://" in path else f"file://{outside}/{path}"))
    for call in calls:
        with pytest.raises(ConfigError, match=r"below the service's root|no place but its own root|U\+0000"):
            call()
    assert sorted(p.name for p in running.root.parent.iterdir()) == ["elsewhere", "root"] and not list(outside.iterdir()) and not (running.root / "fine").exists()


@pytest.mark.parametrize(("method", "path", "options", "status"), [
    ("POST", "/publish", {"headers": {"origin": "http://evil.example"}}, 403), ("GET", "/health", {"headers": {"origin": "null"}}, 403), ("POST", "/nothing", {}, 404), ("GET", "/update_actor", {}, 405), ("POST", "/health", {}, 405),
    ("POST", "/update_actor", {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400), ("POST", "/update_actor", {"json": [1]}, 400), ("POST", "/update_actor", {"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400),
    ("POST", "/publish", {"json": {}, "headers": {"x-wait": "long"}}, 400), ("POST", "/publish", {"json": {}, "headers": {"x-part": "a b"}}, 400), ("POST", "/publish", {"json": {}, "headers": {"x-part": "a 0 2"}}, 206),
    ("POST", "/forward", {"json": {"datums": [{"tokens": [1], "targets": ["x"], "fields": {}}]}}, 400), ("POST", "/broadcast_weights", {"json": {"spec": {"host": 5}}}, 400), ("POST", "/optim_step", {"json": {"adam": {"learning_rate": "x"}}}, 400),
])  # fmt: skip
def test_other_requests_are_refused_and_the_service_goes_on(running: RunningService, client: HTTPTrainServiceClient, method: str, path: str, options: dict[str, Any], status: int) -> None:
    answer = raw(running, method, path, params={"identifier": "policy"}, **options)
    assert answer.status_code == status, answer.text
    assert answer.status_code == 206 or "Traceback" not in answer.text
    assert client.worker_info()["state"] == "ready"


def test_after_all_that_it_trains(running: RunningService, client: HTTPTrainServiceClient, tiny_qwen2: Path) -> None:
    client.reset()
    with LocalBackend(tiny_qwen2, dtype="float32", device="cpu") as local:
        local.train_service.initialize_worker(config_dict={"actor": ACTOR})
        assert client.update_actor(make_batch())["metrics"]["loss"] == pytest.approx(local.train_service.update_actor(make_batch())["metrics"]["loss"], rel=1e-6)


def test_a_full_disk_leaves_what_was_there(running: RunningService, client: HTTPTrainServiceClient) -> None:
    """The system refuses to write on; a process limit stands for the disk."""
    client.save_checkpoint("disk/step_1", global_step=1)
    before = client.forward(make_datums())["loss"]
    soft, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        for call in (lambda: client.save_checkpoint("disk/step_2"), lambda: client.export_weights("disk/w")):
            with pytest.raises(CheckpointError, match="could not be written"):
                call()
    finally:
        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (running.root / "disk").iterdir()] == ["step_1"]
    assert client.forward(make_datums())["loss"] == before and client.load_checkpoint("disk/step_1")["global_step"] == 1
    client.save_checkpoint("disk/step_2", global_step=2)
    assert [p.name for p in (running.root / "disk").iterdir()] == ["step_2"]


def test_damaged_checkpoints_are_refused_by_name(running: RunningService, client: HTTPTrainServiceClient) -> None:
    client.save_checkpoint("hurt/step_1", remove_previous_ckpt=False)
    before, file = client.forward(make_datums())["loss"], running.root / "hurt/step_1/state.safetensors"
    whole = file.read_bytes()
    for damaged, says in ((whole[:-100], "truncated"), (whole[:-1] + bytes([whole[-1] ^ 1]), "have changed")):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=says):
            client.load_checkpoint("hurt/step_1")
    manifest = running.root / "hurt/step_1/manifest.json"
    manifest.write_text(manifest.read_text().replace("state.safetensors", "../../../x"))
    with pytest.raises(CheckpointError):
        client.load_checkpoint("hurt/step_1")
    assert client.forward(make_datums())["loss"] == before


# ---- processes that stop, end, or are killed


def test_a_stopped_service_is_given_up_in_time_and_goes_on(running: RunningService, client: HTTPTrainServiceClient) -> None:
    os.kill(running.pid, signal.SIGSTOP)
    try:
        with running.client("policy", request_timeout=1.5) as impatient:
            began = time.monotonic()
            with pytest.raises(BackendError, match="does not answer /forward in time"):
                impatient.forward(make_datums())
            assert time.monotonic() - began < 20
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert client.forward(make_datums())["loss"] > 0


def test_two_ranks_give_the_same_numbers_and_a_killed_one_ends_its_group_alone(running: RunningService, client: HTTPTrainServiceClient, tiny_qwen2: Path) -> None:
    with running.client("two", request_timeout=90) as two, LocalBackend(tiny_qwen2, dtype="float32", device="cpu") as local:
        register(two, tiny_qwen2, world_size=2)
        local.train_service.initialize_worker(config_dict={"actor": ACTOR})
        client.reset()
        assert two.worker_info()["world_size"] == 2
        for i in range(5):
            one, ranks, here = (s.update_actor(make_batch(i))["metrics"] for s in (client, two, local.train_service))
            assert one == here
            assert ranks["loss"] == pytest.approx(here["loss"], abs=1e-5, rel=1e-5) and ranks["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-5, abs=1e-5)
        two.export_weights("two/w")
        from safetensors.torch import load_file

        weights = load_file(running.root / "two/w/model.safetensors")
        assert all(float((t - weights[n]).abs().max()) < 1e-5 for n, t in local.named_weights())
        two.save_checkpoint("two/c", global_step=5)
        client.load_checkpoint("two/c")  # two ranks' state into one

        ranks = [p for p in below(running.pid) if b"nexrl_sdk.serve.workers" in Path(f"/proc/{p}/cmdline").read_bytes() and b"torch.distributed" not in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert len(ranks) == 2
        everyone, errors = below(running.pid), []

        def steps() -> None:
            try:
                for i in range(200):
                    two.update_actor(make_batch(i))
            except BackendError as e:
                errors.append(str(e))

        thread = threading.Thread(target=steps, daemon=True)
        thread.start()
        time.sleep(0.5)
        os.kill(ranks[1], signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive() and "rank 1" in errors[0] and "SIGKILL" in errors[0]
        with pytest.raises(BackendError, match="rank 1"):
            two.update_actor(make_batch())
        assert two.health_check()["groups"] == {"policy": "ready", "two": "failed"} and "rank 1" in two.worker_info()["cause"]
        assert client.update_actor(make_batch())["meta_info"]["optimizer_steps"] == 4  # the other group never noticed
        assert gone(everyone)
        two.deregister()
        register(two, tiny_qwen2, world_size=2)
        two.load_checkpoint("two/c")
        assert two.forward(make_datums())["loss"] == pytest.approx(local.forward(make_datums()).loss, rel=1e-5)


def test_a_killed_service_takes_its_ranks_along_and_clients_hear_it(running: RunningService, client: HTTPTrainServiceClient) -> None:
    """The last test with this service: the two ranks of the test before are still there."""
    everyone = [running.pid, *below(running.pid)]
    os.kill(running.pid, signal.SIGKILL)
    client.request_timeout = 3
    began = time.monotonic()
    with pytest.raises(BackendError, match="does not answer /update_actor"):
        client.update_actor(make_batch())
    assert time.monotonic() - began < 20 and gone(everyone)
    deadline = time.monotonic() + 10
    while running.running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running.running and "SIGKILL" in running.diagnose()
    running.close()
    running.close()


PARENT = """
import sys, json, time
from nexrl_sdk.backend.train_server import start_train_service
service = start_train_service(sys.argv[1])
with service.client("policy") as client:
    client.initialize_worker(config_dict={"model": {"path": sys.argv[2], "device": "cpu"}})
    client.init_model()
print(json.dumps(service.pid), flush=True)
time.sleep(600)
"""


def test_a_service_ends_with_the_process_that_started_it(tiny_qwen2: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "root"), str(tiny_qwen2)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = json.loads(parent.stdout.readline())
        everyone = [pid, *below(parent.pid)]
        parent.kill()
    assert gone(everyone)


def test_what_keeps_a_service_from_starting_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BackendError, match=r"(?s)did not start: .*exit code 1.*is the port taken"):
            start_train_service(tmp_path / "a", port=taken.getsockname()[1])


def test_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from nexrl_sdk.launch.cli import main

    monkeypatch.delenv("NEXRL_TRAIN_KEY", raising=False)
    for arguments, says in [(["--host", "0.0.0.0"], "needs a key"), (["--model", str(tmp_path / "no_model")], "there is no model folder"), (["--model", "x", "--role", "critc"], "critic")]:
        with pytest.raises(SystemExit) as ended:
            main(["serve", "train", "--root", str(tmp_path / "root"), *arguments])
        assert ended.value.code == 2 and says in capsys.readouterr().err


def test_ctrl_c_ends_the_command(tiny_qwen2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nexrl_sdk.launch.cli", "serve", "train", "--port", "0", "--model", str(tiny_qwen2), "--root", str(tmp_path / "root")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as served:
        assert served.stdout is not None
        served.stdout.readline()
        url = served.stdout.readline().split()[3].rstrip(",")
        with HTTPTrainServiceClient(url, key="") as client:
            assert client.worker_info()["identifier"] == "policy" and client.forward(make_datums())["loss"] > 0
            with pytest.raises(ConfigError, match="a service without a key"):
                client.broadcast_weights({"host": "0.0.0.0"})
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0 and served.stdout.read() == "ended\n"
