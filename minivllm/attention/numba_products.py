"""Products of small matrices: a block of the result stays in registers while it is summed up.

What a compiler makes of three nested loops writes each sum to memory after a few terms and reads it
again. Here a block of sums is as large as the registers allow, and is written once.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# AVX-512 has 32 registers of 16 numbers, AVX2 16 of 8. A block's sums fill most of them; a row of
# b, and a number of a, need some too.
VECTOR, ROWS, VECTORS = (16, 8, 3) if llvm.get_host_cpu_features().get("avx512f") else (8, 4, 3)
COLUMNS = VECTOR * VECTORS  # of a block

VECTOR_TYPE = ir.VectorType(ir.FloatType(), VECTOR)
INDEX_TYPE = ir.IntType(32)
ALIGN = 4 * VECTOR  # bytes
ONE_INSTRUCTION = ("contract",)  # for a product and the sum that it goes into

# Gives a block's first sums: builder, their place in memory, and the scale of their columns.
FirstSums = Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]


def block_product(first_sums: FirstSums) -> Any:
    """A function for compiled code, block(out, row, column, a, first, row_step, step, b, count,
    scale), which sets ROWS x COLUMNS numbers of out from (row, column) on:

    out[row + r, column + c] = first sum + sum over k < count of A[r, k] * b[k, column + c]

    A[r, k] is number first + r * row_step + k * step of a, so a may be read turned. out, b: from
    aligned_zeros, with rows of a multiple of COLUMNS; column: a multiple of COLUMNS; a: C order;
    scale: [columns of out], from aligned_zeros too. All are float32, and nothing is checked.
    """

    @intrinsic
    def block(
        context: Any, out: Any, row: Any, column: Any, a: Any, first: Any, row_step: Any,
        step: Any, b: Any, count: Any, scale: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            out, row, column, a, first, row_step, step, b, count, scale = (
                context.make_array(kind)(context, builder, given)
                if isinstance(kind, types.Array)
                else context.cast(builder, given, kind, types.intp)
                for kind, given in zip(signature.args, arguments, strict=True)
            )

            def vector_at(array: Any, index: Any) -> Any:
                pointer = builder.gep(array.data, [index])
                return builder.bitcast(pointer, VECTOR_TYPE.as_pointer())

            def in_row(array: Any, number: Any, column: Any) -> Any:
                width = cgutils.unpack_tuple(builder, array.shape)[1]
                return vector_at(array, builder.add(builder.mul(number, width), column))

            columns = [builder.add(column, row.type(VECTOR * v)) for v in range(VECTORS)]
            places, sums = {}, {}
            for r in range(ROWS):
                for v in range(VECTORS):
                    number = builder.add(row, row.type(r))
                    places[r, v] = in_row(out, number, columns[v])
                    sums[r, v] = cgutils.alloca_once(builder, VECTOR_TYPE)
                    before = first_sums(builder, places[r, v], vector_at(scale, columns[v]))
                    builder.store(before, sums[r, v])
            with cgutils.for_range(builder, count) as loop:
                terms = [builder.load(in_row(b, loop.index, c), align=ALIGN) for c in columns]
                start = builder.add(first, builder.mul(loop.index, step))
                for r in range(ROWS):
                    index = builder.add(start, builder.mul(row_step, row.type(r)))
                    factor = repeated(builder, builder.load(builder.gep(a.data, [index])))
                    for v in range(VECTORS):
                        product = builder.fmul(factor, terms[v], flags=ONE_INSTRUCTION)
                        total = builder.load(sums[r, v])
                        total = builder.fadd(total, product, flags=ONE_INSTRUCTION)
                        builder.store(total, sums[r, v])
            for which, place in places.items():
                builder.store(builder.load(sums[which]), place, align=ALIGN)
            return context.get_dummy_value()

        given = out, row, column, a, first, row_step, step, b, count, scale
        return types.void(*given), generate

    return block


def repeated(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """The number in each place of a vector."""
    empty = ir.Constant(VECTOR_TYPE, ir.Undefined)
    first = builder.insert_element(empty, number, INDEX_TYPE(0))
    all_first = ir.Constant(ir.VectorType(INDEX_TYPE, VECTOR), [0] * VECTOR)
    return builder.shuffle_vector(first, empty, all_first)


def zeros(builder: ir.IRBuilder, place: ir.Value, scale: ir.Value) -> ir.Value:
    return ir.Constant(VECTOR_TYPE, [0.0] * VECTOR)


def scaled(builder: ir.IRBuilder, place: ir.Value, scale: ir.Value) -> ir.Value:
    """What out has, times the scale."""
    return builder.fmul(builder.load(place, align=ALIGN), builder.load(scale, align=ALIGN))


# set_block has no use for the scale.
set_block = block_product(zeros)
add_to_block = block_product(scaled)
