"""The sampler against transformers, against the model's own forward, and against itself in other company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nexrl_sdk.engine.decode import FusedDecoder
from nexrl_sdk.engine.draw import Shaping, draw, inverse_cdf, streams, truncate, uniforms
from nexrl_sdk.engine.model import EngineModel, LoraConfig
from nexrl_sdk.engine.sampler import Sampler
from nexrl_sdk.types import Completion, ConfigError, ContextOverflowError, DataError, SamplingParams

torch.set_num_threads(1)
TINY = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TINY, tie_word_embeddings=True)),
    "qwen2_window": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY, head_dim=16)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**TINY, sliding_window=9)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=32)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=5.0, sliding_window=6)),
    "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4)),
}


def build(name: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if n.endswith("bias") else 0.15))
    module.generation_config = tf.GenerationConfig(pad_token_id=0, eos_token_id=None)
    module.config.eos_token_id = None
    return module.to(dtype)


def prompts(*lengths: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(1, 96, (n,), generator=g).tolist() for n in lengths]


def whole_logprobs(module, prompt: list[int], c: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-softmax at the completion's positions by one transformers forward."""
    logits = module(torch.tensor([[*prompt, *c.tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)


def taken(logp: torch.Tensor, c: Completion) -> np.ndarray:
    return logp.gather(-1, torch.tensor(c.tokens)[:, None])[:, 0].detach().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_logprobs_are_transformers_own(name):
    oracle, own = build(name), prompts(3, 11, 3, 24)
    new = 6 if name == "mamba" else 20
    for fused in (None, False) if name in ("llama", "qwen2", "qwen2_window", "qwen3", "mistral") else (None,):
        sampler = Sampler(EngineModel(build(name)), fused=fused, max_batch=3)
        greedy = sampler.sample(own, SamplingParams(max_tokens=new, temperature=0, stop=[]))
        hot = sampler.sample(own, SamplingParams(max_tokens=new, temperature=0.7, seed=0, stop=[]), n=2)
        for p, [g], h in zip(own, greedy, hot):
            want = oracle.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), do_sample=False, max_new_tokens=new)[0, len(p) :].tolist()
            assert g.tokens == want and g.finish_reason == "length"
            assert np.abs(taken(whole_logprobs(oracle, p, g), g) - g.logprobs).max() < 1e-4
            for c in h:
                assert np.abs(taken(whole_logprobs(oracle, p, c, 0.7), c) - c.logprobs).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "qwen2_window", "qwen3"])
def test_attention_by_torchs_kernel_is_attention_by_two_products(name, monkeypatch):
    """The path of GPUs, run on a CPU."""
    params, own = SamplingParams(max_tokens=20, seed=0, stop=[]), prompts(3, 11, 24)
    want = Sampler(EngineModel(build(name))).sample(own, params, n=3)
    monkeypatch.setattr(FusedDecoder, "_attend_products", FusedDecoder._attend_sdpa)
    got = Sampler(EngineModel(build(name)), max_batch=5).sample(own, params, n=3)
    for a, b in zip(got, want):
        for x, y in zip(a, b):
            assert x.tokens == y.tokens and np.abs(np.subtract(x.logprobs, y.logprobs)).max() < 1e-5


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2", "neox"])
def test_company_changes_nothing(name):
    """Alone, in a crowd, and squeezed through few rows: the same tokens, and logprobs within 1e-5."""
    own = prompts(5, 1, 17, 9, 30)
    params = [SamplingParams(max_tokens=int(m), seed=i, stop=[3], temperature=t) for i, (m, t) in enumerate(zip((40, 7, 55, 23, 1), (1.0, 0.8, 1.3, 1.0, 1.0)))]
    model = EngineModel(build(name))
    crowd = Sampler(model).sample([*own, *prompts(2, 40)], [*params, *[SamplingParams(max_tokens=60)] * 2], n=5)
    few = Sampler(model, max_batch=3).sample(own, params, n=5)
    for p, q, a, b in zip(own, params, crowd, few):
        [alone] = Sampler(model).sample([p], q, n=5)
        for x, y, z in zip(a, b, alone):
            assert x.tokens == y.tokens == z.tokens
            assert max(np.abs(np.subtract(x.logprobs, z.logprobs)).max(), np.abs(np.subtract(y.logprobs, z.logprobs)).max()) < 1e-5
    again = Sampler(model).sample([*own], params, n=5)
    assert [c.logprobs for g in again for c in g] == [c.logprobs for g in Sampler(model).sample([*own], params, n=5) for c in g]


