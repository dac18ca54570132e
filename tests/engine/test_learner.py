"""The learner against transformers' own forward with autograd, and what happens when something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk.algo.losses import LOSSES, loss_input
from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import LoraConfig, load_model
from nexrl_sdk.engine.sampler import Sampler
from nexrl_sdk.types import AdamParams, BackendError, CheckpointError, ConfigError, ContextOverflowError, DataError, Datum, Interrupted, NonFiniteError, SamplingParams

V = 272
Tiny = Callable[..., Path]


def make_data(seed: int = 0, groups: int = 3, size: int = 3, vocab: int = V, scale: float = 0.2) -> list[Datum]:
    """Answers of unequal length to a few prompts, with everything that any loss wants."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(groups):
        prompt = rng.integers(0, vocab, rng.integers(2, 9))
        for _ in range(size):
            answer = rng.integers(0, vocab, rng.integers(1, 12))
            tokens = np.concatenate([prompt, answer])
            mask = np.r_[np.zeros(len(prompt) - 1), np.ones(len(answer))].astype(np.float32)
            noise = lambda m=mask: rng.normal(-5.5, scale, len(m))
            fields = {"weights": mask * rng.uniform(0.5, 1.5), "logprobs": noise() * mask, "advantages": mask * rng.normal(), "ref_logprobs": noise(), "rollout_logprobs": noise()}
            out.append(Datum(tokens[:-1], tokens[1:], fields))
    return [out[i] for i in rng.permutation(len(out))]


def oracle(model: Any, data: list[Datum], loss_fn: str, config: dict[str, Any], temperature: float = 1.0) -> tuple[float, dict[str, torch.Tensor], list[np.ndarray]]:
    """One sequence at a time through transformers, all logits, autograd."""
    params = model.parameters(model.default_adapter)
    total, logprobs = 0.0, []
    grads = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in params.items()}
    for d in data:
        logits = model.module(input_ids=torch.from_numpy(d.tokens)[None], use_cache=False).logits[0].float() / temperature
        table = logits.log_softmax(-1)
        lp = table.gather(1, torch.from_numpy(d.targets)[:, None])[:, 0]
        fields = {k: torch.from_numpy(v) for k, v in d.fields.items()}
        loss = LOSSES[loss_fn](loss_input(lp, fields, torch.zeros(len(d), dtype=torch.int64), -(table.exp() * table).sum(-1)), **config).loss
        for (n, _), g in zip(params.items(), torch.autograd.grad(loss, list(params.values()), allow_unused=True)):
            grads[n] += 0 if g is None else g
        total += loss.item()
        logprobs.append(lp.detach().numpy())
    return total, grads, logprobs


def assert_same(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tol: float = 2e-4) -> None:
    size = torch.stack([g.norm() for g in expected.values()]).norm()
    for n, g in expected.items():
        assert (grads[n] - g).norm() <= tol * (g.norm() + 1e-3 * size), n


