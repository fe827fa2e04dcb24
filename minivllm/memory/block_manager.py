"""BlockManager: KV memory in blocks of a fixed size, and a block table for each sequence.

A sequence's tokens are logically contiguous and physically anywhere. Token t is in the logical
block t // block_size, and the block table says which physical block that is. Nothing ever moves.

The idea is that of paged virtual memory; for KV caches it is from Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

from collections.abc import Sequence as SequenceOf

from minivllm.errors import RequestError
from minivllm.memory.kv_cache_manager import OutOfSlots, SlotCopy
from minivllm.memory.usage import MemoryUsage
from minivllm.sequence import Sequence


def slot_of(block_table: SequenceOf[int], block_size: int, token: int) -> int:
    """The slot that holds K and V of a token, counted from the start of the pool.

    Raises IndexError when the block table is too short for the token.
    """
    logical_block, offset = divmod(token, block_size)
    return block_table[logical_block] * block_size + offset


def checked_block_size(block_size: int, kv_slots: int) -> int:
    """block_size, if a pool of kv_slots slots has such a block. Raises RequestError otherwise."""
    if not 1 <= block_size <= kv_slots:
        raise RequestError(
            f"block_size is {block_size}: it must be 1 or more, and at most the pool's {kv_slots} "
            f"slots"
        )
    return block_size


class BlockManager:
    """Owns the blocks of the pool: a free list, and the block table of every sequence.

    num_blocks: blocks of the pool, with the ids 0 to num_blocks - 1.
    block_size: token slots of a block, 1 or more; with the longest request's length, every
        request has one huge block, which is reserving the maximum.
    watermark: share of the blocks (0 to below 1) that no newcomer may take, so that those who
        run already can grow. When nobody runs, there is nobody to keep blocks for.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, watermark: float = 0.0) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise RequestError(f"{name} is {value}: it must be 1 or more")
        if not 0 <= watermark < 1:
            raise RequestError(f"watermark is {watermark}: it must be 0 or more and below 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.watermark_blocks = int(watermark * num_blocks)
        self._free = list(range(num_blocks))[::-1]  # a stack: what came back last goes out first
        self._tables: dict[str, list[int]] = {}  # request id -> its block table

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that seq lacks to hold its first num_tokens tokens; below 1 when none."""
        return -(-num_tokens // self.block_size) - len(seq.block_table)

    def can_ever_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        return num_tokens <= self.num_blocks * self.block_size

    def slots_needed(self, seq: Sequence, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.block_size

    def can_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether enough blocks are free; for a newcomer, enough beyond the watermark."""
        num_available = len(self._free)
        if self._tables and not seq.block_table:
            num_available -= self.watermark_blocks
        return self.num_missing_blocks(seq, num_tokens) <= num_available

    def allocate(self, seq: Sequence, num_tokens: int) -> list[SlotCopy]:
        """Appends the missing blocks to seq's block table: all of them, or none.

        Returns the copies to make, which are none: nothing ever moves. O(1) per block. Raises
        OutOfSlots, with nothing changed, where can_allocate says no.
        """
        num_missing = self.num_missing_blocks(seq, num_tokens)
        if num_missing <= 0:
            return []
        if not self.can_allocate(seq, num_tokens):
            raise OutOfSlots(
                f"request {seq.request_id} lacks {num_missing} blocks for {num_tokens} tokens, "
                f"and {len(self._free)} are free, of which newcomers leave {self.watermark_blocks}"
            )
        table = self._tables.setdefault(seq.request_id, [])
        table += reversed(self._free[-num_missing:])
        del self._free[-num_missing:]
        seq.block_table = table
        return []

    def free(self, seq: Sequence) -> None:
        """Takes all of seq's blocks back. Raises KeyError when it holds none."""
        self._free += reversed(self._tables.pop(seq.request_id))
        seq.block_table = []

    def slots_held(self, seq: Sequence) -> int:
        return len(seq.block_table) * self.block_size

    def free_block_ids(self) -> list[int]:
        """The free blocks, in the order in which they will be given out."""
        return self._free[::-1]

    def usage(self) -> MemoryUsage:
        """Any free block serves anybody, so all free slots together are one hole."""
        total, free = self.num_blocks * self.block_size, len(self._free) * self.block_size
        return MemoryUsage(
            total=total, allocated=total - free, rounding=0, free=free, largest_hole=free
        )

    def check_invariants(self) -> None:
        """Every block is in exactly one block table or in the free list."""
        blocks = [*self._free]
        for request_id, table in self._tables.items():
            assert table, f"request {request_id} is known and holds no block"
            blocks += table
        assert sorted(blocks) == list(range(self.num_blocks)), f"lost or given twice: {blocks}"
