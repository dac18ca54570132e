"""A group of two ranks against a LocalBackend: the same numbers, checkpoints that go both ways, and no rank left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.engine.broadcast import WeightChannel
from nexrl_sdk.serve.workers import WorkerGroup, split_by_tokens
from nexrl_sdk.types import AdamParams, BackendError, CheckpointError, ConfigError, DataError, Datum, Interrupted, NonFiniteError

Tiny = Callable[..., Path]
pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("workers")]
ADAM = AdamParams(1e-3, eps=1e-6, grad_clip_norm=1.0)
LORA = {"rank": 3, "train_unembed": True}


def make_data(seed: int, count: int = 9) -> list[Datum]:
    """Answers of unequal length to three prompts."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 272, rng.integers(2, 9)) for _ in range(3)]
    out = []
    for i in range(count):
        answer = rng.integers(0, 272, rng.integers(1, 12))
        tokens = np.concatenate([prompts[i % 3], answer])
        mask = np.r_[np.zeros(len(tokens) - len(answer) - 1), np.ones(len(answer))].astype(np.float32)
        fields = {"weights": mask, "logprobs": mask * rng.normal(-5.5, 0.2, len(mask)), "advantages": mask * rng.normal()}
        out.append(Datum(tokens[:-1], tokens[1:], fields))
    return out


def alive(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids: list[int], within: float = 20) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.1)
    return not any(map(alive, pids))


def pids_of(group: WorkerGroup) -> list[int]:
    return [group.processes.process.pid, *(r.pid for r in group.processes.ranks)]


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny("qwen2", vocab_size=273, intermediate_size=63)  # no ranks' number divides them


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[WorkerGroup]:
    with WorkerGroup(folder, 2, device="cpu", token_budget=40, start_timeout=120, call_timeout=60) as g:
        yield g


@pytest.fixture(scope="module")
def lora_group(folder: Path) -> Iterator[WorkerGroup]:
    with WorkerGroup(folder, 2, device="cpu", lora=LORA, dispatch_mode="broadcast", start_timeout=120, call_timeout=60) as g:
        yield g


def same_steps(group: WorkerGroup, backend: LocalBackend, steps: int, first: int = 0, near: float = 2e-5) -> None:
    """Train both alike, and compare all that comes back."""
    for step in range(first, first + steps):
        for call in range(2):
            data = make_data(10 * step + call)
            a, b = (x.forward_backward(data, "ppo", {"entropy_coef": 0.01}) for x in (group, backend))
            assert a.loss == pytest.approx(b.loss, rel=1e-5, abs=10 * near) and a.metrics == pytest.approx(b.metrics, rel=1e-5, abs=near)  # the loss is a sum over a hundred tokens
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                np.testing.assert_allclose(x, y, rtol=near, atol=2 * near)
        assert group.optim_step(ADAM) == pytest.approx(backend.optim_step(ADAM), rel=1e-4)
        assert group.publish() == backend.publish()


def test_two_ranks_train_as_one_process_and_their_states_are_each_others(group: WorkerGroup, folder: Path, tmp_path: Path) -> None:
    group.reset()
    held = [r["held"] for r in group.rank_info()]
    assert sum(held) == group.info["parameters"] and max(held) < 0.6 * sum(held)  # each rank has its half
    backend = LocalBackend(folder, device="cpu")
    same_steps(group, backend, 5)
    data = make_data(77)
    group.forward_backward(data, "ppo")  # gradients are part of a state
    path = group.save(tmp_path / "two", {"step": 5})
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "meta.json", "state-00000-of-00002.safetensors", "state-00001-of-00002.safetensors"]
    one = LocalBackend(folder, device="cpu")
    assert one.load(path) == {"step": 5} and one.weight_version == group.weight_version == 5
    weights, theirs = dict(group.named_weights()), one.model.base.state_dict()
    assert {*weights, "lm_head.weight"} == set(theirs)  # tied: not named twice
    for name, tensor in weights.items():
        assert torch.equal(theirs[name], tensor), name  # bit for bit
    norm = group.optim_step(ADAM)["grad_norm"]
    assert one.optim_step(ADAM)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    after = group.forward(data).loss
    assert one.forward(data).loss == pytest.approx(after, rel=1e-5)

    back = one.save(tmp_path / "one", {"step": 6})
    group.reset()
    assert group.weight_version == 0 and group.forward(data).loss == pytest.approx(group.forward(data, reference=True).loss, rel=1e-6)
    assert group.load(back) == {"step": 6} and group.weight_version == 5
    assert group.forward(data).loss == pytest.approx(one.forward(data).loss, rel=1e-6)
    same_steps(group, one, 2, first=6)


