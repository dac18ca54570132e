"""Five letters, each answered with its successor: two small models made on the spot, one that knows and one that guesses."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

LETTERS = "abcdefghij"  # the successor of j is a
LENGTH = 5  # letters in a prompt
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNK, ">", *LETTERS]
HELD_OUT, TRAINED = 256, 8192  # strings: to be judged on, and to learn from by distillation
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": len(VOCABULARY),
    "num_hidden_layers": 2,
    "head_dim": 32,  # the least that vLLM's CPU kernels take
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {  # how each is made: its size, and what it was shown in plain supervised learning
    "teacher": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "steps": 300, "batch": 64, "lr": 2e-3, "right": 0.95, "copies": 0.5},
    "student": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "steps": 200, "batch": 64, "lr": 4e-3, "right": 0.15, "copies": 0.6},
}


# -- data: prompts `cabdj>`, answers `dbcea` -------------------------------------------------------


@functools.cache
def strings() -> list[str]:
    """All 100,000 strings in one fixed random order: the first 256 are held out from every training."""
    order = random.Random(20262).sample(range(len(LETTERS) ** LENGTH), len(LETTERS) ** LENGTH)
    return ["".join(LETTERS[i // len(LETTERS) ** k % len(LETTERS)] for k in range(LENGTH)) for i in order]


def successors(text: str) -> str:
    """Each letter's successor."""
    return "".join(LETTERS[(LETTERS.index(c) + 1) % len(LETTERS)] for c in text)


def as_row(text: str) -> dict[str, str]:
    """One row of the dataset."""
    return {"prompt": f"{text}>", "answer": successors(text)}


def train_rows() -> list[dict[str, str]]:
    """The rows to learn from; their answers are not used."""
    return [as_row(s) for s in strings()[HELD_OUT : HELD_OUT + TRAINED]]


def val_rows() -> list[dict[str, str]]:
    """The rows to be judged on; no training sees them."""
    return [as_row(s) for s in strings()[:HELD_OUT]]


def reward(
    data: Mapping[str, Any],  # the row
    answer: str,  # what the student wrote, without the end of sequence
) -> float:  # 0 to 1
    """Positions that are right, over the longer of the two lengths; only looked at, never learned from."""
    truth = str(data["answer"])
    return sum(a == b for a, b in zip(answer, truth)) / max(len(answer), len(truth))


# -- the models: teacher and student, each after plain supervised learning on its own mixture ------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, the same for both."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=64)


def mixture(
    letters_NL: torch.Tensor,  # all strings that may be used, as numbers from 0
    batch: int,
    right: float,  # share of right answers
    copies: float,  # share of the others that copy the prompt; the rest are random letters
    generator: torch.Generator,
) -> torch.Tensor:  # [B, 2 L + 2] token ids: letters, ">", letters, end of sequence
    """Prompts with answers, some of them right."""
    import torch

    prompt_BL = letters_NL[torch.randint(len(letters_NL), (batch,), generator=generator)]
    random_BL = torch.randint(len(LETTERS), prompt_BL.shape, generator=generator)
    kind_B1 = torch.rand(batch, 1, generator=generator)
    answer_BL = torch.where(kind_B1 < right, (prompt_BL + 1) % len(LETTERS), torch.where(kind_B1 < right + (1 - right) * copies, prompt_BL, random_BL))
    first, mark_B1, end_B1 = VOCABULARY.index(LETTERS[0]), torch.full((batch, 1), VOCABULARY.index(">")), torch.full((batch, 1), VOCABULARY.index(EOS))
    return torch.cat([prompt_BL + first, mark_B1, answer_BL + first, end_B1], dim=1)


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
def learn(name: str, seed: int) -> Qwen2ForCausalLM:
    """A new model after plain supervised learning on its mixture."""
    import torch
    from torch.nn.functional import cross_entropy
    from tqdm.auto import trange
    from transformers import Qwen2Config, Qwen2ForCausalLM

    how = dict(MODELS[name])
    size = {k: how.pop(k) for k in ("hidden_size", "intermediate_size", "num_attention_heads")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, **size, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    generator = torch.Generator().manual_seed(seed)
    letters_NL = torch.tensor([[LETTERS.index(c) for c in s] for s in strings()[HELD_OUT:]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=how["lr"], weight_decay=0.0, fused=True)
    for _ in trange(how["steps"], desc=f"the {name}", unit="step", mininterval=0.5):
        ids_BT = mixture(letters_NL, how["batch"], how["right"], how["copies"], generator)
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits[:, LENGTH:]
        cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, LENGTH + 1 :].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def recipe_of(name: str, seed: int) -> str:
    """A short hash of all that decides a model: settings, seed, and the code that follows them."""
    code = [inspect.getsource(f) for f in (strings, build_tokenizer, mixture, learn)]
    return hashlib.sha256(json.dumps([SHAPE, MODELS[name], VOCABULARY, seed, code]).encode()).hexdigest()[:12]


def build(name: str, seed: int, cache_dir: Path) -> Path:
    """Make a model and its tokenizer, or find them made."""
    from safetensors.torch import save_file

    done = Path(cache_dir) / f"distill-{name}-seed{seed}-{recipe_of(name, seed)}"
    if done.exists():
        return done
    work = done.with_name(f".{done.name}-{secrets.token_hex(4)}")
    work.mkdir(parents=True)
    try:
        model = learn(name, seed)
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


def build_student(
    seed: int,
    cache_dir: Path,  # made models are kept here, one folder each
) -> Path:  # a folder that transformers loads
    """The model that learns."""
    return build("student", seed, cache_dir)


def build_teacher(
    seed: int,
    cache_dir: Path,  # made models are kept here, one folder each
) -> Path:  # a folder that transformers loads
    """The model that scores."""
    return build("teacher", seed, cache_dir)
