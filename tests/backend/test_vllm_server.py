"""A real vLLM on the CPU, held against transformers in float64."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm")

from nexrl_sdk.backend.vllm_ext import read_folder, weights_fingerprint
from nexrl_sdk.types import BackendError, ConfigError, ContextOverflowError, Interrupted, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(420)]
PROMPT = [5, 6, 41, 7, 8, 42]
HTTP = httpx.Client(timeout=60)  # one for all calls: to make a client takes longer than a call


def oracle(folder: Path, tokens: list[int], temperature: float = 1.0, adapter: Path | None = None) -> np.ndarray:
    """Logprob of each token given those before, by transformers in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0] / temperature, -1)
    picked = logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return np.concatenate([[np.nan], picked.numpy()])


def adapter_of(folder: Path, out: Path, seed: int) -> Path:
    """A random adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False))
    model.save_pretrained(out)
    return out


@pytest.fixture
def engine(vllm_server: Any, vllm_model: Callable[[int], Path]) -> Iterator[Any]:
    """A client of the session's server, which has the first model's weights at the start and at the end."""
    client = vllm_server.client(stall_timeout=20)
    if client.weight_version != 0 or client.health()["paused"]:
        client.resume()
        client.update_from_folder(vllm_model(0), 0)
    client.sample([PROMPT])
    yield client
    client.resume()
    client.update_from_folder(vllm_model(0), 0)
    client.close()


def close_to(got: Any, expected: Any, tolerance: float = 2e-4) -> None:
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(expected, float), atol=tolerance, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_of_what_was_sampled(engine: Any, vllm_model: Any, temperature: float) -> None:
    rows = engine.sample([PROMPT, [9, 10]], SamplingParams(max_tokens=12, temperature=temperature, stop=[]), 3)
    assert [len(r) for r in rows] == [3, 3]
    for prompt, row in zip([PROMPT, [9, 10]], rows):
        for c in row:
            assert (len(c.tokens), c.finish_reason, c.weight_version, c.weight_versions) == (12, "length", 0, None)
            close_to(c.logprobs, oracle(vllm_model(0), prompt + c.tokens, temperature)[len(prompt) :])
    full = PROMPT + rows[0][0].tokens
    close_to(engine.logprobs([full], temperature)[0], oracle(vllm_model(0), full, temperature))


def test_what_can_be_asked_for(engine: Any, vllm_model: Any, byte_tokenizer: Any) -> None:
    seeded = SamplingParams(max_tokens=6, seed=11, stop=[])
    a, b = engine.sample([PROMPT], seeded, 70)[0], engine.sample([PROMPT], seeded, 70)[0]
    assert [c.tokens for c in a] == [c.tokens for c in b] and len({tuple(c.tokens) for c in a}) > 60
    known = engine.sample([PROMPT], SamplingParams(max_tokens=4, top_logprobs=3, prompt_logprobs=True, stop=[]))[0][0]
    close_to(known.prompt_logprobs, oracle(vllm_model(0), PROMPT))
    assert [len(t) for t in known.top_logprobs] == [3] * 4 and all(t[0][1] >= t[1][1] >= t[2][1] for t in known.top_logprobs)
    token = a[0].tokens[2]
    stopped = engine.sample([PROMPT], SamplingParams(max_tokens=6, seed=11, stop=[token]))[0][0]
    assert (stopped.tokens, stopped.finish_reason) == (a[0].tokens[: a[0].tokens.index(token) + 1], "stop")
    long = engine.sample([[7] * 2554], SamplingParams(max_tokens=100, stop=[]))[0][0]
    assert (len(long.tokens), long.finish_reason) == (6, "length")
    with pytest.raises(ContextOverflowError, match="2560"):
        engine.sample([[7] * 2560])
    with pytest.raises(ConfigError, match="2 sampling parameters for 1"):
        engine.sample([PROMPT], [SamplingParams(), SamplingParams()])


def test_stop_strings(engine: Any, byte_tokenizer: Any) -> None:
    engine.tokenizer = byte_tokenizer
    letters = [byte_tokenizer.decode([t]) for t in range(7, 272)]
    c = engine.sample([PROMPT], SamplingParams(max_tokens=60, seed=1, stop=[x for x in letters if x.isascii() and x.isalpha()]))[0][0]
    assert c.finish_reason == "stop" and byte_tokenizer.decode(c.tokens)[-1].isalpha() and not any(x.isascii() and x.isalpha() for x in c.text)


def test_folder_replaces_all_weights(engine: Any, vllm_model: Any) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0, stop=[])
    before = engine.sample([PROMPT * 6], greedy)[0][0]
    engine.update_from_folder(vllm_model(1), 7, weights_fingerprint(read_folder(vllm_model(1))))
    after = engine.sample([PROMPT * 6], greedy)[0][0]
    assert before.weight_version == 0 and after.weight_version == engine.weight_version == 7 and before.tokens != after.tokens
    close_to(engine.logprobs([PROMPT * 6 + after.tokens])[0], oracle(vllm_model(1), PROMPT * 6 + after.tokens))
    close_to(after.logprobs, oracle(vllm_model(1), PROMPT * 6 + after.tokens)[36:])


def damaged(source: Path, out: Path, how: str) -> Path:
    """A copy of a folder of weights that must be refused."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out)
    file = out / "model.safetensors"
    tensors = load_file(file)
    if how == "missing":
        tensors.pop("model.norm.weight")
    elif how == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    elif how == "foreign":
        tensors["model.stranger"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file)
    raw = bytearray(file.read_bytes())
    if how == "bit":
        raw[-5] ^= 1
    file.write_bytes(raw[:-100] if how == "short" else raw)
    return out


