"""Shared by all tests: one thread, no network, and tiny models and tokenizers made on the spot."""

from __future__ import annotations

import os

for _name, _value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}.items():
    os.environ.setdefault(_name, _value)

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("steady", derandomize=True)  # the same examples in every run; --hypothesis-profile=default looks for others
settings.load_profile("steady")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: tests, and what they start, shall hear an interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("qwen2", "llama", "qwen3", "mistral", "gpt2")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def has_cuda() -> bool:
    """Whether tests marked `gpu` can run."""
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    for item in items:
        if "gpu" in item.keywords and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "network" in item.keywords and os.environ.get("HF_HUB_OFFLINE") == "1":
            item.add_marker(pytest.mark.skip(reason="HF_HUB_OFFLINE is set"))


def make_tokenizer(kind: str = "byte", *, chat: bool = True, pad: bool = True) -> Any:
    """A tokenizer of one token a byte (any text, exactly back) or a printable ASCII character, with `<eos>` and turn markers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if kind == "byte" else [chr(i) for i in range(32, 127)] + ["\n"]
    vocab = {c: i for i, c in enumerate([*specials, *alphabet])}
    if kind == "byte":
        core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    else:
        core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    named = {"eos_token": "<eos>", "unk_token": "<unk>", "additional_special_tokens": specials[3:], **({"pad_token": "<pad>"} if pad else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def make_config(family: str = "qwen2", **changes: Any) -> Any:
    """The configuration of a model of a few thousand parameters."""
    from transformers import AutoConfig

    common = {"vocab_size": 272, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if family == "gpt2":
        return AutoConfig.for_model("gpt2", **{**common, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **changes})
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": family == "qwen2"}
    extra = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}.get(family, {})
    return AutoConfig.for_model(family, **{**common, **shape, **extra, **changes})


def make_model(family: str = "qwen2", *, seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """A randomly initialised transformers model; weights are spread widely, so that its distributions are not flat."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(family, **{"initializer_range": 0.2, **changes}), dtype=getattr(torch, dtype))
    return model.eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("llama", chat=False, ...)`: a folder with a tiny model and its tokenizer, made once a session for each set of arguments."""

    @functools.cache
    def make(family: str = "qwen2", *, seed: int = 0, kind: str = "byte", chat: bool = True, pad: bool = True, dtype: str = "float32", **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(f"tiny_{family}")
        make_model(family, seed=seed, dtype=dtype, **changes).save_pretrained(folder)
        make_tokenizer(kind, chat=chat, pad=pad).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_qwen2(tiny: Callable[..., Path]) -> Path:
    """A tiny Qwen2 with a byte tokenizer and a chat template."""
    return tiny("qwen2")


@pytest.fixture(scope="session")
def tiny_llama(tiny: Callable[..., Path]) -> Path:
    """A tiny Llama with a byte tokenizer and a chat template."""
    return tiny("llama")


@pytest.fixture(scope="session")
def tiny_gpt2(tiny: Callable[..., Path]) -> Path:
    """A tiny GPT-2, which has no fused decode path."""
    return tiny("gpt2")


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One token a byte, with a chat template and a pad token."""
    return make_tokenizer("byte")


@pytest.fixture(scope="session")
def char_tokenizer() -> Any:
    """One token a character, without a chat template."""
    return make_tokenizer("char", chat=False)
