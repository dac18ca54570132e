"""The shared fixtures are what they say."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

FAMILIES = ("qwen2", "llama", "qwen3", "mistral", "gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_load_from_their_folders(tiny, family):
    folder = tiny(family)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family and model.config.vocab_size >= len(tokenizer)
    assert tiny(family) == folder


def test_byte_tokenizer_gives_any_text_back(byte_tokenizer):
    text = "1 + 1 = 2\n  naïve 日本 🙂"
    ids = byte_tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text.encode()) and byte_tokenizer.decode(ids) == text


def test_chat_template_uses_single_tokens_for_turns(byte_tokenizer):
    ids = byte_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=True)["input_ids"]
    assert byte_tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "h", "i", "<|end|>", "<|assistant|>"]


def test_char_tokenizer(char_tokenizer):
    assert char_tokenizer.decode(char_tokenizer("a b>c").input_ids) == "a b>c" and char_tokenizer.chat_template is None
