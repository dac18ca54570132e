"""Rows from every source, their mistakes, and the stream's order."""

from __future__ import annotations

import datetime
import json
import random
import threading

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st

from nexrl_sdk.rollout.data import DataStream, load_rows
from nexrl_sdk.types import ConfigError, DataError

ROWS = [
    {"prompt": "1+1=\n", "answer": 2, "tags": ["x", "y"], "messages": [{"role": "user", "content": "é✓"}], "score": 0.1, "none": None},
    {"prompt": "2+2=", "answer": 4, "tags": [], "messages": [{"role": "user", "content": "<eos>"}], "score": 1 / 3, "none": None},
    {"prompt": "2+2=", "answer": 4, "tags": [], "messages": [{"role": "user", "content": "<eos>"}], "score": 1 / 3, "none": None},
]


def write(path, rows=ROWS):
    match path.suffix:
        case ".jsonl" | ".ndjson":
            path.write_text("\n\n".join(json.dumps(r) for r in rows) + "\n")
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".parquet":
            pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.parquet"])
def test_files_give_the_same_rows_and_keep_duplicates(tmp_path, name):
    path = write(tmp_path / name)
    assert load_rows(path) == load_rows(str(path)) == load_rows(name, base_dir=tmp_path) == ROWS
    assert load_rows([path, path]) == ROWS * 2 and load_rows(str(tmp_path / "a.*")) == ROWS


def test_objects_give_the_same_rows(tmp_path):
    flat = [{"prompt": r["prompt"], "answer": r["answer"]} for r in ROWS]
    table = pa.Table.from_pylist(flat)
    import datasets

    for source in (flat, tuple(flat), iter(flat), pd.DataFrame(flat), pl.DataFrame(flat), pl.LazyFrame(flat), table, datasets.Dataset.from_list(flat), lambda: flat, lambda: pd.DataFrame(flat)):
        assert load_rows(source) == flat
    copied = load_rows(flat)
    copied[0]["prompt"] = "changed"
    assert flat[0]["prompt"] == "1+1=\n"


def test_json_may_hold_the_list_under_one_name(tmp_path):
    (tmp_path / "a.json").write_text('{"data": [{"a": 1}]}')
    assert load_rows(tmp_path / "a.json") == [{"a": 1}]


def test_csv_keeps_text_as_it_stands(tmp_path):
    (tmp_path / "a.csv").write_bytes('\ufeffprompt,answer\r\n"a ""b"",\r\nc\u2028",007\r\n\r\nx\u2028y,\r\n'.encode())
    assert load_rows(tmp_path / "a.csv") == [{"prompt": 'a "b",\r\nc\u2028', "answer": "007"}, {"prompt": "x\u2028y", "answer": ""}]
    (tmp_path / "long.csv").write_text("prompt\n" + "x" * 300_000 + "\n")
    assert len(load_rows(tmp_path / "long.csv")[0]["prompt"]) == 300_000


def test_functions_get_what_they_name(tmp_path):
    (tmp_path / "task.py").write_text("def rows(split=None, base_dir=None):\n    return [{'split': split, 'here': str(base_dir)}]\n\n\nROWS = [{'a': 1}]\n\n\ndef nothing():\n    return None\n")
    assert load_rows("task.py:rows", base_dir=tmp_path, split="test") == [{"split": "test", "here": str(tmp_path)}]
    assert load_rows("task.py:ROWS", base_dir=tmp_path) == [{"a": 1}]
    with pytest.raises(DataError, match="rows cannot be read from NoneType None"):
        load_rows("task.py:nothing", base_dir=tmp_path)
    with pytest.raises(DataError, match="name='x' is for datasets on the Hub"):
        load_rows("task.py:rows", base_dir=tmp_path, name="x")


