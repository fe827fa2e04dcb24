"""MemoryUsage: what a KV cache manager's slots are used for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """A snapshot, in token slots (one slot holds the K and V of one token in every layer).

    total: slots of the pool; allocated + rounding + free is always total.
    allocated: given to requests because they asked for them.
    rounding: given on top of that by the allocator's own rule.
    free: given to nobody.
    largest_hole: the longest run of free slots that one request could get.
    """

    total: int
    allocated: int
    rounding: int
    free: int
    largest_hole: int
