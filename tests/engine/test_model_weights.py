"""The model against transformers and peft: packed forward, gradients, adapters, heads, and bad input."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from nexrl_sdk.engine.llama import group_by_length, pack_rows
from nexrl_sdk.engine.model import EngineModel, LoraConfig, check_head, load_model, load_tokenizer
from nexrl_sdk.types import ConfigError

torch.set_num_threads(1)
TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "llama3": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16})),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TINY, tie_word_embeddings=True)),
    "qwen2_window": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY, head_dim=16)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**TINY, sliding_window=6)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.0, sliding_window=6)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**TINY, logits_scaling=3.0)),
}
FUSED = {"llama", "llama3", "qwen2", "qwen2_window", "qwen3", "mistral"}


def build(name: str):
    """A random model with all weights, biases and norms away from their defaults."""
    torch.manual_seed(0)
    module = FAMILIES[name]().eval()
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if "norm" in n or n.endswith("bias") else 0.1))
    return module


def sequences(*lengths: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(64, (n,), generator=g).tolist() for n in lengths]


def packed(seqs: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    cu = [0]
    for s in seqs:
        cu.append(cu[-1] + len(s))
    return torch.tensor([t for s in seqs for t in s]), cu


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_forward_and_gradients_are_transformers_own(name):
    module, seqs = build(name), sequences(3, 17, 16, 1, 9, 40)
    oracle = build(name)
    want = torch.cat([oracle(torch.tensor([s])).logits[0] for s in seqs])
    model = EngineModel(module)
    assert model.fused == (name in FUSED)
    tokens, cu = packed(seqs)
    for checkpointing in (False, True):
        got = model.head()(model.backbone(tokens, None, cu, gradient_checkpointing=checkpointing))
        assert torch.allclose(got, want, atol=2e-5, rtol=1e-4)
        direction = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
        oracle.zero_grad(), module.zero_grad()
        (want * direction).sum().backward(retain_graph=True)
        (got * direction).sum().backward()
        theirs = {n: p.grad for n, p in oracle.named_parameters()}
        for n, p in module.named_parameters():
            assert torch.allclose(p.grad, theirs[n], atol=1e-3, rtol=1e-3), n
    check_head(model)


def test_positions_may_be_given_and_lengths_may_be_equal():
    model = EngineModel(build("qwen2"))
    tokens, cu = packed(sequences(7, 7, 7))
    positions = torch.arange(7).repeat(3)
    with torch.no_grad():
        assert torch.equal(model.backbone(tokens, positions, cu), model.backbone(tokens, None, pack_rows(cu)))


def test_groups_hold_every_sequence_once_and_little_padding():
    lengths = torch.randint(1, 400, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = group_by_length(lengths)
    assert sorted(i for g in groups for i in g) == list(range(200))
    assert sum(len(g) * max(lengths[i] for i in g) for g in groups) < 1.25 * sum(lengths)


def test_parameters_are_leaves_that_optimizers_files_and_the_buffer_share(tmp_path):
    module = build("qwen2")
    model = EngineModel(module)
    assert all(p.is_leaf and p.requires_grad for p in module.parameters())
    assert module.lm_head.weight is module.model.embed_tokens.weight
    optimizer = torch.optim.AdamW(model.parameters().values(), lr=0.1)
    tokens, cu = packed(sequences(5, 8))
    model.head()(model.backbone(tokens, None, cu)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert model.llama.intact
    k = model.llama.layers[0].block.self_attn.k_proj.weight
    assert torch.equal(model.llama.layers[0].qkv.weight[32:48], k)
    module.save_pretrained(tmp_path / "model")
    again = load_model(tmp_path / "model")
    for (n, a), b in zip(module.named_parameters(), again.base.parameters()):
        assert torch.equal(a, b), n
    save_file({n: p.detach() for n, p in module.named_parameters()}, tmp_path / "x.safetensors")
    state = {k: torch.full_like(v, 0.5) for k, v in module.state_dict().items()}
    module.load_state_dict(state)
    assert model.llama.intact and model.llama.layers[1].gate_up.weight.eq(0.5).all()


def test_moving_a_fused_model_is_noticed():
    model = EngineModel(build("llama"))
    assert model.llama.intact
    model.base.to(torch.bfloat16)
    assert not model.llama.intact


def randomise(model: EngineModel, adapter: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters(adapter).values():
            p.copy_(torch.randn(p.shape, generator=g) * 0.2)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3"])
def test_adapters_are_pefts(name, tmp_path):
    import peft

    model = EngineModel(build(name))
    tokens, cu = packed(sequences(4, 11))
    with torch.no_grad():
        base = model.head()(model.backbone(tokens, None, cu))
    model.add_adapter("default", LoraConfig(rank=4, seed=3))
    model.add_adapter("other", LoraConfig(rank=2, alpha=8, train_mlp=False, train_unembed=name != "gpt2"))
    randomise(model, "default", 1), randomise(model, "other", 2)
    for adapter in ("default", "other"):
        model.save_adapter(tmp_path / adapter, adapter)
        oracle = peft.PeftModel.from_pretrained(build(name), str(tmp_path / adapter)).eval()
        ids = torch.tensor([tokens[:4].tolist()])
        with torch.no_grad(), model.adapter(adapter):
            got = model.head()(model.backbone(tokens, None, cu))
            assert torch.allclose(got[:4], oracle(ids).logits[0], atol=1e-4), adapter
        assert not torch.allclose(got, base, atol=1e-2)
        fresh = EngineModel(build(name))
        fresh.load_adapter(tmp_path / adapter, "loaded")
        with torch.no_grad(), fresh.adapter("loaded"):
            assert torch.allclose(fresh.head()(fresh.backbone(tokens, None, cu)), got, atol=1e-6)
    with torch.no_grad(), model.adapter("other"), model.adapter(None):
        assert torch.equal(model.head()(model.backbone(tokens, None, cu)), base)


def test_only_the_active_adapter_gets_gradients_and_all_stay_trainable():
    model = EngineModel(build("qwen2"))
    model.add_adapter("a", LoraConfig(rank=2)), model.add_adapter("b", LoraConfig(rank=2))
    assert model.parameters() == {} and model.default_adapter == "a"
    tokens, cu = packed(sequences(6))
    with model.adapter("b"):
        model.head()(model.backbone(tokens, None, cu)).sum().backward()
    assert all(p.grad is None and p.requires_grad for p in model.parameters("a").values())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters("b").values())
    model.remove_adapter("a")
    assert model.adapters == ["b"]
    model.remove_adapter("b")
    assert model.adapters == [] and torch.isfinite(model.backbone(tokens, None, cu)).all()


def test_the_same_seed_makes_the_same_adapter_and_leaves_the_global_generator_alone():
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        model = EngineModel(build("llama"))
        before = torch.random.get_rng_state()
        model.add_adapter("default", LoraConfig(seed=9))
        assert torch.equal(before, torch.random.get_rng_state())
        made.append(model.parameters("default"))
    assert all(torch.equal(made[0][n], made[1][n]) for n in made[0])


def test_dropout_acts_only_while_training():
    model = EngineModel(build("qwen2"))
    model.add_adapter("default", LoraConfig(rank=4, dropout=0.5))
    randomise(model, "default", 0)
    tokens, cu = packed(sequences(9))
    with torch.no_grad(), model.adapter("default"):
        a, b = model.backbone(tokens, None, cu), model.backbone(tokens, None, cu)
        with model.training():
            c = model.backbone(tokens, None, cu)
        assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(a, model.backbone(tokens, None, cu))


def message(call) -> str:
    with pytest.raises(ConfigError) as e:
        call()
    return str(e.value)


def test_bad_input_says_what_to_do(tmp_path):
    build("qwen2").save_pretrained(tmp_path / "reverse")
    assert "did you mean 'reverse'" in message(lambda: load_model(tmp_path / "revers"))
    assert "no config.json" in message(lambda: load_model(tmp_path))
    assert "did you mean 'bfloat16'" in message(lambda: load_model(tmp_path / "reverse", dtype="bfloat61"))
    assert "must be 1 to 128" in message(lambda: load_model(tmp_path / "reverse", max_length=129))
    assert load_model(tmp_path / "reverse", max_length=64).max_length == 64
    assert "no tokenizer" in message(lambda: load_tokenizer(tmp_path / "reverse"))
    if not torch.cuda.is_available():
        assert "no CUDA device" in message(lambda: load_model(tmp_path / "reverse", device="cuda"))
    model = load_model(tmp_path / "reverse", lora=LoraConfig(rank=2))
    assert "did you mean 'default'" in message(lambda: model.parameters("defalt"))
    assert "already" in message(lambda: model.add_adapter("default"))
    assert "did you mean 'q_proj'" in message(lambda: model.add_adapter("x", LoraConfig(target_modules=["q_porj"])))
    model.save_adapter(tmp_path / "adapter")
    assert "LoRA adapter" in message(lambda: load_model(tmp_path / "adapter"))
    wide = EngineModel(tf.Qwen2ForCausalLM(tf.Qwen2Config(**{**TINY, "hidden_size": 64})))
    text = message(lambda: wide.load_adapter(tmp_path / "adapter"))
    assert "_proj reads 64 inputs, the adapter 32" in text and "more" in text
    shallow = EngineModel(tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)))
    assert "no layer of this model" in message(lambda: shallow.load_adapter(tmp_path / "adapter"))
    assert shallow.adapters == []


def test_a_model_with_missing_weights_is_refused(tmp_path):
    from safetensors.torch import load_file

    build("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in message(lambda: load_model(tmp_path))


def test_a_head_that_does_more_is_refused():
    model = EngineModel(build("qwen2"))
    forward = model.base.forward
    model.base.forward = lambda **kw: type("Out", (), {"logits": forward(**kw).logits * 2})()
    assert "logits" in message(lambda: check_head(model))


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_a_plain_tokenizer_is_loaded_as_it_is(tmp_path, family):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<unk>", "<|call|>", " ", *"abcde"])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\|call\|>|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    build(family).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("ab <|call|>é", add_special_tokens=False) == made.encode("ab <|call|>é").ids == [3, 4, 2, 1, 0]
    assert loaded.decode([3, 4, 2, 1]) == "ab <|call|>"
