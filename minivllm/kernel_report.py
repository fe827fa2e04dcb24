"""kernel_report: what the compiler makes of each kernel, for GPUs that need not be there.

Triton compiles for a named target without a GPU; the disassembler that comes in its wheel (for
NVIDIA) and the assembly text (for AMD) say the rest.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minivllm.attention.triton_attention import NUM_WARPS, PREFILL_ROWS, tile_size
from minivllm.attention.triton_decode import decode_kernel
from minivllm.attention.triton_join import join_kernel
from minivllm.attention.triton_prefill import prefill_kernel
from minivllm.attention.triton_split import split_kernel
from minivllm.attention.triton_write import write_kernel
from minivllm.errors import ModelError, RequestError

KERNELS = {
    "decode": decode_kernel,
    "prefill": prefill_kernel,
    "split": split_kernel,
    "join": join_kernel,
    "write": write_kernel,
}
DTYPES = {"bfloat16": (tl.bfloat16, "bf16"), "float16": (tl.float16, "fp16")}


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU and its limits. shared: bytes for one program, and for a multiprocessor; registers:
    for each lane of it; bandwidth in bytes/s and dense bfloat16 arithmetic in operations/s, both
    as the vendor states them."""

    gpu: GPUTarget
    device: str
    shared: int
    shared_all: int
    registers: int
    max_warps: int
    bandwidth: float
    arithmetic: float


KIB = 1024
TARGETS = {
    "sm_80": Target(
        GPUTarget("cuda", 80, 32), "A100 80 GB", 163 * KIB, 164 * KIB, 65_536, 64, 2.039e12, 312e12
    ),
    "sm_90": Target(
        GPUTarget("cuda", 90, 32), "H100 SXM", 227 * KIB, 228 * KIB, 65_536, 64, 3.35e12, 989e12
    ),
    "sm_100": Target(
        GPUTarget("cuda", 100, 32), "B200", 227 * KIB, 228 * KIB, 65_536, 64, 8.0e12, 2250e12
    ),
    "gfx942": Target(
        GPUTarget("hip", "gfx942", 64), "MI300X", 64 * KIB, 64 * KIB, 131_072, 32, 5.3e12, 1307e12
    ),
}  # fmt: skip


@dataclass(slots=True)
class KernelReport:
    """One kernel for one target. spills: loads and stores of spilled registers; shared: bytes;
    wide_loads: of 128 bits from global memory; narrow_loads: of K, V or queries in fewer bits (the
    32-bit look-ups in tables are not among them); occupancy: warps that fit, of those possible."""

    kernel: str
    target: str
    dtype: str
    head_dim: int
    registers: int
    spills: int
    shared: int
    fits: bool
    wide_loads: int
    narrow_loads: int
    async_copies: int
    tensor_core_instructions: int
    occupancy: float

    @property
    def is_good(self) -> bool:
        return self.fits and self.spills == 0


def compile_kernel(name: str, target: str, dtype: str, head_dim: int, group_size: int = 4) -> Any:
    """What triton.compile returns. Raises ModelError where triton only interprets."""
    kernel: Any = KERNELS[name]
    if not isinstance(kernel, triton.JITFunction):
        raise ModelError("triton interprets here: unset TRITON_INTERPRET, then start Python again")
    element, short = DTYPES[dtype]
    dims = max(16, triton.next_power_of_2(head_dim))
    width = 8 * head_dim
    constants: dict[str, Any] = {
        "group_size": group_size, "head_dim": head_dim, "DIMS": dims,
        "ROWS": PREFILL_ROWS if name == "prefill" else 16, "TILE": tile_size(head_dim, 2),
        "CAPPED": False, "WINDOWED": False, "DTYPE": element, "SPLITS": 16,
        "width": width, "WIDTH": triton.next_power_of_2(width),
    }  # fmt: skip
    names = kernel.arg_names
    integers = (
        "block_tables", "context_lens", "query_start_loc", "tile_sequence", "tile_start",
    )  # fmt: skip
    pointers = {"output", "query", "keys", "values", "key", "value"}
    signature: dict[str, str] = {}
    for argument in names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in pointers:
            signature[argument] = f"*{short}"
        elif argument in ("parts", "log_sums"):
            signature[argument] = "*fp32"
        elif argument == "slot_mapping":
            signature[argument] = "*i64"
        elif argument in integers:
            signature[argument] = "*i32"
        else:
            signature[argument] = "fp32" if argument in ("scaling", "softcap") else "i32"
    # As a launch infers them: addresses of tensors, and strides that are multiples of 16.
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(names)
        if signature[argument].startswith("*") or argument.endswith("_stride")
    }
    used = {key: value for key, value in constants.items() if key in names}
    source = ASTSource(kernel, signature, used, divisible)
    return triton.compile(
        source, target=TARGETS[target].gpu, options={"num_warps": NUM_WARPS[name]}
    )


