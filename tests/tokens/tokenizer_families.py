"""Real tokenizers, trained on the spot, with the chat templates of known families."""

from __future__ import annotations

import functools
import json
import tempfile
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

# Compact equivalents of what the families' own templates do with tools and reasoning --------------------------------------------------

_TOOLS = "{%- if tools %}{{ '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}{{ '# Tools\n<tools>' }}{%- for t in tools %}{{ '\n' + (t | tojson) }}{%- endfor %}{{ '\n</tools>HOW<|im_end|>\n' }}{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
_RESULT = (
    "{%- elif m.role == 'tool' %}{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
)
_JSON_CALL = "{{ '<tool_call>\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + '}\n</tool_call>' }}"
QWEN25 = (
    _TOOLS.replace("HOW", "\nUse <tool_call>\n{...}\n</tool_call>")
    + "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{%- if m.content %}{{ '\n' + m.content }}{%- endif %}{%- for c in m.tool_calls %}{{ '\n' }}"
    + _JSON_CALL + "{%- endfor %}{{ '<|im_end|>\n' }}" + _RESULT + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)  # fmt: skip
QWEN3 = (  # drops what was thought before the last question
    _TOOLS.replace("HOW", "\nUse <tool_call>\n{...}\n</tool_call>")
    + "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}{%- elif '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}{{ '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- if not loop.first or content %}{{ '\n' }}{%- endif %}" + _JSON_CALL + "{%- endfor %}{{ '<|im_end|>\n' }}" + _RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)  # fmt: skip
QWEN3_THINKING = QWEN3.replace("{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}", "{{ '<think>\n' }}")  # always begins the thought itself
QWEN_CODER = (
    _TOOLS.replace("HOW", "\nUse <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>")
    + "{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant' }}{%- if m.content | trim %}{{ '\n' + (m.content | trim) + '\n' }}{%- endif %}"
    "{%- for c in m.tool_calls %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}{%- for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}{{ '\n</parameter>\n' }}{%- endfor %}{{ '</function>\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'user' or m.role == 'assistant' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + _RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)  # fmt: skip
LLAMA31 = (  # one call a message; results are JSON
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools %}{{ 'Environment: ipython\n' }}{%- endif %}{{ 'Today Date: 26 Jul 2024\n\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}{{ '<|eot_id|>' }}"
    "{%- if tools %}{{ '<|start_header_id|>user<|end_header_id|>\n\nRespond with {\"name\": ..., \"parameters\": ...}.\n\n' }}{%- for t in tools %}{{ (t | tojson(indent=4)) + '\n\n' }}{%- endfor %}{{ (messages[0].content | trim) + '<|eot_id|>' }}{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}{%- set c = m.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n{\"name\": \"' + c.name + '\", \"parameters\": ' + (c.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' or m.role == 'ipython' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}{{ '<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}{#- <|python_tag|> -#}"
)
MISTRAL_V3 = (  # the tools stand before the last question; nine characters an id
    "{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + ', \"id\": \"' + c.id + '\"}' + ('' if loop.last else ', ') }}{%- endfor %}{{ ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + (m.content | trim) + eos_token }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{ raise_exception('Only user and assistant roles are supported, with the exception of an initial optional system message!') }}{%- endif %}{%- endfor %}"
)
MISTRAL_V13 = (
    "{{ bos_token }}{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{%- elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{ m.content }}{%- for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + (c.function.arguments | tojson) }}{%- endfor %}{{ eos_token }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
_DS_RESULT = "{%- elif m.role == 'tool' %}{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<｜tool▁outputs▁begin｜>' }}{%- endif %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{%- endif %}"
DEEPSEEK_R1 = (  # arguments as text; what was thought is dropped at once
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<｜Assistant｜>' }}{%- endif %}{{ m.content.split('</think>')[-1] }}"
    "{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}{{ ('' if loop.first else '\n') + '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{%- endif %}{{ eos_token }}"
    + _DS_RESULT + "{%- endif %}{%- endfor %}{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜><think>\n' }}{%- endif %}"
)  # fmt: skip
DEEPSEEK_V31 = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{%- if loop.first or loop.previtem.role == 'user' %}{{ '<｜Assistant｜></think>' }}{%- endif %}{{ m.content.split('</think>', 1)[-1] }}"
    "{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{%- endif %}{{ eos_token }}"
    + _DS_RESULT + "{%- endif %}{%- endfor %}{%- if add_generation_prompt and messages[-1].role == 'user' %}{{ '<｜Assistant｜></think>' if not thinking else '<｜Assistant｜><think>' }}{%- endif %}"
)  # fmt: skip

_CHATML_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN = {"special": _CHATML_SPECIAL, "added": ["<tool_call>", "</tool_call>"], "eos": "<|im_end|>", "end": "<|im_end|>"}
_QWEN_3 = {**_QWEN, "added": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]}
_MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *(f"<｜tool▁{what}▁{side}｜>" for what in ("calls", "call", "outputs", "output") for side in ("begin", "end")), "<｜tool▁sep｜>"]
_DS = {"special": _DEEPSEEK, "added": ["<think>", "</think>"], "bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "end": "<｜end▁of▁sentence｜>"}
AGENTS: dict[str, dict[str, Any]] = {
    "qwen2.5": {**_QWEN, "template": QWEN25, "format": "hermes"},
    "qwen2.5-words": {**_QWEN, "template": QWEN25, "format": "hermes", "metaspace": True},  # a tokenizer that begins a text otherwise than its middle
    "qwen3": {**_QWEN_3, "template": QWEN3, "format": "hermes"},
    "qwen3-no-think": {**_QWEN_3, "template": QWEN3, "format": "hermes", "kwargs": {"enable_thinking": False}},
    "qwen3-thinking": {**_QWEN_3, "template": QWEN3_THINKING, "format": "hermes"},
    "qwen3-coder": {**_QWEN, "template": QWEN_CODER, "format": "qwen_xml"},
    "llama3.1": {"template": LLAMA31, "special": [*FAMILIES["llama3"]["special"], "<|eom_id|>", "<|python_tag|>"], "bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "end": "<|eot_id|>", "format": "llama"},
    "mistral-v3": {"template": MISTRAL_V3, "special": _MISTRAL, "bos": "<s>", "eos": "</s>", "end": "</s>", "metaspace": True, "format": "mistral"},
    "mistral-v13": {"template": MISTRAL_V13, "special": [*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]"], "bos": "<s>", "eos": "</s>", "end": "</s>", "format": "mistral_args"},
    "deepseek-r1": {**_DS, "template": DEEPSEEK_R1, "format": "deepseek"},
    "deepseek-v3.1": {**_DS, "template": DEEPSEEK_V31, "format": "deepseek"},
    "chatml-inline": {**_QWEN, "template": CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}\n" + _JSON_CALL + "{% endfor %}"), "format": "hermes"},
}  # fmt: skip


@functools.cache
def make(family: str) -> Any:
    """A trained tokenizer with its family's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    f = FAMILIES.get(family) or AGENTS[family]
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
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in f.get("added", ())])  # whole, but no special tokens
    tokenizer.chat_template = f["template"]
    return tokenizer


@functools.cache
def loaded(family: str) -> Any:
    """The same from files, as AutoTokenizer reads them."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        make(family).save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)