def test_rows_come_and_go_for_long_without_the_columns_overflowing():
    model = EngineModel(build("qwen2"))
    g = np.random.default_rng(0)
    own = [g.integers(1, 96, int(n)).tolist() for n in g.integers(1, 40, 60)]
    params = [SamplingParams(max_tokens=int(n), seed=i, stop=[]) for i, n in enumerate(g.integers(1, 80, 60))]
    sampler = Sampler(model, max_batch=5)
    got = sampler.sample(own, params)
    assert sampler._lanes[None].decoder.cache.columns <= 256 and sampler._lanes[None].records.tokens.shape[1] <= 512
    want = Sampler(model).sample(own, params)
    assert [x[0].tokens for x in got] == [x[0].tokens for x in want]
    limited = Sampler(model, max_cache_tokens=300).sample(own, params)
    assert [x[0].tokens for x in limited] == [x[0].tokens for x in want]


def test_equal_prompts_are_prefilled_once():
    model = EngineModel(build("qwen2"))
    sampler = Sampler(model)
    sampler.sample([[1]], SamplingParams(max_tokens=1))
    decoder, seen = sampler._lanes[None].decoder, []
    prefill = decoder.prefill
    decoder.prefill = lambda prompts, *a: seen.append([len(p) for p in prompts]) or prefill(prompts, *a)
    [p] = prompts(9)
    sampler.sample([p, p, [1, 2], p], SamplingParams(max_tokens=3), n=4)
    assert seen == [[9, 2]]
    seen.clear()
    small = Sampler(model, max_batch=4)
    small._lane(None).decoder.prefill = decoder.prefill
    small.sample([p], SamplingParams(max_tokens=3, stop=[]), n=16)
    assert seen == [[9]]


def test_bfloat16_stays_near_transformers():
    module = build("qwen2", torch.bfloat16)
    own = prompts(7, 12)
    for fused in (True, False):
        out = Sampler(EngineModel(build("qwen2", torch.bfloat16)), fused=fused).sample(own, SamplingParams(max_tokens=16, seed=0), n=4)
        for p, g in zip(own, out):
            for c in g:
                assert np.abs(taken(whole_logprobs(module, p, c), c) - c.logprobs).mean() < 0.1


# drawing -----------------------------------------------------------------------------------------------------------------


