"""Shared prefixes against a dictionary of prefixes, and micro-batches that hold every datum once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl_sdk.engine.layout import lay_out, layouts, sorted_sequences, split_by_budget
from nexrl_sdk.types import Datum

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8)


def datums(rows: list[list[int]]) -> list[Datum]:
    return [Datum(r, [*r[1:], (sum(r) + i) % 3], {"weights": np.ones(len(r))}) for i, r in enumerate(rows)]


@settings(max_examples=200, deadline=None)
@given(sequences)
def test_each_prefix_is_there_once_and_every_token_finds_its_own(rows: list[list[int]]) -> None:
    data = datums(rows)
    order = sorted_sequences([d.tokens for d in data])
    data = [data[i] for i in order]
    one = lay_out(data, order, vocab=3)
    prefixes = {tuple(d.tokens[: t + 1].tolist()) for d in data for t in range(len(d))}
    shared = one.pairs is not None
    assert len(one.tokens) == (len(prefixes) if shared else sum(map(len, data)))
    assert shared == (len(prefixes) <= 0.9 * sum(map(len, data)))
    # walking attention's rows gives each sequence back, token by token and position by position
    seen: dict[int, list[tuple[int, int]]] = {}
    at, covered = 0, set()
    for index, n, length in one.rows.groups:
        index_NT = (np.arange(n * length) + at if index is None else index.numpy()).reshape(n, length)
        for r in range(n):
            seen.setdefault(len(seen), [(int(one.tokens[j]), int(one.positions[j])) for j in index_NT[r]])
        at += n * length
    found = sorted([[t for t, _ in row] for row in seen.values()])
    for d in data:
        assert any(row[: len(d)] == d.tokens.tolist() for row in found)
    for row in seen.values():
        real = [p for k, (_, p) in enumerate(row) if p == k]
        assert real == list(range(len(real)))
    if one.rows.inverse is not None:
        flat = np.concatenate([(np.arange(n * t) if i is None else i.numpy()) for i, n, t in one.rows.groups])
        assert (flat[one.rows.inverse.numpy()] == np.arange(len(one.tokens))).all()
        covered.update(one.rows.inverse.tolist())
    if shared:
        node, target, which = (x.numpy() for x in one.pairs)
        assert (target[which] == one.packed.targets.numpy()).all()
        assert (one.tokens.numpy()[node[which]] == one.packed.tokens.numpy()).all()
        assert (one.positions.numpy()[node[which]] == one.packed.positions.numpy()).all()
        assert len(set(zip(node.tolist(), target.tolist()))) == len(node)


@settings(max_examples=200, deadline=None)
@given(sequences, st.integers(1, 20), st.booleans())
def test_micro_batches_hold_every_datum_once_within_the_budget(rows: list[list[int]], budget: int, share: bool) -> None:
    data = datums(rows)
    groups = split_by_budget(data, budget, share)
    assert sorted(i for g in groups for i in g) == list(range(len(data)))
    for g in groups:
        prefixes = {tuple(rows[i][: t + 1]) for i in g for t in range(len(rows[i]))}
        assert len(g) == 1 or (len(prefixes) if share else sum(len(rows[i]) for i in g)) <= budget


def test_a_group_stays_together() -> None:
    prompts = [[i, 5, 6, 7] for i in range(4)]
    data = [Datum([*p, j, j], [*p[1:], j, j, 1], {}) for j in range(8) for p in prompts]
    made = list(layouts(data, 20, vocab=10))
    assert len(made) == 4 and all(len({data[i].tokens[0] for i in m.members}) == 1 for m in made)
    assert all(len(m.tokens) == 4 + 8 * 2 for m in made)
