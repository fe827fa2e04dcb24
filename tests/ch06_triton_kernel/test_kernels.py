"""The Triton kernels in the interpreter, against the gather of chapter 5."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import scene

pytest.importorskip("triton", reason="there is no triton for this system")

from minivllm.attention.gather import GatherAttention
from minivllm.attention.kv_pool import KVPool
from minivllm.attention.triton_attention import TritonAttention
from minivllm.attention.triton_write import write_kernel


# What needs exercise 6.3: leave it out with -k "not parts".
def parts(*counts):
    return [1, *(pytest.param(count, id=f"{count}parts") for count in counts)]


def check(query, pool, batch, *, num_splits=1, tolerance=1e-5, **options):
    options = {"scaling": query.shape[-1] ** -0.5} | options
    expected = GatherAttention()(query, *pool.layer(0), batch, **options)
    found = TritonAttention(num_splits)(query, *pool.layer(0), batch, **options)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_splits", parts(3))
@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 128])
def test_decode(block_size, num_splits):
    check(*scene([40, 13, 70, 1], [1] * 4, block_size), num_splits=num_splits)


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_prefill_decode_and_what_lies_between(block_size):
    check(*scene([40, 13, 37, 1], [1, 13, 30, 1], block_size))


@pytest.mark.parametrize("group_size", [1, 2, 7, 16])
def test_groups(group_size):
    for new in ([1, 1], [1, 9]):
        check(*scene([37, 9], new, 4, group_size=group_size))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim):
    for new in ([1, 1], [1, 9]):
        check(*scene([37, 9], new, 4, head_dim=head_dim, group_size=2, num_kv_heads=1))


@pytest.mark.parametrize("num_splits", parts(4))
@pytest.mark.parametrize("sliding_window", [1, 7, 33, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_capped_logits(sliding_window, softcap, num_splits):
    for new in ([1, 1], [5, 1]):
        query, pool, batch = scene([50, 22], new, 4)
        check(
            query, pool, batch, sliding_window=sliding_window, softcap=softcap, scaling=0.7,
            num_splits=num_splits,
        )  # fmt: skip


@pytest.mark.parametrize("num_splits", parts(2, 8))
def test_a_context_of_no_tokens_gives_zeros(num_splits):
    query, pool, batch = scene([5, 9], [1, 1], 4)
    batch.context_lens[0] = 0
    output = TritonAttention(num_splits)(query, *pool.layer(0), batch, scaling=1.0)
    assert not output[0].any()
    assert output.isfinite().all()


@pytest.mark.parametrize("num_splits", parts(3))
@pytest.mark.parametrize("softcap", [None, 150.0])
def test_large_logits(softcap, num_splits):
    """exp of them is beyond float32; a softmax is not."""
    query, pool, batch = scene([100, 40], [1, 1], 4)
    check(query, pool, batch, scaling=20.0, softcap=softcap, num_splits=num_splits, tolerance=1e-3)


def test_two_sequences_may_share_blocks():
    query, pool, batch = scene([20, 20], [1, 1], 4)
    batch.block_tables[1] = batch.block_tables[0]
    check(query, pool, batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_pools(dtype):
    query, pool, batch = scene([40, 13], [1, 1], 4, head_dim=64)
    pool.keys, pool.values = pool.keys.to(dtype), pool.values.to(dtype)
    found = TritonAttention(1)(query.to(dtype), *pool.layer(0), batch, scaling=0.125)
    assert found.dtype == dtype
    pool.keys, pool.values = pool.keys.float(), pool.values.float()
    expected = GatherAttention()(query.to(dtype).float(), *pool.layer(0), batch, scaling=0.125)
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_splits", parts(2, 5))
@pytest.mark.parametrize("examples", [15, pytest.param(200, marks=pytest.mark.full)])
def test_any_shape(examples, num_splits):
    longest = 60 if num_splits == 1 else 160  # so that several parts have tokens

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        lengths=st.lists(
            st.tuples(st.integers(0, longest), st.integers(1, 6)), min_size=1, max_size=4
        ),
        decode=st.booleans(),
        block_size=st.sampled_from([1, 2, 3, 16, 32, 128]),
        group_size=st.sampled_from([1, 3, 4, 8]),
        head_dim=st.sampled_from([8, 16, 24]),
        sliding_window=st.sampled_from([None, None, 3, 20]),
        seed=st.integers(0, 99),
    )
    def run(lengths, decode, block_size, group_size, head_dim, sliding_window, seed):
        new = [1 if decode or num_splits > 1 else count for _, count in lengths]
        context_lens = [cached + count for (cached, _), count in zip(lengths, new, strict=True)]
        query, pool, batch = scene(
            context_lens, new, block_size, group_size=group_size, head_dim=head_dim, seed=seed
        )
        check(query, pool, batch, sliding_window=sliding_window, num_splits=num_splits)

    run()


def test_writing_by_slot_mapping():
    pool = KVPool(1, 5, 4, 3, 8)
    pool.keys.zero_()
    pool.values.zero_()
    slots = torch.tensor([17, 2, 9])
    key, value = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    keys, values = pool.layer(0)
    write_kernel[(3,)](
        keys, values, key, value, slots, key.stride(0), value.stride(0), keys.stride(0),
        width=24, WIDTH=32,
    )  # fmt: skip
    assert torch.equal(keys[slots], key)
    assert torch.equal(values[slots], value)
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert not keys[others].any()
    assert not values[others].any()
