"""Logits through the paged pool against transformers' eager attention, on many architectures."""

import pytest
import torch
import transformers

from minivllm.attention.gather import GatherAttention
from minivllm.attention.hf import check_supported
from minivllm.attention.kv_pool import KVPool
from minivllm.errors import ModelError
from minivllm.memory.block_manager import BlockManager
from minivllm.memory.kv_size import kv_shape
from minivllm.runners.pool import PoolRunner
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ScheduledStep
from minivllm.sequence import Sequence

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
# These know no grouped heads, and a setting that they do not know must not stay in the config.
MULTI_HEAD = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "head_dim")}
GPT2 = {
    "vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256,
    "initializer_range": 0.2,
}  # fmt: skip
LAYERS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
LAYERS["layer_types"] = LAYERS["layer_types"][:3]

ARCHITECTURES = {
    "llama": ("Llama", SIZES),
    "llama, group of 1": ("Llama", SIZES | {"num_key_value_heads": 6}),
    "llama, group of 7": (
        "Llama",
        SIZES | {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "mistral with a window": ("Mistral", SIZES | {"sliding_window": 5}),
    "gemma2": ("Gemma2", SIZES | {"query_pre_attn_scalar": 8, **LAYERS}),
    "gemma3": ("Gemma3Text", SIZES | {"query_pre_attn_scalar": 8, **LAYERS}),
    "phi3": ("Phi3", SIZES | {"sliding_window": None}),
    "olmo2": ("Olmo2", SIZES),
    "granite": ("Granite", SIZES | {"attention_multiplier": 0.2}),
    "smollm3": ("SmolLM3", SIZES),
    "gpt2": ("GPT2", GPT2),
    "gpt2, scaled by layer": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("GPTNeoX", MULTI_HEAD),
    "opt": (
        "OPT",
        MULTI_HEAD | {"ffn_dim": 56, "word_embed_proj_dim": 48, "do_layer_norm_before": True},
    ),
}


def tiny(name, sizes):
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_and_ten_decode_steps(name):
    """A ragged batch, one prompt of which comes in two pieces; every step's logits."""
    model = tiny(*ARCHITECTURES[name])
    shape = kv_shape(model.config)
    pool = KVPool(shape.num_layers, 40, 4, shape.num_kv_heads, shape.head_dim)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    runner = PoolRunner(model, pool, GatherAttention())
    manager = BlockManager(40, 4)
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for number, length in enumerate([1, 4, 5, 14]):
        prompt = torch.randint(0, 96, (length,), generator=generator).tolist()
        sequences.append(Sequence(f"{number}", prompt, SamplingParams(max_tokens=20)))
    longest = sequences[-1]
    for num_tokens in range(4, 31, 2):  # in turns, so that nobody's blocks lie in a row
        for seq in sequences:
            manager.allocate(seq, num_tokens)
    for seq in sequences:
        seq.num_scheduled = seq.num_remaining
    longest.num_scheduled = 9
    for _ in range(12):
        sampled = [seq for seq in sequences if seq.is_sampled]
        logits = runner.run(ScheduledStep(sequences))
        for seq, row in zip(sampled, logits, strict=True):
            tokens = seq.prompt_token_ids + seq.generated_token_ids
            with torch.inference_mode():
                expected = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            scale = expected.abs().max().clamp(min=1.0)
            torch.testing.assert_close(row / scale, expected / scale, atol=1e-5, rtol=0)
            seq.generated_token_ids.append(int(torch.randint(0, 96, (), generator=generator)))
        for seq in sequences:
            seq.num_computed, seq.num_scheduled = seq.context_len, 0
            seq.num_scheduled = seq.num_remaining


def test_the_windows_of_this_test_matter():
    """With and without its window a model must differ, or the window was not tested."""
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(1))
    logits = [tiny("Mistral", SIZES | {"sliding_window": w})(tokens).logits for w in (None, 5)]
    assert (logits[0] - logits[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("Bloom", {"vocab_size": 96, "hidden_size": 48, "n_layer": 1, "n_head": 6}, "bloom does"),
        (
            "Llama4Text",
            SIZES | {"intermediate_size_mlp": 56, "attention_chunk_size": 8},
            "llama4_text attends in chunks",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(name, sizes, words):
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=words):
        check_supported(model)


def test_attention_sinks_are_refused_by_name():
    sizes = SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}
    model = tiny("GptOss", sizes)
    shape = kv_shape(model.config)
    pool = KVPool(shape.num_layers, 10, 4, shape.num_kv_heads, shape.head_dim)
    seq = Sequence("a", [1, 2, 3], SamplingParams())
    BlockManager(10, 4).allocate(seq, 3)
    seq.num_scheduled = 3
    with pytest.raises(ModelError, match="gpt_oss has attention sinks"):
        PoolRunner(model, pool, GatherAttention()).run(ScheduledStep([seq]))
