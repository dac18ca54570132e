"""Real tokenizers, trained on the spot, with the chat templates of known families."""

from __future__ import annotations

import functools
import json
from typing import Any

CORPUS = ["The cat sat on the mat, and what is 12 + 30?", "user assistant system\n\nhello hello there", "def f(x):\n    return x + 1\n", "naïve café — “quotes” ✓ 日本語", "im_start im_end eot_id INST"] * 4

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
THINK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
BARE = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}"

FAMILIES: dict[str, dict[str, Any]] = {
    "chatml": {"template": CHATML, "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "eos": "<|im_end|>", "end": "<|im_end|>"},
    "llama3": {"template": LLAMA3, "special": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], "bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "end": "<|eot_id|>"},
    "mistral": {"template": MISTRAL, "special": ["<s>", "</s>", "[INST]", "[/INST]"], "bos": "<s>", "eos": "</s>", "end": "</s>", "metaspace": True},
    "think": {"template": THINK, "special": ["<s>", "<|User|>", "<|Assistant|>", "<|end|>"], "bos": "<s>", "eos": "<|end|>", "end": "<|end|>"},
    "bare": {"template": BARE, "special": ["<eos>"], "eos": "<eos>", "end": "<eos>"},
}


@functools.cache
def make(family: str) -> Any:
    """A trained tokenizer with its family's special tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    f = FAMILIES[family]
    core = Tokenizer(models.BPE(byte_fallback=bool(f.get("metaspace")), unk_token="<unk>" if f.get("metaspace") else None))
    specials = [*(["<unk>"] if f.get("metaspace") else []), *f["special"]]
    if f.get("metaspace"):
        core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    else:
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    if f.get("metaspace"):  # bytes are ordinary tokens, not special ones
        whole = json.loads(core.to_str())
        whole["model"]["vocab"].update({f"<0x{i:02X}>": len(whole["model"]["vocab"]) + i for i in range(256)})
        core = Tokenizer.from_str(json.dumps(whole))
    if bos := f.get("bos"):
        core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))])
    named = {"eos_token": f["eos"], **({"bos_token": f["bos"]} if "bos" in f else {})}
    others = [t for t in f["special"] if t not in named.values()]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=others, **named)
    tokenizer.chat_template = f["template"]
    return tokenizer

