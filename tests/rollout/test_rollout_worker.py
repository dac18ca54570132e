"""The single-turn worker: what it asks, what it keeps, and that nothing but seed, step and items decides."""

from __future__ import annotations

import copy
import math
import random
import threading
import time

import numpy as np
import pytest

from nexrl_sdk.rollout.data import DataStream, Item
from nexrl_sdk.rollout.evaluator import EvaluationRunResult, Evaluator
from nexrl_sdk.rollout.worker import Rollouts, SimpleRolloutWorker, derive_seed, make_tasks, run_many
from nexrl_sdk.types import Completion, ConfigError, ContextOverflowError, DataError, Interrupted, NonFiniteError, SamplingParams, Trajectory

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]


class Fake:
    """Draws characters from (seed, member) alone, as the contract says."""

    def __init__(self, tokenizer, max_length=None, version=3):
        self.tokenizer, self.version, self.calls = tokenizer, version, []
        self.capabilities = type("C", (), {"max_length": max_length})()

    def sample(self, prompts, params, n=1):
        self.calls.append((copy.deepcopy(prompts), list(params), n))
        return [[self.draw(p, np.random.default_rng([p.seed, j])) for j in range(n)] for p in params]

    def draw(self, p, rng):
        length = int(rng.integers(1, p.max_tokens + 1))
        tokens = [*rng.integers(10, 60, length - 1).tolist(), self.tokenizer.eos_token_id]
        return Completion(tokens, (-rng.random(length)).tolist(), "stop", self.version)


@pytest.fixture
def fake(byte_tokenizer):
    return Fake(byte_tokenizer)


def digits(row, answer):
    return sum(c.isdigit() for c in answer) / max(len(answer), 1)


def make(backend, evaluator=digits, **kw):
    return SimpleRolloutWorker(backend, evaluator, **{"group_size": 4, "sampling": SamplingParams(max_tokens=6), "seed": 5, **kw})


def test_each_trajectory_is_prompt_and_completion_token_by_token(fake, byte_tokenizer):
    rollouts = make(fake).run(DataStream(ROWS, seed=1).next(3), step=2)
    (prompts, params, n), = fake.calls
    assert n == 4 and len(rollouts) == 12 and len({p.seed for p in params}) == 3
    for k, t in enumerate(rollouts):
        i, j = divmod(k, 4)
        c = fake.draw(params[i], np.random.default_rng([params[i].seed, j]))
        assert t.tokens == prompts[i] + c.tokens and t.loss_mask == [0] * len(prompts[i]) + [1] * len(c.tokens)
        assert t.logprobs == [0.0] * len(prompts[i]) + c.logprobs and t.response_tokens == c.tokens
        assert t.prompt == byte_tokenizer.decode(prompts[i]) == t.data["prompt"] and t.response == byte_tokenizer.decode(c.tokens, skip_special_tokens=True)
        assert t.group_id == f"0:{t['index']}" and t.run_id == f"{t.group_id}/{j}" and (t.member, t.step, t.epoch, t.seed) == (j, 2, 0, params[i].seed)
        assert t.weight_versions == [3] and t.finish_reason == "stop" and not t.is_val and t.reward == digits(t.data, t.response) and t.check() is t


def test_numbers_depend_on_seed_step_and_items_alone(fake, byte_tokenizer):
    def slow(row, answer):
        time.sleep(random.random() / 500)
        return digits(row, answer)

    items = DataStream(ROWS, seed=1).next(4)
    first = make(fake).run(items, step=7)
    random.seed(time.time())
    worker = make(Fake(byte_tokenizer), slow, concurrency=16)
    worker.run(items, step=6)
    assert worker.run(items, step=7) == first
    assert make(Fake(byte_tokenizer), concurrency=1, eval_timeout=5.0).run(items, step=7) == first
    one = make(Fake(byte_tokenizer)).run(items[2:3], step=7)
    assert one == first[8:12], "what else is asked changes nothing"
    for other in (make(fake, seed=6).run(items, step=7), make(fake).run(items, step=8), make(fake).run(items, step=7, is_val=True)):
        assert not {t.seed for t in other} & {t.seed for t in first}


def test_an_item_given_twice_is_two_groups(fake):
    rollouts = make(fake).run([ROWS[0], Item(0, 0, ROWS[0]), Item(0, 1, ROWS[0])])
    assert list(rollouts.groups()) == ["0:0", "0:0#2", "1:0"] and len({t.seed for t in rollouts}) == 3 and len({t.run_id for t in rollouts}) == 12
    assert derive_seed(1, 2) == derive_seed(1, 2) != derive_seed(2, 1) and 0 <= derive_seed("x") < 2**63
    assert [t.seed for t in make_tasks([ROWS[0]], 0, 0, False)] == [t.seed for t in make_tasks([ROWS[1]], 0, 0, False)]


