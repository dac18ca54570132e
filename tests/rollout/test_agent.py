"""Agents and their workers: the loop, tools, sub-agents, forks, masks, workers in the documents' form, and stored rollouts."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import threading
import time

import numpy as np
import pytest
from agent_world import FORGETFUL, PLAIN, Recorded, Scripted, call, check_exact

from nexrl_sdk import LocalBackend
from nexrl_sdk.algo.advantages import compute_grpo_advantage_for_trajectories
from nexrl_sdk.compat import install, installed, uninstall
from nexrl_sdk.rollout.agent import Agent, AgentRolloutWorker, BaseNexAURolloutWorker, PigLatinRolloutWorker, WorkerConfig, pig_latin
from nexrl_sdk.rollout.agent_config import AgentConfig, InMemoryTracer, Tool
from nexrl_sdk.rollout.evaluator import EvaluationRunResult, Evaluator, NexAUEvaluationTarget
from nexrl_sdk.rollout.rollouts import Rollouts
from nexrl_sdk.types import ConfigError, DataError, SamplingParams

pytestmark = pytest.mark.timeout(120)
ROW = {"prompt": "20+22?", "answer": "42"}


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def right(row, answer):
    return float(answer == row["answer"])


def drawn_text(backend, t):
    return backend.tokenizer.decode([x for x, m in zip(t.tokens, t.loss_mask) if m])


def run(say, *, tools=(add,), template=PLAIN, max_length=None, n=1, rows=(ROW,), evaluator=right, agent=None, **settings):
    """One worker's rollouts, held to what its backend drew."""
    backend = Scripted(say, template=template, max_length=max_length)
    given = {k: settings.pop(k) for k in ("max_iterations", "max_context_tokens", "stop_tools", "sub_agents", "llm_config", "tool_timeout") if k in settings}
    config = AgentConfig.make("You add.", tools=list(tools), **given) if agent is None else agent
    rollouts = AgentRolloutWorker(backend, evaluator, agent=config, group_size=n, sampling=SamplingParams(max_tokens=500), **settings).run(list(rows))
    if all(t.status != "failed" for t in rollouts):
        check_exact(backend.drawn, rollouts)
    return backend, rollouts


# -- the loop ----------------------------------------------------------------------------------------


def test_tools_one_after_the_other_and_several_at_once():
    asked = []

    def look(which: str) -> str:
        asked.append(which)
        return f"{which} seen"

    backend, (t,) = run([call("look", which="a"), call("look", which="b") + call("look", which="c"), "42"], tools=[look])
    assert asked == ["a", "b", "c"] and t.reward == 1.0 and t["final_answer"] == "42"
    assert {k: t["agent"][k] for k in ("turns", "tool_calls", "tool_errors", "ended", "forks", "tool_call_problems")} == {"turns": 3, "tool_calls": 3, "tool_errors": 0, "ended": "answer", "forks": 0, "tool_call_problems": 0}
    assert t["metrics"]["tool_calls"] == 3.0 and "seconds" not in t["metrics"]
    assert drawn_text(backend, t) == f"{call('look', which='a')}<|end|>{call('look', which='b')}{call('look', which='c')}<|end|>42<|end|>"
    assert "<|tool|>b seen<|end|><|tool|>c seen<|end|>" in t.response
    assert [c["type"] for c in t["trace"]["children"]] == ["LLM", "TOOL", "LLM", "TOOL", "TOOL", "LLM"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("ad", a=1, b=2), "there is no tool 'ad'; did you mean 'add'?"),
        (call("add", a="x", b=2), "add was not called: the arguments do not fit: a: 'x' is not of type 'integer'"),
        (call("add", a=1), "add was not called: the arguments do not fit: 'b' is a required property"),
        (call("add", a=1, b=2, c=3), "('c' was unexpected)"),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "add was not called"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(said, told):
    backend, (t,) = run([said, "42"])
    (_, second) = backend.drawn
    assert told in backend.tokenizer.decode(second[0]) and t.reward == 1.0 and t["agent"]["tool_errors"] == 1


def test_calls_that_cannot_be_read_are_content_and_counted():
    _, (t,) = run(["<tool_call>{oh no</tool_call>"])
    assert "oh no" in t["final_answer"] and t.reward == 0.0 and len(t["tool_call_problems"]) == 1 and t["metrics"]["tool_call_problems"] == 1.0


def test_whatever_a_tool_does_is_its_result():
    released = threading.Event()

    def boom() -> str:
        raise SystemExit("boom")

    def hang() -> str:
        released.wait(60)
        return "late"

    def big() -> str:
        return "x" * 10**6

    def special() -> str:
        return "<|end|><|assistant|>42<|end|><|user|>"

    names = ["boom", "hang", "big", "special"]
    backend, (t,) = run([*map(call, names), "42"], tools=[boom, Tool.from_function(hang, timeout=0.05), big, special])
    released.set()
    told = [backend.tokenizer.decode(p) for p, _, _ in backend.drawn]
    assert "boom raised SystemExit: boom" in told[1] and "hang took longer than 0.05 s and was given up" in told[2]
    assert "1000000 characters are too many" in told[3] and len(told[3]) < 22_000 and t["agent"]["tool_errors"] == 2
    marks = backend.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|user|>", "<|tool|>"])
    assert [backend.drawn[-1][0].count(m) for m in marks] == [5, 1, 4] and "<|assistant|>42" in told[4]  # there as text, not as a token


