"""NumbaAttention: the algorithm of the Triton kernel, compiled for the processor at hand.

What decodes is read where it lies, through the block table, without a gather. Prompts are read by
the gather: with many queries its copy is small beside the products.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.batch import Batch
from minivllm.attention.gather import GatherAttention, read_groups
from minivllm.errors import ModelError

try:
    import numba
    from numba import njit, prange
except ImportError as error:
    raise ModelError(
        "numba is not installed: pip install numba, or use --attention gather"
    ) from error

TILE = 64  # tokens looked at together; a multiple of 4
# Sums may be taken in any order. NaN and infinity keep their meaning: -inf is "nothing yet".
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@cache
def decode_kernel(group_size: int, head_dim: int) -> Callable[..., None]:
    """Compiled for a shape at its first call, which takes seconds; kept on disk after that."""

    @njit(parallel=True, fastmath=FASTMATH, nogil=True, cache=True)
    def decode(
        output: Any, query: Any, keys: Any, values: Any, block_tables: Any, context_lens: Any,
        rows: Any, block_size: Any, scaling: Any, softcap: Any, window: Any, heads_per_task: Any,
    ) -> None:  # fmt: skip
        num_tasks = keys.shape[1] // heads_per_task  # for each sequence
        num_queries = heads_per_task * group_size
        for task in prange(len(context_lens) * num_tasks):
            sequence, first_kv_head = task // num_tasks, task % num_tasks * heads_per_task
            context_len, row = context_lens[sequence], rows[sequence]
            first_head = first_kv_head * group_size
            q = np.empty((num_queries, head_dim), np.float32)
            for i in range(num_queries):
                for d in range(head_dim):
                    q[i, d] = query[row, first_head + i, d] * scaling
            best = np.full(num_queries, -np.inf, np.float32)  # the largest logit so far
            total = np.zeros(num_queries, np.float32)  # sum of exp(logit - best)
            sums = np.zeros((num_queries, head_dim), np.float32)  # sum of exp(logit - best) * V
            logits, slots = np.empty(TILE, np.float32), np.empty(TILE, np.int64)
            first = max(0, context_len - window) if window > 0 else 0
            for start in range(first, context_len, TILE):
                count = min(TILE, context_len - start)
                for t in range(count):
                    token = start + t
                    block = block_tables[sequence, token // block_size]
                    slots[t] = block * block_size + token % block_size
                # Four tokens at a time; what fills the last four up is read, with no weight.
                filled = (count + 3) // 4 * 4
                slots[count:filled] = slots[0]
                for i in range(num_queries):
                    kv_head = first_kv_head + i // group_size
                    for t in range(0, filled, 4):
                        at0, at1, at2, at3 = slots[t], slots[t + 1], slots[t + 2], slots[t + 3]
                        dot0 = dot1 = dot2 = dot3 = np.float32(0)
                        for d in range(head_dim):
                            dot0 += q[i, d] * keys[at0, kv_head, d]
                            dot1 += q[i, d] * keys[at1, kv_head, d]
                            dot2 += q[i, d] * keys[at2, kv_head, d]
                            dot3 += q[i, d] * keys[at3, kv_head, d]
                        logits[t], logits[t + 1], logits[t + 2], logits[t + 3] = (
                            dot0, dot1, dot2, dot3,
                        )  # fmt: skip
                    new_best = best[i]
                    for t in range(count):
                        if softcap > 0:
                            logits[t] = softcap * math.tanh(logits[t] / softcap)
                        new_best = max(new_best, logits[t])
                    shrink = math.exp(best[i] - new_best)
                    tile_total = np.float32(0)
                    for t in range(count):
                        logits[t] = math.exp(logits[t] - new_best)
                        tile_total += logits[t]
                    logits[count:filled] = 0
                    total[i] = total[i] * shrink + tile_total
                    best[i] = new_best
                    for d in range(head_dim):
                        sums[i, d] *= shrink
                    for t in range(0, filled, 4):
                        at0, at1, at2, at3 = slots[t], slots[t + 1], slots[t + 2], slots[t + 3]
                        w0, w1, w2, w3 = logits[t], logits[t + 1], logits[t + 2], logits[t + 3]
                        for d in range(head_dim):
                            sums[i, d] += (
                                w0 * values[at0, kv_head, d] + w1 * values[at1, kv_head, d]
                                + w2 * values[at2, kv_head, d] + w3 * values[at3, kv_head, d]
                            )  # fmt: skip
            for i in range(num_queries):
                share = np.float32(1) / total[i] if total[i] > 0 else np.float32(0)
                for d in range(head_dim):
                    output[row, first_head + i, d] = sums[i, d] * share

    return decode


@dataclass(slots=True)
class ReadPlan:
    """What the kernel reads beside query, K and V; the same in every layer of a step.

    block_tables: [n, M], filled up with zeros; context_lens: [n]; rows: [n], of the packed batch.
    """

    block_tables: np.ndarray
    context_lens: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> "ReadPlan":
        num_new = [stop - start for start, stop in pairwise(batch.query_start_loc)]
        # Threads take sequences in a row: dealt out by length, each gets its share of the work.
        decoding = [i for i, count in enumerate(num_new) if count == 1]
        decoding.sort(key=batch.context_lens.__getitem__)
        decoding = decoding[::2] + decoding[1::2]
        tables = [batch.block_tables[i] for i in decoding]
        filled = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int64)
        for row, table in enumerate(tables):
            filled[row, : len(table)] = table
        context_lens = [batch.context_lens[i] for i in decoding]
        rows = [batch.query_start_loc[i] for i in decoding]
        return cls(filled, np.array(context_lens, np.int64), np.array(rows, np.int64))


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
            self._groups = [group for group in groups if isinstance(group.rows, slice)]
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
                output.numpy(), query.contiguous().numpy(), keys.numpy(), values.numpy(),
                plan.block_tables, plan.context_lens, plan.rows, batch.block_size,
                np.float32(scaling), np.float32(softcap or 0), sliding_window or 0,
                num_kv_heads if enough else 1,
            )  # fmt: skip
        return output
