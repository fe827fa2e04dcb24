"""What the kernels for a CPU share: tiles of the pool, memory they are loaded into, and exp."""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Sums may be taken in any order. NaN and infinity keep their meaning: -inf is "nothing yet".
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
LINE = 16  # float32 that a processor reads from memory at once, and that its widest register takes


@njit(nogil=True, cache=True)
def aligned_zeros(rows: Any, columns: Any) -> Any:
    """[rows, columns], float32, from a line's start on: with columns a multiple of LINE, what a
    register takes never lies in two lines."""
    memory = np.zeros(rows * columns + LINE, np.float32)
    first = -memory.ctypes.data // 4 % LINE
    return memory[first : first + rows * columns].reshape(rows, columns)


@intrinsic
def fetch_line(context: Any, array: Any, row: Any, column: Any) -> Any:
    """The processor begins to read the line of array[row, column], and nobody waits for it.

    Into the second cache: the nearest is full of what is being multiplied.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, (given, *place) = signature.args[0], arguments
        struct = context.make_array(kind)(context, builder, given)
        pointer = cgutils.get_item_pointer(context, builder, kind, struct, place)
        address, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        takes = ir.FunctionType(ir.VoidType(), [address, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address], takes)
        to_read, second_cache, data = flag(0), flag(2), flag(1)
        pointer = builder.bitcast(pointer, address)
        builder.call(prefetch, [pointer, to_read, second_cache, data])
        return context.get_dummy_value()

    return types.void(array, row, column), generate


@njit(nogil=True, cache=True)
def fetch(
    pool: Any, block_table: Any, start: Any, stop: Any, block_size: Any, first: Any, width: Any
) -> None:
    """fetch_line for K or V of tokens start to stop - 1; see load_tile."""
    for token in range(start, stop):
        slot = block_table[token // block_size] * block_size + token % block_size
        for column in range(first, first + width, LINE):
            fetch_line(pool, slot, column)  # type: ignore[call-arg]


@njit(nogil=True, cache=True)
def load_tile(
    tile: Any, pool: Any, block_table: Any, start: Any, block_size: Any, first: Any
) -> None:
    """Copies K or V of `count` tokens, from token `start` and column `first` of the pool on.

    tile: [count, columns]; pool: [num_slots, num_kv_heads * head_dim]; block_table: [M].
    The loops of a kernel go to and fro between tokens. Memory is read faster in its own order,
    into the core's cache; a GPU kernel uses its shared memory in the same way.
    """
    count, width = tile.shape
    for t in range(count):
        token = start + t
        slot = block_table[token // block_size] * block_size + token % block_size
        source, target = pool[slot, first : first + width], tile[t]
        for column in range(width):
            target[column] = source[column]


# 2**x = sum of (x log 2)**n / n!; for x in [-1/2, 1/2] float32 needs no more of it than this.
SERIES = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(6, -1, -1))
LOG2_E = np.float32(1 / math.log(2))
SMALLEST = np.float32(-126)  # the smallest power of two in float32


@intrinsic
def with_bits(context: Any, bits: Any) -> Any:
    """The float32 whose 32 bits are those of this int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(fastmath=FASTMATH, nogil=True, cache=True)
def exp_of_negative(x: Any) -> Any:
    """exp(x) for an x of 0 or less, float32; below exp(-87) it stays there. Off by (1 - x) * 2e-7
    of it, as x * LOG2_E is rounded.

    The system's library takes one number at a time. This is without branches, so in a loop the
    compiler takes eight or sixteen.
    """
    y = x * LOG2_E
    if y < SMALLEST:  # and not max(): NaN must stay
        y = SMALLEST
    whole = np.int32(y - np.float32(0.5))  # the nearest, as y is not positive
    rest = y - np.float32(whole)
    found = SERIES[0]
    for factor in SERIES[1:]:
        found = found * rest + factor
    # 2**whole: only its exponent differs from that of 1.
    return found * with_bits(np.int32((whole + 127) << 23))  # type: ignore[call-arg]
