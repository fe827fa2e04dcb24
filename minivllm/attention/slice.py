"""Reading K and V of a contiguous region: a slice of the pool, nothing copied."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.batch import Batch


def slice_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    *,
    scaling: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention of every new token over its own sequence, cached and new tokens alike.

    query: [T, num_query_heads, head_dim]; keys, values: [num_slots, num_kv_heads, head_dim], in
    which the new tokens are written already. Returns [T, num_query_heads, head_dim].
    """
    output = torch.empty_like(query)
    for i, (block_table, context_len) in enumerate(
        zip(batch.block_tables, batch.context_lens, strict=True)
    ):
        start, stop = batch.query_start_loc[i], batch.query_start_loc[i + 1]
        region = slice(block_table[0], block_table[0] + context_len)
        output[start:stop] = F.scaled_dot_product_attention(
            query[start:stop].transpose(0, 1)[None],
            keys[region].transpose(0, 1)[None],
            values[region].transpose(0, 1)[None],
            attn_mask=causal_mask(stop - start, context_len, sliding_window, query.device),
            scale=scaling,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return output


def causal_mask(
    num_new: int, context_len: int, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """[num_new, context_len], True where the new token may look; None when it may look at all.

    The last of the new tokens is the last of the context. (torch's is_causal aligns the first
    ones instead, which is wrong as soon as anything is cached.)
    """
    if num_new == 1 and (sliding_window is None or context_len <= sliding_window):
        return None
    query_positions = torch.arange(context_len - num_new, context_len, device=device)[:, None]
    key_positions = torch.arange(context_len, device=device)[None]
    mask = key_positions <= query_positions
    if sliding_window is not None:
        mask &= key_positions > query_positions - sliding_window
    return mask