CONFIGS = [("cross_entropy", {}), ("importance_sampling", {}), ("ppo", {"dual_clip": 3.0}), ("cispo", {}), ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}), ("dro", {"beta": 0.1}),
           ("ppo", {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": "tis"})]  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "config"), CONFIGS)
def test_every_loss_equals_transformers_and_autograd(tiny: Tiny, loss_fn: str, config: dict[str, Any]) -> None:
    model = load_model(tiny("qwen2"))
    data = make_data()
    total, grads, logprobs = oracle(model, data, loss_fn, config)
    learner = Learner(model)
    out = learner.forward_backward(data, loss_fn, config)
    assert out.loss == pytest.approx(total, rel=1e-4, abs=1e-4)
    for a, b in zip(out.logprobs, logprobs):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert_same(learner.gradients(), grads)
    same = learner.forward(data, loss_fn, config)
    assert same.loss == pytest.approx(out.loss, rel=1e-6) and all(np.array_equal(a, b) for a, b in zip(same.logprobs, out.logprobs))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
def test_every_family_equals_transformers(tiny: Tiny, family: str) -> None:
    model = load_model(tiny(family))
    data = make_data(1)
    total, grads, logprobs = oracle(model, data, "ppo", {})
    learner = Learner(model)
    out = learner.forward_backward(data, "ppo", {})
    assert out.loss == pytest.approx(total, rel=1e-4, abs=1e-4)
    for a, b in zip(out.logprobs, logprobs):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert_same(learner.gradients(), grads)


@pytest.mark.parametrize("options", [{"token_budget": 12}, {"token_budget": 1}, {"share_prefixes": False}, {"share_prefixes": False, "token_budget": 30}, {"gradient_checkpointing": True}, {"head_chunk": 5}])
def test_how_the_work_is_cut_changes_nothing(tiny: Tiny, options: dict[str, Any]) -> None:
    data = make_data(2)
    model = load_model(tiny("qwen2"))
    whole, cut = Learner(model), Learner(model, **options)
    a, b = whole.forward_backward(data, "gspo"), cut.forward_backward(data, "gspo")
    assert a.loss == pytest.approx(b.loss, rel=1e-4, abs=1e-5) and a.metrics.keys() == b.metrics.keys()
    for name in a.metrics:
        assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-3, abs=1e-5), name
    for x, y in zip(a.logprobs, b.logprobs):
        np.testing.assert_allclose(x, y, atol=2e-5)
    assert_same(cut.gradients(), whole.gradients())


def test_accumulated_calls_equal_one_call(tiny: Tiny) -> None:
    data = make_data(3)
    one, many = Learner(load_model(tiny("qwen2"))), Learner(load_model(tiny("qwen2")))
    one.forward_backward(data, "ppo")
    for d in data:
        many.forward_backward([d], "ppo")
    assert_same(many.gradients(), one.gradients())
    adam = AdamParams(1e-3, grad_clip_norm=1.0)
    assert one.optim_step(adam)["grad_norm"] == pytest.approx(many.optim_step(adam)["grad_norm"], rel=1e-4)


def test_temperature_scales_the_logits(tiny: Tiny) -> None:
    model = load_model(tiny("qwen2"))
    data = make_data(4)
    total, grads, logprobs = oracle(model, data, "importance_sampling", {}, temperature=0.7)
    learner = Learner(model)
    out = learner.forward_backward(data, "importance_sampling", {"temperature": 0.7})
    assert out.loss == pytest.approx(total, rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(np.concatenate(out.logprobs), np.concatenate(logprobs), atol=1e-4)
    assert_same(learner.gradients(), grads)


def test_steps_equal_torchs_optimizer(tiny: Tiny) -> None:
    model, peer = load_model(tiny("qwen2")), load_model(tiny("qwen2"))
    learner, params = Learner(model), peer.parameters()
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(4):
        data = make_data(10 + step)
        _, grads, _ = oracle(peer, data, "cross_entropy", {})
        for n, p in params.items():
            p.grad = grads[n]
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        learner.forward_backward(data, "cross_entropy")
        assert learner.optim_step(AdamParams(1e-3, weight_decay=0.1, grad_clip_norm=1.0))["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    for n, p in model.parameters().items():
        torch.testing.assert_close(p, params[n], rtol=1e-3, atol=2e-4)


def test_lora_changes_the_adapter_alone_and_each_has_its_own_optimizer(tiny: Tiny) -> None:
    model = load_model(tiny("qwen2"), lora=LoraConfig(rank=4))
    model.add_adapter("other", LoraConfig(rank=2, seed=5))
    learner, data = Learner(model), make_data(5)
    base = {n: p.detach().clone() for n, p in model.base.named_parameters() if "lora_" not in n}
    other = {n: p.detach().clone() for n, p in model.parameters("other").items()}
    reference = learner.forward(data, adapter=None)
    for _ in range(3):
        learner.forward_backward(data, "cross_entropy", adapter="default")
        learner.forward_backward(data[:1], "cross_entropy", adapter="other")
        learner.optim_step(AdamParams(1e-2), adapter="default")
    assert all(torch.equal(p, base[n]) for n, p in model.base.named_parameters() if n in base)
    assert all(torch.equal(p, other[n]) for n, p in model.parameters("other").items())
    assert learner.forward(data, adapter="default").loss < reference.loss and learner.forward(data, adapter=None).loss == reference.loss
    learner.optim_step(AdamParams(1e-2), adapter="other")
    assert int(learner.optimizer("other").steps[0]) == 1 and int(learner.optimizer("default").steps[0]) == 3
    with pytest.raises(ConfigError, match="frozen under adapters"):
        learner.forward_backward(data, adapter=None)


def test_lora_gradients_equal_autograd_through_peft(tiny: Tiny) -> None:
    model = load_model(tiny("llama"), lora=LoraConfig(rank=4, train_unembed=True))
    torch.manual_seed(0)
    for p in model.parameters("default").values():
        p.data.normal_(0, 0.1)
    learner, data = Learner(model), make_data(6)
    with model.adapter("default"):
        total, grads, _ = oracle(model, data, "ppo", {})
    assert learner.forward_backward(data, "ppo", adapter="default").loss == pytest.approx(total, rel=1e-4, abs=1e-4)
    assert_same(learner.gradients("default"), grads)


def test_lora_dropout_is_drawn_from_the_call_number(tiny: Tiny) -> None:
    def losses() -> list[float]:
        learner = Learner(load_model(tiny("qwen2"), lora=LoraConfig(rank=4, dropout=0.5)))
        for p in learner.model.parameters("default").values():
            p.data.fill_(0.05)
        return [learner.forward_backward(make_data(7), adapter="default").loss for _ in range(3)]

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = losses()
    assert torch.equal(state, torch.get_rng_state())  # nobody else's stream was drawn from
    torch.manual_seed(2)
    assert losses() == first and len(set(first)) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_arithmetic_stays_close(tiny: Tiny, dtype: str) -> None:
    exact = Learner(load_model(tiny("qwen2")))
    learner = Learner(load_model(tiny("qwen2"), dtype=dtype), autocast="bfloat16" if dtype == "float32" else "none", token_budget=20)
    data = make_data(8)
    a, b = exact.forward_backward(data, "importance_sampling"), learner.forward_backward(data, "importance_sampling")
    assert np.concatenate(b.logprobs).dtype == np.float32
    assert np.abs(np.concatenate(a.logprobs) - np.concatenate(b.logprobs)).mean() < 0.1
    assert all(g.dtype == torch.float32 for g in learner.gradients().values())
    exact_norm, norm = (x.optim_step(AdamParams())["grad_norm"] for x in (exact, learner))
    assert norm == pytest.approx(exact_norm, rel=0.2)


def test_first_step_ratio_is_one(tiny: Tiny) -> None:
    learner, data = Learner(load_model(tiny("qwen2"))), make_data(9)
    for d, lp in zip(data, learner.forward(data).logprobs):
        d.fields["logprobs"] = lp
    out = learner.forward_backward(data, "ppo")
    assert out.metrics["policy/ratio_mean"] == 1.0 and out.metrics["policy/kl"] == 0 and out.metrics["policy/clip_frac"] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_learner_agree(tiny: Tiny, temperature: float) -> None:
    model = load_model(tiny("qwen2"))
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14, 15]]
    drawn = Sampler(model).sample(prompts, SamplingParams(max_tokens=9, temperature=temperature, stop=[], seed=3), n=4)
    data, sampled = [], []
    for prompt, group in zip(prompts, drawn):
        for c in group:
            tokens, mask = np.array([*prompt, *c.tokens]), np.r_[np.zeros(len(prompt) - 1), np.ones(len(c.tokens))]
            old = np.r_[np.zeros(len(prompt) - 1), c.logprobs]
            data.append(Datum(tokens[:-1], tokens[1:], {"weights": mask, "logprobs": old, "advantages": mask}))
            sampled.append(old[mask > 0])
    out = Learner(model).forward_backward(data, "ppo", {"temperature": temperature})
    for lp, d, old in zip(out.logprobs, data, sampled):
        np.testing.assert_allclose(lp[d.fields["weights"] > 0], old, atol=1e-4)
    assert out.metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5) and out.metrics["policy/clip_frac"] == 0


