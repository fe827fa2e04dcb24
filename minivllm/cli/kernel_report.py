"""minivllm kernel-report: what the compiler makes of the kernels, without a GPU."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from minivllm.errors import ModelError, RequestError

SHAPE = {
    "batch": 64, "context_len": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
}  # fmt: skip


def kernel_report(
    more_targets: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="sm_80, sm_90, sm_100, gfx942; one or several.", metavar="TARGET..."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16, float16; may be repeated.")
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result here, too.")
    ] = None,
) -> None:
    """Compile every kernel for each target and report registers, spills, loads and limits."""
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        from minivllm.kernel_report import DTYPES, KERNELS, TARGETS, report, roofline
    except ImportError as error:
        raise ModelError("triton is not installed: there is no kernel to report on") from error

    # `--target sm_80 sm_90`: an option takes one value, the others come as arguments.
    targets = [*(target or []), *(more_targets or [])] or list(TARGETS)
    dtypes = dtype or ["bfloat16"]
    for name in targets:
        if name not in TARGETS:
            raise RequestError(f"unknown target {name!r}: use {', '.join(TARGETS)}")
    for name in dtypes:
        if name not in DTYPES:
            raise RequestError(f"unknown dtype {name!r}: use {', '.join(DTYPES)}")
    if json_file is not None and not json_file.parent.is_dir():
        raise RequestError(f"cannot write {json_file}: there is no folder {json_file.parent}")
    reports = [
        report(kernel, name, element, size)
        for name in targets
        for element in dtypes
        for size in head_dim or [64, 128]
        for kernel in KERNELS
    ]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("target", "type", "dim", "kernel"):
        table.add_column(heading, no_wrap=True)
    for heading in ("regs", "spills", "shared", "128-bit", "less", "async", "mma", "occup."):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in reports:
        table.add_row(
            r.target, r.dtype.replace("float", "f"), f"{r.head_dim}", r.kernel, f"{r.registers}",
            f"{r.spills}", f"{r.shared:,}" + ("" if r.fits else " !"), f"{r.wide_loads}",
            f"{r.narrow_loads}", f"{r.async_copies}", f"{r.tensor_core_instructions}",
            f"{r.occupancy:.0%}",
        )  # fmt: skip
    Console().print(table)
    rows = {name: roofline(name, **SHAPE) for name in targets}
    moved, operations, _, _ = rows[targets[0]]
    print(
        f"\nOne layer of a decode step, {SHAPE['batch']} sequences of {SHAPE['context_len']:,} "
        f"tokens, {SHAPE['num_heads']} heads over {SHAPE['num_kv_heads']} KV heads of "
        f"{SHAPE['head_dim']}, bfloat16:\n{moved / 1e9:.2f} GB must move, "
        f"{operations / 1e9:.1f} billion operations, {operations / moved:.1f} per byte"
    )
    for name, (_, _, by_memory, by_arithmetic) in rows.items():
        print(
            f"{name:7} {TARGETS[name].device:11} {1e6 * by_memory:6.0f} us by bandwidth, "
            f"{1e6 * by_arithmetic:4.0f} us by arithmetic"
        )
    if json_file is not None:
        payload = {"kernels": [asdict(r) for r in reports], "roofline": rows, "shape": SHAPE}
        json_file.write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
    if bad := [r for r in reports if not r.is_good]:
        names = ", ".join(f"{r.kernel} for {r.target} (head_dim {r.head_dim})" for r in bad)
        print(f"error: these spill or do not fit: {names}", file=sys.stderr)
        raise typer.Exit(1)
