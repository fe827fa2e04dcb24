"""What a measurement needs beside its numbers: the machine, the versions, and medians."""

import importlib.metadata
import json
import os
import platform
import statistics
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict:
    """The machine and the versions that a result was measured with."""
    return {
        "processor": processor(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),  # AVX2, AVX512, ...
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def processor() -> str:
    """The processor's name: /proc/cpuinfo on Linux, whatever Python knows elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def median(values: list[float]) -> float:
    return statistics.median(values)


def write_result(name: str, result: dict) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    return path
