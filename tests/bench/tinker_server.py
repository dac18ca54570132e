"""Our Tinker server as its client sees it: sampling many prompts against many answers of one, training tokens a second, latency with 1 and 4 clients.

The server is a process of its own, the clients are threads of this one with the unmodified `tinker` package, the model is tiny: what is
measured is mostly the way of a request. The two kinds of sampling take turns, so that they meet the same machine; both draw 32
completions of the same length, and one batch of the second needs one prompt read, the first 32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sampling(client: Any, rounds: int, length: int) -> tuple[float, float]:
    """Tokens a second: 32 prompts with one answer each, one prompt with 32."""
    from tinker import types

    sampler = client.create_sampling_client(base_model="tiny").result()
    rng = np.random.default_rng(0)
    draw = types.SamplingParams(max_tokens=length, stop=[])

    def prompt() -> Any:
        return types.ModelInput.from_ints(rng.integers(2, 270, 32).tolist())

    def many() -> None:
        futures = [sampler.sample(prompt(), 1, draw) for _ in range(32)]
        assert sum(len(s.tokens) for f in futures for s in f.result().sequences) == 32 * length

    def wide() -> None:
        assert sum(len(s.tokens) for s in sampler.sample(prompt(), 32, draw).result().sequences) == 32 * length

    many(), wide()
    pairs = [(timed(many), timed(wide)) for _ in range(rounds)]
    return 32 * length / statistics.median(p[0] for p in pairs), 32 * length / statistics.median(p[1] for p in pairs)


def batch(rows: int, tokens: int, seed: int) -> list[Any]:
    """Rows of so many tokens with cross entropy's inputs."""
    from tinker import types

    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        ids = rng.integers(2, 270, tokens + 1)
        found.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(ids[1:]), "weights": types.TensorData.from_numpy(np.ones(tokens, np.float32))}))
    return found


def training(client: Any, rounds: int) -> float:
    """Tokens a second through forward_backward, 64 rows of 128."""
    trainer = client.create_lora_training_client("tiny", rank=8).result()
    data = batch(64, 128, 0)
    trainer.forward_backward(data, "cross_entropy").result()
    return 64 * 128 / statistics.median(timed(lambda: trainer.forward_backward(data, "cross_entropy").result()) for _ in range(rounds))


def latency(make: Callable[[], Any], clients: int, rounds: int) -> tuple[float, float]:
    """p50 and p99, in seconds, of forward_backward and optim_step on 4 rows of 16, by so many clients at once."""
    from tinker import types

    found: list[float] = []

    def work(seed: int) -> None:
        with make() as client:
            trainer, data = client.create_lora_training_client("tiny", rank=8, seed=seed).result(), batch(4, 16, seed)

            def step() -> None:
                passed = trainer.forward_backward(data, "cross_entropy")
                stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
                passed.result(), stepped.result()

            step()
            barrier.wait()
            found.extend(timed(step) for _ in range(rounds))

    barrier = threading.Barrier(clients)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return float(np.percentile(found, 50)), float(np.percentile(found, 99))


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    import tinker
    from conftest import make_model, make_tokenizer

    from nexrl_sdk.backend.api_server import start_api_server

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_model("qwen2", hidden_size=64, intermediate_size=256).save_pretrained(model)
        make_tokenizer("byte").save_pretrained(model)
        with start_api_server("tinker", {"tiny": model}, Path(folder) / "root") as server:

            def make() -> Any:
                return tinker.ServiceClient(base_url=server.url, api_key=server.key)

            with make() as client:
                drawn = {length: sampling(client, 5 if quick else 20, length) for length in (64, 192)}
                tokens = training(client, 5 if quick else 20)
            lone, four = (latency(make, n, 50 if quick else 300) for n in (1, 4))
    for length, (many, wide) in drawn.items():
        print(f"{length:3} tokens, 32 prompts x 1  {many:9,.0f} tokens/s   {many / wide:.2f} of the next")
        print(f"{length:3} tokens, 1 prompt x 32   {wide:9,.0f} tokens/s")
    print(f"forward_backward            {tokens:9,.0f} tokens/s")
    print(f"a small step, 1 client      p50 {lone[0] * 1e3:6.1f} ms   p99 {lone[1] * 1e3:6.1f} ms")
    print(f"a small step, 4 clients     p50 {four[0] * 1e3:6.1f} ms   p99 {four[1] * 1e3:6.1f} ms")
    print(json.dumps({"sampling": {n: [*pair, pair[0] / pair[1]] for n, pair in drawn.items()}, "train_tokens_per_s": tokens, "one": lone, "four": four}))


if __name__ == "__main__":
    main()
