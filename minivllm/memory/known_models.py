"""The KV shapes of well-known models, from the config.json that each was published with."""

from dataclasses import dataclass

from minivllm.memory.kv_size import KVShape


@dataclass(frozen=True, slots=True)
class KnownModel:
    """shape and num_parameters as published; dtype is the one that the weights come in."""

    name: str
    shape: KVShape
    num_parameters: int
    max_model_len: int
    dtype: str = "bfloat16"


KNOWN_MODELS = (
    # The packaged weights are converted to float32; the original is bfloat16.
    KnownModel("smollm2-135m", KVShape(30, 3, 64), 134_515_008, 8192, "float32"),
    KnownModel("smollm2-1.7b", KVShape(24, 32, 64), 1_711_376_384, 8192),
    KnownModel("gpt2", KVShape(12, 12, 64), 124_439_808, 1024, "float32"),
    KnownModel("opt-13b", KVShape(40, 40, 128), 12_853_473_280, 2048, "float16"),
    KnownModel("llama-2-7b", KVShape(32, 32, 128), 6_738_415_616, 4096, "float16"),
    KnownModel("llama-2-13b", KVShape(40, 40, 128), 13_015_864_320, 4096, "float16"),
    KnownModel("llama-2-70b", KVShape(80, 8, 128), 68_976_648_192, 4096, "float16"),
    KnownModel("llama-3.1-8b", KVShape(32, 8, 128), 8_030_261_248, 131_072),
    KnownModel("llama-3.1-70b", KVShape(80, 8, 128), 70_553_706_496, 131_072),
    KnownModel("llama-3.1-405b", KVShape(126, 8, 128), 405_853_388_800, 131_072),
    KnownModel("mistral-7b-v0.3", KVShape(32, 8, 128), 7_248_023_552, 32_768),
    KnownModel("mixtral-8x7b", KVShape(32, 8, 128), 46_702_792_704, 32_768),
    KnownModel("qwen2.5-0.5b", KVShape(24, 2, 64), 494_032_768, 32_768),
    KnownModel("qwen2.5-7b", KVShape(28, 4, 128), 7_615_616_512, 131_072),
    KnownModel("qwen2.5-72b", KVShape(80, 8, 128), 72_706_203_648, 131_072),
    KnownModel("qwen3-8b", KVShape(36, 8, 128), 8_190_735_360, 40_960),
    KnownModel("qwen3-32b", KVShape(64, 8, 128), 32_762_123_264, 40_960),
    KnownModel("phi-3-mini-4k", KVShape(32, 32, 96), 3_821_079_552, 4096),
)