def report(name: str, target: str, dtype: str, head_dim: int) -> KernelReport:
    """Compiles a kernel and reads the result. Raises RequestError for an unknown target."""
    if target not in TARGETS:
        raise RequestError(f"unknown target {target!r}: use {', '.join(TARGETS)}")
    limits = TARGETS[target]
    compiled = compile_kernel(name, target, dtype, head_dim)
    read = read_amd if limits.gpu.backend == "hip" else read_nvidia
    registers, shared, spills, counts = read(compiled)
    if name == "write":
        counts["narrow"] = max(0, counts["narrow"] - 1)  # the slot number, of 64 bits
    shared = max(shared, compiled.metadata.shared)
    num_warps = NUM_WARPS[name]
    by_registers = limits.registers // max(registers * limits.gpu.warp_size, 1)
    by_shared = num_warps * (limits.shared_all // shared) if shared else limits.max_warps
    warps = min(limits.max_warps, by_registers // num_warps * num_warps, by_shared)
    return KernelReport(
        name, target, dtype, head_dim, registers, spills, shared, shared <= limits.shared,
        counts["wide"], counts["narrow"], counts["async"], counts["tensor"],
        warps / limits.max_warps,
    )  # fmt: skip


def read_nvidia(compiled: Any) -> tuple[int, int, int, Counter]:
    """(registers, shared bytes, spills, counts of instructions), from the disassembly."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = run(tools / "cuobjdump", "-res-usage", path)
        text = run(tools / "nvdisasm", path)
    operations = Counter(re.findall(r"\b(?:LDG|LDL|STL|HMMA|HGMMA|UTC\w*MMA)[\w.]*", text))
    counts: Counter = Counter()
    spills = 0
    for operation, count in operations.items():
        if operation.startswith(("LDL", "STL")):
            spills += count
        elif "MMA" in operation:
            counts["tensor"] += count
        elif operation.startswith("LDGDEPBAR"):
            continue
        else:
            counts["async"] += count * operation.startswith("LDGSTS")
            bits = re.search(r"\.(128|64|U8|S8|U16|S16)\b", operation)
            kind = {None: "table", "128": "wide"}.get(bits and bits[1], "narrow")
            counts[kind] += count
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    stack = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
    return registers, 0, spills + stack, counts


def read_amd(compiled: Any) -> tuple[int, int, int, Counter]:
    """(registers, shared bytes, spills, counts of instructions), from the assembly text."""
    text = compiled.asm["amdgcn"]

    def value(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # type: ignore[index]

    operations = Counter(re.findall(r"\b(?:global_load|buffer_load|v_mfma)\w*", text))
    counts: Counter = Counter()
    for operation, count in operations.items():
        if operation.startswith("v_mfma"):
            counts["tensor"] += count
        else:
            counts["async"] += count * operation.endswith("_lds")
            size = operation.split("load_")[1]
            kind = {"dword": "table", "dwordx4": "wide"}.get(size, "narrow")
            counts[kind] += count
    spills = value("vgpr_spill_count") + value("sgpr_spill_count")
    return value("vgpr_count"), value("group_segment_fixed_size"), spills, counts


def run(*command: Any) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return result.stdout


def roofline(
    target: str, batch: int, context_len: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, float, float]:
    """One layer's attention in a decode step, bfloat16: (bytes that must move, operations,
    seconds by the GPU's bandwidth, seconds by its arithmetic)."""
    moved = 2 * batch * (2 * context_len * num_kv_heads + 2 * num_heads) * head_dim
    operations = 4 * batch * context_len * num_heads * head_dim
    limits = TARGETS[target]
    return moved, operations, moved / limits.bandwidth, operations / limits.arithmetic
