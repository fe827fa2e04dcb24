"""Softmax in one pass, in NumPy: the algorithm of the kernels on its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention.online_softmax import join, online_attention


def at_once(query, keys, values):
    logits = keys @ query
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ values


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 9), st.floats(0.1, 30))
def test_any_tile_gives_what_one_look_at_all_gives(num_tokens, tile, seed, size):
    rng = np.random.default_rng(seed)
    query = size * rng.normal(size=8)
    keys, values = rng.normal(size=(2, num_tokens, 8))
    np.testing.assert_allclose(
        online_attention(query, keys, values, tile), at_once(query, keys, values), atol=1e-12
    )


def test_logits_that_rise_and_fall():
    """The largest last, first and in the middle; exp of any of them alone would overflow."""
    values = np.arange(6.0)[:, None] + np.zeros((6, 2))
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 3, 1, 4]):
        keys = 1000.0 * np.array(order)[:, None]
        output = online_attention(np.ones(1), keys, values, tile=2)
        np.testing.assert_allclose(output, [order.index(5)] * 2)


def test_logits_far_below_zero():
    """exp of any of them is 0 in itself."""
    keys, values = -1000.0 - np.arange(4.0)[:, None], np.arange(4.0)[:, None] + np.zeros((4, 2))
    weights = np.exp(-np.arange(4.0))
    expected = weights / weights.sum() @ values
    np.testing.assert_allclose(online_attention(np.ones(1), keys, values, tile=3), expected)


def test_no_tokens_give_zeros():
    output = online_attention(np.ones(4), np.zeros((0, 4)), np.zeros((0, 4)), tile=8)
    assert output.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("borders", [[10], [1, 39], [5, 5, 20]])
def test_parts_join_to_the_whole(borders):
    """Also when a part is empty."""
    rng = np.random.default_rng(0)
    query, keys, values = rng.normal(size=8), *rng.normal(size=(2, 40, 8))
    outputs, log_sums = [], []
    for part in np.split(np.arange(40), borders):
        outputs.append(online_attention(query, keys[part], values[part], tile=4))
        log_sums.append(np.logaddexp.reduce(keys[part] @ query) if len(part) else -np.inf)
    joined = join(np.array(outputs), np.array(log_sums))
    np.testing.assert_allclose(joined, at_once(query, keys, values), atol=1e-12)