@pytest.mark.parametrize(("how", "message"), [("missing", "missing .*norm"), ("shape", "63"), ("foreign", "stranger"), ("bit", "fingerprint"), ("short", "nexrl_load_folder failed"), ("outside", "outside"), ("nothing", "nexrl_load_folder failed")])
def test_bad_weights_change_nothing(engine: Any, vllm_model: Any, tmp_path: Path, how: str, message: str) -> None:
    known = weights_fingerprint(read_folder(vllm_model(1)))
    folder = Path("/etc") if how == "outside" else tmp_path if how == "nothing" else damaged(vllm_model(1), tmp_path / "w", how)
    with pytest.raises(BackendError, match=message):
        engine.update_from_folder(folder, 3, known)
    assert engine.weight_version == 0
    close_to(engine.logprobs([PROMPT])[0], oracle(vllm_model(0), PROMPT))


def test_adapters_are_loaded_hot(engine: Any, vllm_model: Any, tmp_path: Path) -> None:
    for version in (1, 2):
        folder = adapter_of(vllm_model(0), tmp_path / f"a{version}", version)
        engine.update_from_adapter(folder, version)
        c = engine.sample([PROMPT], SamplingParams(max_tokens=8, stop=[]))[0][0]
        expected = oracle(vllm_model(0), PROMPT + c.tokens, adapter=folder)
        assert c.weight_version == version and np.abs(expected - oracle(vllm_model(0), PROMPT + c.tokens))[1:].max() > 0.05
        close_to(c.logprobs, expected[6:])
        close_to(engine.logprobs([PROMPT + c.tokens])[0], expected)
    with pytest.raises(BackendError, match=r"adapter_model\.safetensors"):
        engine.update_from_adapter(tmp_path, 3)
    engine.update_from_folder(vllm_model(1), 4)
    close_to(engine.logprobs([PROMPT])[0], oracle(vllm_model(1), PROMPT))


def broadcast_spec(folder: Path, **more: Any) -> dict[str, Any]:
    from nexrl_sdk.backend.vllm import free_port
    from nexrl_sdk.engine.broadcast import plan_weights

    return {"host": "127.0.0.1", "port": free_port(), "backend": "gloo", "world_size": 2, "timeout": 20, **plan_weights(read_folder(folder)), **more}


