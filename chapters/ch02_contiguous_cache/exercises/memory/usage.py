# Exercise 2.4: where the pool goes (shares).
# Test with: python -m pytest tests/ch02_contiguous_cache --impl work

"""MemoryUsage: what a KV cache manager's slots are used for, and the six shares of a pool."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass


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


@dataclass(frozen=True, slots=True)
class Shares:
    """Where a pool's slots go; the six always sum to the pool.

    token: hold K and V of a real token.
    reserved: allocated, empty now, and their request will use them before it ends.
    internal: allocated, and their request will never use them (internal fragmentation).
    rounding: what the allocator added.
    external: free, enough in total for the request at the head of the queue, and yet no single
        hole fits it (external fragmentation).
    free: the other free slots.
    """

    token: int
    reserved: int
    internal: int
    rounding: int
    external: int
    free: int

    def __iter__(self):
        return iter(astuple(self))


def shares(
    usage: MemoryUsage, running: Iterable[tuple[int, int, int]], head_needs: int | None
) -> Shares:
    """Splits a snapshot into the six shares, in slots.

    running: for every request that holds slots (tokens now, slots held, tokens at its end). A
        live engine does not know the last: only a replay can tell reserved from internal.
    head_needs: slots that the head of the queue asks for; None when nobody waits.
    """
    raise NotImplementedError("exercise 2.4: shares")
