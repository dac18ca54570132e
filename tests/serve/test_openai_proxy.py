"""Agents through the capture proxy, by the unmodified openai client: what it answers, and that every token is kept."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_data import AGENT, THREE_TURNS, Scripted, Written, assert_exact

openai = pytest.importorskip("openai", reason="the openai client is not installed")

from nexrl_sdk.backend.local import LocalBackend
from nexrl_sdk.rollout.agent import AgentRolloutWorker
from nexrl_sdk.rollout.session import Session, session_trajectories
from nexrl_sdk.serve.agent_run import AgentError
from nexrl_sdk.serve.openai import CaptureProxy, proxied
from nexrl_sdk.types import ConfigError, SamplingParams

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
ASK = [{"role": "user", "content": "How are you?"}]
CALL = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="anything", timeout=60) as made:
        yield made


def at(client: Any, place: Any, **options: Any) -> Any:
    """The client, pointed at a session."""
    return client.with_options(base_url=place.url, **options)


@pytest.fixture
def proxies() -> Iterator[Callable[..., CaptureProxy]]:
    made: list[CaptureProxy] = []

    def make(backend: Any, **options: Any) -> CaptureProxy:
        made.append(CaptureProxy(backend, **{"sampling": SamplingParams(max_tokens=500), **options}).start())
        return made[-1]

    yield make
    for proxy in made:
        proxy.stop()


# ---------------------------------------------------------------- agents


def test_an_agent_in_its_own_process_is_kept_token_for_token(proxies: Any) -> None:
    backend = Scripted(THREE_TURNS)
    session = Session(backend, sampling=SamplingParams(max_tokens=500))
    agent = proxied([sys.executable, str(AGENT)], proxy=proxies(None))
    answer = agent("12 + 30?", session=session, data={"question": "What is 12 + 30 called?"}, cancel=session.cancel)
    (trajectory,) = session_trajectories(session, run_id="0")
    assert answer == "It is the answer." and len(backend.drawn) == 3
    assert_exact(backend.drawn, [trajectory])
    assert session.overridden == {"temperature": 0.7}
    assert [t["message"].get("tool_calls", [{}])[0].get("function", {}).get("name") for t in trajectory["turns"]] == ["add", "name_of", None]
    end = backend.tokenizer.convert_tokens_to_ids("<|end|>")
    assert list(trajectory.tokens).count(end) == 8  # the tools, six messages, and the final answer; not the one in a tool's output


def test_a_worker_runs_agents_in_processes_of_their_own(proxies: Any) -> None:
    backend = Scripted(lambda prompt, number: THREE_TURNS[prompt.count("<|assistant|>") - 1])
    worker = AgentRolloutWorker(
        backend, lambda row, answer: float(row["is"] in answer), agent=proxied([sys.executable, str(AGENT)], proxy=proxies(None)),
        group_size=2, sampling=SamplingParams(max_tokens=500), seed=1, timeout=100,
    )  # fmt: skip
    found = list(worker.run([{"prompt": "What?", "question": "What is 12 + 30?", "is": "answer"}, {"prompt": "What?", "question": "And 13 + 30?", "is": "nothing"}]))
    assert [t.reward for t in found] == [1.0, 1.0, 0.0, 0.0] and all(t["final_answer"] == "It is the answer." for t in found)
    assert_exact(backend.drawn, found)


def test_an_agent_that_runs_out_of_context_is_unfinished(proxies: Any) -> None:
    def agent(base_url: str, row: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": row["prompt"]}]
        with openai.OpenAI(base_url=base_url, api_key="x") as mine:
            while True:
                messages += [mine.chat.completions.create(model="m", messages=messages).choices[0].message, {"role": "user", "content": "Go on."}]

    def run(unfinished: str, prompt: str) -> Any:
        worker = AgentRolloutWorker(Scripted(context=120), lambda row, answer: 1.0, agent=proxied(agent, proxy=proxies(None)), group_size=1, unfinished=unfinished, overlong="drop")
        return worker.run([{"prompt": prompt}])[0]

    scored, failed, at_once = run("score", "Begin."), run("fail", "Begin."), run("score", "x" * 200)
    assert scored.reward == 1.0 and scored["agent"]["ended"] == "context" and len(scored["turns"]) > 1
    assert failed.status == at_once.status == "failed" and "ContextOverflowError" in failed["error"] and "ContextOverflowError" in at_once["error"]


def test_an_agent_on_a_model_is_kept_token_for_token(tiny: Callable[..., Path], proxies: Any, client: Any) -> None:
    with LocalBackend(tiny("qwen2", max_position_embeddings=4096), threads=1) as engine:
        backend = Written(engine)
        place = proxies(backend, sampling=SamplingParams(max_tokens=12, seed=5)).session()
        mine, messages = at(client, place), [*ASK]
        for turn in range(4):
            reply = mine.chat.completions.create(model="m", messages=messages, logprobs=True, top_logprobs=2).choices[0]
            assert [t.logprob for t in reply.logprobs.content] == backend.drawn[-1][1].logprobs
            assert all(len(t.top_logprobs) == 2 for t in reply.logprobs.content)
            messages += [reply.message, {"role": "user", "content": f"And {turn}? é✓"}]
        several = mine.chat.completions.create(model="m", messages=messages, n=3).choices
        text = mine.completions.create(model="m", prompt="Once", max_tokens=7, logprobs=1).choices[0]
        assert len(several) == 3 and len(text.logprobs.tokens) == 7
        found = place.trajectories()
    assert len(found) == 4 and [len(t["turns"]) for t in found] == [5, 5, 5, 1]  # three branches of one conversation, and the text
    assert_exact(backend.drawn, found)


def test_functions_are_agents(proxies: Any) -> None:
    backend = Scripted(THREE_TURNS[2:])
    proxy = proxies(backend)

    async def agent(base_url: str, row: dict[str, Any]) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as mine:
            return str((await mine.chat.completions.create(model="m", messages=[{"role": "user", "content": row["question"]}])).choices[0].message.content)

    answer, found = proxy.rollout(agent, {"question": "Why?"}, group_id="g", run_id="1")
    assert answer == "It is the answer." == found[0]["final_answer"] and found[0].group_id == "g" and found[0].data == {"question": "Why?"}
    assert_exact(backend.drawn, found)
    assert not proxy.places.open

    def fails(base_url: str, row: dict[str, Any]) -> str:
        asyncio.run(agent(base_url, row))
        raise KeyError("lost")

    with pytest.raises(AgentError, match="KeyError: 'lost'") as caught:
        proxy.rollout(fails, {"question": "Why?"})
    assert len(caught.value.trajectories) == 1
    session = Session(backend)
    assert proxied(agent, proxy=proxy)("Why?", session=session, data={"question": "Why?"}, cancel=session.cancel) == "It is the answer."


def test_two_hundred_sessions_at_once(proxies: Any) -> None:
    together = threading.Barrier(200, timeout=100)

    def answer(prompt: str, number: int) -> str:
        if prompt.count("<|assistant|>") == 1:
            together.wait()  # passed when all are being answered
        return f"To {prompt.rpartition('<|user|>')[2].partition('<|end|>')[0]}"

    backend = Scripted(answer)
    proxy = proxies(backend)
    places = [proxy.session() for _ in range(200)]

    async def talk(mine: Any, i: int, url: str) -> list[str]:
        messages: list[Any] = []
        for turn in range(2):
            messages.append({"role": "user", "content": f"{i}.{turn}"})
            reply = await mine.with_options(base_url=url).chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message)
        return [m.content for m in messages[1::2]]

    async def everybody() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=places[0].url, api_key="x", timeout=100, max_retries=0) as mine:
            return await asyncio.gather(*(talk(mine, i, p.url) for i, p in enumerate(places)))

    assert asyncio.run(everybody()) == [[f"To {i}.0", f"To {i}.1"] for i in range(200)]
    found = [p.trajectories() for p in places]
    assert all(len(ts) == 1 and len(ts[0]["turns"]) == 2 for ts in found)
    assert_exact(backend.drawn, [t for ts in found for t in ts])


# ---------------------------------------------------------------- answers


def test_streams_are_the_answer_in_pieces(proxies: Any, client: Any) -> None:
    backend = Scripted([f"<think>Let me see.</think>{THREE_TURNS[1]}"])
    place = proxies(backend).session()
    mine = at(client, place)
    events = list(mine.chat.completions.create(model="m", messages=ASK, tools=CALL, stream=True, stream_options={"include_usage": True}))
    deltas = [e.choices[0].delta for e in events if e.choices]
    assert deltas[0].role == "assistant" and "".join(d.content or "" for d in deltas) == "Forty-two. Its name?"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Let me see."
    calls = [c for d in deltas for c in d.tool_calls or ()]
    assert calls[0].function.name == "name_of" and json.loads("".join(c.function.arguments for c in calls)) == {"number": 42}
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "tool_calls" and not events[-1].choices
    assert events[-1].usage.completion_tokens == len(backend.drawn[0][1].tokens)
    with mine.chat.completions.stream(model="m", messages=ASK, tools=CALL, n=2, logprobs=True) as stream:  # the client puts it together
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == ["Forty-two. Its name?"] * 2
    assert [len(c.logprobs.content) for c in final.choices] == [len(c.tokens) for _, c in backend.drawn[1:]]
    text = list(mine.completions.create(model="m", prompt="Say:", max_tokens=300, stream=True))
    assert "".join(c.choices[0].text for c in text).endswith("</tool_call>") and text[-1].choices[0].finish_reason == "stop"
    assert_exact(backend.drawn, place.trajectories())


def test_stop_strings_are_not_shown_and_are_kept(proxies: Any, client: Any) -> None:
    backend = Scripted(["I look.\nObservation: what?", "Fine."])
    place = proxies(backend).session()
    mine = at(client, place)
    reply = mine.chat.completions.create(model="m", messages=ASK, stop=["\nObservation:"]).choices[0]
    assert reply.message.content == "I look." and reply.finish_reason == "stop"
    mine.chat.completions.create(model="m", messages=[*ASK, reply.message, {"role": "user", "content": "Observation: rain"}], stop="\nObservation:")
    (trajectory,) = place.trajectories()  # no fork: the history is as it was sampled
    assert "I look.\nObservation:<|end|>" in backend.tokenizer.decode(trajectory.tokens)
    assert_exact(backend.drawn, [trajectory])


def test_texts_go_on_from_what_was_sampled(proxies: Any, client: Any) -> None:
    backend = Scripted(["I look.\nObservation: what?", "Yes", "No"])
    place = proxies(backend).session()
    mine = at(client, place)
    first = mine.completions.create(model="m", prompt="Q: Weather?\n", max_tokens=50, stop="\nObservation:").choices[0]
    assert first.text == "I look."
    mine.completions.create(model="m", prompt=f"Q: Weather?\n{first.text}\nObservation: rain\n", max_tokens=50)
    tokens = backend.drawn[1][0] + backend.drawn[1][1].tokens
    mine.completions.create(model="m", prompt=[*tokens, 40, 41], max_tokens=50)
    (trajectory,) = place.trajectories()
    assert len(trajectory["turns"]) == 3 and list(trajectory.tokens[: len(tokens) + 2]) == [*tokens, 40, 41]
    assert_exact(backend.drawn, [trajectory])


def test_texts_go_on_in_the_middle_of_a_text_where_a_tokenizer_begins_one_otherwise(proxies: Any, client: Any) -> None:
    """As Llama 2 and Mistral do: a word that begins a text has a space before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace(prepend_scheme="first")
    core.train_from_iterator(["Weather: rain and sun"] * 9, trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "</s>"], show_progress=False))
    backend = Scripted(["rain and sun"])
    backend.tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    place = proxies(backend).session()
    text = "Weather: "
    for more in ("", "sun"):
        text += more
        text += at(client, place).completions.create(model="m", prompt=text, max_tokens=2).choices[0].text
    first, second = backend.drawn
    assert "".join(backend.tokenizer.convert_ids_to_tokens(second[0][len(first[0] + first[1].tokens) :])) == "sun"
    assert_exact(backend.drawn, place.trajectories())