def snapshot(learner: Learner) -> list[torch.Tensor]:
    return [t.clone() for t in learner.state_dict()[0].values()]


@pytest.mark.parametrize("field", ["weights", "advantages", "logprobs"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_keeps_nothing(tiny: Tiny, field: str, value: float) -> None:
    learner, data = Learner(load_model(tiny("qwen2")), token_budget=10), make_data(11)
    learner.forward_backward(data[:2], "importance_sampling")
    before, generation = snapshot(learner), learner.model.generation
    data[-1].fields[field] = np.where(data[-1].fields["weights"] != 0, np.float32(value), 0)
    if field == "logprobs" and value == np.inf:
        data[-1].fields["advantages"] = np.full(len(data[-1]), np.inf, np.float32)
    with pytest.raises(NonFiniteError, match="no gradient was kept and no weight changed"):
        learner.forward_backward(data, "importance_sampling")
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(learner))) and learner.model.generation == generation


def test_a_gradient_that_is_not_finite_is_caught_before_the_weights_change(tiny: Tiny) -> None:
    learner, data = Learner(load_model(tiny("qwen2"))), make_data(12)
    learner.forward_backward(data)
    learner.optim_step(AdamParams(1e-3))
    before, generation = snapshot(learner), learner.model.generation
    learner.forward_backward(data)
    next(iter(learner.gradients().values()))[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="embed_tokens"):
        learner.optim_step(AdamParams(1e-3))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(learner))) and learner.model.generation == generation
    assert not learner.gradients()
    with pytest.raises(BackendError, match="forward_backward first"):
        learner.optim_step(AdamParams())