def test_broadcast_is_received(engine: Any, vllm_model: Any) -> None:
    from nexrl_sdk.engine.broadcast import send_weights

    spec = broadcast_spec(vllm_model(2))
    assert spec["world_size"] == 1 + engine.broadcast_ranks
    engine.pause()
    engine.begin_broadcast(spec)
    send_weights(read_folder(vllm_model(2)), spec)
    engine.update_broadcast(spec, 5)
    close_to(engine.logprobs([PROMPT])[0], oracle(vllm_model(2), PROMPT))
    engine.resume()
    assert engine.sample([PROMPT])[0][0].weight_version == 5
    with pytest.raises(BackendError, match="same spec"):
        engine.update_broadcast(spec, 6)


def test_sender_that_fails_leaves_a_server_that_takes_the_next_push(engine: Any, vllm_model: Any) -> None:
    from nexrl_sdk.engine.broadcast import WeightChannel

    def half() -> Iterator[tuple[str, Any]]:
        yield next(read_folder(vllm_model(2)))
        raise RuntimeError("the sender fell over")

    spec = broadcast_spec(vllm_model(2), timeout=8)
    engine.pause()
    engine.begin_broadcast(spec)
    with pytest.raises(RuntimeError, match="fell over"), WeightChannel(spec, 0) as channel:
        channel.send(half())
    with pytest.raises(BackendError, match="nexrl_receive failed"):
        engine.update_broadcast(spec, 5)
    assert engine.weight_version == 0
    engine.update_from_folder(vllm_model(0), 0)
    close_to(engine.logprobs([PROMPT])[0], oracle(vllm_model(0), PROMPT))
    nobody = broadcast_spec(vllm_model(2), timeout=3)
    engine.begin_broadcast(nobody)
    with pytest.raises(BackendError, match="nexrl_receive failed"):
        engine.update_broadcast(nobody, 6)
    close_to(engine.logprobs([PROMPT])[0], oracle(vllm_model(0), PROMPT))


LONG = 2400  # tokens of a completion that is still under way when something happens


class Sampling(threading.Thread):
    """A long completion in the background."""

    def __init__(self, engine: Any, count: int = 1, stop_flag: threading.Event | None = None):
        super().__init__(daemon=True)
        self.engine, self.count, self.flag, self.rows, self.error = engine, count, stop_flag, [], None
        self.start()

    def run(self) -> None:
        try:
            self.rows = self.engine.sample([PROMPT], SamplingParams(max_tokens=LONG, stop=[]), self.count, stop_flag=self.flag)[0]
        except BaseException as e:
            self.error = e

    def result(self) -> list[Any]:
        self.join(180)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.rows


def metric(server: Any, name: str) -> float:
    """Of the server's metrics."""
    text = HTTP.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {server.key}"}).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def start_sampling(engine: Any, server: Any, count: int, stop_flag: threading.Event | None = None) -> Sampling:
    """A completion of which some tokens are drawn, and many are not."""
    before = metric(server, "vllm:generation_tokens_total")
    under_way = Sampling(engine, count, stop_flag)
    until(lambda: metric(server, "vllm:generation_tokens_total") > before or not under_way.is_alive())
    return under_way


