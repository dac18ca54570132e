"""Weaver's API: the unmodified nex-weaver client over a socket, against float64 autograd, and the engine's own sampler."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

weaver = pytest.importorskip("weaver")

from weaver.operations import WeaverOperationError
from weaver.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

from nexrl_sdk.engine.model import load_model, load_tokenizer
from nexrl_sdk.engine.sampler import Sampler
from nexrl_sdk.serve import weaver as ours
from nexrl_sdk.serve.api import ApiServer, _uvicorn, create_api_app, serve
from nexrl_sdk.types import SamplingParams as Params

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)
Client = Callable[..., Any]
LEAVING: list[threading.Thread] = []


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with serve("weaver", models={"tiny": tiny("llama")}, root=tmp_path_factory.mktemp("weaver"), dtype="float32") as s:
        yield s
        for thread in LEAVING:
            thread.join(10)


def connect(url: str, key: str = "sk-local", **more: Any) -> Any:
    c = weaver.ServiceClient(base_url=url, api_key=key, heartbeat_interval=1.0, **more)
    c.connect()
    return c


def leave(c: Any) -> None:
    """Close a client, which waits for a thread that sleeps, while the next test runs."""
    LEAVING.append(threading.Thread(target=c.close, daemon=True))
    LEAVING[-1].start()


@pytest.fixture
def client(server: ApiServer) -> Iterator[Client]:
    made: list[Any] = []

    def make(url: str = server.url, key: str = "sk-local", **more: Any) -> Any:
        made.append(connect(url, key, **more))
        return made[-1]

    yield make
    for c in made:
        leave(c)


def train(client: Any, seed: int = 5) -> Any:
    return client.create_model(base_model="tiny", lora_config=LoraConfig(rank=4, seed=seed))


def batch(seed: int = 0, count: int = 3) -> list[dict[str, Any]]:
    """Tokens and what any loss reads of them."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in rng.integers(8, 16, count):
        tokens = rng.integers(5, 270, n + 1)
        rows.append({"tokens": tokens[:-1], "target_tokens": tokens[1:], "weights": rng.uniform(0.1, 1, n), "advantages": rng.normal(size=n)})
    return rows


def as_datums(rows: list[dict[str, Any]], *names: str) -> list[Any]:
    return [Datum(model_input=ModelInput.from_ints(r["tokens"].tolist()), loss_fn_inputs={k: torch.as_tensor(r[k]) for k in ("target_tokens", *names)}) for r in rows]


CE = ("weights",)
ADAM = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 0.02, "weight_decay": 0.3, "grad_clip_norm": 2.0}


def logprobs(answer: dict[str, Any]) -> list[np.ndarray]:
    return [np.array(o["logprobs"]["data"]) for o in answer["loss_fn_outputs"]]


@pytest.fixture(scope="module")
def started(server: ApiServer) -> Any:
    """An address of an adapter whose two halves are not zero."""
    c = connect(server.url)
    t = train(c)
    t.forward_backward(as_datums(batch(9), *CE), "cross_entropy")
    t.optim_step(AdamParams(learning_rate=0.05))
    saved = t.save_state(name="start")
    leave(c)
    return saved


def adapter_at(client: Any, training: Any, folder: Path) -> Any:
    """The present adapter on the model of transformers, in float64, by peft."""
    import peft
    from transformers import AutoModelForCausalLM

    client.download_weights(training.export_weights(), folder)
    base = AutoModelForCausalLM.from_pretrained(training.tokenizer_path, dtype=torch.float64)
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True).double().train()


def target_logprobs(module: Any, row: dict[str, Any]) -> torch.Tensor:
    logits = module(torch.as_tensor(row["tokens"])[None]).logits[0]
    return logits.log_softmax(-1).gather(-1, torch.as_tensor(row["target_tokens"])[:, None])[:, 0]


