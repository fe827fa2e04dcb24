"""Paged attention for any number of new tokens per sequence: prefill, and its continuation.

The same loop as in triton_decode, with more rows: a program reads one KV head for a tile of rows,
and a row is a new token together with one of the query heads that share the KV head. The K and V of
the new tokens are in the pool already, so a token sees everything up to its own position.
"""

import triton
import triton.language as tl


@triton.jit
def prefill_kernel(
    output, query, keys, values, block_tables, context_lens, query_start_loc, tile_sequence,
    tile_start, scaling, softcap, window,
    query_stride, table_stride, slot_stride, head_stride, block_size,
    group_size: tl.constexpr, head_dim: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """query, output: [T, query heads, head_dim]; keys, values: [slots, KV heads, head_dim].

    query_start_loc: [S + 1]. tile_sequence, tile_start: [number of tiles], which sequence a tile of
    rows belongs to, and its first row: row r is new token r // group_size.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequence + tile).to(tl.int64)
    rows, dims = tl.load(tile_start + tile) + tl.arange(0, ROWS), tl.arange(0, DIMS)
    first_token = tl.load(query_start_loc + sequence)
    num_new = tl.load(query_start_loc + sequence + 1) - first_token
    context_len = tl.load(context_lens + sequence)
    heads = kv_head * group_size + rows % group_size
    new_tokens = rows // group_size
    at_query = (first_token + new_tokens).to(tl.int64)[:, None] * query_stride
    at_query += heads[:, None] * head_dim + dims[None, :]
    is_query = (new_tokens < num_new)[:, None] & (dims < head_dim)[None, :]
    q = tl.load(query + at_query, mask=is_query, other=0.0).to(DTYPE)
    positions = context_len - num_new + new_tokens
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    last = tl.minimum(tl.max(positions, 0) + 1, context_len)
    first = 0
    if WINDOWED:
        first = tl.maximum(tl.min(positions, 0) + 1 - window, 0) // TILE * TILE
    for start in range(first, last, TILE):
        tokens = start + tl.arange(0, TILE)
        stored = tokens < last
        entry = block_tables + sequence * table_stride + tokens // block_size
        block = tl.load(entry, mask=stored, other=0).to(tl.int64)
        slots = block * block_size + tokens % block_size
        at = (slots * slot_stride + kv_head * head_stride)[:, None] + dims[None, :]
        is_kv = stored[:, None] & (dims < head_dim)[None, :]
        k = tl.load(keys + at, mask=is_kv, other=0.0).to(DTYPE)
        v = tl.load(values + at, mask=is_kv, other=0.0).to(DTYPE)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if CAPPED:
            logits = softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)
        seen = tokens[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        # A row may see nothing of this tile, and nothing before it: then both are -inf.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp(best - base)
        weights = tl.exp(logits - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(DTYPE), v, input_precision="ieee")
        best = new_best
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + at_query, result, mask=is_query)
