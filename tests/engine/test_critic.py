"""A critic's values and gradients against transformers in float64, and how its model is loaded and written."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from nexrl_sdk.algo.losses import LossInput, compute_loss
from nexrl_sdk.engine.checkpoint import export_hf
from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import LoraConfig, load_model
from nexrl_sdk.types import AdamParams, ConfigError, DataError, Datum


def make_datums(vocab: int, lengths: tuple[int, ...] = (5, 9, 7, 7)) -> list[Datum]:
    """Sequences that begin alike, so that prefixes are shared."""
    rng = np.random.default_rng(0)
    out = []
    for n in lengths:
        tokens = rng.integers(3, vocab, n + 1)
        tokens[:3] = 5
        out.append(Datum(tokens[:-1], tokens[1:], {"weights": (np.arange(n) > 1).astype(np.float32) / 20, "returns": rng.normal(size=n).astype(np.float32), "values": rng.normal(size=n).astype(np.float32)}))
    return out


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2"])
def test_values_and_gradients_are_those_of_transformers(tiny: Callable[..., Path], family: str, clip: float | None) -> None:
    critic = Learner(load_model(tiny(family), dtype="float32", values=True), token_budget=20)
    data, config = make_datums(critic.model.vocab_size), {} if clip is None else {"cliprange_value": clip}
    assert all((x == 0).all() for x in critic.forward_backward(data, "value", config).logprobs), "a new head is 0"
    critic.optim_step(AdamParams(1e-2))
    oracle, loss = copy.deepcopy(critic.model.base).double(), torch.zeros((), dtype=torch.float64)
    out = critic.forward_backward(data, "value", config)
    for d, found in zip(data, out.logprobs, strict=True):
        v = oracle(input_ids=torch.tensor(d.tokens)[None]).logits[0, :, 0]
        np.testing.assert_allclose(found, v.detach().numpy(), atol=1e-5)
        w, returns, old = (torch.tensor(d.fields[k]).double() for k in ("weights", "returns", "values"))
        error = (v - returns) ** 2
        if clip is not None:
            error = torch.maximum(error, (torch.clamp(v, old - clip, old + clip) - returns) ** 2)
        loss = loss + (0.5 * error * w).sum()
    loss.backward()
    assert out.loss == pytest.approx(loss.item(), abs=1e-6)
    want, got = {n: p.grad for n, p in oracle.named_parameters() if p.grad is not None}, critic.gradients()
    assert any("score" in n or "classifier" in n for n in got)
    for name, gradient in got.items():
        assert torch.allclose(gradient.double(), want[name], atol=1e-5), name


def test_a_critic_is_written_and_read_again(tiny: Callable[..., Path], tmp_path: Path) -> None:
    critic = Learner(load_model(tiny("qwen2", tie_word_embeddings=True), dtype="float32", values=True))
    data = make_datums(critic.model.vocab_size)
    critic.forward_backward(data, "value")
    critic.optim_step(AdamParams(1e-2))
    want = critic.forward(data, "value").logprobs
    export_hf(critic.model, None, tmp_path / "critic")
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    again = Learner(load_model(tmp_path / "critic", dtype="float32", values=True)).forward(data, "value").logprobs
    for d, x, y in zip(data, want, again, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
        np.testing.assert_allclose(theirs(input_ids=torch.tensor(d.tokens)[None]).logits[0, :, 0].detach().numpy(), x, atol=1e-5)
    with pytest.raises(ConfigError, match="lacks"):
        load_model(tmp_path / "critic")  # as a language model its head would be random


def test_what_does_not_go_together_is_said(tiny_qwen2: Path) -> None:
    critic, policy = Learner(load_model(tiny_qwen2, values=True)), Learner(load_model(tiny_qwen2))
    data = make_datums(policy.model.vocab_size)
    for learner, loss, config, says in [(critic, "cross_entropy", {}, "is a critic"), (policy, "value", {}, "a language model"), (critic, "value", {"temperature": 0.5}, "temperature"),
                                        (critic, "value", {"kl_coef": 0.1}, "takes no 'kl_coef'"), (critic, "value", {"cliprange_value": 0.0}, "over 0")]:  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            learner.forward_backward(data, loss, config)
    with pytest.raises(DataError, match="returns"):
        critic.forward_backward([Datum(d.tokens, d.targets, {}) for d in data], "value")
    with pytest.raises(ConfigError, match="leave lora out"):
        load_model(tiny_qwen2, values=True, lora=LoraConfig())


def test_where_no_weight_is_nothing_is_read() -> None:
    bad = torch.tensor([float("nan"), 2.0], requires_grad=True)
    inp = LossInput(bad, torch.tensor([0.0, 1.0]), extra={"returns": torch.tensor([float("inf"), 1.0]), "values": torch.tensor([float("nan"), 1.5])})
    loss = compute_loss("value", inp, {"cliprange_value": 0.1}).loss
    assert loss.item() == 0.5 and torch.autograd.grad(loss, bad)[0].tolist() == [0.0, 1.0]
