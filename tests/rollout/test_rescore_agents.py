"""Stored rollouts of agents are scored again with what their evaluator saw at run time, once a run; what is missing is refused."""

from __future__ import annotations

import pytest
from agent_world import FORGETFUL, Scripted, call

from nexrl_sdk.rollout.agent import AgentRolloutWorker, BaseNexAURolloutWorker, WorkerConfig
from nexrl_sdk.rollout.agent_config import AgentConfig
from nexrl_sdk.rollout.evaluator import EvaluationRunResult, Evaluator, NexAUEvaluationTarget
from nexrl_sdk.rollout.rollouts import Rollouts, Unsaved, missing_for_score
from nexrl_sdk.rollout.tools import cut_middle
from nexrl_sdk.types import DataError, SamplingParams

pytestmark = pytest.mark.timeout(120)
ROWS = [{"prompt": "20+22?", "answer": "42", "more": {"tags": ["a", {"b": 1}]}}, {"prompt": "1+1?", "answer": "2", "more": {}}]


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Judge(Evaluator):
    """A number that depends on everything that it is shown, and on how often it is asked."""

    def __init__(self):
        self.seen = []

    def evaluate(self, data, evaluation_target):
        assert isinstance(evaluation_target, NexAUEvaluationTarget)
        shown = evaluation_target.observation
        children = shown[0]["trace"]["children"] if isinstance(shown[0], dict) and "trace" in shown[0] else shown
        kinds = "".join(str(c.get("type", c.get("role")))[0] for c in children)
        self.seen.append((data["prompt"], evaluation_target.final_answer, kinds, str(shown)))
        return EvaluationRunResult(float(evaluation_target.final_answer == data["answer"]) + 0.01 * len(kinds), data["answer"], {"steps": float(len(kinds))}, {"kinds": kinds, "more": data["more"]})


def say(text, params):
    if "You know cities" in text:
        return "Paris"
    if text.count("<|assistant|>") == 1:
        return "<think>hm</think>" + call("add", a=20, b=22) + call("sub-agent-geo", message="capital?")
    return "<think>so</think>42"


def world(cls=AgentRolloutWorker, evaluator=None, **settings):
    agent = AgentConfig.make("You add.", tools=[add], sub_agents={"geo": AgentConfig.make("You know cities.", name="geo")})
    given = {"agent": agent, "group_size": 2, "sampling": SamplingParams(max_tokens=500), **settings}
    backend = Scripted(say, template=FORGETFUL)
    return cls(WorkerConfig(backend, evaluator or Judge(), **given)) if issubclass(cls, BaseNexAURolloutWorker) else cls(backend, evaluator or Judge(), **given)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_same_evaluator_says_the_same_of_what_was_stored(ending, tmp_path):
    worker = world()
    old = worker.run(ROWS)
    assert len(old) > len({t.run_id for t in old}) == 4 and {t.status for t in old} == {"ok"}  # sub-agents are sequences of their own
    back = Rollouts.load(old.save(tmp_path / f"r.{ending}"))
    again = Judge()
    new = back.rescore(again, "again")
    assert sorted(again.seen) == sorted(worker.evaluator.seen) and len(again.seen) == 4
    for a, b in zip(old, new):
        assert (a.reward, a.metrics, a.ground_truth, a.extra_info, a.status) == (b.reward, b.metrics, b.ground_truth, b.extra_info, b.status)
        assert b["scores"]["original"]["reward"] == a.reward and b["scores"]["original"]["metrics"] == a.metrics
    line = new.comparison().iloc[0]
    assert (line["rollouts"], line["changed"], line["agreement"]) == (4, 0, 1.0)  # runs, not sequences
    assert back.rescore(lambda row, answer: 0.0).metrics()["eval/turns"] == old.metrics()["eval/turns"]  # an agent's own numbers stay


