"""The kernel for prompts on a CPU, whole or in pieces: many new tokens of a sequence at once.

The loop of numba_decode, turned by 90 degrees. A lane is a new token together with one of the
query heads that share a KV head (a row of chapter 6's kernel). Lanes lie side by side in memory:
one instruction multiplies a number of K or V with 8 or 16 of them. The K and V of the new tokens
are in the pool already, so a token sees everything up to its own position.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from minivllm.attention.numba_tiles import (
    FASTMATH,
    LINE,
    aligned_zeros,
    exp_of_negative,
    load_tile,
)

LANES = 192  # of a task, at most: with fewer, more of the time goes to starting loops
TILE = 32  # tokens looked at together: their logits stay in the core's own cache
HIDDEN = np.float32(-1e30)  # a logit that weighs nothing beside any other


def tokens_per_task(group_size: int) -> int:
    return max(1, LANES // group_size)


@cache
def prefill_kernel(group_size: int, head_dim: int) -> Any:
    """Compiled for a shape at its first call, which takes seconds; kept on disk after that."""
    width = (head_dim + 7) // 8 * 8  # columns and tokens are taken by eights

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
            lanes = (num_new * group_size + LINE - 1) // LINE * LINE
            q = aligned_zeros(width, lanes)
            positions = np.full(lanes, context_len - 1, np.int32)
            for i in range(num_new * group_size):
                positions[i] = first_position + i // group_size
            for d in range(head_dim):
                for j in range(num_new):
                    for g in range(group_size):
                        q[d, j * group_size + g] = query[row + j, first_head + g, d] * scaling
            best = np.full(lanes, HIDDEN, np.float32)  # the largest logit so far
            new_best, shrink = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
            total = np.zeros(lanes, np.float32)  # sum of exp(logit - best)
            sums = aligned_zeros(head_dim, lanes)  # sum of exp(logit - best) * V
            logits = aligned_zeros(TILE, lanes)
            powers = np.empty(lanes, np.float32)
            bits = powers.view(np.int32)
            # A tile's K, then its V. Rows after its last token are zero or old, and weigh nothing.
            tile = aligned_zeros(TILE, width)
            first = max(0, first_position + 1 - window) // TILE * TILE if window > 0 else 0
            for start in range(first, context_len, TILE):
                count = min(TILE, context_len - start)
                filled = (count + 7) // 8 * 8
                load_tile(tile[:count, :head_dim], keys, block_table, start, block_size, column)
                logits[:] = 0
                for d in range(0, width, 8):
                    for t in range(filled):
                        k0, k1, k2, k3 = tile[t, d], tile[t, d + 1], tile[t, d + 2], tile[t, d + 3]
                        k4, k5, k6, k7 = (
                            tile[t, d + 4], tile[t, d + 5], tile[t, d + 6], tile[t, d + 7],
                        )  # fmt: skip
                        for i in range(lanes):
                            logits[t, i] += (
                                k0 * q[d, i] + k1 * q[d + 1, i]
                                + k2 * q[d + 2, i] + k3 * q[d + 3, i]
                                + k4 * q[d + 4, i] + k5 * q[d + 5, i]
                                + k6 * q[d + 6, i] + k7 * q[d + 7, i]
                            )  # fmt: skip
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
                    shrink[i] = best[i] - new_best[i]
                    best[i] = new_best[i]
                exp_of_negative(shrink, powers, bits)
                for i in range(lanes):
                    total[i] *= shrink[i]
                for d in range(head_dim):
                    for i in range(lanes):
                        sums[d, i] *= shrink[i]
                for t in range(filled):
                    for i in range(lanes):
                        logits[t, i] -= best[i]
                    exp_of_negative(logits[t], powers, bits)
                    for i in range(lanes):
                        total[i] += logits[t, i]
                load_tile(tile[:count, :head_dim], values, block_table, start, block_size, column)
                for t in range(0, filled, 8):
                    for d in range(head_dim):
                        v0, v1, v2, v3 = tile[t, d], tile[t + 1, d], tile[t + 2, d], tile[t + 3, d]
                        v4, v5, v6, v7 = (
                            tile[t + 4, d], tile[t + 5, d], tile[t + 6, d], tile[t + 7, d],
                        )  # fmt: skip
                        for i in range(lanes):
                            sums[d, i] += (
                                v0 * logits[t, i] + v1 * logits[t + 1, i]
                                + v2 * logits[t + 2, i] + v3 * logits[t + 3, i]
                                + v4 * logits[t + 4, i] + v5 * logits[t + 5, i]
                                + v6 * logits[t + 6, i] + v7 * logits[t + 7, i]
                            )  # fmt: skip
            for i in range(lanes):
                total[i] = np.float32(1) / total[i]
            for j in range(num_new):
                for g in range(group_size):
                    i = j * group_size + g
                    for d in range(head_dim):
                        output[row + j, first_head + g, d] = sums[d, i] * total[i]

    return prefill