def test_sampling_and_n_can_be_chosen_for_a_run(fake):
    worker = make(fake)
    rollouts = worker.run(ROWS[:2], n=2, sampling=worker.with_temperature(0.0), is_val=True)
    (_, params, n), = fake.calls
    assert n == 2 and len(rollouts) == 4 and all(t.is_val for t in rollouts)
    assert [(p.temperature, p.max_tokens) for p in params] == [(0.0, 6)] * 2 and worker.sampling.temperature == 1.0


def test_chat_and_system_prompts_go_through_the_template(fake, byte_tokenizer, char_tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}, {"messages": [{"role": "user", "content": "ho"}]}, {"prompt": np.array([{"role": "user", "content": "ha"}])}]
    rollouts = make(fake, system="be kind", group_size=1).run(rows)
    assert [t.prompt for t in rollouts] == [f"<|system|>be kind<|end|><|user|>{x}<|end|><|assistant|>" for x in ("hi", "ho", "ha")]
    assert rollouts[0].prompt_messages == [{"role": "user", "content": "hi"}]
    assert make(fake, chat=True, group_size=1).run(ROWS[:1])[0].prompt == "<|user|>0+0=<|end|><|assistant|>"
    with pytest.raises(ConfigError, match=r"row 0: .*no chat template"):
        make(Fake(char_tokenizer), chat=True).run(ROWS[:1])


def test_missing_prompts_and_bad_rows_are_named(fake):
    with pytest.raises(DataError, match=r"row 1: the row has no prompt in column 'question'; did you mean 'questoin'\?"):
        make(fake, prompt_key="question").run([{"question": "a"}, {"questoin": "b"}])
    with pytest.raises(DataError, match="row 0: "):
        make(fake).run([{"prompt": 7}])
    with pytest.raises(DataError, match="row 0: "):
        make(fake).run([{"prompt": ""}])
    assert not fake.calls and len(make(fake).run([])) == 0


def test_overlong_prompts(byte_tokenizer):
    rows = [{"prompt": "ab"}, {"prompt": "abcdefgh"}]
    with pytest.raises(ContextOverflowError, match="row 1: its prompt has 8 tokens, more than 5, from max_prompt_length=5"):
        make(Fake(byte_tokenizer), max_prompt_length=5).run(rows)
    with pytest.raises(ContextOverflowError, match="more than 6, from the model's context of 7"):
        make(Fake(byte_tokenizer, 7), max_prompt_length=50).run(rows)
    assert len(make(Fake(byte_tokenizer, 9)).run(rows)) == 8, "a prompt may fill the context but for one token"

    cut = make(Fake(byte_tokenizer), max_prompt_length=5, overlong="truncate", group_size=1).run(rows)
    assert cut[1].prompt == "defgh" and cut[1].prompt_cut == 3 and "prompt_cut" not in cut[0] and cut[1].status == "ok"

    backend = Fake(byte_tokenizer)
    dropped = make(backend, max_prompt_length=5, overlong="drop").run(rows)
    assert [t.status for t in dropped] == ["ok"] * 4 + ["failed"] * 4 and "8 tokens, more than 5" in dropped[4].error
    assert len(backend.calls[0][0]) == 1 and dropped.metrics()["errors/failed"] == 4 and all(t.reward is None for t in dropped[4:])
    with pytest.raises(ConfigError, match=r"overlong='trunc' is not known; did you mean 'truncate'\?"):
        make(backend, overlong="trunc")


def test_stop_strings_end_the_text_and_not_the_tokens(byte_tokenizer):
    class Says(Fake):
        def draw(self, p, rng):
            ids = self.tokenizer("yes\n\nno")["input_ids"]
            return Completion(ids, [-0.1] * len(ids), "stop", 0)

    for stop, text in (("\n\n", "yes"), (["o", "\n"], "yes"), (None, "yes\n\nno"), ([5, 6], "yes\n\nno"), ([], "yes\n\nno")):
        t = make(Says(byte_tokenizer), None, group_size=1, sampling=SamplingParams(stop=stop)).run(ROWS[:1])[0]
        assert t.response == text and len(t.response_tokens) == 7


def test_evaluators_that_fail_are_recorded_and_never_zero(fake):
    def judge(row, answer):
        match int(row["answer"]) // 2:
            case 0: return None
            case 1: return math.nan
            case 2: raise KeyError("gold")
            case 3: return "1"
            case 4: time.sleep(5)
        return {"reward": 1, "length": len(answer)}

    rollouts = make(fake, judge, group_size=2, eval_timeout=0.3).run(ROWS)
    assert [g[0].status for g in rollouts.groups().values()] == ["unscored", "error", "error", "error", "error", "ok"]
    assert all(t.reward is None and t.error for t in rollouts[:10]) and all(t.tokens for t in rollouts)
    assert "finite" in rollouts[2].error and "KeyError" in rollouts[4].traceback and "eval_timeout" in rollouts[8].error
    assert rollouts[10].metrics == {"length": float(len(rollouts[10].response))} and rollouts[10].error is None
    m = rollouts.metrics()
    assert (m["reward/mean"], m["errors/unscored"], m["errors/evaluator"]) == (1.0, 2, 8)


