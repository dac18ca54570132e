"""Journal and ledger: exact, whole after a kill at any byte, and bounded."""

from __future__ import annotations

import json
import threading

import pytest

from nexrl_sdk import Recipe, Run
from nexrl_sdk.run.journal import Journal
from nexrl_sdk.types import RunFolderError, Trajectory


def group(key, version=0, n=2):
    return [Trajectory(tokens=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0.0, -1 / 3, -0.1], group_id=key, run_id=f"{key}/{j}", weight_versions=[version], reward=float("nan"), data={"x": "\ud800 é\n"}) for j in range(n)]


def test_cut_anywhere_it_gives_the_whole_entries(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(["0:1", "0:2"], group("0:1") + group("0:2", 3))
    journal.append(["0:4"], group("0:4", 1))
    whole = journal.path.read_bytes()
    first = whole.index(b"\n") + 1
    assert [(e.keys, e.newest, sorted(e.groups)) for e in journal.read()] == [(("0:1", "0:2"), 3, ["0:1", "0:2"]), (("0:4",), 1, ["0:4"])]
    t = journal.read()[0].groups["0:2"][1]
    assert t.logprobs == [0.0, -1 / 3, -0.1] and t.weight_versions == [3] and t.data == {"x": "\ud800 é\n"} and t.reward != t.reward
    for cut in [*range(0, 60), *range(first - 5, first + 60), *range(len(whole) - 5, len(whole))]:
        journal.path.write_bytes(whole[:cut])
        assert len(journal.read()) == (cut >= first) + (cut >= len(whole))
        torn = Journal(journal.path)
        torn.append(["0:8"], group("0:8"))
        assert torn.read()[-1].keys == ("0:8",), "a torn line does not spoil the next"
        torn.keep({"0:1", "0:4"})
        assert len(journal.read()) == (cut >= first - 1) + (cut >= len(whole) - 1) and (not cut or journal.path.read_bytes()[-1:] in (b"", b"\n"))
        journal.append(["0:9"], group("0:9"))
        assert journal.read()[-1].keys == ("0:9",)


def test_damaged_lines_are_passed_over_and_old_ones_forgotten(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.path.write_bytes(b'[]\n{"keys": 1}\n\xff\xfe\n{"keys": ["0:0"], "newest": 0, "rollouts": []}\n')
    assert [e.keys for e in journal.read()] == [("0:0",)] and journal.read()[0].groups == {"0:0": []}
    journal.append(["0:1"], group("0:1", 5))
    journal.keep({"0:0", "0:1"}, newest=4)
    assert [e.keys for e in journal.read()] == [("0:0",)]
    journal.keep(set())
    assert journal.path.read_bytes() == b""


@pytest.mark.parametrize("change", [{"keys": 5}, {"keys": [5]}, {"newest": None}, {"newest": "x"}, {"rollouts": None}, {"rollouts": [5]}])
def test_an_entry_that_was_altered_is_named_with_what_to_do(change, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.path.write_text(json.dumps({"keys": ["0:0"], "newest": 0, "rollouts": [], **change}) + "\n")
    for use in (journal.read, lambda: journal.keep({"0:0"}, 3)):
        with pytest.raises(RunFolderError, match=r"journal.jsonl: the entry that begins .*Remove its line"):
            use()


def test_a_folder_in_its_place(tmp_path):
    with pytest.raises(RunFolderError, match="is a folder"):
        Journal(tmp_path)


def test_many_threads_append(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    threads = [threading.Thread(target=lambda k=k: [journal.append([f"{k}:{i}"], group(f"{k}:{i}", n=8)) for i in range(20)]) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert sorted(e.keys[0] for e in journal.read()) == sorted(f"{k}:{i}" for k in range(6) for i in range(20))


def test_the_ledger_is_repaired_and_cut_back_with_the_metrics(tmp_path):
    recipe = Recipe(model="mock", data={"rows": [{"prompt": "a"}]}, evaluator=lambda row, answer: 0.0)
    with Run.create(tmp_path / "run", recipe) as run:
        for step in (1, 2, 3):
            run.log_prompts(step, {"trained": [f"0:{step}"], "stale": []})
        with (run.folder / "ledger.jsonl").open("ab") as f:
            f.write(b'{"step": 4, "trai')
    with Run.open(tmp_path / "run", recipe) as run:
        assert [line["trained"] for line in run.ledger()] == [["0:1"], ["0:2"], ["0:3"]] and (run.folder / "ledger.jsonl").read_bytes().endswith(b"\n")
        run.truncate(2)
        assert [json.loads(x)["step"] for x in (run.folder / "ledger.jsonl").read_text().splitlines()] == [1, 2]
    with pytest.raises(RunFolderError, match="closed"):
        run.log_prompts(3, {"trained": []})
