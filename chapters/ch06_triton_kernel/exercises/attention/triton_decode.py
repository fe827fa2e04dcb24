# Exercise 6.2: the decode kernel (decode_kernel).
# Test with: python -m pytest tests/ch06_triton_kernel --impl work

"""Paged attention for one new token per sequence: a kernel that walks the block table.

One program reads one KV head of one sequence, for all the query heads that share it. It goes
through the context in tiles of tokens, looks up each token's block, and keeps a running softmax
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): nothing is copied, and
no row of logits is ever stored. The tiles have nothing to do with the block size.
"""

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    output, query, keys, values, block_tables, context_lens, scaling, softcap, window,
    query_stride, table_stride, slot_stride, head_stride, block_size,
    group_size: tl.constexpr, head_dim: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """query, output: [S, query heads, head_dim]; keys, values: [slots, KV heads, head_dim].

    block_tables: [S, M], context_lens: [S]. ROWS and DIMS: group_size and head_dim rounded up to
    what tl.dot takes (a power of two from 16 up). DTYPE: what tl.dot multiplies, into float32.
    """
    # An empty context has no weights: its output is zero, not 0 / 0.
    tl.static_assert(False, "exercise 6.2: decode_kernel")
