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
        input_ids: list[int] = []
        query_start_loc, last_token = [0], []
        for seq in sequences:
            input_ids += seq.scheduled_token_ids()
            query_start_loc.append(len(input_ids))
            if seq.is_sampled:
                last_token.append(len(input_ids) - 1)
        positions = np.concatenate([np.arange(s.num_computed, s.context_len) for s in sequences])
        slots = [
            slots_of(seq.block_table, block_size, seq.num_computed, seq.context_len)
            for seq in sequences
        ]
        return cls(
            input_ids=torch.tensor(input_ids, device=device),
            positions=torch.from_numpy(positions).to(device),
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
            query_start_loc=query_start_loc,
            context_lens=[seq.context_len for seq in sequences],
            block_tables=[seq.block_table for seq in sequences],
            block_size=block_size,
            last_token=torch.tensor(last_token, dtype=torch.long, device=device),
        )


def slots_of(block_table: SequenceOf[int], block_size: int, start: int, stop: int) -> np.ndarray:
    """The slots of tokens start to stop - 1, [stop - start], int64.

    slot = block_table[t // block_size] * block_size + t % block_size
    """
    tokens = np.arange(start, stop)
    first_block = start // block_size
    blocks = np.asarray(block_table[first_block : -(-stop // block_size)], dtype=np.int64)
    return blocks[tokens // block_size - first_block] * block_size + tokens % block_size
