# Exercise 6.3: joining the parts (join_kernel).
# Test with: python -m pytest tests/ch06_triton_kernel --impl work

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
    tl.static_assert(False, "exercise 6.3: join_kernel")
