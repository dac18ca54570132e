"""The training service in one process, held against transformers, torch's AdamW and ten-line losses; its checkpoints wherever they go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.service import ActorConfig, InProcessTrainService, actor_part, read_actor, token_budget
from nexrl_sdk.types import AdamParams, CheckpointError, ConfigError, DataError, Datum, Interrupted, NonFiniteError

Tiny = Callable[..., Path]
LOW, HIGH, DUAL, KL, ENTROPY = 0.2, 0.28, 1.5, 0.05, 0.01


def make_batch(seed: int = 0, rows: int = 6, width: int = 14) -> dict[str, Any]:
    """Rows of unequal length, one without a token that was sampled, with old logprobs that clip on both sides."""
    rng = np.random.default_rng(seed)
    ids, attention, loss_mask = rng.integers(3, 272, (rows, width)), np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
    for i in range(rows):
        end = int(rng.integers(6, width + 1))
        attention[i, :end] = 1
        loss_mask[i, 3:end] = rng.random(end - 3) < 0.8
        loss_mask[i, 3] = 1
    loss_mask[2] = 0
    tensors = {"input_ids": ids * attention, "attention_mask": attention, "position_ids": np.maximum(attention.cumsum(1) - 1, 0), "loss_mask": loss_mask,
               "advantages": (rng.normal(size=(rows, width)) * loss_mask).astype(np.float32), "old_log_probs": (rng.normal(-5.6, 0.4, (rows, width)) * loss_mask).astype(np.float32)}  # fmt: skip
    return {"tensors": {k: torch.from_numpy(v) for k, v in tensors.items()}, "values": {"model_tag": "default"}, "metadata": {"batch_size": rows}}


def oracle_loss(model: Any, ref: Any, t: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    """PPO with dual clip, KL and entropy, aggregated as the mode says."""
    ids, m = t["input_ids"], t["loss_mask"][:, 1:].float()
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    lp, a = logp.gather(2, ids[:, 1:, None])[..., 0], t["advantages"][:, 1:]
    with torch.no_grad():
        ref_lp = ref(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    ratio = torch.exp(lp - t["old_log_probs"][:, 1:])
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a)
    loss = torch.where(a < 0, torch.minimum(loss, -DUAL * a), loss)
    loss = loss + KL * (torch.exp(ref_lp - lp) - (ref_lp - lp) - 1) + ENTROPY * (logp.exp() * logp).sum(-1)
    has = m.sum(1) > 0
    sums = (loss * m).sum(1)[has]
    return {"token-mean": sums.sum() / m.sum(), "seq-mean-token-sum": sums.mean(), "seq-mean-token-mean": (sums / m.sum(1)[has]).mean(), "token-sum": sums.sum(), "dr_grpo": sums.mean() / 20}[mode]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum", "dr_grpo"])
def test_update_actor_does_what_the_documents_configuration_says(tiny_qwen2: Path, mode: str) -> None:
    """Two epochs of two mini-batches: each loss, each norm and the weights, by the other implementation."""
    document = {"actor": {"model": {"path": "elsewhere"}, "optim": {"lr": "1e-3", "betas": [0.9, 0.99], "weight_decay": 0.1, "lr_scheduler": "linear", "warmup_steps": 2, "total_steps": 10}, "ppo_epochs": 2, "ppo_mini_batch_size": 3,
                          "ppo_max_token_len_per_gpu": 30, "clip_ratio": 0.9, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL, "entropy_coeff": ENTROPY, "use_kl_loss": True, "kl_loss_coef": KL,
                          "kl_loss_type": "low_var_kl", "loss_agg_mode": mode, "grad_clip": 0.5, **({"agg_config": {"max_tokens": 20}} if mode == "dr_grpo" else {})}}  # fmt: skip
    backend = LocalBackend(tiny_qwen2, dtype="float32", device="cpu")
    service = backend.train_service
    service.initialize_worker(config_dict=document)
    assert backend.learner.token_budget == 30
    batch = make_batch()
    model, ref = (AutoModelForCausalLM.from_pretrained(tiny_qwen2) for _ in range(2))
    first_ref = service.compute_log_prob(batch, reference=True)["tensors"]["ref_log_probs"]
    for step in range(2):
        lr = 1e-3 * (step + 1) / 2
        adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1) if step == 0 else adam  # noqa: F821
        adam.param_groups[0]["lr"] = lr
        losses, norms = [], []
        for start in (0, 3, 0, 3):
            loss = oracle_loss(model, ref, {k: v[start : start + 3] for k, v in batch["tensors"].items()}, mode)
            adam.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            adam.step()
            losses.append(loss.item())
        answer = service.update_actor(batch)
        assert answer["meta_info"] == {"global_step": step + 1, "optimizer_steps": 4}
        metrics = answer["metrics"]
        assert metrics["loss"] == pytest.approx(np.mean(losses), abs=2e-5, rel=2e-5) and metrics["lr"] == pytest.approx(lr)
        assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
        assert 0 < metrics["policy/clip_frac_low"] < 1 and 0 < metrics["policy/clip_frac_high"] < 1 and 0 < metrics["policy/dual_clip_frac"]
    ours, theirs = backend.model.base.state_dict(), model.state_dict()
    assert max(float((ours[n] - t).abs().max()) for n, t in theirs.items()) < 1e-4
    assert torch.equal(service.compute_log_prob(batch, reference=True)["tensors"]["ref_log_probs"], first_ref)  # the reference stays
    backend.close()


def test_the_modes_differ(tiny_qwen2: Path) -> None:
    with LocalBackend(tiny_qwen2, dtype="float32", device="cpu") as backend:
        found = set()
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"):
            backend.train_service.initialize_worker(config_dict={"loss_agg_mode": mode, "lr": 0.0})
            found.add(round(backend.train_service.update_actor(make_batch())["metrics"]["loss"], 6))
        assert len(found) == 4


@pytest.mark.parametrize(("given", "says"), [
    ({"clip_ratio_hihg": 0.3}, "clip_ratio_high"), ({"optim": {"learning_rate": 1}}, "actor.optim.learning_rate is not known"), ({"optim": {"lr": "fast"}}, r"actor.optim.lr cannot be 'fast'"), ({"loss_fn": "ppoo"}, "did you mean 'ppo'"),
    ({"loss_agg_mode": "token-men"}, "did you mean 'token-mean'"), ({"loss_agg_mode": "dr_grpo"}, "max_tokens"), ({"agg_config": {"tokens": 3}}, "agg_config of token-mean"), ({"optim": {"lr_scheduler": "cosin"}}, "did you mean 'cosine'"),
    ({"loss_config": {"clip_hi": 2}}, "takes no 'clip_hi'"), ({"kl_loss_coef": 0.1, "kl_loss_type": "low_var"}, "low_var_kl"), ({"ppo_epochs": 0}, "at least 1"), ({"ppo_mini_batch_size": 0}, "at least 1"), ({"clip_ratio_c": 0.5}, "dual_clip must be over 1"),
    ({"temperature": 0}, "above 0"), ({"optim": {"betas": 0.9}}, "actor.optim.betas cannot be 0.9"), ({"optim": {"betas": [0.9]}}, "betas"), ({"clip_ratio": "wide"}, "actor.clip_ratio cannot be 'wide'"),
    ({"ppo_epochs": 1.9}, "a whole number"), ({"ppo_epochs": float("inf")}, "a finite number"), ({"mini_batch_size": True}, "a finite number"), ({"optim": {"lr": "inf"}}, "a finite number"), ({"optim": {"lr": True}}, "a finite number"),
    ({"entropy_coeff": float("nan")}, "a finite number"), ({"kl_loss_coef": float("inf")}, "a finite number"), ({"use_kl_loss": "false"}, "true or false"), ({"optim": [1]}, "optim must be a section"), ({"loss_config": "x"}, "loss_config must be a section"),
    ({"loss_fn": ["ppo"]}, "is not known"), ({"loss_agg_mode": {}}, "is not known"), ({"optim": {"weight_decay": 10**400}}, "cannot be"), ({"temperature": 10**400}, "cannot be"), ({"cliprange_value": 0.2}, "takes no 'cliprange_value'"),
])  # fmt: skip
def test_a_configuration_that_cannot_be_is_refused_before_a_step(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_actor(given)


@pytest.mark.parametrize("given", [{"actor": [1]}, {"actor": "x"}])
def test_an_actor_section_is_a_mapping(given: dict[str, Any]) -> None:
    for read in (actor_part, token_budget):
        with pytest.raises(ConfigError, match="actor must be a section"):
            read(given)


@pytest.mark.parametrize("given", [{"learning_rate": float("inf")}, {"weight_decay": float("inf")}, {"eps": float("inf")}, {"learning_rate": float("nan")}, {"learning_rate": None}, {"beta1": "0.9"}, {"grad_clip_norm": 10**400}, {"learning_rate": True}])
def test_an_optimizer_step_that_would_destroy_the_weights_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="finite numbers"):
        AdamParams(**given)


def test_a_later_mini_batch_that_fails_says_what_was_done_before_it(tiny_qwen2: Path) -> None:
    with LocalBackend(tiny_qwen2, device="cpu") as backend:
        backend.train_service.initialize_worker(config_dict={"ppo_mini_batch_size": 2, "optim": {"lr": 1e-2}})
        batch = make_batch()
        batch["tensors"]["advantages"][4] = float("nan")
        with pytest.raises(NonFiniteError, match=r"2 optimizer steps of this batch had been taken before it: go back"):
            backend.train_service.update_actor(batch)
        batch["tensors"]["advantages"][0] = float("nan")
        with pytest.raises(NonFiniteError, match=r"no weight changed$"):
            backend.train_service.update_actor(batch)


def test_spellings() -> None:
    same = read_actor({"optim": {"lr": 2e-6, "lr_warmup_steps": 3, "total_training_steps": 9, "lr_scheduler_type": "cosine"}, "ppo_mini_batch_size": 4, "clip_ratio": 0.2, "dual_clip": 3})
    assert same == read_actor({"lr": 2e-6, "warmup_steps": 3, "total_steps": 9, "schedule": "cosine", "mini_batch_size": 4, "loss_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 3.0}})
    assert read_actor(vars(same)) == same
    assert read_actor({"use_kl_loss": False, "kl_loss_coef": 0.1, "kl_loss_type": "mse"}) == ActorConfig() == read_actor({"clip_ratio_low": None})
    assert actor_part({"model": {"path": "x"}, "token_budget": 5, "autocast": "none", "lr": 1.0}) == {"lr": 1.0} and token_budget({"actor": {"ppo_max_token_len_per_gpu": 7}}) == 7
    with pytest.raises(ConfigError, match="token_budget"):
        token_budget({"token_budget": "many"})


def test_what_a_service_in_this_process_cannot_be(tiny_qwen2: Path, tmp_path: Path) -> None:
    with LocalBackend(tiny_qwen2, device="cpu") as backend:
        service = backend.train_service
        for options, says in (({"world_size": 2}, "world_size is 2"), ({"role": "critic"}, "is a language model"), ({"role": "actr"}, "did you mean 'actor'"), ({"zmq_base_port": 5}, "leave it out")):
            with pytest.raises(ConfigError, match=says):
                service.initialize_worker(config_dict={}, **options)  # type: ignore[arg-type]
        path = tmp_path / "c.yaml"
        path.write_text("lr_: 3\noptim: {lr: 1e-3}\nactor: {optim: {lr: '${optim.lr}'}, ppo_epochs: 2}\n")
        service.initialize_worker(config_path=str(path))
        assert service.config == ActorConfig(ppo_epochs=2, lr=1e-3)
        path.write_text("- 1\n")
        with pytest.raises(ConfigError, match="no mapping"):
            service.initialize_worker(config_path=str(path))
        with pytest.raises(ConfigError, match="nowhere"):
            service.initialize_worker(config_path="nowhere.yaml")


def test_mini_batches_of_padding_alone_are_no_steps(tiny_qwen2: Path) -> None:
    with LocalBackend(tiny_qwen2, device="cpu") as backend:
        service = backend.train_service
        service.initialize_worker(config_dict={"ppo_mini_batch_size": 3})
        batch = make_batch()
        batch["tensors"]["loss_mask"][3:] = 0
        assert service.update_actor(batch)["meta_info"]["optimizer_steps"] == 1
        batch["tensors"]["loss_mask"][:] = 0
        before = backend.model.base.get_input_embeddings().weight.detach().clone()
        with pytest.raises(DataError, match="none of the batch's 6 rows"):
            service.update_actor(batch)
        assert torch.equal(before, backend.model.base.get_input_embeddings().weight)
        stop = threading.Event()
        stop.set()
        with pytest.raises(Interrupted):
            service.update_actor(make_batch(), stop_flag=stop)
        assert torch.equal(before, backend.model.base.get_input_embeddings().weight)


@pytest.fixture
def backend(tiny_qwen2: Path) -> Any:
    with LocalBackend(tiny_qwen2, dtype="float32", device="cpu") as b:
        b.train_service.initialize_worker(config_dict={"optim": {"lr": 1e-3, "lr_scheduler": "linear", "total_steps": 10}})
        yield b


def weights(b: LocalBackend) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in b.model.base.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def moments(b: LocalBackend) -> float:
    tensors, _ = b.learner.state_dict()
    return sum(float(t.abs().sum()) for n, t in tensors.items() if "/exp_avg/" in n or "/step/" in n)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_checkpoint_goes_on_exactly_also_on_the_schedule(backend: LocalBackend, tiny_qwen2: Path, tmp_path: Path) -> None:
    service = backend.train_service
    service.update_actor(make_batch(0))
    assert service.save_checkpoint(str(tmp_path / "s1"), global_step=7)["global_step"] == 7
    went_on = [service.update_actor(make_batch(i))["metrics"] for i in (1, 2)]
    assert went_on[0]["lr"] != went_on[1]["lr"]
    with LocalBackend(tiny_qwen2, dtype="float32", device="cpu") as other:
        service2 = InProcessTrainService(other, service.config)
        assert service2.load_checkpoint(str(tmp_path / "s1")) == {"path": str(tmp_path / "s1"), "global_step": 7}
        assert [service2.update_actor(make_batch(i))["metrics"] for i in (1, 2)] == went_on and equal(weights(other), weights(backend))
        service2.reset()
        assert service2.update_actor(make_batch(0))["metrics"]["lr"] == pytest.approx(1e-3)


def test_which_checkpoints_stay(backend: LocalBackend, tmp_path: Path) -> None:
    service = backend.train_service
    for i in range(3):
        service.save_checkpoint(str(tmp_path / f"a{i}"))
    assert names(tmp_path) == ["a2"]  # remove_previous_ckpt is the documents' default
    for i in range(3, 6):
        service.save_checkpoint(str(tmp_path / f"a{i}"), remove_previous_ckpt=False)
    assert names(tmp_path) == ["a2", "a3", "a4", "a5"]
    service.save_checkpoint(str(tmp_path / "a6"), keep_last=3)
    assert names(tmp_path) == ["a4", "a5", "a6"]
    service.save_checkpoint(str(tmp_path / "a6" / "inner"))  # in the previous one: neither goes
    assert (tmp_path / "a6" / "inner" / "manifest.json").exists() and (tmp_path / "a6" / "manifest.json").exists()
    with pytest.raises(CheckpointError, match="at least 1"):
        service.save_checkpoint(str(tmp_path / "a7"), keep_last=0)
    with pytest.raises(ConfigError, match="leave it out"):
        service.save_checkpoint(str(tmp_path / "a8"), saved_fully_shared_ckpt=False)


@pytest.mark.parametrize("place", ["memory://checkpoints/{}", "file://{}/far"])
def test_copies_go_to_any_url_and_come_back(backend: LocalBackend, tmp_path: Path, place: str) -> None:
    service, url = backend.train_service, place.format(str(tmp_path) if place.startswith("file") else tmp_path.name)
    service.update_actor(make_batch(0))
    kept = weights(backend)
    answer = service.save_checkpoint(str(tmp_path / "here"), hdfs_path=f"{url}/s1", global_step=3)
    assert answer["copy"] == f"{url}/s1"
    service.update_actor(make_batch(1))
    assert service.load_checkpoint(f"{url}/s1", del_local_after_load=True)["global_step"] == 3 and equal(weights(backend), kept)
    system, path = fsspec.core.url_to_fs(f"{url}/s1")
    assert system.exists(f"{path}/manifest.json")
    system.rm_file(f"{path}/manifest.json")  # as a copy that was cut off
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        service.load_checkpoint(f"{url}/s1")
    with pytest.raises(CheckpointError):
        service.load_checkpoint(f"{url}/none")
    assert equal(weights(backend), kept)


def test_a_copy_that_fails_leaves_the_checkpoint_and_the_one_before(backend: LocalBackend, tmp_path: Path) -> None:
    service = backend.train_service
    service.save_checkpoint(str(tmp_path / "s1"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="is complete, but could not be copied"):
        service.save_checkpoint(str(tmp_path / "s2"), hdfs_path=f"file://{tmp_path}/file/s2")
    assert names(tmp_path) == ["file", "s1", "s2"]
    with pytest.raises(ConfigError, match="nope"):
        service.save_checkpoint(str(tmp_path / "s3"), hdfs_path="nope://x/s3")


def test_weights_alone(backend: LocalBackend, tmp_path: Path) -> None:
    service = backend.train_service
    service.update_actor(make_batch(0))
    kept = weights(backend)
    service.save_checkpoint(str(tmp_path / "full"), remove_previous_ckpt=False)
    service.save_checkpoint(str(tmp_path / "model"), save_weight_only=True, remove_previous_ckpt=False)
    assert equal({n: t for n, t in AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict().items()}, kept)
    for folder in ("full", "model"):
        service.update_actor(make_batch(1))
        service.load_checkpoint(str(tmp_path / folder), load_weight_only=True)
        assert equal(weights(backend), kept) and moments(backend) == 0, folder
    service.load_checkpoint(str(tmp_path / "full"), del_local_after_load=True)
    assert moments(backend) > 0 and names(tmp_path) == ["model"]
    with pytest.raises(CheckpointError):
        service.load_checkpoint(str(tmp_path / "model"))
    assert equal(weights(backend), kept)


def test_a_model_folder_is_no_adapter(tiny_qwen2: Path, tmp_path: Path) -> None:
    with LocalBackend(tiny_qwen2, device="cpu", lora={"rank": 2}) as b:
        service = b.train_service
        service.save_checkpoint(str(tmp_path / "merged"), save_weight_only=True)
        with pytest.raises(CheckpointError, match="an adapter is trained"):
            service.load_checkpoint(str(tmp_path / "merged"), load_weight_only=True)
        answer = service.export_weights(str(tmp_path / "adapter"), "adapter")
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names(Path(answer["path"]))) and answer["weight_version"] == 0
        with pytest.raises(ConfigError, match="did you mean 'full'"):
            service.export_weights(str(tmp_path / "x"), "fulll")


def test_converting_a_checkpoint_leaves_training_as_it_was(backend: LocalBackend, tmp_path: Path) -> None:
    service = backend.train_service
    service.update_actor(make_batch(0))
    kept = weights(backend)
    service.save_checkpoint(str(tmp_path / "s1"))
    service.update_actor(make_batch(1))
    service.forward_backward([Datum([1, 2], [2, 3], {"weights": [1, 1]})], "cross_entropy")  # a gradient under way is kept, too
    now, gradient = weights(backend), {n: g.clone() for n, g in backend.learner.gradients().items()}
    service.convert_checkpoint_to_huggingface(str(tmp_path / "s1"), str(tmp_path / "hf"))
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict(), kept)
    assert equal(weights(backend), now) and equal(gradient, backend.learner.gradients()) and gradient
    with pytest.raises(CheckpointError):
        service.convert_checkpoint_to_huggingface(str(tmp_path / "none"), str(tmp_path / "hf2"))
    assert equal(weights(backend), now) and names(tmp_path) == ["hf", "s1"]


def test_the_plain_calls(backend: LocalBackend) -> None:
    service, data = backend.train_service, [Datum([5, 6, 7], [6, 7, 8], {"weights": [1, 0, 1]})]
    first = service.forward(data)
    assert service.forward_backward(data, "cross_entropy")["loss"] == pytest.approx(first["loss"]) and first["loss"] == pytest.approx(-float(first["logprobs"][0][[0, 2]].sum()), rel=1e-6)
    service.zero_grad()
    assert not backend.learner.gradients()
    service.forward_backward(data, "cross_entropy")
    assert service.optim_step(AdamParams(1e-2))["metrics"]["lr"] == pytest.approx(1e-2)
    assert service.forward(data)["loss"] < first["loss"] == pytest.approx(service.forward(data, reference=True)["loss"])
    assert service.publish() == {"weight_version": 1} and service.get_models()["actor"]["weight_version"] == 1 and service.health_check() == {"status": "ok"}
    plan = service.broadcast_weights({"plan": True})
    assert plan["names"] and len(plan["names"]) == len(plan["shapes"])
    with service.actor_context() as inner:
        assert inner is service
