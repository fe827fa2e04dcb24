"""The block manager's six duties, each on small cases. Never a particular block id."""

import pytest

from minivllm.errors import RequestError
from minivllm.memory.block_manager import BlockManager, slot_of
from minivllm.memory.kv_cache_manager import OutOfSlots
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence


def sequence(name, prompt_len=1, max_tokens=10):
    return Sequence(name, [0] * prompt_len, SamplingParams(max_tokens=max_tokens))


def test_40_tokens_take_three_blocks():
    """Three blocks of 16, wherever they are: with the table [7, 2, 15] token 33 is in block 15."""
    manager = BlockManager(20, 16)
    seq = sequence("a")
    assert manager.num_missing_blocks(seq, 40) == 3
    manager.allocate(seq, 40)
    assert len(set(seq.block_table)) == 3
    assert slot_of([7, 2, 15], 16, 33) == 15 * 16 + 1


def test_17_tokens_take_two_blocks():
    manager = BlockManager(20, 16)
    seq = sequence("a")
    manager.allocate(seq, 17)
    assert len(seq.block_table) == 2
    assert manager.slots_held(seq) - 17 == 15, "one token in the last block, fifteen slots empty"


@pytest.mark.parametrize(
    ("table", "block_size", "token", "slot"),
    [
        ([5], 1, 0, 5),
        ([3, 1], 4, 0, 12),
        ([3, 1], 4, 3, 15),
        ([3, 1], 4, 4, 4),
        ([3, 1], 4, 7, 7),
        (range(100, 200), 1, 42, 142),
        ([0, 40_000], 65_536, 65_536 + 5, 2_621_440_005),
    ],
)
def test_a_token_s_slot(table, block_size, token, slot):
    assert slot_of(table, block_size, token) == slot


def test_a_token_beyond_the_table_has_no_slot():
    with pytest.raises(IndexError):
        slot_of([3, 1], 4, 8)


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "blocks"),
    [(4, 1, 1), (4, 3, 1), (4, 4, 1), (4, 5, 2), (4, 8, 2), (1, 5, 5), (3, 7, 3), (100, 100, 1)],
)
def test_the_blocks_that_tokens_need(block_size, num_tokens, blocks):
    manager = BlockManager(10, block_size)
    seq = sequence("a")
    assert manager.num_missing_blocks(seq, num_tokens) == blocks
    assert manager.slots_needed(seq, num_tokens) == blocks * block_size
    assert manager.allocate(seq, num_tokens) == []
    assert len(seq.block_table) == blocks
    assert manager.num_free_blocks == 10 - blocks
    assert manager.num_missing_blocks(seq, num_tokens) <= 0
    manager.check_invariants()


@pytest.mark.parametrize("prompt_len", [3, 4, 5])
def test_decode_takes_a_block_when_it_crosses_into_it(prompt_len):
    """P = B holds one block after prefill and two at the first decode step, not before."""
    manager = BlockManager(10, block_size=4)
    seq = sequence("a", prompt_len)
    manager.allocate(seq, prompt_len)
    assert len(seq.block_table) == (2 if prompt_len == 5 else 1)
    manager.allocate(seq, prompt_len + 1)
    assert len(seq.block_table) == (1 if prompt_len == 3 else 2)


def test_growth_keeps_what_was_there():
    manager = BlockManager(10, block_size=2)
    seq, other = sequence("a"), sequence("b")
    manager.allocate(seq, 3)
    before = list(seq.block_table)
    manager.allocate(other, 3)
    manager.allocate(seq, 6)
    assert list(seq.block_table[:2]) == before
    assert not set(seq.block_table) & set(other.block_table)
    assert manager.allocate(seq, 2) == [], "fewer tokens than it has room for: nothing to do"
    assert len(seq.block_table) == 3


def test_many_blocks_at_once_and_chunks_come_to_the_same():
    manager = BlockManager(30, block_size=4)
    at_once, in_chunks = sequence("a"), sequence("b")
    manager.allocate(at_once, 41)
    for num_tokens in (5, 20, 21, 41):
        manager.allocate(in_chunks, num_tokens)
    assert len(at_once.block_table) == len(in_chunks.block_table) == 11


