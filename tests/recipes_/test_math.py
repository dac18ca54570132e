"""The math recipes: their evaluator, that all four are valid, and their loading on small rows of the Hub's shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from nexrl_sdk import BaseEvaluationTarget, LocalBackend, Recipe, Trainer
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.rollout.evaluator import as_evaluator, score

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "math"
PLACES = {"local": "SelfHostedGrpoTrainer", "self_hosted": "SelfHostedGrpoTrainer", "tinker": "RemoteApiGrpoTrainer", "weaver": "RemoteApiGrpoTrainer"}
ROWS = [
    ("What is half of 7?", r"Half of seven is $7/2$, so the answer is $\boxed{\frac{7}{2}}$.", "Prealgebra"),
    ("Solve $x^2=5$ for $x>0$.", r"We have $x=\boxed{\sqrt{5}}$.", "Algebra"),
    ("Where do they meet?", r"At $\boxed{\left(1,\,-2\right)}$.", "Geometry"),
    ("How many?", r"There are $\boxed{1{,}200}$.", "Counting"),
]


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1/2", r"\tfrac{1}{2}"),
        (r"-\frac{3}{4}", "-0.75"),
        ("1,200", "1200"),
        (r"10{,}000", "10000"),
        ("$5$", "5"),
        ("x = 5", "5"),
        (r"30^\circ", "30"),
        (r"12\text{ inches}", "12"),
        (r"50\%", "50"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\sqrt5", r"\sqrt{5}"),
        (r"\text{Evelyn}", "Evelyn"),
        ("2.50", "2.5"),
        ("−3", "-3"),
        (r"\$18.90", "18.9"),
    ],
)
def test_answers_that_are_the_same(given, truth):
    same = load_object("evaluator.py:same", RECIPE)
    assert same(given, truth) and same(truth, given)


@pytest.mark.parametrize(("given", "truth"), [("5", "-5"), ("", ""), ("12", "1,2"), (r"\frac{1}{2}", r"\frac{2}{1}"), ("(1,2)", "(2,1)"), (r"\frac{1}{0}", "0"), ("x", "y"), ("2x+1", "1+2x"), ("(1,200)", "1200")])
def test_answers_that_are_not(given, truth):
    assert not load_object("evaluator.py:same", RECIPE)(given, truth)


def test_rewards_states_and_ground_truth():
    evaluator = as_evaluator("evaluator.py:MathEvaluator", RECIPE)
    row = {"problem": ROWS[0][0], "solution": ROWS[0][1]}
    for answer, reward, boxed in [(r"so \boxed{3.5}", 1.0, 1.0), (r"\boxed{4} or rather \boxed{\frac72}", 1.0, 1.0), (r"\boxed{7}", 0.0, 1.0), ("it is 3.5", 0.0, 0.0), (r"\boxed{3.5", 0.0, 0.0)]:
        result = evaluator.evaluate(row, BaseEvaluationTarget(answer))
        assert (result.reward, result.ground_truth, result.metrics) == (reward, r"\frac{7}{2}", {"boxed": boxed})
    broken = score(evaluator, {"problem": "?", "solution": "none"}, BaseEvaluationTarget(r"\boxed{1}"))
    assert broken.status == "error" and broken.reward is None and "no \\boxed answer" in str(broken.error)


@pytest.mark.parametrize("place", PLACES)
def test_all_four_are_valid_offline(place):
    from nexrl_sdk.trainer.base import trainer_class

    recipe = Recipe.load(RECIPE / f"{place}.yaml")
    found = [f for f in recipe.validate() if f.level == "error" and "not installed" not in f.message]
    assert found == [] and trainer_class(recipe).__name__ == PLACES[place]
    assert recipe.config.data.prompt_key == "problem" and recipe.config.service.inference_service.backend == {"local": "local", "self_hosted": "vllm"}.get(place, place)


@pytest.fixture(scope="module")
def local_copy(tmp_path_factory):
    """Four rows laid out as the Hub has them: one parquet file a split."""
    import polars

    folder = tmp_path_factory.mktemp("math")
    (folder / "data").mkdir()
    table = polars.DataFrame({"problem": [p for p, _, _ in ROWS], "level": ["Level 1"] * 4, "solution": [s for _, s, _ in ROWS], "type": [t for _, _, t in ROWS]})
    for split in ("train", "test"):
        table.write_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("place", ["local", "tinker"])
def test_one_step_of_training(place, local_copy, tiny, tmp_path, monkeypatch):
    """The whole way on a small model of this process: Hub-shaped rows, chat template with the system prompt, answers, the evaluator, an update."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    small = ["data.batch_size=2", "trajectory_pool.group_size=2", "rollout_worker.max_tokens=6", "trainer.total_train_steps=1", "trainer.save_freq=0", "trainer.autocast=none", "model.dtype=float32"]
    model = tiny(max_position_embeddings=1024)
    recipe = Recipe.load(RECIPE / f"{place}.yaml", [f"data.hub={local_copy}", f"validate.data.hub={local_copy}", f"model.path={model}", *small])
    with LocalBackend.from_recipe(recipe) as backend, Trainer(recipe, backend) as trainer:
        assert type(trainer).__name__ == PLACES[place]
        result = trainer.step()
        first = result.rollouts[0]
        assert first.prompt.startswith("<|system|>Reason step by step") and first.prompt.endswith("<|end|><|assistant|>") and first.data["problem"] in first.prompt
        assert {t.ground_truth for t in result.rollouts} <= {r"\frac{7}{2}", r"\sqrt{5}", r"\left(1,\,-2\right)", r"1{,}200"}
        assert all(t.status == "ok" and t.reward in (0.0, 1.0) for t in result.rollouts) and result.metrics["errors/failed"] == 0
        assert len(trainer.evaluate().rollouts) == len(ROWS)
