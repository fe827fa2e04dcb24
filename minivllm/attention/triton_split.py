"""Paged decode of long contexts: each is split among several programs, and triton_join joins.

With one program per sequence and KV head, few sequences with long contexts leave most of a GPU
idle. Here each part of a context leaves its own softmax: the weighted sum, and the logarithm of the
sum of weights (the idea is Flash-Decoding's, Dao et al., 2023).
"""

import triton
import triton.language as tl


@triton.jit
def split_kernel(
    parts, log_sums, query, keys, values, block_tables, context_lens, scaling, softcap, window,
    query_stride, table_stride, slot_stride, head_stride, block_size, num_heads,
    group_size: tl.constexpr, head_dim: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As decode_kernel, for one part of the context.

    parts: float32 [S, query heads, splits, head_dim]; log_sums: float32 [S, query heads, splits],
    -inf where a part is empty.
    """
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    context_len = tl.load(context_lens + sequence)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = kv_head * group_size + rows
    at_query = sequence * query_stride + heads[:, None] * head_dim + dims[None, :]
    is_query = (rows < group_size)[:, None] & (dims < head_dim)[None, :]
    q = tl.load(query + at_query, mask=is_query, other=0.0).to(DTYPE)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    first = 0
    if WINDOWED:
        first = tl.maximum(context_len - window, 0) // TILE * TILE
    tiles_each = tl.cdiv(tl.cdiv(context_len - first, TILE), num_splits)
    begin = first + split * tiles_each * TILE
    for start in range(begin, tl.minimum(begin + tiles_each * TILE, context_len), TILE):
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
            logits = softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(logits - new_best[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(DTYPE), v, input_precision="ieee")
        best = new_best
    some = tl.where(total > 0, total, 1.0)
    at_part = (sequence * num_heads + heads) * num_splits + split
    tl.store(
        parts + at_part[:, None] * head_dim + dims[None, :], sums / some[:, None], mask=is_query
    )
    log_sum = tl.where(total > 0, best + tl.log(some), float("-inf"))
    tl.store(log_sums + at_part, log_sum, mask=rows < group_size)