def nucleus(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Top-k, top-p, min-p in plain numpy."""
    order, keep = np.argsort(-p, kind="stable"), np.zeros(len(p), bool)
    q = p[order][: top_k or None]
    q = q / q.sum()
    count = int((np.cumsum(q) - q < top_p).sum())
    keep[order[: min(count, top_k or len(p))]] = True
    keep &= p >= min_p * p.max()
    out = np.where(keep, p, 0)
    return out / out.sum()


@pytest.mark.parametrize("kw", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"top_k": 1}, {"temperature": 0.5, "top_p": 0.9}])
def test_the_sampled_distribution_is_the_cut_one(kw):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2
    p = SamplingParams(**kw)
    want = nucleus(torch.softmax(logits.double() / p.temperature, -1).numpy(), p.top_k, p.top_p, p.min_p)
    n = 40_000
    u = torch.from_numpy(uniforms(streams(3, n), np.zeros(n), 1))
    tokens, logprobs = draw(logits.expand(n, -1), u, Shaping.of([p], 50))
    seen = np.bincount(tokens.numpy(), minlength=50) / n
    assert (seen[want == 0] == 0).all() and np.abs(seen - want).max() < 4 * math.sqrt(0.25 / n)
    assert np.abs(np.log(want[tokens]) - logprobs.numpy()).max() < 1e-4


def test_rows_with_different_parameters_are_cut_each_by_its_own():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 3
    ps = [SamplingParams(top_k=3), SamplingParams(), SamplingParams(top_p=0.5, temperature=2.0), SamplingParams(temperature=0, top_k=2)]
    shaping = Shaping.of(ps, 300)
    cut = truncate(logits / shaping.temperature, shaping).isfinite().sum(-1).tolist()
    assert cut[0] == 3 and cut[1] == cut[3] == 300 and cut[2] < 300
    tokens, logprobs = draw(logits, torch.full((4, 1), 0.999, dtype=torch.float64), shaping)
    assert tokens[3] == logits[3].argmax() and torch.allclose(logprobs[3], logits[3].log_softmax(-1).max())


@pytest.mark.parametrize("vocab", [7, 256, 257, 1000, 8192, 50257])
def test_inverse_cdf_is_numpys_and_never_finds_a_zero(vocab):
    g = torch.Generator().manual_seed(0)
    p = torch.rand(64, vocab, generator=g) ** 8 * (torch.rand(64, vocab, generator=g) < 0.3)
    p[:, vocab // 2] += 1e-3
    u = torch.rand(64, 1, dtype=torch.float64, generator=g)
    u[:4] = torch.tensor([[0.0], [1 - 2.0**-32], [0.5], [2.0**-32]], dtype=torch.float64)
    got = inverse_cdf(p, u)[:, 0]
    assert (p.gather(1, got[:, None]) > 0).all()
    sums = np.cumsum(p.double().numpy(), -1)
    level = u.numpy()[:, 0] * sums[:, -1]
    low = np.take_along_axis(sums, got.numpy()[:, None], 1)[:, 0]
    assert (low >= level - 1e-5 * sums[:, -1]).all() and (low - p.double().numpy()[np.arange(64), got] <= level + 1e-5 * sums[:, -1]).all()
    one = torch.zeros(1, vocab)
    one[0, vocab - 1] = 1
    assert inverse_cdf(one, torch.zeros(1, 1, dtype=torch.float64)).item() == vocab - 1


def test_streams_are_independent_uniforms():
    x = uniforms(streams(0, 500), np.zeros(500), 400)
    assert 0 <= x.min() and x.max() < 1 and abs(x.mean() - 0.5) < 0.003 and abs(x.var() - 1 / 12) < 0.001
    assert abs(np.corrcoef(x[:, :-1].ravel(), x[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 0.01
    y = uniforms(streams(1, 500), np.zeros(500), 400)
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.01
    assert len({streams(s, 1)[0] for s in [*range(-50, 50), 2**64 + 200]}) == 101
    assert streams(None, 1)[0] != streams(None, 1)[0]


def test_sampled_tokens_follow_the_model():
    model = EngineModel(build("qwen2"))
    [group] = Sampler(model).sample([[5, 6]], SamplingParams(max_tokens=1, seed=1), n=4000)
    p = model.base(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1).detach().numpy()
    seen = np.bincount([c.tokens[0] for c in group], minlength=96) / 4000
    assert np.abs(seen - p).max() < 4 * math.sqrt(p.max() / 4000)


# what is returned --------------------------------------------------------------------------------------------------------


def test_prompt_and_top_logprobs():
    module, own = build("qwen2"), prompts(9, 4)
    sampler = Sampler(EngineModel(build("qwen2")))
    params = [SamplingParams(max_tokens=5, seed=0, prompt_logprobs=True, top_logprobs=3, stop=[]), SamplingParams(max_tokens=5, top_k=2, top_logprobs=4, seed=0, stop=[])]
    [a], [b] = sampler.sample(own, params)
    want = module(torch.tensor([own[0]])).logits[0].log_softmax(-1)
    assert math.isnan(a.prompt_logprobs[0]) and b.prompt_logprobs is None
    assert np.allclose(a.prompt_logprobs[1:], [want[i, t].item() for i, t in enumerate(own[0][1:])], atol=1e-5)
    top = whole_logprobs(module, own[0], a).topk(3)
    assert [[t for t, _ in x] for x in a.top_logprobs] == top.indices.tolist()
    assert np.allclose([[v for _, v in x] for x in a.top_logprobs], top.values.detach(), atol=1e-4)
    assert all(len(x) == 4 and math.isclose(math.exp(x[0][1]) + math.exp(x[1][1]), 1, abs_tol=1e-5) for x in b.top_logprobs)


def test_logprobs_of_given_sequences():
    module, own = build("gpt2"), prompts(1, 30, 2, 128)
    got = Sampler(EngineModel(build("gpt2"))).logprobs(own, temperature=0.5, token_budget=40)
    for s, g in zip(own, got):
        want = (module(torch.tensor([s])).logits[0] / 0.5).log_softmax(-1)
        assert len(g) == len(s) and math.isnan(g[0])
        assert np.allclose(g[1:], [want[i, t].item() for i, t in enumerate(s[1:])], atol=1e-4)


def test_the_context_ends_a_completion():
    sampler = Sampler(EngineModel(build("gpt2")))
    [[c]] = sampler.sample(prompts(120), SamplingParams(max_tokens=50, stop=[]))
    assert len(c.tokens) == 8 and c.finish_reason == "length"


def test_weight_versions_are_those_of_the_first_token():
    model = EngineModel(build("qwen2"))
    model.version = 7
    assert Sampler(model).sample([[1]], SamplingParams(max_tokens=2))[0][0].weight_version == 7


# stops -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    """Byte-level: one token a byte, so that every string spans tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={"<eos>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def scripted(tokenizer, text: str):
    """A model of bytes that says one text after any prompt whose last token is a newline."""
    config = tf.Qwen2Config(vocab_size=len(tokenizer), hidden_size=512, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512)
    module = tf.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
        module.model.embed_tokens.weight[: len(tokenizer)] = torch.eye(len(tokenizer), 512)
        module.model.norm.weight.fill_(1)
        ids = tokenizer("\n" + text)["input_ids"]
        assert len(set(ids)) == len(ids), "each byte once, since the model looks at the last one alone"
        for a, b in zip(ids, [*ids[1:], tokenizer.eos_token_id]):
            module.lm_head.weight[b, a] = 1
    return module


def test_stop_strings_may_span_tokens_and_split_characters(tokenizer):
    sampler = Sampler(EngineModel(scripted(tokenizer, "abé<X>cd")), tokenizer)
    newline = tokenizer("\n")["input_ids"]
    greedy = lambda **kw: sampler.sample([newline], SamplingParams(temperature=0, max_tokens=30, **kw))[0][0]
    c = greedy(stop="<X>")
    assert c.text == "abé" and tokenizer.decode(c.tokens) == "abé<X>" and c.finish_reason == "stop"
    c = greedy(stop=["nothing", "é"])
    assert c.text == "ab" and len(c.tokens) == 4
    c = greedy(stop=["nothing"])
    assert c.tokens[-1] == tokenizer.eos_token_id and c.finish_reason == "stop" and c.text == "abé<X>cd"
    assert greedy().tokens == c.tokens and greedy().text is None
    letter = tokenizer("b")["input_ids"][0]
    assert greedy(stop=[letter]).tokens == tokenizer("ab")["input_ids"]
    assert greedy(stop=[]).finish_reason == "length" and len(greedy(stop=[]).tokens) == 30


# bad input ---------------------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_at_once_with_what_is_wrong():
    sampler = Sampler(EngineModel(build("qwen2")))
    for error, text, call in [
        (ContextOverflowError, "prompt 1 has 128 tokens; the model's context is 128", lambda: sampler.sample([[1], [1] * 128])),
        (DataError, "prompt 0 has no tokens", lambda: sampler.sample([[]])),
        (DataError, "outside 0 to 95", lambda: sampler.sample([[96]])),
        (DataError, "wrap a single prompt", lambda: sampler.sample([1, 2])),
        (ConfigError, "no adapter 'x'", lambda: sampler.sample([[1]], adapter="x")),
        (ConfigError, "2 sampling parameters for 1 prompts", lambda: sampler.sample([[1]], [SamplingParams()] * 2)),
        (ConfigError, "need a tokenizer", lambda: sampler.sample([[1]], SamplingParams(stop="x"))),
        (ConfigError, "no fused path", lambda: Sampler(EngineModel(build("gpt2")), fused=True)),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert sampler.sample([]) == [] and sampler.sample([[1]], n=0) == [[]]


# adapters ----------------------------------------------------------------------------------------------------------------


def with_adapters(name: str) -> EngineModel:
    model = EngineModel(build(name))
    model.add_adapter("left", LoraConfig(rank=4, seed=1))
    model.add_adapter("right", LoraConfig(rank=2, train_mlp=False, train_unembed=name == "qwen2", seed=2))
    for k, adapter in enumerate(("left", "right")):
        g = torch.Generator().manual_seed(k)
        with torch.no_grad():
            for p in model.parameters(adapter).values():
                p.copy_(torch.randn(p.shape, generator=g) * 0.15)
    return model


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2"])
def test_rows_with_different_adapters_share_a_batch(name):
    import threading

    model, own = with_adapters(name), prompts(6, 13)
    params = SamplingParams(max_tokens=12, seed=4, stop=[], prompt_logprobs=True)
    sampler = Sampler(model)
    got: dict = {}
    threads = [threading.Thread(target=lambda a=a: got.update({a: sampler.sample(own, params, n=3, adapter=a)})) for a in (None, "left", "right")]
    with model.lock:  # all three are waiting before the first step
        [t.start() for t in threads]
    [t.join() for t in threads]
    for a in (None, "left", "right"):
        for p, group in zip(own, got[a]):
            for c in group:
                with torch.no_grad(), model.adapter(a):
                    logits = model.head()(model.backbone(torch.tensor([*p, *c.tokens]), None, [0, len(p) + 12]))
                logp = logits[:-1].log_softmax(-1).gather(-1, torch.tensor([*p, *c.tokens])[1:, None])[:, 0].numpy()
                assert np.abs(logp[len(p) - 1 :] - c.logprobs).max() < 1e-4 and np.allclose(logp[: len(p) - 1], c.prompt_logprobs[1:], atol=1e-4)
        assert [[c.tokens for c in g] for g in got[a]] == [[c.tokens for c in g] for g in Sampler(model).sample(own, params, n=3, adapter=a)]
    assert got["left"][0][0].tokens != got["right"][0][0].tokens != got[None][0][0].tokens


# weights that change -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("announced", [True, False])
def test_new_weights_are_seen_at_once(dtype, announced):
    """No stale copy: neither a packed weight, nor a norm, nor an adapter, nor a prefix."""
    model = with_adapters("qwen2")
    if dtype == torch.bfloat16:
        model = EngineModel(build("qwen2", dtype))
    adapter = model.default_adapter
    sampler, own, greedy = Sampler(model, max_batch=2), prompts(5), SamplingParams(max_tokens=8, temperature=0, stop=[])
    for step in range(3):
        with model.lock, torch.no_grad():
            for p in model.module.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p.dtype) * 0.2)
            model.generation += announced
        got = sampler.sample(own, greedy, n=4, adapter=adapter)
        assert [[c.tokens for c in g] for g in got] == [[c.tokens for c in g] for g in Sampler(model).sample(own, greedy, n=4, adapter=adapter)]
        scores = sampler.logprobs([[*own[0], *got[0][0].tokens]], adapter=adapter)[0][5:]
        assert np.abs(scores - got[0][0].logprobs).max() < (1e-4 if dtype == torch.float32 else 0.3)
