"""The kernel for prompts on a CPU, whole or in pieces: many new tokens of a sequence at once.

The loop of numba_decode, turned by 90 degrees. A lane is a new token together with one of the
query heads that share a KV head (a row of chapter 6's kernel). Lanes lie side by side in memory:
one instruction multiplies a number of K or V with 8 or 16 of them (see numba_products). A strip of
COLUMNS lanes goes through the whole softmax of a tile at a time, so its logits stay in the core's
nearest cache. The K and V of the new tokens are in the pool already, so a token sees everything up
to its own position.
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
            num_lanes = num_new * group_size
            num_strips = (num_lanes + COLUMNS - 1) // COLUMNS  # COLUMNS lanes are a strip
            q = aligned_zeros(num_strips * head_dim, COLUMNS).reshape(-1, head_dim, COLUMNS)
            positions = np.full((num_strips, COLUMNS), context_len - 1, np.int32)
            for j in range(num_new):
                for g in range(group_size):
                    strip, i = divmod(j * group_size + g, COLUMNS)
                    positions[strip, i] = first_position + j
                    for d in range(head_dim):
                        q[strip, d, i] = query[row + j, first_head + g, d] * scaling
            best = np.full((num_strips, COLUMNS), HIDDEN, np.float32)  # largest logit so far
            total = np.zeros((num_strips, COLUMNS), np.float32)  # sum of exp(logit - best)
            # Sum of exp(logit - best) * V.
            sums = aligned_zeros(num_strips * width, COLUMNS).reshape(-1, width, COLUMNS)
            new_best, shrink = aligned_zeros(1, COLUMNS)[0], aligned_zeros(1, COLUMNS)[0]
            logits = aligned_zeros(TILE, COLUMNS)
            # Rows after a tile's last token are zero or old, and weigh nothing.
            tile_k = aligned_zeros(TILE + 1, head_dim)
            tile_v = aligned_zeros(TILE + 1, head_dim)  # a block may reach beyond the last row
            first = max(0, first_position + 1 - window) // TILE * TILE if window > 0 else 0
            for start in range(first, context_len, TILE):
                count = min(TILE, context_len - start)
                load_tile(tile_k[:count], keys, block_table, start, block_size, column)
                load_tile(tile_v[:count], values, block_table, start, block_size, column)
                for strip in range(num_strips):
                    position = positions[strip]
                    # Tokens after the strip's last position are not even multiplied.
                    visible = min(count, position[COLUMNS - 1] + 1 - start)
                    if visible <= 0:
                        continue
                    filled = (visible + ROWS - 1) // ROWS * ROWS
                    for t in range(0, filled, ROWS):
                        set_block(
                            logits, t, 0, tile_k, t * head_dim, head_dim, 1, q[strip], head_dim,
                            shrink,
                        )  # fmt: skip
                    if softcap > 0:
                        for t in range(filled):
                            for i in range(COLUMNS):
                                logits[t, i] = softcap * math.tanh(logits[t, i] / softcap)
                    if start + filled > position[0] + 1 or window > 0:
                        for t in range(filled):
                            token = np.int32(start + t)
                            for i in range(COLUMNS):
                                is_past = window > 0 and token <= position[i] - window
                                if token > position[i] or is_past:
                                    logits[t, i] = HIDDEN
                    new_best[:] = best[strip]
                    for t in range(filled):
                        for i in range(COLUMNS):
                            new_best[i] = max(new_best[i], logits[t, i])
                    for i in range(COLUMNS):
                        shrink[i] = exp_of_negative(best[strip, i] - new_best[i])
                        best[strip, i] = new_best[i]
                        total[strip, i] *= shrink[i]
                    strip_total = total[strip]
                    for t in range(filled):
                        for i in range(COLUMNS):
                            logits[t, i] = exp_of_negative(logits[t, i] - new_best[i])
                            strip_total[i] += logits[t, i]
                    for d in range(0, width, ROWS):
                        add_to_block(
                            sums[strip], d, 0, tile_v, d, 1, head_dim, logits, filled, shrink
                        )
            for j in range(num_new):
                for g in range(group_size):
                    strip, i = divmod(j * group_size + g, COLUMNS)
                    share = np.float32(1) / total[strip, i]
                    for d in range(head_dim):
                        output[row + j, first_head + g, d] = sums[strip, d, i] * share

    return prefill
