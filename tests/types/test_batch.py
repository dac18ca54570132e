"""Batch against the definition spelt out row by row, and the operations that must lose nothing."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl_sdk.types import Batch, DataError, Trajectory

QUICK = settings(max_examples=120, deadline=None)
F32 = st.floats(-20, 0, width=32)


@st.composite
def trajectories(draw: st.DrawFn, min_size: int = 0, sampled: bool = False) -> list[Trajectory]:
    """Trajectories of unequal lengths and keys; ids include 0, which also pads."""
    made = []
    for i in range(draw(st.integers(min_size, 6))):
        prompt, answer = draw(st.integers(0 if not sampled else 1, 5)), draw(st.integers(0 if not sampled else 1, 5))
        tokens = draw(st.lists(st.integers(0, 3), min_size=prompt + answer, max_size=prompt + answer))
        mask = [0] * prompt + [1] + draw(st.lists(st.integers(0, 1), min_size=answer - 1, max_size=answer - 1)) if answer else [0] * prompt
        t = Trajectory(tokens=tokens, loss_mask=mask, run_id=f"r{i}")
        if draw(st.booleans()):
            t["logprobs"] = draw(st.lists(F32, min_size=len(tokens), max_size=len(tokens)))
        for key, values in {"reward": F32, "group_id": st.text(max_size=2), "is_val": st.booleans(), "data": st.just({"a": [1]}), "weight_versions": st.just([3])}.items():
            if draw(st.booleans()):
                t[key] = draw(values)
        if tokens and draw(st.booleans()):
            t["extra_per_token"] = [float(x) for x in tokens]
        made.append(t)
    return made


@QUICK
@given(ts=trajectories())
def test_round_trip_is_exact(ts: list[Trajectory]) -> None:
    back = Batch.from_trajectories(ts, pad_token_id=0).to_trajectories()
    assert len(back) == len(ts)
    for t, b in zip(ts, back):
        for key, value in t.items():
            if key in ("logprobs", "extra_per_token") and not value:  # nothing per token of no tokens
                continue
            assert b[key] == value, key
        assert {k for k in b if k not in t} <= {"logprobs", "extra_per_token"} and all(not b[k] for k in b if k not in t)


@QUICK
@given(ts=trajectories(min_size=1), pad=st.integers(0, 9))
def test_layout_is_the_definition(ts: list[Trajectory], pad: int) -> None:
    values = Batch.from_trajectories(ts, pad_token_id=pad).values
    left = max(t.prompt_length for t in ts)
    width = left + max(t.num_tokens - t.prompt_length for t in ts)
    for i, t in enumerate(ts):
        before = left - t.prompt_length
        after = width - before - t.num_tokens
        assert values["input_ids"][i].tolist() == [pad] * before + t.tokens + [pad] * after
        assert values["attention_mask"][i].tolist() == [0] * before + [1] * t.num_tokens + [0] * after
        assert values["loss_mask"][i].tolist() == [0] * before + list(t.loss_mask) + [0] * after
        assert values["position_ids"][i].tolist() == [0] * before + list(range(t.num_tokens)) + [max(0, t.num_tokens - 1)] * after
        if "rollout_log_probs" in values:
            logprobs = list(t.logprobs) or [0.0] * t.num_tokens
            assert values["rollout_log_probs"][i].tolist() == [0.0] * before + logprobs + [0.0] * after
    assert all(values[k].dtype == torch.int64 for k in ("input_ids", "attention_mask", "position_ids", "loss_mask"))


def test_many_rows_cross_blocks() -> None:
    rng = np.random.default_rng(0)
    ts = []
    for i in range(1500):
        p, r = int(rng.integers(0, 9)), int(rng.integers(0, 9))
        ts.append(Trajectory(tokens=rng.integers(0, 9, p + r).tolist(), loss_mask=[0] * p + [1] * r, logprobs=rng.random(p + r, dtype=np.float32).tolist(), **({"late": i} if i > 1200 else {}), **({"early": i} if i < 100 else {})))
    batch = Batch.from_trajectories(ts)
    back = batch.to_trajectories()
    assert [b.tokens for b in back] == [t.tokens for t in ts] and [b.get("late") for b in back] == [t.get("late") for t in ts]
    assert batch.metadata["early"] == [i if i < 100 else None for i in range(1500)]
    assert all(b.get("logprobs", []) == t.logprobs for b, t in zip(back, ts))


def test_arrays_and_tensors_are_taken_as_lists_are() -> None:
    plain = Trajectory(tokens=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0.0, -0.5, -0.25], weights_of_mine=[0, 0.5, 1])
    arrays = Trajectory(tokens=np.array([1, 2, 3]), loss_mask=torch.tensor([0, 1, 1]), logprobs=np.array([0.0, -0.5, -0.25]), weights_of_mine=torch.tensor([0, 0.5, 1]))
    one, two = Batch.from_trajectories([plain, plain]).values, Batch.from_trajectories([arrays, plain]).values
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) and one[k].dtype == two[k].dtype for k in one)
    whole = Trajectory(tokens=[1, 2], loss_mask=[0, 1], mark=np.array([1, 2]))
    part = Trajectory(tokens=[1, 2], loss_mask=[0, 1], mark=np.array([0.5, 2]))
    assert Batch.from_trajectories([whole, part]).values["mark"].tolist() == [[1, 2], [0.5, 2]]  # no half cut off


def test_rewards_that_may_not_enter_a_baseline_are_nan() -> None:
    given = [Trajectory(tokens=[1], loss_mask=[1], reward=r, status=s) for r, s in ((1.0, "ok"), (None, "unscored"), (0.0, "failed"), (math.nan, "ok"), (True, "ok"), (0, "error"))]
    rewards = Batch.from_trajectories(given).metadata["rewards"]
    assert [None if math.isnan(r) else r for r in rewards] == [1.0, None, None, None, 1.0, None]
    assert [t.reward for t in Batch.from_trajectories(given).to_trajectories()] == [1.0, None, None, None, 1.0, None]


@pytest.mark.parametrize(("change", "why"), [({"loss_mask": [1]}, "trajectory 1: loss_mask has 1 entries for 2 tokens"), ({"logprobs": [0.0]}, "logprobs has 1 entries for 2 tokens"), ({"tokens": ["a", "b"]}, "whole numbers"), ({"input_ids": [1, 2]}, "would replace")])
def test_bad_trajectories(change: dict[str, Any], why: str) -> None:
    good, bad = (Trajectory(tokens=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0]) for _ in range(2))
    for key, value in change.items():
        bad[key] = value
    with pytest.raises(DataError, match=why):
        Batch.from_trajectories([good, bad])


@QUICK
@given(ts=trajectories(min_size=1), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_is_removed_and_no_token_with_it(ts: list[Trajectory], left: int, right: int) -> None:
    batch = Batch.from_trajectories(ts, pad_token_id=0)  # id 0 is also a token here
    wide = batch.pad(left, right)
    assert wide.values["input_ids"].shape[1] == batch.values["input_ids"].shape[1] + left + right
    tight = Batch.remove_redundant_right_padding(Batch.remove_redundant_left_padding(wide, pad_token_id=0), pad_token_id=0)
    assert [t.tokens for t in tight.to_trajectories()] == [t.tokens for t in ts]
    attended = tight.values["attention_mask"]
    assert not batch.values["attention_mask"].any() or (attended[:, 0].any() and attended[:, -1].any())
    assert {v.shape for v in tight.values.values()} == {attended.shape}
    assert torch.equal(tight.values["position_ids"] * attended, (attended.cumsum(1) - 1).clip(0) * attended)


def test_padding_removal_as_documented() -> None:
    batch = Batch.from_trajectories([Trajectory(tokens=[5, 6], loss_mask=[0, 1], logprobs=[0.0, -1.0])]).pad(2, 1)
    fields = ["input_ids", "attention_mask", "position_ids", "loss_mask"]
    cut = Batch.remove_redundant_left_padding(batch, pad_token_id=0, anchor_field="input_ids", fields=fields)
    assert {tuple(v.shape) for v in cut.values.values()} == {(1, 3)}  # what lies on the same columns goes along
    assert Batch.remove_redundant_left_padding(batch, max_strip_threshold=1).values["input_ids"].shape == (1, 4)
    bare = Batch({"input_ids": torch.tensor([[0, 0, 5, 0]]), "loss_mask": torch.tensor([[0, 1, 0, 0]])})
    assert Batch.remove_redundant_left_padding(bare, pad_token_id=0).values["input_ids"].tolist() == [[0, 5, 0]]  # a sampled pad token stays
    with pytest.raises(DataError, match="give one of them"):
        Batch.remove_redundant_left_padding(bare)
    with pytest.raises(DataError, match="did you mean 'loss_mask'"):
        Batch.remove_redundant_left_padding(batch, fields=["loss_maks"])


@QUICK
@given(ts=trajectories(min_size=1, sampled=True), n=st.integers(1, 5))
def test_rows_for_the_world_size_teach_nothing(ts: list[Trajectory], n: int) -> None:
    batch = Batch.from_trajectories(ts)
    batch.values["advantages"] = torch.ones(batch.values["input_ids"].shape)
    before = {k: v.clone() for k, v in batch.values.items()}
    even = batch.pad_to_world_size(n)
    assert len(even) % n == 0 and len(even) - len(batch) < n and all(torch.equal(batch.values[k], v) for k, v in before.items())
    extra = even.slice(len(batch))
    for key, value in extra.values.items():
        assert key in ("input_ids", "attention_mask", "position_ids") or not value.any()
    assert (extra.values["attention_mask"].sum(1) >= 1).all()  # a row of nothing but padding makes attention NaN
    assert all(math.isnan(r) for r in extra.metadata["rewards"])
    assert [d.tokens.tolist() for d in even.to_datums()] == [d.tokens.tolist() for d in batch.to_datums()]
    assert [t.tokens for t in even.to_trajectories()] == [t.tokens for t in ts]


@QUICK
@given(ts=trajectories(min_size=1), data=st.data())
def test_datums_are_those_of_the_trajectories(ts: list[Trajectory], data: st.DataObject) -> None:
    batch = Batch.from_trajectories(ts, pad_token_id=0)
    advantages = data.draw(st.lists(F32, min_size=len(ts), max_size=len(ts)))
    usable = [i for i, t in enumerate(ts) if any(t.loss_mask[1:])]
    datums = batch.to_datums(advantages=advantages)
    assert len(datums) == len(usable)
    complete = all("logprobs" in ts[i] for i, t in enumerate(ts) if any(t.loss_mask)) and "rollout_log_probs" in batch.values
    for datum, i in zip(datums, usable):
        expected = ts[i].to_datum(advantages=advantages[i])
        assert datum.tokens.tolist() == expected.tokens.tolist() and datum.targets.tolist() == expected.targets.tolist()
        for key in ("weights", "advantages", *(["logprobs"] if complete else [])):
            assert datum.fields[key].tolist() == expected.fields[key].tolist(), key
        assert ("logprobs" in datum.fields) == complete


def test_datum_fields_come_from_where_they_should() -> None:
    batch = Batch.from_trajectories([Trajectory(tokens=[5, 6, 7], loss_mask=[0, 1, 1], logprobs=[0.0, -1.0, -2.0], ref_logprobs=[0.0, -3.0, -4.0])])
    assert set(batch.to_datums()[0].fields) == {"weights", "logprobs", "rollout_logprobs", "ref_logprobs"}
    batch.values["old_log_probs"] = torch.tensor([[0.0, -5.0, -6.0]])
    batch.values["loss_weights"] = torch.tensor([[9.0, 0.5, 0.25]])
    batch.values["advantages"] = torch.tensor([2.0])
    fields = {k: v.tolist() for k, v in batch.to_datums(mine=np.array([[1, 2, 3]]))[0].fields.items()}
    assert fields == {"weights": [0.5, 0.25], "logprobs": [-5, -6], "rollout_logprobs": [-1, -2], "ref_logprobs": [-3, -4], "advantages": [2, 2], "mine": [2, 3]}
    batch.values["loss_weights"] = torch.ones(1, 3)  # weights of tokens that were not sampled count for nothing
    batch.values["loss_mask"] = torch.tensor([[0, 1, 0]])
    assert batch.to_datums()[0].fields["weights"].tolist() == [1, 0]
    with pytest.raises(DataError, match=r"advantages has shape \(2,\)"):
        batch.to_datums(advantages=[1.0, 2.0])
    del batch.values["loss_mask"]
    with pytest.raises(DataError, match="without loss_mask"):
        batch.to_datums()
    assert not batch.to_datums(skip_unsampled=False, loss_weights=None)[0].fields["weights"].any()


@QUICK
@given(ts=trajectories(min_size=1))
def test_scatter_puts_back_what_datums_gave(ts: list[Trajectory]) -> None:
    batch = Batch.from_trajectories(ts)
    datums = batch.to_datums(skip_unsampled=False)
    assert len(datums) == len(ts)
    placed = batch.scatter([d.targets.astype(np.float32) for d in datums])
    second = (batch.values["attention_mask"].cumsum(1) > 1) & batch.values["attention_mask"].bool()
    assert torch.equal(placed, torch.where(second, batch.values["input_ids"], 0).float())
    with pytest.raises(DataError, match="one array a row"):
        batch.scatter([np.zeros(99)] * len(ts))


@QUICK
@given(one=trajectories(), two=trajectories(), data=st.data())
def test_cat_select_slice(one: list[Trajectory], two: list[Trajectory], data: st.DataObject) -> None:
    ts = one + two
    both = Batch.cat([Batch.from_trajectories(one), Batch.from_trajectories(two)])
    whole = Batch.from_trajectories(ts)
    assert [dict(t) for t in both.to_trajectories()] == [dict(t) for t in whole.to_trajectories()]
    starts = {int(m.argmax()) for m in both.values["loss_mask"] if m.any()}
    assert len(starts) <= 1  # answers begin at one column
    if not ts:
        return
    index = data.draw(st.lists(st.integers(0, len(ts) - 1), max_size=5))
    assert [t.run_id for t in both.select(index).to_trajectories()] == [ts[i].run_id for i in index]
    assert [t.tokens for t in both.slice(1, 3).to_trajectories()] == [t.tokens for t in ts[1:3]]
    keep = data.draw(st.lists(st.booleans(), min_size=len(ts), max_size=len(ts)))
    assert len(both.select(keep)) == sum(keep) == both.select(torch.tensor(keep)).metadata["batch_size"]


def test_select_out_of_range() -> None:
    with pytest.raises(DataError, match="row 5 asked of a batch of 1"):
        Batch.from_trajectories([Trajectory(tokens=[1], loss_mask=[1])]).select([5])


@QUICK
@given(ts=trajectories())
def test_nextrainer_form(ts: list[Trajectory]) -> None:
    batch = Batch.from_trajectories(ts)
    sent = batch.to_nextrainer_batch()
    assert set(sent) == {"tensors", "values", "metadata"} and all(torch.is_tensor(v) for v in sent["tensors"].values())
    assert sent["metadata"]["batch_size"] == len(ts) and sent["metadata"]["global_token_num"] == [t.num_tokens for t in ts]
    assert sent["values"]["model_tag"] == "default"
    back = Batch.from_nextrainer_batch(sent)
    assert [dict(t) for t in back.to_trajectories()] == [dict(t) for t in batch.to_trajectories()]


def test_the_documents_ways_with_metadata() -> None:
    batch = Batch.from_trajectories([Trajectory(tokens=[1, 2], loss_mask=[0, 1], reward=r) for r in (0.0, 1.0)])
    rewards = batch.metadata["rewards"]
    mean, std = torch.mean(rewards), torch.std(rewards)
    assert torch.allclose((rewards - mean) / (std + 1e-8), torch.tensor([-0.7071, 0.7071]), atol=1e-4)
    batch.metadata["advantages"] = [reward * 0.5 for reward in rewards]
    assert float(torch.mean(batch.values["advantages"])) == 0.25 == float(torch.mean(batch.metadata["advantages"])) and "advantages" in batch.values
    assert [d.fields["advantages"].tolist() for d in batch.to_datums()] == [[0.0], [0.5]]
    batch.values["advantages"] = batch.values["advantages"][:, None] * batch.values["loss_mask"]
    assert batch.copy().values["advantages"].shape == (2, 2) == batch.slice(0, 2).values["advantages"].shape  # what was made of them stays
    assert isinstance(rewards, list) and rewards == [0.0, 1.0] and np.asarray(rewards).dtype == np.float64
    again = pickle.loads(pickle.dumps(batch))
    assert again.metadata == batch.metadata and torch.equal(again.values["advantages"], batch.values["advantages"])


def test_shapes_are_checked_and_shown() -> None:
    with pytest.raises(DataError, match=r"batch of 2 rows cannot hold \{'advantages': \(3,\)\}"):
        Batch({"input_ids": torch.zeros(2, 4), "advantages": torch.zeros(3)})
    text = repr(Batch.from_trajectories([Trajectory(tokens=[1], loss_mask=[1])]))
    assert text.startswith("Batch(1 rows; input_ids int64 [1, 1]") and len(Batch()) == 0


def test_types_import_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import nexrl_sdk.types as t; t.Trajectory(tokens=[1], loss_mask=[1]).to_datum()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
