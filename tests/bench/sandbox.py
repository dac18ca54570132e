"""Milliseconds that the sandbox takes for a trivial program, and a judged answer, on one thread and on two.

The calls take turns with a bare start of the same interpreter, so that their medians are of the same session. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nexrl_sdk import BaseEvaluationTarget
from nexrl_sdk.rollout.sandbox import CodeEvaluator, Sandbox


def milliseconds(call: Callable[[], object]) -> float:
    """What one call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=50)
    calls = parser.parse_args().calls
    sandbox = Sandbox()
    evaluator, row = CodeEvaluator(sandbox=sandbox), {"tests": "assert add(1, 2) == 3\nassert add(0, 0) == 0"}
    cases = {
        "bare interpreter": lambda: subprocess.run([sys.executable, "-I", "-S", "-c", "print(1)"], capture_output=True, check=True),
        "program": lambda: sandbox.run("print(1)"),
        "tests": lambda: evaluator.evaluate(row, BaseEvaluationTarget("def add(a, b): return a + b")),
    }
    for call in cases.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(calls):
        for name, call in cases.items():
            times[name].append(milliseconds(call))
    with ThreadPoolExecutor(2) as pool:
        start = time.perf_counter()
        times["program, two threads"] = list(pool.map(milliseconds, [cases["program"]] * calls))
        rate = calls / (time.perf_counter() - start)
    report = {name: {"p50": round(statistics.median(v), 1), "p90": round(sorted(v)[int(len(v) * 0.9)], 1), "min": round(min(v), 1)} for name, v in times.items()}
    for name, figures in report.items():
        print(f"{name:22s} {figures['p50']:6.1f} ms (p90 {figures['p90']:.1f}, least {figures['min']:.1f})")
    print(json.dumps({"how": sandbox.mode, "milliseconds": report, "programs_per_second_on_two_threads": round(rate, 1)}))


if __name__ == "__main__":
    main()
