# Exercise 6.1: softmax in one pass, in NumPy (online_attention).
# Test with: python -m pytest tests/ch06_triton_kernel --impl work

"""Attention in one pass over the tokens, in NumPy: what the Triton kernels do, for one query."""

import numpy as np
from numpy import ndarray


def online_attention(query: ndarray, keys: ndarray, values: ndarray, tile: int) -> ndarray:
    """softmax(keys @ query) @ values, looking at `tile` tokens at a time and at each once.

    query: [head_dim]; keys, values: [num_tokens, head_dim]. Returns [head_dim], zeros for no token.
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    # What was summed up so far was measured from the old best: measure it from the new one.
    raise NotImplementedError("exercise 6.1: online_attention")


def join(outputs: ndarray, log_sums: ndarray) -> ndarray:
    """Joins the attention over several parts of a context into that over all of it.

    outputs: [num_parts, head_dim], each part's own attention; log_sums: [num_parts], the logarithm
    of each part's sum of exp(logit), -inf for a part without tokens. Returns [head_dim].
    """
    best = log_sums.max()
    if best == -np.inf:
        return np.zeros(outputs.shape[1])
    weights = np.exp(log_sums - best)
    return weights @ outputs / weights.sum()
