"""NumbaAttention: the algorithm of the Triton kernel, compiled for the processor at hand.

What decodes is read through the block table, a tile of tokens at a time, without a gather; so is a
short prompt, each of its tokens like one that decodes. A long prompt is read by the gather: with
many queries its copy is small beside the products.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.batch import Batch
from minivllm.attention.gather import GatherAttention, ReadGroup, read_groups
from minivllm.errors import ModelError

try:
    import numba
    from numba import njit, prange
except ImportError as error:
    raise ModelError(
        "numba is not installed: pip install numba, or use --attention gather"
    ) from error

TILE = 64  # tokens looked at together; a multiple of 4
FEW = 1024  # new tokens times context: up to it a prompt is read by the loop, not by the gather
# Sums may be taken in any order. NaN and infinity keep their meaning: -inf is "nothing yet".
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@njit(nogil=True, cache=True)
def load_tile(
    tile: Any, pool: Any, block_table: Any, start: Any, block_size: Any, first: Any
) -> None:
    """Copies K or V of `count` tokens, from token `start` and column `first` of the pool on.

    tile: [count, columns]; pool: [num_slots, num_kv_heads * head_dim]; block_table: [M].
    The loops of the kernel go to and fro between tokens. Memory is read faster in its own order,
    into the core's cache; a GPU kernel uses its shared memory in the same way.
    """
    count, width = tile.shape
    for t in range(count):
        token = start + t
        slot = block_table[token // block_size] * block_size + token % block_size
        source, target = pool[slot, first : first + width], tile[t]
        for column in range(width):
            target[column] = source[column]


# 2**x = sum of (x log 2)**n / n!; for x in [-1/2, 1/2] float32 needs no more of it than this.
SERIES = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(6, -1, -1))
LOG2_E = np.float32(1 / math.log(2))
SMALLEST = np.float32(-126)  # the smallest power of two in float32


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def exp_of_negative(x: Any, powers: Any, bits: Any) -> None:
    """x = exp(x), for x of 0 or less; below exp(-87) it stays there. Off by (1 - x) * 2e-7 of it,
    as x * LOG2_E is rounded.

    x: [count]; powers: [TILE], float32, and bits: the same memory as int32. The system's library
    takes one number at a time. This is without branches, so the compiler takes eight.
    """
    for t in range(len(x)):
        y = x[t] * LOG2_E
        if y < SMALLEST:
            y = SMALLEST
        whole = np.int32(y - np.float32(0.5))  # the nearest, as y is not positive
        bits[t] = (whole + 127) << 23  # 2**whole: only its exponent differs from that of 1
        rest = y - np.float32(whole)
        found = SERIES[0]
        for factor in SERIES[1:]:
            found = found * rest + factor
        x[t] = found
    for t in range(len(x)):
        x[t] *= powers[t]


@cache
def decode_kernel(group_size: int, head_dim: int) -> Callable[..., None]:
    """Compiled for a shape at its first call, which takes seconds; kept on disk after that."""

    @njit(parallel=True, fastmath=FASTMATH, nogil=True, cache=True)
    def decode(
        output: Any, query: Any, keys: Any, values: Any, block_tables: Any, tables: Any,
        context_lens: Any, rows: Any, block_size: Any, scaling: Any, softcap: Any, window: Any,
        heads_per_task: Any,
    ) -> None:  # fmt: skip
        num_tasks = keys.shape[1] // (heads_per_task * head_dim)  # for each row
        num_queries = heads_per_task * group_size
        for task in prange(len(rows) * num_tasks):
            which, first_kv_head = task // num_tasks, task % num_tasks * heads_per_task
            context_len, row = context_lens[which], rows[which]
            block_table = block_tables[tables[which]]
            first_head, first_column = first_kv_head * group_size, first_kv_head * head_dim
            q = np.empty((num_queries, head_dim), np.float32)
            for i in range(num_queries):
                for d in range(head_dim):
                    q[i, d] = query[row, first_head + i, d] * scaling
            best = np.full(num_queries, -np.inf, np.float32)  # the largest logit so far
            total = np.zeros(num_queries, np.float32)  # sum of exp(logit - best)
            sums = np.zeros((num_queries, head_dim), np.float32)  # sum of exp(logit - best) * V
            logits = np.empty((num_queries, TILE), np.float32)
            powers = np.empty(TILE, np.float32)
            bits = powers.view(np.int32)
            # A tile's K, then its V. Rows after its last token are zero or old, and weigh nothing.
            tile = np.zeros((TILE, heads_per_task * head_dim), np.float32)
            kv = tile.reshape(TILE, heads_per_task, head_dim)
            first = max(0, context_len - window) if window > 0 else 0
            for start in range(first, context_len, TILE):
                count = min(TILE, context_len - start)
                filled = (count + 3) // 4 * 4  # four tokens at a time
                load_tile(tile[:count], keys, block_table, start, block_size, first_column)
                for t in range(0, filled, 4):
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
                        logits[i, t] -= new_best
                    exp_of_negative(logits[i, :count], powers, bits)
                    for t in range(count):
                        tile_total += logits[i, t]
                    logits[i, count:filled] = 0
                    total[i] = total[i] * shrink + tile_total
                    best[i] = new_best
                    for d in range(head_dim):
                        sums[i, d] *= shrink
                load_tile(tile[:count], values, block_table, start, block_size, first_column)
                for t in range(0, filled, 4):
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


def is_read_by_loop(num_new: int, context_len: int) -> bool:
    return num_new == 1 or num_new * context_len <= FEW


def is_read_by_gather(group: ReadGroup) -> bool:
    if not isinstance(group.rows, slice):
        return False  # sequences that decode
    return not is_read_by_loop(group.rows.stop - group.rows.start, int(group.context_lens[0]))


@dataclass(slots=True)
class ReadPlan:
    """What the kernel reads beside query, K and V; the same in every layer of a step.

    block_tables: [n, M], filled up with zeros, of the n sequences that are read by the loop.
    rows: [R], their rows of the packed batch; tables: [R], whose block table belongs to a row;
    context_lens: [R], how many tokens of that table the row may see.
    """

    block_tables: np.ndarray
    rows: np.ndarray
    tables: np.ndarray
    context_lens: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> "ReadPlan":
        found: list[SequenceOf[int]] = []
        rows: list[tuple[int, int, int]] = []  # (context_len, row, table) of each
        for i, (start, stop) in enumerate(pairwise(batch.query_start_loc)):
            context_len = batch.context_lens[i]
            if is_read_by_loop(stop - start, context_len):
                before = context_len - stop + 1
                rows += [(before + row, row, len(found)) for row in range(start, stop)]
                found.append(batch.block_tables[i])
        filled = np.zeros((len(found), max(map(len, found), default=0)), dtype=np.int64)
        for number, table in enumerate(found):
            filled[number, : len(table)] = table
        # Threads take rows one behind another: dealt out by length, each gets its share of work.
        rows.sort()
        dealt = np.array(rows[::2] + rows[1::2], np.int64).reshape(-1, 3)
        context_lens, rows_of_batch, tables = np.ascontiguousarray(dealt.T)
        return cls(filled, rows_of_batch, tables, context_lens)


class NumbaAttention(GatherAttention):
    """A reader for a pool of blocks in float32 on a CPU; see slice_attention for the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._plan: ReadPlan | None = None
        self._num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        numba.set_num_threads(self._num_threads)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if batch is not self._batch:
            groups = read_groups(batch, query.device)
            self._groups = [group for group in groups if is_read_by_gather(group)]
            self._batch, self._plan = batch, ReadPlan.of(batch)
        output = super().__call__(
            query, keys, values, batch,
            scaling=scaling, sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
        plan, num_kv_heads = self._plan, keys.shape[1]
        if plan is not None and len(plan.rows):
            # All KV heads of a token lie in a row: one task reads them all, unless there are too
            # few sequences to keep each thread busy.
            enough = len(plan.rows) >= 2 * self._num_threads
            decode_kernel(query.shape[1] // num_kv_heads, query.shape[2])(
                output.numpy(), query.contiguous().numpy(),
                keys.flatten(1).numpy(), values.flatten(1).numpy(),
                plan.block_tables, plan.tables, plan.context_lens, plan.rows, batch.block_size,
                np.float32(scaling), np.float32(softcap or 0), sliding_window or 0,
                num_kv_heads if enough else 1,
            )  # fmt: skip
        return output
