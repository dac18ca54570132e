"""On-policy distillation: advantages and gradients against closed forms and autograd, teachers of every kind, and what is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from nexrl_sdk import LocalBackend, Recipe, Trainer
from nexrl_sdk.backend.service import InProcessTrainService
from nexrl_sdk.engine.learner import Learner
from nexrl_sdk.engine.model import load_model
from nexrl_sdk.trainer.opd import SelfHostedOpdTrainer, distill_metrics, reverse_kl_advantages
from nexrl_sdk.types import ConfigError, Datum

ROWS = [{"prompt": f"{a}{b}: "} for a in "abcde" for b in "xyz"]


@pytest.fixture(scope="module")
def models(tiny):
    torch.set_num_threads(1)
    return tiny("qwen2", kind="char", chat=False), tiny("qwen2", kind="char", chat=False, seed=1)


def recipe_of(student, teacher, *, reward=lambda row, answer: 0.0, **sections):
    settings = {
        "data": {"rows": ROWS, "batch_size": 4},
        "rollout_worker": {"max_tokens": 6, "num_workers": 2},
        "trajectory_pool": {"group_size": 4},
        "trainer": {"total_train_steps": 4, "optim": {"lr": 3e-3}},
        "service": {"teacher_service": {"path": str(teacher)}},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return Recipe(model={"path": str(student), **settings.pop("model", {})}, evaluator=reward, algorithm=settings.pop("algorithm", "opd"), **settings)


def oracle(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).double()


def logprobs_of(model, tokens, temperature=1.0):
    ids = torch.tensor(tokens)
    return torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, -1).gather(1, ids[1:, None])[:, 0]


# -- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("s", "q"), [(0.5, 0.9), (0.2, 0.7), (0.99, 0.3), (0.6, 0.6)])
def test_expected_gradient_is_the_closed_form_on_two_tokens(s, q):
    """pi = (s, 1 - s), s = sigmoid(z): d KL / dz = s (1 - s) (z - logit q)."""
    z = math.log(s / (1 - s))
    pi, teacher = torch.tensor([[s, 1 - s]]), torch.tensor([[q, 1 - q]])
    advantages = reverse_kl_advantages(pi.log(), teacher.log(), torch.ones(1, 2))[0].double().numpy()
    surrogate = -sum(p * a * score for p, a, score in zip((s, 1 - s), advantages, (1 - s, -s)))  # d of -E[A log pi] by z
    assert surrogate == pytest.approx(s * (1 - s) * (z - math.log(q / (1 - q))), abs=1e-6)
    exact = s * math.log(s / q) + (1 - s) * math.log((1 - s) / (1 - q))
    draws = torch.multinomial(pi, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = distill_metrics(pi.log().gather(1, draws), teacher.log().gather(1, draws), torch.ones(draws.shape))
    assert found["distill/reverse_kl"] == pytest.approx(exact, abs=0.01)
    if max(q / s, (1 - q) / (1 - s)) < 10:  # approx_kl caps a token at 10 nats
        assert found["distill/approx_kl"] == pytest.approx(exact, abs=0.01)


def test_gradient_over_a_vocabulary_of_two_is_that_of_the_exact_kl(tiny):
    """Every answer of three tokens from two, weighted by its probability: the engine's gradient is autograd's of the KL in each state."""
    folders = [tiny("qwen2", vocab_size=2, pad_token_id=None, eos_token_id=None, seed=s) for s in (0, 1)]
    student, teacher = map(oracle, folders)
    params = dict(student.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for length in range(3):
        for prefix in itertools.product((0, 1), repeat=length):
            ids = torch.tensor([[0, 1, *prefix]])
            lp, lq = (torch.log_softmax(m(ids).logits[0], -1) for m in (student, teacher))
            reach = torch.exp(sum((lp[1 + i, t] for i, t in enumerate(prefix)), torch.zeros((), dtype=torch.float64))).detach()
            total = total + reach * (lp[-1].exp() * (lp[-1] - lq[-1].detach())).sum()
    expected = dict(zip(params, torch.autograd.grad(total, list(params.values()), allow_unused=True)))

    learner, scorer = (Learner(load_model(f, dtype="float32")) for f in folders)
    answers = [[0, 1, *a] for a in itertools.product((0, 1), repeat=3)]
    plain = [Datum(t[:-1], t[1:], {"weights": [0, 1, 1, 1]}) for t in map(np.array, answers)]
    mine, theirs = (torch.tensor(np.stack(x.forward(plain, "cross_entropy").logprobs)) for x in (learner, scorer))
    advantages = reverse_kl_advantages(mine, theirs, torch.tensor([[0, 1, 1, 1]] * 8))
    reach = mine[:, 1:].sum(1).exp()
    data = [Datum(d.tokens, d.targets, {"weights": d.fields["weights"] * float(p), "logprobs": m.numpy(), "advantages": a.numpy()}) for d, p, m, a in zip(plain, reach, mine, advantages)]
    out = learner.forward_backward(data, "importance_sampling")
    assert out.loss == pytest.approx(total.item(), rel=1e-4)  # the expectation of log pi - log q is the KL itself
    for name, gradient in learner.gradients().items():
        wanted = expected[name].float()
        assert (gradient - wanted).norm() <= 2e-3 * wanted.norm() + 1e-5, name


# -- the trainer ----------------------------------------------------------------------------------


def test_prepare_and_update_against_transformers(models):
    """Advantages on response tokens only, as transformers finds them; the update's gradient as autograd has it."""
    student_at, teacher_at = models
    with Trainer(recipe_of(student_at, teacher_at)) as trainer:
        assert type(trainer) is SelfHostedOpdTrainer
        rollouts = trainer.rollout()
        batch = trainer.prepare(rollouts)
        student, teacher = oracle(student_at), oracle(teacher_at)
        mask = np.asarray(batch.values["loss_mask"])
        advantages = np.asarray(batch.values["advantages"])
        assert not advantages[mask == 0].any() and advantages[mask == 1].any()
        total, gaps, count = torch.zeros((), dtype=torch.float64), [], sum(sum(t.loss_mask) for t in rollouts)
        attended = np.asarray(batch.values["attention_mask"]) != 0
        for row, t in enumerate(rollouts):
            sampled = torch.tensor(t.loss_mask[1:], dtype=torch.float64)
            mine, theirs = logprobs_of(student, t.tokens), logprobs_of(teacher, t.tokens).detach()
            gap = ((theirs - mine) * sampled).detach()
            assert advantages[row][attended[row]][1:] == pytest.approx(gap.numpy(), abs=2e-4)
            assert t.advantage == pytest.approx(float(gap.sum() / sampled.sum()), abs=2e-4)
            gaps += gap[sampled == 1].tolist()
            total = total - (torch.exp(mine - mine.detach()) * gap * sampled).sum() / count
        total.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in student.parameters())).item()
        metrics = trainer.update(batch)
        assert metrics["distill/reverse_kl"] == pytest.approx(-np.mean(gaps), abs=1e-4)
        assert metrics["loss"] == pytest.approx(total.item(), abs=1e-4) and metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_the_teacher_stays_and_reads_at_the_students_temperature(models):
    student_at, teacher_at = models
    with Trainer(recipe_of(student_at, teacher_at, rollout_worker={"max_tokens": 6, "temperature": 0.7})) as trainer:
        held = trainer._teacher_client.backend
        before = {n: p.detach().clone() for n, p in held.model.parameters().items()}
        batch = trainer.prepare(trainer.rollout())
        row, teacher = 0, oracle(teacher_at)
        attended = np.asarray(batch.values["attention_mask"])[row] != 0
        tokens = np.asarray(batch.values["input_ids"])[row][attended].tolist()
        found = np.asarray(batch.values["teacher_log_probs"])[row][attended][1:]
        sampled = np.asarray(batch.values["loss_mask"])[row][attended][1:] == 1
        assert found[sampled] == pytest.approx(logprobs_of(teacher, tokens, 0.7).detach().numpy()[sampled], abs=1e-4)
        trainer.update(batch)
        assert all(torch.equal(before[n], p) for n, p in held.model.parameters().items())
        assert trainer._teacher_client.worker_info()["role"] == "teacher"


