"""Checkpoints that are damaged, interrupted, of another model, or written to a full disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl_sdk.engine import checkpoint as module
from nexrl_sdk.engine.checkpoint import complete_checkpoints, export_hf, latest_checkpoint, load_checkpoint, save_checkpoint, sweep
from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import LoraConfig, load_model, load_tokenizer
from nexrl_sdk.types import AdamParams, CheckpointError, Datum

Tiny = Callable[..., Path]


def write(folder: Path, value: float = 1.0, **kw: Any) -> Path:
    tensors = {"state": {"a": torch.full((5, 3), value), "b": torch.arange(4)}, "more": {"c": torch.tensor(value, dtype=torch.bfloat16)}}
    return save_checkpoint(folder, tensors, {"value": value}, **kw)


def data(seed: int = 0, n: int = 5) -> list[Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 272, 10) for _ in range(n)]
    return [Datum(r[:-1], r[1:], {"weights": np.ones(9)}) for r in rows]


def test_round_trip_of_every_kind_of_tensor(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"f32": whole, "view": whole[1], "columns": whole[:, 1], "bf16": whole.bfloat16(), "f64": whole.double(), "i64": torch.arange(3), "scalar": torch.tensor(7.0), "empty": torch.zeros(0, 3), "bool": whole > 3, "nan": torch.tensor([float("nan"), float("inf")])}
    meta = {"text": "é\n", "numbers": [1, 2.5, None, True], "nested": {"a": {"b": []}}}
    save_checkpoint(tmp_path / "c", {"x": tensors, "none": {}}, meta)
    found = load_checkpoint(tmp_path / "c")
    assert found.meta == meta and set(found.tensors) == {"x", "none"}
    for name, t in tensors.items():
        got = found.tensors["x"][name]
        assert got.dtype == t.dtype and got.shape == t.shape and torch.equal(got.view(-1).contiguous().view(torch.uint8) if t.numel() else got, t.contiguous().view(-1).view(torch.uint8) if t.numel() else t)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["manifest.json", "meta.json", "none.safetensors", "x.safetensors"]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda c: os.truncate(c / "state.safetensors", 40), r"truncated file: state\.safetensors has 40 bytes"),
    "longer": (lambda c: (c / "state.safetensors").open("ab").write(b"x"), "changed file"),
    "missing tensors": (lambda c: (c / "state.safetensors").unlink(), r"lacks state\.safetensors"),
    "missing meta": (lambda c: (c / "meta.json").unlink(), r"lacks meta\.json"),
    "missing manifest": (lambda c: (c / "manifest.json").unlink(), "no manifest.json, so its writer was interrupted"),
    "empty manifest": (lambda c: (c / "manifest.json").write_text(""), r"damaged manifest\.json"),
    "manifest of a list": (lambda c: (c / "manifest.json").write_text("[]"), r"damaged manifest\.json"),
    "manifest with a word changed": (lambda c: (c / "manifest.json").write_text((c / "manifest.json").read_text().replace("more", "mora")), r"does not agree with itself"),
    "a directory": (lambda c: ((c / "meta.json").unlink(), (c / "meta.json").mkdir()), "lacks meta"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_an_alternative_given(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "step_1")
    bad = write(tmp_path / "step_2", 2.0)
    DAMAGE[kind][0](bad)
    with pytest.raises(CheckpointError, match=DAMAGE[kind][1]) as e:
        load_checkpoint(bad)
    assert "step_2" in str(e.value) and f"use {tmp_path / 'step_1'} instead" in str(e.value)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1"


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "step_1")
    rng = np.random.default_rng(0)
    for name in ("state.safetensors", "more.safetensors", "meta.json", "manifest.json"):
        whole = (path / name).read_bytes()
        for _ in range(40):
            at, bit = int(rng.integers(len(whole))), int(rng.integers(8))
            (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            try:
                found = load_checkpoint(path)
            except CheckpointError as e:
                assert "step_1" in str(e)
            else:  # white space of the manifest
                assert name == "manifest.json" and found.meta == {"value": 1.0}
        (path / name).write_bytes(whole)
    load_checkpoint(path)


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors"])
def test_a_manifest_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "in" / "step_1")
    (tmp_path / "in" / "stolen.safetensors").write_bytes((path / "state.safetensors").read_bytes())
    record = json.loads((path / "manifest.json").read_text())
    record["files"][name] = record["files"]["state.safetensors"]
    record["sha256"] = module._seal(record["files"])
    (path / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="outside of itself"):
        load_checkpoint(path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "step_1")
    (path / "state.safetensors").rename(tmp_path / "elsewhere")
    (path / "state.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside of itself"):
        load_checkpoint(path)


def test_what_is_not_there_and_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist.*start anew"):
        load_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="JSON"):
        save_checkpoint(tmp_path / "c", {}, {"x": object()})
    with pytest.raises(CheckpointError, match=r"'\.\./x'"):
        save_checkpoint(tmp_path / "c", {"../x": {}}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path / "file" / "c", {}, {})
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "nowhere") is None


def test_what_is_not_of_the_same_kind_is_not_replaced(tiny: Tiny, tmp_path: Path) -> None:
    """A folder of checkpoints, a file, somebody's folder; a checkpoint by a model and the other way round."""
    model = load_model(tiny("qwen2"))
    checkpoint, exported = save_checkpoint(tmp_path / "all/step_1", {"w": {"a": torch.ones(2)}}, {}), export_hf(model, None, tmp_path / "model")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    for place in (tmp_path / "all", tmp_path / "mine", tmp_path / "mine/notes.txt"):
        for write in (lambda p: save_checkpoint(p, {"w": {"a": torch.ones(2)}}, {}), lambda p: export_hf(model, None, p)):
            with pytest.raises(CheckpointError, match="not replaced"):
                write(place)
    with pytest.raises(CheckpointError, match="no model"):
        export_hf(model, None, checkpoint)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        save_checkpoint(exported, {"w": {"a": torch.ones(2)}}, {})
    assert load_checkpoint(checkpoint).tensors["w"]["a"].tolist() == [1, 1] and (tmp_path / "mine/notes.txt").read_text() == "keep"
    save_checkpoint(checkpoint, {"w": {"a": torch.zeros(2)}}, {})
    export_hf(model, None, exported)
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", {"w": {"a": torch.zeros(2)}}, {})
    assert load_checkpoint(checkpoint).tensors["w"]["a"].tolist() == [0, 0]


