"""Workloads: how long prompts and outputs are, and when requests arrive."""

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice, repeat
from pathlib import Path

from minivllm.errors import RequestError

Lengths = tuple[int, int]  # prompt tokens, generated tokens
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(slots=True)
class Request:
    """arrival: the step before which it is queued; 0 means from the start."""

    prompt_len: int
    output_len: int
    arrival: int = 0


def azure(trace: str, rng: random.Random) -> Iterator[Lengths]:
    """Lengths as in the Azure LLM inference trace of November 2023, `conv` or `code`.

    Samples both lengths by inverse CDF from the trace's quantiles (they are all but
    uncorrelated). Source: Azure/AzurePublicDataset, CC BY 4.0; Patel et al., Splitwise, ISCA 2024.
    """
    text = Path(__file__).with_name("azure_llm_2023_quantiles.json").read_text(encoding="utf-8")
    quantiles = json.loads(text)[trace]
    while True:
        yield (
            quantile(quantiles["context_quantiles"], rng.random()),
            quantile(quantiles["generated_quantiles"], rng.random()),
        )


def quantile(values: list[int], share: float) -> int:
    """The value below which `share` (0 to 1) of the requests lie, between the given quantiles."""
    position = share * (len(values) - 1)
    low = min(int(position), len(values) - 2)
    return round(values[low] + (position - low) * (values[low + 1] - values[low]))


def log_normal(
    prompt: tuple[float, float], output: tuple[float, float], limit: int, rng: random.Random
) -> Iterator[Lengths]:
    """Independent log-normal lengths, each as (mu, sigma); drawn again from `limit` tokens up."""
    while True:
        lengths = [max(1, round(rng.lognormvariate(mu, sigma))) for mu, sigma in (prompt, output)]
        if sum(lengths) < limit:
            yield lengths[0], lengths[1]


def mu_of(mean: float, sigma: float) -> float:
    return math.log(mean) - sigma**2 / 2


# ShareGPT: parameters whose means, 157 and 336, are close to the paper's 161 and 338. Alpaca: the
# paper's means, 19.31 and 58.45; the paper gives no more, so the spread (sigma 0.8) is our choice.
WORKLOADS: dict[str, Callable[[random.Random], Iterator[Lengths]]] = {
    "azure-conv": partial(azure, "conv"),
    "azure-code": partial(azure, "code"),
    "sharegpt": partial(log_normal, (4.072, 1.716), (5.401, 1.162), 2048),
    "alpaca": partial(log_normal, (mu_of(19.31, 0.8), 0.8), (mu_of(58.45, 0.8), 0.8), 2048),
}


def read_csv(path: Path) -> Iterator[tuple[datetime, int, int]]:
    """Rows of a trace in the form of AzurePublicDataset, one at a time.

    Raises RequestError with the line's number for a row that is no request.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise RequestError(
                    f"{path} has no column {', '.join(missing)}: the first line must name "
                    f"{', '.join(COLUMNS)}"
                )
            for row in reader:
                yield parse_row(row, f"{path}, line {reader.line_num}")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error


def parse_row(row: dict[str, str], place: str) -> tuple[datetime, int, int]:
    lengths = []
    for name in COLUMNS[1:]:
        try:
            length = int(row[name])
        except (TypeError, ValueError):
            raise RequestError(f"{place}: {name} is {row[name]!r}, not a number") from None
        if length < 1:
            raise RequestError(f"{place}: {name} is {length}: it must be 1 or more")
        lengths.append(length)
    try:
        # Seven digits of a second: fromisoformat drops what is beyond microseconds.
        return datetime.fromisoformat(row["TIMESTAMP"]), lengths[0], lengths[1]
    except (TypeError, ValueError):
        raise RequestError(f"{place}: TIMESTAMP is {row['TIMESTAMP']!r}, not a time") from None


def load(
    workload: str,
    count: int,
    *,
    max_model_len: int,
    seed: int = 0,
    arrivals: str = "queued",
    rate: float = 1.0,
    steps_per_second: float = 20.0,
) -> Iterator[Request]:
    """The first `count` requests of a named workload or of a CSV file.

    Prompts are cut to max_model_len - 1 tokens and outputs to what is left.
    arrivals: `queued` (all at the start), `poisson` (`rate` requests per second), or `trace`
        (the CSV's own times); the clock runs at steps_per_second.

    Raises RequestError.
    """
    if count < 1:
        raise RequestError(f"requests is {count}: it must be 1 or more")
    if max_model_len < 2:
        raise RequestError(f"max_model_len is {max_model_len}: it must be 2 or more")
    for name, value in (("rate", rate), ("steps_per_second", steps_per_second)):
        if not (math.isfinite(value) and value > 0):
            raise RequestError(f"{name} is {value}: it must be a finite number above 0")
    if arrivals not in ("queued", "poisson", "trace"):
        raise RequestError(f"arrivals is {arrivals!r}: use queued, poisson or trace")
    lengths: Iterable[Lengths]
    times: Iterable[float] = repeat(0.0)
    if workload in WORKLOADS:
        if arrivals == "trace":
            raise RequestError(f"{workload} has no times of its own: use queued or poisson")
        lengths = islice(WORKLOADS[workload](random.Random(seed)), count)
    elif Path(workload).suffix == ".csv":
        lengths, own_times = split_trace(Path(workload), count)
        times = own_times if arrivals == "trace" else times
    else:
        raise RequestError(
            f"unknown workload {workload!r}: use {', '.join(WORKLOADS)}, or a .csv file"
        )
    if arrivals == "poisson":
        times = poisson(rate, random.Random(seed + 1))
    return (
        cut(prompt, output, max_model_len, int(time * steps_per_second))
        for (prompt, output), time in zip(lengths, times, strict=False)
    )


def cut(prompt_len: int, output_len: int, max_model_len: int, arrival: int) -> Request:
    prompt_len = min(prompt_len, max_model_len - 1)
    return Request(prompt_len, min(output_len, max_model_len - prompt_len), arrival)


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Arrival times in seconds, `rate` a second on average."""
    time = 0.0
    while True:
        time += rng.expovariate(rate)
        yield time


def split_trace(path: Path, count: int) -> tuple[list[Lengths], list[float]]:
    """Lengths and seconds since the first row, of at most `count` rows."""
    rows = list(islice(read_csv(path), count))
    if not rows:
        raise RequestError(f"{path} has no requests")
    seconds = [(time - rows[0][0]).total_seconds() for time, _, _ in rows]
    late = next((i for i in range(1, len(rows)) if seconds[i] < seconds[i - 1]), None)
    if late is not None:
        raise RequestError(f"{path}: request {late + 1} is earlier than the one before it")
    return [(prompt, output) for _, prompt, output in rows], seconds
