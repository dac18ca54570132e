"""The backend that joins a training service and an engine: what it promises to trainers, and what it does when a side is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weights_fakes import FakeEngine, datum, train_step

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.self_hosted import HealthWatch, SelfHostedBackend, Starting, remote_name
from nexrl_sdk.backend.train_server import start_train_service
from nexrl_sdk.recipe.config import Recipe
from nexrl_sdk.types import AdamParams, BackendError, CheckpointError, ConfigError, SamplingParams

pytestmark = pytest.mark.timeout(60)
TOKENS = [10, 20, 30, 40, 50, 60]


@pytest.fixture
def joined(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SelfHostedBackend]:
    monkeypatch.chdir(tmp_path)  # where the service in this process keeps what it is told to write
    model = tiny("qwen2")
    learner, engine = LocalBackend(model, dtype="float32"), FakeEngine(model)
    with SelfHostedBackend(learner.train_service, engine, learner.tokenizer, keep_last=2) as backend:
        yield backend
    learner.close()
    engine.close()


def both(backend: SelfHostedBackend) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of the same tokens by the service and by the engine."""
    return backend.forward([datum(TOKENS)]).logprobs[0], backend.engine.logprobs([TOKENS])[0][1:]


def test_new_weights_are_sampled_from_when_they_are_published(joined: SelfHostedBackend) -> None:
    before = both(joined)
    np.testing.assert_allclose(*before, atol=1e-5)
    train_step(joined, lr=1e-2)
    moved = both(joined)
    assert np.abs(moved[0] - before[0]).max() > 1e-3
    np.testing.assert_array_equal(moved[1], before[1])
    assert joined.publish() == joined.weight_version == 1 and joined.engine.weight_version == 1
    np.testing.assert_allclose(*both(joined), atol=1e-5)
    assert joined.push_metrics["probe/max_abs"] < 1e-4
    assert joined.sample([[10, 20]], SamplingParams(max_tokens=3))[0][0].tokens


def test_a_saved_state_brings_both_sides_back(joined: SelfHostedBackend, tmp_path: Path) -> None:
    train_step(joined)
    joined.publish()
    joined.save(tmp_path / "run/step_1", {"step": 1, "mine": [1, 2]})
    want = both(joined)
    next_step = [train_step(joined), joined.publish(), both(joined)][2]
    assert joined.load(tmp_path / "run/step_1") == {"step": 1, "mine": [1, 2]} and joined.weight_version == joined.engine.weight_version == 1
    for a, b in zip(both(joined), want, strict=True):
        np.testing.assert_array_equal(a, b)
    train_step(joined)  # with the optimizer's moments of then
    np.testing.assert_array_equal(both(joined)[0], next_step[0])
    joined.reset()
    assert joined.weight_version == 0
    np.testing.assert_allclose(*both(joined), atol=1e-5)


def test_checkpoints_in_the_service_are_pruned_and_runs_do_not_share_names(joined: SelfHostedBackend, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        joined.save(tmp_path / f"run/step_{step:06d}", {"step": step})
    kept = Path(remote_name(tmp_path / "run/step_000001")).parent
    assert sorted(p.name for p in kept.iterdir()) == ["step_000002", "step_000003"]
    with pytest.raises(CheckpointError, match="step_000001"):
        joined.load(tmp_path / "run/step_000001")
    assert remote_name(tmp_path / "other/step_000001") != remote_name(tmp_path / "run/step_000001")


def test_a_checkpoint_of_another_kind_is_refused(joined: SelfHostedBackend, tmp_path: Path) -> None:
    joined.train_service.backend.save(tmp_path / "local", {})  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="not one of a self-hosted backend"):
        joined.load(tmp_path / "local")


def test_a_loss_that_is_a_function_and_a_closed_backend_are_refused(joined: SelfHostedBackend) -> None:
    with pytest.raises(BackendError, match="takes the name of a loss"):
        joined.forward_backward([datum(TOKENS)], lambda inp: inp.logprobs.sum())
    joined.forward_backward([datum(TOKENS)], "cross_entropy")
    joined.zero_grad()
    with pytest.raises(BackendError, match="no gradients"):
        joined.optim_step(AdamParams())
    joined.close()
    joined.close()
    for call in (joined.publish, lambda: joined.sample([[1]]), lambda: joined.forward([datum(TOKENS)]), joined.reset):
        with pytest.raises(BackendError, match="closed"):
            call()


