"""Workers written for NexRL as its own are: agents loaded in run_agent, numbers posted, hooks that are not here refused by name."""

from __future__ import annotations

import pytest

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.types import ConfigError

pytestmark = pytest.mark.timeout(120)

AGENT = "name: speller\nsystem_prompt: Spell. {{ tone }}\nllm_config: {max_tokens: 6}\nmax_iterations: 2\ntracers:\n  - import: nexau.archs.tracer.adapters.in_memory:InMemoryTracer\n"
EVALUATOR = """
from nexrl.rollout_worker import EvaluationRunResult, Evaluator


class Long(Evaluator):
    def evaluate(self, data, evaluation_target):
        assert [m["role"] for m in evaluation_target.observation] == ["system", "user", "assistant"], evaluation_target
        return EvaluationRunResult(reward=len(evaluation_target.final_answer) / 100, metrics={"letters": float(len(evaluation_target.final_answer))})
"""
HEAD = """
from dataclasses import dataclass, field

from nexau.archs.tracer.adapters import InMemoryTracer
from nexrl.rollout_worker import BaseNexAURolloutWorker, BaseRolloutWorker, NexAUEvaluationTarget, SimpleRolloutWorker


@dataclass
class Output:
    final_answer: str
    observation: list
    rl_params: dict = field(default_factory=dict)
"""
LOADS = """

class Loads(BaseNexAURolloutWorker):
    def run_agent(self, task):
        agent, provider = self.load_agent_from_config(custom_llm_client_provider=lambda: self._inference_client)
        said = agent.run(f"{self._config['task_name']}: {task['prompt']}", context={"tone": "Kindly."}, custom_llm_client_provider=provider)
        traces = next((t.dump_traces() for t in agent.config.tracers if isinstance(t, InMemoryTracer)), [])
        infos = self.trace_processor(traces)
        assert len(infos) == 1 and infos[0]["response_tokens"] and infos[0]["prompt_messages"][0]["content"] == "Spell. Kindly."
        output = Output(said, agent.history, {"trajectory": infos})
        self._activity_tracker.experiment_logger_post(backend="wandb", data={"asked": 2.0, "bad": float("nan")}, step=self._activity_tracker.get_training_step())
        %s
"""
BOTH = 'result = self.evaluator.evaluate(task, NexAUEvaluationTarget(final_answer=output.final_answer, observation=output.observation))\n        return output, result'
GENERATES = """

class Generates(BaseNexAURolloutWorker):
    def run_agent(self, task):
        found = self._inference_client.generate([{"role": "system", "content": "x"}, {"role": "user", "content": task["prompt"]}], max_tokens=4)
        train = found["nexrl_train"]
        assert len(train["response_tokens"]) == len(train["response_logprobs"]) == found["usage"]["completion_tokens"] <= 4
        self.evaluator.evaluate(task, NexAUEvaluationTarget(found["response"], [{"role": r} for r in ("system", "user", "assistant")]))
        return found["response"] or "-"
"""


@pytest.fixture()
def trainer_of(tmp_path, tiny):
    """A trainer with a worker's file, an agent's and an evaluator's."""
    made = []

    def make(worker: str, name: str) -> Trainer:
        (tmp_path / "agent.yaml").write_text(AGENT)
        (tmp_path / "evaluator.py").write_text(EVALUATOR)
        (tmp_path / "worker.py").write_text(HEAD + worker)
        section = {
            "type": "nexau", "nexau_agent_config_path": "agent.yaml", "evaluator_module_path": "evaluator.py:Long", "task_name": "letters", "retries": 0,
            "custom_rollout_worker_module_path": "worker.py", "custom_rollout_worker_class_name": name, "max_tokens": 6,
        }  # fmt: skip
        recipe = Recipe(model=str(tiny("qwen2", max_position_embeddings=1024)), data={"rows": [{"prompt": p} for p in "abcd"], "batch_size": 2}, base_dir=tmp_path, rollout_worker=section,
                        trajectory_pool={"group_size": 2}, trainer={"total_train_steps": 1, "save_freq": 0})  # fmt: skip
        made.append(Trainer(recipe))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.mark.parametrize(("worker", "name", "posts"), [(LOADS % BOTH, "Loads", True), (GENERATES, "Generates", False)], ids=["loads", "generates"])
def test_a_worker_of_nexrls_own_kind_trains(worker, name, posts, trainer_of):
    step = trainer_of(worker, name).step()
    assert {t.status for t in step.rollouts} == {"ok"}, [t.error for t in step.rollouts]
    assert all(t.reward == len(t["final_answer"]) / 100 for t in step.rollouts) if posts else step.metrics["errors/failed"] == 0
    assert not posts or (step.metrics["eval/asked"] == 2.0 and "eval/bad" not in step.metrics and step.metrics["eval/letters"] == pytest.approx(100 * step.metrics["reward/mean"]))
    assert [m["role"] for m in step.rollouts[0]["observation"]] == ["system", "user", "assistant"]
    assert [t.reward for t in step.rollouts.rescore(trainer_of(worker, name).recipe.evaluator())] == [t.reward for t in step.rollouts]


