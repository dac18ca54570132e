"""A training step on sequences of very unequal length: the learner against padded micro-batches in arrival order.

The peer is transformers' own forward over right-padded micro-batches, a materialised log-softmax, autograd, and torch's AdamW.
All take the same sequences from the same weights (the learning rate is 0), and must report the same loss and gradient norm.
No sequences begin alike, so that nothing is gained from shared prefixes. Runs are interleaved; times are the best of each, which a busy neighbour disturbs least.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import EngineModel
from nexrl_sdk.types import AdamParams, Datum

ROWS = 32  # sequences of a padded micro-batch: about as many as the learner's budget of 4,096 tokens holds without padding
Step = Callable[[], tuple[float, float]]


def make_model(quick: bool) -> Any:
    """25 million parameters, or fewer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 2048} if quick else {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 7, "vocab_size": 8192}
    return Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True)).eval()


def make_data(count: int, vocab: int) -> list[Datum]:
    """Lognormal lengths, mean 115, longest 356; advantages of both signs on the last two thirds of each sequence."""
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(np.log(126) - 0.245, 0.7, count)), 8, 356).astype(int)
    lengths[count // 2] = 356
    out = []
    for n in lengths:
        tokens = rng.integers(0, vocab, n + 1)
        mask = (np.arange(n) >= n // 3).astype(np.float32)
        out.append(Datum(tokens[:-1], tokens[1:], {"weights": mask / 1000, "logprobs": mask * -np.log(vocab), "advantages": mask * rng.normal()}))
    return out


def padded(model: Any, data: list[Datum], autocast: bool, size: int = ROWS) -> Step:
    """transformers' forward over padded micro-batches."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)

    def step() -> tuple[float, float]:
        total = 0.0
        for start in range(0, len(data), size):
            rows = data[start : start + size]
            width = max(map(len, rows))

            def pad(values: list[np.ndarray], width: int = width) -> torch.Tensor:
                return torch.from_numpy(np.stack([np.pad(v, (0, width - len(v))) for v in values]))

            mask = pad([np.ones(len(d), np.int64) for d in rows])
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                logits = model(input_ids=pad([d.tokens for d in rows]), attention_mask=mask, use_cache=False).logits
            logprobs = logits.float().log_softmax(-1).gather(-1, pad([d.targets for d in rows])[..., None])[..., 0]
            old, weight, advantage = (pad([d.fields[k] for d in rows]) for k in ("logprobs", "weights", "advantages"))
            loss = -(torch.exp(logprobs - old) * advantage * weight).sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step


def ours(model: Any, data: list[Datum], autocast: bool) -> Step:
    """The learner."""
    learner = Learner(EngineModel(model), token_budget=4096, autocast="bfloat16" if autocast else "none")

    def step() -> tuple[float, float]:
        loss = learner.forward_backward(data, "importance_sampling").loss
        return loss, learner.optim_step(AdamParams(0.0, grad_clip_norm=1.0))["grad_norm"]

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    args = parser.parse_args()
    count, rounds = (32, 1) if args.quick else (64, 2)
    model = make_model(args.quick)
    data = make_data(count, model.config.vocab_size)
    variants = {
        "padded f32": padded(model, data, False),
        "learner f32": ours(make_model(args.quick), data, False),
        "padded bf16 autocast": padded(model, data, True),
        "learner bf16 autocast": ours(make_model(args.quick), data, True),
        "padded f32, 8 a batch": padded(model, data, False, 8),  # small micro-batches pad less: shown, not counted
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    results = {}
    for i in range(rounds):
        for name in list(variants) if i % 2 == 0 else list(reversed(variants)):
            start = time.perf_counter()
            results[name] = variants[name]()
            times[name].append(time.perf_counter() - start)
    lengths = [len(d) for d in data]
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {count} sequences, lengths mean {np.mean(lengths):.0f} longest {max(lengths)}, {torch.get_num_threads()} threads")
    print(f"{'':24}{'seconds':>9}{'loss':>12}{'grad norm':>12}{'x padded f32':>14}")
    base = min(times["padded f32"])
    for name in variants:
        print(f"{name:24}{min(times[name]):>9.2f}{results[name][0]:>12.6f}{results[name][1]:>12.6f}{base / min(times[name]):>14.2f}")
    for name, tolerance in (("learner f32", 1e-3), ("learner bf16 autocast", 3e-2), ("padded bf16 autocast", 3e-2)):
        np.testing.assert_allclose(results[name], results["padded f32"], rtol=tolerance, atol=tolerance * 1e-2, err_msg=name)
    ratios = {name: base / min(t) for name, t in times.items()}
    narrow = min(times["padded bf16 autocast"]) / min(times["learner bf16 autocast"])
    print(json.dumps({"bench": "train_step", "ratio": round(ratios["learner f32"], 3), "ratio_bf16": round(ratios["learner bf16 autocast"], 3), "ratio_bf16_both": round(narrow, 3)}))


if __name__ == "__main__":
    main()
