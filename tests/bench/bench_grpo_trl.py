"""GRPO steps per second on the demo's work, against TRL's GRPOTrainer: same model, prompts, batch, lengths, rewards and optimizer.

Each side runs in a process of its own, in turns, so that what else the machine does falls on both. Run n of both sides has seed n: prompts and
draws differ from run to run, the model does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "reverse"
PROMPTS, GROUP, NEW_TOKENS, LR = 16, 8, 8, 5e-4
WARM_UP = 5  # steps at the start that are not timed


def load_task():
    """The demo's task.py as a module."""
    sys.path.insert(0, str(RECIPE))
    import task

    return task


def run_trl(folder: str, steps: int, seed: int) -> dict:
    """TRL at its fastest for this work: generation by transformers in one batch, no logging, no evaluation, no second forward pass."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    task = load_task()
    rewards: list[float] = []
    ends: list[float] = []

    def score(completions: list[str], answer: list[str], **_: object) -> list[float]:
        values = [task.reward({"answer": a}, c) for a, c in zip(answer, completions)]
        rewards.append(sum(values) / len(values))
        return values

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_completion_length=NEW_TOKENS, temperature=1.0, max_steps=steps,
            learning_rate=LR, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused",
            beta=0.0, num_iterations=1, epsilon=0.2, loss_type="grpo", scale_rewards="group", gradient_checkpointing=False, bf16=False, fp16=False, use_cpu=True,
            dataloader_num_workers=0, report_to="none", logging_strategy="no", save_strategy="no", eval_strategy="no", disable_tqdm=True, seed=seed,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model, reward_funcs=score, args=args, train_dataset=Dataset.from_list(task.train_rows()),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"), callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    return {"times": [b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:])], "rewards": rewards}


def run_nexrl(folder: str, steps: int, seed: int) -> dict:
    """The recipe as it stands, through the public Trainer."""
    from nexrl_sdk import Recipe, Trainer

    recipe = Recipe.load(
        RECIPE, [f"model.path={folder}", "model.builder=null", f"seed={seed}", f"data.batch_size={PROMPTS}", f"trajectory_pool.group_size={GROUP}",
                 f"rollout_worker.max_tokens={NEW_TOKENS}", f"trainer.optim.lr={LR}", f"trainer.total_train_steps={steps}"],
    )  # fmt: skip
    trainer = Trainer(recipe, run=False)
    times, rewards = [], []
    for _ in range(steps):
        start = time.perf_counter()
        result = trainer.step()
        times.append(time.perf_counter() - start)
        rewards.append(result.metrics["reward/mean"])
    trainer.backend.close()
    return {"times": times[WARM_UP:], "rewards": rewards}


SIDES = {"nexrl_sdk": run_nexrl, "TRL": run_trl}


def in_process_of_its_own(side: str, folder: str, steps: int, seed: int, threads: int) -> dict:
    """One run of one side; the last line that it prints is its result."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run([sys.executable, __file__, "--side", side, "--model", folder, "--steps", str(steps), "--seed", str(seed)], capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short run of each side")
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--runs", type=int, default=3, help="of each side, in turns")
    parser.add_argument("--threads", type=int, default=1, help="for both sides; the model is too small to gain from more")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print("\n" + json.dumps(SIDES[args.side](args.model, args.steps, args.seed)))
        return
    steps, runs = (25, 1) if args.quick else (args.steps, args.runs)
    with tempfile.TemporaryDirectory() as cache:
        folder = str(load_task().build_model(0, Path(cache)))
        results = {side: [] for side in SIDES}
        for turn in range(runs):
            for side in (SIDES if turn % 2 == 0 else reversed(SIDES)):
                results[side].append(in_process_of_its_own(side, folder, steps, turn, args.threads))
    speed = {side: [1 / statistics.median(r["times"]) for r in of] for side, of in results.items()}
    mean = lambda values: sum(values) / len(values)
    print(f"{PROMPTS} prompts x {GROUP} answers a step, {steps} steps, {args.threads} thread(s), {runs} run(s) in turns")
    print(f"{'':<12}{'steps/s':>9}{'reward, first 5 steps':>24}{'last 10 steps':>16}")
    for side, of in results.items():
        first, last = mean([mean(r["rewards"][:5]) for r in of]), mean([mean(r["rewards"][-10:]) for r in of])
        print(f"{side:<12}{statistics.median(speed[side]):>9.1f}{first:>24.3f}{last:>16.3f}")
    ratio = statistics.median(ours / theirs for ours, theirs in zip(speed["nexrl_sdk"], speed["TRL"]))
    last = {side: round(mean([mean(r["rewards"][-10:]) for r in of]), 4) for side, of in results.items()}
    print(json.dumps({"bench": "grpo_vs_trl", "ratio": round(ratio, 3), "reward_last_10": last}))


if __name__ == "__main__":
    main()
