"""Seconds per weight push by route: shared folder, broadcast, LoRA adapter, in-process, from a trainer here to vLLM.

Each push is whole: export or send, pause, take, forget the prefix cache, probe, resume; "paused" is the part of it in which nothing
is sampled. The routes to one server take turns, so that they meet the same machine; the in-process route has an engine
in a process of its own, after the server has ended. Without vLLM the engine is a second local model in this process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from backend.weights_fakes import FakeEngine, train_step
from conftest import make_model, make_tokenizer

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.backend.weights import ParityProbe, WeightPusher, make_route, probe_prompts

SHAPES = {
    "quick": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "full": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4},
}
SERVED = ("shared-dir", "broadcast", "lora")
Rows = dict[str, list[dict[str, float]]]


def write_model(folder: Path, size: str) -> int:
    """A random model with its tokenizer; returns its parameters."""
    model = make_model("qwen2", initializer_range=0.02, **SHAPES[size])
    model.save_pretrained(folder)
    make_tokenizer("byte").save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def pusher(folder: Path, route: str, engine: Any, place: Path) -> tuple[LocalBackend, WeightPusher]:
    """A trainer and its way to the engine."""
    trainer = LocalBackend(folder, dtype="float32", device="cpu", lora={"rank": 8} if route == "lora" else None)
    probe = ParityProbe(probe_prompts(trainer.model.config.vocab_size), "float32")
    return trainer, WeightPusher(trainer.train_service, engine, make_route(route), probe, place / route, snapshot=False)


def measure(folder: Path, routes: tuple[str, ...], engine: Any, rounds: int) -> Rows:
    """Metrics of each push; the first of each route is not counted."""
    out: Rows = {r: [] for r in routes}
    with tempfile.TemporaryDirectory(dir=folder.parent) as tmp, ExitStack() as stack:
        ways = {r: pusher(folder, r, engine, Path(tmp)) for r in routes}
        for trainer, _ in ways.values():
            stack.callback(trainer.close)
        for i in range(rounds + 1):
            for j, (route, (trainer, way)) in enumerate(ways.items()):
                train_step(trainer, lr=1e-3)
                way.good.clear()  # another route pushed other weights in between
                if route == "lora":
                    engine.update_from_folder(folder, 0)  # an adapter lies over the first weights
                metrics = way.push(1 + i * len(ways) + j)
                if i:
                    out[route].append(metrics)
        return out


@contextmanager
def served(folder: Path) -> Iterator[Any]:
    """A client of a vLLM server, or a model in this process where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        engine = FakeEngine(folder)
        yield engine
        engine.close()
        return
    from nexrl_sdk.backend.vllm import VLLMServer

    with VLLMServer(folder, dtype="float32", max_model_len=256, lora_rank=8, weights_root=folder.parent, args=["--enforce-eager"]) as server:
        yield server.client()


def in_process(folder: Path, rounds: int) -> Rows:
    """The in-process route; with vLLM, in this very process."""
    if importlib.util.find_spec("vllm") is None:
        engine: Any = FakeEngine(folder)
    else:
        from nexrl_sdk.backend.vllm import VLLMEngine

        engine = VLLMEngine(folder, dtype="float32", max_model_len=256)
    try:
        return measure(folder, ("in-process",), engine, rounds)
    finally:
        engine.close()


def in_a_process(folder: Path, rounds: int) -> Rows:
    """The same, in a process that ends with it."""
    command = [sys.executable, __file__, "--in-process", str(folder), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, three rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.quick else 7)
    if args.in_process:
        print(json.dumps(in_process(args.in_process, rounds)))
        return
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp, "model")
        parameters = write_model(folder, "quick" if args.quick else "full")
        with served(folder) as engine:
            rows = measure(folder, SERVED, engine, rounds)
        rows |= in_a_process(folder, rounds)
    name = "vLLM" if importlib.util.find_spec("vllm") else "a second local model"
    print(f"{parameters / 1e6:.2f} M parameters in float32, to {name}; medians of {rounds} pushes")
    print(f"{'route':12}{'seconds a push':>16}{'paused':>10}{'largest gap':>14}")
    seconds = {}
    for route, found in rows.items():
        push, paused = (statistics.median(m[k] for m in found) for k in ("time/push", "time/push_paused"))
        seconds[route] = round(push, 4)
        print(f"{route:12}{push:>16.3f}{paused:>10.3f}{max(m['probe/max_abs'] for m in found):>14.2g}")
        assert all(m["probe/max_abs"] < 5e-3 for m in found)
    print(json.dumps({"bench": "sync", "engine": name, "parameters": parameters, "seconds": seconds}))


if __name__ == "__main__":
    main()