def test_scoring_again(fake):
    worker = make(fake, lambda row, answer: 1 / 0)
    rollouts = worker.run(ROWS[:2])
    rollouts.append(Trajectory(status="failed", error="503"))
    assert worker.score(rollouts, digits) is rollouts
    assert [t.status for t in rollouts] == ["ok"] * 8 + ["failed"] and "traceback" not in rollouts[0] and rollouts[0].error is None and rollouts[8].error == "503"
    assert make(fake, None).run(ROWS[:1])[0].status == "unscored"


def test_the_evaluator_gets_a_copy_of_the_row_and_the_text(fake):
    seen = []

    class Spy(Evaluator):
        def evaluate(self, data, evaluation_target):
            seen.append((data, evaluation_target.final_answer))
            data.clear()
            return EvaluationRunResult(reward=0.5, ground_truth="g", extra_info={"x": 1})

    rollouts = make(fake, Spy(), group_size=1, concurrency=1).run(ROWS)
    assert [a for _, a in seen] == [t.response for t in rollouts] and ROWS[0]["answer"] == "0" and rollouts[0].ground_truth == "g" and rollouts[0].extra_info == {"x": 1}


class Flaky(Fake):
    """Fails as often as told, and for ever at some prompts."""

    def __init__(self, tokenizer, times=0, poison=(), error=ConnectionError):
        super().__init__(tokenizer)
        self.times, self.error = times, error
        self.poison = [tokenizer(p)["input_ids"] for p in poison]

    def sample(self, prompts, params, n=1):
        if self.times > 0 or any(p in self.poison for p in prompts):
            self.times -= 1
            self.calls.append(None)
            raise self.error("the server answered 503")
        return super().sample(prompts, params, n)


def test_a_backend_that_recovers_changes_no_number(byte_tokenizer):
    expected = make(Fake(byte_tokenizer)).run(ROWS)
    assert make(Flaky(byte_tokenizer, times=2), retries=2).run(ROWS) == expected


def test_one_bad_prompt_does_not_take_the_others_with_it(byte_tokenizer):
    expected = make(Fake(byte_tokenizer)).run(ROWS)
    rollouts = make(Flaky(byte_tokenizer, poison=["3+3="]), retries=1).run(ROWS)
    assert [t.status for t in rollouts.groups()["0:3"]] == ["failed"] * 4 and [t for t in rollouts if t.status == "ok"] == [t for t in expected if t.group_id != "0:3"]
    t = rollouts.filter(status="failed")[0]
    assert t.error == "sampling failed: ConnectionError: the server answered 503" and "ConnectionError" in t.traceback and t.reward is None and t.data == ROWS[3] and t.prompt == "3+3="


def test_a_backend_that_is_gone_is_recorded_after_bounded_tries(byte_tokenizer):
    backend = Flaky(byte_tokenizer, times=1000)
    rollouts = make(backend, retries=2).run(ROWS)
    assert len(rollouts) == 24 and all(t.status == "failed" and "503" in t.error for t in rollouts) and len(backend.calls) == 3 + 6
    assert [t.run_id for t in rollouts][:5] == ["0:0/0", "0:0/1", "0:0/2", "0:0/3", "0:1/0"]


@pytest.mark.parametrize("error", [ConfigError, DataError, NonFiniteError, KeyboardInterrupt, Interrupted])
def test_what_trying_again_cannot_help_is_raised_at_once(byte_tokenizer, error):
    backend = Flaky(byte_tokenizer, times=1, error=error)
    with pytest.raises(error):
        make(backend).run(ROWS)
    assert len(backend.calls) == 1


def test_answers_that_break_the_contract(byte_tokenizer):
    class Short(Fake):
        def sample(self, prompts, params, n=1):
            return super().sample(prompts, params, n)[:-1]

    class Aborts(Fake):
        def draw(self, p, rng):
            return Completion([9], [-1.0], "abort", 0)

    assert "the backend answered" in make(Short(byte_tokenizer), retries=0).run(ROWS[:1])[0].error
    aborted = make(Aborts(byte_tokenizer)).run(ROWS[:1])
    assert all(t.status == "failed" and t.reward is None and t.response_tokens == [9] for t in aborted)


