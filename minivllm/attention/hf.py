"""The door into a transformers model: its attention calls ours, its code stays untouched."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from minivllm.attention.batch import Batch
from minivllm.attention.kv_pool import KVPool
from minivllm.errors import ModelError

NAME = "minivllm"


class Attend(Protocol):
    """A reader: attention of packed queries over K and V in a pool (see slice_attention)."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Batch, *, scaling: float,
        sliding_window: int | None = None, softcap: float | None = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass(slots=True)
class KVAccess:
    """What attention needs beside its inputs; travels as a keyword argument of the forward pass."""

    pool: KVPool
    batch: Batch
    attend: Attend
    num_calls: int = 0


def pool_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_access: KVAccess,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Writes a layer's new K and V into the pool, then reads with the chosen reader.

    query: [1, num_query_heads, T, head_dim]; key, value: [1, num_kv_heads, T, head_dim].
    Returns [1, T, num_query_heads, head_dim].
    """
    kv_access.num_calls += 1
    layer: int = module.layer_idx  # type: ignore[assignment]
    refuse_other_mathematics(module, layer, sliding_window, others)
    pool, batch = kv_access.pool, kv_access.batch
    pool.write(layer, batch.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = kv_access.attend(
        query[0].transpose(0, 1),
        *pool.layer(layer),
        batch,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return output[None], None


AttentionInterface.register(NAME, pool_attention)


def check_supported(model: PreTrainedModel) -> None:
    """Raises ModelError for a model whose attention we cannot take over without a mistake."""
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{config.model_type} does not use transformers' attention interface: "
            f"it runs with the past_key_values cache only"
        )
    if getattr(config, "attention_chunk_size", None):
        raise ModelError(
            f"{config.model_type} attends in chunks, which no reader here does: "
            f"it runs with the past_key_values cache only"
        )


def refuse_other_mathematics(
    module: torch.nn.Module, layer: int, sliding_window: int | None, others: dict[str, Any]
) -> None:
    """Raises ModelError when a layer asks for attention that no reader here computes.

    What a model says by its mask alone would be lost, since the readers make their own.
    """
    reason = None
    if others.get("s_aux") is not None:
        reason = "has attention sinks"
    elif others.get("position_bias") is not None:
        reason = "adds a bias to its attention logits"
    elif not getattr(module, "is_causal", True):
        reason = "looks at later tokens"
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[layer] == "sliding_attention" and sliding_window is None:
        reason = "slides its attention window by the mask alone"
    if reason is not None:
        name = getattr(config, "model_type", type(module).__name__)
        raise ModelError(f"{name} {reason}: it runs with the past_key_values cache only")


@contextmanager
def attention_through_pool(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the model's attention is pool_attention; outside it is what it was."""
    configs = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
