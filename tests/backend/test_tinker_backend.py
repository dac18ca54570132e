"""The holder of Tinker's client and its backend, against our own server over a socket, and against the local backend."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tinker")

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.tinker import TinkerBackend, TinkerServiceHolder
from nexrl_sdk.engine.model import LoraConfig
from nexrl_sdk.serve.api import ApiServer, serve
from nexrl_sdk.types import AdamParams, BackendError, CheckpointError, ConfigError, DataError, Datum, Interrupted, SamplingParams

torch.set_num_threads(1)
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
SETTINGS: dict[str, Any] = {"lora_rank": 4, "seed": 3}
ADAM = AdamParams(learning_rate=0.02, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=1.5)


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ApiServer]:
    with serve("tinker", models={"org/tiny": folder}, dtype="float32") as s:
        yield s


@pytest.fixture
def holder(server: ApiServer) -> Iterator[TinkerServiceHolder]:
    with TinkerServiceHolder(server.url, **SETTINGS) as h:
        yield h


@pytest.fixture
def backend(server: ApiServer) -> Iterator[TinkerBackend]:
    with TinkerBackend("org/tiny", url=server.url, **SETTINGS) as b:
        yield b


def datums(seed: int = 0, count: int = 3, rl: bool = True) -> list[Datum]:
    """Sequences whose first tokens are a prompt; the others have weights of several sizes."""
    rng = np.random.default_rng(seed)
    made = []
    for n in rng.integers(6, 14, count):
        t = rng.integers(5, 270, n + 1)
        fields = {"weights": np.r_[0.0, 0.0, rng.uniform(0.2, 1, n - 2)]}
        made.append(Datum(t[:-1], t[1:], {**fields, **({"logprobs": rng.normal(-5, 0.1, n), "advantages": rng.normal(size=n)} if rl else {})}))
    return made


@pytest.mark.parametrize(("loss", "config"), [("cross_entropy", None), ("importance_sampling", None), ("ppo", {"clip_high_threshold": 1.28}), ("cispo", None), ("gspo", None)])
def test_steps_are_the_local_backends(loss: str, config: dict[str, float] | None, backend: TinkerBackend, folder: Path) -> None:
    """Both begin with the same adapter, by its seed, and make the same steps, token weights and all."""
    with LocalBackend(folder, lora=LoraConfig(rank=4, seed=3, train_unembed=True), dtype="float32") as local:
        for i in range(3):
            for part in (datums(2 * i, rl=loss != "cross_entropy"), datums(2 * i + 1, rl=loss != "cross_entropy")):
                mine, theirs = backend.forward_backward(part, loss, config), local.forward_backward(part, loss, config)
                assert mine.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-4)
                for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                    np.testing.assert_allclose(a, b, atol=1e-4)
            stepped = [b.optim_step(ADAM) for b in (backend, local)]
            assert stepped[0]["grad_norm"] == pytest.approx(stepped[1]["grad_norm"], rel=1e-3)
        assert backend.publish() == 1 and backend.weight_version == 1
        local.publish()
        asked = SamplingParams(max_tokens=12, seed=5, top_logprobs=2, prompt_logprobs=True)
        [mine], [theirs] = backend.sample([[20, 30]], asked, n=2), local.sample([[20, 30]], asked, n=2)
    assert [(c.tokens, c.finish_reason) for c in mine] == [(c.tokens, c.finish_reason) for c in theirs]
    assert mine[0].weight_version == 1 and mine[0].prompt_logprobs[1] == pytest.approx(theirs[0].prompt_logprobs[1], abs=1e-4)
    assert [[i for i, _ in row] for row in mine[0].top_logprobs] == [[i for i, _ in row] for row in theirs[0].top_logprobs]
    reference = backend.forward(datums(9, rl=False), reference=True)
    with LocalBackend(folder, dtype="float32") as plain:
        for a, b in zip(reference.logprobs, plain.forward(datums(9, rl=False)).logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_several_targets_a_token(backend: TinkerBackend, folder: Path) -> None:
    """Distillation from a teacher's likeliest tokens: [N, K] targets and weights."""
    rng = np.random.default_rng(0)
    data = [Datum(rng.integers(5, 270, n), rng.integers(5, 270, (n, 3)), {"weights": rng.uniform(0, 1, (n, 3))}) for n in (5, 8)]
    mine = backend.forward_backward(data, "cross_entropy")
    with LocalBackend(folder, lora=LoraConfig(rank=4, seed=3, train_unembed=True), dtype="float32") as local:
        theirs = local.forward_backward(data, "cross_entropy")
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_documented_calls_of_the_holder(holder: TinkerServiceHolder) -> None:
    assert holder.base_model == "org/tiny" and holder.max_length == 256 and holder.get_tokenizer() is holder.tokenizer
    answer = holder.sample_from_messages([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=5, seed=1), n=2)
    assert len(answer["choices"]) == 2 and answer["usage"]["completion_tokens"] == sum(len(c["tokens"]) for c in answer["choices"])
    assert answer["prompt_tokens"] == holder.apply_chat_template([{"role": "user", "content": "hi"}])
    [c] = holder.sample_from_prompt("hello", SamplingParams(max_tokens=9, seed=2, stop=["a"], prompt_logprobs=True))
    scores = holder.compute_logprobs(holder.tokenizer.encode("hello"))
    assert c.text is not None and scores[0] is None and scores[1:] == pytest.approx(c.prompt_logprobs[1:], abs=1e-4)
    out, step = holder.forward_backward_and_optim_step(datums(), "ppo", adam=ADAM)
    assert len(out.logprobs) == 3 and step["grad_norm"] > 0 and step["lr"] == 0.02
    trained = holder.train(datums(), {"loss_fn": "cispo", "learning_rate": 0.01})["metrics"]
    assert trained["lr"] == 0.01 and np.isfinite(trained["loss"])
    before = holder.compute_logprobs([9, 8, 7])
    path = holder.save_weights_for_sampler("mine")
    assert path is not None and path.endswith("/sampler_weights/mine") and before != holder.compute_logprobs([9, 8, 7])
    assert holder.score([[9, 8, 7]], base=True)[0][1:].tolist() == pytest.approx(before[1:], abs=1e-4)
    holder.forward_backward_and_optim_step(datums(), "ppo", adam=ADAM)
    assert holder.publish() is None
    after = holder.compute_logprobs([9, 8, 7])
    holder.update_sampling_client(path)
    assert after != holder.compute_logprobs([9, 8, 7])


