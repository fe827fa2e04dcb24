"""Regions against a bitmap: nothing overlaps, nothing leaks, neighbours join."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minivllm.memory.regions import BuddyRegions, FitRegions


class Oracle(RuleBasedStateMachine):
    """Every answer is checked against one boolean per slot."""

    make = None

    @initialize(total=st.integers(1, 200))
    def start(self, total):
        self.regions = type(self).make(total)
        self.used = [False] * self.regions.total
        self.pieces = []

    def runs(self):
        """Lengths and starts of the free runs, read off the bitmap."""
        runs, start = [], None
        for slot, used in enumerate([*self.used, True]):
            if not used and start is None:
                start = slot
            elif used and start is not None:
                runs.append((start, slot - start))
                start = None
        return runs

    @rule(num_slots=st.integers(1, 80))
    def take(self, num_slots):
        fits = self.regions.fits(num_slots)
        if isinstance(self.regions, FitRegions):
            assert fits == any(length >= num_slots for _, length in self.runs())
        if not fits:
            return
        expected = self.expected_start(num_slots)
        start = self.regions.take(num_slots)
        granted = self.regions.granted(num_slots)
        if expected is not None:
            assert start == expected
        assert granted >= num_slots
        assert not any(self.used[start : start + granted]), "given twice"
        self.mark(start, granted, True)
        self.pieces.append((start, num_slots))

    def expected_start(self, num_slots):
        return None

    @precondition(lambda self: getattr(self, "pieces", None))
    @rule(data=st.data())
    def give_back(self, data):
        start, num_slots = self.pieces.pop(data.draw(st.integers(0, len(self.pieces) - 1)))
        self.regions.give_back(start, num_slots)
        self.mark(start, self.regions.granted(num_slots), False)

    @precondition(lambda self: getattr(self, "pieces", None))
    @rule(data=st.data(), more=st.integers(1, 40))
    def extend(self, data, more):
        position = data.draw(st.integers(0, len(self.pieces) - 1))
        start, old = self.pieces[position]
        if isinstance(self.regions, FitRegions):
            behind = self.used[start + old : start + old + more]
            assert self.regions.can_extend(start, old, old + more) == (
                len(behind) == more and not any(behind)
            )
        if self.regions.can_extend(start, old, old + more):
            self.regions.extend(start, old, old + more)
            self.mark(start, self.regions.granted(old), False)
            self.mark(start, self.regions.granted(old + more), True)
            self.pieces[position] = (start, old + more)

    def mark(self, start, count, used):
        assert start + count <= len(self.used), "outside the pool"
        self.used[start : start + count] = [used] * count

    @invariant()
    def agrees_with_the_bitmap(self):
        if not hasattr(self, "regions"):
            return
        assert self.regions.free == self.used.count(False)
        assert self.joined(self.regions.holes()) == self.runs()
        if isinstance(self.regions, FitRegions):
            assert self.regions.holes() == self.runs(), "neighbours did not join"
        longest = max((length for _, length in self.regions.holes()), default=0)
        assert self.regions.largest_hole() == longest

    @staticmethod
    def joined(holes):
        result = []
        for start, length in holes:
            if result and sum(result[-1]) == start:
                result[-1] = (result[-1][0], result[-1][1] + length)
            else:
                result.append((start, length))
        return result


class FirstFit(Oracle):
    make = FitRegions

    def expected_start(self, num_slots):
        return next(start for start, length in self.runs() if length >= num_slots)


class BestFit(Oracle):
    @staticmethod
    def make(total):
        return FitRegions(total, "best")

    def expected_start(self, num_slots):
        return min((length, start) for start, length in self.runs() if length >= num_slots)[1]


class Buddy(Oracle):
    @staticmethod
    def make(total):
        return BuddyRegions(total, smallest=4, largest=64)

    @invariant()
    def free_buddies_have_joined(self):
        holes = getattr(self, "regions", None) and self.regions.holes()
        for start, size in holes or ():
            assert start % size == 0
            buddy = (start ^ size, size)
            assert size == 64 or buddy not in holes, "two free buddies lie side by side"

    def teardown(self):
        """Everything given back: the pool is what it was."""
        if hasattr(self, "regions"):
            for start, num_slots in self.pieces:
                self.regions.give_back(start, num_slots)
            assert self.regions.holes() == BuddyRegions(self.regions.total, 4, 64).holes()


def test_two_holes_that_no_long_request_fits():
    """A | free | C | free: 200 slots free, and no hole for D's 150."""
    regions = FitRegions(400)
    a, b, c, d = (regions.take(100) for _ in range(4))
    regions.give_back(b, 100)
    regions.give_back(d, 100)
    assert regions.holes() == [(100, 100), (300, 100)]
    assert regions.free == 200
    assert not regions.fits(150)
    regions.give_back(c, 100)
    assert regions.holes() == [(100, 300)], "the three pieces are one hole"
    assert regions.take(150) == 100
    assert a == 0


def test_best_fit_spares_the_large_hole():
    first, best = FitRegions(100), FitRegions(100, "best")
    for regions in (first, best):
        pieces = [regions.take(n) for n in (50, 10, 20, 20)]
        regions.give_back(pieces[0], 50)
        regions.give_back(pieces[2], 20)
        regions.take(15)
    assert first.largest_hole() == 35
    assert best.largest_hole() == 50


def test_buddies_round_up_and_the_paper_s_pool_has_a_tail():
    assert [BuddyRegions(8192).granted(n) for n in (1, 16, 17, 1000, 1024, 1025)] == [
        16, 16, 32, 1024, 1024, 2048,
    ]  # fmt: skip
    regions = BuddyRegions(15_728, 16, 2048)
    while regions.fits(2048):
        regions.take(2048)
    assert regions.free == 15_728 - 7 * 2048


@pytest.mark.parametrize(
    "make", [lambda: FitRegions(10, "worst"), lambda: BuddyRegions(64, smallest=12)]
)
def test_bad_options_are_refused(make):
    with pytest.raises(ValueError, match=r"use first|power of two"):
        make()


@pytest.mark.parametrize("machine", [FirstFit, BestFit, Buddy])
@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_against_a_bitmap(machine, examples):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
    )