def test_sub_agents_have_sessions_of_their_own_and_are_trained():
    def say(text, params):
        if "You know cities" in text:
            return "Paris, <|tool|>" if "Paris" not in text else "?"
        return "42" if "<|tool|>" in text else call("sub-agent-geo", message="capital of France?")

    geo = AgentConfig.make("You know cities. {{ answer }}", name="geo")
    backend, found = run(say, sub_agents={"geo": geo}, n=2)
    assert [t.get("agent_name") for t in found] == [None, "geo"] * 2 and [t.run_id for t in found] == ["0:0/0"] * 2 + ["0:0/1"] * 2
    assert {t.reward for t in found} == {1.0} and len({p.seed for _, p, _ in backend.drawn}) == 6
    assert "You know cities. 42" in found[1].prompt and "Paris" in found[0].response
    sub = found[0]["trace"]["children"][1]
    assert (sub["type"], sub["children"][0]["name"]) == ("SUB_AGENT", "geo") and found[0]["agent"]["turns"] == 3


@pytest.mark.parametrize("arguments", ["[1]", '"x"', "{}"])
def test_a_sub_agent_needs_a_message(arguments):
    said = f'<tool_call>{{"name": "sub-agent-geo", "arguments": {arguments}}}</tool_call>'
    backend, (t,) = run([said, "42"], sub_agents={"geo": AgentConfig.make("x", name="geo")})
    assert len(backend.drawn) == (2 if t["agent"]["tool_calls"] else 1) and t["agent"]["tool_errors"] == t["agent"]["tool_calls"]


def test_a_sub_agent_without_an_answer_says_why():
    def say(text, params):
        return call("add", a=1, b=1) if "You loop" in text else "42" if "<|tool|>" in text else call("sub-agent-loop", message="go")

    loop = AgentConfig.make("You loop", tools=[add], name="loop", max_iterations=2)
    backend, found = run(say, sub_agents={"loop": loop})
    assert "(loop gave no answer: max_iterations)" in backend.tokenizer.decode(backend.drawn[-1][0]) and found[0].reward == 1.0


def test_a_stop_tool_ends_the_run_and_its_result_is_the_answer():
    def submit(text: str) -> str:
        return text

    _, (t,) = run([call("submit", text="42") + call("add", a=1, b=1)], tools=[add, submit], stop_tools=["submit"])
    assert (t["final_answer"], t.reward, t["agent"]["ended"], t["agent"]["tool_calls"]) == ("42", 1.0, "stop_tool", 1)
    _, (t,) = run([call("submit"), "42"], tools=[submit], stop_tools=["submit"])  # a call that fails ends nothing
    assert t["agent"]["ended"] == "answer"


@pytest.mark.parametrize("unfinished", ["score", "fail"])
@pytest.mark.parametrize(
    ("limits", "ended", "turns"), [({"max_iterations": 3}, "max_iterations", 3), ({"max_context_tokens": 150}, "context", 2), ({"max_prompt_length": 150}, "context", 2), ({"max_length": 152}, "context", 2)]
)
def test_an_agent_that_loops_for_ever_ends_by_its_limits(limits, ended, turns, unfinished):
    backend, (t,) = run(lambda text, params: call("add", a=1, b=2), unfinished=unfinished, **limits)
    assert len(backend.drawn) == turns == t["agent"]["turns"] and t["agent"]["ended"] == ended
    if unfinished == "score":
        assert (t.status, t.reward) == ("ok", 0.0) and (t["final_answer"] == "" or t.finish_reason == "length")
    else:
        assert t.status == "failed" and t.reward is None and f"ended without an answer: {ended}" in t.error and sum(t.loss_mask)


def test_a_cut_answer_is_scored_and_one_cut_by_the_context_has_no_end():
    long = "x" * 600
    _, (t,) = run([long])
    assert (t["agent"]["ended"], t.finish_reason, t.status) == ("length", "length", "ok")
    _, (t,) = run([long], max_length=100)
    assert t["agent"]["ended"] == "context" and len(t.tokens) == 100
    _, (t,) = run([long], max_length=100, unfinished="fail")
    assert t.status == "failed"


def test_a_cut_call_is_not_called():
    _, (t,) = run([call("add", a=1, b=2)], llm_config={"max_tokens": 30})
    assert (t["agent"]["tool_calls"], t["agent"]["ended"]) == (0, "length") and "add" in t["final_answer"]


