"""From groups of a real training service over HTTP, of one rank and of two, into an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend.weights_fakes import FakeEngine, train_step

from nexrl_sdk.backend.http import HTTPTrainServiceClient
from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.weights import BroadcastRoute, ParityProbe, PushError, WeightPusher, make_route, probe_prompts
from nexrl_sdk.serve.nextrainer import TrainService, serve_train
from nexrl_sdk.types import BackendError

pytestmark = [pytest.mark.timeout(150), pytest.mark.xdist_group("weights_service")]
PROBE = ParityProbe(probe_prompts(272), tolerance=1e-4)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service of this process's thread."""
    found: list[str] = []
    up = threading.Event()
    service = TrainService(tmp_path_factory.mktemp("service"))
    thread = threading.Thread(target=lambda: serve_train(service, port=0, started=lambda u: (found.append(u), up.set())[1]), daemon=True)  # type: ignore[func-returns-value]
    thread.start()
    assert up.wait(60)
    yield found[0]
    HTTPTrainServiceClient(found[0]).shutdown()
    thread.join(30)


@pytest.fixture
def group(url: str, tiny: Callable[..., Path]) -> Iterator[Callable[..., HTTPTrainServiceClient]]:
    """`group(world_size, **model)`: a client of a new group."""
    clients: list[HTTPTrainServiceClient] = []

    def make(world_size: int, **model: Any) -> HTTPTrainServiceClient:
        client = HTTPTrainServiceClient(url, f"group{world_size}{len(clients)}")
        clients.append(client)
        client.initialize_worker(config_dict={"model": {"path": str(tiny("qwen2")), "dtype": "float32", "device": "cpu", **model}}, world_size=world_size)
        client.init_model()
        return client

    yield make
    for client in clients:
        client.deregister()
        client.close()


@pytest.mark.parametrize(("world_size", "routes", "model"), [(1, ["shared-dir", "broadcast"], {}), (1, ["lora"], {"lora": {"rank": 4}}), (2, ["shared-dir", "broadcast"], {})])
def test_a_group_feeds_an_engine(group: Any, tiny: Callable[..., Path], world_size: int, routes: list[str], model: dict[str, Any]) -> None:
    train, engine = group(world_size, **model), FakeEngine(tiny("qwen2"))
    version = 0
    for name in routes:
        route = BroadcastRoute(timeout=20) if name == "broadcast" else make_route(name)
        pusher = WeightPusher(train, engine, route, PROBE, f"weights/{world_size}_{name}", timeout=60)
        for _ in range(2):
            pusher.push(version)
            assert engine.weight_version == version and not engine.paused
            version += 1
            learn(train)
        assert pusher.good[-1].path is not None and pusher.good[-1].path.is_dir()
    engine.close()


def learn(train: HTTPTrainServiceClient) -> None:
    """One step in the service."""

    class Steps:
        def forward_backward(self, *a: Any) -> None:
            train.forward_backward(*a)

        def optim_step(self, adam: Any) -> None:
            train.optim_step(adam)

    train_step(Steps(), lr=0.01)


def test_a_service_that_is_asked_to_write_elsewhere_refuses_and_nothing_changes(group: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    train, engine = group(1), FakeEngine(tiny("qwen2"))
    pusher = WeightPusher(train, engine, make_route("shared-dir"), PROBE, tmp_path / "elsewhere")
    with pytest.raises(Exception, match=r"below the service's root"):
        pusher.push(0)
    assert engine.calls == [] and not (tmp_path / "elsewhere").exists()
    engine.close()


def test_equal_weights_whatever_the_route(group: Any, tiny: Callable[..., Path]) -> None:
    """One group, two engines: by files and by broadcast they end with the same bits."""
    train = group(1)
    learn(train)
    states = []
    for name in ("shared-dir", "broadcast"):
        engine = FakeEngine(tiny("qwen2"))
        WeightPusher(train, engine, make_route(name), PROBE, f"weights/equal_{name}").push(1)
        states.append({k: v.clone() for k, v in engine.backend.model.base.state_dict().items()})
        engine.close()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    fresh = LocalBackend(tiny("qwen2"), dtype="float32", device="cpu").model.base.state_dict()
    assert not torch.equal(states[0]["model.norm.weight"], fresh["model.norm.weight"])


def test_in_process_is_refused_over_http(group: Any, tiny: Callable[..., Path]) -> None:
    engine = FakeEngine(tiny("qwen2"))
    with pytest.raises(PushError, match=r"needs trainer and engine in this process, not HTTPTrainServiceClient and FakeEngine") as caught:
        WeightPusher(group(1), engine, make_route("in-process"), PROBE).push(0)
    assert isinstance(caught.value, BackendError)
    engine.close()
