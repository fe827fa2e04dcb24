"""Reading K and V of a contiguous region: a slice of the pool, nothing copied."""

import torch
from torch import Tensor

from minivllm.attention.batch import Batch
from minivllm.attention.dense import attend_one_sequence


def slice_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of every new token over its own sequence, cached and new tokens alike.

    query: [T, num_query_heads, head_dim]; keys, values: [num_slots, num_kv_heads, head_dim], in
    which the new tokens are written already. Returns [T, num_query_heads, head_dim].
    """
    output = torch.empty_like(query)
    for i, (block_table, context_len) in enumerate(
        zip(batch.block_tables, batch.context_lens, strict=True)
    ):
        new = slice(batch.query_start_loc[i], batch.query_start_loc[i + 1])
        region = slice(block_table[0], block_table[0] + context_len)
        output[new] = attend_one_sequence(
            query[new], keys[region], values[region],
            scaling=scaling, sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
    return output