@pytest.mark.parametrize("error", [BackendError("the disk is full"), KeyError("results"), RuntimeError("the disk is full")])
def test_a_failed_push_leaves_the_version_and_the_old_weights(joined: SelfHostedBackend, error: Exception) -> None:
    train_step(joined)
    joined.publish()
    want = joined.engine.logprobs([TOKENS])[0][1:]
    train_step(joined, lr=1e-2)

    def fail() -> None:
        joined.engine.faults.pop("half-way")  # type: ignore[attr-defined]
        raise error

    joined.engine.faults["half-way"] = fail  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match=r"the disk is full|KeyError: 'results'"):
        joined.publish()
    assert joined.weight_version == 1 and not joined.engine.health()["paused"]
    np.testing.assert_array_equal(joined.engine.logprobs([TOKENS])[0][1:], want)
    assert joined.publish() == 2
    np.testing.assert_allclose(*both(joined), atol=1e-5)


def test_what_is_owned_ends_with_it(tiny: Callable[..., Path]) -> None:
    ended: list[str] = []
    owned = contextlib.ExitStack()
    owned.callback(ended.append, "service")
    owned.callback(ended.append, "engine")
    learner, engine = LocalBackend(tiny("qwen2"), dtype="float32"), FakeEngine(tiny("qwen2"))
    with SelfHostedBackend(learner.train_service, engine, learner.tokenizer, owned=owned):
        pass
    assert ended == ["engine", "service"]


@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_a_service_that_is_not_well_is_told_of(joined: SelfHostedBackend, kind: str) -> None:
    release, well = threading.Event(), threading.Event()
    well.set()

    def probe() -> Any:
        if not well.is_set():
            if kind == "raises":
                raise BackendError("connection refused")
            release.wait(30)

    joined.watch = HealthWatch({"the training service": probe}, interval=0.02, timeout=0.1, patience=2)
    time.sleep(0.2)
    joined.forward([datum(TOKENS)])
    well.clear()
    deadline = time.monotonic() + 10
    with pytest.raises(BackendError, match=r"the training service has not answered 2 health checks.*resume the run"):
        while time.monotonic() < deadline:
            joined.forward([datum(TOKENS)])
            time.sleep(0.02)
    release.set()
    joined.watch.close()


def test_a_run_begins_with_untrained_weights_whatever_another_left(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A group that a killed run left in the service is brought back to where it began."""
    with start_train_service(tmp_path / "root") as service:
        recipe = Recipe(model={"path": str(tiny("qwen2")), "dtype": "float32"}, data=[{"prompt": "a"}], evaluator=lambda row, answer: 1.0, service={"train_service": {"backend": "http", "url": service.url, "api_key": service.key}})
        killed = Starting(recipe, tmp_path / "a").client("actor")
        untrained = killed.forward([datum(TOKENS)])["loss"]
        killed.forward_backward([datum(TOKENS)], "cross_entropy")
        killed.optim_step(AdamParams(1e-2))
        assert killed.forward([datum(TOKENS)])["loss"] != untrained
        with pytest.raises(ConfigError, match="works for another run"):
            Starting(recipe, tmp_path / "b").client("actor")
        assert Starting(recipe, tmp_path / "a").client("actor").forward([datum(TOKENS)])["loss"] == untrained  # the same run, begun again
        killed.deregister()
        assert Starting(recipe, tmp_path / "b").client("actor").forward([datum(TOKENS)])["loss"] == untrained


@pytest.mark.parametrize(("service", "weight", "url", "anywhere"), [
    ({"backend": "http"}, {}, None, False), ({"backend": "http"}, {}, "http://127.0.0.1:8000", True), ({"backend": "http", "url": "http://127.0.0.1:8000"}, {}, None, True),
    ({"backend": "http", "checkpoint_root": "/elsewhere"}, {}, None, True), ({"backend": "http"}, {"path": "/elsewhere"}, None, True), ({}, {}, None, False),
])  # fmt: skip
def test_a_server_of_the_run_may_read_where_its_weights_are_written(service: dict[str, Any], weight: dict[str, Any], url: str | None, anywhere: bool, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Server:
        def __init__(self, *args: Any, **kwargs: Any):
            asked.append(kwargs["weights_root"])

        def close(self) -> None: ...

        def start(self) -> None:
            raise BackendError("far enough")

    monkeypatch.setattr("nexrl_sdk.backend.vllm.VLLMServer", Server)
    recipe = Recipe(model={"path": str(tiny("qwen2")), "dtype": "float32"}, data=[{"prompt": "a"}], evaluator=lambda row, answer: 1.0, service={"train_service": service, "inference_service": {"backend": "vllm"}}, weight=weight)
    with pytest.raises(BackendError, match="far enough"):
        Starting(recipe, tmp_path, train_url=url).engine(None)
    assert asked == [None if anywhere else tmp_path]
