"""minivllm plot: the charts of KV memory."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm.cli.simulate import FIGURE_2, run
from minivllm.errors import RequestError

plot = typer.Typer(no_args_is_help=True, help="Draw a chart into a .png or .svg file.")

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="A .png or .svg file to write.")]
Files = Annotated[
    list[Path] | None, typer.Argument(metavar="[JSON]...", help="Files of `simulate --json`.")
]
Workload = Annotated[str, typer.Option(help="As in `simulate`.")]
Requests = Annotated[int, typer.Option(help="How many requests are replayed.")]


@plot.command()
def waste(out: Out, files: Files = None, requests: Requests = 2000) -> None:
    """Where the pool goes, per policy. Without files: the paper's Figure 2, ours beside theirs."""
    from minivllm.charts.memory import PAPER_FIGURE_2, waste_chart

    check_out(out)
    if files:
        results = [read_result(path) for path in files]
        chart = waste_chart([(label(r), r["share"]) for r in results], waste_title(results))
    else:
        results = [run(policy=name, requests=requests, **FIGURE_2) for name in PAPER_FIGURE_2]
        chart = waste_chart(
            [(label(r).removesuffix("\nbuddy fit"), r["share"]) for r in results],
            waste_title(results),
            list(PAPER_FIGURE_2.values()),
        )
    save(chart, out)


@plot.command("memory-map")
def memory_map(
    out: Out,
    policy: Annotated[str, typer.Option(help="As in `simulate`.")] = "grow",
    fit: Annotated[str, typer.Option(help="first, best or buddy.")] = "first",
    block_size: Annotated[int, typer.Option(help="Slots of a block, for paged.")] = 16,
    workload: Workload = "sharegpt",
    kv_slots: Annotated[int, typer.Option(help="Size of the pool.")] = 2048,
    max_model_len: Annotated[int, typer.Option(help="Longest request.")] = 1024,
    requests: Requests = 16,
    seed: Annotated[int, typer.Option(help="For the lengths.")] = 0,
) -> None:
    """Addresses against time: who is where, and the holes between."""
    from minivllm.charts.memory import memory_map_chart
    from minivllm.simulation.memory_map import MemoryMap
    from minivllm.simulation.policies import make_cache
    from minivllm.simulation.replay import Replay
    from minivllm.simulation.workloads import load

    check_out(out)
    recorder = MemoryMap()
    replay = Replay(
        load(workload, requests, max_model_len=max_model_len, seed=seed),
        make_cache(policy, kv_slots, max_model_len, fit=fit, block_size=block_size),
        on_step=recorder.note,
    )
    replay.run()
    pieces, blocked = recorder.finish(), recorder.blocked
    title = f"{policy}, blocks of {block_size}: " if policy == "paged" else f"{policy}, {fit} fit: "
    if blocked is None:
        title += "no request ever waited for a hole"
    else:
        title += f"{blocked.free:,} slots free, and {blocked.needs:,} in a row nowhere"
    save(memory_map_chart(pieces, kv_slots, title, blocked), out)


@plot.command()
def concurrency(
    out: Out,
    workload: Workload = "azure-conv",
    requests: Requests = 600,
    max_model_len: Annotated[int, typer.Option(help="Longest request.")] = 8192,
) -> None:
    """Requests running at once against the size of the pool, per policy."""
    from minivllm.charts.memory import concurrency_chart
    from minivllm.simulation.policies import POLICIES

    check_out(out)
    lines: dict[str, list[tuple[int, float]]] = {}
    for policy in POLICIES:
        for factor in (1, 2, 4, 8, 16):
            kv_slots = factor * max_model_len
            result = run(
                workload=workload, policy=policy, kv_slots=kv_slots, requests=requests,
                max_model_len=max_model_len,
            )  # fmt: skip
            lines.setdefault(policy, []).append((kv_slots, result["mean_running"]))
    middle = {policy: points[2][1] for policy, points in lines.items()}
    title = (
        f"{4 * max_model_len:,} slots hold {middle['reserve-max']:.0f} requests that reserve the "
        f"maximum, or {middle['paged']:.0f} on blocks"
    )
    save(concurrency_chart(lines, title), out)


