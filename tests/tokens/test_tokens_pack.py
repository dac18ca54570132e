"""Padding, packing and micro-batches against the definition, spelt out row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl_sdk.tokens.pack import compute_position_id_with_mask, micro_batches, pack_datums, pad_left, pad_right, padding_data
from nexrl_sdk.types import Batch, ConfigError, DataError, Datum

QUICK = settings(max_examples=150, deadline=None)
ROWS = st.lists(st.lists(st.integers(0, 99), max_size=7), max_size=6)


@QUICK
@given(lengths=st.lists(st.integers(0, 120), max_size=40), budget=st.integers(1, 150), rows=st.none() | st.integers(1, 5))
def test_micro_batches(lengths: list[int], budget: int, rows: int | None) -> None:
    groups = micro_batches(lengths, budget, max_rows=rows)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for g in groups:
        assert g and (sum(lengths[i] for i in g) <= budget or len(g) == 1 or sum(lengths[i] for i in g[1:]) == 0)
        assert rows is None or len(g) <= rows
        assert [lengths[i] for i in g] == sorted((lengths[i] for i in g), reverse=True)
    if rows is None:  # no two of them would fit together
        sums = sorted(sum(lengths[i] for i in g) for g in groups)
        assert len(sums) < 2 or sums[0] + sums[1] > budget
    assert groups == micro_batches(np.array(lengths, dtype=int), budget, max_rows=rows)


def test_micro_batches_use_few_groups() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.6, 2000).astype(int).clip(1, 356).tolist()
    assert len(micro_batches(lengths, 4096)) <= 1.01 * sum(lengths) / 4096 + 1


def test_micro_batches_refuse_nonsense() -> None:
    assert micro_batches([], 10) == []
    for budget, rows in ((0, None), (10, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            micro_batches([1], budget, max_rows=rows)


@QUICK
@given(rows=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=7), max_size=6), data=st.data())
def test_pack_and_split(rows: list[list[int]], data: st.DataObject) -> None:
    datums = [Datum(r, [x + 1 for x in r], {"weights": [0.5] * len(r), "logprobs": [-float(x) for x in r]}) for r in rows]
    packed = pack_datums(datums)
    assert packed.tokens.tolist() == [x for r in rows for x in r] and packed.targets.tolist() == [x + 1 for r in rows for x in r]
    assert packed.positions.tolist() == [i for r in rows for i in range(len(r))] and packed.seq_ids.tolist() == [i for i, r in enumerate(rows) for _ in r]
    assert packed.cu_seqlens.tolist() == [sum(map(len, rows[:i])) for i in range(len(rows) + 1)] and packed.cu_seqlens.dtype == torch.int32
    assert packed.lengths == [len(r) for r in rows]
    if rows:
        assert [(-t).int().tolist() for t in packed.split(packed.fields["logprobs"])] == rows
    assert all(t.dtype == torch.int64 for t in (packed.tokens, packed.targets, packed.positions, packed.seq_ids))
    assert packed.to("cpu").tokens.equal(packed.tokens)


def test_pack_refuses_unequal_fields() -> None:
    with pytest.raises(DataError, match=r"datum 1 has the fields \['logprobs'\], datum 0 has \['weights'\]"):
        pack_datums([Datum([1], [2], {"weights": [1]}), Datum([1], [2], {"logprobs": [1]})])


@QUICK
@given(rows=ROWS, length=st.none() | st.integers(0, 9))
def test_padding(rows: list[list[int]], length: int | None) -> None:
    width = max([len(r) for r in rows] + [length or 0])
    right, right_mask = pad_right(rows, 7, length)
    left, left_mask = pad_left(rows, 7, length)
    assert right.shape == left.shape == (len(rows), width)
    for i, r in enumerate(rows):
        gap = width - len(r)
        assert right[i].tolist() == r + [7] * gap and left[i].tolist() == [7] * gap + r
        assert right_mask[i].tolist() == [1] * len(r) + [0] * gap and left_mask[i].tolist() == [0] * gap + [1] * len(r)
        assert compute_position_id_with_mask(left_mask)[i].tolist() == [0] * gap + list(range(len(r)))
        assert compute_position_id_with_mask(right_mask.numpy())[i].tolist() == list(range(len(r))) + [max(0, len(r) - 1)] * gap


def test_padding_keeps_floats() -> None:
    padded, _ = pad_right([[0.5], [1, 2]])
    assert padded.dtype == torch.float32 and padded.tolist() == [[0.5, 0], [1, 2]]


def test_padding_data_of_token_ids() -> None:
    assert padding_data([5, 6], 4, pad_token_id=1).tolist() == [[5, 6, 1, 1]]
    assert padding_data(torch.tensor([[5, 6]]), max_length=3, pad_token_id=1, left_pad=True).tolist() == [[1, 5, 6]]
    assert padding_data([5, 6, 7], 2, truncation="left").tolist() == [[6, 7]] and padding_data([5, 6, 7], 2, truncation="right").tolist() == [[5, 6]]
    with pytest.raises(DataError, match="3 tokens are longer than max_length=2"):
        padding_data([5, 6, 7], 2)
    with pytest.raises(ConfigError, match="did you mean 'left'"):
        padding_data([5], 2, truncation="lefft")


def test_padding_data_of_a_batch() -> None:
    ragged = Batch({"input_ids": [[5, 6, 7], [8]], "loss_mask": [[0, 1, 1], [1]], "rollout_log_probs": [[0.0, -1.0, -2.0], [-3.0]], "names": ["a", "b"]}, {"rewards": [1.0, 0.0]})
    wide = padding_data(ragged, pad_token_id=9, max_length=4)
    assert wide.values["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]] and wide.values["rollout_log_probs"].tolist()[1] == [-3, 0, 0, 0]
    assert wide.values["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]] and wide.values["position_ids"].tolist() == [[0, 1, 2, 2], [0, 0, 0, 0]]
    assert wide.values["names"] == ["a", "b"] and wide.metadata["rewards"] == [1.0, 0.0]
    again = padding_data(wide, pad_token_id=9)
    assert all(torch.equal(again.values[k], v) for k, v in wide.values.items() if k != "names")
    left = padding_data(ragged, pad_token_id=9, left_pad=True)
    assert left.values["input_ids"].tolist() == [[5, 6, 7], [9, 9, 8]] and left.values["loss_mask"].tolist() == [[0, 1, 1], [0, 0, 1]]
    cut = padding_data(wide, max_length=2, truncation="right")
    assert cut.values["input_ids"].shape == (2, 2) == cut.values["loss_mask"].shape