def test_no_tools_are_no_tools(proxies: Any, client: Any) -> None:
    backend = Scripted([THREE_TURNS[0], "Fine."])
    place = proxies(backend).session()
    reply = at(client, place).chat.completions.create(model="m", messages=ASK, tools=CALL, tool_choice="none").choices[0]
    assert reply.message.tool_calls is None and reply.message.content == THREE_TURNS[0] and reply.finish_reason == "stop"
    assert "add" not in backend.tokenizer.decode(backend.drawn[0][0])
    plain = at(client, proxies(Scripted([THREE_TURNS[0]])).session()).chat.completions.create(model="m", messages=ASK).choices[0]
    assert plain.message.tool_calls is None and plain.message.content == THREE_TURNS[0]  # an agent may read calls of its own form
    at(client, place).chat.completions.create(model="m", messages=[*ASK, reply.message, {"role": "user", "content": "No."}], tools=CALL, tool_choice="none")
    (trajectory,) = place.trajectories()
    assert_exact(backend.drawn, [trajectory])


def test_what_the_recipe_governs_is_noted(proxies: Any, client: Any) -> None:
    place = proxies(Scripted(), sampling=SamplingParams(max_tokens=3, temperature=0.8)).session()
    reply = at(client, place).chat.completions.create(
        model="gpt-x", messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *ASK], temperature=0.1, top_p=0.5, seed=7,
        presence_penalty=0.5, frequency_penalty=0, reasoning_effort="low", user="me", metadata={"a": "b"}, parallel_tool_calls=True, service_tier="auto",
        store=False, logit_bias={}, response_format={"type": "text"}, max_completion_tokens=100, extra_body={"top_k": 5},
    )  # fmt: skip
    assert place.session.overridden == {"temperature": 0.1, "top_p": 0.5, "seed": 7, "top_k": 5, "presence_penalty": 0.5, "reasoning_effort": "low"}
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 3 and reply.model == "policy"


