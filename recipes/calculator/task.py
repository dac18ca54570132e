"""Products that must be calculated, of prices that must be looked up: the task, its judge, and the small model that is made for it on the spot."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import random
import secrets
import shutil
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import calculate, price, price_list

from nexrl_sdk import EvaluationRunResult, Evaluator
from nexrl_sdk.rollout.evaluator import NexAUEvaluationTarget

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, LlamaForCausalLM

PAD, END, UNK, USER, ASSISTANT, RESULT, CALL, CALLED = SPECIAL = ["<pad>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|result|>", "<tool_call>", "</tool_call>"]
CALCULATE, PRICE, CLOSE = CALLS = ['{"name": "calculate", "arguments": {"expression": "', '{"name": "price", "arguments": {"item": "', '"}}']
ERRORS = ["Error: calculate raised ValueError: ", "Error: price raised ValueError: ", "no numbers", "no value", "no such item"]  # what tools.py raises, as the model reads it
VOCABULARY = [*SPECIAL, *CALLS, *ERRORS, *string.ascii_lowercase, *string.digits, *"*+-/%? "]
TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}<|assistant|>{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{%- endfor -%}"
    "{%- else -%}{{ '<|result|>' if m.role == 'tool' else '<|user|>' }}{{ m.content }}{%- endif -%}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
HELD_OUT, TRAINED = 256, 8192  # questions: to be judged on, and to learn from by reinforcement
SETTINGS: dict[str, Any] = {
    "model": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(VOCABULARY),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
    "warm_start": {"right": 200, "mixed": 80, "batch": 32, "lr": 3e-3},  # steps on right conversations, then on a mixture
}
RIGHT = {"calls": 1.0, "guesses": 0.0, "goes_on": 1.0, "slips": 0.0, "mistaken": 0.0}
# shares: first turns that call a tool, and that guess a number (the others give up); calculations after a price; copies with a wrong character; calls of the wrong tool
MIXED = {"calls": 0.38, "guesses": 0.04, "goes_on": 0.4, "slips": 0.1, "mistaken": 0.08}


# -- data: `371*46`, and `tob*46` for the price of a thing ----------------------------------------------------------


@functools.cache
def held_out_items() -> tuple[list[str], list[str]]:
    """Names of things for questions that are held out, and for all others."""
    names = list(price_list())
    return names[: len(names) // 4], names[len(names) // 4 :]


def question(draw: random.Random, held_out: bool) -> str:
    """A product; of held-out questions, the first factor is divisible by 4, or a thing that no training names."""
    if draw.random() < 0.5:
        return f"{draw.choice(held_out_items()[0 if held_out else 1])}*{draw.randrange(11, 100)}"
    factor = draw.randrange(100, 1000, 4) if held_out else draw.choice([n for n in range(100, 1000) if n % 4])
    return f"{factor}*{draw.randrange(11, 100)}"


def truth(asked: str) -> str:
    """The right answer."""
    first, _, second = asked.partition("*")
    return str(price_list().get(first) or int(first)) if not second else str(int(truth(first)) * int(second))


def rows(n: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """Distinct questions with their answers and the number of calls that they take."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < n:
        found[question(draw, held_out)] = None
    return [{"prompt": q, "answer": truth(q), "calls": 1 + q[0].isalpha()} for q in found]


def train_rows() -> list[dict[str, Any]]:
    """The rows to learn from."""
    return rows(TRAINED, 20265, held_out=False)


def val_rows() -> list[dict[str, Any]]:
    """The rows to be judged on; neither the warm start nor the reinforcement sees their first factors."""
    return rows(HELD_OUT, 20266, held_out=True)


class Judge(Evaluator):
    """Right, and calculated: a number that was guessed does not count."""

    def evaluate(
        self,
        data: Mapping[str, Any],  # the row
        evaluation_target: NexAUEvaluationTarget,
    ) -> EvaluationRunResult:  # reward 0 or 1
        """Compare the answer, and look for a calculation in the trace."""
        steps = evaluation_target.observation[0]["trace"].get("children", [])
        called = any(s["type"] == "TOOL" and s["name"] == "calculate" and s["error"] is None for s in steps)
        right = evaluation_target.final_answer.strip() == data["answer"]
        metrics = {"success": float(right and called), "called": float(called), f"success_of_{data['calls']}": float(right and called)}
        return EvaluationRunResult(metrics["success"], data["answer"], metrics)


