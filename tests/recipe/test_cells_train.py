"""Worker, evaluator, trainer and agent of a notebook's cells train through `Trainer(Recipe(...))`, and again from the files that they are saved as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CELLS = [
    "from nexrl_sdk import Evaluator, Recipe, Trainer\nfrom nexrl_sdk.rollout.evaluator import EvaluationRunResult, NexAUEvaluationTarget\nfrom nexrl_sdk.rollout.rewards import Length\nfrom nexrl_sdk.rollout_worker import AgentRolloutWorker, BaseNexAURolloutWorker\nfrom nexrl_sdk.trainer import SelfHostedGrpoTrainer\nTURNS = 2",
    # an agent is a function of the cell; its worker says when it runs
    "def my_agent(query, session):\n    talk = [{'role': 'user', 'content': query}]\n    for _ in range(TURNS):\n        talk += [session.complete(talk).message, {'role': 'user', 'content': 'go on'}]\n    return talk[-2]['content']",
    "class MyWorker(AgentRolloutWorker):\n    def format_task_query(self, data_item):\n        return data_item['prompt'].upper()\n\n    def run_agent(self, task):\n        return my_agent(self.format_task_query(task), self.client)",
    "class MyEvaluator(Evaluator):\n    def __init__(self, scale=1.0, shape=None):\n        self.scale, self.shape = scale, shape\n\n    def evaluate(self, data, evaluation_target):\n        assert isinstance(evaluation_target, NexAUEvaluationTarget)\n        steps = evaluation_target.observation[0]['trace']['children']\n        more = self.shape.evaluate(data, evaluation_target).reward\n        return EvaluationRunResult(self.scale * len(evaluation_target.final_answer) + more, metrics={'steps': float(len(steps))})",
    "class MyTrainer(SelfHostedGrpoTrainer):\n    def _prepare_batch(self, batch):\n        batch, metrics = super()._prepare_batch(batch)\n        return batch, {**metrics, 'mine/rows': float(len(batch))}",
    "recipe = Recipe(model=MODEL, data=[{'prompt': p} for p in 'abcd'], evaluator=MyEvaluator(0.5, shape=Length(4, penalty=0.125)), worker_class=MyWorker, trainer_class=MyTrainer,\n"
    "                rollout_worker={'max_tokens': 4}, trajectory_pool={'group_size': 2}, trainer={'total_train_steps': 2, 'save_freq': 0}, seed=3)\nassert not [f for f in recipe.validate() if f.level == 'error'], recipe.validate()",
    "with Trainer(recipe) as trainer:\n    steps = [trainer.step() for _ in range(2)]\nassert type(trainer).__name__ == 'MyTrainer' and {t.status for s in steps for t in s.rollouts} == {'ok'}, [t.error for s in steps for t in s.rollouts]",
    "assert [t.reward for t in steps[0].rollouts.rescore(MyEvaluator(0.5, shape=Length(4, penalty=0.125)))] == [t.reward for t in steps[0].rollouts]",
    "recipe.save(FOLDER)\nagain = Recipe.load(FOLDER)\nassert again == recipe, (again.canonical(), recipe.canonical())",
    "import json\nfrom pathlib import Path\nPath(FOLDER, 'told.json').write_text(json.dumps([{k: s.metrics[k] for k in ('reward/mean', 'eval/steps', 'mine/rows', 'eval/turns', 'loss')} for s in steps]))",
]


@pytest.mark.timeout(300)
def test_from_cells_to_files(tiny, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    first = f"MODEL, FOLDER = {str(tiny('qwen2', max_position_embeddings=512))!r}, {str(tmp_path / 'saved')!r}"
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_code_cell(c) for c in [first, *CELLS]]
    NotebookClient(nb, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = json.loads((tmp_path / "saved" / "told.json").read_text())
    assert [t["eval/turns"] for t in told] == [2.0, 2.0] and all(t["mine/rows"] >= 32.0 for t in told)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-m", "nexrl_sdk.launch.cli", "run", str(tmp_path / "saved"), "--out", str(tmp_path / "run"), "--no-report"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == len(told) and all({k: line[k] for k in t} == pytest.approx(t, rel=1e-4) for line, t in zip(steps, told))  # a cell and a script give the same numbers
