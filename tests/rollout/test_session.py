"""Sessions: what is asked, what is kept, what an agent may decide, and how they end."""

from __future__ import annotations

import logging
import threading

import pytest
from agent_world import FORGETFUL, PLAIN, Recorded, Scripted, call, check_exact

from nexrl_sdk import LocalBackend
from nexrl_sdk.rollout.chat import trace_of
from nexrl_sdk.rollout.session import Session, SessionClosed, session_trajectories
from nexrl_sdk.types import BackendError, Completion, ConfigError, ContextOverflowError, Interrupted, SamplingParams

pytestmark = pytest.mark.timeout(120)
USER = {"role": "user", "content": "1+1?"}


def talk(session, *said, first=USER):
    """A conversation of several questions."""
    messages = [first]
    for question in said:
        messages += [session.complete(messages).message, {"role": "user", "content": question}]
    return session.complete(messages)


def test_what_is_drawn_is_kept_token_for_token():
    backend = Scripted(["two", "two!", "yes"])
    session = Session(backend, sampling=SamplingParams(max_tokens=99))
    reply = talk(session, "sure?", "really?")
    assert (reply.message["content"], reply.finish_reason, reply.number) == ("yes", "stop", 2)
    assert reply.usage == {"prompt_tokens": len(backend.drawn[2][0]), "completion_tokens": 4, "total_tokens": len(backend.drawn[2][0]) + 4}
    (t,) = session_trajectories(session, run_id="r")
    check_exact(backend.drawn, [t])
    assert [turn["number"] for turn in t["turns"]] == [0, 1, 2] and t.run_id == "r" and t.weight_versions == [3]
    assert t.prompt == "<|user|>1+1?<|end|><|assistant|>" and t.response.startswith("two<|end|><|user|>sure?")


def test_a_real_engine_is_recorded_exactly(tiny):
    """Random text, cut answers, several questions and several answers to one of them."""
    with LocalBackend(tiny("qwen2", max_position_embeddings=512)) as inner:
        backend = Recorded(inner)
        session = Session(backend, sampling=SamplingParams(max_tokens=7, seed=11))
        talk(session, "and then?", "and?")
        session.complete_many([USER], n=3)
        found = session_trajectories(session)
        check_exact(backend.drawn, found)
        again = Session(Recorded(inner), sampling=SamplingParams(max_tokens=7, seed=11))
        talk(again, "and then?", "and?")
        assert [list(c.tokens) for _, _, c in again.backend.drawn] == [list(c.tokens) for _, _, c in backend.drawn[:3]]
        prompt, _, drawn = backend.drawn[0]
        alone = inner.sample([prompt], SamplingParams(max_tokens=7, seed=11))[0][0]
        assert list(alone.tokens) == list(drawn.tokens)


def test_a_template_that_forgets_forks_and_each_token_is_learned_once():
    backend = Scripted(["<think>hm</think>two", "<think>well</think>two!", "<think>oh</think>yes"], template=FORGETFUL)
    session = Session(backend)
    talk(session, "sure?", "really?")
    found = session_trajectories(session, run_id="r")
    check_exact(backend.drawn, found)
    assert len(found) == 3 and [sum(turn["learned"] for turn in t["turns"]) for t in found] == [1, 1, 1]
    assert [t["turns"][-1]["forked"] for t in found] == [False, True, True]


def test_answers_of_one_request_share_their_prompt():
    backend = Scripted(lambda text, params, said=iter("abcd"): next(said))
    session = Session(backend)
    first = session.complete_many([USER], n=3)
    session.complete([USER, first[1].message, {"role": "user", "content": "more"}])
    found = session_trajectories(session)
    check_exact(backend.drawn, found)
    assert len(found) == 3 and {r.number for r in first} == {0, 1, 2}


def test_the_recipe_governs_how_and_the_agent_when_it_ends(caplog, monkeypatch):
    from nexrl_sdk.rollout import session as room

    monkeypatch.setattr(room, "_TOLD", set())  # what was said before in this process
    backend = Scripted(["yes"])
    session = Session(backend, sampling=SamplingParams(max_tokens=50, temperature=0.7, seed=5))
    with caplog.at_level(logging.INFO, "nexrl_sdk.rollout.session"):
        for _ in range(2):
            session.complete([USER], temperature=0.123, top_p=None, max_tokens=3, stop="\n")
    assert [r.message for r in caplog.records].count("the agent asks for temperature=0.123; the recipe's 0.7 is used, so that all answers are of one distribution") == 1
    assert session.overridden == {"temperature": 0.123}
    params = [p for _, p, _ in backend.drawn]
    assert [(p.temperature, p.max_tokens, p.stop) for p in params] == [(0.7, 3, ["\n"])] * 2 and params[0].seed != params[1].seed
    with pytest.raises(ConfigError, match=r"not 'max_token'; did you mean 'max_tokens'"):
        session.complete([USER], max_token=3)
    assert isinstance(session.failure, ConfigError)
    session.complete([USER])
    assert session.failure is None