def pause_within(engine: Any, server: Any) -> Sampling:
    """Completions that a pause has caught half-way: on a loaded machine, where whole processes stand still for seconds, more of them last longer."""
    for count in (4, 16, 64, 128):
        under_way = start_sampling(engine, server, count)
        engine.pause()
        drawn = -1.0
        while drawn != (drawn := metric(server, "vllm:generation_tokens_total")):  # the server may still be at tokens drawn before
            time.sleep(0.5)
        if under_way.is_alive():
            return under_way
        engine.resume()
        under_way.result()  # what failed says so; what was merely quicker is tried again
    raise AssertionError("every completion had ended before the pause")


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_completions_go_on_over_an_update(engine: Any, vllm_server: Any, vllm_model: Any) -> None:
    under_way = pause_within(engine, vllm_server)
    engine.update_from_folder(vllm_model(1), 3)
    engine.reset_prefix_cache()
    time.sleep(0.3)
    assert under_way.is_alive() and engine.health()["paused"]
    engine.resume()
    for c in under_way.result():
        assert c.weight_version == 0 and c.weight_versions is not None and len(c.weight_versions) == LONG
        change = c.weight_versions.index(3)
        assert c.weight_versions == [0] * change + [3] * (LONG - change)
        both = [oracle(vllm_model(s), PROMPT + c.tokens)[6:] for s in (0, 1)]
        close_to(c.logprobs[:change], both[0][:change], 5e-4)
        close_to(c.logprobs[change:], both[1][change:], 5e-4)


def test_scores_while_paused_and_draws_again_after_a_roll_back(engine: Any, vllm_server: Any, vllm_model: Any) -> None:
    for _ in range(4):
        under_way = pause_within(engine, vllm_server)
        engine.update_from_folder(vllm_model(1), 3)
        close_to(engine.logprobs([PROMPT])[0], oracle(vllm_model(1), PROMPT))
        assert engine.health()["paused"]
        time.sleep(0.3)
        caught = under_way.is_alive()  # scoring lets the others draw: one near its end may have ended under version 3, rightly
        engine.update_from_folder(vllm_model(0), 0)
        engine.resume()
        if caught:
            break
    assert caught
    for c in under_way.result():
        assert c.weight_version == 0 and c.weight_versions is None
        close_to(c.logprobs, oracle(vllm_model(0), PROMPT + c.tokens)[6:], 5e-4)


def test_stop_flag_frees_the_server(engine: Any, vllm_server: Any) -> None:
    flag = threading.Event()
    under_way = start_sampling(engine, vllm_server, 64, flag)
    flag.set()
    with pytest.raises(Interrupted):
        under_way.result()
    until(lambda: metric(vllm_server, "vllm:num_requests_running") == 0)


def children(pid: int) -> list[int]:
    found = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [g for c in found for g in children(c)]


@pytest.mark.parametrize("which", ["server", "engine"])
def test_stopped_process_is_reported_within_the_deadline(engine: Any, vllm_server: Any, vllm_model: Any, which: str) -> None:
    impatient = vllm_server.client(stall_timeout=2)
    impatient.connect()
    target = vllm_server.pid if which == "server" else next(p for p in children(vllm_server.pid) if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(target, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(BackendError, match="no sign of life for 2 s"):
            impatient.sample([PROMPT])
        assert time.monotonic() - start < 60
        with pytest.raises(BackendError, match=r"no answer|no sign of life"):
            impatient.health()
    finally:
        os.kill(target, signal.SIGCONT)
    close_to(engine.logprobs([PROMPT])[0], oracle(vllm_model(0), PROMPT))
    impatient.close()


def test_strangers_are_kept_out(engine: Any, vllm_server: Any) -> None:
    with httpx.Client(base_url=vllm_server.url) as http:
        assert http.get("/health").status_code == 200
        for path in ("/pause", "/collective_rpc", "/v1/load_lora_adapter", "/v1/completions", "/update_weights"):
            assert http.post(path, json={}).status_code == 401, path
            assert http.post(path, json={}, headers={"authorization": "Bearer wrong"}).status_code == 401, path
        answer = http.post("/collective_rpc", json={"method": "reload_weights"}, headers={"authorization": f"Bearer {vllm_server.key}"})
        assert answer.status_code == 403 and "nexrl_" in json.dumps(answer.json())
    assert vllm_server.key.encode() not in b"".join(Path(f"/proc/{p}/cmdline").read_bytes() for p in [vllm_server.pid, *children(vllm_server.pid)])
    assert vllm_server.key not in vllm_server.log_path.read_text() + repr(vllm_server) + repr(engine)