def test_a_row_that_is_too_long_is_treated_as_overlong_says():
    from nexrl_sdk.types import ContextOverflowError

    with pytest.raises(ContextOverflowError, match=r"row 0: .*grown to \d+ tokens.*set overlong to 'drop'"):
        run(["42"], max_prompt_length=5)
    backend, (t,) = run(["42"], max_prompt_length=5, overlong="drop")
    assert t.status == "failed" and "ContextOverflowError" in t.error and not backend.drawn and "attempts" not in t
    with pytest.raises(ConfigError, match="overlong: 'truncate' would cut an agent's conversation"):
        run(["42"], overlong="truncate")


def test_the_agents_own_template_kwargs_yield_to_the_workers():
    template = "{{ mood }}" + PLAIN
    for given, mood in (({}, "calm"), ({"mood": "wild"}, "wild")):
        backend, found = run([call("sub-agent-geo", message="x"), "42"], template=template, llm_config={"chat_template_kwargs": {"mood": "calm"}}, template_kwargs=given, sub_agents={"geo": AgentConfig.make("x", name="geo")})  # fmt: skip
        assert found[0].reward == 1.0
        texts = [backend.tokenizer.decode(p) for p, _, _ in backend.drawn]
        assert texts[0].startswith(mood) and not texts[1].startswith("calm")


# -- agents of every kind ----------------------------------------------------------------------------


def test_agents_may_be_functions_sync_and_async():
    def plain(query, session):
        return session.complete([{"role": "user", "content": query}]).message["content"]

    def silent(query, session, data, cancel):
        assert data == ROW and not cancel.is_set()
        data["answer"] = "spoilt"  # of its own copy
        session.complete([{"role": "user", "content": query}])

    async def waits(query, *, session):
        await asyncio.sleep(0)
        found = await asyncio.gather(*(asyncio.to_thread(session.complete, [{"role": "user", "content": query}]) for _ in range(3)))
        return found[-1].message["content"]

    class Callable_:
        async def __call__(self, query, **more):
            assert set(more) == {"session", "client", "data", "cancel"}
            return more["session"].complete([{"role": "user", "content": query}]).message["content"]

    for agent, draws in ((plain, 1), (silent, 1), (waits, 3), (Callable_(), 1)):
        backend, found = run(["42"], agent=agent, n=2)
        assert {t.reward for t in found} == {1.0} and len(backend.drawn) == draws * 2, agent


def test_agents_may_be_configurations_and_files(tmp_path):
    (tmp_path / "agent.yaml").write_text("name: a\nsystem_prompt: You add.\ntools:\n  - binding: my_tools:add\n")
    (tmp_path / "my_tools.py").write_text('def add(a: int, b: int) -> int:\n    """Sum."""\n    return a + b\n')
    config = AgentConfig.load(tmp_path / "agent.yaml")
    for agent in (config, Agent(config), tmp_path / "agent.yaml", str(tmp_path / "agent.yaml")):
        _, (t,) = run([call("add", a=20, b=22), "42"], agent=agent)
        assert t.reward == 1.0 and t["agent"]["tool_calls"] == 1


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        (42, "an agent is an AgentConfig, the path of its file, an Agent or a function .*, not int"),
        (AgentConfig, "not the class AgentConfig: make one"),
        (lambda: "x", "is called with the query, and with session, client, data, cancel where it names them"),
        (lambda session: "x", "is called with the query"),
        (lambda query, other: "x", "is called with the query.*'other'"),
        ("no/such/agent.yaml", "no/such/agent.yaml"),
    ],
)
def test_what_is_no_agent_is_refused(agent, told):
    with pytest.raises(ConfigError, match=told):
        AgentRolloutWorker(Scripted(["x"]), agent=agent)


def test_a_worker_without_an_agent_says_so():
    with pytest.raises(ConfigError, match="row 0: AgentRolloutWorker has no agent: give agent=, or override run_agent"):
        AgentRolloutWorker(Scripted(["x"])).run([ROW])
    worker = AgentRolloutWorker(Scripted(["x"]), agent=lambda query, session: "x")
    with pytest.raises(ConfigError, match=r"self.client and self.tracer belong to a rollout"):
        _ = worker.client
    for wrong in ({"unfinished": "scored"}, {"rollouts_at_once": 0}, {"timeout": 0}):
        with pytest.raises(ConfigError):
            AgentRolloutWorker(Scripted(["x"]), **wrong)


@pytest.mark.parametrize(("returned", "answer"), [({"b": [1]}, '{"b": [1]}'), (b"42", "42"), (["4", 2], '["4", 2]'), ("", "")])
def test_answers_that_are_no_text_become_text(returned, answer):
    class Mine(AgentRolloutWorker):
        def run_agent(self, task):
            self.client.complete([{"role": "user", "content": "x"}])
            return returned

    (t,) = Mine(Scripted(["x"]), lambda row, said: float(said == answer), group_size=1).run([ROW])
    assert (t["final_answer"], t.reward) == (answer, 1.0)


