"""Reading through block tables, against the definition: one sequence, one head, one token."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import scene

from minivllm.attention.batch import Batch, slots_of
from minivllm.attention.gather import GatherAttention
from minivllm.attention.kv_pool import KVPool
from minivllm.attention.slice import slice_attention
from minivllm.memory.block_manager import slot_of
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence


def by_definition(query, keys, values, batch, *, scaling, sliding_window=None, softcap=None):
    """Attention as one would explain it; in float64."""
    output = torch.empty_like(query, dtype=torch.float64)
    group_size = query.shape[1] // keys.shape[1]
    for i, table in enumerate(batch.block_tables):
        start, stop = batch.query_start_loc[i], batch.query_start_loc[i + 1]
        for row, head in itertools.product(range(start, stop), range(query.shape[1])):
            position = batch.context_lens[i] - (stop - row)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            slots = [slot_of(table, batch.block_size, t) for t in range(first, position + 1)]
            logits = keys[slots, head // group_size].double() @ query[row, head].double() * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            output[row, head] = logits.softmax(0) @ values[slots, head // group_size].double()
    return output.to(query.dtype)


def test_the_batch_of_a_step():
    """One that decodes, a piece of a prompt that is not its last, and a whole prompt."""
    decoding = Sequence("a", list(range(100, 133)), SamplingParams(), [900], [7, 2, 15], 33, 1)
    piece = Sequence("b", list(range(50, 70)), SamplingParams(), [], [4, 9], 3, 6)
    whole = Sequence("c", [200, 201], SamplingParams(), [], [3], 0, 2)
    batch = Batch.of([decoding, piece, whole], 16, torch.device("cpu"))
    assert batch.input_ids.tolist() == [900, 53, 54, 55, 56, 57, 58, 200, 201]
    assert batch.positions.tolist() == [33, 3, 4, 5, 6, 7, 8, 0, 1]
    assert batch.slot_mapping.tolist() == [241, 67, 68, 69, 70, 71, 72, 48, 49]
    assert batch.query_start_loc == [0, 1, 7, 9]
    assert batch.context_lens == [34, 9, 2]
    assert batch.last_token.tolist() == [0, 8], "the piece is not sampled"
    assert batch.block_tables == [[7, 2, 15], [4, 9], [3]]


def check(query, pool, batch, **options):
    options = {"scaling": query.shape[-1] ** -0.5} | options
    expected = by_definition(query, *pool.layer(0), batch, **options)
    found = GatherAttention()(query, *pool.layer(0), batch, **options)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_decode_prefill_and_what_lies_between_in_one_batch(block_size):
    check(*scene([40, 13, 7, 64, 13, 1], [1, 13, 3, 1, 1, 1], block_size))


def test_garbage_in_unused_slots_is_not_read():
    """B = 4, length 13: three slots of the last block are NaN, and so is all of block 0."""
    query, pool, batch = scene([13, 5, 30], [1, 1, 1], 4)
    output = GatherAttention()(query, *pool.layer(0), batch, scaling=1.0)
    assert output.isfinite().all()
    check(query, pool, batch)


@pytest.mark.parametrize("group_size", [1, 3, 7])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96])
def test_head_sizes_and_groups(group_size, head_dim):
    check(*scene([21, 9, 16], [1, 9, 1], 4, group_size=group_size, head_dim=head_dim))


@pytest.mark.parametrize("sliding_window", [1, 4, 7, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_sliding_window_and_capped_logits(sliding_window, softcap):
    query, pool, batch = scene([40, 13, 7, 22], [1, 13, 3, 1], 4)
    check(query, pool, batch, sliding_window=sliding_window, softcap=softcap, scaling=0.7)
    check(query, pool, batch, softcap=softcap)


def test_a_window_may_differ_from_layer_to_layer():
    query, pool, batch = scene([40, 22], [1, 1], 4)
    reader = GatherAttention()
    for window in (None, 5, None, 9):
        options = {"scaling": 0.3, "sliding_window": window}
        torch.testing.assert_close(
            reader(query, *pool.layer(0), batch, **options),
            by_definition(query, *pool.layer(0), batch, **options),
            atol=2e-6,
            rtol=1e-5,
        )


def test_each_query_head_reads_its_own_kv_head():
    """Every KV head has a constant V of its own, so the output names the head that was read."""
    query, pool, batch = scene([9, 6], [1, 6], 4, num_kv_heads=3, group_size=2)
    for head in range(3):
        pool.values[:, :, :, head] = head + 1.0
    output = GatherAttention()(query, *pool.layer(0), batch, scaling=1.0)
    expected = torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0])[None, :, None].expand_as(output)
    torch.testing.assert_close(output, expected)


def test_one_reader_for_many_batches():
    """Buffers are kept and grow; nothing of the last batch may show."""
    reader = GatherAttention()
    for seed, lengths in enumerate([[5, 40, 3], [3, 2], [90, 90, 80, 1], [17]]):
        query, pool, batch = scene(lengths, [1] * len(lengths), 4, seed=seed)
        torch.testing.assert_close(
            reader(query, *pool.layer(0), batch, scaling=0.35),
            by_definition(query, *pool.layer(0), batch, scaling=0.35),
            atol=2e-6,
            rtol=1e-5,
        )


def test_a_table_may_have_more_blocks_than_are_filled():
    """A prompt in chunks holds its blocks from the start."""
    query, pool, batch = scene([9, 6], [3, 1], 4)
    batch.block_tables[0] += [0, 0]
    batch.block_tables[1] += [0]
    check(query, pool, batch)


LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize("examples", [40, pytest.param(600, marks=pytest.mark.full)])
def test_any_lengths_in_any_order(examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        lengths=LENGTHS,
        block_size=st.sampled_from([1, 2, 3, 4, 7, 16, 64]),
        sliding_window=st.sampled_from([None, None, 3, 8]),
        seed=st.integers(0, 99),
    )
    def run(lengths, block_size, sliding_window, seed):
        context_lens = [cached + new for cached, new in lengths]
        query, pool, batch = scene(context_lens, [n for _, n in lengths], block_size, seed=seed)
        check(query, pool, batch, sliding_window=sliding_window)

    run()


def test_in_pieces_equals_one_shot():
    """Prefill 7, then 9 more, then decode: each token sees what it would have seen at once."""
    query, pool, batch = scene([17], [17], 4)
    at_once = GatherAttention()(query, *pool.layer(0), batch, scaling=0.35)
    for start, stop in ((0, 7), (7, 16), (16, 17)):
        piece = Batch(
            batch.input_ids, batch.positions, batch.slot_mapping, [0, stop - start], [stop],
            batch.block_tables, 4, batch.last_token,
        )  # fmt: skip
        output = GatherAttention()(query[start:stop], *pool.layer(0), piece, scaling=0.35)
        torch.testing.assert_close(output, at_once[start:stop], atol=2e-6, rtol=1e-5)


def test_gather_reads_what_slice_reads():
    """The reader of chapter 2 on the same K and V in a row."""
    context_lens, new = [12, 30, 5], [1, 4, 5]
    query, pool, batch = scene(context_lens, new, 4)
    keys, values = pool.layer(0)
    order = [
        slot
        for table, length in zip(batch.block_tables, context_lens, strict=True)
        for slot in slots_of(table, 4, 0, length)
    ]
    starts = [0, *itertools.accumulate(context_lens)]
    regions = [range(a, b) for a, b in itertools.pairwise(starts)]
    in_rows = Batch(
        batch.input_ids, batch.positions, batch.slot_mapping, batch.query_start_loc,
        context_lens, regions, 1, batch.last_token,
    )  # fmt: skip
    torch.testing.assert_close(
        GatherAttention()(query, keys, values, batch, scaling=0.35),
        slice_attention(query, keys[order], values[order], in_rows, scaling=0.35),
    )


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 16), (15, 17), (31, 40), (7, 8)])
def test_the_slots_of_many_tokens_are_those_of_each(block_size, start, stop):
    table = random.Random(1).sample(range(50), 40)
    expected = [slot_of(table, block_size, token) for token in range(start, stop)]
    assert slots_of(table, block_size, start, stop).tolist() == expected


def test_slots_beyond_int32():
    """Block 40,000 of 65,536 slots: 2,621,440,000 and more."""
    assert slots_of([0, 40_000], 65_536, 65_536, 65_538).tolist() == [
        2_621_440_000,
        2_621_440_001,
    ]
    assert math.log2(2_621_440_000) > 31


def test_the_pool_writes_each_token_to_its_slot_and_nowhere_else():
    pool = KVPool(2, 5, 4, 3, 2)
    pool.keys.zero_()
    pool.values.zero_()
    slots = torch.tensor([17, 2, 9])
    key, value = torch.randn(3, 3, 2), torch.randn(3, 3, 2)
    pool.write(1, slots, key, value)
    keys, values = pool.layer(1)
    assert torch.equal(keys[slots], key)
    assert torch.equal(values[slots], value)
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert not keys[others].any()
    assert not values[others].any()
    assert not pool.keys[0].any()