def test_a_student_that_is_its_teacher_has_nothing_to_learn(models):
    with Trainer(recipe_of(models[0], models[0])) as trainer:
        metrics = trainer.step().metrics
        assert abs(metrics["distill/reverse_kl"]) < 1e-5 and metrics["grad_norm"] < 1e-3 and metrics["distill/disagree_frac"] == 0


def test_lora_epochs_and_clipping(models):
    """With adapters, two epochs of mini-batches and a clipped loss; the reverse KL falls, and the base model stays."""
    lora = {"lora": {"rank": 8, "alpha": 16.0}}
    algorithm = {"type": "opd", "loss_fn": "ppo", "ppo_epochs": 2, "mini_batch_size": 32}
    settings = {"data": {"rows": ROWS, "batch_size": 8}, "trajectory_pool": {"group_size": 8}, "trainer": {"total_train_steps": 40, "optim": {"lr": 1e-2}}}
    with Trainer(recipe_of(*models, model=lora, algorithm=algorithm, **settings)) as trainer:
        history = trainer.fit(40, progress=False)
        kl = [h["distill/reverse_kl"] for h in history]
        assert sum(kl[-10:]) < 0.85 * sum(kl[:10]) and "policy/clip_frac" in history[0]


def test_recomputed_logprobs_and_correction(models):
    with Trainer(recipe_of(*models, algorithm={"type": "opd", "correction": "tis"})) as trainer:
        metrics = trainer.step().metrics
        assert metrics["policy/correction_mean"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("evaluator", [lambda row, answer: None, None])
def test_answers_without_a_reward_teach_too(models, evaluator):
    with Trainer(recipe_of(*models, reward=evaluator)) as trainer:
        metrics = trainer.step().metrics
        assert metrics["batch/sequences"] == 16 and metrics["errors/unscored"] == 16 and metrics["grad_norm"] > 0


def test_held_out_prompts_are_measured_where_they_are_answered_as_in_training(models):
    with Trainer(recipe_of(*models, validate={"data": {"rows": ROWS[:4]}, "n": 2})) as trainer:
        result = trainer.evaluate()
        teacher, student = oracle(models[1]), oracle(models[0])
        gaps = [g for t in result.rollouts for g, m in zip((logprobs_of(student, t.tokens) - logprobs_of(teacher, t.tokens)).tolist(), t.loss_mask[1:]) if m]
        assert result.metrics["val/distill/reverse_kl"] == pytest.approx(np.mean(gaps), abs=1e-3)
    with Trainer(recipe_of(*models, validate={"data": {"rows": ROWS[:4]}, "temperature": 0.0})) as trainer:
        assert "val/distill/reverse_kl" not in trainer.evaluate().metrics


def test_any_client_can_be_the_teacher(models):
    """A service of the backend's wins over one that the trainer would make."""
    with LocalBackend(models[0]) as student, LocalBackend(models[1]) as teacher:
        student.services = {"teacher": InProcessTrainService(teacher)}
        trainer = SelfHostedOpdTrainer(recipe_of(*models), student)
        assert trainer._teacher_client is student.services["teacher"]
        assert trainer.step().metrics["distill/reverse_kl"] > 0


# -- what is refused ------------------------------------------------------------------------------


def test_a_teacher_with_another_vocabulary_is_refused(models, tiny):
    with pytest.raises(ConfigError, match="spell differently"):
        Trainer(recipe_of(models[0], tiny("qwen2", kind="byte")))


def test_a_missing_teacher_is_named_before_the_run(models):
    recipe = recipe_of(*models, service={"teacher_service": None})
    assert any(f.key == "service.teacher_service" for f in recipe.validate())
    with pytest.raises(ConfigError, match="teacher"):
        Trainer(recipe)


def test_a_teacher_whose_logprobs_are_not_finite_changes_nothing(models):
    from nexrl_sdk.types import NonFiniteError

    with Trainer(recipe_of(*models)) as trainer:
        for p in trainer._teacher_client.backend.model.parameters().values():
            p.data.fill_(math.nan)
        before = {n: p.detach().clone() for n, p in trainer.backend.model.parameters().items()}
        with pytest.raises(NonFiniteError):
            trainer.step()
        assert trainer.step_count == 0 and all(torch.equal(before[n], p) for n, p in trainer.backend.model.parameters().items())