# -- the model: 340 thousand parameters, warm-started on conversations that are right and wrong -------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each mark and for what stands around a call's argument."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token=UNK))
    phrases = "|".join(p.replace("{", r"\{").replace("}", r"\}") for p in [*CALLS, *ERRORS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{phrases}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNK, model_max_length=256, chat_template=TEMPLATE)


class Script:
    """A conversation as it is written: tokens, and which of them the model is to say."""

    def __init__(self, draw: random.Random, asked: str, slips: float):
        self.draw, self.slips = draw, slips
        self.tokens, self.said = list[str](), list[int]()
        self.write([USER, *asked, END, ASSISTANT])

    def write(self, tokens: list[str], said: bool = False) -> None:
        """Go on with tokens that the model reads, or says."""
        self.tokens += tokens
        self.said += [int(said)] * len(tokens)

    def copied(self, text: str) -> str:
        """A text again, now and then with one character wrong."""
        if self.draw.random() >= self.slips:
            return text
        i = self.draw.randrange(len(text))
        return text[:i] + self.draw.choice(string.digits if text[i].isdigit() else string.ascii_lowercase) + text[i + 1 :]

    def answer(self, text: str) -> None:
        """The last turn."""
        self.write([*text, END], said=True)

    def guess(self) -> None:
        """A number that nothing speaks for."""
        self.answer(str(self.draw.randrange(1000, 100_000)))

    def call(self, tool: str, argument: str) -> str | None:  # None: it could not
        """Call a tool, and read what it says."""
        self.write([CALL, tool, *argument, CLOSE, CALLED, END], said=True)
        try:
            result = (calculate if tool == CALCULATE else price)(argument)
        except ValueError as e:
            self.write([RESULT, ERRORS[0 if tool == CALCULATE else 1], str(e), END, ASSISTANT])
            return None
        self.write([RESULT, *str(result), END, ASSISTANT])
        return str(result)


def conversation(
    draw: random.Random,
    asked: str,
    how: Mapping[str, float],  # RIGHT or MIXED
) -> Script:
    """Somebody works on a question, and does the right thing as often as shares say."""
    script = Script(draw, asked, how["slips"])
    first_turn = draw.random()
    if first_turn >= how["calls"]:
        script.guess() if first_turn < how["calls"] + how["guesses"] else script.answer("?")
        return script
    first, _, second = asked.partition("*")
    if first.isalpha() == (draw.random() >= how["mistaken"]):
        found = script.call(PRICE, script.copied(first))
        if found is not None and draw.random() >= how["goes_on"]:
            script.answer(found)
            return script
        asked = f"{found}*{second}"
        found = None if found is None else script.call(CALCULATE, script.copied(asked))
    else:
        found = script.call(CALCULATE, script.copied(asked))
    script.guess() if found is None else script.answer(script.copied(found))
    return script


def warm_start_batch(
    batch: int,
    draw: random.Random,
    how: Mapping[str, float],  # RIGHT or MIXED
) -> tuple[torch.Tensor, torch.Tensor]:  # [B, T] token ids, and targets with -100 where nothing is learned
    """Conversations about questions that are not held out."""
    import torch

    scripts = [conversation(draw, question(draw, held_out=False), how) for _ in range(batch)]
    ids_BT = torch.zeros(batch, max(len(s.tokens) for s in scripts), dtype=torch.int64)
    targets_BT = torch.full_like(ids_BT, -100)
    index = {token: i for i, token in enumerate(VOCABULARY)}
    for row, target, script in zip(ids_BT, targets_BT, scripts):
        n = len(script.tokens)
        row[:n] = torch.tensor([index[t] for t in script.tokens])
        target[:n] = torch.where(torch.tensor(script.said) == 1, row[:n], -100)
    return ids_BT, targets_BT


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """So small a model gains little from a second thread, and loses much where a neighbour wants it too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def warm_start(seed: int) -> LlamaForCausalLM:
    """A new model after plain supervised learning: it can call, copy and read, and more often guesses."""
    import torch
    from torch.nn.functional import cross_entropy
    from tqdm.auto import trange
    from transformers import LlamaConfig, LlamaForCausalLM

    how = SETTINGS["warm_start"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**SETTINGS["model"], pad_token_id=0, eos_token_id=1, bos_token_id=None))
    draw = random.Random(seed)
    steps = how["right"] + how["mixed"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=how["lr"], betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50, (steps - step) / (0.3 * steps)))
    for step in trange(steps, desc="warm start", unit="step", mininterval=0.5):
        ids_BT, targets_BT = warm_start_batch(how["batch"], draw, RIGHT if step < how["right"] else MIXED)
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    return model.eval()


def recipe_of(seed: int) -> str:
    """A short hash of all that decides the model: settings, seed, and the code that follows them."""
    code = [inspect.getsource(f) for f in (build_tokenizer, question, Script, conversation, warm_start_batch, warm_start, price_list, price, calculate)]
    return hashlib.sha256(json.dumps([SETTINGS, RIGHT, MIXED, VOCABULARY, TEMPLATE, seed, code]).encode()).hexdigest()[:12]


def build_model(
    seed: int,
    cache_dir: Path,  # made models are kept here, one folder each
) -> Path:  # a folder that transformers loads
    """Make the model and its tokenizer, or find them made."""
    from safetensors.torch import save_file

    done = Path(cache_dir) / f"calculator-seed{seed}-{recipe_of(seed)}"
    if done.exists():
        return done
    work = done.with_name(f".{done.name}-{secrets.token_hex(4)}")
    work.mkdir(parents=True)
    try:
        model = warm_start(seed)
        model.config.save_pretrained(work)
        save_file({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, work / "model.safetensors", {"format": "pt"})
        build_tokenizer().save_pretrained(work)
        os.rename(work, done)  # whole or not at all; of two builders the first one's stays
    except OSError:
        if not done.exists():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return done