@pytest.mark.parametrize(("own", "asked", "found"), [(None, "a", ["a"]), ("b", ["a", "b"], ["b", "a"]), (["x"], None, ["x"]), ([], "a", ["a"]), (None, [], None)])
def test_stop_strings_of_both(own, asked, found):
    backend = Scripted(["yes"])
    Session(backend, sampling=SamplingParams(stop=own)).complete([USER], stop=asked)
    assert backend.drawn[0][1].stop == found


def test_stop_ids_and_strings_do_not_mix():
    with pytest.raises(ConfigError, match="one answer takes one kind"):
        Session(Scripted(["yes"]), sampling=SamplingParams(stop=[4])).complete([USER], stop="a")


def test_the_context_limits_the_answer_and_then_the_conversation():
    backend = Scripted(["0123456789"], max_length=16)  # the prompt has 6 tokens
    session = Session(backend, sampling=SamplingParams(max_tokens=99))
    reply = session.complete([USER])
    assert backend.drawn[0][1].max_tokens == 16 - reply.prompt_tokens and reply.finish_reason == "length"
    with pytest.raises(ContextOverflowError, match=r"grown to \d+ tokens, and the model's context of 16"):
        session.complete([USER, reply.message, USER])
    with pytest.raises(ContextOverflowError, match="more than the 3 that a prompt may have"):
        session.complete([USER], max_prompt=3)
    with pytest.raises(ContextOverflowError, match="more than the 2 that a prompt may have"):
        Session(backend, max_prompt=2).complete([USER], max_prompt=3)
    assert len(session.conversation.turns) == 1


def test_sub_agents_have_sessions_of_their_own_with_seeds_of_their_own():
    backend = Scripted(["yes"])
    session = Session(backend, sampling=SamplingParams(seed=1), template_kwargs={"a": 1}, max_prompt=77)
    session.complete([USER])
    first, second = session.child("one"), session.child("two")
    for s in (first, second, first.child("three")):
        s.complete([USER])
    found = session_trajectories(session.family())
    check_exact(backend.drawn, found)
    assert [t.get("agent_name") for t in found] == [None, "one", "three", "two"]
    assert sorted(turn["number"] for t in found for turn in t["turns"]) == [0, 1, 2, 3]
    assert len({p.seed for _, p, _ in backend.drawn}) == 4 and (first.max_prompt, first.template_kwargs) == (77, {"a": 1})


def test_calls_have_names_of_their_own_and_problems_are_kept():
    backend = Scripted([call("add", a=1) + call("add", a=2), "<tool_call>{oh no</tool_call>", call("add", a=3)])
    session = Session(backend)
    one = session.complete([USER])
    assert (one.finish_reason, [c["id"] for c in one.message["tool_calls"]]) == ("tool_calls", ["call_0_0", "call_0_1"])
    two = session.complete([USER, one.message, {"role": "tool", "tool_call_id": "call_0_0", "content": "1"}])
    assert two.finish_reason == "stop" and not two.message.get("tool_calls") and "oh no" in two.message["content"] and two.problem
    (t,) = session_trajectories(session)
    assert t["tool_call_problems"] == [two.problem]
    check_exact(backend.drawn, [t])


def test_a_closed_session_answers_no_more():
    session = Session(Scripted(["yes"]), max_calls=2)
    child = session.child("c")
    session.complete([USER])
    with pytest.raises(SessionClosed, match="used its 2 calls"):
        session.complete_many([USER], n=2)
    session.end()
    for s in (session, child, session.child("late")):
        with pytest.raises(SessionClosed, match="is over"):
            s.complete([USER])
    assert not session.cancel.is_set()
    session.close()
    assert session.cancel.is_set() and issubclass(SessionClosed, Interrupted)


