"""NumbaAttention: the algorithm of the Triton kernels, compiled for the processor at hand.

K and V are read through the block table, a tile of tokens at a time, without a gather.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.batch import Batch
from minivllm.errors import ModelError
from minivllm.heap import return_free_memory

try:
    import numba
except ImportError as error:
    raise ModelError(
        "numba is not installed: pip install numba, or use --attention gather"
    ) from error

from minivllm.attention.numba_decode import decode_kernel
from minivllm.attention.numba_prefill import prefill_kernel, tokens_per_task


def run(kernel: Any, *arguments: Any) -> None:
    """Calls a kernel. The first call compiles it, and the compiler leaves holes in the heap."""
    num_compiled = len(kernel.signatures)
    kernel(*arguments)
    if len(kernel.signatures) > num_compiled:
        return_free_memory()


def dealt(tasks: Iterable[tuple[int, ...]], num_hands: int) -> np.ndarray:
    """[values of a task, tasks], int64; a task's first value says how much there is to do.

    Threads take tasks one behind another, equally many each. So they are dealt like cards, the
    largest first, and in each second turn from the last hand to the first.
    """
    hands: list[list[tuple[int, ...]]] = [[] for _ in range(num_hands)]
    for number, task in enumerate(sorted(tasks, reverse=True)):
        turn, place = divmod(number, num_hands)
        hands[place if turn % 2 == 0 else -1 - place].append(task)
    return np.ascontiguousarray(np.array([task for hand in hands for task in hand], np.int64).T)


@dataclass(slots=True)
class ReadPlan:
    """What the kernels read beside query, K and V; the same in every layer of a step.

    block_tables: [S, M], filled up with zeros.
    decoding: (context_len, row of the packed batch, sequence) of each that has one new token.
    prompts: (context_len, new tokens, first row, sequence, KV head) of each task; a longer prompt
    is several, each of which sees the tokens up to its own last.
    """

    block_tables: np.ndarray
    decoding: np.ndarray
    prompts: np.ndarray

    @classmethod
    def of(cls, batch: Batch, num_kv_heads: int, group_size: int, num_threads: int) -> "ReadPlan":
        tables = batch.block_tables
        filled = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int64)
        decoding, prompts = [], []
        for i, (start, stop) in enumerate(pairwise(batch.query_start_loc)):
            filled[i, : len(tables[i])] = tables[i]
            context_len = batch.context_lens[i]
            if stop - start == 1:
                decoding.append((context_len, start, i))
                continue
            step = tokens_per_task(group_size)
            for first in range(start, stop, step):
                end = min(first + step, stop)
                task = context_len - (stop - end), end - first, first, i
                prompts += [(*task, kv_head) for kv_head in range(num_kv_heads)]
        return cls(filled, dealt(decoding, num_threads), dealt(prompts, num_threads))


class NumbaAttention:
    """A reader for a pool of blocks in float32 on a CPU; see slice_attention for the shapes."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
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
        num_kv_heads, head_dim = keys.shape[1:]
        group_size = query.shape[1] // num_kv_heads
        if batch is not self._batch:
            self._batch = batch
            self._plan = ReadPlan.of(batch, num_kv_heads, group_size, self._num_threads)
        plan, output = self._plan, torch.empty(query.shape)
        tensors = output, query.contiguous(), keys.flatten(1), values.flatten(1)
        arrays = [tensor.numpy() for tensor in tensors] + [plan.block_tables]
        limits = np.float32(scaling), np.float32(softcap or 0), sliding_window or 0
        if plan.decoding.size:
            context_lens, rows, sequences = plan.decoding
            # All KV heads of a token lie in a row: one task reads them all, unless there are too
            # few sequences to keep each thread busy.
            enough = len(rows) >= 2 * self._num_threads
            run(
                decode_kernel(group_size, head_dim), *arrays, sequences, rows, context_lens,
                batch.block_size, *limits, num_kv_heads if enough else 1,
            )  # fmt: skip
        if plan.prompts.size:
            context_lens, counts, rows, sequences, kv_heads = plan.prompts
            run(
                prefill_kernel(group_size, head_dim), *arrays, sequences, rows, context_lens,
                batch.block_size, *limits, counts, kv_heads,
            )  # fmt: skip
        return output