def clipped(r: torch.Tensor, a: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(r * a, r.clamp(low, high) * a).sum()


def sequence_ratio(lp: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.exp((lp - old).mean().detach() + lp - lp.detach())


LOSSES: dict[str, tuple[dict[str, float], Any]] = {
    "cross_entropy": ({}, lambda lp, old, a, w: -(w * lp).sum()),
    "importance_sampling": ({}, lambda lp, old, a, w: -(torch.exp(lp - old) * a).sum()),
    "ppo": ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, lambda lp, old, a, w: clipped(torch.exp(lp - old), a, 0.9, 1.05)),
    "cispo": ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, lambda lp, old, a, w: -(torch.exp(lp - old).clamp(0.9, 1.05).detach() * lp * a).sum()),
    "dro": ({"beta": 0.2}, lambda lp, old, a, w: -(lp * a - 0.1 * (lp - old) ** 2).sum()),
    "gspo": ({"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}, lambda lp, old, a, w: clipped(sequence_ratio(lp, old), a, 0.99, 1.01)),
    "custom": ({}, lambda lp, old, a, w: ((lp + 1) ** 2 * a).sum()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_step_are_those_of_float64_autograd(name: str, client: Client, started: Any, tmp_path: Path) -> None:
    config, formula = LOSSES[name]
    c = client()
    t = train(c)
    t.load_state(started)
    module = adapter_at(c, t, tmp_path / "before")
    rows = batch(1)
    rng = np.random.default_rng(2)
    found = [target_logprobs(module, r) for r in rows]
    for r, lp in zip(rows, found):
        r["logprobs"] = lp.detach().numpy() + rng.normal(size=len(lp)) * 0.1
    each = [formula(lp, *(torch.as_tensor(r[k]) for k in ("logprobs", "advantages", "weights"))) for r, lp in zip(rows, found)]
    loss = torch.stack(each).sum()

    if name == "custom":
        got = t.forward_backward_custom(as_datums(rows, "advantages"), lambda data, lps: (sum(formula(lp, None, d.loss_fn_inputs["advantages"], None) for lp, d in zip(lps, data)), {}))["loss"]
    else:
        answer = t.forward_backward(as_datums(rows, *(CE if name == "cross_entropy" else ("logprobs", "advantages"))), name, loss_fn_config=config)
        got = answer["metrics"]["loss"]
        for a, b in zip(logprobs(answer), found):
            np.testing.assert_allclose(a, b.detach().numpy(), atol=2e-4)
    assert float(got) == pytest.approx(float(loss), rel=1e-4, abs=1e-3)

    loss.backward()
    params = {n: p for n, p in module.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(list(params.values()), ADAM["grad_clip_norm"])
    before = {n: p.detach().clone() for n, p in params.items()}
    torch.optim.AdamW(list(params.values()), lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"], weight_decay=ADAM["weight_decay"]).step()
    stepped = t.optim_step(AdamParams(**ADAM))
    assert stepped["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    after = dict(adapter_at(c, t, tmp_path / "after").named_parameters())
    assert len(params) > 20
    for n, p in params.items():
        assert float((p - before[n]).abs().max()) > 1e-3, n
        np.testing.assert_allclose(after[n].detach().numpy(), p.detach().numpy(), atol=2e-4, err_msg=n)


@pytest.mark.parametrize("transport", [{}, {"tensor_transport": "http-binary", "tensor_compression": "raw"}, {"tensor_transport": "http-binary", "tensor_compression": "zstd"}])
def test_gradients_of_several_calls_add_up_in_every_transport(transport: dict[str, str], client: Client) -> None:
    c = client(**transport)
    rows = batch(3, 5)
    together, apart = train(c), train(c)
    whole = together.forward_backward(as_datums(rows, *CE), "cross_entropy")
    parts = [apart.forward_backward(as_datums(rows[a:b], *CE), "cross_entropy") for a, b in ((0, 2), (2, 3), (3, 5))]
    assert sum(p["metrics"]["loss"] for p in parts) == pytest.approx(whole["metrics"]["loss"], rel=1e-6)
    np.testing.assert_allclose(np.concatenate([x for p in parts for x in logprobs(p)]), np.concatenate(logprobs(whole)), atol=1e-5)
    norms = [t.optim_step(AdamParams(learning_rate=0.01))["metrics"]["grad_norm"] for t in (together, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    after = [np.concatenate(logprobs(t.forward(as_datums(rows, *CE), "cross_entropy"))) for t in (together, apart)]
    np.testing.assert_allclose(after[0], after[1], atol=2e-4)
    assert np.abs(after[0] - np.concatenate(logprobs(whole))).max() > 0.01


def test_datum_ids_masked_targets_and_the_client_own_helpers(client: Client) -> None:
    t = train(client())
    [row] = batch(4, 1)
    n = len(row["tokens"])
    targets = row["target_tokens"].copy()
    targets[:3] = -100
    tokens = ModelInput.from_ints(row["tokens"].tolist())
    plain = Datum(model_input=tokens, loss_fn_inputs={"target_tokens": row["target_tokens"], "weights": [0.0] * 3 + [1.0] * (n - 3)}, datum_id="a")
    masked = Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets}, datum_id="b")
    by_mask = Datum(model_input=tokens, loss_fn_inputs={"target_tokens": row["target_tokens"], "loss_mask": [0] * 3 + [1] * (n - 3)}, datum_id="c")
    answers = [t.forward([d], "cross_entropy") for d in (plain, masked, by_mask)]
    assert len({round(a["metrics"]["loss"], 4) for a in answers}) == 1
    assert logprobs(answers[1])[0][:3].tolist() == [0, 0, 0]
    assert [o["datum_id"] for o in answers[1]["loss_fn_outputs"]] == ["b"]
    from weaver.training_outputs import attach_loss_fn_outputs

    again = attach_loss_fn_outputs([plain], answers[0])[0].with_loss_fn_inputs(advantages=[0.5] * n)
    assert "old_logprobs" in again.loss_fn_inputs
    assert t.forward_backward([again], "importance_sampling")["metrics"]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_a_resumed_training_is_the_uninterrupted_one(client: Client) -> None:
    data = as_datums(batch(5), *CE)

    def step(t: Any) -> None:
        t.forward_backward(data, "cross_entropy")
        t.optim_step(AdamParams(learning_rate=0.03))

    first = train(client())
    step(first)
    saved = first.save_state(name="half", checkpoint_type="weight_and_optimizer")
    light = first.save_state(name="light")
    step(first)
    step(first)
    second = train(client(), seed=99)
    second.load_state_with_optimizer(saved.path)
    step(second)
    step(second)
    fresh = train(client(), seed=98)
    fresh.load_state(saved)
    step(fresh)
    step(fresh)
    a, b, c = (np.concatenate(logprobs(t.forward(data, "cross_entropy"))) for t in (first, second, fresh))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3  # without its moments it goes elsewhere
    with pytest.raises(RuntimeError, match="saved without its optimizer"):
        second.load_state_with_optimizer(light)
    with pytest.raises(weaver.WeaverAPIError, match="already"):
        first.save_state(name="half")
    assert [x.name for x in first.list_checkpoints()] == ["light", "half"]
    assert first.set_checkpoint_ttl(saved, 1000)["ttl_seconds"] in (999, 1000, 1001)
    assert first.set_checkpoint_ttl(saved, None)["ttl_seconds"] is None


def test_samples_are_those_of_the_engines_own_sampler(client: Client, server: ApiServer, started: Any, tmp_path: Path) -> None:
    c = client()
    t = train(c)
    t.load_state(started)
    sampling = t.save_weights_and_get_sampling_client()
    c.download_weights(t.export_weights(), tmp_path)
    model = load_model(t.tokenizer_path, dtype="float32")
    model.load_adapter(tmp_path, "mine")
    tokenizer = load_tokenizer(t.tokenizer_path)
    own = Sampler(model, tokenizer)
    prompt = [20, 30, 40]
    eos = tokenizer.eos_token_id
    cases = [
        (SamplingParams(max_tokens=20, seed=3), Params(max_tokens=20, seed=3)),
        (SamplingParams(max_tokens=20, temperature=0.7, top_k=9, top_p=0.8, sampling_seed=4), Params(max_tokens=20, temperature=0.7, top_k=9, top_p=0.8, seed=4)),
        (SamplingParams(max_tokens=20, temperature=0), Params(max_tokens=20, temperature=0)),
        (SamplingParams(max_tokens=60, seed=5, stop=[77, 90, 100, 120, 140]), Params(max_tokens=60, seed=5, stop=[77, 90, 100, 120, 140, eos])),
        (SamplingParams(max_tokens=60, seed=6, stop=["a", "b", "c", "d"]), Params(max_tokens=60, seed=6, stop=["a", "b", "c", "d"])),
        (SamplingParams(seed=7), Params(max_tokens=253, seed=7)),
    ]
    for theirs, mine in cases:
        got = sampling.sample(prompt=ModelInput.from_ints(prompt), sampling_params=theirs, num_samples=3)
        want = own.sample([prompt], mine, n=3, adapter="mine")[0]
        assert [s["tokens"] for s in got["sequences"]] == [w.tokens for w in want]
        assert [s["stop_reason"] for s in got["sequences"]] == [w.finish_reason for w in want]
        for s, w in zip(got["sequences"], want):
            np.testing.assert_allclose(s["logprobs"], w.logprobs, atol=1e-4)
            assert s["text"] == tokenizer.decode(w.tokens)
            assert s["weight_version"] == sampling.model_path
    scores = sampling.compute_logprobs(prompt=ModelInput.from_ints(prompt))
    want = own.score(prompt, "mine", top_k=2)
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], want.logprobs[1:], atol=1e-4)
    whole = sampling.sample(prompt=ModelInput.from_ints(prompt), sampling_params=SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=2)["raw_result"]
    np.testing.assert_allclose(whole["prompt_logprobs"][1:], want.logprobs[1:], atol=1e-4)
    assert [[i for i, _ in row] for row in whole["topk_prompt_logprobs"][1:]] == want.top_ids[1:].tolist()
    base = c.create_sampling_client(base_model="tiny")
    assert base.sample(prompt=ModelInput.from_ints(prompt), sampling_params=SamplingParams(max_tokens=8, seed=1))["sequences"][0]["tokens"] == own.sample([prompt], Params(max_tokens=8, seed=1))[0][0].tokens
    again = c.create_sampling_client(base_model="tiny", model_path=sampling.model_path)  # the same weights, by their address
    assert again.compute_logprobs(prompt=ModelInput.from_ints(prompt)) == pytest.approx(scores)


def test_exported_weights_are_the_trained_ones_and_a_download_goes_on(client: Client, server: ApiServer, started: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    c = client()
    t = train(c)
    t.load_state(started)
    artifact = t.export_weights(merge_adapter=True)
    assert artifact.kind == "hf_model" and artifact.status == "completed"
    files = httpx.get(f"{server.url}/api/v1/artifacts/{artifact.id}/download").json()["files"]
    largest = max(files, key=lambda f: f["size"])
    folder = tmp_path / "model"
    folder.mkdir()
    content = httpx.get(largest["url"]).content
    assert hashlib.sha256(content).hexdigest() == largest["sha256"]
    (folder / f"{largest['name']}.part").write_bytes(content[:1000])
    part = httpx.get(largest["url"], headers={"Range": "bytes=1000-"})
    assert part.status_code == 206 and part.content == content[1000:]
    c.download_weights(artifact, folder)
    assert (folder / largest["name"]).read_bytes() == content
    rows = batch(6)
    got = logprobs(t.forward(as_datums(rows, *CE), "cross_entropy"))
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for r, lp in zip(rows, got):
        np.testing.assert_allclose(lp, target_logprobs(module, r).detach().numpy(), atol=2e-4)
    once, twice, anew = (c_export(t, started_of(t), force) for force in (False, False, True))
    assert once.id == twice.id != anew.id and once.kind == "hf_adapter"
    assert c.download_weights(once.uri, tmp_path / "adapter").is_dir()
    url = largest["url"]
    for wrong in (url[:-4] + "0000", url.replace("expires=", "expires=9"), url.split("?")[0]):
        assert httpx.get(wrong).status_code == 403
    assert httpx.get(f"{server.url}/api/v1/artifacts/{artifact.id}/files/..%2F..%2Frun.json").status_code == 403


def started_of(t: Any) -> Any:
    known = [x for x in t.list_checkpoints() if x.name == "export-me"]
    return known[0] if known else t.save_state(name="export-me")


def c_export(t: Any, checkpoint: Any, force: bool) -> Any:
    return t.export_weights(checkpoint=checkpoint, force=force)


def test_two_clients_at_once_each_have_their_own_adapter(client: Client) -> None:
    def run(seed: int) -> tuple[list[float], list[int]]:
        t = train(client(), seed)
        losses = []
        for i in range(4):
            losses.append(t.forward_backward(as_datums(batch(seed * 10 + i), *CE), "cross_entropy")["metrics"]["loss"])
            t.optim_step(AdamParams(learning_rate=0.03))
        s = t.save_weights_and_get_sampling_client()
        return losses, s.sample(prompt=ModelInput.from_ints([9, 9]), sampling_params=SamplingParams(max_tokens=10, seed=1))["sequences"][0]["tokens"]

    alone = [run(seed) for seed in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run, (1, 2, 3)))
    assert [x[1] for x in alone] == [x[1] for x in together]
    np.testing.assert_allclose([x[0] for x in alone], [x[0] for x in together], rtol=1e-5)


def test_fifty_requests_at_once_are_all_answered_as_one_by_one(client: Client, started: Any) -> None:
    c = client()
    t = train(c)
    t.load_state(started)
    s = t.save_weights_and_get_sampling_client()

    def ask(i: int) -> list[int]:
        return s.sample(prompt=ModelInput.from_ints([10 + i, 20]), sampling_params=SamplingParams(max_tokens=30, seed=i))["sequences"][0]["tokens"]

    with ThreadPoolExecutor(50) as pool:
        many = list(pool.map(ask, range(50)))
    assert many[::10] == [ask(i) for i in range(0, 50, 10)]


def test_the_asynchronous_client_pipelines(client: Client, server: ApiServer) -> None:
    data = as_datums(batch(7), *CE)

    async def run() -> list[float]:
        async with weaver.AsyncServiceClient(base_url=server.url, api_key="sk-local") as c:
            t = await c.create_model(base_model="tiny", lora_config=LoraConfig(rank=4, seed=5))
            handles = []
            for _ in range(3):
                handles.append(await t.forward_backward(data, "cross_entropy", wait=False))
                await t.optim_step(AdamParams(learning_rate=0.03), wait=False)
            together = await asyncio.gather(*(t.forward_backward(data, "cross_entropy") for _ in range(4)))
            assert len({round(x["metrics"]["loss"], 3) for x in together}) == 1
            return [(await h.result())["metrics"]["loss"] for h in handles]

    t = train(client())
    want = []
    for _ in range(3):
        want.append(t.forward_backward(data, "cross_entropy")["metrics"]["loss"])
        t.optim_step(AdamParams(learning_rate=0.03))
    assert asyncio.run(run()) == pytest.approx(want, rel=1e-5)


def test_what_is_not_done_at_once_is_asked_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "HOLD", 0.0)
    t = train(client(tensor_transport="http-binary"))
    handle = t.forward_backward(as_datums(batch(1, 40), *CE), "cross_entropy", wait=False)
    assert handle.status == "running"
    assert len(handle.result()["loss_fn_outputs"]) == 40
    with pytest.raises(WeaverOperationError, match=r"token 9999 at position 0, outside the model's vocabulary") as e:
        t.forward_backward([Datum(model_input=ModelInput.from_ints([9999]), loss_fn_inputs={"target_tokens": [1]})], "cross_entropy")
    assert e.value.code == "invalid_request" and e.value.retryable is False


# calls and their numbers ---------------------------------------------------------------------------------------------


def post(server: ApiServer, path: str, **kwargs: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/api/v1{path}", timeout=30, **kwargs)


def step_body(t: Any, seq: int, **adam: float) -> dict[str, Any]:
    return {"payload": {"model_id": t.model_id, "seq_id": seq, "adam_params": adam}}


def pass_body(t: Any, seq: int, loss: str = "cross_entropy", tokens: Any = (5, 6), **inputs: Any) -> dict[str, Any]:
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}, "loss_fn_inputs": {"target_tokens": {"data": [6, 7], "dtype": "int64"}, **inputs}}
    return {"payload": {"model_id": t.model_id, "seq_id": seq, "forward_backward_input": {"loss_fn": loss, "data": [datum]}}}


def test_a_call_that_comes_again_has_the_same_answer(client: Client, server: ApiServer) -> None:
    t = train(client())
    path = f"/models/{t.model_id}"
    first = post(server, f"{path}/forward-backward-passes", json=pass_body(t, 1)).json()
    assert first["status"] == "done"
    assert post(server, f"{path}/forward-backward-passes", json=pass_body(t, 1)).json() == first
    other = post(server, f"{path}/forward-backward-passes", json=pass_body(t, 1, tokens=(5, 8)))
    assert other.status_code == 409 and "two clients" in other.json()["message"]
    stepped = post(server, f"{path}/optimizer-steps", json=step_body(t, 2)).json()
    assert post(server, f"{path}/optimizer-steps", json=step_body(t, 2)).json() == stepped  # no second step, which would have no gradient
    exported = [post(server, f"{path}/export-sampler", json={"seq_id": 3, "ttl_seconds": 60}).json()["response"]["model_path"] for _ in range(2)]
    assert exported[0] == exported[1]


def test_calls_run_in_their_order_and_a_lost_number_is_passed_over(client: Client, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    t = train(client())
    path = f"/models/{t.model_id}"
    with ThreadPoolExecutor(4) as pool:  # a step before its gradients would fail
        calls = [(f"{path}/optimizer-steps", step_body(t, 3)), (f"{path}/forward-backward-passes", pass_body(t, 2)), (f"{path}/forward-backward-passes", pass_body(t, 1))]
        answers = list(pool.map(lambda c: post(server, c[0], json=c[1]).json(), calls))
    assert [a["status"] for a in answers] == ["done"] * 3
    monkeypatch.setattr(ours, "GRACE", 0.1)
    assert post(server, f"{path}/forward-backward-passes", json=pass_body(t, 6)).json()["status"] == "done"  # 4 and 5 never come
    read_pass = ours.read_pass

    begun = threading.Event()

    def slowly(*args: Any) -> Any:
        if args[0]["data"][0].get("datum_id") == "slow":
            begun.set()
            time.sleep(0.5)  # far more than what a lost number is waited for
        return read_pass(*args)

    monkeypatch.setattr(ours, "read_pass", slowly)
    slow = pass_body(t, 7)
    slow["payload"]["forward_backward_input"]["data"][0]["datum_id"] = "slow"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, server, f"{path}/forward-backward-passes", json=slow)
        assert begun.wait(30)
        second = pool.submit(post, server, f"{path}/optimizer-steps", json=step_body(t, 8))
        assert [first.result().json()["status"], second.result().json()["status"]] == ["done", "done"]
    late = post(server, f"{path}/forward-backward-passes", json=pass_body(t, 4))
    assert late.status_code == 409 and "order of their numbers" in late.json()["message"]


def test_no_step_is_made_where_a_part_of_its_batch_was_refused(client: Client) -> None:
    t = train(client())
    data = as_datums(batch(8), *CE)
    before = logprobs(t.forward(data, "cross_entropy"))
    t.forward_backward(data, "cross_entropy")
    with pytest.raises(weaver.WeaverAPIError, match="advantages"):
        t.forward_backward([Datum(model_input=ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7], "advantages": [1.0]})], "importance_sampling")
    with pytest.raises(WeaverOperationError, match="no step was made"):
        t.optim_step(AdamParams(learning_rate=0.1))
    np.testing.assert_array_equal(np.concatenate(before), np.concatenate(logprobs(t.forward(data, "cross_entropy"))))
    t.forward_backward(data, "cross_entropy")
    t.optim_step(AdamParams(learning_rate=0.1))


def test_a_call_that_is_refused_for_now_can_come_again() -> None:
    """Where a server is full, the number is still to come, and no step is made without its batch."""
    numbers = ours.Numbers()

    def full(number: int) -> Any:
        raise ours.ApiError("try again later", 429)

    with pytest.raises(ours.ApiError, match="later"):
        numbers.put(full, 1, b"a")
    assert asyncio.run(numbers.turn(1, b"a")) is None
    op = numbers.put(lambda number: ours.Op(str(number), ""), 1, b"a")
    assert op.id == "1" and asyncio.run(numbers.turn(1, b"a")) is op


# what is refused -----------------------------------------------------------------------------------------------------


def form(manifest: bytes, pack: bytes) -> dict[str, Any]:
    body = b'--b\r\nContent-Disposition: form-data; name="manifest"\r\n\r\n' + manifest + b'\r\n--b\r\nContent-Disposition: form-data; name="tensor_pack"; filename="pack.bin"\r\n\r\n' + pack + b"\r\n--b--\r\n"
    return {"content": body, "headers": {"content-type": "multipart/form-data; boundary=b"}}


def manifest(request: Any, pack: bytes, **changes: Any) -> bytes:
    about = {"size_bytes": len(pack), "sha256": hashlib.sha256(pack).hexdigest(), "codec": "raw", "decoded_size_bytes": len(pack), **changes}
    return json.dumps({"version": 1, "request": request, "tensor_pack": about}).encode()


def test_damaged_bodies_are_refused_with_a_message(client: Client, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "GRACE", 0.01)
    t = train(client())
    path, bad = f"/models/{t.model_id}/forward-backward-passes", []
    pack = np.arange(4, dtype="<i8").tobytes()

    def place(**changes: Any) -> dict[str, Any]:
        return {"$tensor": {"format": "raw-tensor", "codec": "raw", "dtype": "int64", "shape": [2], "offset": 0, "size_bytes": 16, **changes}}

    good = pass_body(t, 1)
    for content in (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"payload": {}}', b'{"payload": []}', b'{"payload": {"model_id": 1, "seq_id": "x"}}', b'{"payload": {"model_id": "a", "seq_id": 1e400}}'):
        bad.append({"content": content})
    for change in ({"seq_id": 0}, {"seq_id": True}, {"seq_id": 1.5}, {"model_id": "other"}, {"nonsense": 1}, {"metadata": {"router_replay": {}}}, {"tensor_compression": "lzma"}, {"forward_backward_input": {**good["payload"]["forward_backward_input"], "loss_fn_confg": {}}}, {"forward_backward_input": None}, {"forward_backward_input": 3}):
        bad.append({"json": {"payload": {**good["payload"], **change}}})
    inputs: list[Any] = [{"weights": x} for x in ("a", {"data": ["1", "2"], "dtype": "float32"}, {"data": [1, [2]], "dtype": "float32"}, {"data": [1], "dtype": "float32"}, {"data": [1, 2], "dtype": "complex64"}, {"data": [1, 2], "dtype": ["float32"]}, {"data": None}, {"data": {"a": 1}, "dtype": "int64"}, {"data": [10**400, 1], "dtype": "int64"}, {"data": [1, 2], "dtype": "float32", "shape": [7, 7]}, {"data": [1, 2], "dtype": "float32", "shape": "x"}, place())]
    for seq, more in enumerate([*inputs, {"target_tokens": {"data": [1.5, 2], "dtype": "int64"}}, {"nonsense": {"data": [1, 2], "dtype": "int64"}}, {"logprobs": {"data": [0, 0], "dtype": "int64"}, "old_logprobs": {"data": [0, 0], "dtype": "int64"}}], 1):
        bad.append({"json": pass_body(t, seq, **more)})
    for seq, (loss, tokens) in enumerate((("crossentropy", (5, 6)), ("forward_logprob", (5, 6)), ("surrogate", (5, 6)), (None, (5, 6)), ({"a": 1}, (5, 6)), ("ppo", ("a", "b")), ("ppo", (5.5, 6))), 20):
        bad.append({"json": pass_body(t, seq, loss=loss, tokens=tokens)})  # type: ignore[arg-type]
    for m in ((manifest(good, pack, size_bytes=5), manifest(good, pack, sha256="0" * 64), manifest(good, pack, codec="gzip"), manifest(good, pack, codec="zstd"), manifest(good, pack, decoded_size_bytes=1 << 50), manifest(good, pack, decoded_size_bytes=-1), b"{}", b"[]", b"{", manifest([], pack))):
        bad.append(form(m, pack))
    for seq, where in enumerate((place(offset=24), place(offset=-8), place(shape=[1 << 61, 4], size_bytes=0), place(shape="x"), place(dtype="bfloat16"), place(codec="zstd"), place(format="numpy"), place(size_bytes=8), place(shape=[2.0]), {"$tensor": 5}), 60):
        bad.append(form(manifest(pass_body(t, seq, weights=where), pack), pack))
    for kwargs in ({"content": b"--b", "headers": {"content-type": "multipart/form-data; boundary=b"}}, {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, {"content": b"{}", "headers": {"content-encoding": "gzip"}}, {"content": b"{}", "headers": {"content-encoding": "zstd"}}):
        bad.append(kwargs)
    for kwargs in bad:
        answer = post(server, path, **kwargs)
        assert 400 <= answer.status_code < 500 or answer.status_code == 501, (kwargs, answer.text)
        told = answer.json()
        assert told["message"] and told["error"] != "internal_error" and told["retryable"] is False, (kwargs, told)
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", f"/api/v1{path}")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    t2 = train(client())  # and it lives
    assert post(server, f"/models/{t2.model_id}/forward-backward-passes", json=pass_body(t2, 1)).json()["status"] == "done"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\x00b", "a\nb", "x" * 500, "~", "-x", "a@hf_model", "é", "weaver://x"])
def test_names_that_could_be_paths_are_refused(name: str, client: Client, server: ApiServer) -> None:
    t = train(client())
    for path, body in (("checkpoints", {"type": "weight", "name": name}), ("checkpoints", {"type": "sampling", "name": name}), ("export-sampler", {"seq_id": 1, "path": name}), ("load", {"path": name, "include_optimizer": True}), ("load", {"path": f"weaver://{t.model_id}/checkpoints/{name}"})):
        answer = post(server, f"/models/{t.model_id}/{path}", json=body)
        text = answer.json().get("message") or answer.json().get("error_message")
        assert (400 <= answer.status_code < 500 or answer.json()["status"] == "error") and text, (path, answer.text)
    session = t.session_id
    assert post(server, f"/sessions/{session}/sampling-sessions", json={"sampling_session_seq_id": 1, "model_path": f"weaver://{t.model_id}/sampler_weights/{name}"}).status_code in (400, 404)
    assert t.list_checkpoints() == []


def test_wrong_parameters_are_named(client: Client, server: ApiServer) -> None:
    t = train(client())
    s = client().create_sampling_client(base_model="tiny")
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    sample, session = f"/sampling-sessions/{s.sampling_session_id}/samples", t.session_id
    cases: list[tuple[str, Any, str]] = [
        *[(sample, {"prompt": prompt, **b}, w) for b, w in (({"num_samples": 0}, "num_samples"), ({"num_samples": 10**9}, "num_samples"), ({"sampling_params": {"temperature": -1}}, "temperature"), ({"sampling_params": {"temperature": 10**400}}, "temperature"), ({"sampling_params": {"top_p": 0}}, "top_p"), ({"sampling_params": {"max_tokens": 0}}, "max_tokens"), ({"sampling_params": {"nonsense": 1}}, "nonsense"), ({"sampling_params": {"seed": 1, "sampling_seed": 2}}, "two seeds"), ({"return_sampling_mask": True}, "return_sampling_mask"), ({"return_old_logprob": True}, "return_old_logprob"), ({"return_moe_topk_indices": True}, "moe"), ({"score_centering": {"head_size": 4}}, "score_centering"), ({"sampling_params": {"stop_token_ids": [10**30]}}, "stop_token_ids"), ({"sampling_params": {"top_k": 10**30}}, "top_k"), ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"))],
        (sample, {"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "image"),
        (sample, {"prompt": "text"}, "prompt"),
        (f"/sessions/{session}/models", {"model_seq_id": 9, "base_model": "tiny", "training_mode": "full_ft"}, "full_ft"),
        (f"/sessions/{session}/models", {"model_seq_id": 9, "base_model": "tny"}, "did you mean 'tiny'"),
        (f"/sessions/{session}/models", {"model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 10**9}}, "rank"),
        (f"/sessions/{session}/models", {"model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 4, "alpha": 1}}, "alpha"),
        (f"/sessions/{session}/models", {"model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}}, "train_attn"),
        (f"/sessions/{session}/models", {"model_seq_id": 9, "base_model": "tiny", "performance_tier": "flash"}, "performance_tier"),
        (sample, {"prompt": prompt, "sampling_mask_transport": "pigeon"}, "sampling_mask_transport"),
        (f"/models/{t.model_id}/checkpoints", {"type": "everything"}, "everything"),
        (f"/models/{t.model_id}/checkpoints", {"type": "weight", "ttl_seconds": 0}, "ttl_seconds"),
        (f"/models/{t.model_id}/terminate", {"instance_types": ["kettle"]}, "instance_types"),
        ("/sessions/00000000-0000-0000-0000-000000000000/heartbeat", {}, "no session"),
        ("/models/..%2F..%2Fx/load", {"path": "x"}, "not part"),
        ("/models/nonsense/load", {"path": "x"}, "no model"),
    ]
    for path, body, word in cases:
        answer = post(server, path, json=body)
        assert (400 <= answer.status_code < 500 or answer.status_code == 501), (body, answer.text)
        assert word in answer.json()["message"] and answer.json()["retryable"] is False, (body, answer.text)
    for i, (adam, word) in enumerate([({"learning_rate": -1}, "learning_rate"), ({"beta1": 1.0}, "betas"), ({"lr": 1}, "lr"), ({"eps": 10**400}, "numbers"), ({"eps": "x"}, "eps")], 1):
        answer = post(server, f"/models/{t.model_id}/optimizer-steps", json=step_body(t, i, **adam))  # type: ignore[arg-type]
        assert 400 <= answer.status_code < 500 and word in answer.json()["message"], answer.text


def test_what_the_service_has_and_this_server_has_not_is_refused_by_name(client: Client) -> None:
    c = client()
    t = train(c)
    saved = t.save_state(name="x")
    sampling = t.save_weights_and_get_sampling_client()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: t.deploy_checkpoint(saved, name="m"), "endpoints"), (c.list_deployments, "endpoints"), (c.list_organizations, "organizations"), (c.get_quota_balance, "billing"), (lambda: c.resolve_scope("a"), "projects"), (c.get_scheduling_options, "clusters"),
        (lambda: c.datasets.list(), "managed datasets"), (lambda: t.resolve_sample_ref_lengths([weaver.types.SampleRef("d", "v1", 1)]), "managed datasets"),
        (lambda: c.http.post(f"/api/v1/sampling-sessions/{sampling.sampling_session_id}/pause-generation", json={"mode": "abort"}), "share one engine"), (lambda: c.http.get("/api/v1/nonsense"), "not part of this server"),
    ]  # fmt: skip
    for call, word in calls:
        with pytest.raises(weaver.WeaverAPIError, match=word) as e:
            call()
        assert e.value.status_code in (404, 501) and not e.value.retryable
    with pytest.raises(ValueError, match="lora"):
        sampling.pause_generation()
    with pytest.raises(weaver.WeaverAPIError, match="not for sampling"):
        c.create_sampling_client(model_path=saved.path, base_model="tiny")


def test_sessions_models_and_their_records(client: Client, server: ApiServer) -> None:
    c = client(name="mine", labels={"a": "b"})
    assert c.list_supported_models() == ["tiny"]
    detailed = c.list_supported_models(detailed=True)
    assert [m.name for m in detailed] == ["tiny"] and detailed[0].training_mode("lora").price.unit_price_micros == 0
    t = train(c)
    t.log_metrics({"reward": 0.5}, step=1)
    point = json.loads((server.hub.store.root / "metrics" / f"{c.session_id}.jsonl").read_text())
    assert (point["name"], point["value"], point["model_id"]) == ("reward", 0.5, t.model_id)
    assert c.get_model(t.model_id)["training_mode"] == "lora"
    assert t.model_id in [m["id"] for m in c.list_training_runs(limit=100)["items"]]
    t.save_state(name="kept")
    assert [x["name"] for x in c.get_training_run(t.model_id)["checkpoints"]] == ["kept"]
    again = client(session_id=c.session_id)
    other = again.create_sampling_client(base_model="tiny")
    assert len(other.compute_logprobs(prompt=ModelInput.from_ints([5, 6]))) == 2
    assert set(t.terminate()) == {"trainer", "inference"}
    with pytest.raises(weaver.WeaverAPIError, match="not in training") as e:
        t.forward([Datum(model_input=ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6]})], "cross_entropy")
    assert e.value.status_code == 404 and "kept" in e.value.message
    assert c.get_model(t.model_id)["status"] == "terminated"
    assert [x.name for x in t.list_checkpoints()] == ["kept"]


def test_both_apis_can_be_on_one_port(server: ApiServer) -> None:
    from starlette.testclient import TestClient

    http = TestClient(create_api_app(_Kept(server.hub), ("weaver", "tinker")))  # type: ignore[arg-type]
    session = http.post("/api/v1/sessions", json={}).json()["id"]
    assert http.get(f"/api/v1/sessions/{session}").json()["id"] == session
    assert http.get("/api/v1/deployments").status_code == 501
    tinker = {"x-api-key": "tml-local"}
    other = http.post("/api/v1/create_session", json={}, headers=tinker).json()["session_id"]
    assert "training_run_ids" in http.get(f"/api/v1/sessions/{other}", headers=tinker).json()
    assert "billing" in http.get("/api/v1/nonsense", headers=tinker).json()["message"]


def test_unnamed_sampling_weights_are_the_newest_few(client: Client, server: ApiServer) -> None:
    t = train(client())
    named = t.save_weights_for_sampler(name="keep")
    paths = [t.save_weights_for_sampler() for _ in range(server.hub.limits.snapshots + 3)]
    kept = {x.path for x in t.list_checkpoints()}
    assert named in kept and set(paths[-server.hub.limits.snapshots :]) <= kept and not set(paths[:3]) & kept


@pytest.mark.timeout(60)
def test_the_key_is_wanted_of_every_call(client: Client, server: ApiServer) -> None:
    import uvicorn

    running = uvicorn.Server(_uvicorn(create_api_app(_Kept(server.hub), ("weaver",), key="sk-right"), "127.0.0.1", 0))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
        assert len(train(client(url, "sk-right")).model_id) > 36
        for key in ("sk-wrong", ""):
            with pytest.raises(weaver.WeaverAPIError, match="x-weaver-api-key") as e:
                weaver.ServiceClient(base_url=url, api_key=key or None).connect()
            assert e.value.status_code == 401
        for method, path in (("GET", "/supported-models"), ("GET", "/operations/x"), ("POST", "/nonsense"), ("GET", "/artifacts/x/download")):
            assert httpx.request(method, f"{url}/api/v1{path}", headers={"X-WEAVER-API-KEY": "sk-wrong"}).status_code == 401
        assert httpx.get(f"{url}/api/v1/artifacts/x/files/y").status_code == 403
        assert httpx.get(f"{url}/api/v1/supported-models", headers={"X-WEAVER-API-KEY": "sk-right", "Origin": "http://evil"}).status_code == 403
    finally:
        running.should_exit = True
        thread.join(20)


class _Kept:
    """A hub that another server closes."""

    def __init__(self, hub: Any):
        self._hub = hub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)

    def close(self) -> None:
        pass
