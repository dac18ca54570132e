"""Messages held against safetensors' own reader, numpy and hostile bytes."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from nexrl_sdk.types import DataError, Datum
from nexrl_sdk.wire import DTYPES, Parts, WireError, data_to_tensor, decode, encode, from_json, pack, split_for_requests, tensor_to_data, to_json, unpack


def one_of_each() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, an empty one, a scalar, and one that is not contiguous."""
    g = torch.Generator().manual_seed(0)
    out = {name: (torch.randn(3, 5, generator=g) * 50).to(kind) for name, kind in DTYPES.items()}
    return out | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(7), "strided": torch.arange(12).reshape(3, 4).T, "odd": torch.ones(7, dtype=torch.int64)}


def test_every_dtype_comes_back_bit_for_bit() -> None:
    sent = one_of_each()
    back, meta = decode(encode(sent, {"a": [1, None, "é"], "nan": float("nan")}))
    assert list(back) == list(sent)
    for name, t in sent.items():
        assert back[name].dtype == t.dtype and back[name].shape == t.shape, name
        assert torch.equal(back[name].contiguous().reshape(-1).view(torch.uint8), t.contiguous().reshape(-1).view(torch.uint8)), name
    assert meta["a"] == [1, None, "é"] and meta["nan"] != meta["nan"]


@pytest.mark.parametrize(("low", "high", "bytes_each"), [(0, 1, 1), (-5, 300, 2), (0, 151_936, 4), (0, 1 << 40, 8), (-(1 << 31), 0, 4), (-1, 1, 2)])
def test_whole_numbers_travel_narrow_and_arrive_wide(low: int, high: int, bytes_each: int) -> None:
    t = torch.tensor([low, high] * 50_000)
    body = encode({"t": t})
    assert len(body) - 400 < 100_000 * bytes_each <= len(body)
    assert torch.equal(decode(body)[0]["t"], t) and decode(body)[0]["t"].dtype == torch.int64


def test_safetensors_reads_ours_and_we_read_theirs() -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor([True, False, True])}
    theirs = load(encode(tensors, {"x": 1}))
    ours, meta = decode(save(tensors, metadata={"format": "pt"}))
    assert meta == {} and all(torch.equal(theirs[k], v) and torch.equal(ours[k], v) for k, v in tensors.items())


def test_each_tensor_lies_where_its_size_divides() -> None:
    body = encode({"mask": torch.ones(3, dtype=torch.int64), "wide": torch.randn(5).double(), "ids": torch.full((3,), 70_000)})
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    for name, width in (("mask", 1), ("wide", 8), ("ids", 4)):
        assert (8 + size + header[name]["data_offsets"][0]) % width == 0


scalars = st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False) | st.text(max_size=8)
arrays = st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.bool_]).flatmap(lambda d: st.lists(st.integers(0, 1), max_size=5).map(lambda v: np.array(v, d)))
values = st.recursive(scalars | arrays, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=5), x, max_size=4), max_leaves=12)