def test_going_on_from_a_state_is_bit_for_bit(group: WorkerGroup, tmp_path: Path) -> None:
    group.reset()
    group.forward_backward(make_data(0), "ppo")
    group.optim_step(ADAM)
    path = group.save(tmp_path / "state")
    runs = []
    for _ in range(2):
        group.load(path)
        losses = []
        for step in range(3):
            losses.append(group.forward_backward(make_data(step), "ppo").loss)
            losses.append(group.optim_step(ADAM)["grad_norm"])
        runs.append((losses, {n: t.clone() for n, t in group.named_weights()}))
    assert runs[0][0] == runs[1][0] and all(torch.equal(t, runs[1][1][n]) for n, t in runs[0][1].items())


def test_a_damaged_or_foreign_state_changes_nothing(group: WorkerGroup, tiny: Tiny, tmp_path: Path) -> None:
    group.reset()
    before = group.forward(make_data(1)).loss
    path = group.save(tmp_path / "state")
    file = path / "state-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"the contents of state-00001-of-00002\.safetensors have changed"):
        group.load(path)
    other = LocalBackend(tiny("qwen2", hidden_size=48), device="cpu").save(tmp_path / "other")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        group.load(other)
    with pytest.raises(CheckpointError, match="does not exist"):
        group.load(tmp_path / "none")
    taken = tmp_path / "file"
    taken.write_text("no folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        group.save(taken / "state")
    assert group.forward(make_data(1)).loss == before and not list(tmp_path.glob(".*"))


def test_export_is_what_transformers_loads(group: WorkerGroup, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    group.forward_backward(make_data(3), "ppo")
    group.optim_step(ADAM)
    path = group.export(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(path)
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.config.architectures == ["Qwen2ForCausalLM"]
    assert AutoTokenizer.from_pretrained(path).encode("ab") == group.tokenizer.encode("ab")
    for name, tensor in group.named_weights():
        assert torch.equal(model.state_dict()[name], tensor), name
    datum = make_data(4)[0]
    table = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].log_softmax(-1)
    np.testing.assert_allclose(group.forward([datum]).logprobs[0], table.gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0].detach(), atol=1e-4)


def test_what_cannot_be_done_is_said_and_the_group_goes_on(group: WorkerGroup) -> None:
    data = make_data(0)
    group.zero_grad()
    before = group.forward(data).loss
    with pytest.raises(ConfigError, match="did you mean 'ppo'"):
        group.forward_backward(data, "ppoo")
    with pytest.raises(DataError, match="outside the model's vocabulary"):
        group.forward_backward([*data, Datum([9999], [0], data[0].fields and {n: np.zeros(1) for n in data[0].fields})], "ppo")
    poisoned = Datum(data[0].tokens, data[0].targets, {**data[0].fields, "advantages": data[0].fields["advantages"] * np.nan})
    with pytest.raises(NonFiniteError):
        group.forward_backward([poisoned, *data[1:]], "importance_sampling")
    with pytest.raises(BackendError, match="no gradients"):
        group.optim_step()
    with pytest.raises(DataError, match="equal fields"):
        group.forward_backward([*data, Datum(data[0].tokens, data[0].targets, {**data[0].fields, "more": data[0].fields["weights"]})], "ppo")
    with pytest.raises(DataError, match="no datums"):
        group.forward([])
    with pytest.raises(ConfigError, match="by its name"):
        group.forward_backward(data, lambda x: x)
    with pytest.raises(BackendError, match="does not sample"):
        group.sample([[1]])
    with pytest.raises(CheckpointError, match="no adapter"):
        group.export_adapter("nowhere")
    many, flag = make_data(0, 3000), threading.Event()
    threading.Timer(0.3, flag.set).start()
    with pytest.raises(Interrupted, match="between micro-batches"):
        group.forward_backward(many, "ppo", stop_flag=flag)
    with pytest.raises(BackendError, match="no gradients"):  # undone
        group.optim_step()
    for name, _ in group.named_weights():  # left in the middle
        assert name
        break
    assert group.forward(data).loss == before and len(group.forward(data[:1]).logprobs) == 1  # fewer datums than ranks


@pytest.mark.parametrize(
    "loss,config",
    [
        ("ppo", {"clip_low_threshold": "x"}),
        ("ppo", {"temperature": "x"}),
        ("ppo", {"temperature": 10**400}),
        ("ppo", {"kl_coef": 10**400}),
        ("ppo", {"dual_clip": [2]}),
        ("ppo", {"correction": {}}),
        ("ppo", {"clip_lo": 0.8}),
        ("ppo", "abc"),
        ("ppo", {"entropy_coef": np.ones(2)}),
    ],
)
def test_a_malformed_loss_configuration_is_refused_and_the_group_trains_on(loss: str, config: Any, group: WorkerGroup) -> None:
    with pytest.raises(ConfigError):
        group.forward_backward(make_data(0), loss, config)
    assert group.forward_backward(make_data(0), "ppo", {"clip_low_threshold": 0.8}).loss != 0
    group.zero_grad()


def test_other_malformed_arguments_are_refused_and_the_group_goes_on(group: WorkerGroup) -> None:
    group.forward_backward(make_data(0), "ppo")
    for call in (
        lambda: group.optim_step(AdamParams(weight_decay=10**400)),
        lambda: group.save("a\0b"),
        lambda: group.load(3),  # type: ignore[arg-type]
        lambda: group.export(""),
        lambda: group.broadcast_weights({"host": 5, "port": "x"}),
        lambda: group.broadcast_weights({"host": 5, "port": "x", "backend": "gloo", "world_size": 2, "names": 3, "shapes": 3, "dtypes": 3}),
        lambda: group.broadcast_weights({"host": "127.0.0.1", "port": 1, "backend": "gloo", "world_size": "x", "names": ["a"], "shapes": [3], "dtypes": ["float32"]}),
    ):
        with pytest.raises((ConfigError, DataError)):
            call()
    assert group.optim_step(AdamParams(np.float32(1e-3)))["grad_norm"] > 0  # type: ignore[arg-type]
    group.reset()


def test_lora_over_two_ranks(lora_group: WorkerGroup, folder: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    backend = LocalBackend(folder, device="cpu", lora=LORA)
    same_steps(lora_group, backend, 5, near=5e-5)
    data = make_data(5)
    assert lora_group.forward(data, reference=True).loss == pytest.approx(LocalBackend(folder, device="cpu").forward(data).loss, rel=1e-6)
    one = LocalBackend(folder, device="cpu", lora=LORA)
    one.load(lora_group.save(tmp_path / "state"))
    assert one.forward(data).loss == pytest.approx(lora_group.forward(data).loss, rel=1e-6)
    merged = AutoModelForCausalLM.from_pretrained(lora_group.export(tmp_path / "merged"))
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), lora_group.export_adapter(tmp_path / "adapter"))
    ids = torch.from_numpy(data[0].tokens)[None]
    ours = torch.from_numpy(lora_group.forward(data[:1]).logprobs[0])
    for model in (merged, beside):
        table = model(input_ids=ids).logits[0].log_softmax(-1).gather(1, torch.from_numpy(data[0].targets)[:, None])[:, 0]
        torch.testing.assert_close(table.detach(), ours, atol=1e-4, rtol=1e-4)