def test_models_and_health(proxies: Any, client: Any) -> None:
    proxy = proxies(Scripted(), model="mine")
    place = proxy.session()
    mine = at(client, place)
    assert [m.id for m in mine.models.list()] == ["mine"] and mine.models.retrieve("mine").owned_by == "nexrl"
    with pytest.raises(openai.NotFoundError, match="'mine'"):
        mine.models.retrieve("gpt-x")
    assert httpx.get(f"{proxy.url}/health").json() == {"status": "ok", "sessions": 1}


# ---------------------------------------------------------------- commands


def run(code: str, session: Session, **options: Any) -> str | None:
    """A command as an agent."""
    agent = proxied([sys.executable, "-S", "-c", code, "{base_url}"], **options)
    try:
        return agent("q", session=session, data={"x": 1}, cancel=session.cancel)
    finally:
        agent.close()


def test_commands_answer_by_their_last_line() -> None:
    code = "import json, os, sys; row = json.load(sys.stdin); print(row); assert sys.argv[1] == os.environ['OPENAI_BASE_URL']; print(row['query'], row['x'], os.environ['MORE'], '\\n')"
    assert run(code, Session(Scripted()), env={"MORE": "more"}) == "q 1 more"
    assert run("print('{\"final_answer\": null}')", Session(Scripted())) is None
    assert run("print('{\"other\": 1}')", Session(Scripted())) == '{"other": 1}'
    assert run("", Session(Scripted())) is None


