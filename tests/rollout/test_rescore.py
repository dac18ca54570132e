"""Stored rollouts scored again: beside the old scores, from a run's folder, and refused where something is missing."""

from __future__ import annotations

import math
import threading

import pytest

from nexrl_sdk import Recipe, Rollouts, Trainer
from nexrl_sdk.backend.mock import MockBackend
from nexrl_sdk.rollout.evaluator import BaseEvaluationTarget, EvaluationRunResult, Evaluator
from nexrl_sdk.rollout.rewards import ExactMatch, Numeric
from nexrl_sdk.rollout.rollouts import Unsaved, dumps, missing_for_score
from nexrl_sdk.rollout.worker import SimpleRolloutWorker
from nexrl_sdk.run.store import Folder
from nexrl_sdk.types import ConfigError, DataError, Trajectory

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]


def half(row, answer):
    return {"reward": 0.5, "length": len(answer)}


def exact(row, answer):
    return float(answer == row["answer"])


def sampled(evaluator=half, answer=lambda prompt, member: str(int(prompt[0]) + 1 + member), **settings):
    return SimpleRolloutWorker(MockBackend(answer), evaluator, group_size=2, **settings).run(ROWS)


def test_new_scores_beside_the_old_ones_which_stay_as_they_were():
    old = sampled()
    old[0].advantage = 0.25
    before = [dumps(t) for t in old]
    new = old.rescore(exact)
    assert [dumps(t) for t in old] == before and isinstance(new, Rollouts) and new.tokenizer is old.tokenizer
    assert [t.reward for t in new] == [1, 0] * 4 and {t.scored_by for t in new} == {"exact"}
    first = new[0]
    assert first.scores == {"original": {"status": "ok", "reward": 0.5, "error": None, "ground_truth": "", "metrics": {"length": 1.0}, "extra_info": {}, "advantage": 0.25}}
    assert first.advantage is None and first.metrics == {} and first.tokens == old[0].tokens and first.logprobs == old[0].logprobs
    assert [t.reward for t in sampled(exact)] == [t.reward for t in new]  # what the worker itself would have said


def test_the_comparison():
    assert exact.__name__ == "exact"
    new = sampled().rescore(exact).rescore(ExactMatch(), name="again").rescore(Numeric(absolute=1))
    table = new.comparison().set_index("before")
    assert list(table.index) == ["original", "exact", "again"] and set(table["after"]) == {"Numeric"} and set(table["rollouts"]) == {8}
    assert table["mean before"].to_list() == [0.5, 0.5, 0.5] and set(table["mean after"]) == {1.0}
    assert table["changed"].to_list() == [8, 4, 4] and table["agreement"].to_list() == [0, 0.5, 0.5]
    with pytest.raises(DataError, match="one score each"):
        sampled().comparison()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_scores_are_stored(ending, tmp_path):
    new = sampled().rescore(exact).rescore(ExactMatch())
    back = Rollouts.load(new.save(tmp_path / f"r.{ending}"))
    assert [dict(t) for t in back] == [dict(t) for t in new] and back.comparison().equals(new.comparison())
    assert back.rescore(exact, name="third")[0].scores.keys() == {"original", "exact", "ExactMatch"}


def test_names():
    old = sampled()
    assert old.rescore(exact).rescore(exact)[0].scored_by == "exact 2"
    assert old.rescore([exact, half])[0].scored_by == "WeightedRewards"
    with pytest.raises(ConfigError, match="named 'original'"):
        old.rescore(exact, name="original")
    with pytest.raises(ConfigError, match="named 'a'"):
        old.rescore(exact, name="a").rescore(half, name="a")


def test_what_is_missing_is_said_before_anything_is_scored():
    asked = []
    rollouts = sampled()
    del rollouts[1]["data"]
    del rollouts[3]["data"]
    del rollouts[4]["response"]
    rollouts[5].data = {"image": Unsaved("Image", "<Image>")}
    with pytest.raises(DataError) as caught:
        rollouts.rescore(lambda row, answer: asked.append(answer) or 1.0)
    assert str(caught.value).startswith(f"4 of 8 rollouts cannot be scored again: 2 have no row (`data`) (the first: {rollouts[1].run_id!r}); 1 has no answer (`response`)")
    assert "could not be stored" in str(caught.value) and asked == []
    assert len(rollouts.filter(lambda t: missing_for_score(t) is None).rescore(exact)) == 4
    assert Rollouts([Trajectory(response="", data={"answer": ""})]).rescore(exact)[0].reward == 1  # an empty answer is an answer


