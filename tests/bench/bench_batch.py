"""Trajectories to training batch: the flat conversion against padding row by row with torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from nexrl_sdk.types import Batch, Trajectory

SIZES = (1_000, 10_000, 100_000)
PEER_AT_MOST = 10_000  # rows that the peer is timed on: it is slower, and so are its tensors' headers


def make(n: int, seed: int = 0) -> list[Trajectory]:
    """Trajectories as a rollout makes them: 8 to 24 prompt tokens, 16 to 64 sampled ones."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        p, r = int(rng.integers(8, 25)), int(rng.integers(16, 65))
        logprobs = [0.0] * p + (-rng.random(r, dtype=np.float32)).tolist()
        more = {"reward": i % 7 / 7, "group_id": f"0:{i // 8}", "run_id": f"0:{i // 8}/{i % 8}", "is_val": False, "status": "ok"}
        made.append(Trajectory(tokens=rng.integers(0, 1000, p + r).tolist(), loss_mask=[0] * p + [1] * r, logprobs=logprobs, prompt="p", response="r", finish_reason="stop", weight_versions=[0], seed=i, **more))
    return made


def peer(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The usual way: a tensor a row and key, padded prompt left and response right, then stacked."""
    split = [t.prompt_length for t in trajectories]
    left, right = max(split), max(len(t.tokens) - p for t, p in zip(trajectories, split))
    rows: dict[str, list[torch.Tensor]] = {k: [] for k in ("input_ids", "attention_mask", "loss_mask", "rollout_log_probs", "position_ids")}
    for t, p in zip(trajectories, split):
        pad = (left - p, right - (len(t.tokens) - p))
        rows["input_ids"].append(torch.nn.functional.pad(torch.tensor(t.tokens), pad, value=0))
        rows["attention_mask"].append(torch.nn.functional.pad(torch.ones(len(t.tokens), dtype=torch.int64), pad))
        rows["loss_mask"].append(torch.nn.functional.pad(torch.tensor(t.loss_mask), pad))
        rows["rollout_log_probs"].append(torch.nn.functional.pad(torch.tensor(t.logprobs), pad))
        rows["position_ids"].append((rows["attention_mask"][-1].cumsum(-1) - 1).clip(0))
    metadata = {"rewards": [t.reward for t in trajectories], "group_ids": [t.group_id for t in trajectories], "run_ids": [t.run_id for t in trajectories]}
    return {**{k: torch.stack(v) for k, v in rows.items()}, "metadata": metadata}


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Least seconds of each call's processor time (both run in one thread), taken in turns so that a busy machine is busy for all."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            took[name].append(time.process_time() - began)
    return {name: min(times) for name, times in took.items()}


def same(trajectories: Sequence[Trajectory]) -> bool:
    """Whether both conversions give the same tensors."""
    values, expected = Batch.from_trajectories(trajectories).values, peer(trajectories)
    return all(torch.equal(values[k], expected[k]) for k in values)


def main() -> None:
    """Print a table, and last one line of JSON."""
    torch.set_num_threads(1)
    rates: dict[int, float] = {}
    ratios: dict[int, float] = {}
    print(f"{'trajectories':>13} {'nexrl_sdk /s':>14} {'row by row /s':>14} {'ratio':>7}")
    for n in SIZES:
        trajectories = make(n)
        some = trajectories[:PEER_AT_MOST]
        assert same(some[:500])
        took = interleaved({"ours": lambda t=trajectories: Batch.from_trajectories(t), "peer": lambda t=some: peer(t)}, rounds=6)
        rates[n], peer_rate = n / took["ours"], len(some) / took["peer"]
        ratios[n] = rates[n] / peer_rate
        print(f"{n:>13,} {rates[n]:>14,.0f} {peer_rate:>14,.0f} {ratios[n]:>6.1f}x")
    print(json.dumps({"bench": "trajectories to batch", "ratio": round(min(ratios.values()), 2), "per_second": {str(n): round(r) for n, r in rates.items()}, "flat": round(rates[SIZES[-1]] / rates[SIZES[0]], 2)}))


if __name__ == "__main__":
    main()