class StopAt:
    """An event that is set after some looks at it."""

    def __init__(self, looks: int):
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_an_interrupt_undoes_the_call(tiny: Tiny, looks: int) -> None:
    learner, data = Learner(load_model(tiny("qwen2")), token_budget=10), make_data(13)
    learner.forward_backward(data[:3], "ppo")
    before = snapshot(learner)
    with pytest.raises(Interrupted):
        learner.forward_backward(data, "ppo", stop_flag=StopAt(looks))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(learner)))
    assert all(p.grad is None for p in learner.model.parameters().values())
    flag = threading.Event()
    learner.forward_backward(data, "ppo", stop_flag=flag)


def test_an_error_in_a_custom_loss_undoes_the_call(tiny: Tiny) -> None:
    learner, data = Learner(load_model(tiny("qwen2")), token_budget=10), make_data(14)
    learner.forward_backward(data)
    before = snapshot(learner)
    calls = []

    def loss(inp: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("mine")
        return -(inp.logprobs * inp.weights).sum()

    with pytest.raises(RuntimeError, match="mine"):
        learner.forward_backward(data, loss)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(learner)))
    calls.clear()
    whole = Learner(load_model(tiny("qwen2")))
    assert whole.forward_backward(data, loss).loss == pytest.approx(whole.forward_backward(data, "cross_entropy").loss, rel=1e-5)


def test_a_step_changes_the_generation_and_holds_the_lock(tiny: Tiny) -> None:
    learner, data = Learner(load_model(tiny("qwen2"))), make_data(15)
    learner.forward_backward(data)
    assert learner.model.generation == 0
    done = threading.Event()
    with learner.model.lock:
        thread = threading.Thread(target=lambda: (learner.optim_step(AdamParams(1e-3)), done.set()))
        thread.start()
        assert not done.wait(0.2)
    thread.join()
    assert learner.model.generation == 1