def test_a_rank_that_is_killed_ends_the_group_and_says_so(lora_group: WorkerGroup) -> None:
    pids, data = pids_of(lora_group), make_data(0)
    killer = threading.Timer(0.3, os.kill, (pids[2], signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    with pytest.raises(BackendError, match=r"rank 1 of 2 was ended by SIGKILL during 'forward_backward'"):
        while time.monotonic() < start + 30:
            lora_group.forward_backward(data, "ppo")
    assert time.monotonic() < start + 60 and all_gone(pids)
    again = time.monotonic()
    with pytest.raises(BackendError, match="ended by SIGKILL"):
        lora_group.optim_step()
    assert lora_group.health()["status"] == "failed" and "SIGKILL" in lora_group.health()["error"]
    assert time.monotonic() < again + 15
    lora_group.close()
    lora_group.close()


def test_an_interrupt_stops_the_ranks_and_leaves_them_ready(group: WorkerGroup) -> None:
    group.zero_grad()
    before, many = group.forward(make_data(0)).loss, make_data(0, 3000)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        group.forward_backward(many, "ppo")
    with pytest.raises(BackendError, match="no gradients"):
        group.optim_step()
    assert group.forward(make_data(0)).loss == before and group.health()["status"] == "ok"


def test_weights_are_broadcast_to_who_waits_for_them(group: WorkerGroup) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    spec = {"host": "127.0.0.1", "port": port, "backend": "gloo", "world_size": 2, "timeout": 10.0, **group.broadcast_weights({"plan": True})}
    took: dict[str, torch.Tensor] = {}

    def receive() -> None:
        with WeightChannel(spec, 1) as channel:
            took.update((n, t.clone()) for n, t in channel.receive())

    thread = threading.Thread(target=receive)
    thread.start()
    assert group.broadcast_weights(spec)["bytes"] > 0
    thread.join(20)
    weights = dict(group.named_weights())
    assert list(took) == list(weights) and all(torch.equal(took[n], t) for n, t in weights.items())
    with pytest.raises(BackendError, match="could not"):  # nobody waits; the ranks go on
        group.broadcast_weights({**spec, "timeout": 1.0})
    assert group.health()["status"] == "ok" and len(dict(group.named_weights())) == len(weights)


def test_a_rank_that_hangs_ends_the_group_at_the_deadline(group: WorkerGroup) -> None:
    pids = pids_of(group)
    group.processes.call_timeout = 3.0
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(BackendError, match=r"rank 0 of 2 did not answer 'forward_backward' within 3 s \(stopped by a signal\)"):
        group.forward_backward(make_data(0), "ppo")
    assert time.monotonic() < start + 60 and all_gone(pids)
    with pytest.raises(BackendError, match="did not answer"):
        group.save("nowhere")


SCRIPT = """
import sys, time
from nexrl_sdk.serve.workers import WorkerGroup
group = WorkerGroup(sys.argv[1], 2, device="cpu")
print(group.processes.process.pid, *(r.pid for r in group.processes.ranks), flush=True)
time.sleep(600)
"""


def test_ranks_do_not_outlive_who_started_them(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(x) for x in parent.stdout.readline().split()]
        assert len(pids) == 3
    finally:
        parent.kill()
        parent.wait()
    assert all_gone(pids, within=30)


def test_a_group_that_cannot_start_says_why(folder: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="world_size must be"):
        WorkerGroup(folder, 0)
    with pytest.raises(ConfigError, match="world_size must be"):
        WorkerGroup(folder, 10**22, device="cpu")
    with pytest.raises(ConfigError, match="no model folder"):
        WorkerGroup(folder / "none", 2)
    with pytest.raises(ConfigError, match="did you mean 'broadcast'"):
        WorkerGroup(folder, 2, dispatch_mode="brodcast")
    with pytest.raises(ConfigError, match="max_length must be 1 to 256"):
        WorkerGroup(folder, 1, device="cpu", max_length=1000, start_timeout=60)
    with pytest.raises(BackendError, match=r"did not start within 0.5 s"):
        WorkerGroup(folder, 2, device="cpu", start_timeout=0.5)


def test_parts_cost_the_same() -> None:
    data = make_data(0, 60)
    parts = split_by_tokens(data, 3)
    sizes = [len({tuple(data[i].tokens[: k + 1]) for i in part for k in range(len(data[i]))}) for part in parts]
    assert sorted(i for p in parts for i in p) == list(range(60)) and max(sizes) < 1.2 * min(sizes)
    assert [len(p) for p in split_by_tokens(data[:1], 4)].count(1) == 1


