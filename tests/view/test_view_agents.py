"""Agents' rollouts as a reader meets them: text and not numbers, one row a rollout, what was drawn apart from what was read, and their numbers."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from test_view_report import CONTRAST
from view_oracle import ATTACKS, check

from nexrl_sdk.rollout.rollouts import Rollouts, tokenizer_of
from nexrl_sdk.types import Trajectory
from nexrl_sdk.view import report as rep, rollouts as r


class Bytes:
    all_special_ids = ()

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


SPAN = {"type": "LLM", "name": "model", "duration_ms": 312.0, "error": None, "children": []}
TRACE = {"type": "AGENT", "name": "shopper", "duration_ms": 834.0, "start_time": 1795297289.97, "children": [SPAN, {**SPAN, "type": "TOOL", "name": "price", "error": "LookupError: closed"}]}


def talk(question: str = "job*99", answer: str = "27819", **more: Any) -> Trajectory:
    """Asked, called, told, answered."""
    parts = [(question, 0), ('<call>{"item": "job"}</call>', 1), ("281", 0), (answer, 1)]
    edges = np.cumsum([0, *(len(s.encode()) for s, _ in parts)]).tolist()
    mask = [m for s, m in parts for _ in s.encode()]
    call = {"id": "c", "type": "function", "function": {"name": "price", "arguments": {"item": "job"}}}
    fields: dict[str, Any] = {
        "prompt": f"<user>{question}", "response": "".join(s for s, _ in parts[1:]), "data": {"prompt": question, "answer": answer}, "group_id": "0:5", "run_id": "0:5/0", "final_answer": answer,
        "prompt_messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "name": "price", "content": "281"}],
        "response_message": {"role": "assistant", "content": answer}, "agent": {"turns": 2, "tool_calls": 1, "tool_errors": 1, "seconds": 0.8}, "metrics": {"turns": 2.0, "success": 1.0},
        "turns": [{"start": edges[k], "end": edges[k + 1], "place": k, "learned": True, "message": {"role": "assistant", "content": "" if k == 1 else answer, "tool_calls": [call] if k == 1 else []}} for k in (1, 3)],
        "trace": TRACE, "tools": [call], "seed": 2540825216185364988, "step": 79, "reward": 1.0,
    }  # fmt: skip
    return Trajectory(tokens=[b for s, _ in parts for b in s.encode()], loss_mask=mask, logprobs=[-1.0 * m for m in mask], **{**fields, **more})


def pieces(run: int = 0, **more: Any) -> list[Trajectory]:
    """A rollout of three trajectories: the agent's, a sub-agent's, and one that goes on behind a fork."""
    common = {"data": {"prompt": "job*99"}, "run_id": f"0:5/{run}", **more}
    return [talk(**common), talk(**{"question": "look it up", "answer": "found", "agent_name": "scout", **common}), talk(**{"question": "and then", "answer": "done", **common})]


def cells(page: Any) -> list[dict[str, Any]]:
    return [a for t, a in page.tags if t == "i" and (a.get("class") or "").split()[:1] == ["c"]]


def test_one_trajectory_shows_text_whoever_shows_it() -> None:
    page = check(str(talk()._repr_html_()))  # stored, or from anywhere: no tokenizer is known
    assert 'calls price({"item": "job"})' in page.text and "27819" in page.text and "281" in page.text
    assert len(cells(page)) == sum(talk().loss_mask) and page.count("div", class_="s drawn") == 2 and page.count("div", class_="s read") == 2
    rollouts = Rollouts([talk(), talk(run_id="0:5/1")], Bytes())
    for t in (rollouts[0], max(rollouts, key=lambda t: len(t["turns"])), rollouts[1:][0], rollouts.filter(run_id="0:5/1")[0]):
        page = check(str(t._repr_html_()))
        assert '<call>{"item": "job"}</call>' in page.text and any("p 0.368" in (a.get("title") or "") for _, a in page.tags)


def test_a_tokenizer_is_known_as_long_as_its_trajectory() -> None:
    tokenizer = Bytes()
    t = Rollouts([talk()], tokenizer)[0]
    assert tokenizer_of(t) is tokenizer and tokenizer_of(t.copy()) is None and tokenizer_of({}) is None and tokenizer_of(None) is None
    other = Bytes()
    assert tokenizer_of(Rollouts([t], other)[0]) is other  # the last that showed it
    from nexrl_sdk.rollout import rollouts as module

    key = id(t)
    assert key in module._TOKENIZERS
    del t
    gc.collect()
    assert key not in module._TOKENIZERS


def test_a_plain_answer_without_a_tokenizer_is_text_too() -> None:
    page = check(str(r.trajectory_html(Trajectory(tokens=[7001, 7002, 7003], loss_mask=[0, 1, 1], logprobs=[0.0, -1.0, -2.0], prompt="why?", response="so", reward=1.0))))
    assert "why?" in page.text and "so" in page.text and "7002" not in page.text and len(cells(page)) == 2


def test_the_trace_is_a_tree_and_internals_are_folded() -> None:
    page = check(str(r.trajectory_html(talk())))
    assert "trace: 3 spans, 0.8 s" in page.text and "LookupError: closed" in page.text and "1.8e9" not in page.text and "dict of" not in page.text
    front = page.text.split("more field")[0]
    assert "2,540,825" not in front and "2,540,825" in page.text and "steps done when it was asked" in page.text and "2 turns, 1 call, 1 tool error" in front
    assert "success" in front and "turns 2" not in front  # the agent's own numbers are not said twice


def test_a_trace_of_any_size_and_shape_is_cut() -> None:
    deep: dict[str, Any] = {"name": "x" * 10_000, "error": "y" * 10_000}
    for _ in range(20_000):
        deep = {"name": "n", "children": [deep, None, 3], "duration_ms": math.nan}
    page = check(str(r.trajectory_html(talk(trace=deep))), limit=60_000)
    assert "trace: 10,000 spans" in page.text and "9,940 more spans" in page.text
    for odd in ({"children": "abc"}, {"children": [[]]}, {"name": None, "type": 3, "duration_ms": "x", "error": {"a": 1}}, {"a": 1}):
        check(str(r.trajectory_html(talk(trace=odd))), limit=60_000)


@pytest.mark.parametrize("attack", ATTACKS, ids=[str(i) for i in range(len(ATTACKS))])
def test_attacks_are_inert_in_pieces_traces_and_reports(attack: str, tmp_path: Path) -> None:
    found = pieces(agent_name=attack, trace={"name": attack, "type": attack, "error": attack, "children": [{"name": attack}]}, data={"prompt": attack}, tools=[attack, {"function": {"name": attack}}])
    found[0]["turns"][0]["message"] = {"role": attack, "content": attack, "reasoning_content": attack, "tool_calls": [{"function": {"name": attack, "arguments": {attack: attack}}}]}
    for view in (r.rollouts_html(found), r.rollouts_html(found, Bytes()), r.trajectory_html(found[0]), r.trajectory_html(found[1], Bytes())):
        check(str(view), limit=400_000)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0}\n')
    Rollouts(found).save(tmp_path / "rollouts" / "step_000001.jsonl")
    check(rep.report_html(tmp_path), limit=600_000)


def test_pieces_are_pieces_of_one_rollout() -> None:
    found = [*pieces(0), *pieces(1, reward=0.0), *pieces(2, status="error", reward=None, error="ValueError: no")]
    page = check(str(r.rollouts_html(found)))
    assert "3 answers to 1 prompt, in 9 pieces" in page.text and "1 error" in page.text and "mean reward 0.50" in page.text
    assert page.text.count("piece 2 of 3 scout") == 3 and page.text.count("1.00") == 1 and "1 without a reward" in page.text
    head = page.text[page.text.index("tokens") : page.text.index("mean 0.50")]
    assert "job*99" in head and "look it up" not in head
    assert page.text.count("look it up") == 3  # what the sub-agent was asked stands before its answer
    assert page.text.count("ValueError: no") == 1
    coloured = check(str(r.rollouts_html(found, Bytes())))
    assert coloured.count("div", class_="s drawn") == 18 and coloured.text.count("ValueError: no") == 1
    assert r.leanings([found[0], found[3]], known=False) == [0.5, -0.5]
    assert repr(Rollouts(found)) == "Rollouts(3 in 1 groups, 9 pieces, mean reward 0.500, 1 error)" and repr(Rollouts(found[::3])) == "Rollouts(3 in 1 groups, mean reward 0.500, 1 error)"
    alone = check(str(r.rollouts_html([talk(run_id=None), talk(run_id=None)])))
    assert "2 answers to 1 prompt" in alone.text and "pieces" not in alone.text
    apart = check(str(r.rollouts_html([talk(step=1), talk(step=2)])))
    assert "2 answers to 1 prompt" in apart.text  # the same name in two steps is two rollouts


def test_the_groups_heading_is_the_rows_question() -> None:
    t = talk(prompt="<system>be brief<user>What is 6*7?", data={"id": "x9", "question": "What is 6*7?", "answer": "42", "note": "not in the prompt at all"})
    assert r.asked_of(t) == "What is 6*7?"
    assert r.asked_of(talk(prompt="other", data={"id": "other things"})) is None and r.asked_of({"prompt": "p", "data": {"prompt": "q"}}) is None


def test_turns_and_calls_have_columns() -> None:
    page = check(str(r.rollouts_html([talk()], Bytes())))
    assert all(page.count("td", class_="nx-num", title=name) == 1 for name in ("turns", "tool calls", "tokens")) and "1 failed" in page.text
    assert "calls" not in check(str(r.rollouts_html([Trajectory(tokens=[65], loss_mask=[1], logprobs=[-1.0], response="A", reward=1.0)]))).text


def test_a_strip_shows_every_drawn_token_and_no_other() -> None:
    logprobs, mask = np.tile([-0.01, -0.01, -3.0, 0.0], 500), np.tile([1, 1, 1, 0], 500)
    page = check(str(r.strip_html(logprobs, mask, 64)), limit=40_000)
    assert 100 <= len(cells(page)) <= 200 and page.count("i", class_="c p5") == len(cells(page)) and "more answers" in page.text
    page = check(str(r.strip_html([-0.01] * 30 + [0.0] * 90 + [-3.0] * 30, [1] * 30 + [0] * 90 + [1] * 30)))
    assert [a["class"] for a in cells(page)] == ["c p0"] * 30 + ["c p5"] * 30 and page.count("i", class_="gap", title="90 tokens read") == 1
    page = check(str(r.strip_html(np.full(5000, -0.01), None)))
    assert len(cells(page)) <= 64 and cells(page)[0]["title"] == "79 tokens: p 0.99 or more"
    assert r.strip_html([], []) == "" and r.strip_html([-1.0], [0]) == "" and len(cells(check(str(r.strip_html([-1.0, math.nan], [1]))))) == 2


def test_a_batch_of_conversations_is_read_not_prompted() -> None:
    import torch

    class Batch:
        values: ClassVar = {"attention_mask": torch.ones(2, 6), "loss_mask": torch.tensor([[0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]])}
        metadata: ClassVar = {}

        def __len__(self) -> int:
            return 2

    assert "read ■  learned from" in check(str(r.batch_html(Batch()))).text
    Batch.values["loss_mask"][0, 3] = 0
    assert "prompt ■  learned from" in check(str(r.batch_html(Batch()))).text


def test_a_steps_card_says_turns_and_calls_and_no_zeros() -> None:
    metrics = {"reward/mean": 0.25, "loss": 1e-8, "policy/kl": 1e-8, "eval/turns": 1.5, "eval/tool_calls": 0.5, "tokens/total": 2082.0, "group/count": 128.0}
    page = check(str(r.step_html(SimpleNamespace(step=1, metrics=metrics, rollouts=None))))
    tiles = page.text.split("7 metrics")[0]
    assert "turns1.5" in tiles and "tool calls0.5" in tiles and "loss" not in tiles and "KL" not in tiles
    assert "128" in page.text and "128.0" not in page.text and "2,082" in page.text


def agents_run(folder: Path, steps: int = 400, shared: str | None = "job*99") -> Path:
    """A run of agents: questions of the first and of the last step have one in common."""
    (folder / "rollouts").mkdir(parents=True)
    lines = [
        {"step": s, "reward/mean": s / steps, "loss": 1e-8 * (s % 3), "policy/approx_kl": 1e-13 * s, "tokens/truncated_frac": 0.9 if 16 < s <= 40 else 0.0, "eval/turns": 1 + s / steps, "eval/tool_calls": s / steps, "rollouts/count": 128.0}
        for s in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    for s, own in ((1, "a"), (steps, "b")):
        groups = [f"{own}{i}" for i in range(3)] + ([shared] if shared else [])
        found = [t for g, q in enumerate(groups) for t in pieces(0, data={"prompt": q}, group_id=f"0:{own}{g}")]
        bad = pieces(1, data={"prompt": own}, group_id=f"0:{own}9", status="error", reward=None, error="ValueError: no")
        Rollouts([*found, *bad]).save(folder / "rollouts" / f"step_{s:06d}.jsonl")
    return folder


def section(page: Any, name: str, until: str) -> str:
    rest = page.text.rsplit(name, 1)[1]
    return rest[: rest.index(until)]


def test_the_report_shows_conversations_and_pieces(tmp_path: Path) -> None:
    page = check(rep.report_html(agents_run(tmp_path / "r")))
    said = section(page, "Answers, early and late", "Failures")
    assert said.startswith("The first 1 training prompt. ") and said.count("job*99") == 1 and "a0" not in said  # the one that both have
    assert said.count("piece 2 of 3 scout") == 2 and said.count("1.00") == 2 and 'calls price({"item": "job"})' in said and "<call>" not in said
    assert page.count("div", class_="s drawn") == 12 and len(cells(page)) == 2 * sum(sum(t.loss_mask) for t in pieces())
    failed = section(page, "Failures", "Recipe")
    assert "2error" in failed and "ValueError: no" in failed  # two rollouts of three pieces each
    page = check(rep.report_html(agents_run(tmp_path / "apart", shared=None)))
    said = section(page, "Answers, early and late", "Failures")
    assert "of each step; none is in both." in said and "a0" in said and "b0" in said


def test_the_report_draws_agents_numbers_and_stays_within_shares(tmp_path: Path) -> None:
    run = rep.read_run(agents_run(tmp_path / "r"))
    drawn, shown = rep._charts(run)
    assert {"eval/turns", "eval/tool_calls", "tokens/truncated_frac"} <= shown and not {"loss", "policy/approx_kl"} & shown
    means = rep._means(run.metrics["tokens/truncated_frac"])
    assert len(means) <= 120 and min(v for _, v in means) == 0 and math.isclose(sum(v for _, v in means) / len(means), 24 * 0.9 / 400, rel_tol=1e-9)
    (chart,) = [str(c) for c in drawn if "Cut answers" in c]
    page = check(chart)
    assert "means of 4 steps" in page.text and "means of" not in "".join(str(c) for c in drawn if "Cut answers" not in c)
    paths = [a["d"] for t, a in page.tags if t == "path"]
    floor = 190 - 24  # where 0 is drawn
    heights = [float(point.split()[1]) for d in paths for point in d.replace("M", "L").split("L")[1:]]
    assert max(heights) <= floor + 0.1
    row = rep._course_row("rollouts/count", run.metrics["rollouts/count"])
    assert row[2:] == [128, 128, 128, 128] and all(isinstance(x, int) for x in row[2:])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_conversations_in_a_browser(browser: Any, tmp_path: Path, theme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    page.goto(rep.write_report(agents_run(tmp_path / "r")).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    widths = page.evaluate("[...document.querySelectorAll('.nx-said>div:last-child')].map(e => e.clientWidth)")
    assert min(widths) >= 280
    beyond = page.evaluate("[...document.querySelectorAll('.nx-strip')].filter(e => [...e.children].some(c => c.getBoundingClientRect().right > e.getBoundingClientRect().right + 1)).length")
    assert beyond == 0
    same = page.evaluate("(() => { const c = s => getComputedStyle(document.querySelector(s)).backgroundColor; return c('.nx-strip .p3') === 'rgba(0, 0, 0, 0)' })()")
    assert not same
    read, drawn = page.evaluate("['.nx-talk>.read .nx-q', '.nx-talk>.drawn .nx-q'].map(s => getComputedStyle(document.querySelector(s)).color)")
    assert read != drawn
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.0, where
    page.set_content(str(r.rollouts_html(pieces())))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('.nx-groups .nx-a').clientWidth") >= 280
    named = page.evaluate("getComputedStyle(document.querySelector('.nx-groups td[title=turns]'), '::after').content")
    assert ("turns" in named) == (width < 640)  # where there is no heading, the numbers say what they are
    page.close()
