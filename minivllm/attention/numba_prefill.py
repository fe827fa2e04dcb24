"""The kernel for prompts on a CPU, whole or in pieces: many new tokens of a sequence at once.

The loop of numba_decode, turned by 90 degrees. A lane is a new token together with one of the
query heads that share a KV head (a row of chapter 6's kernel). Lanes lie side by side in memory:
one instruction multiplies a number of K or V with 8 or 16 of them (see numba_products). The K and V
of the new tokens are in the pool already, so a token sees everything up to its own position.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from minivllm.attention.numba_products import COLUMNS, ROWS, add_to_block, set_block
from minivllm.attention.numba_tiles import FASTMATH, aligned_zeros, exp_of_negative, load_tile

LANES = 192  # of a task, at most: with fewer, more of the time goes to loading tiles
TILE = 64  # tokens looked at together, a multiple of ROWS: their logits stay in the core's cache
HIDDEN = np.float32(-1e30)  # a logit that weighs nothing beside any other


def tokens_per_task(group_size: int) -> int:
    return max(1, LANES // group_size)


@cache
def prefill_kernel(group_size: int, head_dim: int) -> Any:
    """Compiled for a shape at its first call, which takes seconds; kept on disk after that."""
    width = (head_dim + ROWS - 1) // ROWS * ROWS  # rows of sums: blocks have so many

    @njit(parallel=True, fastmath=FASTMATH, nogil=True, cache=True)
    def prefill(
        output: Any, query: Any, keys: Any, values: Any, block_tables: Any, sequences: Any,
        rows: Any, context_lens: Any, block_size: Any, scaling: Any, softcap: Any, window: Any,
        counts: Any, kv_heads: Any,
    ) -> None:  # fmt: skip
        for task in prange(len(rows)):
            row, num_new, kv_head = rows[task], counts[task], kv_heads[task]
            block_table = block_tables[sequences[task]]
            context_len = context_lens[task]  # up to the last new token of this task
            first_position = context_len - num_new
            first_head, column = kv_head * group_size, kv_head * head_dim
            lanes = (num_new * group_size + COLUMNS - 1) // COLUMNS * COLUMNS
            q = aligned_zeros(head_dim, lanes)
            positions = np.full(lanes, context_len - 1, np.int32)
            for i in range(num_new * group_size):
                positions[i] = first_position + i // group_size
            for d in range(head_dim):
                for j in range(num_new):
                    for g in range(group_size):
                        q[d, j * group_size + g] = query[row + j, first_head + g, d] * scaling
            best = np.full(lanes, HIDDEN, np.float32)  # the largest logit so far
            new_best = np.empty(lanes, np.float32)
            shrink = aligned_zeros(1, lanes)[0]
            total = np.zeros(lanes, np.float32)  # sum of exp(logit - best)
            sums = aligned_zeros(width, lanes)  # sum of exp(logit - best) * V
            logits = aligned_zeros(TILE, lanes)
            # A tile's K, then its V. Rows after its last token are zero or old, and weigh nothing.
            tile = aligned_zeros(TILE + 1, head_dim)  # a block may reach beyond the last row
            first = max(0, first_position + 1 - window) // TILE * TILE if window > 0 else 0
            for start in range(first, context_len, TILE):
                count = min(TILE, context_len - start)
                filled = (count + ROWS - 1) // ROWS * ROWS
                load_tile(tile[:count], keys, block_table, start, block_size, column)
                for t in range(0, filled, ROWS):
                    for i in range(0, lanes, COLUMNS):
                        set_block(
                            logits, t, i, tile, t * head_dim, head_dim, 1, q, head_dim, shrink
                        )
                if softcap > 0:
                    for t in range(count):
                        for i in range(lanes):
                            logits[t, i] = softcap * math.tanh(logits[t, i] / softcap)
                if start + filled > first_position + 1 or window > 0:
                    for t in range(filled):
                        token = np.int32(start + t)
                        for i in range(lanes):
                            is_past = window > 0 and token <= positions[i] - window
                            if token > positions[i] or is_past:
                                logits[t, i] = HIDDEN
                new_best[:] = best
                for t in range(filled):
                    for i in range(lanes):
                        new_best[i] = max(new_best[i], logits[t, i])
                for i in range(lanes):
                    shrink[i] = exp_of_negative(best[i] - new_best[i])
                    total[i] *= shrink[i]
                    best[i] = new_best[i]
                for t in range(filled):
                    for i in range(lanes):
                        logits[t, i] = exp_of_negative(logits[t, i] - best[i])
                        total[i] += logits[t, i]
                load_tile(tile[:count], values, block_table, start, block_size, column)
                for d in range(0, width, ROWS):
                    for i in range(0, lanes, COLUMNS):
                        add_to_block(sums, d, i, tile, d, 1, head_dim, logits, filled, shrink)
            for i in range(lanes):
                total[i] = np.float32(1) / total[i]
            for j in range(num_new):
                for g in range(group_size):
                    i = j * group_size + g
                    for d in range(head_dim):
                        output[row + j, first_head + g, d] = sums[d, i] * total[i]

    return prefill
