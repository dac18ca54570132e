"""Training steps per second of the asynchronous modes over sync, where answers are slow and take unequal times.

Every prompt waits for a time drawn from a lognormal distribution before it is answered (the prompts of one call side by side,
as an agent's environments would), and the modes take turns, so that their medians are of the same session. Staleness is how many
versions of the weights a rollout was behind when it was trained on. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conftest import make_model, make_tokenizer

from nexrl_sdk import LocalBackend, MockBackend, Recipe, Trainer
from nexrl_sdk.rollout.worker import SimpleRolloutWorker

PROMPTS, GROUP, MEDIAN = 8, 4, 0.05  # prompts a step, answers each, seconds of a typical answer
MODES = [("sync", 0), ("batch-async", 0), ("batch-async", 1), ("batch-async", 4), ("fully-async", 0)]


@dataclass
class Case:
    name: str
    sigma: float  # of the lognormal: 0.5 is uneven, 1.0 is very uneven
    update: float = 0.0  # seconds that a simulated update takes; 0: a real one, of a tiny model


CASES = [Case("uneven, simulated update", 0.5, 0.1), Case("very uneven, simulated update", 1.0, 0.1), Case("very uneven, tiny model", 1.0)]


class Learns(MockBackend):
    """A backend whose update takes a given time, on another device, as it were."""

    update = 0.0

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.update)
        return super().forward_backward(*args, **kwargs)


class Slow(SimpleRolloutWorker):
    """Waits before it answers; the same prompt of the same step waits equally long in every mode."""

    sigma = 1.0

    def answer(self, tasks: Any, n: int, sampling: Any, stop_flag: Event | None) -> Any:
        seconds = max(MEDIAN * math.exp(random.Random(t.seed).gauss(0.0, self.sigma)) for t in tasks)
        (stop_flag or Event()).wait(min(seconds, 20 * MEDIAN))
        return super().answer(tasks, n, sampling, stop_flag)


def once(case: Case, mode: tuple[str, int], steps: int, model: Path) -> dict[str, Any]:
    """One run: steps per second, and how far behind its rollouts were."""
    rows = [{"prompt": f"{i}: "} for i in range(500)]
    recipe = Recipe(model=str(model), data={"rows": rows, "batch_size": PROMPTS}, evaluator=lambda row, answer: float(answer.count("a")), rollout_worker={"max_tokens": 8},
                    trajectory_pool={"group_size": GROUP}, weight={"sync_mode": mode[0], "staleness_threshold": mode[1]}, trainer={"total_train_steps": steps, "save_freq": 0})  # fmt: skip
    backend = LocalBackend.from_recipe(recipe) if not case.update else Learns()
    if isinstance(backend, Learns):
        backend.update = case.update
    behind: Counter[int] = Counter()

    def count(event: str, payload: dict[str, Any]) -> None:
        if event == "rollout":
            behind.update(backend.weight_version - min(t.weight_versions) for t in payload["rollouts"])

    with backend, Trainer(recipe, backend, callbacks=[count]) as trainer:
        trainer.worker = Slow(backend, recipe.evaluator(), sampling=recipe.sampling(), group_size=GROUP)
        trainer.worker.sigma = case.sigma
        began = time.perf_counter()
        trainer.fit(progress=False)
        seconds = time.perf_counter() - began
        return {"rate": steps / seconds, "behind": behind, "regenerated": trainer.history[-1].get("pool/regenerated", 0.0)}


def run(case: Case, steps: int, rounds: int, model: Path) -> list[dict[str, Any]]:
    """All modes in turn, some rounds."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {m: [] for m in MODES}
    for _ in range(rounds):
        for mode in MODES:
            found[mode].append(once(case, mode, steps, model))
    rate = {m: statistics.median(r["rate"] for r in runs) for m, runs in found.items()}
    return [{"case": case.name, "mode": m[0] if m[0] != "batch-async" else f"{m[0]}, at most {m[1]}", "rate": rate[m], "ratio": rate[m] / rate["sync", 0],
             "behind": sum((r["behind"] for r in runs), Counter()), "regenerated": sum(r["regenerated"] for r in runs) / rounds} for m, runs in found.items()]  # fmt: skip


def histogram(behind: Counter[int]) -> dict[int, float]:
    """Versions behind -> share of the rollouts, in percent."""
    return {k: round(100 * behind[k] / behind.total(), 1) for k in sorted(behind)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, one round")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    steps, rounds = (12, 1) if args.quick else (30, 3)
    print(f"{'case':<32}{'mode':<24}{'steps/s':>9}{'over sync':>11}{'answered again':>16}  rollouts by versions behind, %")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        make_model("qwen2").save_pretrained(folder)
        make_tokenizer("char", chat=False).save_pretrained(folder)
        for case in (c for c in CASES if args.only in c.name):
            for r in run(case, steps, rounds, Path(folder)):
                results.append(r)
                print(f"{r['case']:<32}{r['mode']:<24}{r['rate']:>9.2f}{r['ratio']:>11.2f}{r['regenerated']:>16.1f}  {histogram(r['behind'])}", flush=True)
    by_case: dict[str, dict[str, Any]] = {}
    for r in results:
        by_case.setdefault(r["case"], {})[r["mode"]] = {"ratio": round(r["ratio"], 3), "behind": histogram(r["behind"])}
    print(json.dumps({"bench": "async", "over_sync": by_case, "cpus": os.cpu_count()}))


if __name__ == "__main__":
    main()
