"""The calculator recipe with an agent of the openai package alone, in its own process: a few steps, and every token accounted for."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("openai", reason="the openai client is not installed")

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.serve.agent_lines import LineAgents

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEPS, PROMPTS, MEMBERS = 3, 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, with a warm start of a few seconds."""
    folder = tmp_path_factory.mktemp("recipes") / "calculator"
    shutil.copytree(RECIPES / "calculator", folder, ignore=shutil.ignore_patterns("__pycache__"))
    task = (folder / "task.py").read_text()
    short = task.replace('"right": 200, "mixed": 80, "batch": 32', '"right": 70, "mixed": 0, "batch": 12')
    assert short != task
    (folder / "task.py").write_text(short)
    (folder / "odd.py").write_text("def odd(row, answer):\n    return float(sum(map(ord, answer)) % 2)\n")  # so early a model is never right, and equal rewards teach nothing
    return folder


@pytest.fixture(scope="module")
def ran(folder: Path) -> Iterator[dict[str, Any]]:
    """Three steps of it: what was drawn at each, its rollouts, and the weights before and after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXRL_CACHE", str(folder.parent / "cache"))
        recipe = Recipe.load(folder / "openai.yaml", [f"data.batch_size={PROMPTS}", f"trajectory_pool.group_size={MEMBERS}", f"trainer.total_train_steps={STEPS}", "trainer.save_freq=0", "logger.backend=[file]", f"output_dir={folder.parent / 'run'}", "trainer.optim.lr=0.003", "rollout_worker.evaluator_module_path=[task.py:Judge,odd.py:odd]"])
        with Trainer(recipe) as trainer:
            backend = trainer.backend
            sample, drawn, steps = backend.sample, [], []

            def spy(prompts: Any, params: Any = None, n: int = 1, **options: Any) -> Any:
                found = sample(prompts, params, n, **options)
                drawn.extend((list(p), c) for p, cs in zip(prompts, found, strict=True) for c in cs)
                return found

            patch.setattr(backend, "sample", spy)
            before = weights(backend, folder.parent / "before")
            for _ in range(STEPS):
                result = trainer.step()
                steps.append((list(drawn), list(result.rollouts), result.metrics))
                drawn.clear()
            agents = trainer.worker.agent.agent
            assert isinstance(agents, LineAgents)
            processes = [p for p in agents._places if p is not None]
            yield {"steps": steps, "before": before, "after": weights(backend, folder.parent / "after"), "recipe": recipe, "processes": processes, "tokenizer": backend.tokenizer}
            agents.close()


def weights(backend: Any, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    backend.save(folder)
    return {k: v for f in sorted(folder.rglob("*.safetensors")) for k, v in load_file(f).items()}


def one(t: Any, turn: Any) -> tuple[Any, ...]:
    """An answer as the trajectory has it: what the model had read, what it drew, and how likely that was."""
    at = slice(turn["start"], turn["end"])
    return tuple(t.tokens[: turn["start"]]), tuple(t.tokens[at]), tuple(t.logprobs[at]), turn["finish_reason"]


@pytest.mark.timeout(300)
def test_all_that_was_drawn_is_learned_from_and_nothing_else(ran: dict[str, Any]) -> None:
    for drawn, rollouts, _ in ran["steps"]:
        assert [t.status for t in rollouts] == ["ok"] * len(rollouts), [t.get("error") for t in rollouts if t.status != "ok"][:1]
        assert len({t.run_id for t in rollouts}) == PROMPTS * MEMBERS
        known = [one(t, turn) for t in rollouts for turn in t["turns"] if turn["learned"]]
        assert Counter(known) == Counter((tuple(p), tuple(c.tokens), tuple(c.logprobs), c.finish_reason) for p, c in drawn)
    several = [t for _, rollouts, _ in ran["steps"] for t in rollouts if len(t["turns"]) > 1]
    assert len(several) >= 5 and max(len(t["turns"]) for t in several) >= 3
    called = {c["function"]["name"] for t in several for m in t.prompt_messages for c in m.get("tool_calls") or ()}
    assert called == {"calculate", "price"}


@pytest.mark.timeout(300)
def test_masks_cover_what_was_sampled_alone(ran: dict[str, Any]) -> None:
    for _, rollouts, _ in ran["steps"]:
        for t in rollouts:
            sampled = [0] * len(t.tokens)
            for turn in t["turns"]:
                sampled[turn["start"] : turn["end"]] = [1] * (turn["end"] - turn["start"])
            assert list(t.loss_mask) == sampled and len(t.logprobs) == len(t.tokens) and all(lp == 0.0 for lp, m in zip(t.logprobs, sampled) if not m)
            mark = {"user": "<|user|>", "tool": "<|result|>"}
            heard = [f"{mark[m['role']]}{m['content']}<|end|>" if m["role"] in mark else "<|assistant|>" for m in [*t.prompt_messages, t.response_message]]
            assert [i for i, m in zip(t.tokens, t.loss_mask) if not m] == ran["tokenizer"].encode("".join(heard), add_special_tokens=False)
            assert all("<unk>" not in ran["tokenizer"].decode(ran["tokenizer"].encode(h)) for h in heard if "ValueError" in h), "the model reads errors in words that it knows"
            assert heard[0] == f"<|user|>{t.data['prompt']}<|end|>"


@pytest.mark.timeout(300)
def test_what_an_agent_elsewhere_did_is_counted(ran: dict[str, Any]) -> None:
    for _, rollouts, metrics in ran["steps"]:
        for t in rollouts:
            asked = [c for turn in t["turns"] for c in turn["message"].get("tool_calls") or ()]
            results = [str(m["content"]) for m in t.prompt_messages if m["role"] == "tool"]
            wrong = sum(r.startswith("Error") for r in results)
            assert {k: t["agent"][k] for k in ("turns", "tool_calls", "tool_errors")} == {"turns": len(t["turns"]), "tool_calls": len(results), "tool_errors": wrong}
            assert len(asked) - len(results) in (0, len(t["turns"][-1]["message"].get("tool_calls") or ()))  # the last turn's calls are not made
            assert t.metrics["Judge/called"] == float(any(s["name"] == "calculate" and s["error"] is None for s in t["trace"]["children"] if s["type"] == "TOOL"))
            assert t["trace"]["children"][0]["type"] == "LLM" and t.metrics["turns"] == len(t["turns"])
        for name in ("turns", "tool_calls", "tool_errors", "Judge/called"):
            assert metrics[f"eval/{name}"] == pytest.approx(sum(t.metrics[name] for t in rollouts) / len(rollouts))


@pytest.mark.timeout(300)
def test_the_logprobs_are_the_models(ran: dict[str, Any], folder: Path) -> None:
    """Of the first step's conversations, by transformers and the model as it was made."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(next((folder.parent / "cache").rglob("calculator-seed*")), dtype=torch.float32).eval()
    for t in ran["steps"][0][1]:
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([list(t.tokens)])).logits[0].log_softmax(-1)
        for i, (token, mask) in enumerate(zip(t.tokens, t.loss_mask)):
            if mask:
                assert t.logprobs[i] == pytest.approx(float(logprobs_TV[i - 1, token]), abs=2e-4)


@pytest.mark.timeout(300)
def test_weights_move_and_later_answers_are_of_later_weights(ran: dict[str, Any]) -> None:
    before, after = ran["before"], ran["after"]
    shared = [k for k in before if before[k].is_floating_point() and before[k].ndim == 2 and k in after]
    assert shared and max(float((before[k] - after[k]).abs().max()) for k in shared) > 1e-4
    assert [{v for t in rollouts for v in t.weight_versions} for _, rollouts, _ in ran["steps"]] == [{i} for i in range(STEPS)]
    assert all(m["grad_norm"] > 0 for _, _, m in ran["steps"])


@pytest.mark.timeout(300)
def test_the_agents_process_stays(ran: dict[str, Any]) -> None:
    (process,) = ran["processes"]
    assert not process.ended and process.child.args[-1] == "agent_openai.py"
