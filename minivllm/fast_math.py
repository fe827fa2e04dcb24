"""Two small functions of every layer, each in one pass over its numbers; with numba, else torch.

torch needs five calls for the first and six for the second, and at a few tokens the calls are what
takes the time.
"""

import importlib.util
import math

import torch
from torch import Tensor

FEW = 64  # rows that may lie in any order, and that one thread computes


def in_order(x: Tensor) -> Tensor:
    """x, row by row in memory if it has many rows. With a few the copy would not pay."""
    return x if len(x) <= FEW else x.contiguous()


def num_parts(x: Tensor) -> int:
    """Each part of the rows is a thread's. With a few rows, to wake another would not pay."""
    return 1 if len(x) <= FEW else torch.get_num_threads()


def rms_norm_by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / root(mean of squares + eps) * weight, for each row of x [rows, width]."""
    return torch.rms_norm(x, (x.shape[1],), weight, eps)


def rotate_by_torch(
    x: Tensor, cos: Tensor, sin: Tensor, start: int = 0, stop: int | None = None
) -> Tensor:
    """Rotary embedding of heads start to stop - 1 of x [tokens, heads, head_dim], row by row in
    memory; cos, sin: [tokens, head_dim]."""
    x = x[:, start:stop]
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
    from numba import njit, prange

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

    @njit(parallel=True, nogil=True, cache=True)
    def rms_norm_in_parts(output, x, weight, eps, parts):
        rows = len(x)
        for part in prange(parts):
            start, stop = part * rows // parts, (part + 1) * rows // parts
            rms_norm_into(output[start:stop], x[start:stop], weight, eps)

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
    def rotate_into(output, x, cos, sin, first_head):
        tokens, heads, head_dim = output.shape
        half = head_dim // 2
        for token in range(tokens):
            for head in range(heads):
                numbers, turned = x[token, first_head + head], output[token, head]
                for i in range(half):
                    low, high = numbers[i], numbers[i + half]
                    turned[i] = low * cos[token, i] - high * sin[token, i]
                    turned[i + half] = high * cos[token, i + half] + low * sin[token, i + half]

    @njit(parallel=True, nogil=True, cache=True)
    def rotate_in_parts(output, x, cos, sin, first_head, parts):
        tokens = len(x)
        for part in prange(parts):
            start, stop = part * tokens // parts, (part + 1) * tokens // parts
            rotate_into(
                output[start:stop], x[start:stop], cos[start:stop], sin[start:stop], first_head
            )

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        arrays = output.numpy(), x.contiguous().numpy(), weight.detach().numpy(), eps
        if (parts := num_parts(x)) == 1:
            rms_norm_into(*arrays)
        else:
            rms_norm_in_parts(*arrays, parts)
        return output

    def rotate(
        x: Tensor, cos: Tensor, sin: Tensor, start: int = 0, stop: int | None = None
    ) -> Tensor:
        tokens, heads, head_dim = x.shape
        output = x.new_empty(tokens, (heads if stop is None else stop) - start, head_dim)
        arrays = output.numpy(), in_order(x).numpy(), cos.numpy(), sin.numpy(), start
        if (parts := num_parts(x)) == 1:
            rotate_into(*arrays)
        else:
            rotate_in_parts(*arrays, parts)
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
