"""vLLM killed at work, and vLLM inside the process: each takes a start of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_vllm_processes import gone, until
from test_vllm_server import PROMPT, children, start_sampling

from nexrl_sdk.types import BackendError

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(420)]


def test_killed_at_work(vllm_model: Callable[..., Path]) -> None:
    from nexrl_sdk.backend.vllm import VLLMServer

    seen: list[float] = []
    with VLLMServer(vllm_model(0), dtype="float32", max_model_len=2560, args=["--enforce-eager"], progress=lambda s, line: seen.append(s)) as server:
        assert len(seen) > 3 and server.running and server.pid is not None
        family = [server.pid, *children(server.pid)]
        server.client().sample([PROMPT])  # the first one is slow
        under_way = start_sampling(server.client(), server, 64)
        start = time.monotonic()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(BackendError, match="it was ended by SIGKILL"):
            under_way.result()
        assert time.monotonic() - start < 30 and not server.running
        with pytest.raises(BackendError, match="SIGKILL"):
            server.client().sample([PROMPT])
        until(lambda: all(map(gone, family)))


IN_PROCESS = """
import sys, tempfile, threading, time
from pathlib import Path
import numpy as np, torch
sys.path[:0] = sys.argv[3:]
from test_vllm_server import PROMPT, adapter_of, broadcast_spec, close_to, oracle, read_folder, weights_fingerprint
from nexrl_sdk.backend.vllm import VLLMEngine
from nexrl_sdk.engine.broadcast import send_weights
from nexrl_sdk.types import BackendError, Interrupted, SamplingParams

A, B = map(Path, sys.argv[1:3])
torch.manual_seed(5)
before = torch.get_rng_state()
engine = VLLMEngine(A, dtype="float32", max_model_len=256, lora_rank=8)
assert torch.equal(before, torch.get_rng_state()), "the process's random numbers were touched"
rows = engine.sample([PROMPT, [9, 10]], SamplingParams(max_tokens=10, temperature=0.7, top_logprobs=2, stop=[]), 3)
for prompt, row in zip([PROMPT, [9, 10]], rows):
    for c in row:
        close_to(c.logprobs, oracle(A, prompt + c.tokens, 0.7)[len(prompt):])
        assert [len(t) for t in c.top_logprobs] == [2] * 10
close_to(engine.logprobs([PROMPT], 0.7)[0], oracle(A, PROMPT, 0.7))

engine.update_from_folder(B, 1, weights_fingerprint(read_folder(B)))
close_to(engine.logprobs([PROMPT])[0], oracle(B, PROMPT))
engine.update_in_process(read_folder(A), 2)
close_to(engine.logprobs([PROMPT])[0], oracle(A, PROMPT))
for bad in (lambda: engine.update_from_folder("/etc", 3), lambda: engine.sleep()):
    try:
        bad()
        raise AssertionError("was accepted")
    except BackendError:
        pass
adapter = adapter_of(A, Path(tempfile.mkdtemp()) / "adapter", 1)
engine.update_from_adapter(adapter, 3)
close_to(engine.logprobs([PROMPT])[0], oracle(A, PROMPT, adapter=adapter))

spec = broadcast_spec(B)
engine.pause()
engine.begin_broadcast(spec)
send_weights(read_folder(B), spec)
engine.update_broadcast(spec, 4)
close_to(engine.logprobs([PROMPT])[0], oracle(B, PROMPT))
assert engine.health()["paused"] and engine.weight_version == 4
engine.resume()

found = []
worker = threading.Thread(target=lambda: found.extend(engine.sample([PROMPT], SamplingParams(max_tokens=240, stop=[]), 2)[0]))
worker.start()
time.sleep(0.1)
engine.pause()
engine.update_in_process(read_folder(A), 5)
assert worker.is_alive()
engine.resume()
worker.join(60)
for c in found:
    change = c.weight_versions.index(5)
    assert c.weight_version == 4 and 0 < change < 240
    close_to(c.logprobs[:change], oracle(B, PROMPT + c.tokens)[6:][:change], 5e-4)
    close_to(c.logprobs[change:], oracle(A, PROMPT + c.tokens)[6:][change:], 5e-4)

flag = threading.Event()
threading.Timer(0.1, flag.set).start()
try:
    engine.sample([PROMPT], SamplingParams(max_tokens=240, stop=[]), 64, stop_flag=flag)
    raise AssertionError("was not stopped")
except Interrupted:
    pass
until = time.monotonic() + 10
while engine._driver.engine.has_unfinished_requests() and time.monotonic() < until:
    time.sleep(0.05)
assert not engine._driver.requests and len(engine.sample([PROMPT])[0]) == 1
engine.close()
engine.close()
assert not torch.distributed.is_initialized()
try:
    engine.sample([PROMPT])
    raise AssertionError("was not closed")
except BackendError:
    print("all is well")
"""


def test_inside_this_process(vllm_model: Callable[..., Path]) -> None:
    done = subprocess.run([sys.executable, "-c", IN_PROCESS, str(vllm_model(0)), str(vllm_model(1)), str(Path(__file__).parent)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "all is well" in done.stdout, done.stderr[-4000:]
