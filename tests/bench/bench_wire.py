"""Milliseconds and bytes to encode, send and decode a batch over loopback HTTP: safetensors with narrow numbers against base64 in JSON.

The batch is what a trainer sends: [rows x tokens] of token ids, attention mask, positions, loss mask, advantages, old logprobs and
scores. Both forms go from this process to a server in another by the same client, are read there by the functions that the training
service reads them with, and take turns, so that they meet the same machine. The peer is what the training-service document
describes, with raw bytes in its base64; pickles in their place are slower, and never read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx
import numpy as np
import torch

from nexrl_sdk.backend.http import JSON, SAFETENSORS, to_body

SERVER = """
import sys, torch, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from nexrl_sdk.serve.nextrainer import _read, read_body

torch.set_num_threads(1)

async def take(request):
    body = await read_body(request, 1 << 30)
    tensors = _read("update_actor", body, request.headers["content-type"])[1]["batch"]["tensors"]
    return JSONResponse({"sums": {k: float(v.double().sum()) for k, v in tensors.items()} if "sums" in request.query_params else {}, "dtypes": [str(v.dtype) for v in tensors.values()]})

server = uvicorn.Server(uvicorn.Config(Starlette(routes=[Route("/update_actor", take, methods=["POST"])]), port=0, log_level="warning"))
startup = server.startup

async def announced(sockets=None):
    await startup(sockets)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)

server.startup = announced
server.run()
"""
Times = dict[str, list[tuple[float, float]]]


def make_batch(rows: int, tokens: int) -> dict[str, Any]:
    """Seven tensors; a third of each row is the prompt, and rows end where they end."""
    rng = np.random.default_rng(0)
    ends = rng.integers(tokens // 2, tokens, rows)[:, None]
    attended = (np.arange(tokens)[None] < ends).astype(np.int64)
    sampled = attended * (np.arange(tokens)[None] >= tokens // 3)
    tensors = {"input_ids": rng.integers(0, 151_936, (rows, tokens)) * attended, "attention_mask": attended, "position_ids": np.maximum(attended.cumsum(1) - 1, 0), "loss_mask": sampled}
    tensors |= {k: (rng.normal(size=(rows, tokens)) * sampled).astype(np.float32) for k in ("advantages", "old_log_probs", "token_level_scores")}
    return {"tensors": {k: torch.from_numpy(v) for k, v in tensors.items()}, "values": {"model_tag": "default"}, "metadata": {"batch_size": rows, "global_token_num": attended.sum(1).tolist()}}


def once(http: httpx.Client, batch: dict[str, Any], kind: str, check: bool = False) -> tuple[float, float, int]:
    """Seconds of encoding, and of all; bytes."""
    began = time.perf_counter()
    body = to_body({"batch": batch}, kind)
    encoded = time.perf_counter()
    answer = http.post("/update_actor?sums" if check else "/update_actor", content=body, headers={"content-type": kind})
    ended = time.perf_counter()
    found = answer.raise_for_status().json()
    assert found["dtypes"] == [str(v.dtype) for v in batch["tensors"].values()]
    if check:
        assert found["sums"] == {k: float(v.double().sum()) for k, v in batch["tensors"].items()}
    return encoded - began, ended - began, len(body)


def measure(batch: dict[str, Any], rounds: int) -> tuple[Times, dict[str, int]]:
    """Both forms in turn; the first two rounds are not counted."""
    times: Times = {SAFETENSORS: [], JSON: []}
    sizes: dict[str, int] = {}
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            with httpx.Client(base_url=f"http://127.0.0.1:{int(server.stdout.readline())}", timeout=60, trust_env=False) as http:
                for i in range(rounds + 2):
                    for kind in times:
                        encode, whole, sizes[kind] = once(http, batch, kind, check=i == 0)
                        times[kind] += [(encode, whole)] if i > 1 else []
        finally:
            server.kill()
    return times, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="[16 x 1024], ten rounds")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, tokens = (16, 1024) if args.quick else (64, 4096)
    rounds = args.rounds or (10 if args.quick else 40)
    times, sizes = measure(make_batch(rows, tokens), rounds)
    print(f"7 tensors [{rows} x {tokens}] to another process and read there; medians of {rounds} rounds in turn")
    print(f"{'form':28}{'encode ms':>12}{'all ms':>10}{'MB':>8}")
    middle = {}
    for kind, name in ((SAFETENSORS, "safetensors, narrow (ours)"), (JSON, "base64 in JSON")):
        encode, middle[kind] = (1e3 * statistics.median(t[i] for t in times[kind]) for i in (0, 1))
        print(f"{name:28}{encode:>12.1f}{middle[kind]:>10.1f}{sizes[kind] / 1e6:>8.2f}")
    faster, smaller = middle[JSON] / middle[SAFETENSORS], sizes[JSON] / sizes[SAFETENSORS]
    print(f"{faster:.1f} times faster, {smaller:.1f} times smaller")
    print(json.dumps({"bench": "wire", "shape": [rows, tokens], "ms": {"safetensors": round(middle[SAFETENSORS], 2), "json": round(middle[JSON], 2)}, "bytes": {"safetensors": sizes[SAFETENSORS], "json": sizes[JSON]}, "faster": round(faster, 2), "smaller": round(smaller, 2)}))


if __name__ == "__main__":
    main()
