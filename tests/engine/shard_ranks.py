"""What one rank of a sharded learner does; run by test_shard_learner.py, once for all of its tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import EngineModel, LoraConfig, load_model
from nexrl_sdk.types import AdamParams, Datum, NexRLError
from test_learner import make_data

STEPS = 5
ADAM = AdamParams(1e-3, eps=1e-6, weight_decay=0.01, grad_clip_norm=1.0)  # a smaller eps makes steps of lr out of gradients that are rounding alone
CASES: dict[str, dict[str, Any]] = {  # family, what load_model and Learner are given, and how datums are dealt out
    "qwen2": {"family": "qwen2", "learner": {"token_budget": 40}},
    "llama": {"family": "llama", "learner": {"token_budget": 60, "gradient_checkpointing": True}},
    "qwen3": {"family": "qwen3"},
    "uneven": {"family": "uneven"},
    "gpt2": {"family": "gpt2", "learner": {"token_budget": 60}},
    "gpt2_recomputed": {"family": "gpt2", "learner": {"token_budget": 60, "gradient_checkpointing": True}},
    "lora": {"family": "qwen2", "lora": {"rank": 4}, "loss": "importance_sampling"},
    "lora_recomputed": {"family": "llama", "lora": {"rank": 1, "train_unembed": True}, "learner": {"gradient_checkpointing": True}},  # one row: a rank holds nothing of it
    "lora_bfloat16": {"family": "qwen2", "dtype": "bfloat16", "lora": {"rank": 4}, "loss": "importance_sampling"},
    "autocast": {"family": "qwen2", "learner": {"autocast": "bfloat16"}},
    "bfloat16": {"family": "qwen2", "dtype": "bfloat16"},
    "one_rank_idle": {"family": "qwen2", "deal": "first", "learner": {"token_budget": 40}},
}


def load(case: dict[str, Any], folder: str, mesh: DeviceMesh | None = None) -> tuple[EngineModel, Learner]:
    """The model and learner of a case, sharded or not."""
    lora = LoraConfig(**case["lora"]) if "lora" in case else None
    model = load_model(folder, dtype=case.get("dtype", "float32"), device="cpu", lora=lora, mesh=mesh)
    return model, Learner(model, **case.get("learner", {}))


def deal(case: dict[str, Any], data: list[Datum], rank: int, size: int) -> list[int]:
    """Which datums a rank takes."""
    if case.get("deal") == "first":
        return list(range(len(data))) if rank == 0 else []
    return [i for i in range(len(data)) if (i % 3 == 0) == (rank == 1)] if size == 2 else list(range(len(data)))


def train(case: dict[str, Any], folder: str, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """A few steps, two calls each; what came out of them, and the weights."""
    model, learner = load(case, folder, mesh)
    rank, size = (model.ranks.rank, model.ranks.size) if model.ranks else (0, 1)
    out: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(STEPS):
        for call in range(2):
            data = make_data(10 * step + call)
            mine = deal(case, data, rank, size)
            got = learner.forward_backward([data[i] for i in mine], case.get("loss", "ppo"), {"entropy_coef": 0.01}, adapter=model.default_adapter)
            out["losses"].append(got.loss)
            out["metrics"].append(got.metrics)
        out["norms"].append(learner.optim_step(ADAM, model.default_adapter)["grad_norm"])
    data = make_data(99)
    mine = deal(case, data, rank, size)
    got = learner.forward([data[i] for i in mine], "cross_entropy", adapter=model.default_adapter)
    out["logprobs"] = {i: x.tolist() for i, x in zip(mine, got.logprobs)}
    weights = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float() for n, p in model.parameters(model.default_adapter).items()}
    out["weights"] = {n: p.flatten()[:: max(1, p.numel() // 64)].tolist() for n, p in weights.items()}
    return out


def attempt(call: Callable[[], Any]) -> str:
    """The error that a call raises."""
    try:
        call()
    except (NexRLError, KeyboardInterrupt) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def faults(folder: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Errors on one rank alone are errors on both, and leave the learner as it was."""
    import threading

    model, learner = load({}, folder, mesh)
    data, rank = make_data(0), dist.get_rank()
    bad = Datum(data[0].tokens + 10_000 * rank, data[0].targets, data[0].fields)
    poisoned = Datum(data[0].tokens, data[0].targets, {**data[0].fields, "advantages": data[0].fields["advantages"] * (float("nan") if rank else 1.0)})
    flag = threading.Event()
    flag.set() if rank else None
    before = {n: p.to_local().clone() for n, p in model.parameters().items()}
    out = {"token": attempt(lambda: learner.forward_backward([bad], "ppo")), "loss": attempt(lambda: learner.forward_backward([poisoned], "importance_sampling")),
           "config": attempt(lambda: learner.forward_backward(data, "ppo", {"clip_low_threshold": -1.0 if rank else 0.8})), "empty": attempt(lambda: learner.optim_step()),
           "stop": attempt(lambda: learner.forward_backward(data, "ppo", stop_flag=flag)), "adapter": attempt(lambda: model.add_adapter("late"))}  # fmt: skip
    learner.forward_backward(data[rank::2], "ppo")
    kept = learner._pending[None]
    kept[0].view(-1)[0] = float("inf") if rank else 0.0
    out["step"] = attempt(lambda: learner.optim_step(ADAM))
    out["unchanged"] = all(torch.equal(before[n], p.to_local()) for n, p in model.parameters().items())
    out["after"] = learner.forward_backward(data[rank::2], "ppo").loss
    return out


def main(work: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/store", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    folders = json.loads((work / "folders.json").read_text())
    result: dict[str, Any] = {name: train(case, folders[case["family"]], mesh) for name, case in CASES.items()}
    result["faults"] = faults(folders["qwen2"], mesh)
    (work / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
