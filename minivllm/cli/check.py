"""minivllm check: what is installed, what will run, and what is cached."""

import importlib.metadata
import importlib.util
import platform
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

PACKAGES = ("torch", "transformers", "safetensors", "gguf", "typer", "rich", "matplotlib")


def check(
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the cached model's checksums too.")
    ] = False,
) -> None:
    """Show versions, device, Triton and the cached model; paste this into a bug report."""
    import torch

    import minivllm
    from minivllm.errors import ModelError
    from minivllm.packaged_model import SMOLLM2

    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: str) -> None:
        table.add_row(name, Text(value))

    row("minivllm", minivllm.__version__)
    row("python", f"{platform.python_version()} ({sys.executable})")
    row("platform", platform.platform())
    for package in PACKAGES:
        row(package, package_version(package))
    row("triton", triton_status())
    row("numba", optional_status("numba", "attention numba"))
    row("device", device(torch))
    row("CPU threads", str(torch.get_num_threads()))
    damaged = None
    if not SMOLLM2.is_cached:
        row(SMOLLM2.name, f"not cached: fetched on first use into {SMOLLM2.folder}")
    else:
        try:
            SMOLLM2.check(contents=verify)
            row(
                SMOLLM2.name,
                f"cached in {SMOLLM2.folder}" + (", checksums right" if verify else ""),
            )
        except ModelError as error:
            damaged = error
            row(SMOLLM2.name, "damaged")
    Console().print(table)
    if damaged is not None:
        raise damaged


def package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed: run `pip install -r requirements.txt`"


def device(torch) -> str:
    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}"
    if torch.backends.mps.is_available():
        return "cpu (Apple MPS is present, and not used by default)"
    return "cpu"


def optional_status(package: str, option: str) -> str:
    if importlib.util.find_spec(package) is None:
        return f"not installed: --{option} is not available, everything else works"
    return importlib.metadata.version(package)


def triton_status() -> str:
    """Triton's version and what it can do here, or why it is missing."""
    if importlib.util.find_spec("triton") is None:
        if not sys.platform.startswith("linux"):
            return f"none: there is no wheel for {sys.platform}; only the kernel needs it"
        return "not installed: run `pip install -r requirements.txt`; only the kernel needs it"
    version = importlib.metadata.version("triton")
    import torch

    if torch.cuda.is_available():
        return f"{version}, runs on the GPU"
    return f"{version}, no GPU here: kernels run in the interpreter"
