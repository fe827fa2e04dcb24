"""Policies: a KV cache manager by the name that the command line uses."""

from minivllm.errors import RequestError
from minivllm.memory.block_manager import BlockManager, checked_block_size
from minivllm.memory.contiguous import GrowingCache, ReservedCache
from minivllm.memory.kv_cache_manager import KVCacheManager
from minivllm.memory.regions import make_regions

POLICIES = ("reserve-max", "reserve-pow2", "reserve-oracle", "grow", "paged")


def make_cache(
    policy: str,
    kv_slots: int,
    max_model_len: int,
    *,
    fit: str = "first",
    grow_by: int = 16,
    block_size: int = 16,
    watermark: float = 0.0,
) -> KVCacheManager:
    """A manager of kv_slots slots, which paging rounds down to whole blocks.

    fit is for regions, grow_by for grow, block_size and watermark for paged. Raises RequestError
    for what cannot be.
    """
    if policy not in POLICIES:
        raise RequestError(f"unknown policy {policy!r}: use {', '.join(POLICIES)}")
    if kv_slots < 1:
        raise RequestError(f"kv_slots is {kv_slots}: it must be 1 or more")
    if policy == "paged":
        block_size = checked_block_size(block_size, kv_slots)
        return BlockManager(kv_slots // block_size, block_size, watermark)
    if policy == "grow":
        # A region is a multiple of grow_by, and may be longer than the longest request.
        return GrowingCache(
            make_regions(kv_slots, fit, max_model_len + max(grow_by, 1) - 1), grow_by
        )
    regions = make_regions(kv_slots, fit, max_model_len)
    return ReservedCache(regions, max_model_len, policy.removeprefix("reserve-"))
