"""The kernel for what decodes, on a CPU: one new token of each sequence, a tile of 64 at a time."""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from minivllm.attention.numba_tiles import (
    FASTMATH,
    aligned_zeros,
    exp_of_negative,
    fetch,
    load_tile,
)

TILE = 64  # tokens looked at together; a multiple of 4


@cache
def decode_kernel(group_size: int, head_dim: int) -> Any:
    """Compiled for a shape at its first call, which takes seconds; kept on disk after that."""

    @njit(parallel=True, fastmath=FASTMATH, nogil=True, cache=True)
    def decode(
        output: Any, query: Any, keys: Any, values: Any, block_tables: Any, sequences: Any,
        rows: Any, context_lens: Any, block_size: Any, scaling: Any, softcap: Any, window: Any,
        heads_per_task: Any,
    ) -> None:  # fmt: skip
        num_tasks = keys.shape[1] // (heads_per_task * head_dim)  # for each row
        num_queries, width = heads_per_task * group_size, heads_per_task * head_dim
        for task in prange(len(rows) * num_tasks):
            which, first_kv_head = task // num_tasks, task % num_tasks * heads_per_task
            context_len, row = context_lens[which], rows[which]
            block_table = block_tables[sequences[which]]
            first_head, first_column = first_kv_head * group_size, first_kv_head * head_dim
            q = aligned_zeros(num_queries, head_dim)
            for i in range(num_queries):
                for d in range(head_dim):
                    q[i, d] = query[row, first_head + i, d] * scaling
            best = np.full(num_queries, -np.inf, np.float32)  # the largest logit so far
            total = np.zeros(num_queries, np.float32)  # sum of exp(logit - best)
            sums = aligned_zeros(num_queries, head_dim)  # sum of exp(logit - best) * V
            logits = aligned_zeros(num_queries, TILE)
            # A tile's K, then its V. Rows after its last token are zero or old, and weigh nothing.
            tile = aligned_zeros(TILE, width)
            kv = tile.reshape(TILE, heads_per_task, head_dim)
            first = max(0, context_len - window) if window > 0 else 0
            for start in range(first, context_len, TILE):
                count = min(TILE, context_len - start)
                filled = (count + 3) // 4 * 4  # four tokens at a time
                stop = start + count
                load_tile(tile[:count], keys, block_table, start, block_size, first_column)
                for t in range(0, filled, 4):
                    # While these are multiplied, memory is asked for what comes next.
                    now, until = start + t, min(start + t + 4, stop)
                    fetch(values, block_table, now, until, block_size, first_column, width)
                    for i in range(num_queries):
                        head = i // group_size
                        dot0 = dot1 = dot2 = dot3 = np.float32(0)
                        for d in range(head_dim):
                            dot0 += q[i, d] * kv[t, head, d]
                            dot1 += q[i, d] * kv[t + 1, head, d]
                            dot2 += q[i, d] * kv[t + 2, head, d]
                            dot3 += q[i, d] * kv[t + 3, head, d]
                        logits[i, t], logits[i, t + 1] = dot0, dot1
                        logits[i, t + 2], logits[i, t + 3] = dot2, dot3
                for i in range(num_queries):
                    new_best = best[i]
                    for t in range(count):
                        if softcap > 0:
                            logits[i, t] = softcap * math.tanh(logits[i, t] / softcap)
                        new_best = max(new_best, logits[i, t])
                    shrink = math.exp(best[i] - new_best)
                    tile_total = np.float32(0)
                    for t in range(count):
                        logits[i, t] = exp_of_negative(logits[i, t] - new_best)
                        tile_total += logits[i, t]
                    logits[i, count:filled] = 0
                    total[i] = total[i] * shrink + tile_total
                    best[i] = new_best
                    for d in range(head_dim):
                        sums[i, d] *= shrink
                load_tile(tile[:count], values, block_table, start, block_size, first_column)
                for t in range(0, filled, 4):
                    now, until = stop + t, min(stop + t + 4, context_len)
                    fetch(keys, block_table, now, until, block_size, first_column, width)
                    for i in range(num_queries):
                        head = i // group_size
                        w0, w1, w2, w3 = (
                            logits[i, t], logits[i, t + 1], logits[i, t + 2], logits[i, t + 3],
                        )  # fmt: skip
                        for d in range(head_dim):
                            sums[i, d] += (
                                w0 * kv[t, head, d] + w1 * kv[t + 1, head, d]
                                + w2 * kv[t + 2, head, d] + w3 * kv[t + 3, head, d]
                            )  # fmt: skip
            for i in range(num_queries):
                share = np.float32(1) / total[i] if total[i] > 0 else np.float32(0)
                for d in range(head_dim):
                    output[row, first_head + i, d] = sums[i, d] * share

    return decode