def test_the_stop_flag_ends_scoring_and_waiting(byte_tokenizer):
    flag, release = threading.Event(), threading.Event()

    class Stops(Fake):
        def sample(self, prompts, params, n=1, stop_flag=None):
            assert stop_flag is flag
            return super().sample(prompts, params, n)

    def hang(row, answer):
        flag.set()
        release.wait(20)
        return 1.0

    with pytest.raises(Interrupted):
        make(Stops(byte_tokenizer), hang).run(ROWS, stop_flag=flag)
    release.set()

    class Down(Fake):
        def sample(self, prompts, params, n=1, stop_flag=None):
            if not self.calls:
                threading.Timer(0.05, flag2.set).start()
            self.calls.append(1)
            raise ConnectionError("down")

    flag2, backend = threading.Event(), Down(byte_tokenizer)
    with pytest.raises(Interrupted):
        make(backend, retries=50).run(ROWS, stop_flag=flag2)
    assert len(backend.calls) < 12


def test_progress_is_told_from_the_callers_thread(fake):
    told = []
    make(fake, lambda row, answer: time.sleep(0.02) or 1.0, concurrency=2).run(ROWS, progress=lambda done, total: told.append((done, total, threading.current_thread())))
    assert told[-1][:2] == (24, 24) and [d for d, *_ in told] == sorted(d for d, *_ in told) and {t for *_, t in told} == {threading.current_thread()}


def test_hooks(fake):
    class Own(SimpleRolloutWorker):
        def format_task_query(self, data_item):
            if data_item["answer"] == "2":
                raise ValueError("no such task")
            return f"Problem: {data_item.pop('prompt')}"

        def get_train_loss_mask(self, trajectory_infos):
            assert trajectory_infos[0]["response_message"]["content"] == trajectory_infos[0]["response"] and trajectory_infos[0]["prompt_messages"][0]["role"] == "user" and trajectory_infos[0]["tools"] is None
            return [t["data"]["answer"] != "4" for t in trajectory_infos]

    rollouts = Own(fake, digits, group_size=2, sampling=SamplingParams(max_tokens=6)).run(ROWS[:3])
    assert [t.status for t in rollouts] == ["ok", "ok", "failed", "failed", "ok", "ok"] and rollouts[0].prompt == "Problem: 0+0=" and rollouts[0].data == ROWS[0]
    assert rollouts[2].error == "row 1: format_task_query raised ValueError: no such task" and "in format_task_query" in rollouts[2].traceback
    assert any(rollouts[0].loss_mask) and not any(rollouts[4].loss_mask) and rollouts[4].scored

    class Wrong(SimpleRolloutWorker):
        def get_train_loss_mask(self, trajectory_infos):
            return [[1, 0]]

    with pytest.raises(ConfigError, match="one boolean for each of the 1 trajectories"):
        Wrong(fake, digits).run(ROWS[:1])


def test_settings_are_checked(fake):
    for kw, expected in (({"group_size": 0}, "group_size must be at least 1"), ({"concurrency": 0}, "concurrency"), ({"retries": -1}, "retries must be at least 0")):
        with pytest.raises(ConfigError, match=expected):
            make(fake, **kw)
    with pytest.raises(ConfigError, match="must take two arguments"):
        make(fake, lambda answer: 1.0)


def test_run_many_keeps_order_raises_the_first_error_and_runs_at_once():
    assert run_many(lambda x: -x, [], 4) == [] and run_many(lambda x: -x, [3], 4) == [-3]
    assert run_many(lambda x: time.sleep(random.random() / 200) or x, range(40), 8) == list(range(40))
    together = threading.Barrier(6, timeout=10)
    assert run_many(lambda x: together.wait() >= 0, range(6), 6) == [True] * 6
    done = []

    def fails(x):
        if x == 3:
            raise KeyError(x)
        done.append(x)

    with pytest.raises(KeyError):
        run_many(fails, range(1000), 2)
    assert len(done) < 1000


def test_with_the_local_backend(tiny_qwen2):
    """The real engine: same numbers twice, and what is asked together changes no token."""
    local = pytest.importorskip("nexrl_sdk.backend.local")
    with local.LocalBackend(str(tiny_qwen2)) as backend:
        worker = SimpleRolloutWorker(backend, digits, group_size=3, sampling=SamplingParams(max_tokens=8), seed=1, system="s")
        rollouts = worker.run(ROWS[:3], step=1)
        assert isinstance(rollouts, Rollouts) and all(t.status == "ok" for t in rollouts) and all(math.isfinite(x) for t in rollouts for x in t.logprobs)
        assert worker.run(ROWS[:3], step=1) == rollouts
        assert [t.tokens for t in worker.run([Item(1, 0, ROWS[1])], step=1)] == [t.tokens for t in rollouts.groups()["0:1"]]
        with pytest.raises(ContextOverflowError, match="row 0: its prompt has"):
            worker.run([{"prompt": "x" * 300}])
