"""Dense attention over K and V that lie side by side: the mathematics that all readers share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 192  # queries of a prompt that are looked at together on a CPU


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    *, scaling: float, softcap: float | None = None, is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(scaling * query @ key) @ value; the logits are capped first where a model says so.

    query: [n, num_query_heads, num_queries, head_dim]; key, value: [n, num_kv_heads, L, head_dim];
    mask: broadcasts to [n, num_query_heads, num_queries, L], True where a query may look.
    Query head h reads KV head h // (num_query_heads // num_kv_heads). Returns query's shape.
    """
    group_size = query.shape[1] // key.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scaling, enable_gqa=group_size > 1
        )
    key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
    logits = softcap * torch.tanh(query @ key.mT * scaling / softcap)
    if is_causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def attend_one_sequence(
    query: Tensor, key: Tensor, value: Tensor,
    *, scaling: float, sliding_window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The new tokens of one sequence over all of its tokens, cached and new alike.

    query: [num_new, num_query_heads, head_dim]; key, value: [context_len, num_kv_heads, head_dim],
    of which the last num_new are the new tokens' own. Returns query's shape.
    """
    num_new, context_len = len(query), len(key)
    if num_new > PIECE and query.device.type == "cpu":
        # Torch multiplies the whole square of queries and keys, in blocks of 512 keys, and drops
        # the later half. In pieces, most of that half is not computed.
        before = context_len - num_new
        limits: Any = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        ends = range(before + PIECE, context_len + PIECE, PIECE)
        pieces = zip(query.split(PIECE), ends, strict=True)
        return torch.cat([attend_one_sequence(q, key[:n], value[:n], **limits) for q, n in pieces])
    sees_all = sliding_window is None or context_len <= sliding_window
    # A whole prompt is the one case in which torch's is_causal is right: it lines up the first
    # query with the first key.
    whole = num_new == context_len and sees_all
    mask = None
    if not whole and not (num_new == 1 and sees_all):
        mask = causal_mask(num_new, context_len, sliding_window, query.device)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output = attend(query, key, value, mask, scaling=scaling, softcap=softcap, is_causal=whole)
    return output[0].transpose(0, 1)


def causal_mask(
    num_new: int, context_len: int, sliding_window: int | None, device: torch.device
) -> Tensor:
    """[num_new, context_len], True where the new token may look.

    The last of the new tokens is the last of the context.
    """
    query_positions = torch.arange(context_len - num_new, context_len, device=device)[:, None]
    key_positions = torch.arange(context_len, device=device)[None]
    mask = key_positions <= query_positions
    if sliding_window is not None:
        mask &= key_positions > query_positions - sliding_window
    return mask