@plot.command("block-size")
def block_size(
    out: Out,
    workload: Workload = "azure-conv",
    requests: Requests = 1000,
    kv_slots: Annotated[int, typer.Option(help="Size of the pool.")] = 65_536,
    max_model_len: Annotated[int, typer.Option(help="Longest request.")] = 8192,
) -> None:
    """What a block size trades: empty slots against long tables and much giving out."""
    from minivllm.charts.blocks import block_size_chart
    from minivllm.simulation.recorders import TableWork

    check_out(out)
    points = []
    size = 1
    while size <= min(kv_slots, 1024):
        work = TableWork()
        result = run(
            workload=workload, policy="paged", block_size=size, kv_slots=kv_slots,
            max_model_len=max_model_len, requests=requests, on_step=work.note,
        )  # fmt: skip
        share = result["share"]
        if not result["steps"]:
            raise RequestError(
                f"{requests} requests never fill {kv_slots} slots, so there is nothing to see: "
                f"take more requests or fewer slots"
            )
        points.append(
            (
                size, share["reserved"] + share["internal"], work.mean_entries,
                work.blocks_given_per_1000_tokens,
            )
        )  # fmt: skip
        size *= 2
    save(block_size_chart(points, block_size_title(points)), out)


def block_size_title(points: list[tuple[int, float, float, float]]) -> str:
    one = points[0]
    size, empty, entries, _ = min(points, key=lambda point: abs(point[0] - 16))
    return (
        f"Blocks of {size} leave {empty:.1f} % empty and cut tables from {one[2]:,.0f} entries to "
        f"{entries:,.0f}"
    )


@plot.command()
def timeline(
    out: Out,
    workload: Workload = "azure-conv",
    requests: Requests = 400,
    policy: Annotated[str, typer.Option(help="As in `simulate`.")] = "paged",
    block_size: Annotated[int, typer.Option(help="Slots of a block, for paged.")] = 16,
    watermark: Annotated[float, typer.Option(help="As in `simulate`.")] = 0.0,
    kv_slots: Annotated[int, typer.Option(help="Size of the pool.")] = 16_384,
    max_model_len: Annotated[int, typer.Option(help="Longest request.")] = 8192,
    arrivals: Annotated[str, typer.Option(help="queued, poisson, or the trace's own.")] = "poisson",
    rate: Annotated[float, typer.Option(help="Requests per second, for poisson.")] = 1.0,
    steps_per_second: Annotated[float, typer.Option(help="The speed of the clock.")] = 20.0,
    seed: Annotated[int, typer.Option(help="For lengths and arrivals.")] = 0,
) -> None:
    """Free memory, requests running and waiting, and preemptions, step by step."""
    from minivllm.charts.blocks import memory_timeline_chart
    from minivllm.simulation.recorders import Timeline

    check_out(out)
    seen = Timeline()
    run(
        workload=workload, policy=policy, block_size=block_size, watermark=watermark,
        kv_slots=kv_slots, max_model_len=max_model_len, requests=requests, seed=seed,
        arrivals=arrivals, rate=rate, steps_per_second=steps_per_second, on_step=seen.note,
    )  # fmt: skip
    title = (
        f"{policy}, {kv_slots:,} slots: up to {max(seen.running)} requests run, and "
        f"{seen.preempted[-1]} are preempted"
    )
    save(
        memory_timeline_chart(
            seen.free, seen.running, seen.waiting, seen.preempted, title, kv_slots
        ),
        out,
    )


def read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        sum(result["share"].values())
        str(result["settings"]["policy"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is no result of `simulate --json`: {error!r}") from error
    return result


def label(result: dict[str, Any]) -> str:
    settings = result["settings"]
    if settings["policy"] == "paged":
        return f"paged\nblock {settings['block_size']}"
    return settings["policy"] + ("" if settings["fit"] == "first" else f"\n{settings['fit']} fit")


def waste_title(results: list[dict[str, Any]]) -> str:
    tokens = [result["share"]["token"] for result in results]
    if len(tokens) == 1:
        return f"{tokens[0]:.0f} % of the pool holds tokens"
    return f"Tokens fill between {min(tokens):.0f} and {max(tokens):.0f} % of the pool"


def check_out(out: Path) -> None:
    """Before minutes of work, not after them."""
    if out.suffix not in (".png", ".svg"):
        raise RequestError(f"cannot write {out}: a figure's name must end in .png or .svg")
    if not out.parent.is_dir():
        raise RequestError(f"cannot write {out}: there is no folder {out.parent}")


def save(chart: Any, out: Path) -> None:
    chart.save(out)
    print(f"written to {out}")