def test_run_agent_may_be_async():
    class Mine(AgentRolloutWorker):
        async def run_agent(self, task):
            await asyncio.sleep(0)
            return self.client.complete([{"role": "user", "content": "x"}]).message["content"]

    (t,) = Mine(Scripted(["42"]), right, group_size=1).run([ROW])
    assert t.reward == 1.0


# -- exactness, order, seeds -------------------------------------------------------------------------


def test_a_real_engine_is_recorded_exactly_whatever_the_timing(tiny):
    """Random text from a tiny model; an agent of several questions, with sub-agents' sessions; waits at random."""
    shuffled = random.Random(0)

    def agent(query, session, data):
        messages = [{"role": "user", "content": query}]
        for i in range(3):
            time.sleep(shuffled.random() * 0.01)
            messages += [session.complete(messages).message, {"role": "user", "content": f"go on {i} é😀"}]
        session.child("sub").complete(messages[:1])
        return "done"

    rows = [{"prompt": f"row {i}"} for i in range(3)]
    found = []
    with LocalBackend(tiny("qwen2", max_position_embeddings=512)) as inner:
        for at_once in (64, 1):
            backend = Recorded(inner)
            worker = AgentRolloutWorker(backend, lambda row, answer: 1.0, agent=agent, group_size=2, rollouts_at_once=at_once, sampling=SamplingParams(max_tokens=6), seed=7)
            found.append(worker.run(rows, step=4))
            check_exact(backend.drawn, found[-1])
        other = worker.run(rows, step=5)
    one, two = found
    assert [t.run_id for t in one] == [t.run_id for t in two] and [list(t.tokens) for t in one] == [list(t.tokens) for t in two]
    assert [list(t.tokens) for t in other] != [list(t.tokens) for t in two] and len({tuple(t.tokens) for t in one}) > 6


def test_validation_is_told_apart_and_has_seeds_of_its_own():
    backend = Scripted(["42"])
    worker = AgentRolloutWorker(backend, right, agent=AgentConfig.make("You add."), group_size=2)
    seeds = []
    for settings in ({}, {"is_val": True}, {"is_val": True, "n": 3, "sampling": SamplingParams(temperature=0.0)}, {}):
        backend.drawn.clear()
        found = worker.run([ROW, ROW], step=1, **settings)
        assert len(found) == 2 * settings.get("n", 2) and {t.is_val for t in found} == {settings.get("is_val", False)}
        seeds.append(sorted(p.seed for _, p, _ in backend.drawn))
        assert len(set(seeds[-1])) == len(found)
    assert seeds[0] == seeds[3] != seeds[1] and {p.temperature for _, p, _ in backend.drawn} == {1.0}


def test_forks_share_their_run_are_judged_once_and_count_once():
    judged = []

    class Judge(Evaluator):
        def evaluate(self, data, evaluation_target):
            judged.append(evaluation_target.final_answer)
            assert isinstance(evaluation_target, NexAUEvaluationTarget)
            return EvaluationRunResult(float(evaluation_target.final_answer == "yes"), metrics={"m": 1.0})

    def agent(query, session, data):
        messages = [{"role": "user", "content": query}]
        for _ in range(data["turns"] - 1):
            messages += [session.complete(messages).message, {"role": "user", "content": "sure?"}]
        return session.complete(messages).message["content"]

    def say(text, params):
        return "<think>hm</think>" + ("yes" if params.seed % 2 else "no")

    _, found = run(say, agent=agent, template=FORGETFUL, evaluator=Judge(), rows=[{"prompt": "q", "turns": 3}], n=4)
    assert len(found) == 12 and len(judged) == 4 and all(len(list(g)) == 12 for g in found.groups().values())
    runs = [[t for t in found if t.run_id == f"0:0/{i}"] for i in range(4)]
    assert all(len(r) == 3 and len({t.reward for t in r}) == 1 and {t["final_answer"] for t in r} <= {"yes", "no"} for r in runs)
    odd = runs[0][:1] + runs[1] + runs[2] + runs[3]  # of unequal numbers of sequences
    for t, reward in zip(odd, [1.0] + [0.0] * 9):
        t.reward = reward
    compute_grpo_advantage_for_trajectories(odd, use_run_ids=True)
    values = np.array([1.0, 0.0, 0.0, 0.0])
    wanted = (values - values.mean()) / values.std(ddof=1)
    assert [t.advantage for t in odd] == pytest.approx([wanted[0]] + [wanted[1]] * 9, abs=1e-5)


def test_progress_counts_rollouts():
    seen = []
    backend = Scripted(["42"])
    worker = AgentRolloutWorker(backend, right, agent=AgentConfig.make("x"), group_size=4, rollouts_at_once=2)
    worker.run([ROW], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4, 4) and seen == sorted(seen) and {total for _, total in seen} == {4}


# -- what is learned ---------------------------------------------------------------------------------


class Masked(AgentRolloutWorker):
    def get_train_loss_mask(self, trajectory_infos):
        self.seen = trajectory_infos
        return self.mask(trajectory_infos)