def test_failed_rollouts_stay_failed_and_need_nothing():
    old = Rollouts([Trajectory(status="failed", error="503", run_id="a"), Trajectory(response="2", data={"answer": "2"}, status="error", error="boo", traceback="...")])
    new = old.rescore(exact)
    assert (new[0].status, new[0].error) == ("failed", "503") and "scores" not in new[0] and new[0] is not old[0]
    assert new[1].reward == 1 and new[1].status == "ok" and "traceback" not in new[1] and new[1].scores["original"]["traceback"] == "..." and new[1].scores["original"]["error"] == "boo"
    assert new.comparison()["without a reward before"].to_list() == [1]
    assert len(Rollouts().rescore(exact)) == 0


@pytest.mark.timeout(60)
def test_faults_are_errors_with_their_cause_and_no_zero():
    faults = {"0": ValueError("boo"), "1": None, "2": math.nan, "3": "0.5", "4": math.inf, "5": "hang"}

    def faulty(row, answer):
        value = faults[row["answer"]]
        if value == "hang":
            threading.Event().wait(20)
        if isinstance(value, Exception):
            raise value
        return value

    old = Rollouts([Trajectory(response="a", data={"answer": k}, reward=1.0) for k in faults])
    new = old.rescore(faulty, timeout=0.2, concurrency=3)
    assert [t.status for t in new] == ["error", "unscored", *["error"] * 4] and all(t.reward is None for t in new)
    assert "boo" in new[0].error and "ValueError" in new[0].traceback and "longer than" in new[5].error
    line = new.comparison().iloc[0]
    assert math.isnan(line["mean after"]) and line["changed"] == 6 and line["without a reward after"] == 6
    assert new.rescore(exact, name="last").comparison().set_index("before").loc["faulty", "without a reward before"] == 6


def test_what_the_evaluator_sees_can_be_said():
    class Looks(Evaluator):
        def evaluate(self, data, evaluation_target):
            return EvaluationRunResult(float(len(evaluation_target.observation)))

    old = Rollouts([Trajectory(response="a", data={}, trace=[1, 2, 3])])
    seen = []
    new = old.rescore(Looks(), "steps", target=lambda t: BaseEvaluationTarget(t.response, t.trace), progress=lambda done, total: seen.append((done, total)))
    assert new[0].reward == 3 and seen[-1] == (1, 1)


def test_an_agents_rollout_is_scored_once_by_its_last_words_and_its_trace(tmp_path):
    asked = []

    class Looks(Evaluator):
        def evaluate(self, data, evaluation_target):
            asked.append((evaluation_target.final_answer, evaluation_target.observation[0]["trace"]["steps"]))
            return EvaluationRunResult(float(len(asked)))

    shared = {"data": {"prompt": "p"}, "step": 1, "final_answer": "4", "trace": {"steps": [1, 2]}, "response": "a part"}
    old = Rollouts([Trajectory(run_id="0:0/0", **shared), Trajectory(run_id="0:0/0", **shared), Trajectory(run_id="0:0/0", **{**shared, "step": 2}), Trajectory(run_id="0:0/1", **shared)])
    new = Rollouts.load(old.save(tmp_path / "r.jsonl")).rescore(Looks(), concurrency=1)
    assert asked == [("4", [1, 2])] * 3 and [t.reward for t in new] == [1, 1, 2, 3]
    old[0].trace = Unsaved("Trace", "<Trace>")
    with pytest.raises(DataError, match="1 has a trace that could not be stored"):
        old.rescore(Looks())


@pytest.mark.timeout(120)
def test_from_a_runs_folder(tmp_path, monkeypatch):
    """The way of a user: a run that is over, its folder, the rollouts of a step, another evaluator from a file."""
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(model="mock", data={"rows": ROWS, "batch_size": 2}, evaluator=half, trajectory_pool={"group_size": 2}, trainer={"total_train_steps": 2, "save_freq": 0})
    trainer = Trainer(recipe, backend=MockBackend(lambda prompt, member: str(int(prompt[0]) + 1 + member)), run=tmp_path / "run")
    trainer.fit(2, progress=False)
    trainer.close()
    (tmp_path / "mine.py").write_text("def strict(row, answer):\n    return float(answer == row['answer'])\n")
    stored = Folder(tmp_path / "run").rollouts(1)
    assert len(stored) == 4 and set(stored.rewards) == {0.5} and stored[0].advantage is not None
    new = stored.rescore("mine.py:strict")
    assert [t.reward for t in new] == [1, 0, 1, 0] and new[0].scored_by == "strict" and new[0].advantage is None
    assert new.comparison()["mean after"].to_list() == [0.5]
    assert [dict(t) for t in Folder(tmp_path / "run").rollouts(1)] == [dict(t) for t in stored]
