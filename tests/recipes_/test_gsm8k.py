"""The gsm8k recipe: its evaluator, and its loading on a small local dataset of the Hub's shape."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from nexrl_sdk import BaseEvaluationTarget, Recipe
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.rollout.data import load_rows
from nexrl_sdk.rollout.evaluator import as_evaluator, score

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k"
ROWS = [
    ("Natalia sold 48 clips in April, and half as many in May. How many in all?", "In May 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"),
    ("A car costs $1,500 and loses $300. What is it worth?", "1,500 - 300 = <<1500-300=1200>>1,200\n#### 1,200"),
    ("It is 4 degrees and gets 7 degrees colder. How many degrees is it?", "4 - 7 = <<4-7=-3>>-3\n#### -3"),
    ("Half of seven?", "7 / 2 = <<7/2=3.5>>3.5\n#### 3.5"),
]


@pytest.mark.parametrize(
    ("text", "number", "how"),
    [
        ("So the answer is 72.", "72", "last"),
        ("#### 72", "72", "hashes"),
        ("#### 1,234", "1234", "hashes"),
        ("#### $1,234,567.50 in all, over 3 years", "1234567.50", "hashes"),
        ("#### -3", "-3", "hashes"),
        ("#### −3", "-3", "hashes"),
        ("#### 12\nNo, wait.\n#### 14", "14", "hashes"),
        ("####\nnothing after them, but 9 before? no: 9", "9", "hashes"),
        ("the sum is 8\n#### unknown", "8", "last"),
        (r"thus \boxed{72}", "72", "boxed"),
        (r"thus \boxed{\text{about } \$1,234.5}", "1234.5", "boxed"),
        (r"thus \boxed{10{,}000} and 3 more words", "10000", "boxed"),
        (r"\boxed{4} or rather \boxed{5}", "5", "boxed"),
        (r"\boxed{no number} but 6", "6", "last"),
        (r"\boxed{6} then \boxed{7", "6", "boxed"),
        ("8-3=5", "5", "last"),
        ("he is 8-3", "3", "last"),
        ("x = -3.50", "-3.50", "last"),
        ("20%", "20", "last"),
        (".5 of it", ".5", "last"),
        ("3, 4", "4", "last"),
        ("1,5", "5", "last"),
        ("no number at all", None, "none"),
        ("", None, "none"),
    ],
)
def test_the_number_that_an_answer_arrives_at(text, number, how):
    final_number = load_object("evaluator.py:final_number", RECIPE)
    assert final_number(text) == (None if number is None else Decimal(number), how)


def test_rewards_states_and_ground_truth():
    evaluator = as_evaluator("evaluator.py:GSM8KEvaluator", RECIPE)
    row = {"question": ROWS[1][0], "answer": ROWS[1][1]}
    for answer, reward, marked in [("#### 1200", 1.0, 1.0), ("it is $1,200.00", 1.0, 0.0), ("#### 1,500", 0.0, 1.0), ("I do not know", 0.0, 0.0)]:
        result = evaluator.evaluate(row, BaseEvaluationTarget(answer))
        assert (result.reward, result.ground_truth, result.metrics) == (reward, "1200", {"marked": marked})
    broken = score(evaluator, {"question": "?", "answer": "none"}, BaseEvaluationTarget("#### 1"))
    assert broken.status == "error" and broken.reward is None and "holds no number" in str(broken.error)


@pytest.fixture(scope="module")
def local_copy(tmp_path_factory):
    """Four rows laid out as the Hub has openai/gsm8k: a card with `configs:`, and one parquet file a split."""
    import polars

    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "main").mkdir()
    table = polars.DataFrame({"question": [q for q, _ in ROWS], "answer": [a for _, a in ROWS]})
    for split in ("train", "test"):
        table.write_parquet(folder / "main" / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n# GSM8K\n"
    )
    return folder


@pytest.fixture()
def recipe(local_copy, tiny, tmp_path, monkeypatch):
    """The recipe as it is run, but for where model and rows lie, and for size."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    small = ["data.batch_size=2", "trajectory_pool.group_size=2", "rollout_worker.max_tokens=6", "trainer.total_train_steps=1", "trainer.save_freq=0", "trainer.autocast=none"]
    return Recipe.load(RECIPE, [f"data.hub={local_copy}", f"validate.data.hub={local_copy}", f"model.path={tiny(max_position_embeddings=1024)}", *small])


def test_the_recipe_itself_is_valid_offline():
    assert [f for f in Recipe.load(RECIPE).validate() if getattr(f, "level", "") == "error"] == []


def test_rows_load_as_from_the_hub(recipe):
    data = recipe.config.data
    rows = load_rows({"hub": data.hub}, split=data.split, name=data.name, columns=["question", "answer"])
    assert [(r["question"], r["answer"]) for r in rows] == ROWS
    final_number = load_object("evaluator.py:final_number", RECIPE)
    assert [str(final_number(r["answer"])[0]) for r in rows] == ["72", "1200", "-3", "3.5"]


def test_one_step_of_training(recipe):
    """The whole way: Hub-shaped rows, chat template with the system prompt, answers, the evaluator, an update."""
    from nexrl_sdk import Trainer

    trainer = Trainer(recipe, run=False)
    try:
        result = trainer.step()
        first = result.rollouts[0]
        assert first.prompt.startswith("<|system|>Solve the problem") and first.prompt.endswith("<|end|><|assistant|>")
        assert first.data["question"] in first.prompt and "####" not in first.prompt.split("<|user|>")[1]
        assert {t.ground_truth for t in result.rollouts} <= {"72", "1200", "-3", "3.5"}
        assert all(t.status == "ok" and t.reward in (0.0, 1.0) for t in result.rollouts)
        assert result.metrics["eval/marked"] == 0.0 and result.metrics["errors/failed"] == 0
        assert len(trainer.evaluate().rollouts) == len(ROWS)
    finally:
        trainer.backend.close()
