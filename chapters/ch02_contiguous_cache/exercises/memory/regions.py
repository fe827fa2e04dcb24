# Exercise 2.2: first fit, and neighbours that join (FitRegions._find, FitRegions.give_back).
# Test with: python -m pytest tests/ch02_contiguous_cache --impl work

"""Regions: free memory as holes, from which contiguous pieces are taken and given back."""

from bisect import bisect_left, insort
from typing import Protocol

from minivllm.errors import RequestError


class Regions(Protocol):
    """Contiguous pieces of a pool of slots numbered 0 to total - 1.

    granted(n) is how many slots a piece of n takes: n, or more where the allocator rounds.
    """

    total: int
    free: int

    def granted(self, num_slots: int) -> int: ...

    def fits(self, num_slots: int) -> bool:
        """Whether some hole holds a piece of num_slots."""
        ...

    def fits_empty(self, num_slots: int) -> bool:
        """Whether some hole would, if nothing were taken."""
        ...

    def take(self, num_slots: int) -> int:
        """Takes a piece where fits() says that there is one; returns its first slot."""
        ...

    def can_extend(self, start: int, old: int, new: int) -> bool:
        """Whether the piece of old slots at start can become new slots long where it is."""
        ...

    def extend(self, start: int, old: int, new: int) -> None:
        """Makes it so, where can_extend() says yes."""
        ...

    def give_back(self, start: int, num_slots: int) -> None:
        """Frees a piece; it joins the holes beside it at once."""
        ...

    def largest_hole(self) -> int: ...

    def holes(self) -> list[tuple[int, int]]:
        """(start, length) of every hole, by address."""
        ...


class FitRegions:
    """First fit or best fit over a list of holes in the order of their addresses.

    first: the first hole that is large enough. best: the smallest one that is (the first of
    equals). Every operation costs time in proportion to the number of holes, not of slots.
    """

    def __init__(self, total: int, fit: str = "first") -> None:
        if fit not in ("first", "best"):
            raise RequestError(f"fit is {fit!r}: use first, best or buddy")
        self.total = self.free = total
        self._best = fit == "best"
        self._starts = [0] if total else []  # sorted
        self._lengths = {0: total} if total else {}

    def granted(self, num_slots: int) -> int:
        return num_slots

    def fits(self, num_slots: int) -> bool:
        return self.free >= num_slots and any(n >= num_slots for n in self._lengths.values())

    def fits_empty(self, num_slots: int) -> bool:
        return num_slots <= self.total

    def take(self, num_slots: int) -> int:
        start = self._find(num_slots)
        self._cut(start, num_slots)
        return start

    def can_extend(self, start: int, old: int, new: int) -> bool:
        return self._lengths.get(start + old, 0) >= new - old

    def extend(self, start: int, old: int, new: int) -> None:
        self._cut(start + old, new - old)

    def give_back(self, start: int, num_slots: int) -> None:
        raise NotImplementedError("exercise 2.2: FitRegions.give_back")

    def largest_hole(self) -> int:
        return max(self._lengths.values(), default=0)

    def holes(self) -> list[tuple[int, int]]:
        return [(start, self._lengths[start]) for start in self._starts]

    def _find(self, num_slots: int) -> int:
        raise NotImplementedError("exercise 2.2: FitRegions._find")

    def _cut(self, start: int, num_slots: int) -> None:
        """Takes num_slots from the front of the hole that begins at start."""
        self.free -= num_slots
        position = bisect_left(self._starts, start)
        rest = self._lengths.pop(start) - num_slots
        if rest:
            self._starts[position] = start + num_slots
            self._lengths[start + num_slots] = rest
        else:
            del self._starts[position]


class BuddyRegions:
    """A buddy allocator: pieces are powers of two, at addresses divisible by their size.

    Rounding up makes finding and joining fast: a piece of size s at address a has one buddy, at
    a XOR s, and the two join whenever both are free (Knowlton, CACM 1965). The paper's baselines
    allocate this way. Sizes go from smallest to largest, both powers of two; a pool that is no
    multiple of largest ends in ever smaller pieces.
    """

    def __init__(self, total: int, smallest: int = 16, largest: int = 8192) -> None:
        for name, size in (("smallest", smallest), ("largest", largest)):
            if size < 1 or size & (size - 1):
                raise RequestError(f"{name} is {size}: a buddy's size must be a power of two")
        self.smallest, self.largest = smallest, largest
        self._holes: dict[int, list[int]] = {}  # size -> sorted starts
        size = smallest
        while size <= largest:
            self._holes[size] = []
            size *= 2
        start = 0
        for size in reversed(self._holes):
            while start + size <= total:
                self._holes[size].append(start)
                start += size
        # What is left at the very end is smaller than the smallest piece: it is not in the pool.
        self.total = self.free = start

    def granted(self, num_slots: int) -> int:
        return max(self.smallest, 1 << (num_slots - 1).bit_length())

    def fits(self, num_slots: int) -> bool:
        wanted = self.granted(num_slots)
        return any(starts for size, starts in self._holes.items() if size >= wanted)

    def fits_empty(self, num_slots: int) -> bool:
        return self.granted(num_slots) <= min(self.largest, 1 << (self.total.bit_length() - 1))

    def take(self, num_slots: int) -> int:
        wanted = self.granted(num_slots)
        size = next(size for size, starts in self._holes.items() if size >= wanted and starts)
        start = self._holes[size].pop(0)
        while size > wanted:  # keep the lower half, free the upper
            size //= 2
            insort(self._holes[size], start + size)
        self.free -= wanted
        return start

    def can_extend(self, start: int, old: int, new: int) -> bool:
        return self.granted(new) == self.granted(old)

    def extend(self, start: int, old: int, new: int) -> None:
        pass  # the slots are part of the piece already

    def give_back(self, start: int, num_slots: int) -> None:
        size = self.granted(num_slots)
        self.free += size
        while size < self.largest and (start ^ size) in self._holes[size]:
            self._holes[size].remove(start ^ size)
            start &= ~size
            size *= 2
        insort(self._holes[size], start)

    def largest_hole(self) -> int:
        return max((size for size, starts in self._holes.items() if starts), default=0)

    def holes(self) -> list[tuple[int, int]]:
        return sorted((start, size) for size, starts in self._holes.items() for start in starts)


def make_regions(total: int, fit: str, longest: int) -> Regions:
    """Regions by name: first, best or buddy. longest: the largest piece that will be asked for."""
    if fit == "buddy":
        return BuddyRegions(total, smallest=16, largest=max(16, 1 << (longest - 1).bit_length()))
    return FitRegions(total, fit)