def test_all_or_nothing():
    manager = BlockManager(5, block_size=4)
    seq, other = sequence("a"), sequence("b")
    manager.allocate(seq, 12)
    assert manager.can_allocate(other, 8)
    assert not manager.can_allocate(other, 9)
    with pytest.raises(OutOfSlots):
        manager.allocate(other, 9)
    assert len(other.block_table) == 0
    assert manager.num_free_blocks == 2
    manager.check_invariants()
    with pytest.raises(OutOfSlots):
        manager.allocate(seq, 21)
    assert len(seq.block_table) == 3
    manager.check_invariants()
    manager.allocate(seq, 20)
    assert manager.num_free_blocks == 0
    assert manager.can_allocate(seq, 20)
    assert not manager.can_allocate(seq, 21)


def test_freed_blocks_are_used_again():
    manager = BlockManager(4, block_size=4)
    seq, other = sequence("a"), sequence("b")
    manager.allocate(seq, 16)
    held = set(seq.block_table)
    manager.free(seq)
    assert len(seq.block_table) == 0, "a table that still points at freed blocks reads others' K, V"
    assert manager.num_free_blocks == 4
    assert manager.slots_held(seq) == 0
    manager.allocate(other, 16)
    assert set(other.block_table) == held
    manager.check_invariants()


@pytest.mark.parametrize("freed", [slice(0, None, 2), slice(1, None, 2)])
def test_free_blocks_need_not_lie_side_by_side(freed):
    manager = BlockManager(8, 4)
    seqs = [sequence(f"{i}") for i in range(8)]
    for seq in seqs:
        manager.allocate(seq, 1)
    for seq in sorted(seqs, key=lambda seq: seq.block_table[0])[freed]:
        manager.free(seq)
    newcomer = sequence("newcomer", 16)
    assert manager.can_allocate(newcomer, 16)
    manager.allocate(newcomer, 16)
    assert manager.num_free_blocks == 0


def test_a_freed_table_is_not_the_next_one_s():
    """Whoever kept a reference to the old list must not see it change."""
    manager = BlockManager(4, block_size=4)
    seq = sequence("a")
    manager.allocate(seq, 8)
    old = seq.block_table
    copy = list(old)
    manager.free(seq)
    manager.allocate(seq, 16)
    assert seq.block_table is not old
    assert list(old) in (copy, [])


def test_freeing_twice_is_an_error():
    manager = BlockManager(4, block_size=4)
    seq = sequence("a")
    with pytest.raises(KeyError):
        manager.free(seq)
    manager.allocate(seq, 8)
    manager.free(seq)
    with pytest.raises(KeyError):
        manager.free(seq)
    assert manager.num_free_blocks == 4
    manager.check_invariants()


def test_can_it_ever_be_taken():
    manager = BlockManager(4, block_size=4)
    holder = sequence("a")
    manager.allocate(holder, 16)
    assert manager.can_ever_allocate(sequence("b"), 16), "not now, but one day"
    assert not manager.can_ever_allocate(sequence("b"), 17)


def test_usage_in_slots():
    manager = BlockManager(5, block_size=4)
    manager.allocate(sequence("a"), 5)
    usage = manager.usage()
    assert (usage.total, usage.allocated, usage.rounding, usage.free) == (20, 8, 0, 12)
    assert usage.largest_hole == 12, "any free block serves anybody"


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (1, 100), (100, 1)])
def test_any_shape_of_pool(num_blocks, block_size):
    manager = BlockManager(num_blocks, block_size)
    seq = sequence("a")
    manager.allocate(seq, num_blocks * block_size)
    assert sorted(seq.block_table) == list(range(num_blocks))
    assert not manager.can_allocate(sequence("b"), 1)
    manager.check_invariants()
    manager.free(seq)
    assert manager.num_free_blocks == num_blocks


def test_newcomers_leave_the_watermark_and_those_who_run_do_not():
    manager = BlockManager(8, 4, watermark=0.25)
    seq, newcomer = sequence("a"), sequence("b")
    assert manager.can_allocate(seq, 32), "nobody runs: nobody to keep blocks for"
    manager.allocate(seq, 16)
    assert manager.can_allocate(newcomer, 8), "leaves two of eight"
    assert not manager.can_allocate(newcomer, 9)
    with pytest.raises(OutOfSlots):
        manager.allocate(newcomer, 9)
    assert manager.can_allocate(seq, 32)
    manager.allocate(seq, 32)
    assert manager.num_free_blocks == 0
    manager.check_invariants()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 16), "num_blocks is 0"),
        ((-3, 16), "num_blocks is -3"),
        ((4, 0), "block_size is 0"),
        ((4, 4, 1.0), "watermark is 1.0"),
        ((4, 4, -0.1), "watermark is -0.1"),
        ((4, 4, float("nan")), "watermark is nan"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(RequestError, match=words):
        BlockManager(*arguments)
