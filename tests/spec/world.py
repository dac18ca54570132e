"""What the documents' examples take for granted: a folder in their layout, batches, a judge, methods of a class."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from nexrl_sdk import Recipe, compat
from nexrl_sdk.nexrl_types import Batch
from nexrl_sdk.types import Trajectory

ROWS = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]
REWARD = "def reward(row, answer):\n    return sum(c in 'aeiou' for c in answer) / max(1, len(answer)) + 0.05 * len(answer)\n"


@dataclass
class World:
    """A working folder in the documents' layout, and what is needed to run there."""

    folder: Path
    model: Callable[[], Path]  # a tiny model, made when it is asked for
    bodies: dict[str, str] = field(default_factory=dict)  # digest -> text of each block

    def write(self, name: str, text: str) -> Path:
        """A file of the workspace."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def recipe(self, text: str, **more: Any) -> Recipe:
        """An example's configuration with the model and the rows that it leaves to the reader; what it says wins."""
        self.write("rows.jsonl", "".join(f'{{"prompt": "{r["prompt"]}"}}\n' for r in ROWS))
        self.write("reward.py", REWARD)
        rest: dict[str, Any] = {"model": {"path": str(self.model())}, "data": {"batch_size": 2, "data_files": "rows.jsonl"}, "rollout_worker": {"max_tokens": 4, "evaluator_module_path": "reward.py:reward"}, "trajectory_pool": {"group_size": 2}}
        if "max_response_length" in text:
            del rest["rollout_worker"]["max_tokens"]  # the same setting
        merged = OmegaConf.merge(rest, OmegaConf.create(text), more)
        return Recipe.from_dict(OmegaConf.to_container(merged), base_dir=self.folder)  # type: ignore[arg-type]


def space(**names: Any) -> dict[str, Any]:
    """What an example may take from the ones above it, and from the file that it is a part of."""
    shared: dict[str, Any] = {}
    exec(
        "import re, logging, torch\nfrom abc import abstractmethod\nfrom typing import Any\nfrom omegaconf import DictConfig\n"
        "from nexrl.nexrl_types import Batch, Trajectory\nfrom nexrl.rollout_worker import BaseEvaluationTarget, EvaluationRunResult, Evaluator\n",
        shared,
    )
    return {**shared, "logger": logging.getLogger("documents"), "__name__": "example", **names}


def run(body: str, **names: Any) -> dict[str, Any]:
    """The names after an example has run."""
    found = space(**names)
    exec(compile(body, "<example>", "exec"), found)
    return found


def within(body: str, base: type, **names: Any) -> Any:
    """A class that has the methods of an example."""
    found = run(f"class Example(Base):\n{textwrap.indent(body, '    ')}", Base=base, **names)["Example"]
    found.__abstractmethods__ = frozenset()
    return found


def bare(cls: Any, **sections: Any) -> Any:
    """A trainer that only has a configuration."""
    return cls(OmegaConf.create({"algorithm": {"my_param": 0.5}, "train_service": {"world_size": 1, "backend": "self-hosted", "url": "http://localhost:1"}, **sections}))


