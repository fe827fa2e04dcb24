"""Writing K and V by slot mapping: one program per new token."""

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    keys, values, key, value, slot_mapping, key_stride, value_stride, slot_stride,
    width: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """keys, values: [slots, width] with slot_stride; key, value: [T, width]; slot_mapping: [T].

    width: KV heads * head_dim; WIDTH: the next power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    k = tl.load(key + token * key_stride + at, mask=inside, other=0.0)
    v = tl.load(value + token * value_stride + at, mask=inside, other=0.0)
    tl.store(keys + slot * slot_stride + at, k, mask=inside)
    tl.store(values + slot * slot_stride + at, v, mask=inside)
