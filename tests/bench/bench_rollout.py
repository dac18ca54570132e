"""Rollout tokens per second against transformers' generate: 16-token prompts in groups of 8, 64 new tokens, temperature 1.

Every case runs both sides in turn and compares medians of the same session. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nexrl_sdk.engine.model import EngineModel
from nexrl_sdk.engine.sampler import Sampler, threads_for
from nexrl_sdk.types import SamplingParams

PROMPT, GROUP, NEW = 16, 8, 64
SMALL = dict(vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
MEDIUM = dict(vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2)


@dataclass
class Case:
    name: str
    shape: dict
    dtype: torch.dtype
    batch: int
    target: float
    skewed: bool = False  # answers of lognormal length
    threads: int | None = None


CASES = [
    Case("1M f32, batch 8", SMALL, torch.float32, 8, 2.2),
    Case("1M f32, batch 64", SMALL, torch.float32, 64, 1.8),
    Case("1M f32, batch 256", SMALL, torch.float32, 256, 1.7),
    Case("25M bf16, batch 8", MEDIUM, torch.bfloat16, 8, 1.9),
    Case("25M bf16, batch 64", MEDIUM, torch.bfloat16, 64, 2.5),
    Case("25M bf16, batch 64, skewed lengths", MEDIUM, torch.bfloat16, 64, 2.5, skewed=True),
]


def prompts_of(case: Case) -> list[list[int]]:
    return torch.randint(3, case.shape["vocab_size"], (case.batch // GROUP, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()


def lengths_of(case: Case) -> list[int]:
    """New tokens of each row; a random model does not stop by itself, so the lengths are given."""
    if not case.skewed:
        return [NEW] * case.batch
    drawn = np.random.default_rng(0).lognormal(4.0, 0.6, case.batch)  # mean about a third of the longest
    return np.clip(drawn, 2, 4 * NEW).astype(int).tolist()


def theirs(module: Qwen2ForCausalLM, case: Case) -> float:
    """Tokens per second of `generate` with sampled logprobs, as trainers call it; a batch ends with its longest row."""
    ids = torch.tensor([p for p in prompts_of(case) for _ in range(GROUP)])
    lengths = lengths_of(case)
    begin = time.perf_counter()
    out = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(lengths), min_new_tokens=max(lengths), output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None)
    torch.stack([torch.log_softmax(x.float(), -1).gather(-1, out.sequences[:, PROMPT + i, None])[:, 0] for i, x in enumerate(out.logits)], 1)
    return sum(lengths) / (time.perf_counter() - begin)


def ours(sampler: Sampler, case: Case) -> float:
    """Tokens per second of the sampler, logprobs included."""
    lengths = lengths_of(case)
    if case.skewed:  # one request a row, since each has a length of its own; equal prompts are still prefilled once
        prompts = [p for p in prompts_of(case) for _ in range(GROUP)]
        params, n = [SamplingParams(max_tokens=k, stop=[]) for k in lengths], 1
    else:
        prompts, params, n = prompts_of(case), SamplingParams(max_tokens=NEW, stop=[]), GROUP
    begin = time.perf_counter()
    out = sampler.sample(prompts, params, n)
    seconds = time.perf_counter() - begin
    assert sum(len(c.tokens) for g in out for c in g) == sum(lengths)
    return sum(lengths) / seconds


def run(case: Case, rounds: int) -> dict:
    torch.manual_seed(0)
    module = Qwen2ForCausalLM(Qwen2Config(**case.shape, tie_word_embeddings=True, max_position_embeddings=1024)).to(case.dtype).eval()
    peer = Qwen2ForCausalLM(module.config).to(case.dtype).eval()
    peer.load_state_dict(module.state_dict())
    peer.generation_config.eos_token_id = None
    model = EngineModel(module)
    torch.set_num_threads(case.threads or threads_for(model))
    sampler = Sampler(model)
    measured: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(rounds + 1):
        a, b = ours(sampler, case), theirs(peer, case)
        if i:  # the first round warms up
            measured["ours"].append(a)
            measured["theirs"].append(b)
    fast, slow = (statistics.median(measured[k]) for k in ("ours", "theirs"))
    return {"case": case.name, "ours": fast, "theirs": slow, "ratio": fast / slow, "target": case.target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--threads", type=int, default=None, help="torch threads for both sides; default: one for a small model, else all")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    print(f"{'case':<38}{'ours tok/s':>12}{'generate':>12}{'ratio':>8}{'target':>8}")
    results = []
    for case in CASES:
        if args.only in case.name:
            case.threads = args.threads
            r = run(case, 3 if args.quick else 7)
            results.append(r)
            print(f"{r['case']:<38}{r['ours']:>12,.0f}{r['theirs']:>12,.0f}{r['ratio']:>8.2f}{r['target']:>8.1f}", flush=True)
    print(json.dumps({"bench": "rollout", "ratio": {r["case"]: round(r["ratio"], 3) for r in results}, "target": {r["case"]: r["target"] for r in results}, "cpus": os.cpu_count()}))


if __name__ == "__main__":
    main()