def test_closing_breaks_off_what_is_being_answered():
    asked = threading.Event()
    session = Session(Scripted(lambda text, params: asked.set()))  # never answers
    found = []

    def ask():
        try:
            session.complete([USER])
        except SessionClosed as e:
            found.append(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert asked.wait(60)
    session.close()
    thread.join(60)
    assert len(found) == 1 and not session_trajectories(session)


@pytest.mark.parametrize("given", [[], [Completion([5], [-1.0], "abort", 0)], [Completion([5], [-1.0]), Completion([6], [-1.0])]])
def test_a_backend_that_breaks_off_is_an_error_and_nothing_is_kept(given):
    class Broken(Scripted):
        def sample(self, *args, **kwargs):
            return [given]

    session = Session(Broken(["x"]))
    with pytest.raises(BackendError, match="broke an answer off, or gave"):
        session.complete([USER])
    assert not session.conversation.turns and isinstance(session.failure, BackendError)


def test_an_answer_broken_off_by_the_end_of_the_rollout_is_no_error_of_the_backend():
    class Polite(Scripted):
        def sample(self, prompts, params, n=1, stop_flag=None):
            stop_flag.set()
            return [[Completion([5], [-1.0], "abort", 0)]]

    with pytest.raises(SessionClosed):
        Session(Polite(["x"])).complete([USER])


def test_several_threads_may_ask_one_session():
    backend = Scripted(lambda text, params: text[-30:-14])
    session = Session(backend)
    threads = [threading.Thread(target=session.complete, args=([{"role": "user", "content": f"question {i}"}],)) for i in range(24)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    found = session_trajectories(session)
    check_exact(backend.drawn, found)
    assert len(found) == 24 and sorted(t["turns"][0]["number"] for t in found) == list(range(24))


MISTRAL = (  # as Mistral's own templates are: nine letters and digits, or an error
    "{% for m in messages %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "<|tool|>{{ m.tool_call_id }}:{{ m.content }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}, \"id\": \"{{ c.id }}\"}</tool_call>{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_model_reads_the_names_of_calls_that_it_gave():
    said = '<tool_call>{"name": "add", "arguments": {}, "id": "abcdefghi"}</tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    backend = Scripted([said, said, "done"], template=MISTRAL)
    session = Session(backend, sampling=SamplingParams(max_tokens=500))
    messages, known = [USER], []
    for turn in range(2):
        reply = session.complete(messages)
        ids = [c["id"] for c in reply.message["tool_calls"]]
        known += ids
        messages += [reply.message, *({"role": "tool", "content": f"r{turn}{i}", "tool_call_id": ident} for i, ident in reversed(list(enumerate(ids))))]
    assert len(set(known)) == 4 and session.complete(messages).message["content"] == "done"
    (t,) = session_trajectories(session)
    check_exact(backend.drawn, [t])
    read = session.tokenizer.decode(backend.drawn[2][0])
    assert "<|tool|>abcdefghi:r00<|end|>" in read and "<|tool|>abcdefghi:r10<|end|>" in read and "call_" not in read
    assert [s["outputs"]["result"] for s in trace_of([t])["children"] if s["type"] == "TOOL"] == ["r01", "r00", "r11", "r10"]


def test_answers_end_before_a_stop_string_and_what_was_drawn_is_gone_on_from():
    backend = Scripted(["I look.\nObservation: rain", "Bring a coat."])
    session = Session(backend)
    first = session.complete([USER], stop="\nObservation:")
    assert first.message["content"] == "I look." and backend.tokenizer.decode(first.turn.drawn).startswith("I look.\nObservation:")
    session.complete([USER, first.message, {"role": "user", "content": "rain"}], stop=["\nObservation:"])
    (t,) = session_trajectories(session)
    check_exact(backend.drawn, [t])
    assert len(t["turns"]) == 2


def test_calls_that_nobody_asked_for_are_text():
    backend = Scripted([call("add", a=1), "2"])
    session = Session(backend)
    first = session.complete_many([USER], calls=False)[0]
    assert first.message["content"] == call("add", a=1) and "tool_calls" not in first.message and first.finish_reason == "stop"
    session.complete([USER, first.message, USER])
    assert len(session_trajectories(session)) == 1


def test_agents_that_share_a_session_have_sequences_of_their_own():
    backend = Scripted(lambda text, params: f"to {text.count('<|assistant|>')}")
    session = Session(backend)
    talks = {name: [{"role": "system", "content": name}, USER] for name in ("planner", "coder")}
    for _ in range(3):
        for messages in talks.values():
            messages += [session.complete(messages).message, {"role": "user", "content": "go on"}]
    session.complete([talks["planner"][0], {"role": "user", "content": "In short: two."}])  # what came before is summed up
    found = session_trajectories(session)
    check_exact(backend.drawn, found)
    assert [len(t["turns"]) for t in found] == [3, 3, 1] and [t["prompt_messages"][0]["content"] for t in found] == ["planner", "coder", "planner"]


def test_what_the_log_is_told_once_does_not_grow_with_the_requests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from nexrl_sdk.rollout import session as room

    monkeypatch.setattr(room, "_TOLD", set())
    caplog.set_level("INFO", "nexrl_sdk.rollout.session")
    for i in range(50):
        session = Session(Scripted(["a"]), sampling=SamplingParams(temperature=0.5))
        session.complete([{"role": "user", "content": "x"}], seed=1000 + i, temperature=2.0 + i)
        session.note({"reasoning_effort": "x" * 100_000})
        assert session.overridden["seed"] == 1000 + i and session.overridden["temperature"] == 2.0 + i
    assert len(room._TOLD) == 2 and sum("asks for seed=1000;" in r.message for r in caplog.records) == 1
    assert max(len(r.message) for r in caplog.records) < 1000


def test_calls_that_stand_in_the_content_are_in_the_trace():
    """The template takes one call an answer; an answer's two stand in the conversation as they were written."""
    one_call = PLAIN.replace("{% for m in messages %}", "{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}")
    backend = Scripted([call("f") + call("g", a=1), "done"], template=one_call)
    session = Session(backend)
    first = session.complete([USER])
    results = [{"role": "tool", "tool_call_id": c["id"], "content": f"r{i}"} for i, c in enumerate(first.message["tool_calls"])]
    session.complete([USER, first.message, *results])
    (t,) = session_trajectories(session, run_id="r")
    check_exact(backend.drawn, [t])
    assert [(s["name"], s["inputs"].get("arguments"), s["outputs"].get("result")) for s in trace_of([t])["children"]] == [("model", None, None), ("f", "{}", "r0"), ("g", '{"a": 1}', "r1"), ("model", None, None)]