def same(a: Any, b: Any) -> bool:
    """Whether a value came back, arrays as tensors."""
    if isinstance(a, np.ndarray):
        got = b.numpy() if isinstance(b, torch.Tensor) else b
        return bool(got.dtype == a.dtype and np.array_equal(got, a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b and type(a) is type(b))


@settings(max_examples=80, deadline=None)
@given(values)
def test_any_value_comes_back_by_both_forms(value: Any) -> None:
    assert same(value, unpack(pack(value)))
    assert same(value, from_json(json.loads(json.dumps(to_json(value)))))


def make_datums() -> list[Datum]:
    return [Datum([1, 2, 3], [2, 3, 4], {"weights": [0, 1, 1], "logprobs": [0, -0.5, -1.25]}), Datum([5], [6], {"weights": [0.5]}), Datum([7, 8], [8, 9])]


@pytest.mark.parametrize("form", [lambda v: unpack(pack(v)), lambda v: from_json(json.loads(json.dumps(to_json(v))))])
def test_datums_come_back(form: Any) -> None:
    sent = make_datums()
    back = form({"datums": sent})["datums"]
    for a, b in zip(sent, back, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.targets, b.targets) and a.fields.keys() == b.fields.keys()
        assert all(np.array_equal(a.fields[k], b.fields[k]) and a.fields[k].dtype == b.fields[k].dtype for k in a.fields)
    assert form({"datums": []})["datums"] == []


def test_the_documents_form_of_a_tensor() -> None:
    raw = np.array([[1.5, -2], [0.25, 3]], np.float32)
    data = tensor_to_data(raw)
    assert data == {"data": base64.b64encode(raw.tobytes()).decode(), "dtype": "float32", "shape": [2, 2]}
    assert np.array_equal(data_to_tensor({**data, "dtype": "torch.float32"}).numpy(), raw)


class Bomb:
    """What unpickling would run."""

    def __reduce__(self) -> Any:
        return sys.exit, ("unpickled",)


def pickled() -> bytes:
    return pickle.dumps(Bomb())


def saved_by_torch() -> bytes:
    out = io.BytesIO()
    torch.save({"a": Bomb()}, out)
    return out.getvalue()


def headed(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (1,), at: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


HOSTILE = {
    "nothing": b"", "short": b"\x01\x00", "pickle": pickled(), "torch.save": saved_by_torch(), "text": b"hello, world" * 10,
    "endless header": (1 << 62).to_bytes(8, "little") + b"{}", "header beyond the end": (500).to_bytes(8, "little") + b"{}", "deep": headed(b"[" * 200_000),
    "a list": headed([1, 2]), "not JSON": headed(b"{'a': 1}"), "not UTF-8": headed(b'{"\xff": 1}'), "no entry": headed({"a": 3}), "metadata is text": headed({"__metadata__": "x"}),
    "record is a list": headed({"__metadata__": {"nexrl": "[]"}}), "record is damaged": headed({"__metadata__": {"nexrl": "{"}}), "record is no text": headed({"__metadata__": {"nexrl": 4}}),
    "beyond the end": headed({"a": entry(shape=(9,), at=(0, 36))}, b"1234"), "left over": headed({"a": entry()}, b"12345"), "overlap": headed({"a": entry(), "b": entry()}, b"1234"),
    "a hole": headed({"a": entry(at=(4, 8))}, b"12345678"), "negative": headed({"a": entry(shape=(-1, -1))}, b"1234"), "wrong size": headed({"a": entry(shape=(2,))}, b"1234"),
    "dtype": headed({"a": entry("F8_E4M3", at=(0, 1))}, b"1"), "offsets are text": headed({"a": entry(at=("x", "y"))}, b"1234"), "one offset": headed({"a": entry(at=(0,))}, b"1234"),
    "huge and empty": headed({"a": entry(shape=(0, 1 << 63), at=(0, 0))}), "many dimensions": headed({"a": entry(shape=[1 << 40] * 5 + [0], at=(0, 0))}),
    "wide of nothing": headed({"__metadata__": {"nexrl": json.dumps({"wide": {"b": "int64"}})}}), "wide dtype": headed({"a": entry(), "__metadata__": {"nexrl": json.dumps({"wide": {"a": "object"}})}}, b"1234"),
    "wide is a list": headed({"a": entry(), "__metadata__": {"nexrl": json.dumps({"wide": {"a": ["int64"]}})}}, b"1234"), "wide is a mapping": headed({"a": entry(), "__metadata__": {"nexrl": json.dumps({"wide": {"a": {}}})}}, b"1234"),
    "endless shape": headed({"a": entry(shape=(float("inf"),))}, b"1234"), "endless offset": headed({"a": entry(at=(0, float("inf")))}, b"1234"), "half a dimension": headed({"a": entry(shape=(1.5,))}, b"1234"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_other_bytes_are_refused(name: str) -> None:
    with pytest.raises(WireError):
        decode(HOSTILE[name])
    with pytest.raises(WireError):
        unpack(HOSTILE[name])


def test_a_refusal_is_a_data_error() -> None:
    assert issubclass(WireError, DataError)


@pytest.mark.parametrize("value", [{"$tensor": "9"}, {"$tensor": [1]}, {"$datums": "0"}, {"$datums": {}}, {"$arrays": "0"}])
def test_marks_of_nothing_are_refused(value: Any) -> None:
    with pytest.raises(WireError):
        unpack(encode({}, {"value": value}))
    with pytest.raises(WireError, match="holds no value"):
        unpack(encode({}, {}))


def test_random_damage_is_noticed_or_harmless() -> None:
    body = bytearray(pack({"datums": make_datums(), "x": torch.arange(5)}))
    rng = random.Random(0)
    for _ in range(3000):
        changed = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = changed[: rng.randrange(len(changed))] if rng.random() < 0.3 else changed
        try:
            unpack(cut)
        except DataError:
            pass


BAD_DATA: list[Any] = [
    {"data": base64.b64encode(pickled()).decode(), "dtype": "float32", "shape": [1]}, {"data": "****", "dtype": "float32", "shape": [1]}, {"data": 5, "dtype": "float32", "shape": [1]},
    {"data": "", "dtype": "float32", "shape": [float("inf")]}, {"data": "AAAAAA==", "dtype": "float32", "shape": ["1"]}, {"data": "AAAAAA==", "dtype": "float32", "shape": [1.0]}, {"data": "é", "dtype": "float32", "shape": [1]},
    {"data": "AAAA", "dtype": "object", "shape": [1]}, {"data": "AAAAAA==", "dtype": "float32", "shape": [-1]}, {"data": "", "dtype": "float32", "shape": [0, 1 << 63]}, {"data": "", "dtype": "float32", "shape": None},
]  # fmt: skip


@pytest.mark.parametrize("data", BAD_DATA)
def test_bad_tensors_in_json_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        from_json({"a": [data]})


@pytest.mark.parametrize(("changed", "says"), [
    ({"tokens": [10**30]}, "no datum"), ({"tokens": [1.7]}, "tokens are whole numbers, not 1.7"), ({"tokens": ["1"]}, "not '1'"), ({"tokens": [True]}, "not True"), ({"targets": [None]}, "targets are whole numbers, not None"), ({"tokens": [[1]]}, r"not \[1\]"),
    ({"tokens": 5}, "no datum"), ({"tokens": [float("inf")]}, "not inf"), ({"fields": {"weights": [10**400]}}, "the field weights"), ({"fields": {"weights": ["1"]}}, "the field weights"), ({"fields": {"weights": [None]}}, "the field weights"), ({"fields": [1]}, "no datum"),
])  # fmt: skip
def test_bad_datums_in_json_are_refused(changed: dict[str, Any], says: str) -> None:
    whole = {"tokens": [1], "targets": [2.0], "fields": {"weights": [0.5]}}
    assert from_json(whole).targets.tolist() == [2]
    with pytest.raises(WireError, match=says):
        from_json({"datums": [{**whole, **changed}]})


@pytest.mark.parametrize("changed", [{"lengths": [float("inf")]}, {"lengths": [1.0]}, {"lengths": [float("nan")]}, {"tokens": [1.5]}, {"targets": [True]}, {"tokens": [1, 2]}, {"lengths": [-1]}])
def test_bad_datums_in_tensors_are_refused(changed: dict[str, list[Any]]) -> None:
    whole = {"lengths": [1], "tokens": [1], "targets": [2]} | changed
    with pytest.raises(WireError, match="no datums"):
        unpack(encode({f"0/{k}": torch.tensor(v) for k, v in whole.items()}, {"value": {"$datums": "0"}}))
    if "lengths" in changed:
        with pytest.raises(WireError):
            unpack(encode({"0/lengths": torch.tensor(changed["lengths"]), "0/values": torch.ones(1)}, {"value": {"$arrays": "0"}}))


def test_a_pickle_in_json_is_called_one() -> None:
    with pytest.raises(WireError, match="pickle, which is never read"):
        data_to_tensor(BAD_DATA[0])
    with pytest.raises(WireError, match="float16"):
        data_to_tensor({"data": "AAA=", "dtype": "float61", "shape": [1]})


@pytest.mark.parametrize("value", [object(), {"a": {1j}}, np.array([object()]), np.array(["x"]), torch.zeros(2, dtype=torch.complex64)])
def test_what_cannot_be_sent_says_so(value: Any) -> None:
    with pytest.raises(WireError):
        pack({"x": value})


def test_what_json_has_no_word_for() -> None:
    sent = {"f": np.float32(0.5), "i": np.int64(3), "set": {4}, "t": (1, 2)}
    assert unpack(pack(sent)) == {"f": 0.5, "i": 3, "set": [4], "t": [1, 2]}


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=400), st.integers(1, 90), st.randoms())
def test_parts_in_any_order_and_twice(body: bytes, size: int, rng: Any) -> None:
    pieces = split_for_requests(body, size)
    if len(body) <= size:
        assert pieces == [({}, body)]
        return
    assert max(len(p) for _, p in pieces) <= size
    rng.shuffle(pieces)
    parts = Parts()
    for headers, piece in [*pieces[:-1], *pieces[: len(pieces) // 2]]:
        assert parts.add(headers["x-part"], piece) is None
    assert parts.add(pieces[-1][0]["x-part"], pieces[-1][1]) == body


def test_parts_that_were_given_up_make_room() -> None:
    parts = Parts(limit=100, largest=60)
    for i in range(50):
        assert parts.add(f"left{i} 0 2", b"x" * 30) is None
    assert parts.add("new 0 2", b"a" * 30) is None and parts.add("new 1 2", b"b" * 30) == b"a" * 30 + b"b" * 30
    assert sum(u.size for u in parts._open.values()) <= 100 and parts._held >= 0
    parts.add("large 0 3", b"x" * 40)
    with pytest.raises(WireError, match="60 bytes in all its parts"):
        parts.add("large 1 3", b"x" * 40)


def test_parts_that_disagree_are_refused_and_empty_ones_make_room() -> None:
    parts = Parts(limit=1000)
    assert parts.add("q 5 10", b"x") is None
    with pytest.raises(WireError, match="said that there are 10"):
        parts.add("q 0 2", b"x")
    for i in range(50):
        assert parts.add(f"empty{i} 0 2", b"") is None
    assert len(parts._open) < 10 and parts.add("empty49 1 2", b"end") == b"end"
    assert parts.add("twice 0 2", b"a") is None and parts.add("twice 0 2", b"a") is None and parts.add("twice 1 2", b"b") == b"ab"


@pytest.mark.parametrize("mark", ["", "a b c", "a 1 1", "a -1 2", "a 0 1000000000", f"{'a' * 65} 0 1", f"a 0 {'9' * 5000}", "a 0 2 3"])
def test_bad_part_marks_are_refused(mark: str) -> None:
    with pytest.raises(WireError):
        Parts().add(mark, b"x")
