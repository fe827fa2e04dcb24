"""From the parts of a context, as split_kernel leaves them, to attention over all of it.

That is exact: a part's softmax is right but for its share of the whole, and the share follows from
the sums of weights.
"""

import triton
import triton.language as tl


@triton.jit
def join_kernel(
    output, parts, log_sums, num_splits,
    head_dim: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """output: [S * query heads, head_dim]; parts, log_sums: as split_kernel leaves them.

    SPLITS: num_splits rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    at = row * num_splits + splits
    log_sum = tl.load(log_sums + at, mask=splits < num_splits, other=float("-inf"))
    best = tl.max(log_sum, 0)
    weights = tl.exp(log_sum - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, 0)
    is_part = (splits < num_splits)[:, None] & (dims < head_dim)[None, :]
    part = tl.load(parts + at[:, None] * head_dim + dims[None, :], mask=is_part, other=0.0)
    result = tl.sum(part * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * head_dim + dims, result, mask=dims < head_dim)
