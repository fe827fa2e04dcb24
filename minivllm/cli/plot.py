"""minivllm plot: the charts of contiguous memory."""

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
            [(r["settings"]["policy"], r["share"]) for r in results],
            waste_title(results),
            list(PAPER_FIGURE_2.values()),
        )
    save(chart, out)


@plot.command("memory-map")
def memory_map(
    out: Out,
    policy: Annotated[str, typer.Option(help="As in `simulate`.")] = "grow",
    fit: Annotated[str, typer.Option(help="first, best or buddy.")] = "first",
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
        make_cache(policy, kv_slots, max_model_len, fit=fit),
        on_step=recorder.note,
    )
    replay.run()
    pieces, blocked = recorder.finish(), recorder.blocked
    title = f"{policy}, {fit} fit: "
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
        f"maximum, or {middle['grow']:.0f} that grow"
    )
    save(concurrency_chart(lines, title), out)


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
