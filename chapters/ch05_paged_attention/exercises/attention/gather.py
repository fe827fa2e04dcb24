# Exercise 5.3: gather (GatherAttention._gather).
# Exercise 5.4: the mask of a batch that decodes (decode_mask).
# Test with: python -m pytest tests/ch05_paged_attention --impl work

"""Reading K and V through block tables by a gather: blocks are copied side by side, then read.

The copy is what a kernel that walks the block table saves. Otherwise it is PagedAttention: the
same mathematics, K and V found another way (Kwon et al., SOSP 2023).
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.batch import Batch
from minivllm.attention.dense import attend, attend_one_sequence


@dataclass(slots=True)
class ReadGroup:
    """Sequences that are read together: n that decode, or one with any number of new tokens.

    rows: their rows of the packed batch. blocks: [n * M], the block tables behind one another,
    each filled up to M entries with somebody's block. context_lens: [n]. unused: [U], the gathered
    slots that hold no token of theirs, counted over all n * M * block_size.
    """

    rows: Tensor | slice
    blocks: Tensor
    context_lens: Tensor
    unused: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window


class GatherAttention:
    """A reader for a pool of blocks; see slice_attention for the shapes.

    Keeps what does not change from layer to layer of a step, and two buffers that grow to the
    largest gather so far: one object serves one runner.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._groups: list[ReadGroup] = []
        self._buffers: list[Tensor | None] = [None, None]

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
            self._batch, self._groups = batch, read_groups(batch, query.device)
        output = torch.empty_like(query)
        for group in self._groups:
            key = self._gather(0, keys, group, batch.block_size)
            value = self._gather(1, values, group, batch.block_size)
            if len(group.context_lens) == 1:
                output[group.rows] = attend_one_sequence(
                    query[group.rows],
                    key[0],
                    value[0],
                    scaling=scaling,
                    sliding_window=sliding_window,
                    softcap=softcap,
                )
                continue
            # The query heads that share a KV head become the queries of one attention problem.
            grouped = query[group.rows].unflatten(1, (key.shape[2], -1))
            attended = attend(
                grouped,
                key.transpose(1, 2),
                value.transpose(1, 2),
                decode_mask(group, key.shape[1], sliding_window),
                scaling=scaling,
                softcap=softcap,
            )
            output[group.rows] = attended.flatten(1, 2)
        return output

    def _gather(self, which: int, stored: Tensor, group: ReadGroup, block_size: int) -> Tensor:
        """Their blocks of `stored`, side by side: [n, M * block_size, num_kv_heads, head_dim].

        For one sequence cut to its context. Whole blocks are copied, which is faster than slots.
        """
        # A mask is not enough: the weight of an unused slot is 0, and 0 * NaN is NaN.
        raise NotImplementedError("exercise 5.3: GatherAttention._gather")


def read_groups(batch: Batch, device: torch.device) -> list[ReadGroup]:
    """Who is read together. Sequences that decode are, unless one is twice as long as another:
    padding the shorter ones to the longest must not cost more than another call."""
    groups, decoding = [], []
    for i, (start, stop) in enumerate(pairwise(batch.query_start_loc)):
        if stop - start == 1:
            decoding.append(i)
        else:
            groups.append(read_group(batch, [i], slice(start, stop), device))
    decoding.sort(key=batch.context_lens.__getitem__, reverse=True)
    while decoding:
        longest = batch.context_lens[decoding[0]]
        count = sum(2 * batch.context_lens[i] >= longest for i in decoding)
        together, decoding = decoding[:count], decoding[count:]
        rows = torch.tensor([batch.query_start_loc[i] for i in together], device=device)
        groups.append(read_group(batch, together, rows, device))
    return groups


def read_group(
    batch: Batch, sequences: SequenceOf[int], rows: Tensor | slice, device: torch.device
) -> ReadGroup:
    block_size = batch.block_size
    context_lens = np.array([batch.context_lens[i] for i in sequences])
    num_blocks = -(-context_lens // block_size)
    # A table may have more blocks than are in use by now. What fills it up is never looked at.
    blocks = np.zeros((len(sequences), num_blocks.max()), dtype=np.int64)
    for row, i in enumerate(sequences):
        blocks[row, : num_blocks[row]] = batch.block_tables[i][: num_blocks[row]]
    used = np.arange(blocks.shape[1] * block_size) < context_lens[:, None]
    return ReadGroup(
        rows,
        torch.from_numpy(blocks.ravel()).to(device),
        torch.from_numpy(context_lens).to(device),
        torch.from_numpy(np.flatnonzero(~used)).to(device),
    )


def decode_mask(group: ReadGroup, num_slots: int, sliding_window: int | None) -> Tensor:
    """[n, 1, 1, num_slots], True where the one new token of each sequence may look."""
    raise NotImplementedError("exercise 5.4: decode_mask")