def test_an_output_alone_is_its_final_answer(trainer_of):
    trainer = trainer_of(LOADS % "return output", "Loads")
    trainer.worker.evaluator = None
    rollouts = trainer.rollout()
    assert all(isinstance(t["final_answer"], str) and not t["final_answer"].startswith("{") and t["agent"]["asked"] == 2.0 for t in rollouts)


@pytest.mark.parametrize("base", ["SimpleRolloutWorker", "BaseRolloutWorker", "BaseNexAURolloutWorker"])
def test_a_rollout_that_nobody_would_call_is_refused_when_it_is_loaded(base, tmp_path):
    (tmp_path / "worker.py").write_text(f"{HEAD}\n\nclass Old({base}):\n    def rollout(self, task):\n        return self._put_trajectory({{}})\n")
    with pytest.raises(ConfigError, match=r"Old.rollout is never called here: override format_task_query .* override run_agent\(task\)"):
        load_object(f"{tmp_path}/worker.py:Old")
    recipe = Recipe(model="m", data=[{"prompt": "a"}], evaluator=len, worker_class=f"{tmp_path}/worker.py:Old")
    assert any("rollout is never called here" in str(f) for f in recipe.validate())


@pytest.mark.parametrize("swallow", [True, False])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("self.add_loss_mask([], [])", "Calls has no add_loss_mask: tokens, masks and logprobs are those that were drawn"),
        ("self.save_trace('', 0, 0, {})", "traces are stored with the run's rollouts"),
        ("self._trajectory_pool.put_trajectory({})", "the trainer hands out the rows"),
        ("self._inference_client.completion('a')", r"use self.client.complete\(messages\)"),
        ("self._activity_tracker.experiment_logger_post('wandb', {'a': 'x'}, 1)", "posted to 'wandb': the metric 'a' must be a number, not str 'x'"),
    ],
)
def test_what_is_not_here_ends_the_run_and_says_what_to_use(line, told, swallow, trainer_of):
    body = f"try:\n            {line}\n        except Exception:\n            return None" if swallow else line
    trainer = trainer_of(f"\n\nclass Calls(BaseNexAURolloutWorker):\n    def run_agent(self, task):\n        {body}\n", "Calls")
    with pytest.raises(ConfigError, match=rf"row \d: .*{told}"):
        trainer.step()


def test_names_that_are_asked_for_without_need_are_no_error():
    from nexrl_sdk.backend.mock import MockBackend
    from nexrl_sdk.rollout.worker import SimpleRolloutWorker

    worker = SimpleRolloutWorker(MockBackend(lambda prompt, member: "a"))
    assert not hasattr(worker, "_inference_client") and getattr(worker, "_trajectory_pool", 7) == 7 and not hasattr(worker, "__deepcopy__")
    with pytest.raises(AttributeError, match="no 'sampling_'; did you mean"):
        _ = worker.sampling_


def test_each_sequence_of_a_rollout_may_be_put_with_a_mask_of_its_own(agent_world):
    """As NexRL's workers do: one trajectory a sequence, the fields that are not its own under extra_fields."""
    from nexrl_sdk.nexrl_types import Trajectory
    from nexrl_sdk.rollout.agent import BaseNexAURolloutWorker, WorkerConfig
    from nexrl_sdk.rollout.agent_config import AgentConfig

    def say(text, params):
        return "Paris" if "cities" in text else "42" if "<|tool|>" in text else agent_world.call("sub-agent-geo", message="x")

    class Puts(BaseNexAURolloutWorker):
        def run_agent(self, task):
            said = self.agent.run(task["prompt"], client=self.client, tracer=self.tracer)
            longest = {tuple(i["trajectory"].tokens): i["trajectory"] for i in self.trace_processor([self.tracer.get_trace()])}
            told = "success"
            for t in longest.values():
                mask = [bool(m) and i % 2 == 0 for i, m in enumerate(t.loss_mask)]
                told = self._put_trajectory(Trajectory(tokens=list(t.tokens), loss_mask=mask, reward=0.25, extra_fields={"ground_truth": "42", "final_answer": said, "metrics": {"x": 1.0}, "group_id": "theirs"}))
            return told

    agent = AgentConfig.make("x", sub_agents={"geo": AgentConfig.make("You know cities.", name="geo")})
    found = Puts(WorkerConfig(agent_world.Scripted(say), agent=agent, group_size=1)).run([{"prompt": "a"}])
    assert len(found) == 2 and {(t.status, t.reward, t.ground_truth, t["final_answer"], t.metrics["x"]) for t in found} == {("ok", 0.25, "42", "42", 1.0)}
    for t in found:
        drawn = [i for turn in t["turns"] for i in range(turn["start"], turn["end"])]
        assert [i for i, m in enumerate(t.loss_mask) if m] == [i for i in drawn if i % 2 == 0] and t.group_id == "0:0" and t["masked_by_worker"]


@pytest.fixture()
def agent_world(monkeypatch):
    """The scripted backend of the agents' tests."""
    import importlib
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "rollout"))
    return importlib.import_module("agent_world")
