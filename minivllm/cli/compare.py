"""minivllm compare: the same requests through every stage, and what became of the memory."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from minivllm.cli.demo import STORY
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.compare import StageResult


def compare(
    requests: Annotated[int, typer.Option(help="How many requests.")] = 40,
    kv_slots: Annotated[int, typer.Option(help="KV budget of every stage, in slots.")] = 1024,
    max_model_len: Annotated[int, typer.Option(help="Longest request, in tokens.")] = 256,
    shrink: Annotated[int, typer.Option(help="ShareGPT-like lengths are divided by this.")] = 8,
    block_size: Annotated[int, typer.Option(help="Slots of a block.")] = 16,
    seed: Annotated[int, typer.Option(help="For the lengths.")] = 0,
    stages: Annotated[
        str | None, typer.Option(help="Only these, with commas; the first is the reference.")
    ] = None,
    model: Annotated[str, typer.Option(help="As in `generate`.")] = "smollm2-135m",
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where the two figures go.")
    ] = Path("out"),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results here, too.")
    ] = None,
) -> None:
    """Run the same requests through every stage with one KV budget, and compare."""
    if json_file is not None and not json_file.parent.is_dir():
        raise RequestError(f"cannot write {json_file}: there is no folder {json_file.parent}")
    settings: dict[str, Any] = {
        "requests": requests, "kv_slots": kv_slots, "max_model_len": max_model_len,
        "shrink": shrink, "block_size": block_size, "seed": seed, "model": model,
    }  # fmt: skip
    names = stages.split(",") if stages is not None else None
    results = run(stages=names, **settings)
    print_table(results)
    if json_file is not None:
        payload = {"settings": settings, "stages": [asdict(result) for result in results]}
        json_file.write_text(json.dumps(payload) + "\n", encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for chart, name in zip(charts(results), ("shares.png", "running.png"), strict=True):
        if chart is not None:
            chart.save(out / name)
            print(f"written to {out / name}")


def run(
    *, stages: list[str] | None = None, requests: int = 40, kv_slots: int = 1024,
    max_model_len: int = 256, shrink: int = 8, block_size: int = 16, seed: int = 0,
    model: str = "smollm2-135m", progress: bool = True,
) -> list["StageResult"]:  # fmt: skip
    """One result per stage, in order. Raises RequestError for what cannot be."""
    from minivllm.compare import STAGES, count_equal, make_jobs, run_stage
    from minivllm.models import load_model
    from minivllm.stages import KVOptions

    names = stages or list(STAGES)
    for name in names:
        if name not in STAGES:
            raise RequestError(f"unknown stage {name!r}: use {', '.join(STAGES)}")
    if requests < 1:
        raise RequestError(f"requests is {requests}: it must be 1 or more")
    if max_model_len < 2:
        raise RequestError(f"max_model_len is {max_model_len}: it must be 2 or more")
    if kv_slots < max_model_len:
        raise RequestError(
            f"kv_slots is {kv_slots}: it must hold one request of max_model_len {max_model_len}"
        )
    console = Console(stderr=True)
    with console.status(f"loading {model} ...") if progress else nullcontext():
        from transformers.utils import logging

        logging.disable_progress_bar()
        loaded, tokenizer = load_model(model)
    jobs = make_jobs(tokenizer(STORY).input_ids, requests, max_model_len, shrink, seed)
    results: list[StageResult] = []
    expected: list[list[int]] = []
    margins: list[list[float]] = []
    columns = (
        TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("requests, {task.fields[tokens]:>6,} tokens"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bar:
        for name in names:
            task = bar.add_task(name, total=len(jobs), tokens=0)
            produced = 0

            def advance(tokens: int, ended: int, task: Any = task) -> None:
                nonlocal produced
                produced += tokens
                bar.update(task, advance=ended, tokens=produced)

            kv = KVOptions(
                STAGES[name].kv_cache, kv_slots, max_model_len,
                block_size=block_size, attention="gather",
            )  # fmt: skip
            result, tokens, found = run_stage(name, loaded, tokenizer, jobs, kv, advance)
            if not results:
                expected, margins = tokens, found
            count_equal(result, tokens, expected, margins)
            results.append(result)
    return results


def print_table(results: list["StageResult"]) -> None:
    from minivllm.compare import STAGES

    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("stage", "K, V in", "read by"):
        table.add_column(name, no_wrap=True)
    for name in ("equal", "at once", "tokens", "decode/s", "total/s", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    base = next((r.decode_tokens_per_s for r in results if r.name == "reserve-max"), None)
    for r in results:
        stage = STAGES[r.name]
        equal = f"{r.tokens_equal}/{r.requests}" + (f" +{r.ties}" if r.ties else "")
        share = "" if r.token_share is None else f"{r.token_share:.1f} %"
        speed = f"{r.decode_tokens_per_s / base:.1f}x" if base else ""
        table.add_row(
            r.name, stage.where, stage.how, equal, f"{r.peak_running}", share,
            f"{r.decode_tokens_per_s:.1f}", f"{r.total_tokens_per_s:.1f}", speed,
        )  # fmt: skip
    Console().print(table)
    print(
        f"equal: requests with the tokens of {results[0].name} (+ ties, decided by rounding)\n"
        "at once: most requests in one pass; tokens: share of the pool that holds them\n"
        "decode/s: tokens per second in steps without prefill while somebody waits;\n"
        "total/s: over the whole run; speed: decode/s over that of reserve-max"
    )


def charts(results: list["StageResult"]) -> tuple[Any, Any]:
    """(shares of the pool, requests running over time); the first is None without a pool."""
    from minivllm.charts.memory import running_chart, waste_chart

    pooled = [(r.name, r.share) for r in results if r.share is not None]
    first = None
    if pooled:
        low, high = min(s["token"] for _, s in pooled), max(s["token"] for _, s in pooled)
        first = waste_chart(
            pooled, f"While requests wait, tokens fill {low:.0f} to {high:.0f} % of the pool"
        )
    peaks = ", ".join(f"{r.name} {r.peak_running}" for r in results if r.share is not None)
    second = running_chart(
        {
            r.name: (r.seconds, r.running)
            for r in results
            if r.share is not None or len(results) == 1
        },
        f"Most requests at once: {peaks}",
    )
    return first, second
