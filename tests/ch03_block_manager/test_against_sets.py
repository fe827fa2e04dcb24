"""Random operations on the block manager, against sets and loops; and tokens through its tables."""

from collections import deque

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
from support import check_books, generated_alone, run_to_end, slot_engine, tokens_of

from minivllm.memory.block_manager import BlockManager, slot_of
from minivllm.memory.kv_cache_manager import OutOfSlots
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence

NAMES = st.integers(0, 5)


class Reference:
    """The same answers by counting token after token, slot after slot."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.blocks_of = {}  # name -> number of blocks

    def blocks_for(self, num_tokens):
        blocks, room = 0, 0
        for _ in range(num_tokens):
            if room == 0:
                blocks, room = blocks + 1, self.block_size
            room -= 1
        return blocks

    @property
    def num_free(self):
        return self.num_blocks - sum(self.blocks_of.values())

    def can(self, name, num_tokens):
        more = self.blocks_for(num_tokens) - self.blocks_of.get(name, 0)
        return more <= self.num_free

    def allocate(self, name, num_tokens):
        now = self.blocks_of.get(name, 0)
        self.blocks_of[name] = max(now, self.blocks_for(num_tokens))


class ManagerAtRandom(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.manager = BlockManager(num_blocks, block_size)
        self.reference = Reference(num_blocks, block_size)
        self.seqs = [Sequence(f"{n}", [0], SamplingParams()) for n in range(6)]
        self.contents = {}  # slot -> (name, token): what a token would find there
        self.written = {}  # name -> tokens that were written

    @rule(name=NAMES, num_tokens=st.integers(1, 30))
    def allocate(self, name, num_tokens):
        seq = self.seqs[name]
        before = list(seq.block_table)
        can = self.reference.can(name, num_tokens)
        assert self.manager.can_allocate(seq, num_tokens) == can
        if not can:
            with pytest.raises(OutOfSlots):
                self.manager.allocate(seq, num_tokens)
            assert list(seq.block_table) == before
            return
        assert self.manager.allocate(seq, num_tokens) == [], "blocks never move"
        assert list(seq.block_table[: len(before)]) == before
        self.reference.allocate(name, num_tokens)
        for token in range(self.written.get(name, 0), num_tokens):
            slot = slot_of(seq.block_table, self.manager.block_size, token)
            self.contents[slot] = (name, token)
        self.written[name] = max(self.written.get(name, 0), num_tokens)

    @rule(name=NAMES)
    def free(self, name):
        seq = self.seqs[name]
        if name not in self.reference.blocks_of:
            with pytest.raises(KeyError):
                self.manager.free(seq)
            return
        self.manager.free(seq)
        del self.reference.blocks_of[name]
        del self.written[name]
        assert len(seq.block_table) == 0

    @invariant()
    def every_answer_agrees(self):
        if not hasattr(self, "manager"):
            return
        manager, reference = self.manager, self.reference
        manager.check_invariants()
        assert manager.num_free_blocks == reference.num_free
        assert manager.usage().free == reference.num_free * manager.block_size
        owned = [block for seq in self.seqs for block in seq.block_table]
        assert len(owned) == len(set(owned)) == manager.num_blocks - manager.num_free_blocks
        assert all(0 <= block < manager.num_blocks for block in owned)
        for name, seq in enumerate(self.seqs):
            assert len(seq.block_table) == reference.blocks_of.get(name, 0)
            assert manager.slots_held(seq) == len(seq.block_table) * manager.block_size

    @invariant()
    def nobody_wrote_over_anybody(self):
        if not hasattr(self, "manager"):
            return
        for name, count in self.written.items():
            for token in range(count):
                slot = slot_of(self.seqs[name].block_table, self.manager.block_size, token)
                assert self.contents[slot] == (name, token)


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_the_manager_at_random(examples):
    run_state_machine_as_test(
        ManagerAtRandom, settings=settings(max_examples=examples, deadline=None)
    )


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_tokens_read_through_the_tables_are_the_right_ones(block_size):
    """The real engine, and a runner that finds each token by its block table alone."""
    engine = slot_engine(BlockManager(64 // block_size, block_size), block_size)
    prompts = deque([list(range(3 + 5 * i % 17)) for i in range(12)])
    answers, prompt_of = {}, {}
    while prompts or engine.has_unfinished:
        if prompts:
            prompt = prompts.popleft()
            prompt_of[engine.add_request(prompt, SamplingParams(max_tokens=9))] = prompt
        for increment in engine.step():
            answers.setdefault(increment.request_id, []).append(increment.token_id)
        check_books(engine)
    assert answers == {name: generated_alone(p, 9) for name, p in prompt_of.items()}
    assert engine.scheduler.kv_cache.num_free_blocks == 64 // block_size


def test_p_equal_b_alone_in_a_pool_of_one_block():
    """P = B, N = 1, max_tokens = 1: the last token's K and V are never stored, so it fits."""
    engine = slot_engine(BlockManager(1, 4), 4)
    request_id = engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=1))
    assert tokens_of(run_to_end(engine)[request_id]) == generated_alone([1, 2, 3, 4], 1)
