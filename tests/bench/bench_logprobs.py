"""Log-probabilities with gradient at a large vocabulary: the engine's tiles against a log-softmax of all logits.

Memory is the rise of the process's peak resident set over what it held before, each variant in a process of its own;
times are the best of interleaved runs in one process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nexrl_sdk.engine.logprobs import fused_logprobs


def inputs(vocab: int, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head, and targets."""
    torch.manual_seed(0)
    h = torch.empty(tokens, hidden, dtype=dtype).normal_().requires_grad_()
    w = torch.empty(vocab, hidden, dtype=dtype).normal_(0, 0.05).requires_grad_()
    return h, w, torch.randint(vocab, (tokens,))


def materialised(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Log-softmax of all logits, in float32 as transformers' losses have it, then the targets."""
    return (h @ w.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"log-softmax of all logits": materialised, "tiles": fused_logprobs}


def step(name: str, h: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward once."""
    h.grad = w.grad = None
    logprobs = VARIANTS[name](h, w, targets)
    logprobs.mean().neg().backward()
    assert h.grad is not None and w.grad is not None
    return logprobs.detach(), h.grad, w.grad


def peak_bytes() -> int:
    """Highest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_of(name: str, shape: list[str]) -> int:
    """Peak bytes above the inputs of one step, in a new process."""
    out = subprocess.run([sys.executable, __file__, "--memory", name, *shape], check=True, capture_output=True, text=True)
    return int(out.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, one round")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--vocab", type=int)
    args = parser.parse_args()
    vocab, tokens, hidden, rounds = (20_000, 512, 256, 1) if args.quick else (151_936, 2048, 896, 3)
    data = inputs(vocab, tokens, hidden, torch.bfloat16)
    if args.memory:
        (data[0][:8] @ data[1][:8].T).sum()  # libraries' own buffers
        before = peak_bytes()
        step(args.memory, *data)
        print(peak_bytes() - before)
        return
    memory = {name: memory_of(name, ["--quick"] if args.quick else []) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    results = {}
    for i in range(rounds):
        for name in VARIANTS if i % 2 == 0 else reversed(VARIANTS):
            start = time.perf_counter()
            results[name] = step(name, *data)
            times[name].append(time.perf_counter() - start)
    ours, theirs = results["tiles"], results["log-softmax of all logits"]
    for a, b, what in zip(ours, theirs, ("logprobs", "gradient by hidden states", "gradient by weight")):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert error < 0.02, f"{what} differs by {error:.3g}"
    print(f"vocabulary {vocab:,}, {tokens} tokens, hidden {hidden}, bfloat16, forward and backward, {torch.get_num_threads()} threads")
    print(f"{'':28}{'seconds':>10}{'extra MiB':>12}")
    for name in VARIANTS:
        print(f"{name:28}{min(times[name]):>10.2f}{memory[name] / 2**20:>12.0f}")
    base, best = "log-softmax of all logits", "tiles"
    time_ratio, memory_ratio = min(times[base]) / min(times[best]), memory[base] / memory[best]
    print(f"tiles need {1 / time_ratio:.2f} of the time and {1 / memory_ratio:.2f} of the memory")
    print(json.dumps({"bench": "logprobs", "ratio": round(time_ratio, 3), "memory_ratio": round(memory_ratio, 3)}))


if __name__ == "__main__":
    main()
