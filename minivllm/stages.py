"""Stages: the same engine with K and V kept, and read, in another way."""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from minivllm.errors import RequestError
from minivllm.memory.block_manager import BlockManager, checked_block_size
from minivllm.memory.contiguous import GrowingCache, ReservedCache
from minivllm.memory.kv_cache_manager import KVCacheManager, UnboundedCache
from minivllm.memory.kv_size import kv_shape
from minivllm.memory.regions import make_regions
from minivllm.models import max_model_len
from minivllm.runners.runner import Runner

if TYPE_CHECKING:
    from minivllm.attention.hf import Attend

KV_CACHES = ("past_key_values", "reserved", "growing", "paged")
ATTENTIONS = ("auto", "gather", "numba", "triton")
LAYERS = ("torch", "onednn")


@dataclass(frozen=True, slots=True)
class KVOptions:
    """How K and V are kept.

    kv_cache: past_key_values (the model's own object per request), reserved or growing (a
        region per request in one pool), or paged (blocks anywhere in the pool).
    kv_slots: size of the pool, in token slots.
    max_model_len: longest request; None: what the model can, or what the pool holds.
    reserve: length of a reserved region: max, pow2 or oracle.
    fit: where a region is taken: first, best or buddy.
    grow_by: slots by which a region grows.
    block_size: slots of a block. watermark: share of the blocks that newcomers leave free.
    attention: how a paged pool is read: gather, numba (float32 on a CPU), triton, or auto (triton
        on CUDA, if it is there, else gather).
    """

    kv_cache: str = "past_key_values"
    kv_slots: int = 4096
    max_model_len: int | None = None
    reserve: str = "max"
    fit: str = "first"
    grow_by: int = 16
    block_size: int = 16
    watermark: float = 0.0
    attention: str = "auto"


def longest_request(model: PreTrainedModel, options: KVOptions) -> int | None:
    """max_model_len as it holds: given or the model's own. Raises RequestError."""
    limit = max_model_len(model)
    wanted = options.max_model_len
    if wanted is None:
        pooled = options.kv_cache != "past_key_values"
        return min(limit or options.kv_slots, options.kv_slots) if pooled else limit
    if wanted < 2:
        raise RequestError(f"max_model_len is {wanted}: it must be 2 or more")
    if limit is not None and wanted > limit:
        raise RequestError(f"max_model_len is {wanted}, and the model handles {limit}: lower it")
    return wanted


def paged_reader(attention: str, device: str, dtype: torch.dtype) -> "Attend":
    """The reader by its name. Raises RequestError or ModelError for one that cannot run here."""
    from minivllm.attention.gather import GatherAttention

    if attention not in ATTENTIONS:
        raise RequestError(f"attention is {attention!r}: use one of {', '.join(ATTENTIONS)}")
    has_triton = importlib.util.find_spec("triton") is not None
    if attention == "gather" or (attention == "auto" and not (device == "cuda" and has_triton)):
        return GatherAttention()
    if attention == "numba":
        if (device, dtype) != ("cpu", torch.float32):
            raise RequestError(
                f"attention numba reads float32 on a CPU, and the model is {dtype} on {device}: "
                f"use gather"
            )
        from minivllm.attention.numba_attention import NumbaAttention

        return NumbaAttention()
    from minivllm.attention.triton_attention import TritonAttention

    return TritonAttention()


def build_stage(
    model: PreTrainedModel, options: KVOptions, layers: str = "torch"
) -> tuple[Runner, KVCacheManager]:
    """The runner and the KV cache manager of a stage. Raises RequestError.

    layers: by what a pool's runner computes all but attention: torch, or onednn.
    """
    if options.kv_cache not in KV_CACHES:
        raise RequestError(f"kv_cache is {options.kv_cache!r}: use one of {', '.join(KV_CACHES)}")
    if layers not in LAYERS:
        raise RequestError(f"layers is {layers!r}: use one of {', '.join(LAYERS)}")
    if options.kv_cache == "past_key_values":
        if layers != "torch":
            raise RequestError(f"kv_cache past_key_values goes with layers torch, not {layers}")
        from minivllm.runners.past_key_values import PastKeyValuesRunner

        return PastKeyValuesRunner(model), UnboundedCache()

    from minivllm.attention.hf import Attend
    from minivllm.attention.kv_pool import KVPool
    from minivllm.attention.slice import slice_attention
    from minivllm.runners.pool import PoolRunner

    longest = longest_request(model, options) or options.kv_slots
    manager: KVCacheManager
    attend: Attend = slice_attention
    num_blocks, block_size = options.kv_slots, 1
    if options.kv_cache == "paged":
        attend = paged_reader(options.attention, model.device.type, model.dtype)
        block_size = checked_block_size(options.block_size, options.kv_slots)
        num_blocks = options.kv_slots // block_size
        manager = BlockManager(num_blocks, block_size, options.watermark)
    elif options.kv_cache == "reserved":
        regions = make_regions(options.kv_slots, options.fit, longest)
        manager = ReservedCache(regions, longest, options.reserve)
    else:
        # A region is a multiple of grow_by, and may be longer than the longest request.
        regions = make_regions(options.kv_slots, options.fit, longest + max(options.grow_by, 1) - 1)
        manager = GrowingCache(regions, options.grow_by)
    shape = kv_shape(model.config)
    pool = KVPool(
        shape.num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim,
        dtype=model.dtype, device=model.device,
    )  # fmt: skip
    if layers == "onednn":
        from minivllm.onednn_layers import OneDnnLayers

        return PoolRunner(model, pool, attend, OneDnnLayers(model)), manager
    return PoolRunner(model, pool, attend), manager