def test_commands_fail_with_their_words() -> None:
    with pytest.raises(AgentError, match=r"exit code 3.*no luck"):
        run("import sys; print('x' * 3_000_000); sys.stderr.write('y' * 100_000 + 'no luck'); sys.exit(3)", Session(Scripted()))
    with pytest.raises(AgentError, match="SIGKILL"):
        run("import os; os.kill(os.getpid(), 9)", Session(Scripted()))
    with pytest.raises(AgentError, match="text or None"):
        run("print('{\"final_answer\": 5}')", Session(Scripted()))
    with pytest.raises(ConfigError, match="cannot be started"):
        proxied(["/no/such/agent"])("q", session=Session(Scripted()), data={}, cancel=threading.Event())
    with pytest.raises(ConfigError, match="a command such as"):
        proxied("agent.py")


def test_answers_are_what_openai_declares(proxies: Any) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    place = proxies(Scripted([f"<think>Hm.</think>{THREE_TURNS[1]}"])).session()
    chat, text = {"model": "m", "messages": ASK, "tools": CALL, "logprobs": True, "top_logprobs": 2, "n": 2}, {"model": "m", "prompt": "Say:", "logprobs": 2, "n": 2, "max_tokens": 300}
    ChatCompletion.model_validate_json(httpx.post(f"{place.url}/chat/completions", json=chat, timeout=60).content)
    Completion.model_validate_json(httpx.post(f"{place.url}/completions", json=text, timeout=60).content)
    streamed = httpx.post(f"{place.url}/chat/completions", json={**chat, "stream": True, "stream_options": {"include_usage": True}}, timeout=60)
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert [ChatCompletionChunk.model_validate_json(e) for e in events[:-1]] and events[-1] == "[DONE]"