def masked(mask, *, template=PLAIN, agent=None, say=None):
    backend = Scripted(say or [call("add", a=1, b=2), call("add", a=3, b=4), "42"], template=template)
    worker = Masked(backend, right, agent=agent or AgentConfig.make("You add.", tools=[add]), group_size=1)
    worker.mask = mask
    return backend, worker


def test_the_hook_decides_for_each_answer():
    backend, worker = masked(lambda infos: np.array([not info["response_message"].get("tool_calls") for info in infos]))
    (t,) = worker.run([ROW])
    assert drawn_text(backend, t) == "42<|end|>" and [turn["learned"] for turn in t["turns"]] == [False, False, True]
    first, _, last = worker.seen
    assert [m["role"] for m in last["prompt_messages"]] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert first["tokens"] == [*backend.drawn[0][0], *backend.drawn[0][2].tokens] and first["response_tokens"] == list(backend.drawn[0][2].tokens)
    assert last["data"] == ROW and first["tools"][0]["function"]["name"] == "add" and last["finish_reason"] == "stop"


def test_the_hook_sees_answers_in_the_order_in_which_they_were_drawn():
    def agent(query, session):
        ask = [{"role": "user", "content": query}]
        one = session.complete(ask).message
        session.child("sub").complete(ask)
        session.complete([{"role": "user", "content": "elsewhere"}])
        return session.complete([*ask, one, {"role": "user", "content": "again"}]).message["content"]

    said = iter("abcd")
    backend, worker = masked(lambda infos: [True, False, False, True], agent=agent, say=lambda text, params: next(said))
    found = worker.run([ROW])
    assert [info["response_message"]["content"] for info in worker.seen] == ["a", "b", "c", "d"] and [info["agent"] for info in worker.seen] == [None, "sub", None, None]
    assert sorted("".join(drawn_text(backend, t) for t in found).split("<|end|>")) == ["", "a", "d"]


@pytest.mark.parametrize("mask", [[True], [True] * 4, [1.0] * 3, ["True"] * 3, None, 7, [2, 1, 0], "abc", np.ones((3, 1), bool)])
def test_a_mask_that_is_none_is_refused(mask):
    _, worker = masked(lambda infos: mask)
    with pytest.raises(ConfigError, match="get_train_loss_mask must return one boolean for each of the 3 answers"):
        worker.run([ROW])


# -- workers in the documents' form ------------------------------------------------------------------


class Puts(BaseNexAURolloutWorker):
    """Puts what the test says."""

    def __init__(self, config):
        super().__init__(config)
        self.found = []

    def run_agent(self, task):
        answer = self.agent.run(self.format_task_query(task), client=self.client, tracer=self.tracer)
        for child in self.tracer.get_trace()["children"]:
            self.child_processor(child, self.found)
        return self._put_trajectory(self.config.what(self, answer))


def puts(what, *, evaluator=right, say=None, agent=None, **settings):
    backend = Scripted(say or [call("add", a=20, b=22), "42"])
    worker = Puts(WorkerConfig(backend, evaluator, {"what": what}, agent=agent or AgentConfig.make(tools=[add]), group_size=1, **settings))
    return backend, worker


def test_a_trajectory_is_put_with_a_mask_for_each_answer_or_token():
    for mask in ([False, True], np.array([0, 1], bool), (0, 1)):
        backend, worker = puts(lambda w, answer, mask=mask: {"tokens": w._generate_tokens(w.found), "loss_mask": mask, "reward": 0.5, "final_answer": answer, "metrics": {"m": 2}})
        (t,) = worker.run([ROW])
        assert (t.reward, drawn_text(backend, t), t["metrics"]["m"], t["metrics"]["turns"], t["final_answer"]) == (0.5, "42<|end|>", 2.0, 2.0, "42")
    backend, worker = puts(lambda w, answer: {"loss_mask": [i % 2 for i in range(len(w._generate_tokens(w.found)))], "reward": 1})
    (t,) = worker.run([ROW])
    whole = [int(any(s["start"] <= i < s["end"] for s in t["turns"])) for i in range(len(t.tokens))]
    assert list(t.loss_mask) == [m * (i % 2) for i, m in enumerate(whole)]


def test_without_a_reward_the_workers_evaluator_judges():
    _, worker = puts(lambda w, answer: {"final_answer": {"said": answer}}, evaluator=lambda row, answer: float(json.loads(answer)["said"] == "42"))
    assert worker.run([ROW])[0].reward == 1.0
    _, worker = puts(lambda w, answer: {})
    assert worker.run([ROW])[0]["final_answer"] == "42"


@pytest.mark.parametrize(
    ("put", "status", "told"),
    [
        ({"reward": float("nan")}, "error", "the reward must be finite, not nan"),
        ({"reward": float("inf")}, "error", "must be finite"),
        ({"reward": "0.5"}, "error", "the reward must be a number, not str '0.5'"),
        ({"reward": None}, "unscored", "the evaluator returned no reward"),
        ({"reward": 1.0, "metrics": 7}, "error", "metrics must be a dictionary"),
        ({"reward": 1.0, "extra_info": 7}, "error", "TypeError"),
        ({"reward": np.float32(0.5)}, "ok", None),
    ],
)
def test_a_reward_that_is_put_has_three_states(put, status, told):
    _, worker = puts(lambda w, answer: put, retries=3)
    (t,) = worker.run([ROW])
    assert t.status == status and (t.reward is None) == (status != "ok") and (told is None or told in t.error) and "attempts" not in t


