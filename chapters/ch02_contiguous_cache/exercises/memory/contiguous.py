# Exercise 2.1: how much to reserve (ReservedCache.slots_needed).
# Exercise 2.3: grow in place, or move (GrowingCache.allocate).
# Test with: python -m pytest tests/ch02_contiguous_cache --impl work

"""Contiguous KV memory: one region per sequence, reserved at once or grown on demand.

Token t of a sequence is at position t of its region, so its block table is
`range(start, stop)` with blocks of one slot.
"""

from abc import ABC, abstractmethod

from minivllm.errors import RequestError
from minivllm.memory.kv_cache_manager import OutOfSlots, SlotCopy
from minivllm.memory.regions import Regions
from minivllm.memory.usage import MemoryUsage
from minivllm.sequence import Sequence

RESERVATIONS = ("max", "pow2", "oracle")


class ContiguousCache(ABC):
    """What both ways share: a region per sequence, and the books about it."""

    def __init__(self, regions: Regions) -> None:
        if regions.total < 1:
            raise RequestError(f"the KV pool has {regions.total} slots: it must have 1 or more")
        self.regions = regions
        self._held: dict[str, range] = {}  # request id -> its region, as asked for
        self._asked = 0  # slots that the regions were asked for; what they round up is on top

    @abstractmethod
    def slots_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Slots of the region that seq asks for when it is admitted with num_tokens tokens."""

    def can_ever_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        num_slots = self.slots_needed(seq, num_tokens)
        return num_tokens <= num_slots and self.regions.fits_empty(num_slots)

    def free(self, seq: Sequence) -> None:
        region = self._held.pop(seq.request_id)
        self._give_back(region)
        seq.block_table = range(0)

    def slots_held(self, seq: Sequence) -> int:
        return len(seq.block_table)

    def usage(self) -> MemoryUsage:
        regions = self.regions
        return MemoryUsage(
            total=regions.total,
            allocated=self._asked,
            rounding=regions.total - regions.free - self._asked,
            free=regions.free,
            largest_hole=regions.largest_hole(),
        )

    def check_invariants(self) -> None:
        """Every slot is in exactly one region or hole."""
        pieces = [(r.start, self.regions.granted(len(r))) for r in self._held.values()]
        position = 0
        for start, length in sorted([*pieces, *self.regions.holes()]):
            assert start == position, f"slots {position} to {start} are lost or given twice"
            position = start + length
        assert self._asked == sum(map(len, self._held.values()))

    def _take(self, seq: Sequence, num_slots: int) -> None:
        start = self.regions.take(num_slots)
        self._held[seq.request_id] = seq.block_table = range(start, start + num_slots)
        self._asked += num_slots

    def _give_back(self, region: range) -> None:
        self.regions.give_back(region.start, len(region))
        self._asked -= len(region)


class ReservedCache(ContiguousCache):
    """Reserves a region for the whole life of a sequence when it is admitted.

    reserve: how long the region is.
        max: max_model_len, whatever the request.
        pow2: prompt + (max_tokens rounded up to a power of two), at most max_model_len.
        oracle: prompt + max_tokens, which no server can know when max_tokens is only a limit.

    The three are the baselines of the PagedAttention paper (Kwon et al., SOSP 2023).
    """

    def __init__(self, regions: Regions, max_model_len: int, reserve: str = "max") -> None:
        super().__init__(regions)
        if reserve not in RESERVATIONS:
            raise RequestError(f"reserve is {reserve!r}: use one of {', '.join(RESERVATIONS)}")
        if not regions.fits_empty(max_model_len) and reserve == "max":
            raise RequestError(
                f"max_model_len is {max_model_len} and the KV pool has {regions.total} slots: "
                f"not one request fits; enlarge the pool or lower max_model_len"
            )
        self.max_model_len = max_model_len
        self.reserve = reserve

    def slots_needed(self, seq: Sequence, num_tokens: int) -> int:
        raise NotImplementedError("exercise 2.1: ReservedCache.slots_needed")

    def can_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        region = self._held.get(seq.request_id)
        if region is not None:
            return num_tokens <= len(region)
        return self.regions.fits(self.slots_needed(seq, num_tokens))

    def allocate(self, seq: Sequence, num_tokens: int) -> list[SlotCopy]:
        if not self.can_allocate(seq, num_tokens):
            raise OutOfSlots(f"no region for {num_tokens} tokens of request {seq.request_id}")
        if seq.request_id not in self._held:
            self._take(seq, self.slots_needed(seq, num_tokens))
        return []


class GrowingCache(ContiguousCache):
    """A region that grows: in place while the slots behind it are free, else it moves.

    grow_by: regions are a multiple of this many slots long. While a region moves, the old and
    the new one exist together, and every K and V in it is copied.
    """

    def __init__(self, regions: Regions, grow_by: int = 16) -> None:
        super().__init__(regions)
        if grow_by < 1:
            raise RequestError(f"grow_by is {grow_by}: it must be 1 slot or more")
        self.grow_by = grow_by

    def slots_needed(self, seq: Sequence, num_tokens: int) -> int:
        return -(-num_tokens // self.grow_by) * self.grow_by

    def can_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        region = self._held.get(seq.request_id)
        if region is not None and num_tokens <= len(region):
            return True
        num_slots = self.slots_needed(seq, num_tokens)
        if region is not None and self.regions.can_extend(region.start, len(region), num_slots):
            return True
        return self.regions.fits(num_slots)

    def allocate(self, seq: Sequence, num_tokens: int) -> list[SlotCopy]:
        raise NotImplementedError("exercise 2.3: GrowingCache.allocate")