def test_the_hub_call_on_a_local_folder_of_the_same_shape(tmp_path, monkeypatch):
    """datasets.load_dataset resolves org/name and a folder alike; here it is gsm8k's shape, two splits in one configuration."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "gsm8k" / "main"
    folder.mkdir(parents=True)
    for split, n in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {i}?", "answer": f"because\n#### {i}"} for i in range(n)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    (tmp_path / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n"
    )
    assert [r["question"] for r in load_rows("hf:gsm8k", name="main", split="test", base_dir=tmp_path)] == ["test 0?", "test 1?"]
    assert len(load_rows({"hub": str(tmp_path / "gsm8k"), "name": "main", "split": "train"})) == 3
    assert len(load_rows(tmp_path / "gsm8k", name="main", split="train[:2]")) == 2
    with pytest.raises(DataError, match=r"several splits \(train, test\): name one with split="):
        load_rows("hf:gsm8k", name="main", base_dir=tmp_path)
    with pytest.raises(DataError, match="'gsm8k', name='mian', split='test' cannot be loaded"):
        load_rows("hf:gsm8k", name="mian", split="test", base_dir=tmp_path)
    with pytest.raises(DataError, match="cannot be loaded"):
        load_rows("hf:no-such-org-here/nothing", split="train")


@pytest.mark.parametrize(
    "name,content,expected",
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": }\n', "a.jsonl, line 3, column 7: not valid JSON: Expecting value"),
        ("a.jsonl", '{"a": 1}\n[1, 2]\n', r"a.jsonl, line 2: a row must be an object of column names and values, not list \[1, 2\]"),
        ("a.jsonl", '{"a": 1}\n{"a": "x', "line 2, column 7: not valid JSON: Unterminated string"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', "a file with one object a line must end in .jsonl"),
        ("a.json", '{"a": 1, "b": 2}', "must hold a list of objects, not dict"),
        ("a.json", '[{"a": 1}, 7]', "row 1: a row must be an object"),
        ("a.csv", "a,b\n1,2\n3\n", "a.csv, line 3: 1 values for 2 columns"),
        ("a.csv", "a,a\n1,2\n", "two columns have the same name"),
        ("a.csv", 'a,b\n1,"2\n', "a.csv, line 2: unexpected end of data"),
        ("a.jsonl", "", "a.jsonl has no rows"),
        ("a.csv", "a,b\n", "a.csv has no rows"),
        ("a.json", "[]", "a.json has no rows"),
        ("a.jsonl", b"\xff\xfe{}", "is not UTF-8 text"),
        ("a.parquet", b"PAR1 nonsense", "is not a parquet file that can be read"),
        ("a.xlsx", "x", r"rows cannot be read from .xlsx \(valid: .csv, .json, .jsonl, .ndjson, .parquet\)"),
        ("a", "x", "rows cannot be read from a file without an ending"),
    ],
)
def test_bad_files_are_named_to_the_line(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=expected):
        load_rows(path)


def test_bad_sources_are_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "task.py").write_text("def rows():\n    return []\n")
    for source, expected in {
        "trian.jsonl": "trian.jsonl does not exist; did you mean 'train.jsonl'?",
        "openai/gsm8k": "a dataset on the Hub is written 'hf:",
        "*.parquet": r"no file matches .*\*.parquet",
        "task.py:rows": "task.py:rows has no rows",
        "task.py:row": "did you mean 'rows'",
    }.items():
        with pytest.raises((DataError, ConfigError), match=expected.replace("?", r"\?")):
            load_rows(source, base_dir=tmp_path)
    for source, expected in ((["a", {"b": 1}], "row 0: a row must be a dictionary"), ([], "the list has no rows"), (7, "rows cannot be read from int 7"), ({"prompt": "x"}, "needs 'hub'"), (pd.DataFrame(), "has no rows"), (b"x", "from bytes")):
        with pytest.raises(DataError, match=expected):
            load_rows(source)
    with pytest.raises(DataError, match="split='train' is for datasets on the Hub; the file"):
        load_rows(tmp_path / "train.jsonl", split="train")


def test_missing_columns_are_named_with_the_nearest():
    with pytest.raises(DataError, match=r"the list has no column 'prompt'; did you mean 'promt'\?"):
        load_rows([{"promt": "a"}, {"promt": "b"}], columns=["prompt"])
    with pytest.raises(DataError, match="the list, row 1, has no column 'answer'"):
        load_rows([{"prompt": "a", "answer": 1}, {"prompt": "b"}], columns=["prompt", "answer"])


def items(n):
    return [{"prompt": str(i)} for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(-5, 2**70), shuffle=st.booleans(), epochs=st.none() | st.integers(1, 3), takes=st.lists(st.integers(1, 9), max_size=8), cut=st.integers(0, 8))
def test_stream_against_a_plain_list_and_resumed_anywhere(n, seed, shuffle, epochs, takes, cut):
    stream = DataStream(items(n), shuffle=shuffle, seed=seed, epochs=epochs)
    whole = DataStream(items(n), shuffle=shuffle, seed=seed, epochs=epochs)
    expected = [(e, i) for e in range(epochs or 80) for i in whole.order(e)]
    got = []
    for k, take in enumerate(takes):
        if k == cut:
            state = json.loads(json.dumps(stream.state_dict()))
            stream = DataStream(items(n), shuffle=shuffle, seed=seed, epochs=epochs)
            stream.load_state_dict(state)
        got += stream.next(take)
        assert stream.remaining == (None if epochs is None else len(expected) - len(got))
    assert [(i.epoch, i.index) for i in got] == expected[: sum(takes)][: len(got)]
    assert len(got) == min(sum(takes), n * epochs if epochs else sum(takes))
    assert all(i.row == {"prompt": str(i.index)} for i in got)


def test_every_epoch_has_every_row_once_in_another_order():
    stream = DataStream(items(100), seed=3)
    orders = [tuple(i.index for i in stream.next(100)) for _ in range(4)]
    assert all(sorted(o) == list(range(100)) for o in orders) and len(set(orders)) == 4
    again = DataStream(items(100), seed=3)
    again.epoch = 2
    assert tuple(i.index for i in again.next(100)) == orders[2], "an epoch's order needs no earlier one"
    assert tuple(DataStream(items(100), seed=4).order(0)) != orders[0]
    assert [i.index for i in DataStream(items(5), shuffle=False, epochs=1)] == [0, 1, 2, 3, 4]


def test_global_random_state_is_neither_read_nor_changed():
    random.seed(1)
    before = random.getstate()
    first = [i.index for i in DataStream(items(50), seed=0).next(50)]
    assert random.getstate() == before
    random.seed(2)
    assert [i.index for i in DataStream(items(50), seed=0).next(50)] == first


def test_a_stream_refuses_other_data():
    state = DataStream(items(9), seed=1).state_dict()
    other = items(9)
    other[4]["prompt"] = "x"
    for stream, expected in ((DataStream(items(8), seed=1), "the rows changed"), (DataStream(other, seed=1), "the rows changed"), (DataStream(items(9), seed=2), "the seed changed from 1 to 2"), (DataStream(items(9), seed=1, shuffle=False), "shuffle changed")):
        with pytest.raises(DataError, match=expected):
            stream.load_state_dict(state)
    with pytest.raises(DataError, match="at least one row"):
        DataStream([])
    with pytest.raises(ConfigError, match="epochs must be at least 1"):
        DataStream(items(1), epochs=0)
    with pytest.raises(ConfigError, match="at least 1 item"):
        DataStream(items(1)).next(0)
    odd = DataStream([{"when": datetime.date(2026, 1, 1), "raw": b"x", 3: object()}])
    assert odd.digest() == odd.digest()


def test_threads_share_a_stream_without_loss():
    stream, got, lock = DataStream(items(50), seed=0, epochs=4), [], threading.Lock()

    def work():
        while batch := stream.next(3):
            with lock:
                got.extend((i.epoch, i.index) for i in batch)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(got) == [(e, i) for e in range(4) for i in range(50)]
