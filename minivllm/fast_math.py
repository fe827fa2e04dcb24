"""Two small functions of every layer, each in one pass over its numbers; with numba, else torch.

torch needs five calls for the first and six for the second, and at a few tokens the calls are what
takes the time.
"""

import importlib.util
import math

import torch
from torch import Tensor

FEW = 64  # rows that may lie in any order


def in_order(x: Tensor) -> Tensor:
    """x, row by row in memory if it has many rows. With a few the copy would not pay."""
    return x if len(x) <= FEW else x.contiguous()


def rms_norm_by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / root(mean of squares + eps) * weight, for each row of x [rows, width]."""
    return torch.rms_norm(x, (x.shape[1],), weight, eps)


def rotate_by_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, head_dim]; cos, sin: [tokens, head_dim]."""
    half = x.shape[2] // 2
    turned = torch.cat((x[..., half:].neg(), x[..., :half]), -1)
    return x * cos[:, None] + turned * sin[:, None]


def add_and_norm_by_torch(
    total: Tensor, x: Tensor, change: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """x + change, which is written into total, and normed; all of them [rows, width]."""
    torch.add(x, change, out=total)
    return rms_norm_by_torch(total, weight, eps)


rms_norm, rotate, add_and_norm = rms_norm_by_torch, rotate_by_torch, add_and_norm_by_torch

if importlib.util.find_spec("numba"):
    from numba import njit

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, cache=True)
    def rms_norm_into(output, x, weight, eps):
        rows, width = x.shape
        for row in range(rows):
            squares = weight.dtype.type(0)
            for i in range(width):
                squares += x[row, i] * x[row, i]
            scale = weight.dtype.type(1 / math.sqrt(squares / width + eps))
            for i in range(width):
                output[row, i] = x[row, i] * scale * weight[i]

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, cache=True)
    def add_and_norm_into(output, total, x, change, weight, eps):
        rows, width = x.shape
        for row in range(rows):
            for i in range(width):
                total[row, i] = x[row, i] + change[row, i]
            squares = weight.dtype.type(0)
            for i in range(width):
                squares += total[row, i] * total[row, i]
            scale = weight.dtype.type(1 / math.sqrt(squares / width + eps))
            for i in range(width):
                output[row, i] = total[row, i] * scale * weight[i]

    @njit(fastmath={"contract"}, nogil=True, cache=True)
    def rotate_into(output, x, cos, sin):
        tokens, heads, head_dim = x.shape
        half = head_dim // 2
        for token in range(tokens):
            for head in range(heads):
                for i in range(half):
                    low, high = x[token, head, i], x[token, head, i + half]
                    output[token, head, i] = low * cos[token, i] - high * sin[token, i]
                    output[token, head, i + half] = (
                        high * cos[token, i + half] + low * sin[token, i + half]
                    )

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        rms_norm_into(output.numpy(), x.contiguous().numpy(), weight.detach().numpy(), eps)
        return output

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        rotate_into(output.numpy(), in_order(x).numpy(), cos.numpy(), sin.numpy())
        return output

    def add_and_norm(
        total: Tensor, x: Tensor, change: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        output = torch.empty_like(total)
        add_and_norm_into(
            output.numpy(),
            total.numpy(),
            x.numpy(),
            in_order(change).numpy(),
            weight.detach().numpy(),
            eps,
        )
        return output
