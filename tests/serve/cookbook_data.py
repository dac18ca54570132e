"""A folder from which tinker-cookbook's recipes run offline: a tiny model under a name that they know, and the datasets that they load.

Recipes load tokenizers and datasets by their names on the Hub, and a folder of that name in the working directory comes first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NAME = "Qwen/Qwen3-8B"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."  # of the cookbook's rl_loop
ANIMALS = ("ant", "bee", "cat", "dog", "eel", "fox", "hen", "owl")
RIGHT = 3  # every problem's answer
README = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n  - split: test\n    path: test.jsonl\n---\n"


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations that can be learnt: an animal's name, said back."""
    rng = random.Random(0)
    names = [rng.choice(ANIMALS) for _ in range(count)]
    turns = [("Which animal is it, the {}?", "It is the {}."), ("And again, the {}?", "The {}, as before.")]
    return [{"messages": [m for q, a in turns[: 1 + i % 2] for m in ({"role": "user", "content": q.format(n)}, {"role": "assistant", "content": a.format(n)})]} for i, n in enumerate(names)]


def problems(count: int) -> list[dict[str, str]]:
    """Problems in the manner of GSM8K, with one answer."""
    return [{"question": f"How many legs has the {ANIMALS[i % 8]} number {i}?", "answer": f"We count them.\n#### {RIGHT}"} for i in range(count)]


def pairs(count: int) -> list[dict[str, str]]:
    """A better and a worse answer in the manner of hh-rlhf."""
    asked = [f"\n\nHuman: Which animal is it, the {ANIMALS[i % 8]}?\n\nAssistant: " for i in range(count)]
    return [{"chosen": f"{q}It is the {ANIMALS[i % 8]}.", "rejected": f"{q}No."} for i, q in enumerate(asked)]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level BPE of a few hundred tokens, with Qwen3's markers and turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]), decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=512, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def shot(question: str, answer: str, asked: str) -> list[dict[str, str]]:
    """A worked example, and what is asked."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}, {"role": "user", "content": asked}]


def examples(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """A conversation as the recipes begin it, and a reply of the right shape that is right by chance alone."""
    if rng.random() < 0.5:
        spelt = " ".join(f"{i + 1}) {c}" for i, c in enumerate("strawberry"[: rng.randint(2, 10)]))
        worked = f"Let's spell the word and number its letters: {spelt}. It is at position 3. \\boxed{{3}}"
        return shot("How many r's are in strawberry?" + SUFFIX, worked, rng.choice(problems(64))["question"] + SUFFIX), f"\\boxed{{{rng.randint(1, 4)}}}<|im_end|>"
    sum_ = f"What is {rng.randint(0, 100)} + {rng.randint(0, 100)}?"
    return shot("What is 4 + 5?", "9", sum_), rng.choice(["{}<|im_end|>", "{} and {} and {} and {} and {}"]).replace("{}", str(rng.randint(10, 99)))


def warm_start(model: Any, tokenizer: Any, steps: int = 120) -> None:
    """Teach a model the shape of replies, so that some of them are rewarded."""
    import torch

    rng, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = []
        for talk, reply in (examples(rng) for _ in range(16)):
            prompt = tokenizer.encode(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True), add_special_tokens=False)
            rows.append((prompt, tokenizer.encode(reply, add_special_tokens=False)))
        width = max(len(p) + len(r) for p, r in rows)
        ids = torch.tensor([p + r + [0] * (width - len(p) - len(r)) for p, r in rows])
        labels = torch.tensor([[-100] * len(p) + r + [-100] * (width - len(p) - len(r)) for p, r in rows])
        model(ids, labels=labels).loss.backward()
        optimizer.step(), optimizer.zero_grad()


def make_model(folder: Path, tokenizer: Any) -> None:
    """A Qwen3 of 0.1 million parameters that answers in the right shape."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), tie_word_embeddings=False, **shape, **ids), dtype=torch.float32)
        warm_start(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_workspace(folder: Path) -> Path:
    """The folder: the model and its tokenizer under their name, datasets under theirs, and `chats.jsonl`."""
    write_rows(folder / "chats.jsonl", chats(96))
    for name, make, splits in (("HuggingFaceH4/no_robots", chats, (64, 8)), ("openai/gsm8k", problems, (256, 8)), ("Anthropic/hh-rlhf", pairs, (64, 8))):
        for split, count in zip(("train", "test"), splits):
            write_rows(folder / name / f"{split}.jsonl", make(count))
    (folder / "openai/gsm8k/README.md").write_text(README)
    rng = random.Random(1)
    texts = [m["content"] for row in chats(64) for m in row["messages"]]
    texts += [m["content"] for _ in range(200) for m in examples(rng)[0]]
    make_model(folder / NAME, make_tokenizer(texts))
    return folder


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Of a jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
