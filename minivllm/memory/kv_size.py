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
    return shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * dtype_size


def kv_bytes(shape: KVShape, num_tokens: int, dtype_size: int) -> int:
    """Bytes of K and V for a context of num_tokens tokens: prompt and generated together."""
    return num_tokens * kv_bytes_per_token(shape, dtype_size)


def num_requests_that_fit(
    memory_bytes: int, shape: KVShape, num_tokens: int, dtype_size: int
) -> int:
    """Requests of num_tokens tokens whose K and V fit whole into memory_bytes."""
    return memory_bytes // kv_bytes(shape, num_tokens, dtype_size)


def kv_shape(config: Any) -> KVShape:
    """The KVShape of a transformers config.

    Older configs have no num_key_value_heads (every query head has its own K and V) and no
    head_dim (the hidden size is split evenly among the query heads); newer ones may have the
    attribute and leave it None, which means the same. layer_types, where there is one, names the
    kind of each layer: only ATTENTION_LAYERS count. A kv_lora_rank marks multi-head latent
    attention, which stores no K and V per head: raises ValueError with config.model_type in it,
    and likewise when no layer counts.
    """
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"{config.model_type} stores one compressed vector per token and layer "
            f"(multi-head latent attention), so the formula for K and V does not hold"
        )
    num_heads = config.num_attention_heads
    layer_types = getattr(config, "layer_types", None)
    num_layers = config.num_hidden_layers
    if layer_types:
        num_layers = sum(layer in ATTENTION_LAYERS for layer in layer_types)
    if num_layers == 0:
        raise ValueError(f"no layer of {config.model_type} is known to store K and V per token")
    return KVShape(
        num_layers=num_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )
