# Exercise 0.1: the formula (kv_bytes_per_token, kv_bytes).
# Exercise 0.2: how many requests fit (num_requests_that_fit).
# Exercise 0.3: the shape from a model's config (kv_shape).
# Test with: python -m pytest tests/ch00_kv_cache_math --impl work

"""How many bytes K and V take: the formula, from a model's shape or its config."""

from dataclasses import dataclass
from typing import Any

# Layer types (transformers' names) whose cache is K and V per token; others keep a fixed state.
# Sliding and chunked layers stop growing at their window: counting them whole is an upper bound.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides the size of a token's K and V.

    num_kv_heads: heads of K and V; with grouped-query attention fewer than query heads.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int


def kv_bytes_per_token(shape: KVShape, dtype_size: int) -> int:
    """Bytes of K and V (the 2) that one token leaves in all layers; dtype_size in bytes."""
    raise NotImplementedError("exercise 0.1: kv_bytes_per_token")


def kv_bytes(shape: KVShape, num_tokens: int, dtype_size: int) -> int:
    """Bytes of K and V for a context of num_tokens tokens: prompt and generated together."""
    raise NotImplementedError("exercise 0.1: kv_bytes")


def num_requests_that_fit(
    memory_bytes: int, shape: KVShape, num_tokens: int, dtype_size: int
) -> int:
    """Requests of num_tokens tokens whose K and V fit whole into memory_bytes."""
    raise NotImplementedError("exercise 0.2: num_requests_that_fit")


def kv_shape(config: Any) -> KVShape:
    """The KVShape of a transformers config.

    Older configs have no num_key_value_heads (every query head has its own K and V) and no
    head_dim (the hidden size is split evenly among the query heads); newer ones may have the
    attribute and leave it None, which means the same. layer_types, where there is one, names the
    kind of each layer: only ATTENTION_LAYERS count. A kv_lora_rank marks multi-head latent
    attention, which stores no K and V per head: raises ValueError with config.model_type in it,
    and likewise when no layer counts.
    """
    raise NotImplementedError("exercise 0.3: kv_shape")