def dummy_trajectories(size: int = 4) -> list[Trajectory]:
    """Answers to half as many prompts, with rewards 0 and 1."""
    return [
        Trajectory(tokens=[0, 5, 6, 7, 8], loss_mask=[0, 0, 0, 1, 1], logprobs=[0, 0, 0, -1.0, -2.0], reward=float(i % 2), group_id=i // 2, run_id=f"{i // 2}/{i}", prompt="p", response="r")
        for i in range(size)
    ]


def dummy_batch(size: int = 4) -> Batch:
    """The same as a batch."""
    return Batch.from_trajectories(dummy_trajectories(size), pad_token_id=0)


class Holder:
    """A training API that only notes what it is sent."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def train(self, datums: Any, config: Any) -> dict[str, Any]:
        """Note it."""
        self.seen.append((datums, config))
        return {"metrics": {"loss": 0.5}}


# -- signatures --------------------------------------------------------------------------------------


def signatures(body: str) -> dict[str, inspect.Signature]:
    """The functions that a block of bare signatures declares."""
    found: dict[str, inspect.Signature] = {}
    for part in re.split(r"^(?=def |@)", body, flags=re.MULTILINE):
        if "def " in part:
            declared = part[part.index("def ") :].strip()
            names = {"DictConfig": DictConfig, "Any": Any}
            code = compile("from __future__ import annotations\n" + declared + (" ..." if declared.endswith(":") else ": ..."), "<signature>", "exec")
            exec(code, names)
            found.update({k: inspect.signature(v) for k, v in names.items() if inspect.isfunction(v)})
    return found


def disagreements(body: str, cls: type) -> list[str]:
    """What of a documented signature a class of ours does not take."""
    wrong = []
    for name, wanted in signatures(body).items():
        if not hasattr(cls, name):
            wrong.append(f"{cls.__name__} has no {name}")
            continue
        ours = [p for p in inspect.signature(getattr(cls, name)).parameters.values() if p.name != "self"]
        theirs = [p for p in wanted.parameters.values() if p.name != "self"]
        if [p.name for p in ours][: len(theirs)] != [p.name for p in theirs]:
            wrong.append(f"{name}: {[p.name for p in ours]}, documented {[p.name for p in theirs]}")
        wrong += [f"{name}: {a.name}={a.default!r}, documented {b.default!r}" for a, b in zip(ours, theirs) if a.name == b.name and a.default != b.default]
        wrong += [f"{name}: {p.name} has no default" for p in ours[len(theirs) :] if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return wrong


# -- shell -------------------------------------------------------------------------------------------


def commands(body: str) -> list[list[str]]:
    """The commands of a block that are NexRL's."""
    joined = re.sub(r"\\\n\s*", " ", body)
    lines = [shlex.split(line, comments=True) for line in joined.splitlines() if line.strip()]
    return [words for words in lines if words and (words[0] == "nexrl" or (words[:2] == ["python", "-m"] and words[2].startswith("nexrl.")))]


def parsed(words: list[str]) -> list[str]:
    """A command through the parsers that `nexrl` and `python -m nexrl.…` use; what the command's own parser takes."""
    import click
    from typer.main import get_command

    from nexrl_sdk.launch.cli import app

    if words[0] == "nexrl":
        arguments = compat.launch_arguments(words[1:])
    else:
        name = compat.MODULES[words[2]].rpartition(".")[2]
        arguments = [{"main": "run", "validator": "validate"}[name], *compat.recipe_arguments(words[3:])]
    group: Any = get_command(app)
    with click.Context(group) as context:
        command = group.get_command(context, arguments[0])
        with command.make_context(arguments[0], arguments[1:]) as inner:
            assert inner.params["recipe"].name.endswith(".yaml")
    return arguments


def syntax(body: str) -> None:
    """Whether it is a shell's language."""
    subprocess.run(["bash", "-n"], input=body, text=True, check=True, capture_output=True)


# -- a judge -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def judge(answer: str) -> Iterator[list[dict[str, Any]]]:
    """An OpenAI-compatible server that always says the same; yields what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"id": "1", "object": "chat.completion", "created": 0, "model": asked[-1]["model"], "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}]}
            body = json.dumps(message).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    before = {k: os.environ.get(k) for k in ("OPENAI_BASE_URL", "OPENAI_API_KEY")}
    os.environ.update(OPENAI_BASE_URL=f"http://127.0.0.1:{server.server_port}/v1", OPENAI_API_KEY="none")
    try:
        yield asked
    finally:
        for k, v in before.items():
            os.environ.pop(k) if v is None else os.environ.update({k: v})
        server.shutdown()
        thread.join()
        server.server_close()


# -- agents ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(cls: Any, world: World, *, evaluator: Any, agent: Any = None, **section: Any) -> Iterator[Any]:
    """A worker in the documents' form, on an engine of this process."""
    from nexrl_sdk import LocalBackend
    from nexrl_sdk.rollout.agent import WorkerConfig
    from nexrl_sdk.rollout.agent_config import AgentConfig
    from nexrl_sdk.types import SamplingParams

    with LocalBackend(world.model()) as backend:
        yield cls(WorkerConfig(backend, evaluator, section, agent=agent or AgentConfig(name="a", system_prompt="s"), group_size=2, sampling=SamplingParams(max_tokens=6), seed=1))