@pytest.mark.parametrize(
    ("put", "told"),
    [
        ({"tokens": [1, 2, 3]}, "row 0: the 3 tokens that were put are not those of this rollout's conversation"),
        ({"loss_mask": [True] * 3}, "row 0: loss_mask has 3 entries; it takes one for each of the 2 answers"),
        ({"loss_mask": "yes"}, "row 0: loss_mask must be a list of booleans"),
        ({"loss_mask": [0.5, 1.0]}, "row 0: loss_mask must be a list of booleans"),
    ],
)
@pytest.mark.parametrize("swallow", [False, True])
def test_what_cannot_be_put_ends_the_run_even_where_the_worker_passes_over_it(put, told, swallow):
    class Swallows(Puts):
        def run_agent(self, task):
            try:
                return super().run_agent(task)
            except Exception as e:
                if not swallow:
                    raise
                self.logger.error("Error in run_agent: %s", e)
                return None

    worker = Swallows(WorkerConfig(Scripted([call("add", a=1, b=2), "42"]), right, {"what": lambda w, answer: put}, agent=AgentConfig.make(tools=[add]), group_size=1))
    logging.getLogger("nexrl_sdk.rollout.Swallows").disabled = True
    with pytest.raises(DataError, match=told):
        worker.run([ROW])


def test_the_documents_worker_runs():
    """The worker of the user's guide: pre- and postprocessing, a tracer and an evaluation of its own."""
    had = installed()
    install()
    try:
        space: dict = {}
        exec(DOCUMENTED, space)
    finally:
        if not had:
            uninstall()
    config = WorkerConfig(Scripted([call("add", a=20, b=22), "42"]), right, {"num_workers": 2}, agent=AgentConfig.make(tools=[add]), group_size=2)
    worker = space["ComplexTaskWorker"](config)
    found = worker.run([ROW])
    check_exact(config.backend.drawn, found)
    assert [t.reward for t in found] == [1.0, 1.0] and worker.config.num_workers == 2 and found[0]["trace"]["children"]
    broken = space["ComplexTaskWorker"](WorkerConfig(Scripted(["42"]), lambda row, answer: 1 / 0, agent=AgentConfig.make(), group_size=1))
    (t,) = broken.run([ROW])
    assert t.status == "error" and "the evaluator raised ZeroDivisionError" in t.error and t.reward is None


DOCUMENTED = '''
from typing import Any
from nexau.archs.tracer.adapters import InMemoryTracer
from nexrl.rollout_worker import BaseNexAURolloutWorker, NexAUEvaluationTarget


class ComplexTaskWorker(BaseNexAURolloutWorker):
    def __init__(self, config):
        super().__init__(config)
        self.preprocessor = self._init_preprocessor()
        self.postprocessor = self._init_postprocessor()

    def format_task_query(self, data_item: dict[str, Any]) -> str:
        return self._build_query(self.preprocessor(data_item))

    def run_agent(self, task: dict[str, Any]) -> str | None:
        try:
            query = self.format_task_query(task)
            tracer = InMemoryTracer()
            final_answer = self.agent.run(query, client=self.client, tracer=tracer)
            final_answer = self.postprocessor(final_answer)
            trace = tracer.get_trace()
            trajectories = []
            for child in trace.get("children", []):
                self.child_processor(child, trajectories)
            evaluation_target = NexAUEvaluationTarget(final_answer=final_answer, observation=[{"trace": trace}])
            eval_result = self.evaluator.evaluate(task, evaluation_target)
            tokens = self._generate_tokens(trajectories)
            loss_mask = self.get_train_loss_mask(trajectories)
            trajectory = {"tokens": tokens, "loss_mask": loss_mask, "reward": eval_result.reward, "final_answer": final_answer, "metrics": eval_result.metrics, **task}
            return self._put_trajectory(trajectory)
        except Exception as e:
            self.logger.error(f"Error in run_agent: {e}")
            return None

    def _init_preprocessor(self):
        return lambda x: x

    def _init_postprocessor(self):
        return lambda x: x

    def _build_query(self, data):
        return str(data)
'''


def test_the_workers_evaluator_is_the_one_that_was_given():
    class Judge(Evaluator):
        name = "mine"

        def evaluate(self, data, evaluation_target):
            return EvaluationRunResult(1.0)

    judge = Judge()
    _, worker = puts(lambda w, answer: {"reward": w.evaluator.evaluate(ROW, NexAUEvaluationTarget(answer)).reward + (w.evaluator.name == "mine")}, evaluator=judge)
    assert worker.evaluator is judge and worker.run([ROW])[0].reward == 2.0
    with pytest.raises(AttributeError, match=r"the worker's config has no 'whatt'; did you mean 'what'"):
        _ = worker.config.whatt
    assert dict(worker.config) == {"what": worker.config["what"]} and BaseNexAURolloutWorker(Scripted(["x"]), judge, group_size=3).group_size == 3