def test_a_workers_own_evaluation_is_shown_again(tmp_path):
    """A worker that shows its evaluator a history of its own: scoring again shows that, not the trace."""

    class Historic(BaseNexAURolloutWorker):
        def run_agent(self, task):
            answer = self.agent.run(task["prompt"], client=self.client, tracer=self.tracer)
            history = [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": answer}]
            result = self.evaluator.evaluate(task, NexAUEvaluationTarget(answer, history))
            return self._put_trajectory({"reward": result.reward, "metrics": result.metrics, "final_answer": answer})

    worker = world(Historic, group_size=1)
    old = worker.run(ROWS[:1])
    judge = Judge()
    new = Rollouts.load(old.save(tmp_path / "r.jsonl")).rescore(judge, "again")
    assert judge.seen == worker._evaluator.seen and judge.seen[0][2] == "ua" and [t.reward for t in new] == [t.reward for t in old] == [1.02] * len(old)
    again = Judge()
    worker.score(old, again)
    assert again.seen == judge.seen


def test_what_is_missing_is_refused_unless_it_is_not_needed():
    old = world(group_size=1).run(ROWS)
    for t in old:
        del t["trace"]
    old[0].data = {**old[0].data, "more": {"tags": ["a", Unsaved("Image", "<Image>")]}}
    with pytest.raises(DataError, match=r"1 has a row with a column that could not be stored .* have an agent's answer and no trace"):
        old.rescore(Judge())
    fine = old.filter(lambda t: missing_for_score(t, of_target=False) is None)
    assert {t.reward for t in fine.rescore(Judge(), target=lambda t: NexAUEvaluationTarget(t["final_answer"], [{"trace": {"children": []}}]))} == {0.0, 1.0}
    deep = world(group_size=1).run(ROWS)
    deep[0]["trace"]["children"][1]["outputs"]["result"] = Unsaved("Image", "<Image>")
    with pytest.raises(DataError, match="2 have a trace that could not be stored"):
        deep.rescore(Judge())
    round_row: dict = {"prompt": "x", "answer": "42", "more": {}}
    round_row["self"] = round_row
    live = world(group_size=1).run(ROWS[:1])
    for t in live:
        t.data = round_row
    assert {t.status for t in live.rescore(Judge())} == {"ok"}


def test_runs_of_two_steps_are_two(tmp_path):
    worker = world(group_size=1)
    both = Rollouts([*worker.run(ROWS[:1], step=0), *worker.run(ROWS[:1], step=1), *worker.run(ROWS[:1], is_val=True)])
    judge = Judge()
    both.rescore(judge)
    assert len(judge.seen) == 3
    worker.evaluator.seen.clear()
    worker.score(both)
    assert len(worker.evaluator.seen) == 3


def test_a_sub_agents_answer_is_cut_as_a_tools_is():
    def long(text, params):
        if "You know cities" in text:
            return "P" * 3000
        return "42" if "<|tool|>" in text else call("sub-agent-geo", message="x")

    geo = AgentConfig.make("You know cities.", name="geo")
    worker = AgentRolloutWorker(Scripted(long), Judge(), agent=AgentConfig.make("x", sub_agents={"geo": geo}, tool_output_limit=500), group_size=1, sampling=SamplingParams(max_tokens=5000))
    found = worker.run(ROWS[:1])
    told = cut_middle("P" * 3000, 500)[0]
    assert len(told) <= 500 and [m["content"] for m in found[0]["prompt_messages"] if m["role"] == "tool"] == [told] and "3000 characters are too many" in told
    assert sum(found[1].loss_mask) == 3001  # the sub-agent's own tokens are whole


def test_what_a_tool_raises_is_cut_as_its_result_is():
    def boom() -> str:
        raise ValueError("b" * 100_000)

    worker = AgentRolloutWorker(Scripted([call("boom"), "42"]), Judge(), agent=AgentConfig.make("x", tools=[boom], tool_output_limit=300), group_size=1, sampling=SamplingParams(max_tokens=500))
    (found,) = worker.run(ROWS[:1])
    (told,) = [m["content"] for m in found["prompt_messages"] if m["role"] == "tool"]
    assert len(told) <= 300 and told.startswith("Error: boom raised ValueError: bbb")
