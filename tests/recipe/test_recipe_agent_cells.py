"""Agents that a cell gives to a recipe: they train, are saved as files, and come back as the same recipe."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nexrl_sdk import AgentConfig, Recipe, Trainer
from nexrl_sdk.types import ConfigError

pytestmark = pytest.mark.timeout(240)
ROWS = [{"prompt": p} for p in "abcd"]
FLOOR = 2


def double(number: int) -> int:
    """Twice a number."""
    return FLOOR * number


def over_http(base_url: str, row: dict[str, Any]) -> str:
    """Knows an address alone."""
    body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body)) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def in_session(query: str, session: Any) -> str:
    """Is given a session."""
    return str(session.complete([{"role": "user", "content": query * FLOOR}]).message["content"])


def length(row: dict[str, Any], answer: str) -> float:
    return float(len(answer))


def made(model: Path, agent: Any, **more: Any) -> Recipe:
    return Recipe(model=str(model), data=ROWS, evaluator=length, agent=agent, rollout_worker={"max_tokens": 4, **more.pop("rollout_worker", {})}, trajectory_pool={"group_size": 2}, trainer={"total_train_steps": 1, "save_freq": 0}, seed=3, **more)


AGENTS = {
    "function": over_http, "session": in_session,
    "config": AgentConfig.make("You are {{ who }}.", tools=[double], context={"who": "a calculator"}, max_iterations=3, sub_agents={"other": AgentConfig.make("Help.")}),
}  # fmt: skip


@pytest.mark.parametrize("kind", AGENTS)
def test_an_agent_of_a_cell_trains_and_is_saved(kind: str, tiny: Any, tmp_path: Path) -> None:
    recipe = made(tiny("qwen2", max_position_embeddings=512), AGENTS[kind])
    assert recipe.config.rollout_worker.type == "agent" and not [f for f in recipe.validate() if f.level == "error"]
    with Trainer(recipe) as trainer:
        step = trainer.step()
    assert {t.status for t in step.rollouts} == {"ok"} and step.metrics["reward/mean"] > 0
    recipe.save(tmp_path / "saved")
    again = Recipe.load(tmp_path / "saved")
    assert again == recipe and "agent.py" in str(again.config.rollout_worker.agent_function)
    with Trainer(again) as trainer:
        same = trainer.step()
    assert [t.tokens for t in same.rollouts] == [t.tokens for t in step.rollouts]


def test_files_commands_and_references_go_into_their_keys(tmp_path: Path) -> None:
    for given, key in (("agent.yaml", "agent_config_path"), (Path("a/agent.yml"), "agent_config_path"), ("agent.py:solve", "agent_function"), (["{python}", "agent.py"], "agent_command")):
        recipe = made(tmp_path, given)
        worker = recipe.to_dict()["rollout_worker"]
        assert worker["type"] == "agent" and worker[key] == (given if isinstance(given, list) else str(given)) and not recipe.live.get("agent_function")
    with pytest.raises(ConfigError, match=r"ends with \.yaml; a function is named 'file\.py:name'; a command is a list"):
        made(tmp_path, "my agent")
    assert made(tmp_path, None, rollout_worker={"agent_function": over_http}).live["agent_function"] is over_http


@pytest.mark.parametrize(("agent", "said"), [(7, "is int"), (lambda: "x", r"<lambda>\(\)"), (AgentConfig, "is a class")])
def test_what_is_no_agent_is_refused(agent: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"agent_function: an agent is a function \(base_url, row\) or \(query, session\).*{said}"):
        made(tmp_path, agent).agent()


def test_an_agent_and_another_contradict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both name an agent"):
        made(tmp_path, over_http, rollout_worker={"agent_config_path": "agent.yaml"}).agent()


def test_an_agent_that_was_changed_is_not_saved_as_it_was(tiny: Any, tmp_path: Path) -> None:
    agent = AgentConfig.make("You are here.", tools=[double])
    agent.max_iterations = 5
    with pytest.raises(ConfigError, match="was changed after it was made"):
        made(tiny("qwen2", max_position_embeddings=512), agent).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_an_agents_tools_do_is_part_of_a_recipe(tmp_path: Path) -> None:
    def other(number: int) -> int:
        """Twice a number."""
        return 3 * number

    other.__name__ = "double"
    same, changed = AgentConfig.make(tools=[double]), AgentConfig.make(tools=[other])
    assert made(tmp_path, same).fingerprint() == made(tmp_path, AgentConfig.make(tools=[double])).fingerprint() != made(tmp_path, changed).fingerprint()


def test_a_command_is_found_from_where_the_recipe_is_saved(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text("print('x')\n")
    recipe = Recipe(model=str(tmp_path), data=ROWS, evaluator=length, agent=["{python}", "mine.py"], base_dir=tmp_path / "here")
    assert not recipe.agent_problems()
    recipe.save(tmp_path / "there")
    assert not Recipe.load(tmp_path / "there").agent_problems()
