"""KVCacheManager: the questions that the scheduler asks about KV memory."""

from typing import NamedTuple, Protocol

from minivllm.memory.usage import MemoryUsage
from minivllm.sequence import Sequence


class SlotCopy(NamedTuple):
    """K and V that must be copied before the next forward pass, in token slots."""

    source_slot: int
    destination_slot: int
    num_slots: int


class OutOfSlots(RuntimeError):
    """allocate() was called where can_allocate() says no."""


class KVCacheManager(Protocol):
    """Decides where K and V live. It moves no data and knows no tensor."""

    def can_ever_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether an empty pool could hold the first num_tokens tokens of seq."""
        ...

    def slots_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Slots that seq takes when it is admitted with num_tokens tokens."""
        ...

    def can_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether allocate(seq, num_tokens) would succeed now."""
        ...

    def allocate(self, seq: Sequence, num_tokens: int) -> list[SlotCopy]:
        """Makes room for the first num_tokens tokens of seq, taking only what is missing.

        Returns the copies to make before the forward pass, in order. Takes all or nothing:
        raises OutOfSlots, with nothing changed, when there is no room.
        """
        ...

    def free(self, seq: Sequence) -> None:
        """Takes back everything that seq holds. Raises KeyError when it holds nothing."""
        ...

    def slots_held(self, seq: Sequence) -> int:
        """Slots that were given to seq because it asked for them."""
        ...

    def usage(self) -> MemoryUsage:
        """What the pool's slots are used for now."""
        ...

    def check_invariants(self) -> None:
        """Raises AssertionError when the books do not balance."""
        ...


class UnboundedCache:
    """The manager of a stage that plans no memory: it says yes to everything.

    The model's own cache object grows with each request, so there are no slots to hand out;
    this class only counts how many tokens the requests hold.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}

    def can_ever_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        return True

    def slots_needed(self, seq: Sequence, num_tokens: int) -> int:
        return num_tokens

    def can_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        return True

    def allocate(self, seq: Sequence, num_tokens: int) -> list[SlotCopy]:
        self._num_tokens[seq.request_id] = max(num_tokens, self._num_tokens.get(seq.request_id, 0))
        return []

    def free(self, seq: Sequence) -> None:
        del self._num_tokens[seq.request_id]

    def slots_held(self, seq: Sequence) -> int:
        return self._num_tokens[seq.request_id]

    def usage(self) -> MemoryUsage:
        held = sum(self._num_tokens.values())
        return MemoryUsage(total=held, allocated=held, rounding=0, free=0, largest_hole=0)

    def check_invariants(self) -> None:
        assert all(count > 0 for count in self._num_tokens.values()), self._num_tokens
