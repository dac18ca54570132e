"""Words in pig latin: the task, its judge, and a small model that can say a word again, from any letter on, and knows no pig latin."""

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

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

VOWELS = "aeiou"
ONSETS = [*"bcdfghjklmnprstvwxyz", *"bl br ch cl cr dr fl fr gl gr kn pl pr sh sk sl sm sn sp st sw th tr wh wr chr scr shr spl spr str thr".split()]
CODAS = ["", *"bdfgklmnprstxz", *"ck ft ld lk lp lt mp nd ng nk nt pt rd rk rm rn rt sh sk sp st th".split()]
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNK, ">", *string.ascii_lowercase]
LENGTHS = (3, 7)  # letters of a word, shortest and longest
HELD_OUT, TRAINED = 512, 4096  # words: to be judged on, and to learn from
SETTINGS: dict[str, Any] = {
    "model": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": len(VOCABULARY),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "warm_start": {"steps": 400, "batch": 96, "lr": 5e-3},
}


# -- data: prompts `string>`, answers `ingstray` ---------------------------------------------------


def pig_latin(word: str) -> str:
    """The consonants before the first vowel go to the end, and `ay` follows; a word that begins with a vowel gets `way`."""
    first = next(i for i, c in enumerate(word) if c in VOWELS)
    return f"{word[first:]}{word[:first]}ay" if first else f"{word}way"


def syllable(draw: random.Random, bare: float) -> str:
    """An onset, a vowel and a coda; without an onset in a share of `bare`."""
    return ("" if draw.random() < bare else draw.choice(ONSETS)) + draw.choice(VOWELS) + draw.choice(CODAS)


@functools.cache
def words() -> list[str]:
    """Words that could be English, no letter in them twice, in one fixed order: the first 512 are held out from every training."""
    draw, found = random.Random(20263), dict[str, None]()
    while len(found) < HELD_OUT + TRAINED:
        word = syllable(draw, bare=0.2) + (syllable(draw, bare=0.0) if draw.random() < 0.6 else "")
        if LENGTHS[0] <= len(word) <= LENGTHS[1] and len(set(word)) == len(word):
            found[word] = None
    return list(found)


def as_row(word: str) -> dict[str, str]:
    """One row of the dataset."""
    return {"prompt": f"{word}>", "answer": pig_latin(word)}


def train_rows() -> list[dict[str, str]]:
    """The words to learn from, with their answers."""
    return [as_row(w) for w in words()[HELD_OUT:]]


def val_rows() -> list[dict[str, str]]:
    """The words to be judged on; no training sees them."""
    return [as_row(w) for w in words()[:HELD_OUT]]


def exact(
    data: Mapping[str, Any],  # the row
    answer: str,  # what the model wrote, without the end of sequence
) -> float:  # 0 or 1
    """Whether the answer is right to the letter."""
    return float(answer == data["answer"])


# -- the model: 80 thousand parameters that can say a word again, from any letter on ---------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; text that it cannot spell becomes `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=64)


def warm_start_batch(
    batch: int,
    draw: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:  # [B, T] token ids, and targets with -100 where nothing is learned
    """Strings of distinct letters, each said again from a letter drawn at random, around its end: `cabd>` is followed by `bdca`, or `abdc`."""
    import torch

    ids_BT = torch.zeros(batch, 2 * LENGTHS[1] + 2, dtype=torch.int64)
    targets_BT = torch.full_like(ids_BT, -100)
    for row, target in zip(ids_BT, targets_BT):
        letters = draw.sample(string.ascii_lowercase, draw.randint(*LENGTHS))
        start = draw.randrange(len(letters))
        said = [VOCABULARY.index(c) for c in [*letters, ">", *letters[start:], *letters[:start], EOS]]
        row[: len(said)] = torch.tensor(said)
        target[len(letters) + 1 : len(said)] = row[len(letters) + 1 : len(said)]
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
def warm_start(seed: int) -> Qwen2ForCausalLM:
    """A new model that has learned to say strings again, and nothing else."""
    import torch
    from torch.nn.functional import cross_entropy
    from tqdm.auto import trange
    from transformers import Qwen2Config, Qwen2ForCausalLM

    how = SETTINGS["warm_start"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**SETTINGS["model"], pad_token_id=0, eos_token_id=1, bos_token_id=None))
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how["lr"], weight_decay=0.0, fused=True)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50, (how["steps"] - step) / (0.3 * how["steps"])))
    for _ in trange(how["steps"], desc="warm start", unit="step", mininterval=0.5):
        ids_BT, targets_BT = warm_start_batch(how["batch"], draw)
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    return model.eval()


def recipe_of(seed: int) -> str:
    """A short hash of all that decides the model: settings, seed, and the code that follows them."""
    code = [inspect.getsource(f) for f in (build_tokenizer, warm_start_batch, warm_start)]
    return hashlib.sha256(json.dumps([SETTINGS, VOCABULARY, LENGTHS, seed, code]).encode()).hexdigest()[:12]


def build_model(
    seed: int,
    cache_dir: Path,  # made models are kept here, one folder each
) -> Path:  # a folder that transformers loads
    """Make the model and its tokenizer, or find them made."""
    from safetensors.torch import save_file

    done = Path(cache_dir) / f"pig_latin-seed{seed}-{recipe_of(seed)}"
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
