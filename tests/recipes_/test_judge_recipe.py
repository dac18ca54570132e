"""The judge recipe: valid without a judge, one step with a judge that answers by a rule, and what happens where there is none."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nexrl_sdk import Recipe, Trainer
from nexrl_sdk.rollout.code import load_object
from nexrl_sdk.rollout.evaluator import as_evaluator, score

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "judge"
ROW = {"prompt": "Explain rain.", "criteria": "It is true.", "sentences": 2}


class Handler(BaseHTTPRequestHandler):
    """Gives 10 to what has an e in it, and 1 to the rest."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = body["messages"][-1]["content"].split("<<<BEGIN answer")[1].split("\n", 1)[1].split("\n<<<END answer")[0]
        content = json.dumps({"reason": "an e" if "e" in answer else "no e", "score": 10 if "e" in answer else 1})
        data = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]}).encode()
        self.server.seen.append((self.path, self.headers.get("authorization"), body["model"]))
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture()
def server(monkeypatch):
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.seen = []
    monkeypatch.setenv("JUDGE_BASE_URL", f"http://127.0.0.1:{found.server_port}/v1")
    monkeypatch.setenv("JUDGE_MODEL", "rule")
    monkeypatch.setenv("JUDGE_API_KEY", "sk-key-of-the-test")
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join(30)


def test_it_is_valid_offline_and_its_rows_are_apart():
    recipe = Recipe.load(RECIPE)
    assert [f for f in recipe.validate() if f.level == "error"] == []
    train, held_out = recipe.rows(False), recipe.rows(True)
    assert (len(train), len(held_out)) == (160, 32) and not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}


@pytest.mark.parametrize(("answer", "expected"), [("One. Two!", 1), ("It rains", 1), ("One. Two. Three.", 0), ("", 0), ("...", 0), ("Why? Well: 3 reasons.", 1)])
def test_length_is_counted(answer, expected):
    assert load_object("evaluator.py:brief", RECIPE)(ROW, answer) == expected


@pytest.mark.timeout(60)
def test_a_verdict(server):
    judge = as_evaluator("evaluator.py:Explained", RECIPE)
    found = score(judge, ROW, "Clouds let go of water. It falls.")
    assert found.reward == pytest.approx(1.0) and found.metrics["judge"] == 1 and found.metrics["brief"] == 1 and found.extra_info["judge"]["judge"]["reason"] == "an e"
    assert server.seen == [("/v1/chat/completions", "Bearer sk-key-of-the-test", "rule")] and "sk-key" not in f"{judge!r}{found}"
    assert score(judge, ROW, "Fog. Fog. Fog.").reward == 0


@pytest.mark.timeout(180)
def test_one_step_of_training(server, tiny, tmp_path):
    small = ["data.batch_size=2", "trajectory_pool.group_size=2", "rollout_worker.max_tokens=6", "trainer.total_train_steps=1", "trainer.save_freq=0", "trainer.autocast=none", "validate.data=null"]
    trainer = Trainer(Recipe.load(RECIPE, [f"model.path={tiny(max_position_embeddings=1024)}", *small]), run=tmp_path / "run")
    try:
        result = trainer.step()
        assert all(t.status == "ok" and t.reward == pytest.approx(0.8 * ("e" in t.response) + 0.2 * t.metrics["brief"]) for t in result.rollouts)
        assert "eval/judge/latency" in result.metrics and result.metrics["errors/failed"] == 0 and len(server.seen) == 4
        again = trainer.run_folder.rollouts(1).rescore(str(RECIPE / "evaluator.py:Explained"))
        assert again.comparison()["agreement"].to_list() == [1.0] and again[0].scored_by == "Explained"
    finally:
        trainer.close()
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"sk-key-of-the-test" in p.read_bytes()]


@pytest.mark.timeout(60)
def test_without_a_judge_an_answer_is_an_error_and_no_zero(monkeypatch):
    monkeypatch.setenv("JUDGE_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr("nexrl_sdk.rollout.judge._wait", lambda state: 0.0)
    found = score(as_evaluator("evaluator.py:Explained", RECIPE), ROW, "Water falls.")
    assert found.status == "error" and found.reward is None and "could not be asked" in found.error
