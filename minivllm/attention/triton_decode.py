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
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context_len = tl.load(context_lens + sequence)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = kv_head * group_size + rows
    at_query = sequence * query_stride + heads[:, None] * head_dim + dims[None, :]
    is_query = (rows < group_size)[:, None] & (dims < head_dim)[None, :]
    q = tl.load(query + at_query, mask=is_query, other=0.0).to(DTYPE)
    best = tl.full([ROWS], float("-inf"), tl.float32)  # the largest logit so far
    total = tl.zeros([ROWS], tl.float32)  # sum of exp(logit - best)
    sums = tl.zeros([ROWS, DIMS], tl.float32)  # sum of exp(logit - best) * V
    first = 0
    if WINDOWED:
        first = tl.maximum(context_len - window, 0) // TILE * TILE
    for start in range(first, context_len, TILE):
        tokens = start + tl.arange(0, TILE)
        seen = tokens < context_len
        if WINDOWED:
            seen = seen & (tokens >= context_len - window)
        entry = block_tables + sequence * table_stride + tokens // block_size
        block = tl.load(entry, mask=seen, other=0).to(tl.int64)
        slots = block * block_size + tokens % block_size
        at = (slots * slot_stride + kv_head * head_stride)[:, None] + dims[None, :]
        is_kv = seen[:, None] & (dims < head_dim)[None, :]
        k = tl.load(keys + at, mask=is_kv, other=0.0).to(DTYPE)
        v = tl.load(values + at, mask=is_kv, other=0.0).to(DTYPE)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if CAPPED:
            logits = softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)  # softcap * tanh
        logits = tl.where(seen[None, :], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(logits - new_best[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(DTYPE), v, input_precision="ieee")
        best = new_best
    # An empty context has no weights: its output is zero, not 0 / 0.
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + at_query, result, mask=is_query)