BAD = [
    (lambda d: [], "ppo", {}, DataError, "no datums"),
    (lambda d: [Datum([], [])], "cross_entropy", {}, DataError, "empty"),
    (lambda d: [Datum(d.tokens, d.targets, {"weights": d.fields["weights"], "logprobs": d.fields["logprobs"]})], "ppo", {}, DataError, "'advantages'"),
    (lambda d: [d, Datum(d.tokens, d.targets, {})], "importance_sampling", {}, DataError, "datum 1 lacks 'logprobs'"),
    (lambda d: [Datum(d.tokens, d.targets, {k: v for k, v in d.fields.items() if k != "ref_logprobs"})], "ppo", {"kl_coef": 0.1}, DataError, "'ref_logprobs'"),
    (lambda d: [d, Datum([1, V], [2, 3], d.fields and {k: v[:2] for k, v in d.fields.items()})], "ppo", {}, DataError, f"datum 1 has token {V} at position 1"),
    (lambda d: [Datum([1, 2], [2, -100], {"weights": [1, 1]})], "cross_entropy", {}, DataError, "target -100"),
    (lambda d: [Datum(np.ones(300), np.ones(300), {"weights": np.ones(300)})], "cross_entropy", {}, ContextOverflowError, "300 tokens"),
    (lambda d: [d], "pppo", {}, ConfigError, "did you mean 'ppo'"),
    (lambda d: [d], "ppo", {"clip_lo_threshold": 0.8}, ConfigError, "did you mean 'clip_low_threshold'"),
    (lambda d: [d], "ppo", {"temperature": 0}, ConfigError, "temperature"),
]


@pytest.mark.parametrize(("change", "loss_fn", "config", "error", "text"), BAD)
def test_bad_data_is_named(tiny: Tiny, change: Callable[[Datum], list[Datum]], loss_fn: str, config: dict[str, Any], error: type[Exception], text: str) -> None:
    learner = Learner(load_model(tiny("qwen2")))
    with pytest.raises(error, match=text):
        learner.forward_backward(change(make_data(16)[0]), loss_fn, config)
    assert not learner.gradients()


def test_bad_options_are_named(tiny: Tiny) -> None:
    model = load_model(tiny("qwen2"))
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        Learner(model, autocast="bfloat")
    with pytest.raises(ConfigError, match="at least 1"):
        Learner(model, token_budget=0)


def test_weights_may_be_left_out_of_cross_entropy(tiny: Tiny) -> None:
    learner, d = Learner(load_model(tiny("qwen2"))), make_data(17)[0]
    bare, ones = Datum(d.tokens, d.targets), Datum(d.tokens, d.targets, {"weights": np.ones(len(d))})
    assert learner.forward([bare]).loss == learner.forward([ones]).loss


def test_state_of_another_model_is_refused_whole(tiny: Tiny) -> None:
    one, other = Learner(load_model(tiny("qwen2"))), Learner(load_model(tiny("llama")))
    before = snapshot(one)
    with pytest.raises(CheckpointError, match=r"of a llama.*does not fit this model .qwen2"):
        one.load_state_dict(*other.state_dict())
    tensors, meta = one.state_dict()
    name = next(n for n in tensors if n.endswith("norm.weight"))
    with pytest.raises(CheckpointError, match=r"\(7,\)"):
        one.load_state_dict({**tensors, name: torch.zeros(7)}, meta)
    with pytest.raises(CheckpointError, match="lacks"):
        one.load_state_dict({n: t for n, t in tensors.items() if n != name}, meta)
    with pytest.raises(CheckpointError, match="not here"):
        Learner(load_model(tiny("qwen2"), dtype="float32")).load_state_dict({**tensors, "model/weight/more": torch.zeros(1)}, meta)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(one)))


def test_an_adapter_of_another_base_is_refused(tiny: Tiny) -> None:
    one, other = (Learner(load_model(tiny("qwen2", seed=s), lora=LoraConfig(rank=4))) for s in (0, 1))
    with pytest.raises(CheckpointError, match="other base weights"):
        one.load_state_dict(*other.state_dict())
