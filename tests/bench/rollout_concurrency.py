"""500 agent rollouts with simulated latency against the ideal schedule: how long they take, what memory they leave behind, and which threads.

An agent calls its tool three times and answers; a tool call takes 50 to 150 ms and an answer of the model a fixed time.
The ideal is list scheduling: a rollout takes the sum of its latencies and nothing else, and the next one starts in the place that is free first.
The last line is JSON; the exit code is 1 where a ratio is above --most.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nexrl_sdk.rollout.agent import AgentRolloutWorker
from nexrl_sdk.rollout.agent_config import AgentConfig
from nexrl_sdk.types import Completion

TOOL_CALLS, FASTEST, SLOWEST = 3, 0.05, 0.15
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> Any:
    """One token a character."""
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*ROLES, *(chr(i) for i in range(10, 127))])}, unk_token="?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=ROLES[:4])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def latencies(task: int) -> list[float]:
    """Seconds of a task's tool calls."""
    drawn = random.Random(task)
    return [drawn.uniform(FASTEST, SLOWEST) for _ in range(TOOL_CALLS)]


class Model:
    """Calls the tool until it has called it often enough, and takes its time for each answer."""

    def __init__(self, latency: float):
        self.tokenizer, self.latency = make_tokenizer(), latency
        self._tool = self.tokenizer.convert_tokens_to_ids("<|tool|>")
        self._said: dict[str, list[int]] = {}

    def _tokens(self, text: str) -> list[int]:
        if text not in self._said:
            self._said[text] = self.tokenizer.encode(text + "<|end|>", add_special_tokens=False)
        return self._said[text]

    def sample(self, prompts: Any, params: Any, n: int = 1, stop_flag: Any = None) -> list[list[Completion]]:
        calls = prompts[0].count(self._tool)
        time.sleep(self.latency)
        tokens = self._tokens("done" if calls == TOOL_CALLS else f'<tool_call>{{"name": "look", "arguments": {{"which": {calls}}}}}</tool_call>')
        return [[Completion(tokens, [-0.1] * len(tokens), "stop", 0)] * n]


class Bench(AgentRolloutWorker):
    """Each rollout's tool takes that rollout's time."""

    def run_agent(self, task: dict[str, Any]) -> str | None:
        self.client.meta["task"] = task["task"]
        return super().run_agent(task)


def make_worker(latency: float, at_once: int, timeout: float) -> Bench:
    def look(which: int) -> str:
        """Look something up."""
        time.sleep(latencies(worker.client.meta["task"])[which])
        return "seen"

    agent = AgentConfig.make("You look things up.", tools=[look], max_iterations=TOOL_CALLS + 1)
    worker = Bench(Model(latency), lambda row, answer: float(answer == "done"), agent=agent, group_size=1, rollouts_at_once=at_once, timeout=timeout)
    return worker


def ideal(tasks: int, latency: float, at_once: int) -> float:
    """Seconds by list scheduling."""
    free = [0.0] * min(at_once, tasks)
    for task in range(tasks):
        heapq.heappush(free, heapq.heappop(free) + sum(latencies(task)) + latency * (TOOL_CALLS + 1))
    return max(free)


def resident() -> float:
    """MiB of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(args: argparse.Namespace, at_once: int) -> dict[str, Any]:
    worker = make_worker(args.latency, at_once, args.timeout)
    rows = [{"prompt": f"Task {i}?", "task": i} for i in range(args.rollouts)]
    worker.run(rows[:8])  # imports and caches
    best, memory, ratios, cpu = ideal(args.rollouts, args.latency, at_once), [resident()], [], []
    for repeat in range(args.repeats):
        began, used = time.perf_counter(), time.process_time()
        rollouts = worker.run(rows, step=repeat, stop_flag=threading.Event())
        took = time.perf_counter() - began
        assert all(t.reward == 1.0 and t["agent"]["tool_calls"] == TOOL_CALLS for t in rollouts)
        del rollouts
        ratios.append(took / best)
        cpu.append(time.process_time() - used)
        memory.append(resident())
        print(f"{args.rollouts} rollouts, {at_once} at once: {took:.2f} s, ideal {best:.2f} s, ratio {ratios[-1]:.3f}, CPU {cpu[-1]:.2f} s, {memory[-1]:.0f} MiB, {threading.active_count()} threads", flush=True)
    ours = [t for t in threading.enumerate() if t.name.startswith(("rollout", "tool", "evaluator"))]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "at_once": at_once, "ideal_s": round(best, 3), "ratio": round(sorted(ratios)[len(ratios) // 2], 3), "worst": round(max(ratios), 3), "cpu_s": round(min(cpu), 2),
        "mib_before": round(memory[0], 1), "mib_first": round(memory[1], 1), "mib_last": round(memory[-1], 1), "mib_peak": round(peak, 1), "threads_left": len(ours),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--at-once", type=int, nargs="+", default=[256, 500])
    parser.add_argument("--latency", type=float, default=1.0, help="seconds of one answer of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one rollout")
    parser.add_argument("--most", type=float, default=1.3, help="ratio to the ideal")
    args = parser.parse_args()
    found = [measure(args, at_once) for at_once in args.at_once]
    print(json.dumps({"rollouts": args.rollouts, "latency_s": args.latency, "cases": found}))
    sys.exit(any(case["ratio"] > args.most for case in found))


if __name__ == "__main__":
    main()
