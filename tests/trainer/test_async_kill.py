"""SIGKILL while rollouts run ahead: after the resume, every prompt of the data order is trained exactly once, and finished answers are used."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from async_runs import PROMPTS, make_recipe
from zygote import Zygote

from nexrl_sdk.run.journal import Journal
from nexrl_sdk.run.store import Folder

pytestmark = pytest.mark.timeout(200)
STEPS = 24  # into the second epoch


@pytest.fixture(scope="module")
def model(tiny) -> str:
    return str(tiny("qwen2", kind="char", chat=False))


@pytest.fixture(scope="module")
def child(model, tmp_path_factory) -> Iterator[Callable[..., int]]:
    """`child("train", folder, ...)` runs a function of `async_runs` in a process of its own; returns its exit code."""
    heavy = ["accelerate", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto"]
    zygote = Zygote(["async_runs", "nexrl_sdk.trainer.grpo", "nexrl_sdk.backend.local", *heavy], [Path(__file__).parent])
    out = tmp_path_factory.mktemp("out") / "log"

    def run(function: str, folder: Path, *args: object) -> int:
        arguments = ", ".join(repr(a) for a in args)
        code = f"from pathlib import Path; import async_runs; async_runs.{function}({model!r}, Path({str(folder)!r}), {arguments})"
        status = zygote.wait(zygote.start(code, out))
        assert status in (0, -signal.SIGKILL), out.read_text()
        return status

    yield run
    zygote.close()


def check_ledger(folder: Path, model: str, mode: str) -> None:
    """Every prompt of the data order once; what the ledger says is what the rollouts of the step are, of weights that were there."""
    run, stream = Folder(folder), make_recipe(model).make_stream()
    ledger = run.ledger()
    assert [line["step"] for line in ledger] == list(range(1, STEPS + 1)) and not any(line["stale"] or line["incomplete"] for line in ledger)
    assert sorted(k for line in ledger for k in line["trained"]) == sorted(f"{i.epoch}:{i.index}" for i in stream.next(STEPS * PROMPTS))
    for line in ledger:
        rollouts, step = run.rollouts(line["step"]), line["step"]
        assert list(rollouts.groups()) == line["trained"]
        assert all(v <= step - 1 for t in rollouts for v in t.weight_versions), "weights that the resume undid had no part in it"
        assert mode == "fully-async" or all(v >= step - 2 for t in rollouts for v in t.weight_versions)
    metrics = [json.loads(x)["step"] for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics == list(range(1, STEPS + 1))


@pytest.mark.parametrize("seed", range(5))
def test_killed_four_times_at_random_moments(seed, child, model, tmp_path):
    """Twenty kills in all."""
    folder, draw, kills = tmp_path / "run", random.Random(seed), 0
    save = 1 + seed % 3
    for _ in range(4):
        kills += child("killed_after", folder, "batch-async", STEPS, save, draw.uniform(0.0, 0.25)) != 0
    assert kills == 4
    assert child("train", folder, "batch-async", STEPS, save) == 0
    check_ledger(folder, model, "batch-async")


@pytest.mark.parametrize("seed", range(2))
def test_finished_answers_survive(seed, child, model, tmp_path):
    """What the journal holds of weights that the checkpoint has is trained on as it is."""
    folder, draw, kept = tmp_path / "run", random.Random(seed), {}
    for _ in range(6):
        assert child("killed_after", folder, "fully-async", STEPS, 1, draw.uniform(0.1, 0.25)) != 0
        run = Folder(folder)
        step = int(run.checkpoints[-1].name[5:]) if run.checkpoints else 0
        done = {k for line in run.ledger() if line["step"] <= step for k in line["trained"]}
        kept = {k: [t.tokens for t in g] for e in Journal(folder / "journal.jsonl").read() if e.newest <= step for k, g in e.groups.items() if k not in done}
        if kept:
            break
    assert kept, "some answers were finished and not trained on"
    assert child("train", folder, "fully-async", STEPS, 1) == 0
    check_ledger(folder, model, "fully-async")
    trained = {k: [t.tokens for t in g] for s in range(1, STEPS + 1) for k, g in Folder(folder).rollouts(s).groups().items()}
    assert {k: trained[k] for k in kept} == kept
    assert not Journal(folder / "journal.jsonl").read(), "what was trained on is forgotten"


def test_a_bound_of_zero_goes_on_as_sync_does_to_the_last_bit(child, tmp_path):
    from test_kill_resume import record

    def numbers(folder: Path) -> dict:
        found = record(folder)
        return {**found, "metrics": [{k: v for k, v in line.items() if not k.startswith(("staleness/", "pool/"))} for line in found["metrics"]]}

    assert child("train", tmp_path / "whole", "sync", 10, 2) == 0
    draw = random.Random(0)
    for _ in range(4):
        assert child("killed_after", tmp_path / "killed", "batch-async", 10, 2, draw.uniform(0.02, 0.2), 0) != 0
    assert child("train", tmp_path / "killed", "batch-async", 10, 2, 0) == 0
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
