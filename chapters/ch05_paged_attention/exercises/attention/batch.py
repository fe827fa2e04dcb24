# Exercise 5.2: what the runner tells attention (Batch.of, slots_of).
# Test with: python -m pytest tests/ch05_paged_attention --impl work

"""Batch: one step as the tensors that a forward pass needs."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """All scheduled tokens behind one another, S sequences and T tokens, built once per step.

    input_ids, positions: [T]; a token's position in its own sequence.
    slot_mapping: [T]; where each token's K and V are written.
    query_start_loc: S + 1 numbers; sequence i has the tokens query_start_loc[i] to [i + 1].
    context_lens: S numbers; tokens of the sequence after this step, all of which it may see.
    block_tables: S block tables, as the KV cache manager keeps them.
    last_token: [number sampled]; the rows of this batch after which a next token is drawn.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: list[int]
    context_lens: list[int]
    block_tables: list[SequenceOf[int]]
    block_size: int
    last_token: Tensor

    @classmethod
    def of(cls, sequences: list[Sequence], block_size: int, device: torch.device) -> "Batch":
        raise NotImplementedError("exercise 5.2: Batch.of")


def slots_of(block_table: SequenceOf[int], block_size: int, start: int, stop: int) -> np.ndarray:
    """The slots of tokens start to stop - 1, [stop - start], int64.

    slot = block_table[t // block_size] * block_size + t % block_size
    """
    raise NotImplementedError("exercise 5.2: slots_of")
