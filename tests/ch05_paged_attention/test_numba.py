"""The reader compiled by numba, against the gather: whatever holds for one holds for the other."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import check_tokens_in_a_small_pool, scene

pytest.importorskip("numba", reason="numba is not installed")

import numba

from minivllm.attention.gather import GatherAttention
from minivllm.attention.numba_attention import NumbaAttention, dealt
from minivllm.attention.numba_products import COLUMNS, ROWS, add_to_block, set_block
from minivllm.attention.numba_tiles import aligned_zeros, exp_of_negative
from minivllm.errors import RequestError
from minivllm.stages import paged_reader


def check(query, pool, batch, *, tolerance=1e-5, **options):
    options = {"scaling": query.shape[-1] ** -0.5} | options
    expected = GatherAttention()(query, *pool.layer(0), batch, **options)
    found = NumbaAttention()(query, *pool.layer(0), batch, **options)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_decode_prefill_and_what_lies_between(block_size):
    check(*scene([40, 13, 130, 1], [1] * 4, block_size))
    check(*scene([40, 13, 130, 1], [1, 13, 30, 1], block_size))
    check(*scene([40, 13], [5, 13], block_size))
    check(*scene([300, 129, 70, 64], [300, 65, 64, 1], block_size))


@pytest.mark.parametrize(("group_size", "head_dim"), [(1, 8), (4, 80)])
def test_groups_and_head_sizes(group_size, head_dim):
    """Each shape is compiled for seconds, so these are few."""
    check(*scene([70, 9, 33], [1, 1, 1], 4, group_size=group_size, head_dim=head_dim))
    check(*scene([210, 9, 33], [200, 9, 2], 4, group_size=group_size, head_dim=head_dim))


def test_a_head_whose_size_is_no_multiple_of_eight_and_a_group_larger_than_a_task():
    check(*scene([70, 9], [1, 9], 4, group_size=200, head_dim=12))


@pytest.mark.parametrize("num_seqs", [1, 3, 4, 7])
def test_few_sequences_and_many_are_shared_out_differently(num_seqs):
    check(*scene([10 * n + 1 for n in range(num_seqs)], [1] * num_seqs, 4))


@pytest.mark.parametrize("sliding_window", [1, 7, 33, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_capped_logits(sliding_window, softcap):
    limits = {"sliding_window": sliding_window, "softcap": softcap, "scaling": 0.7}
    check(*scene([90, 22], [1, 1], 4), **limits)
    check(*scene([150, 22], [140, 7], 4), **limits)


def test_large_logits():
    """exp of them is beyond float32; a softmax is not."""
    check(*scene([100, 40], [1, 1], 4), scaling=20.0, tolerance=1e-3)
    check(*scene([100, 40], [90, 40], 4), scaling=20.0, tolerance=1e-3)


def test_exp_of_what_is_not_positive():
    x = np.concatenate([-np.geomspace(1e-9, 87, 1000), [0, -1, -0.5 * np.log(2)]]).astype("f")
    found = np.concatenate([x, np.float32([-88, -1e4, -np.inf, np.nan])])

    @numba.njit
    def replace_all(numbers):
        for i in range(len(numbers)):
            numbers[i] = exp_of_negative(numbers[i])

    replace_all(found)
    exact = np.exp(x.astype(float))
    assert (abs(found[: len(x)] - exact) <= (1 - x) * 2e-7 * exact).all()
    assert ((found[len(x) : -1] >= 0) & (found[len(x) : -1] < 2e-38)).all()
    assert np.isnan(found[-1])


def test_blocks_of_products():
    """Row by row and turned; the rest of the result stays as it is."""
    random = np.random.default_rng(0)
    b, out, expected = (aligned_zeros(rows, 2 * COLUMNS) for rows in (5, 3 * ROWS, 3 * ROWS))
    b[:] = random.standard_normal(b.shape)
    out[:] = expected[:] = random.standard_normal(out.shape)
    a, turned = (random.standard_normal(shape, "f") for shape in [(ROWS, 7), (7, ROWS)])
    scale = aligned_zeros(1, 2 * COLUMNS)[0]
    scale[:] = random.standard_normal(len(scale))

    @numba.njit
    def both(out, a, turned, b, scale):
        set_block(out, ROWS, COLUMNS, a, 1, 7, 1, b, 5, scale)
        add_to_block(out, 2 * ROWS, 0, turned, ROWS, 1, ROWS, b, 4, scale)

    both(out, a, turned, b, scale)
    left, right = np.s_[:COLUMNS], np.s_[COLUMNS:]
    expected[ROWS : 2 * ROWS, right] = a[:, 1:6] @ b[:, right]
    expected[2 * ROWS :, left] *= scale[left]
    expected[2 * ROWS :, left] += turned[1:5].T @ b[:4, left]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_buffers_begin_with_a_line_of_64_bytes():
    several = [aligned_zeros(rows, 16) for rows in (1, 2, 3, 5, 8, 13, 200)]
    assert not any(buffer.ctypes.data % 64 or buffer.any() for buffer in several)


def test_a_context_of_no_tokens_gives_zeros():
    query, pool, batch = scene([5, 9], [1, 1], 4)
    batch.context_lens[0] = 0
    output = NumbaAttention()(query, *pool.layer(0), batch, scaling=1.0)
    assert not output[0].any()
    assert output.isfinite().all()


def test_two_sequences_may_share_blocks():
    query, pool, batch = scene([20, 20], [1, 1], 4)
    batch.block_tables[1] = batch.block_tables[0]
    check(query, pool, batch)


@pytest.mark.parametrize("num_hands", [1, 2, 3])
def test_threads_get_about_the_same(num_hands):
    costs = [3, 1, 4, 12, 5, 9, 2, 6, 7, 8, 11, 10]
    tasks = dealt([(cost, i) for i, cost in enumerate(costs)], num_hands)
    assert sorted(tasks.T.tolist()) == sorted([cost, i] for i, cost in enumerate(costs))
    shares = [hand.sum() for hand in np.split(tasks[0], num_hands)]
    assert max(shares) - min(shares) <= 2


def test_each_step_is_planned_anew():
    """Also for a batch of the same size; the second layer of a step uses the plan of the first."""
    reader = NumbaAttention()
    for lengths in ([40, 13], [13, 40], [25, 26]):
        query, pool, batch = scene(lengths, [1, 1], 4, seed=lengths[0])
        for _ in "layers":
            found = reader(query, *pool.layer(0), batch, scaling=0.25)
            expected = GatherAttention()(query, *pool.layer(0), batch, scaling=0.25)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("examples", [60, pytest.param(600, marks=pytest.mark.full)])
def test_any_batch(examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        lengths=st.lists(
            st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 2, 30, 70])),
            min_size=1,
            max_size=6,
        ),
        block_size=st.sampled_from([1, 2, 3, 16, 32, 128]),
        sliding_window=st.sampled_from([None, None, 3, 64, 70]),
        seed=st.integers(0, 99),
    )
    def run(lengths, block_size, sliding_window, seed):
        new = [count for _, count in lengths]
        context_lens = [cached + count for cached, count in lengths]
        query, pool, batch = scene(context_lens, new, block_size, seed=seed)
        check(query, pool, batch, sliding_window=sliding_window)

    run()


def test_tokens_are_those_of_chapter_1(tiny, solo_run):
    check_tokens_in_a_small_pool(tiny, solo_run, "numba")


def test_half_precision_is_refused_with_the_way_out():
    with pytest.raises(RequestError, match=r"float32 on a CPU.*torch.bfloat16 on cpu: use gather"):
        paged_reader("numba", "cpu", torch.bfloat16)
