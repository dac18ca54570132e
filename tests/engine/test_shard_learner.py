"""A learner on two gloo ranks equals the learner of one process, whatever the family, and fails as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shard_ranks
from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import load_model
from test_learner import make_data

Tiny = Callable[..., Path]
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("shard_learner")]


@pytest.fixture(scope="module")
def folders(tiny: Tiny) -> dict[str, str]:
    return {**{f: str(tiny(f)) for f in ("qwen2", "llama", "qwen3", "gpt2")}, "uneven": str(tiny("qwen2", vocab_size=273, intermediate_size=63))}


@pytest.fixture(scope="module")
def ranks(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    work = tmp_path_factory.mktemp("ranks")
    (work / "folders.json").write_text(json.dumps(folders))
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [(work / f"log{r}").open("w+") for r in range(2)]
    processes = [subprocess.Popen([sys.executable, shard_ranks.__file__, str(work), str(r), "2"], env=env, stdout=logs[r], stderr=subprocess.STDOUT) for r in range(2)]
    try:
        codes = [p.wait(timeout=120) for p in processes]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for p in processes:
            p.kill()
            p.wait()
    texts = [Path(x.name).read_text()[-3000:] for x in logs]
    assert codes == [0, 0], "\n".join(texts)
    return [json.loads((work / f"rank{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("name", list(shard_ranks.CASES))
def test_two_ranks_equal_one_process(ranks: list[dict[str, Any]], folders: dict[str, str], name: str) -> None:
    case = shard_ranks.CASES[name]
    one, (first, second) = shard_ranks.train(case, folders[case["family"]]), (r[name] for r in ranks)
    loose = {"autocast": 2e-2, "bfloat16": 3e-2, "lora_bfloat16": 3e-2}.get(name)
    near = {"rel": loose or 1e-5, "abs": 10 * loose if loose else 2e-5}  # losses are sums over some hundred tokens
    for key in ("losses", "norms", "metrics"):
        assert first[key] == second[key], key  # agreed, bit for bit
    assert first["weights"] == second["weights"]
    assert first["losses"] == pytest.approx(one["losses"], **near) and first["norms"] == pytest.approx(one["norms"], **near)
    for a, b in zip(first["metrics"], one["metrics"]):
        assert a == pytest.approx(b, **near)
    for n, values in one["weights"].items():
        assert first["weights"][n] == pytest.approx(values, rel=loose or 1e-4, abs=loose or 3e-5), n  # the bias of keys has no gradient but rounding
    logprobs = {int(i): x for r in (first, second) for i, x in r["logprobs"].items()}
    assert sorted(logprobs) == sorted(one["logprobs"])
    for i, x in one["logprobs"].items():
        assert logprobs[i] == pytest.approx(x, rel=loose or 1e-4, abs=loose or 1e-4)


def test_what_fails_on_one_rank_fails_on_all(ranks: list[dict[str, Any]], folders: dict[str, str]) -> None:
    first, second = (r["faults"] for r in ranks)
    assert first == second
    assert first["token"].startswith("DataError: datum 0 has token") and "vocabulary of 272" in first["token"]
    assert first["loss"].startswith("NonFiniteError: the loss is nan") and first["step"].startswith("NonFiniteError: the gradient is not finite (in ")
    assert first["stop"].startswith("Interrupted: ") and first["empty"].startswith("BackendError: there are no gradients")
    assert first["adapter"].startswith("ConfigError: an adapter is added before a model is sharded") and first["config"].startswith("ConfigError")
    assert first["unchanged"]
    assert first["after"] == pytest.approx(Learner(load_model(folders["qwen2"])).forward_backward(make_data(0), "ppo").loss, rel=1e-5)
