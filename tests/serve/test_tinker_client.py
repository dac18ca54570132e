"""The unmodified `tinker` client against our server, over a real socket."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_data import INPUTS, POLICY, adapter_weights, random_batch, reference_loss, reference_step, target_logprobs, with_adapter

tinker = pytest.importorskip("tinker", reason="the tinker client is not installed")
from tinker import types

from nexrl_sdk import serve
from nexrl_sdk.serve.hub import Limits
from nexrl_sdk.types import SamplingParams

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
ADAM = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 0.0}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Any]:
    """A server whose clients send parts of three datums, compressed, the first part last."""
    with serve("tinker", models={"tiny": model, "org/other-name": model}, client_config={"fwdbwd_max_chunk_len": 2, "proto_compress_fwdbwd": True}) as running:
        yield running


@pytest.fixture
def service(server: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tinker.ServiceClient() as client:
            yield client


def datums(batch: list[dict[str, np.ndarray]], names: tuple[str, ...]) -> list[Any]:
    return [types.Datum(model_input=types.ModelInput.from_ints(d["tokens"].tolist()), loss_fn_inputs={k: types.TensorData.from_numpy(d[k]) for k in names}) for d in batch]


def folder_of(server: Any, path: str) -> Path:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return server.hub.store.find(run, kind, name).folder


def trained(service: Any, **settings: Any) -> Any:
    """A model whose B is no longer zero."""
    client = service.create_lora_training_client("tiny", **{"rank": 4, "seed": 7, **settings}).result()
    first = client.forward_backward(datums(random_batch(1), INPUTS["cross_entropy"]), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    first.result()
    return client


LOSSES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
    ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}),
    ("dro", {"beta": 0.2}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
]


@pytest.mark.parametrize(("name", "config"), LOSSES, ids=[f"{n}{len(c)}" for n, c in LOSSES])
def test_a_step_is_float64_autograds(server: Any, service: Any, model: Path, name: str, config: dict[str, float]) -> None:
    """Loss, logprobs, gradient norm and the weights after AdamW, with every field of it, a batch in parts."""
    client = service.create_training_client_from_state(trained(service).save_state("warm").result().path).result()  # its moments are new, as the reference's
    before = client.save_weights_for_sampler("before").result().path
    batch = random_batch(2, 5)
    reference = with_adapter(model, folder_of(server, before))
    passed = client.forward_backward(datums(batch, INPUTS.get(name, POLICY)), name, config or None)
    stepped = client.optim_step(types.AdamParams(**{**ADAM, "grad_clip_norm": 0.5}))
    loss, norm, logprobs = reference_step(reference, batch, lambda lp, d: reference_loss(name, lp, d, config), {**ADAM, "grad_clip_norm": 0.5})
    out = passed.result()
    assert out.metrics["loss:sum"] == pytest.approx(loss, rel=2e-4)
    for got, want in zip(out.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_allclose(got["logprobs"].to_numpy(), want, atol=2e-4)
    assert stepped.result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    after = client.save_weights_for_sampler("after").result().path
    mine, theirs = adapter_weights(folder_of(server, after)), {n: p for n, p in reference.named_parameters() if p.requires_grad}
    for key, value in mine.items():
        want = theirs[key.replace(".weight", ".default.weight")].detach()
        assert torch.allclose(value.double(), want, atol=2e-4), key


def test_parts_add_up(service: Any) -> None:
    """Several calls before a step are one batch; a batch is weighted by nothing but its weights."""
    batch = random_batch(3, 4)
    norms = []
    for split in ([4], [1, 3], [2, 1, 1]):
        client = trained(service)
        start = 0
        for n in split:
            client.forward_backward(datums(batch[start : start + n], POLICY), "importance_sampling")
            start += n
        norms.append(client.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_forward_changes_nothing(service: Any) -> None:
    client, batch = trained(service), datums(random_batch(4), INPUTS["cross_entropy"])
    first = client.forward(batch, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="no gradients to step on"):
        client.optim_step(types.AdamParams()).result()
    again = client.forward(batch, "cross_entropy").result()
    for a, b in zip(first.loss_fn_outputs, again.loss_fn_outputs, strict=True):
        assert a["logprobs"].to_numpy().tolist() == b["logprobs"].to_numpy().tolist()


def test_a_loss_of_the_clients_own(server: Any, service: Any, model: Path) -> None:
    """forward_backward_custom: logprobs there, a loss here, its gradient back; against float64 autograd."""
    client = trained(service)
    reference = with_adapter(model, folder_of(server, client.save_weights_for_sampler("start").result().path))
    batch = random_batch(5, 3)

    def loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.stack([(lp**2).sum() for lp in logprobs]).sum() / 100
        return total, {"own:sum": 1.0}

    out = client.forward_backward_custom(datums(batch, ("target_tokens",)), loss)
    norm = client.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"]
    want, want_norm, _ = reference_step(reference, batch, lambda lp, d: (lp**2).sum() / 100, ADAM)
    assert out.result().metrics["loss:sum"] == pytest.approx(want, rel=1e-4)
    assert norm == pytest.approx(want_norm, rel=1e-3)


@pytest.mark.parametrize("parts", [{"train_attn": False}, {"train_mlp": False, "train_unembed": False}, {"train_unembed": False}])
def test_which_modules_are_trained(server: Any, service: Any, parts: dict[str, bool]) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=0, **parts).result()
    keys = " ".join(adapter_weights(folder_of(server, client.save_weights_for_sampler("w").result().path)))
    assert ("q_proj" in keys) == parts.get("train_attn", True)
    assert ("up_proj" in keys) == parts.get("train_mlp", True)
    assert ("lm_head" in keys) == parts.get("train_unembed", True)
    info = client.get_info()
    assert (info.lora_rank, info.model_data.model_name, info.is_lora) == (2, "tiny", True)


def test_a_seed_is_an_adapter(server: Any, service: Any) -> None:
    saved = []
    for seed in (1, 1, 2):
        client = service.create_lora_training_client("tiny", rank=4, seed=seed).result()
        saved.append(adapter_weights(folder_of(server, client.save_weights_for_sampler("w").result().path)))
    same = [all(torch.equal(saved[0][k], s[k]) for k in s) for s in saved]
    assert same == [True, True, False]


def test_resuming_is_exact(service: Any) -> None:
    """Saved with the optimizer, loaded by another client: the same losses as without a break; without the optimizer others."""
    client = trained(service)
    path = client.save_state("mid", user_metadata={"step": "1"}).result().path

    def go_on(c: Any) -> list[float]:
        found = []
        for seed in (11, 12, 13):
            passed = c.forward_backward(datums(random_batch(seed), POLICY), "ppo")
            c.optim_step(types.AdamParams(**ADAM))
            found.append(passed.result().metrics["loss:sum"])
        return found

    uninterrupted = go_on(client)
    with tinker.ServiceClient() as other:
        assert go_on(other.create_training_client_from_state_with_optimizer(path).result()) == uninterrupted
        fresh = go_on(other.create_training_client_from_state(path).result())
        assert fresh[0] == uninterrupted[0] and fresh[2] != uninterrupted[2]
    client.load_state_with_optimizer(path).result()
    assert go_on(client) == uninterrupted


# samples -------------------------------------------------------------------------------------------------------------


def test_samples_are_the_engines_own(server: Any, service: Any, model: Path) -> None:
    """Seeds, temperature, logprobs: as the engine's sampler gives them, whose logprobs are transformers'."""
    client = trained(service)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = [5, 9, 30, 31]
    got = sampler.sample(types.ModelInput.from_ints(prompt), 4, types.SamplingParams(max_tokens=9, seed=3, temperature=0.7, top_p=0.9, top_k=50)).result()
    base = server.hub.bases["tiny"]
    name = base.slots._names[sampler._sampling_session_id]
    want = base.sampler.sample([prompt], SamplingParams(max_tokens=9, seed=3, temperature=0.7, top_p=0.9, top_k=50), 4, adapter=name)[0]
    assert [s.tokens for s in got.sequences] == [c.tokens for c in want]
    plain = sampler.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=6, seed=4, temperature=0.7)).result()
    reference = with_adapter(model, folder_of(server, client.save_weights_for_sampler("now").result().path))
    for s in plain.sequences:
        whole = torch.tensor(prompt + s.tokens)
        with torch.no_grad():
            logp = (reference(whole[None]).logits[0] / 0.7).log_softmax(-1)
        expected = logp[torch.arange(len(prompt) - 1, len(whole) - 1), whole[len(prompt) :]]
        np.testing.assert_allclose(s.logprobs, expected.numpy(), atol=2e-4)
        assert s.stop_reason == ("stop" if s.tokens[-1] == 1 else "length")


def test_what_the_model_thinks_of_a_prompt(service: Any, model: Path) -> None:
    """Prompt logprobs, the likeliest tokens, tokens by name (dense and sparse), draws, a suffix: against transformers."""
    from transformers import AutoModelForCausalLM

    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = [5, 9, 30, 31, 77]
    with torch.no_grad():
        logp = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)(torch.tensor(prompt)[None]).logits[0].log_softmax(-1)
    want = logp[torch.arange(4), torch.tensor(prompt[1:])].numpy()
    inp, one = types.ModelInput.from_ints(prompt), types.SamplingParams(max_tokens=1, seed=0)
    got = sampler.compute_logprobs(inp).result()
    assert got[0] is None
    np.testing.assert_allclose(got[1:], want, atol=1e-4)
    assert sampler.compute_logprobs(inp, prompt_logprobs_last_n=2).result()[:3] == [None] * 3
    targets = torch.full((4, 2), -1)
    targets[0, 1], targets[3, 0] = 40, 41
    for tensor in (types.TensorData.from_torch(targets), types.TensorData.from_torch_sparse(targets, pad_value=-1)):
        out = sampler.sample(inp, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2, target_prompt_logprobs=tensor, prompt_alt_tokens_k=2).result()
        found = out.target_prompt_logprobs.to_torch()
        assert found[0, 1] == pytest.approx(float(logp[0, 40]), abs=1e-4) and found[3, 0] == pytest.approx(float(logp[3, 41]), abs=1e-4)
    ids = out.topk_prompt_logprobs_np.token_ids if hasattr(out, "topk_prompt_logprobs_np") else None
    assert ids is not None and ids[1:].tolist() == logp[:4].topk(3).indices.tolist()
    drawn, values = out.prompt_alt_tokens.tokens.to_torch(), out.prompt_alt_tokens.logprobs.to_torch()
    np.testing.assert_allclose(values.numpy(), logp[:4].gather(-1, drawn).numpy(), atol=1e-4)
    top = out.sequences[0].topk_logprobs_np
    assert top.token_ids[0].tolist() == logp[4].topk(2).indices.tolist()


@pytest.mark.parametrize("stop", [None, [], [40], ["a"], "b"])
def test_what_ends_a_sample(server: Any, service: Any, stop: Any) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    out = sampler.sample(types.ModelInput.from_ints([5, 6]), 16, types.SamplingParams(max_tokens=200, seed=1, stop=stop)).result()
    tokenizer = server.hub.bases["tiny"].tokenizer
    for s in out.sequences:
        text = tokenizer.decode(s.tokens)
        if s.stop_reason == "length":
            assert len(s.tokens) == 200
        elif stop is None or (isinstance(stop, list) and stop and isinstance(stop[0], int)):
            assert s.tokens[-1] == (1 if stop is None else stop[0]) and s.tokens.count(s.tokens[-1]) == 1
        else:
            assert stop and ((stop[0] in text and stop[0] not in tokenizer.decode(s.tokens[:-1])) or s.tokens[-1] == 1)
    assert stop == [] or any(s.stop_reason == "stop" for s in out.sequences)
    assert stop != [] or all(s.stop_reason == "length" for s in out.sequences)


def test_two_clients_on_one_base(server: Any) -> None:
    """Trained and sampled at once, each as if it were alone."""

    def work(seed: int, found: dict[int, Any]) -> None:
        with tinker.ServiceClient() as own:
            client = own.create_lora_training_client("org/other-name" if seed % 2 else "tiny", rank=4 + seed, seed=seed).result()
            losses, tokens = [], []
            for step in range(4):
                passed = client.forward_backward(datums(random_batch(seed * 10 + step), POLICY), "importance_sampling")
                client.optim_step(types.AdamParams(**ADAM))
                losses.append(passed.result().metrics["loss:sum"])
                sampler = client.save_weights_and_get_sampling_client().result()
                answers = [sampler.sample(types.ModelInput.from_ints([5, 9, i + 30]), 3, types.SamplingParams(max_tokens=12, seed=i)) for i in range(4)]
                tokens.append([s.tokens for a in answers for s in a.result().sequences])
            found[seed] = (losses, tokens)

    alone: dict[int, Any] = {}
    together: dict[int, Any] = {}
    for seed in (0, 1):
        work(seed, alone)
    threads = [threading.Thread(target=work, args=(seed, together)) for seed in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together.keys() == {0, 1}
    for seed in (0, 1):
        assert together[seed][0] == pytest.approx(alone[seed][0], rel=1e-5)
        assert together[seed][1] == alone[seed][1]


def test_weights_of_a_sampler_do_not_change(service: Any) -> None:
    client = trained(service)
    sampler, prompt = client.save_weights_and_get_sampling_client().result(), types.ModelInput.from_ints([5, 6, 7])
    draw = types.SamplingParams(max_tokens=10, seed=2)
    first = [s.tokens for s in sampler.sample(prompt, 4, draw).result().sequences]
    for seed in range(3):
        client.forward_backward(datums(random_batch(seed), INPUTS["cross_entropy"]), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert [s.tokens for s in sampler.sample(prompt, 4, draw).result().sequences] == first
    newer = client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert [s.tokens for s in newer.sample(prompt, 4, draw).result().sequences] != first


# what is kept --------------------------------------------------------------------------------------------------------


def test_a_call_that_is_refused_stops_none_after_it(service: Any) -> None:
    """The client has given it a number, which the next call must not wait for."""
    trainer = trained(service)
    with pytest.raises(Exception, match="ttl_seconds"):
        trainer.save_state("b", ttl_seconds=0).result()
    trainer.forward_backward(datums(random_batch(1), INPUTS["cross_entropy"]), "cross_entropy").result()
    before = trainer.forward(datums(random_batch(1), INPUTS["cross_entropy"]), "cross_entropy").result().metrics
    with pytest.raises(Exception, match="learning_rate is null"):
        trainer.optim_step(types.AdamParams(learning_rate=float("nan"))).result()
    assert trainer.forward(datums(random_batch(1), INPUTS["cross_entropy"]), "cross_entropy").result().metrics == before, "nothing was trained at some other rate"
    assert trainer.save_state("c").result().path.endswith("/weights/c")


def test_weights_that_were_saved_over_are_sampled_no_more(model: Path) -> None:
    """A sampler has the weights that it was opened with, or none."""
    with serve("tinker", models={"tiny": model}, limits=Limits(adapters=1)), tinker.ServiceClient() as client:
        trainer, prompt = trained(client), types.ModelInput.from_ints([5, 6, 7, 8])
        path = trainer.save_weights_for_sampler("x").result().path
        first = client.create_sampling_client(path)
        score = first.compute_logprobs(prompt).result()
        trainer.forward_backward(datums(random_batch(1), INPUTS["cross_entropy"]), "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
        client.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
        second = client.create_sampling_client(trainer.save_weights_for_sampler("x").result().path)
        assert first.compute_logprobs(prompt).result() == score, "they are in memory"
        assert second.compute_logprobs(prompt).result() != score
        for other in ("y", "z"):  # and take their place
            client.create_sampling_client(trainer.save_weights_for_sampler(other).result().path).compute_logprobs(prompt).result()
        with pytest.raises(Exception, match="others were saved as"):
            first.compute_logprobs(prompt).result()


def test_checkpoints_are_listed_renamed_and_removed(server: Any, service: Any) -> None:
    rest, client = tinker.RestClient(base_url=os.environ["TINKER_BASE_URL"]), trained(service, user_metadata={"who": "me"})
    state = client.save_state("a", ttl_seconds=7200, user_metadata={"k": "v"}).result().path
    sampler = client.save_weights_for_sampler("b").result().path
    found = rest.list_checkpoints(client.model_id).result().checkpoints
    assert {c.tinker_path for c in found} == {state, sampler}
    first = next(c for c in found if c.tinker_path == state)
    assert first.checkpoint_type == "training" and first.expires_at is not None and first.user_metadata == {"k": "v"} and first.size_bytes > 1000
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    assert next(c for c in rest.list_checkpoints(client.model_id).result().checkpoints if c.tinker_path == state).expires_at is None
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.train_attn) == ("tiny", 4, True)
    run = rest.get_training_run(client.model_id).result()
    assert run.last_checkpoint.tinker_path == state and run.user_metadata == {"who": "me"}
    assert client.model_id in [r.training_run_id for r in rest.list_training_runs().result().training_runs]
    with pytest.raises(tinker.RequestFailedError, match="already"):
        client.save_state("a").result()
    client.save_state("a", overwrite=True).result()
    rest.delete_checkpoint(client.model_id, "weights/a").result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint(client.model_id, "weights/a").result()
    assert [c.tinker_path for c in rest.list_checkpoints(client.model_id).result().checkpoints] == [sampler]
    assert rest.get_server_capabilities().result().supported_models[0].max_context_length == 256
    old = service.create_sampling_client(model_path=sampler).result()
    assert len(old.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=2)).result().sequences) == 1


@pytest.mark.parametrize("encrypted", [False, True])
def test_an_exported_adapter_is_pefts_own(service: Any, model: Path, tmp_path: Path, encrypted: bool) -> None:
    """Fetched by the addresses that the client is given, it computes what the server computes."""
    import httpx

    client, key = trained(service), pytest.importorskip("pyrage").x25519.Identity.generate() if encrypted else None
    path = client.save_weights_external("hf", age_encryption_recipients=None if key is None else [str(key.to_public())]).result().path
    urls = tinker.RestClient(base_url=os.environ["TINKER_BASE_URL"]).get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        content = httpx.get(url).content
        if key is not None:
            content = pytest.importorskip("pyrage").decrypt(content, [key])
        (tmp_path / name.removesuffix(".age")).write_bytes(content)
    assert key is None or all(n.endswith(".age") for n in urls)
    exported, batch = with_adapter(model, tmp_path), random_batch(6, 2)
    out = client.forward(datums(batch, INPUTS["cross_entropy"]), "cross_entropy").result()
    for got, d in zip(out.loss_fn_outputs, batch, strict=True):
        np.testing.assert_allclose(got["logprobs"].to_numpy(), target_logprobs(exported, d).detach().numpy(), atol=2e-4)


def test_recipients_that_are_none(service: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"age1|pyrage"):
        trained(service).save_weights_external("x", age_encryption_recipients=["nobody"]).result()


def test_a_client_that_asks_for_all_its_samples_at_once(model: Path) -> None:
    """The client's poller of a whole sampler, its copies in other processes, and a sample that fails."""
    with serve("tinker", models={"tiny": model}, client_config={"sample_use_retrieve_futures": True, "sample_join_sampling_session": True}), tinker.ServiceClient() as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        copy = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle()) if hasattr(sampler, "get_sampler_handle") else sampler
        futures = [s.sample(types.ModelInput.from_ints([5, i + 2]), 2, types.SamplingParams(max_tokens=4, seed=i)) for i in range(12) for s in (sampler, copy)]
        found = [[s.tokens for s in f.result(timeout=60).sequences] for f in futures]
        assert found[::2] == found[1::2]
        with pytest.raises(tinker.RequestFailedError, match="token id outside"):
            sampler.sample(types.ModelInput.from_ints([10_000]), 1, types.SamplingParams(max_tokens=4)).result(timeout=60)
