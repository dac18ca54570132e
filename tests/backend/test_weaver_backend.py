"""The holder of Weaver's client and its backend, against our own server over a socket, and against the local backend."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("weaver")

from nexrl_sdk.backend import weaver as ours
from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.weaver import WeaverBackend, WeaverServiceHolder
from nexrl_sdk.engine.model import LoraConfig
from nexrl_sdk.serve.api import ApiServer, serve
from nexrl_sdk.types import AdamParams, BackendError, CheckpointError, ConfigError, DataError, Datum, Interrupted, SamplingParams

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)
SETTINGS: dict[str, Any] = {"lora_rank": 4, "seed": 3, "train_unembed": False}
ADAM = AdamParams(learning_rate=0.02, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=1.5)


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ApiServer]:
    with serve("weaver", models={"org/tiny": folder}, dtype="float32") as s:
        yield s


@pytest.fixture
def holder(server: ApiServer) -> Iterator[WeaverServiceHolder]:
    with WeaverServiceHolder(server.url, **SETTINGS) as h:
        yield h


@pytest.fixture
def backend(server: ApiServer) -> Iterator[WeaverBackend]:
    b = WeaverBackend("org/tiny", url=server.url, **SETTINGS)
    yield b
    b.close()


@pytest.fixture
def local(folder: Path) -> Iterator[LocalBackend]:
    b = LocalBackend(folder, lora=LoraConfig(rank=4, seed=3), dtype="float32")
    yield b
    b.close()


def datums(seed: int = 0, count: int = 3, rl: bool = True) -> list[Datum]:
    rng = np.random.default_rng(seed)
    made = []
    for n in rng.integers(6, 14, count):
        t = rng.integers(5, 270, n + 1)
        fields = {"weights": np.r_[0.0, rng.uniform(0.2, 1, n - 1)]}
        made.append(Datum(t[:-1], t[1:], {**fields, **({"logprobs": rng.normal(-5, 0.1, n), "advantages": rng.normal(size=n)} if rl else {})}))
    return made


@pytest.mark.parametrize(("loss", "config"), [("cross_entropy", None), ("importance_sampling", None), ("ppo", {"clip_high_threshold": 1.28}), ("cispo", None), ("gspo", None)])
def test_steps_are_the_local_backends(loss: str, config: dict[str, float] | None, backend: WeaverBackend, local: LocalBackend) -> None:
    """Both begin with the same adapter, by its seed, and make the same steps."""
    for i in range(3):
        for part in (datums(2 * i, rl=loss != "cross_entropy"), datums(2 * i + 1, rl=loss != "cross_entropy")):
            mine, theirs = backend.forward_backward(part, loss, config), local.forward_backward(part, loss, config)
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-3, abs=1e-3)
            for a, b in zip(mine.logprobs, theirs.logprobs):
                np.testing.assert_allclose(a, b, atol=1e-3)
        stepped = [b.optim_step(ADAM) for b in (backend, local)]
        assert stepped[0]["grad_norm"] == pytest.approx(stepped[1]["grad_norm"], rel=1e-3)
        assert stepped[0]["lr"] == 0.02
    assert backend.publish() == 1
    local.publish()
    asked = SamplingParams(max_tokens=12, seed=5)
    [mine], [theirs] = backend.sample([[20, 30]], asked, n=2), local.sample([[20, 30]], asked, n=2)
    assert [c.tokens for c in mine] == [c.tokens for c in theirs]
    assert mine[0].weight_version == 1


def test_the_documented_calls_of_the_holder(holder: WeaverServiceHolder) -> None:
    assert holder.base_model == "org/tiny" and holder.max_length == 256
    answer = holder.sample_from_messages([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=5, seed=1), n=2)
    assert len(answer["choices"]) == 2 and answer["usage"]["completion_tokens"] == sum(len(c["tokens"]) for c in answer["choices"])
    [c] = holder.sample_from_prompt("hello", SamplingParams(max_tokens=9, seed=2, stop=["a"], prompt_logprobs=True))
    assert c.text is not None and c.prompt_logprobs is not None and np.isnan(c.prompt_logprobs[0]) and len(c.prompt_logprobs) == 5
    scores = holder.compute_logprobs(holder.tokenizer.encode("hello"))
    assert scores[0] is None and scores[1:] == pytest.approx(c.prompt_logprobs[1:], abs=1e-4)
    out, step = holder.forward_backward_and_optim_step(datums(), "ppo", adam=ADAM)
    assert len(out.logprobs) == 3 and step["grad_norm"] > 0
    assert holder.train(datums(), {"loss_fn": "cispo", "learning_rate": 0.01})["metrics"]["lr"] == 0.01
    before = holder.compute_logprobs([9, 8, 7])
    path = holder.save_weights_for_sampler("mine")
    assert path is not None and path.endswith("/sampler_weights/mine")
    assert before != holder.compute_logprobs([9, 8, 7])
    assert holder.score([[9, 8, 7]], base=True)[0][1:].tolist() == pytest.approx(before[1:], abs=1e-4)
    holder.forward_backward_and_optim_step(datums(), "ppo", adam=ADAM)
    newest = holder.publish()
    assert newest is None
    after = holder.compute_logprobs([9, 8, 7])
    holder.update_sampling_client(path)
    assert after != holder.compute_logprobs([9, 8, 7])


@pytest.mark.parametrize("transport", ["default", "http-binary"])
def test_results_can_be_waited_for_with_a_limit(transport: str, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl_sdk.serve.weaver.HOLD", 0.0)
    with WeaverServiceHolder(server.url, tensor_transport=transport, **SETTINGS) as h:
        pending = h.submit_forward_backward(datums(1, 60), "ppo")
        with pytest.raises(TimeoutError, match="no answer within"):
            pending.result(timeout=0)
        assert len(pending.result(timeout=60).logprobs) == 60
        assert len(pending.result().logprobs) == 60


def test_state_comes_back_and_accumulated_gradients_can_be_forgotten(backend: WeaverBackend, server: ApiServer, tmp_path: Path) -> None:
    data = datums(4, rl=False)

    def step(b: WeaverBackend) -> None:
        b.forward_backward(data, "cross_entropy")
        b.optim_step(ADAM)

    step(backend)
    backend.publish()
    saved = backend.save(tmp_path / "step_1", {"at": 1})
    step(backend)
    want = backend.forward(data).logprobs
    other = WeaverBackend(url=server.url, **{**SETTINGS, "seed": 50})
    try:
        assert other.load(saved) == {"at": 1} and other.weight_version == 1
        other.forward_backward(datums(5, rl=False), "cross_entropy")
        other.zero_grad()
        step(other)
        for a, b in zip(other.forward(data).logprobs, want):
            np.testing.assert_array_equal(a, b)
        reference = other.forward(data, reference=True).logprobs
        other.reset()
        assert other.weight_version == 0
        for a, b in zip(other.forward(data).logprobs, reference):
            np.testing.assert_allclose(a, b, atol=1e-3)
    finally:
        other.close()
    with pytest.raises(CheckpointError):
        backend.load(tmp_path)


def test_states_that_are_no_longer_here_go_from_the_service(server: ApiServer, tmp_path: Path) -> None:
    b = WeaverBackend(url=server.url, keep_last=1, **SETTINGS)
    try:
        for i in range(4):
            b.save(tmp_path / f"step_{i}")
        run = b.service_holder.training.model_id  # type: ignore[attr-defined]
        deadline = time.monotonic() + 20
        while len(left := [c for c in b.service_holder.training.list_checkpoints() if c.checkpoint_type == "weight_and_optimizer"]) > 2:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(left) == 2 and all(run in c.path for c in left)
    finally:
        b.close()


@pytest.mark.parametrize("published", [False, True])
def test_a_stop_flag_ends_the_wait_and_what_is_drawn(published: bool, holder: WeaverServiceHolder, server: ApiServer) -> None:
    flag = threading.Event()
    if published:
        holder.forward_backward_and_optim_step(datums(), "ppo", adam=ADAM)
        holder.publish()
    asked = SamplingParams(max_tokens=3, seed=1)
    want = holder.sample([[5, 6]], [asked])[0][0].tokens
    threading.Timer(0.3, flag.set).start()
    with pytest.raises(Interrupted):
        while True:  # until the flag is set within a call
            holder.sample([[5, 6]] * 30, [SamplingParams(max_tokens=200)] * 30, 8, flag)
    assert holder.sample([[5, 6]], [asked])[0][0].tokens == want
    deadline = time.monotonic() + 20
    while server.hub.base("org/tiny").under_way:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_many_prompts_are_answered_in_their_order(holder: WeaverServiceHolder) -> None:
    asked = [SamplingParams(max_tokens=10, seed=i) for i in range(50)]
    many = holder.sample([[10 + i] for i in range(50)], asked)
    for i in (0, 17, 49):
        assert holder.sample([[10 + i]], [asked[i]])[0][0].tokens == many[i][0].tokens


def test_errors_have_the_services_words(server: ApiServer, holder: WeaverServiceHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'org/tiny'"):
        WeaverServiceHolder(server.url, base_model="org/tny")
    with pytest.raises(BackendError, match=r"a pass over a batch failed: datum 0 has token 9999"):
        holder.forward_backward([Datum([9999], [1])], "cross_entropy")
    with pytest.raises(BackendError, match=r"an optimizer step failed: no step was made"):
        holder.optim_step(ADAM)
    with pytest.raises(BackendError, match=r"loading weaver://x failed: .* is no checkpoint's address"):
        holder.load_state("weaver://x")
    with pytest.raises(BackendError, match=r"sampling failed: .*context"):
        holder.sample([[5] * 400], [SamplingParams(max_tokens=3)])
    with pytest.raises(BackendError, match=r"saving the state failed: a checkpoint's name"):
        holder.save_state("../x")
    with pytest.raises(ConfigError, match="min_p"):
        holder.sample([[5]], [SamplingParams(min_p=0.1)])
    with pytest.raises(ConfigError, match="likeliest"):
        holder.sample([[5]], [SamplingParams(top_logprobs=2)])
    with pytest.raises(ConfigError, match="kl_coef"):
        holder.forward_backward(datums(), "ppo", {"kl_coef": 0.1})
    with pytest.raises(DataError, match="lacks 'logprobs'"):
        holder.forward_backward(datums(rl=False), "ppo")
    with pytest.raises(ConfigError, match="key"):
        WeaverServiceHolder(server.url, api_key="a\nb")
    with pytest.raises(BackendError, match="reaching Weaver's API failed"):
        WeaverServiceHolder("http://127.0.0.1:9", base_model="x")
    monkeypatch.setitem(sys.modules, "weaver", None)
    with pytest.raises(BackendError, match=r"pip install 'nexrl_sdk\[weaver\]'"):
        WeaverServiceHolder(server.url)


def test_a_backend_that_cannot_be_made_leaves_no_heartbeat(server: ApiServer) -> None:
    before = {t.ident for t in threading.enumerate()}
    with pytest.raises(ConfigError):
        WeaverBackend("org/tiny", url=server.url, tokenizer="/nowhere/at/all", **SETTINGS)
    deadline = time.monotonic() + 20
    while beating := [t.name for t in threading.enumerate() if t.ident not in before and "heartbeat" in t.name.lower()]:
        assert time.monotonic() < deadline, beating
        time.sleep(0.05)


def test_closing_ends_the_model_at_once(server: ApiServer) -> None:
    h = WeaverServiceHolder(server.url, **SETTINGS)
    ident = h.training.model_id
    h.close()
    h.close()
    model = server.hub._sessions[ident.rsplit("-train-", 1)[0]].models
    assert not model
    with pytest.raises(BackendError, match="closed"):
        h.forward_backward(datums())
    with pytest.raises(BackendError, match="closed"):
        h.sample([[1]], [SamplingParams()])
