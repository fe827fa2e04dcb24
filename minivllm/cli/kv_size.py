"""minivllm kv-size: what a model's KV cache costs."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from minivllm.errors import RequestError
from minivllm.memory.known_models import KNOWN_MODELS, KnownModel
from minivllm.memory.kv_size import (
    KVShape,
    kv_bytes,
    kv_bytes_per_token,
    kv_shape,
    num_requests_that_fit,
)

DTYPE_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def kv_size(
    model: Annotated[
        str, typer.Argument(help="A known name, a local folder, a hub id, or `all`.")
    ] = "all",
    tokens: Annotated[int, typer.Option(help="Context length: prompt + generated.")] = 2048,
    sequences: Annotated[int, typer.Option(help="Requests at the same time.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="Type of K and V; default: the model's own.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory for K and V, such as 24GiB or 80GB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bytes of K and V: layers x tokens x KV heads x head_dim x 2 x dtype size."""
    for name, value in (("tokens", tokens), ("sequences", sequences)):
        if value < 1:
            raise RequestError(f"--{name} is {value}: it must be 1 or more")
    if dtype is not None and dtype not in DTYPE_SIZES:
        raise RequestError(f"--dtype is {dtype!r}: use one of {', '.join(DTYPE_SIZES)}")
    memory_bytes = None if memory is None else parse_bytes(memory)
    rows = [
        size_row(name, shape, dtype or own_dtype, tokens, sequences, memory_bytes)
        for name, shape, own_dtype in models_named(model)
    ]
    if as_json:
        print(json.dumps(rows if model == "all" else rows[0], indent=2))
    elif model == "all":
        print_table(rows)
    else:
        print_one(rows[0])


def size_row(
    name: str,
    shape: KVShape,
    dtype: str,
    tokens: int,
    sequences: int,
    memory_bytes: int | None,
) -> dict:
    size = DTYPE_SIZES[dtype]
    row = {
        "model": name,
        "layers": shape.num_layers,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "dtype": dtype,
        "tokens": tokens,
        "sequences": sequences,
        "bytes_per_token": kv_bytes_per_token(shape, size),
        "bytes_per_request": kv_bytes(shape, tokens, size),
        "bytes": sequences * kv_bytes(shape, tokens, size),
    }
    if memory_bytes is not None:
        row["memory_bytes"] = memory_bytes
        row["requests_that_fit"] = num_requests_that_fit(memory_bytes, shape, tokens, size)
    return row


def models_named(model: str) -> list[tuple[str, KVShape, str]]:
    """(name, shape, own dtype) of the models that the argument means."""
    known: dict[str, KnownModel] = {entry.name: entry for entry in KNOWN_MODELS}
    if model == "all" or model in known:
        entries = known.values() if model == "all" else [known[model]]
        return [(entry.name, entry.shape, entry.dtype) for entry in entries]

    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise RequestError(f"there is no folder {model}")

    from minivllm.models import TINY_RANDOM, load_config

    if "/" not in model and model != TINY_RANDOM and not Path(model).is_dir():
        raise RequestError(
            f"unknown model {model!r}: use {', '.join(known)}, a local folder, or a hub id"
        )
    config = load_config(model)
    try:
        shape = kv_shape(config)
    except (ValueError, AttributeError) as error:
        raise RequestError(f"no KV size for {model!r}: {error}") from error
    dtype = str(config.get_text_config().dtype or "float32").removeprefix("torch.")
    return [(model, shape, dtype if dtype in DTYPE_SIZES else "float32")]


def parse_bytes(text: str) -> int:
    """`24GiB`, `80 GB`, `0.5GiB` or plain bytes, as an exact whole number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise RequestError(f"--memory is {text!r}: give it like 24GiB, 80GB or 512MiB")
    return int(Decimal(match[1]) * UNITS[match[2].upper()])


def print_one(row: dict) -> None:
    shape = f"{row['layers']} layers x {row['kv_heads']} KV heads x {row['head_dim']}"
    lines = [
        ("model", row["model"]),
        ("shape", f"{shape} dims, {row['dtype']}"),
        ("per token", f"{row['bytes_per_token']:,} B"),
        (
            f"per request of {row['tokens']:,} tokens",
            f"{row['bytes_per_request']:,} B = {row['bytes_per_request'] / 2**30:.3f} GiB",
        ),
    ]
    if row["sequences"] > 1:
        lines.append(
            (
                f"{row['sequences']:,} requests",
                f"{row['bytes']:,} B = {row['bytes'] / 2**30:.3f} GiB",
            )
        )
    if "memory_bytes" in row:
        lines.append((f"requests in {row['memory_bytes']:,} B", f"{row['requests_that_fit']:,}"))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")


def print_table(rows: list[dict]) -> None:
    table = Table(
        title=f"K and V of {rows[0]['sequences']:,} x {rows[0]['tokens']:,} tokens", box=None
    )
    table.add_column("model", no_wrap=True)
    columns = ["dtype", "B per token", "GiB per request"]
    if rows[0]["sequences"] > 1:
        columns.append("GiB in all")
    if "memory_bytes" in rows[0]:
        columns.append("requests fit")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            row["model"],
            row["dtype"],
            f"{row['bytes_per_token']:,}",
            f"{row['bytes_per_request'] / 2**30:.3f}",
        ]
        if row["sequences"] > 1:
            cells.append(f"{row['bytes'] / 2**30:.3f}")
        if "memory_bytes" in row:
            cells.append(f"{row['requests_that_fit']:,}")
        table.add_row(*cells)
    Console().print(table)
