"""The formula for the size of K and V, against real cache objects and published models."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from minivllm.memory.known_models import KNOWN_MODELS
from minivllm.memory.kv_size import (
    KVShape,
    kv_bytes,
    kv_bytes_per_token,
    kv_shape,
    num_requests_that_fit,
)
from minivllm.runners.past_key_values import cache_argument

# Every published config, as the class and the numbers that decide parameters and KV shape.
CONFIGS = {
    "smollm2-135m": ("Llama", 49152, 576, 1536, 30, 9, 3, {"tie_word_embeddings": True}),
    "smollm2-1.7b": ("Llama", 49152, 2048, 8192, 24, 32, 32, {"tie_word_embeddings": True}),
    "llama-2-7b": ("Llama", 32000, 4096, 11008, 32, 32, 32, {}),
    "llama-2-13b": ("Llama", 32000, 5120, 13824, 40, 40, 40, {}),
    "llama-2-70b": ("Llama", 32000, 8192, 28672, 80, 64, 8, {}),
    "llama-3.1-8b": ("Llama", 128256, 4096, 14336, 32, 32, 8, {}),
    "llama-3.1-70b": ("Llama", 128256, 8192, 28672, 80, 64, 8, {}),
    "llama-3.1-405b": ("Llama", 128256, 16384, 53248, 126, 128, 8, {}),
    "mistral-7b-v0.3": ("Mistral", 32768, 4096, 14336, 32, 32, 8, {}),
    "mixtral-8x7b": ("Mixtral", 32000, 4096, 14336, 32, 32, 8, {}),
    "qwen2.5-0.5b": ("Qwen2", 151936, 896, 4864, 24, 14, 2, {"tie_word_embeddings": True}),
    "qwen2.5-7b": ("Qwen2", 152064, 3584, 18944, 28, 28, 4, {}),
    "qwen2.5-72b": ("Qwen2", 152064, 8192, 29568, 80, 64, 8, {}),
    "qwen3-8b": ("Qwen3", 151936, 4096, 12288, 36, 32, 8, {"head_dim": 128}),
    "qwen3-32b": ("Qwen3", 151936, 5120, 25600, 64, 64, 8, {"head_dim": 128}),
    "phi-3-mini-4k": ("Phi3", 32064, 3072, 8192, 32, 32, 32, {}),
}


def config_of(name):
    if name == "gpt2":
        return transformers.GPT2Config()
    if name == "opt-13b":
        return transformers.OPTConfig(
            vocab_size=50272,
            hidden_size=5120,
            word_embed_proj_dim=5120,
            num_hidden_layers=40,
            ffn_dim=20480,
            num_attention_heads=40,
            max_position_embeddings=2048,
        )
    family, vocab, hidden, intermediate, layers, heads, kv_heads, more = CONFIGS[name]
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


@pytest.mark.parametrize("known", KNOWN_MODELS, ids=lambda known: known.name)
def test_known_models_are_what_their_configs_say(known):
    config = config_of(known.name)
    assert kv_shape(config) == known.shape
    if known.num_parameters < 30e9:  # the larger ones take seconds, even without memory
        check_parameters(known, config)


@pytest.mark.full
@pytest.mark.parametrize("known", KNOWN_MODELS, ids=lambda known: known.name)
def test_known_models_have_their_published_parameters(known):
    check_parameters(known, config_of(known.name))


def check_parameters(known, config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == known.num_parameters


def test_smollm2_by_hand():
    shape = KVShape(num_layers=30, num_kv_heads=3, head_dim=64)
    assert kv_bytes_per_token(shape, dtype_size=4) == 46_080
    assert kv_bytes(shape, 2048 + 512, dtype_size=4) == 117_964_800


def test_opt_13b_as_the_paper_reports_it():
    shape = KVShape(num_layers=40, num_kv_heads=40, head_dim=128)
    assert kv_bytes_per_token(shape, dtype_size=2) == 819_200
    assert kv_bytes(shape, 2048, dtype_size=2) == 1.5625 * 2**30


def test_both_consequences():
    """Linear in the tokens of a request and in the number of requests."""
    shape = KVShape(2, 3, 16)
    assert kv_bytes(shape, 200, 4) == 2 * kv_bytes(shape, 100, 4)
    assert kv_bytes(shape, 100, 4) * 7 == sum(kv_bytes(shape, 100, 4) for _ in range(7))


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (117_964_800 * 9, 9),
        (117_964_800 * 9 - 1, 8),
        (0, 0),
        (2**30, 9),
        (117_964_800 * 10**12 - 1, 10**12 - 1),  # more digits than a float has
    ],
)
def test_requests_that_fit(memory, expected):
    assert num_requests_that_fit(memory, KVShape(30, 3, 64), 2560, 4) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_the_formula_is_the_bytes_of_a_real_cache(tiny, dtype, num_tokens):
    model = copy.deepcopy(tiny[0]).to(dtype)
    cache = DynamicCache(config=model.config)
    token_ids = torch.ones(1, num_tokens, dtype=torch.long)
    model(token_ids, use_cache=True, **{cache_argument(model): cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == kv_bytes(kv_shape(model.config), num_tokens, dtype.itemsize)


def test_old_configs_split_the_hidden_size_and_share_no_heads():
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=20)
    assert kv_shape(config) == KVShape(num_layers=3, num_kv_heads=4, head_dim=5)


def test_a_number_of_kv_heads_that_is_none_shares_no_heads():
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=20)
    config.num_key_value_heads = None
    assert kv_shape(config).num_kv_heads == 4


def test_the_text_model_of_a_config_that_wraps_it():
    config = transformers.Gemma3Config(text_config=sliding_config())
    assert kv_shape(config) == KVShape(num_layers=6, num_kv_heads=2, head_dim=8)


def test_head_dim_may_differ_from_the_split():
    config = transformers.Qwen3Config(
        hidden_size=60, num_attention_heads=6, num_key_value_heads=2, head_dim=32
    )
    assert kv_shape(config).head_dim == 32


def test_layers_without_attention_do_not_count():
    config = transformers.Qwen3NextConfig(num_hidden_layers=8)
    attention = sum(layer == "full_attention" for layer in config.layer_types)
    assert 0 < attention < 8
    assert kv_shape(config).num_layers == attention


def sliding_config(**options):
    return transformers.Gemma3TextConfig(
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        hidden_size=32, intermediate_size=32, vocab_size=50, sliding_window=8, **options,
    )  # fmt: skip


def test_sliding_layers_count_whole_which_is_an_upper_bound():
    """Such a layer stops growing at its window; up to there the formula is exact."""
    config = sliding_config()
    assert len(set(config.layer_types)) == 2
    assert kv_shape(config).num_layers == 6
    model = AutoModelForCausalLM.from_config(config)
    for num_tokens in (7, 20):
        cache = DynamicCache(config=config)
        token_ids = torch.ones(1, num_tokens, dtype=torch.long)
        model(token_ids, use_cache=True, **{cache_argument(model): cache})
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        bound = kv_bytes(kv_shape(config), num_tokens, 4)
        assert held == bound if num_tokens < 8 else held < bound


def test_a_config_none_of_whose_layers_counts_is_refused_by_name():
    config = sliding_config()
    config.layer_types = ["something_else"] * 6
    with pytest.raises(ValueError, match="gemma3_text"):
        kv_shape(config)


def test_latent_attention_is_refused_by_name():
    with pytest.raises(ValueError, match="deepseek_v3"):
        kv_shape(transformers.DeepseekV3Config())
