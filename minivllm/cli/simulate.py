"""minivllm simulate: what a policy does with KV memory on the lengths of real requests."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from minivllm.errors import RequestError

# The setting of the PagedAttention paper's Figure 2: OPT-13B on a 40 GB GPU.
FIGURE_2: dict[str, Any] = {
    "workload": "sharegpt", "kv_slots": 15_728, "max_model_len": 2048, "max_running": 256,
    "max_tokens_per_step": 2560, "fit": "buddy", "watermark": 0.01,
}  # fmt: skip


def simulate(
    workload: Annotated[
        str, typer.Option(help="azure-conv, azure-code, sharegpt, alpaca, or a .csv file.")
    ] = "azure-conv",
    policy: Annotated[
        str, typer.Option(help="reserve-max, reserve-pow2, reserve-oracle, grow or paged.")
    ] = "reserve-max",
    fit: Annotated[str, typer.Option(help="first, best or buddy.")] = "first",
    grow_by: Annotated[int, typer.Option(help="Slots by which a region grows.")] = 16,
    block_size: Annotated[int, typer.Option(help="Slots of a block, for paged.")] = 16,
    watermark: Annotated[
        float, typer.Option(help="Share of the blocks that newcomers leave free, for paged.")
    ] = 0.0,
    kv_slots: Annotated[int, typer.Option(help="Size of the KV pool, in token slots.")] = 65_536,
    max_model_len: Annotated[int, typer.Option(help="Longest request, in tokens.")] = 8192,
    requests: Annotated[int, typer.Option(help="How many requests.")] = 6000,
    seed: Annotated[int, typer.Option(help="For lengths and arrivals.")] = 0,
    arrivals: Annotated[str, typer.Option(help="queued, poisson, or the trace's own.")] = "queued",
    rate: Annotated[float, typer.Option(help="Requests per second, for poisson.")] = 1.0,
    steps_per_second: Annotated[float, typer.Option(help="The speed of the clock.")] = 20.0,
    max_running: Annotated[int | None, typer.Option(help="Sequence budget; default none.")] = None,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(help="Token budget; default none.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result here, too.")
    ] = None,
) -> None:
    """Replay a workload through the real scheduler and KV cache manager, without a model."""
    if json_file is not None and not json_file.parent.is_dir():
        raise RequestError(f"cannot write {json_file}: there is no folder {json_file.parent}")
    result = run(
        workload=workload, policy=policy, fit=fit, grow_by=grow_by, block_size=block_size,
        watermark=watermark, kv_slots=kv_slots, max_model_len=max_model_len, requests=requests,
        seed=seed, arrivals=arrivals, rate=rate, steps_per_second=steps_per_second,
        max_running=max_running, max_tokens_per_step=max_tokens_per_step,
    )  # fmt: skip
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print_result(result)


def run(
    *, policy: str, workload: str = "azure-conv", fit: str = "first", grow_by: int = 16,
    block_size: int = 16, watermark: float = 0.0, kv_slots: int = 65_536,
    max_model_len: int = 8192, requests: int = 6000, seed: int = 0, arrivals: str = "queued",
    rate: float = 1.0, steps_per_second: float = 20.0, max_running: int | None = None,
    max_tokens_per_step: int | None = None, progress: bool = True,
    on_step: Callable[..., None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One replay as a dict: its settings and what a ReplayResult holds. on_step: as in Replay."""
    settings = {k: v for k, v in locals().items() if k not in ("progress", "on_step")}
    from minivllm.simulation.policies import make_cache
    from minivllm.simulation.replay import Replay
    from minivllm.simulation.workloads import load

    for name, value in (("max_running", max_running), ("max_tokens_per_step", max_tokens_per_step)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}: it must be 1 or more")
    kv_cache = make_cache(
        policy, kv_slots, max_model_len,
        fit=fit, grow_by=grow_by, block_size=block_size, watermark=watermark,
    )  # fmt: skip
    loaded = list(
        load(
            workload, requests, max_model_len=max_model_len, seed=seed, arrivals=arrivals,
            rate=rate, steps_per_second=steps_per_second,
        )
    )  # fmt: skip
    replay = Replay(
        loaded, kv_cache, max_running=max_running, max_tokens_per_step=max_tokens_per_step,
        on_step=on_step,
    )  # fmt: skip
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task(policy, total=len(loaded))
        result = replay.run(lambda ended: bar.advance(task, ended))
    return {**asdict(result), "settings": settings}


def print_result(result: dict[str, Any]) -> None:
    settings = result["settings"]
    table = Table(
        title=f"{settings['policy']} on {settings['workload']}, {settings['kv_slots']:,} slots",
        box=None,
    )
    table.add_column("share of the pool", no_wrap=True)
    table.add_column("%", justify="right", no_wrap=True)
    for name, percent in result["share"].items():
        table.add_row(name, f"{percent:.1f}")
    table.add_section()
    for label, key, form in (
        ("requests running", "mean_running", ".1f"),
        ("finished per 1,000 steps", "finished_per_1000_steps", ".0f"),
        ("preempted per 1,000 steps", "preemptions_per_1000_steps", ".0f"),
        ("tokens copied per generated token", "tokens_copied_per_generated_token", ".1f"),
        ("steps measured", "steps", ",d"),
    ):
        table.add_row(label, format(result[key], form))
    Console().print(table)
    if not result["steps"]:
        print("nobody ever waited, so nothing was measured: take more requests or fewer slots")
