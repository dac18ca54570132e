"""Tiny models, datums and float64 references for the tests of the training APIs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB = 272


def random_batch(seed: int, count: int = 3, policy: bool = True) -> list[dict[str, np.ndarray]]:
    """Sequences of several lengths with everything that a loss may read."""
    rng = np.random.default_rng(seed)
    batch = []
    for _ in range(count):
        n = int(rng.integers(4, 12))
        tokens = rng.integers(2, VOCAB, n + 1)
        sampled = (np.arange(n) >= n // 3).astype(np.float32)
        batch.append({"tokens": tokens[:-1], "target_tokens": tokens[1:], "weights": sampled * rng.uniform(0.2, 1.0, n).astype(np.float32), "logprobs": (sampled * -rng.uniform(4.0, 7.0, n)).astype(np.float32), "advantages": (sampled * rng.normal()).astype(np.float32)})
    return batch


INPUTS = {"cross_entropy": ("target_tokens", "weights")}
POLICY = ("target_tokens", "logprobs", "advantages")


def reference_loss(name: str, logprobs: torch.Tensor, given: Mapping[str, np.ndarray], config: Mapping[str, float]) -> torch.Tensor:
    """The published formula of a loss on one sequence; logprobs are of the targets, with gradient."""
    if name == "cross_entropy":
        return -(logprobs * torch.tensor(given["weights"], dtype=torch.float64)).sum()
    q, a = (torch.tensor(given[k], dtype=torch.float64) for k in ("logprobs", "advantages"))
    live = (q != 0) | (a != 0)
    logprobs, q, a = logprobs[live], q[live], a[live]
    r = torch.exp(logprobs - q)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "ppo":
        return -torch.minimum(r * a, r.clamp(low, high) * a).sum()
    if name == "cispo":
        return -(r.clamp(low, high).detach() * logprobs * a).sum()
    if name == "dro":
        return -(logprobs * a - 0.5 * config["beta"] * (logprobs - q) ** 2).sum()
    assert name == "gspo"
    s = torch.exp((logprobs - q).mean().detach() + logprobs - logprobs.detach())
    return -torch.minimum(s * a, s.clamp(low, high) * a).sum()


def with_adapter(model: Path, adapter: Path) -> Any:
    """A model in float64 with a saved adapter that can be trained, by transformers and peft alone."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    return peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True).double()


def target_logprobs(model: Any, datum: Mapping[str, np.ndarray]) -> torch.Tensor:
    """Logprobs of a datum's targets, with gradient."""
    logits = model(torch.tensor(datum["tokens"])[None]).logits[0]
    return logits.log_softmax(-1).gather(-1, torch.tensor(datum["target_tokens"])[:, None])[:, 0]


def reference_step(model: Any, batch: list[dict[str, np.ndarray]], loss: Callable[[torch.Tensor, Mapping[str, np.ndarray]], torch.Tensor], adam: Mapping[str, float]) -> tuple[float, float, list[np.ndarray]]:
    """One AdamW step of float64 autograd: loss, gradient norm, logprobs; the model has then taken it."""
    params = [p for p in model.parameters() if p.requires_grad]
    logprobs = [target_logprobs(model, d) for d in batch]
    total = torch.stack([loss(lp, d) for lp, d in zip(logprobs, batch)]).sum()
    grads = torch.autograd.grad(total, params)
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
    clip = adam.get("grad_clip_norm", 0.0)
    scale = clip / norm if 0 < clip < norm else 1.0
    for p, g in zip(params, grads):
        p.grad = g * scale
    torch.optim.AdamW(params, lr=adam["learning_rate"], betas=(adam["beta1"], adam["beta2"]), eps=adam["eps"], weight_decay=adam["weight_decay"]).step()
    return float(total), norm, [lp.detach().numpy() for lp in logprobs]


def adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    """A saved adapter's tensors."""
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")
