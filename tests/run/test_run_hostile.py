"""Run folders that were damaged, removed or closed to writing: what is whole is kept, and the rest is said in words."""

from __future__ import annotations

import errno
import shutil

import pytest

from nexrl_sdk import MockBackend, Recipe, Trainer
from nexrl_sdk.launch.template import write_template
from nexrl_sdk.run.store import Folder, Run, read_lines, writing
from nexrl_sdk.types import CheckpointError, EvaluatorError, RunFolderError


def reward(row, answer):
    return float(len(answer) % 3)


def recipe(evaluator=reward) -> Recipe:
    return Recipe(model="mock", data=[{"prompt": f"say {i}"} for i in range(8)], evaluator=evaluator, trainer={"save_freq": 1, "total_train_steps": 6, "keep_last": 0}, rollout_worker={"max_tokens": 4}, logger={"backend": []})


@pytest.fixture
def folder(tmp_path):
    with Trainer(recipe(), MockBackend(), run=tmp_path / "r") as trainer:
        trainer.fit(4, progress=False)
    return tmp_path / "r"


def resumed(folder) -> list[dict]:
    with Run.open(folder, recipe()) as run:
        trainer = Trainer(recipe(), MockBackend(), run=run)
        trainer.resume()
        trainer.fit(6 - trainer.step_count, progress=False)
    return Folder(folder).metric_lines()


def test_garbage_between_lines_costs_no_other_line(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"\x00\xff garbage\n", lines[0], b'{"step": "x"}\n[1]\n{"a": 1}\n', *lines[1:], b'{"step": 4, "lo']))
    assert [x["step"] for x in read_lines(path)[0]] == [1, 2, 3, 4]
    assert [x["step"] for x in resumed(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["sync", "batch-async", "fully-async"])
@pytest.mark.parametrize("kept", [0, 2])
def test_records_that_are_lost_cost_no_step(mode, kept, tmp_path):
    made = recipe().override(f"weight.sync_mode={mode}")
    with Trainer(made, MockBackend(), run=tmp_path / "r") as trainer:
        trainer.fit(4, progress=False)
    path = tmp_path / "r" / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    with Run.open(tmp_path / "r", made) as run, Trainer(made, MockBackend(), run=run) as trainer:
        assert trainer.resume() == 4
        trainer.fit(2, progress=False)
        assert trainer.step_count == 6
    assert [x["step"] for x in Folder(tmp_path / "r").metric_lines()] == [*range(1, kept + 1), 5, 6]


def test_a_ledger_that_was_altered(folder):
    with (folder / "ledger.jsonl").open("a") as f:
        f.write('{"step": 4, "trained": null}\n')
    with pytest.raises(RunFolderError, match="step 4 are no lists of prompts"):
        Folder(folder).ledger()


def test_a_damaged_checkpoint_is_passed_over(folder, caplog):
    want = [x["reward/mean"] for x in resumed(shutil.copytree(folder, folder.with_name("whole")))]
    newest = Folder(folder).checkpoints[-1]
    for file in newest.glob("*"):
        file.write_bytes(file.read_bytes()[:10])
    assert [x["reward/mean"] for x in resumed(folder)] == want and str(newest) in caplog.text


def test_no_checkpoint_is_whole(folder):
    for file in folder.glob("checkpoints/*/*"):
        file.write_bytes(b"{")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"remove .*checkpoints to begin the run anew"):
        resumed(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\x00", "[" * 100_000])
def test_damaged_records(text, folder):
    (folder / "summary.json").write_text(text)
    assert Folder(folder).summary == {}
    (folder / "run.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"run\.json is damaged.*copy"):
        Folder(folder)


def test_a_folder_that_is_removed_is_not_made_again(folder):
    with Run.open(folder, recipe()) as run:
        trainer = Trainer(recipe(), MockBackend(), run=run)
        trainer.resume()
        shutil.rmtree(folder)
        with pytest.raises(RunFolderError, match="removed or moved"):
            trainer.step()
        run.discard()
    assert not folder.exists()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_closed_to_writing(number, folder, tmp_path):
    with pytest.raises(RunFolderError, match=r"nothing is lost.*nexrl resume"), writing(folder):
        raise OSError(number, "closed", str(folder / "metrics.jsonl"))
    with pytest.raises(RunFolderError, match="start the run again"), writing(tmp_path / "new"):
        raise OSError(number, "closed", str(tmp_path / "new" / "run.json"))
    with pytest.raises(OSError, match="elsewhere"), writing(folder):
        raise OSError(errno.EACCES, "elsewhere", "/elsewhere")


def test_an_evaluator_that_scores_nothing_stops_the_first_step():
    trainer = Trainer(recipe(lambda row, answer: None), MockBackend())
    with pytest.raises(EvaluatorError, match=r"no answer has a reward.*returned no reward.*must return a number"):
        trainer.step()
    assert trainer.step_count == 0


def test_one_step_without_a_reward_is_no_error():
    answers = []

    def sometimes(row, answer):
        answers.append(answer)
        return float(len(answers) % 3) if len(answers) <= 128 else None

    trainer = Trainer(recipe(sometimes), MockBackend())
    assert len(trainer.fit(2, progress=False)) == 2


@pytest.mark.parametrize("name", ["we ird: {x} %'\"", "null", "- a", "#", "日本", "1"])
def test_a_template_in_a_folder_of_any_name(name, tmp_path):
    write_template(tmp_path / name)
    assert Recipe.load(tmp_path / name).config.experiment_name == name