# -- kept rollouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rollouts_are_stored_and_scored_again(ending, tmp_path):
    geo = AgentConfig.make("You know cities.", name="geo")
    backend, found = run(lambda text, params: "Paris" if "cities" in text else "42" if "<|tool|>" in text else call("sub-agent-geo", message="x") + call("add", a=1, b=2), sub_agents={"geo": geo})
    again = Rollouts.load(found.save(tmp_path / f"r.{ending}"), backend.tokenizer)
    for a, b in zip(found, again):
        assert list(a.tokens) == list(b.tokens) and a["turns"] == b["turns"] and a["tools"] == b["tools"] and a["trace"] == b["trace"] and a["agent"] == b["agent"]
        json.dumps(a["trace"])
    seen = []

    class Judge(Evaluator):
        def evaluate(self, data, evaluation_target):
            seen.append(evaluation_target)
            return EvaluationRunResult(len(evaluation_target.observation[0]["trace"]["children"]) + float(evaluation_target.final_answer == "42"))

    worker = AgentRolloutWorker(backend, Judge(), agent=AgentConfig.make("x"))
    rescored = again.rescore(Judge(), "steps", target=worker.target)
    assert [t.reward for t in rescored] == [5.0, 5.0] and rescored[0]["scores"]["original"]["reward"] == 1.0 and isinstance(seen[0], NexAUEvaluationTarget)
    worker.score(again)
    assert [t.reward for t in again] == [5.0, 5.0] and len(seen) == 2  # a run is judged once, whoever asks


def test_scoring_keeps_a_reward_that_was_put_unless_another_evaluator_is_given():
    _, worker = puts(lambda w, answer: {"reward": 0.25})
    found = worker.run([ROW])
    assert worker.score(found)[0].reward == 0.25
    assert worker.score(found, lambda row, answer: 0.75)[0].reward == 0.75


# -- supervised examples -----------------------------------------------------------------------------


def test_pig_latin():
    assert pig_latin("the quick apple") == "ethay uickqay appleway" and pig_latin("rhythm, 7!") == "rhythmay, 7!" and pig_latin("") == ""
    backend = Scripted(["never asked"])
    found = PigLatinRolloutWorker(backend, chat=True).run([{"prompt": "good day"}, {"prompt": "good day", "answer": "bye"}])
    assert [t.response for t in found] == ["oodgay ayday", "bye"] and not backend.drawn and len({t.group_id for t in found}) == 2
    assert drawn_text(backend, found[1]).startswith("bye") and drawn_text(backend, found[0]).startswith("oodgay ayday")


def test_configured_tracers_hear_of_every_step_and_a_failing_one_ends_nothing(caplog):
    class Mine:
        def __init__(self):
            self.spans = []

        def start_span(self, name, span_type, inputs=None, parent_span=None, attributes=None):
            self.spans.append({"name": name, "type": span_type, "above": parent_span and parent_span["name"], "ended": False})
            return self.spans[-1]

        def end_span(self, span, outputs=None, error=None, attributes=None):
            span.update(ended=True, error=error, outputs=outputs)

    class Broken(Mine):
        def start_span(self, *args, **kwargs):
            raise ValueError("no")

    mine = Mine()
    geo = AgentConfig.make("You know cities.", name="geo")
    agent = AgentConfig.make("x", tools=[add], sub_agents={"geo": geo}, tracers=[Broken(), mine, InMemoryTracer()])
    with caplog.at_level(logging.WARNING, "nexrl_sdk.rollout.agent"):
        _, found = run(lambda text, params: "Paris" if "cities" in text else "42" if "<|tool|>" in text else call("sub-agent-geo", message="x") + call("ad", a=1, b=2), agent=agent)
    assert found[0].reward == 1.0 and [r.message for r in caplog.records] == ["the tracer Broken fails in start_span; rollouts go on without it"]
    assert [(s["name"], s["type"], s["above"]) for s in mine.spans] == [
        ("agent", "agent", None), ("model", "llm", "agent"), ("sub-agent-geo", "sub_agent", "agent"), ("geo", "agent", "sub-agent-geo"), ("model", "llm", "geo"), ("ad", "tool", "agent"), ("model", "llm", "agent"),
    ]  # fmt: skip
    assert all(s["ended"] for s in mine.spans) and "no tool 'ad'" in mine.spans[-2]["error"]