def test_the_newest_by_number_and_pruning_of_its_own_kind(tmp_path: Path) -> None:
    write(tmp_path / "best")
    for step in (8, 9, 10, 11):
        write(tmp_path / f"step_{step}", float(step), keep_last=3)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["best", "step_9", "step_10", "step_11"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_11"
    write(tmp_path / "step_5", keep_last=1)  # after a rewind: what was just written stays, whatever its number
    assert (tmp_path / "step_5").exists() and not (tmp_path / "step_11").exists()
    with pytest.raises(CheckpointError, match="keep_last"):
        write(tmp_path / "step_6", keep_last=0)


def full_disk(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*args: Any, **kw: Any) -> None:
        raise error

    if when == "before":
        monkeypatch.setattr(module.shutil, "disk_usage", lambda p: type("U", (), {"free": 10})())
    elif when == "tensors":
        monkeypatch.setattr(module, "save_file", lambda *a, **k: (_ for _ in ()).throw(module.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")))
    elif when == "manifest":
        monkeypatch.setattr(module, "_write_json", fail)
    else:
        monkeypatch.setattr(module.os, "fsync", fail)


@pytest.mark.parametrize("when", ["before", "tensors", "manifest", "fsync"])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    write(tmp_path / "step_1")
    with monkeypatch.context() as m:
        full_disk(m, when)
        for target in ("step_2", "step_1"):  # a new one, and one in the place of the old
            with pytest.raises(CheckpointError, match=r"no space left.*step_1, is untouched.*Free some space"):
                write(tmp_path / target, 2.0, keep_last=1)
    assert os.listdir(tmp_path) == ["step_1"]
    assert load_checkpoint(tmp_path / "step_1").meta == {"value": 1.0}
    write(tmp_path / "step_2", 2.0, keep_last=1)
    assert os.listdir(tmp_path) == ["step_2"]


def test_a_real_limit_on_file_size(tmp_path: Path) -> None:
    """The system itself refuses the write (a process limit stands for the disk)."""
    code = f"""
import resource, signal, torch
from nexrl_sdk.engine.checkpoint import save_checkpoint
from nexrl_sdk.types import CheckpointError
save_checkpoint({str(tmp_path / "step_1")!r}, {{"s": {{"a": torch.ones(10)}}}}, {{}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    save_checkpoint({str(tmp_path / "step_2")!r}, {{"s": {{"a": torch.ones(100000)}}}}, {{}})
except CheckpointError as e:
    print(e)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "step_2 could not be written" in out and os.listdir(tmp_path) == ["step_1"]


def test_work_of_killed_writers_is_cleaned_and_that_of_living_ones_is_not(tmp_path: Path) -> None:
    write(tmp_path / "step_1")
    dead = tmp_path / ".step_2.tmp-0123abcd"
    dead.mkdir()
    (dead / "state.safetensors").write_text("half")
    living = tmp_path / ".step_3.tmp-0123abcd"
    living.mkdir()
    fd = module._lock(living)
    assert fd is not None
    (tmp_path / "step_1").rename(tmp_path / ".step_1.old-0123abcd")  # killed between moving the old away and the new in
    (tmp_path / ".other").mkdir()
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".other", ".step_3.tmp-0123abcd", "step_1"]
    os.close(fd)
    write(tmp_path / "step_4")
    assert sorted(os.listdir(tmp_path)) == [".other", "step_1", "step_4"]
    assert load_checkpoint(tmp_path / "step_1").meta == {"value": 1.0}


KILLED = """
import sys, torch
from nexrl_sdk.engine.checkpoint import save_checkpoint
big = torch.ones(300_000)
for i in range(10_000):
    save_checkpoint(sys.argv[1] + "/step_%d" % (i % 3), {"s": {"a": big * i}}, {"i": i}, keep_last=2)
    print(i, flush=True)
"""


@pytest.mark.parametrize("delay", [0.003, 0.011, 0.017, 0.029])
def test_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path, delay: float) -> None:
    """The writer replaces and prunes all the time; whenever it is killed, the last one that it reported can be read, or a newer one."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = int(process.stdout.readline())
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        last = int(process.stdout.readline())
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    last = max([last, *(int(x) for x in process.stdout.read().split())])
    process.wait()
    assert latest_checkpoint(tmp_path) is not None
    found = {}
    for path in complete_checkpoints(tmp_path):
        c = load_checkpoint(path)
        assert (c.tensors["s"]["a"] == c.meta["i"]).all()
        found[c.meta["i"]] = path
    assert max(found) >= last
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_reader_beside_a_writer_never_sees_half(tmp_path: Path) -> None:
    stop, problems = threading.Event(), []
    write(tmp_path / "step_1")

    def read() -> None:
        while not stop.is_set():
            for path in complete_checkpoints(tmp_path):
                try:
                    c = load_checkpoint(path)
                except (CheckpointError, FileNotFoundError) as e:
                    if path.exists() and "step_1" in str(path):
                        problems.append(e)
                else:
                    if not (c.tensors["state"]["a"] == c.meta["value"]).all():
                        problems.append(c)

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(30):
        write(tmp_path / f"step_{2 + i}", float(i), keep_last=50)
    stop.set()
    thread.join()
    assert not problems and len(complete_checkpoints(tmp_path)) == 31


# -- the learner's state ---------------------------------------------------------------------------

KINDS = [{}, {"dtype": "bfloat16"}, {"lora": LoraConfig(rank=4, dropout=0.3)}]


def made(tiny: Tiny, kind: dict[str, Any]) -> Learner:
    return Learner(load_model(tiny("qwen2"), **kind))


def steps(learner: Learner, first: int, last: int) -> list[tuple[float, float]]:
    adapter = learner.model.default_adapter
    out = []
    for i in range(first, last):
        loss = learner.forward_backward(data(i), adapter=adapter).loss
        out.append((loss, learner.optim_step(AdamParams(1e-2, weight_decay=0.1, grad_clip_norm=1.0), adapter=adapter)["grad_norm"]))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_learner_goes_on_bit_for_bit(tiny: Tiny, tmp_path: Path, kind: dict[str, Any]) -> None:
    straight = made(tiny, kind)
    expected = steps(straight, 0, 6)
    first = made(tiny, kind)
    assert steps(first, 0, 3) == expected[:3]
    tensors, meta = first.state_dict()
    save_checkpoint(tmp_path / "step_3", {"state": tensors}, {"learner": meta})
    found = load_checkpoint(tmp_path / "step_3")
    second = made(tiny, kind)
    steps(second, 7, 9)  # whatever it did before is gone
    second.load_state_dict(found.tensors["state"], found.meta["learner"])
    for name, t in first.state_dict()[0].items():
        assert torch.equal(t, second.state_dict()[0][name]), name
    assert steps(second, 3, 6) == expected[3:]
    for name, t in straight.state_dict()[0].items():
        assert torch.equal(t, second.state_dict()[0][name]), name


def test_gradients_that_wait_for_a_step_are_part_of_the_state(tiny: Tiny, tmp_path: Path) -> None:
    one, two = made(tiny, {}), made(tiny, {})
    one.forward_backward(data(0))
    tensors, meta = one.state_dict()
    save_checkpoint(tmp_path / "c", {"s": tensors}, meta)
    found = load_checkpoint(tmp_path / "c")
    two.load_state_dict(found.tensors["s"], found.meta)
    for learner in (one, two):
        learner.forward_backward(data(1))
        learner.optim_step(AdamParams(1e-2))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict()[0].values(), two.state_dict()[0].values()))


def test_loading_bumps_the_generation_and_the_sampler_sees_it(tiny: Tiny) -> None:
    one, two = made(tiny, {}), made(tiny, {})
    steps(one, 0, 2)
    two.load_state_dict(*one.state_dict())
    assert two.model.generation == 1 and two.forward(data()).loss == one.forward(data()).loss


# -- export ----------------------------------------------------------------------------------------


def logits(module_: Any) -> torch.Tensor:
    with torch.no_grad():
        return module_(input_ids=torch.arange(2, 42)[None]).logits


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4), LoraConfig(rank=4, train_unembed=True)])
def test_transformers_loads_what_is_exported(tiny: Tiny, tmp_path: Path, family: str, lora: LoraConfig | None) -> None:
    from transformers import AutoModelForCausalLM

    learner = made_family(tiny, family, lora)
    model, tokenizer = learner.model, load_tokenizer(tiny(family))
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    folder = export_hf(model, tokenizer, tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info.get("mismatched_keys")
    with model.adapter(model.default_adapter):
        torch.testing.assert_close(logits(loaded), logits(model.module), rtol=1e-4, atol=1e-4)
    assert loaded.config.tie_word_embeddings == (tied and not (lora and lora.train_unembed)) and loaded.dtype == torch.float32
    assert load_tokenizer(folder).encode("hi there") == tokenizer.encode("hi there")
    before = logits(model.module)
    again = load_model(folder)
    torch.testing.assert_close(logits(again.module), logits(loaded))
    export_hf(model, tokenizer, tmp_path / "out")  # over what is there
    assert torch.equal(before, logits(model.module)) and os.listdir(tmp_path) == ["out"]


def made_family(tiny: Tiny, family: str, lora: LoraConfig | None) -> Learner:
    learner = Learner(load_model(tiny(family), lora=lora))
    steps(learner, 0, 3)
    return learner


def test_an_adapter_by_itself(tiny: Tiny, tmp_path: Path) -> None:
    learner = made_family(tiny, "qwen2", LoraConfig(rank=4))
    folder = export_hf(learner.model, None, tmp_path / "adapter", merge_adapter=False)
    again = load_model(tiny("qwen2"), adapter=folder)
    with again.adapter("default"), learner.model.adapter("default"):
        torch.testing.assert_close(logits(again.module), logits(learner.model.module))
    with pytest.raises(CheckpointError, match="no adapter"):
        export_hf(load_model(tiny("qwen2")), None, tmp_path / "x", merge_adapter=False)


def test_bfloat16_is_exported_as_it_is(tiny: Tiny, tmp_path: Path) -> None:
    model = load_model(tiny("qwen2"), dtype="bfloat16")
    again = load_model(export_hf(model, None, tmp_path / "m"))
    assert again.dtype == torch.bfloat16 and torch.equal(logits(again.module), logits(model.module))
