"""TritonAttention: the reader whose kernels walk the block table; on a CPU, in the interpreter."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.batch import Batch
from minivllm.errors import ModelError

try:
    import triton
    import triton.language as tl
except ImportError as error:  # no wheel for this system
    raise ModelError("triton is not installed: use --attention gather") from error

from minivllm.attention.triton_decode import decode_kernel
from minivllm.attention.triton_join import join_kernel
from minivllm.attention.triton_prefill import prefill_kernel
from minivllm.attention.triton_split import split_kernel

INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)
# How the kernels are launched; kernel_report compiles them just so.
PREFILL_ROWS = 64
NUM_WARPS = {"decode": 4, "prefill": 8, "split": 4, "join": 4, "write": 1}
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def tile_size(head_dim: int, itemsize: int) -> int:
    """Tokens of a tile: more would spill registers."""
    return 32 if head_dim > 128 or itemsize > 2 else 64


@dataclass(slots=True)
class ReadPlan:
    """What the kernels read beside query, K and V; the same in every layer of a step.

    block_tables: int32 [S, M]; context_lens: int32 [S]; query_start_loc: int32 [S + 1];
    longest: tokens of the longest context; tiles: (sequence, first row) of each tile of rows, for a
    batch in which somebody has several new tokens, else None.
    """

    block_tables: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    longest: int
    tiles: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, batch: Batch, group_size: int, rows: int, device: torch.device) -> "ReadPlan":
        lengths = [len(table) for table in batch.block_tables]
        tables = np.zeros((len(lengths), max(lengths)), dtype=np.int32)
        for row, table in enumerate(batch.block_tables):
            tables[row, : len(table)] = table
        num_new = [stop - start for start, stop in pairwise(batch.query_start_loc)]
        tiles = None
        if max(num_new) > 1:
            pairs = [
                (sequence, start)
                for sequence, count in enumerate(num_new)
                for start in range(0, count * group_size, rows)
            ]
            both = torch.tensor(pairs, dtype=torch.int32, device=device)
            tiles = both[:, 0].contiguous(), both[:, 1].contiguous()
        return cls(
            torch.from_numpy(tables).to(device),
            torch.tensor(batch.context_lens, dtype=torch.int32, device=device),
            torch.tensor(batch.query_start_loc, dtype=torch.int32, device=device),
            max(batch.context_lens),
            tiles,
        )


class TritonAttention:
    """A reader for a pool of blocks; see slice_attention for the shapes.

    num_splits: parts that a decoded context is split into; None: as many as keep the GPU busy.
    """

    def __init__(self, num_splits: int | None = None) -> None:
        if not INTERPRETED and not torch.cuda.is_available():
            # Triton decides when it is imported; transformers imports it, too.
            raise ModelError(
                "triton needs a GPU, or its interpreter, which is slow: set the environment "
                "variable TRITON_INTERPRET to 1 before Python starts, or use --attention gather"
            )
        self.num_splits = num_splits
        self._batch: Batch | None = None
        self._plan: ReadPlan | None = None

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
        query = query.contiguous()
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = keys.shape[1]
        group_size = num_heads // num_kv_heads
        prefill_rows = 16 if INTERPRETED else PREFILL_ROWS
        if self._plan is None or batch is not self._batch:
            self._batch = batch
            self._plan = ReadPlan.of(batch, group_size, prefill_rows, query.device)
        plan = self._plan
        output = torch.empty_like(query)
        common: dict[str, Any] = {
            "scaling": scaling,
            "softcap": softcap or 0.0,
            "window": sliding_window or 0,
            "query_stride": query.stride(0),
            "table_stride": plan.block_tables.stride(0),
            "slot_stride": keys.stride(0),
            "head_stride": keys.stride(1),
            "block_size": batch.block_size,
            "group_size": group_size,
            "head_dim": head_dim,
            "DIMS": max(16, triton.next_power_of_2(head_dim)),
            "TILE": tile_size(head_dim, keys.itemsize),
            "CAPPED": softcap is not None,
            "WINDOWED": sliding_window is not None,
            # The interpreter computes bfloat16 wrongly; in it everything is float32.
            "DTYPE": tl.float32 if INTERPRETED else DTYPES[keys.dtype],
        }
        inputs = (query, keys, values, plan.block_tables, plan.context_lens)
        if plan.tiles is not None:
            grid: tuple[int, ...] = (len(plan.tiles[0]), num_kv_heads)
            prefill_kernel[grid](
                output, *inputs, plan.query_start_loc, *plan.tiles,
                ROWS=prefill_rows, num_warps=NUM_WARPS["prefill"], **common,
            )  # fmt: skip
            return output
        rows = max(16, triton.next_power_of_2(group_size))
        num_splits = self.num_splits or splits_for(len(query) * num_kv_heads, plan.longest)
        if num_splits == 1:
            decode_kernel[len(query), num_kv_heads](output, *inputs, ROWS=rows, **common)
            return output
        parts = query.new_empty((len(query), num_heads, num_splits, head_dim), dtype=torch.float32)
        log_sums = parts.new_empty(parts.shape[:3])
        split_kernel[len(query), num_kv_heads, num_splits](
            parts, log_sums, *inputs, num_heads=num_heads, ROWS=rows, **common
        )
        join_kernel[(len(query) * num_heads,)](
            output, parts, log_sums, num_splits,
            head_dim=head_dim, DIMS=common["DIMS"], SPLITS=triton.next_power_of_2(num_splits),
        )  # fmt: skip
        return output


def splits_for(num_programs: int, longest: int) -> int:
    """How many parts a context is split into, so that every multiprocessor has two programs."""
    if not torch.cuda.is_available():
        return 1
    num_processors = torch.cuda.get_device_properties().multi_processor_count
    return max(1, min(2 * num_processors // num_programs, longest // 256, 32))