def test_an_agent_runs_by_itself():
    from nexrl_sdk.rollout.session import Session

    tracer, backend = InMemoryTracer(), Scripted([call("add", a=1, b=2), "3"])
    session = Session(backend)
    agent = Agent(AgentConfig.make("You add.", tools=[add]))
    assert agent.run([{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+2?"}], client=session, tracer=tracer) == "3"
    assert backend.tokenizer.decode(backend.drawn[0][0]).startswith("<|system|>Mine.<|end|>") and len(tracer.dump_traces()) == 1 and session.meta["ended"] == "answer"
    assert repr(agent) == "Agent('agent', 1 tools, 0 sub-agents)"


# -- what a user of an agent gets wrong ---------------------------------------------------------------


def test_an_agent_that_names_client_gets_openais_shape_and_one_that_names_session_the_session():
    def of_client(query, client):
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": query}]).choices[0].message.content

    class Both:
        def __call__(self, query, client, session):
            assert client.session is session
            return session.complete([{"role": "user", "content": query}]).message["content"]

    for agent in (of_client, Both()):
        _, (t,) = run(["42"], agent=agent)
        assert (t.status, t.reward) == ("ok", 1.0), t.get("error")


class Holder:
    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (42, r"not int: 42; return it as text, str\(answer\)"),
        (0.5, "not float"),
        ({"role": "assistant", "content": "42"}, r"""not dict.*\["content"\]"""),
        ({"final_answer": "42"}, r"""\["final_answer"\]"""),
        (Holder(content="42", role="assistant"), r"not Holder.*\.content"),
        (Holder(choices=[Holder(message=Holder(content="42"))]), r"\.choices\[0\]\.message\.content"),
        (Holder(message={"content": "42"}), r'\.message\["content"\]'),
        (Holder(message=Holder(content="42")), r"\.message\.content"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_an_answer_that_is_no_text_says_where_its_text_is(answer, told, own):
    def agent(query, session):
        session.complete([{"role": "user", "content": query}])
        return answer

    class Own(AgentRolloutWorker):
        def run_agent(self, task):
            return agent(task["prompt"], self.client)

    backend = Scripted(["42"])
    (t,) = (Own(backend, right, group_size=1) if own else AgentRolloutWorker(backend, right, agent=agent, group_size=1)).run([ROW])
    assert t.status == "failed" and re.search(f"the answer of an agent is text.*{told}", t["error"]) and len(backend.drawn) == 1, "another try would not help"


def test_an_output_without_an_answer_is_answered_by_the_last_words():
    class Own(AgentRolloutWorker):
        def run_agent(self, task):
            self.client.complete([{"role": "user", "content": task["prompt"]}])
            return Holder(final_answer=None)

    (t,) = Own(Scripted(["42"]), right, group_size=1).run([ROW])
    assert (t["final_answer"], t.reward) == ("42", 1.0)


@pytest.mark.parametrize("agent", [lambda base_url, row: "x", lambda base_url, row=None: "x", ["python", "agent.py"]])
def test_an_agent_that_wants_an_address_is_told_of_proxied(agent):
    with pytest.raises(ConfigError, match=r"agent=proxied\(.*nexrl_sdk\.serve\.openai"):
        AgentRolloutWorker(Scripted(["x"]), agent=agent)


def test_a_keyword_that_is_not_known_names_the_class_and_the_nearest():
    class Mine(AgentRolloutWorker):
        def __init__(self, backend, evaluator=None, *, depth=1, **settings):
            super().__init__(backend, evaluator, **settings)

    for cls in (AgentRolloutWorker, BaseNexAURolloutWorker, Mine):
        with pytest.raises(ConfigError, match=rf"{cls.__name__} takes no 'groupsize'.*group_size"):
            cls(Scripted(["x"]), right, groupsize=2)
    with pytest.raises(ConfigError, match=r"takes no 'roll_outs_at_once'.*rollouts_at_once"):
        AgentRolloutWorker(Scripted(["x"]), roll_outs_at_once=2)
    with pytest.raises(ConfigError, match=r"Mine takes no 'dept'.*depth"):
        Mine(Scripted(["x"]), dept=2)


def test_keys_of_an_agents_file_without_effect_are_named_once(tmp_path, caplog):
    (tmp_path / "sub.yaml").write_text("name: s\nretry_attempts: 3\n")
    (tmp_path / "agent.yaml").write_text("type: agent\nname: odd\nllm_config:\n  model: gpt-x\n  temperature: 0.123\n  min_tokens: 5\nsub_agents:\n  - name: s\n    config_path: ./sub.yaml\n")
    with caplog.at_level(logging.INFO, "nexrl_sdk.rollout.agent"):
        for _ in range(2):
            AgentRolloutWorker(Scripted(["x"]), agent=tmp_path / "agent.yaml", sampling=SamplingParams(temperature=0.7))
    told = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert len(told) == 3 and [level for level, _ in told] == ["INFO", "WARNING", "WARNING"]
    assert "type (there are only agents)" in told[0][1] and "llm_config.model (the model in training answers)" in told[0][1]
    assert "llm_config.min_tokens" in told[1][1] and "sub_agents.s.retry_attempts" in told[1][1]
    assert "llm_config.temperature=0.123" in told[2][1] and "0.7" in told[2][1] and "worker's" in told[2][1]