def test_state_comes_back_and_gradients_can_be_forgotten(backend: TinkerBackend, tmp_path: Path) -> None:
    def step(seed: int) -> float:
        out = backend.forward_backward(datums(seed), "ppo")
        backend.optim_step(ADAM)
        return out.loss

    step(0)
    backend.publish()
    backend.save(tmp_path / "step_1", {"at": 1})
    losses = [step(1), step(2)]
    assert backend.load(tmp_path / "step_1") == {"at": 1} and backend.weight_version == 1
    backend.forward_backward(datums(7), "ppo")
    backend.zero_grad()
    assert [step(1), step(2)] == pytest.approx(losses, rel=1e-6)
    backend.reset()
    assert backend.weight_version == 0 and step(0) != losses[0]
    LocalBackend(backend.service_holder.training.get_info().model_data.tokenizer_id).save(tmp_path / "other")
    with pytest.raises(CheckpointError, match="not one of the tinker backend"):
        backend.load(tmp_path / "other")


def test_states_that_are_no_longer_here_go_from_the_service(server: ApiServer, tmp_path: Path) -> None:
    with TinkerBackend("org/tiny", url=server.url, keep_last=2, **SETTINGS) as b:
        for i in range(5):
            b.save(tmp_path / f"step_{i}")
        assert len(server.hub.store.list(b.service_holder.training.model_id)) == 3


def test_the_adapter_can_be_fetched(backend: TinkerBackend, server: ApiServer, folder: Path, tmp_path: Path) -> None:
    """As peft reads it: transformers gives the logprobs that the service gives."""
    import peft
    from transformers import AutoModelForCausalLM

    data = datums(3, rl=False)
    backend.forward_backward(data, "cross_entropy")
    backend.optim_step(ADAM)
    place = backend.export_adapter(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(place)).eval()
    for got, d in zip(backend.forward(data).logprobs, data, strict=True):
        with torch.no_grad():
            want = model(torch.tensor(d.tokens)[None]).logits[0].log_softmax(-1).gather(-1, torch.tensor(d.targets)[:, None])[:, 0]
        np.testing.assert_allclose(got, want.numpy(), atol=1e-4)
    assert not server.hub.store.list(backend.service_holder.training.model_id)


def test_a_stop_flag_ends_the_wait(backend: TinkerBackend) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Interrupted):
        backend.sample([[5]] * 8, SamplingParams(max_tokens=250, stop=[]), n=200, stop_flag=stop)
    with pytest.raises(Interrupted):
        backend.forward_backward(datums(), "ppo", stop_flag=stop)
    assert backend.sample([[5]], SamplingParams(max_tokens=2))[0][0].tokens


def test_errors_have_the_services_words(server: ApiServer, backend: TinkerBackend, holder: TinkerServiceHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="outside the model's vocabulary"):
        backend.forward_backward([Datum([5, 100_000], [6, 7], {"weights": [1, 1]})], "cross_entropy")
    with pytest.raises(BackendError, match="no step was made"):
        backend.optim_step(ADAM)
    with pytest.raises(BackendError, match="no checkpoint"):
        holder.load_state("tinker://x:train:0/weights/none")
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ConfigError, "did you mean 'org/tiny'", lambda: TinkerServiceHolder(server.url, base_model="org/tony")),
        (ConfigError, "no min_p", lambda: backend.sample([[5]], SamplingParams(min_p=0.1))),
        (ConfigError, "no kl_coef", lambda: backend.forward_backward(datums(), "ppo", {"kl_coef": 0.1})),
        (ConfigError, "same weight at every token", lambda: backend.forward_backward(datums(), "dro")),
        (ConfigError, "no loss 'pppo'", lambda: backend.forward_backward(datums(), "pppo")),
        (DataError, "lacks 'logprobs'", lambda: backend.forward_backward(datums(rl=False), "ppo")),
        (BackendError, "written as a function", lambda: backend.forward_backward(datums(), lambda x: x)),
        (ConfigError, "config.learning_rat is not known", lambda: holder.train(datums(), {"learning_rat": 1})),
        (BackendError, "no server answers at", lambda: TinkerServiceHolder("http://127.0.0.1:9")),
        (ConfigError, "did you mean 'lora_rank'", lambda: TinkerBackend("org/tiny", url=server.url, lora_rnk=3)),
        (ConfigError, "not dict", lambda: TinkerBackend({}, url=server.url)),
        (ConfigError, "mapping of text to text", lambda: TinkerServiceHolder(server.url, user_metadata=[1])),
        (ConfigError, "did you mean 'tinker'", lambda: serve("tinkr", models={"a": "b"})),
        (ConfigError, "mapping of names", lambda: serve("tinker", models=["a"])),
        (ConfigError, "base_url must begin", lambda: TinkerServiceHolder("nowhere")),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.publish()
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(BackendError, match=r"pip install 'nexrl_sdk\[tinker\]'"):
        TinkerServiceHolder(server.url)
