"""Reserving and growing: what is held, what moves, what is refused; and the six shares."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from minivllm.memory.contiguous import GrowingCache, ReservedCache
from minivllm.memory.kv_cache_manager import OutOfSlots
from minivllm.memory.regions import BuddyRegions, FitRegions, make_regions
from minivllm.memory.usage import MemoryUsage, shares
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence


def sequence(name, prompt_len, max_tokens=10):
    return Sequence(name, [0] * prompt_len, SamplingParams(max_tokens=max_tokens))


def test_4096_slots_reserved_and_512_used():
    """4,096 reserved, 512 used: 3,584 slots idle for the whole life of the request."""
    cache = ReservedCache(FitRegions(8192), max_model_len=4096)
    seq = sequence("a", 500, 13)
    cache.allocate(seq, 500)
    assert cache.usage().allocated == 4096
    found = shares(cache.usage(), [(512, cache.slots_held(seq), 512)], None)
    assert (found.token, found.internal, found.free) == (512, 3584, 4096)


LENGTHS = pytest.mark.parametrize(
    ("reserve", "prompt_len", "max_tokens", "slots"),
    [
        ("max", 10, 5, 1000),
        ("pow2", 10, 5, 18),
        ("pow2", 10, 8, 18),
        ("pow2", 10, 9, 26),
        ("pow2", 700, 200, 956),
        ("pow2", 900, 90, 1000),
        ("oracle", 10, 5, 15),
        ("oracle", 1, 1, 2),
    ],
)


@LENGTHS
def test_the_length_of_a_reservation(reserve, prompt_len, max_tokens, slots):
    cache = ReservedCache(FitRegions(5000), max_model_len=1000, reserve=reserve)
    assert cache.slots_needed(sequence("a", prompt_len, max_tokens), prompt_len) == slots


@LENGTHS
def test_a_reservation_is_held_from_admission_to_the_end(reserve, prompt_len, max_tokens, slots):
    cache = ReservedCache(FitRegions(5000), max_model_len=1000, reserve=reserve)
    seq = sequence("a", prompt_len, max_tokens)
    assert cache.allocate(seq, prompt_len) == []
    assert len(seq.block_table) == cache.slots_held(seq) == slots
    held = seq.block_table
    assert cache.allocate(seq, prompt_len + max_tokens - 1) == []
    assert seq.block_table == held, "a reservation never moves"
    cache.check_invariants()


def test_admission_ends_when_the_pool_is_full():
    cache = ReservedCache(FitRegions(2500), max_model_len=1000)
    a, b, c = (sequence(name, 5) for name in "abc")
    cache.allocate(a, 5)
    cache.allocate(b, 5)
    assert not cache.can_allocate(c, 5)
    with pytest.raises(OutOfSlots):
        cache.allocate(c, 5)
    assert cache.usage().free == 500
    cache.free(a)
    assert cache.can_allocate(c, 5)


def test_growing_in_place_moves_nothing():
    cache = GrowingCache(FitRegions(64), grow_by=4)
    seq = sequence("a", 5)
    assert cache.allocate(seq, 5) == []
    assert seq.block_table == range(8)
    for num_tokens in range(6, 30):
        assert cache.allocate(seq, num_tokens) == []
        cache.check_invariants()
    assert seq.block_table == range(32)
    assert (cache.usage().allocated, cache.usage().free) == (32, 32)


def test_a_region_that_cannot_grow_in_place_moves_with_a_copy():
    cache = GrowingCache(FitRegions(64), grow_by=4)
    a, b = sequence("a", 8), sequence("b", 8)
    cache.allocate(a, 8)
    cache.allocate(b, 8)
    a.num_computed = 8
    (copy,) = cache.allocate(a, 9)
    assert copy == (0, 16, 8)  # source, destination, tokens
    assert a.block_table == range(16, 28)
    assert cache.usage().free == 64 - 8 - 12
    cache.check_invariants()


def test_old_and_new_region_exist_together():
    """8 + 12 slots would fit into 20 in the end, but not while both are needed."""
    cache = GrowingCache(FitRegions(24), grow_by=4)
    a, b = sequence("a", 8), sequence("b", 8)
    cache.allocate(a, 8)
    cache.allocate(b, 8)
    assert not cache.can_allocate(a, 9)
    with pytest.raises(OutOfSlots):
        cache.allocate(a, 9)
    assert a.block_table == range(8), "nothing changed"
    cache.check_invariants()


def test_a_chain_of_moves_can_use_the_place_that_was_left():
    """In order: a leaves 0-7 for 24-35, then b moves to where a was."""
    cache = GrowingCache(FitRegions(40), grow_by=4)
    a, b, c = sequence("a", 8), sequence("b", 4), sequence("c", 12)
    for seq in (a, b, c):
        cache.allocate(seq, seq.num_tokens)
        seq.num_computed = seq.num_tokens
    copies = cache.allocate(a, 9) + cache.allocate(b, 5)
    assert copies == [(0, 24, 8), (8, 0, 4)]
    cache.check_invariants()


@pytest.mark.parametrize("make", [
    lambda: ReservedCache(FitRegions(100), 20),
    lambda: GrowingCache(FitRegions(100)),
])  # fmt: skip
def test_freeing_twice_raises(make):
    cache, seq = make(), sequence("a", 5)
    cache.allocate(seq, 5)
    cache.free(seq)
    assert list(seq.block_table) == []
    with pytest.raises(KeyError):
        cache.free(seq)
    assert cache.usage().free == 100


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ReservedCache(FitRegions(100), 101), "max_model_len is 101 .* has 100 slots"),
        (lambda: ReservedCache(FitRegions(100), 10, "half"), "reserve is 'half'"),
        (lambda: GrowingCache(FitRegions(0)), "has 0 slots"),
        (lambda: GrowingCache(FitRegions(10), 0), "grow_by is 0"),
        (lambda: make_regions(10, "worst", 5), "fit is 'worst'"),
    ],
)
def test_bad_options_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_what_an_empty_pool_could_hold():
    cache = GrowingCache(FitRegions(100), grow_by=16)
    assert cache.can_ever_allocate(sequence("a", 90), 96)
    assert not cache.can_ever_allocate(sequence("a", 90), 97)  # 7 x 16 is more than 100
    buddy = ReservedCache(BuddyRegions(96, 16, 64), 64, "oracle")
    assert buddy.can_ever_allocate(sequence("a", 30, 34), 63)
    assert not buddy.can_ever_allocate(sequence("a", 30, 40), 65)


# The six shares.


def test_shares_by_hand():
    """Pool 100: a request holds 40 slots, 10 tokens now and 25 at its end; 30 free in two holes."""
    usage = MemoryUsage(total=100, allocated=60, rounding=10, free=30, largest_hole=20)
    running = [(10, 40, 25), (20, 20, 20)]
    assert tuple(shares(usage, running, 25)) == (30, 15, 15, 10, 30, 0)
    assert tuple(shares(usage, running, 20)) == (30, 15, 15, 10, 0, 30), "a hole of 20 fits 20"
    assert tuple(shares(usage, running, 31)) == (30, 15, 15, 10, 0, 30), "too big for 30 anyway"
    assert tuple(shares(usage, running, None)) == (30, 15, 15, 10, 0, 30)


def test_a_request_that_will_ask_for_more_has_nothing_internal():
    """It holds 16 slots now and will hold 40 tokens: all that is empty will be used."""
    usage = MemoryUsage(total=100, allocated=16, rounding=0, free=84, largest_hole=84)
    assert tuple(shares(usage, [(10, 16, 40)], None)) == (10, 6, 0, 0, 0, 84)


class AnyPolicy(RuleBasedStateMachine):
    """Random admissions, growth and ends: the books balance and the shares sum to the pool."""

    @initialize(
        total=st.integers(70, 300), fit=st.sampled_from(["first", "best", "buddy"]),
        policy=st.sampled_from(["max", "pow2", "oracle", "grow"]), grow_by=st.integers(1, 20),
    )  # fmt: skip
    def start(self, total, fit, policy, grow_by):
        regions = make_regions(total, fit, 64)
        self.cache = (
            GrowingCache(regions, grow_by)
            if policy == "grow"
            else ReservedCache(regions, 64, policy)
        )
        self.held, self.count = [], 0
        # Which request's which token each slot holds, moved as the manager says.
        self.slots = [None] * total

    @rule(prompt_len=st.integers(1, 40), max_tokens=st.integers(1, 24))
    def admit(self, prompt_len, max_tokens):
        self.count += 1
        seq = sequence(str(self.count), prompt_len, max_tokens)
        if self.cache.can_allocate(seq, prompt_len):
            assert self.cache.can_ever_allocate(seq, prompt_len)
            assert self.cache.allocate(seq, prompt_len) == []
            assert self.cache.slots_held(seq) == self.cache.slots_needed(seq, prompt_len)
            self.held.append(seq)
            self.compute(seq, prompt_len)

    @rule(data=st.data())
    def grow(self, data):
        growing = [s for s in self.held if s.num_computed < s.num_tokens + s.params.max_tokens - 1]
        if not growing:
            return
        seq = data.draw(st.sampled_from(growing))
        if not self.cache.can_allocate(seq, seq.num_computed + 1):
            assert not isinstance(self.cache, ReservedCache), "a reservation is there to be used"
            return
        for source, destination, count in self.cache.allocate(seq, seq.num_computed + 1):
            moved = self.slots[source : source + count]
            self.slots[destination : destination + count] = moved
        self.compute(seq, seq.num_computed + 1)

    def compute(self, seq, num_tokens):
        for token in range(seq.num_computed, num_tokens):
            self.slots[seq.block_table[token]] = (seq.request_id, token)
        seq.num_computed = num_tokens

    @rule(data=st.data())
    def end(self, data):
        if self.held:
            seq = data.draw(st.sampled_from(self.held))
            self.held.remove(seq)
            self.cache.free(seq)

    @invariant()
    def books(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        usage = self.cache.usage()
        assert usage.allocated + usage.rounding + usage.free == usage.total
        running = [
            (s.num_computed, self.cache.slots_held(s), s.num_tokens + s.params.max_tokens - 1)
            for s in self.held
        ]
        for head_needs in (None, 1, 30, 64):
            assert sum(shares(usage, running, head_needs)) == usage.total
        for seq in self.held:
            for token in range(seq.num_computed):
                place = seq.block_table[token]
                assert self.slots[place] == (seq.request_id, token), "moved without a copy"


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_any_policy_at_random(examples):
    run_state_machine_as_test(
        AnyPolicy, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
    )
