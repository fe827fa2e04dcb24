"""The Triton kernels on a GPU: right first, then how fast, beside the copy bandwidth and peers.

1. Decode, split decode and prefill against the gather in float32, on random inputs that are new in
   each run. A relative error above its tolerance makes the exit status 1.
2. Time of one layer by device events, in bfloat16, blocks of 16 tokens in shuffled order. Peers:
   the gather of chapter 5, and, on K and V that lie side by side, dense SDPA and compiled flex
   attention.

    python benchmarks/gpu_attention.py [--seconds 150]
    python benchmarks/gpu_attention.py --rehearse     (no GPU: tiny shapes, nothing is written)

After --seconds no further shape is begun; what is missing then is missing in the result as well.
"""

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from machine import RESULTS, median, write_result
from torch import Tensor

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, below

from minivllm.attention.batch import Batch
from minivllm.attention.dense import attend
from minivllm.attention.gather import GatherAttention
from minivllm.attention.triton_attention import TritonAttention
from minivllm.charts.chart import BLUE, GREY, ORANGE, PURPLE, VERMILION, Chart

BLOCK_SIZE, HEAD_DIM, NUM_HEADS = 16, 128, 32
# The largest error, over the largest absolute value of the right answer.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DECODE = [
    (batch, context_len, group_size)
    for group_size in (4, 1, 8)
    for context_len in (512, 4096, 32768)
    for batch in (1, 8, 64, 256)
]
PREFILL = [  # sequences, cached tokens, new tokens, group size
    (1, 0, 4096, 4), (1, 0, 16384, 4), (8, 0, 2048, 4), (8, 8192, 512, 4), (1, 0, 4096, 1),
    (1, 0, 4096, 8),
]  # fmt: skip
PEERS = {"triton": BLUE, "gather": ORANGE, "dense": GREY, "flex": PURPLE}


class Scene:
    """Sequences of equal length, twice: in shuffled blocks of a pool, and side by side.

    query: [T, num_heads, head_dim]; keys, values: [slots, num_kv_heads, head_dim]; dense_query,
    dense_key, dense_value: [sequences, heads, tokens, head_dim].
    """

    def __init__(
        self, sequences: int, cached: int, new: int, group_size: int, *, device: str,
        dtype: torch.dtype, num_heads: int = NUM_HEADS, head_dim: int = HEAD_DIM, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed)
        context_len, num_kv_heads = cached + new, num_heads // group_size
        per_sequence = -(-context_len // BLOCK_SIZE)
        ids = random.Random(seed).sample(range(sequences * per_sequence), sequences * per_sequence)
        tables = [ids[i * per_sequence : (i + 1) * per_sequence] for i in range(sequences)]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.query = normal(sequences * new, num_heads, head_dim)
        shape = (len(ids) * BLOCK_SIZE, num_kv_heads, head_dim)
        self.keys, self.values = normal(*shape), normal(*shape)
        loc, none = [0, *accumulate([new] * sequences)], torch.empty(0)
        self.batch = Batch(none, none, none, loc, [context_len] * sequences, tables, 16, none)
        self.scaling = head_dim**-0.5
        self.is_causal = new > 1
        self.dense_query = self.query.unflatten(0, (sequences, new)).transpose(1, 2)
        shape = (sequences, num_kv_heads, context_len, head_dim)
        self.dense_key, self.dense_value = normal(*shape), normal(*shape)
        # What must move: K and V once, the queries in and the output out.
        self.bytes = 2 * self.dense_key.nbytes + 2 * self.query.nbytes
        # Each new token sees the cached ones and, on average, half of the new ones.
        seen = cached + (new + 1) / 2
        self.operations = 4 * sequences * new * seen * num_heads * head_dim

    def read(self, reader: Callable) -> Tensor:
        return reader(self.query, self.keys, self.values, self.batch, scaling=self.scaling)

    def dense(self) -> Tensor:
        query, new, length = self.dense_query, self.dense_query.shape[2], self.dense_key.shape[2]
        mask = None
        if self.is_causal and new < length:
            mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
        whole = self.is_causal and mask is None
        return attend(
            query, self.dense_key, self.dense_value, mask, scaling=self.scaling, is_causal=whole
        )

    def flex(self, flex_attention: Callable) -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask

        new, length = self.dense_query.shape[2], self.dense_key.shape[2]
        mask = None
        if self.is_causal:

            def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return k <= q + length - new

            mask = create_block_mask(causal, None, None, new, length, str(self.query.device))
        return lambda: flex_attention(
            self.dense_query, self.dense_key, self.dense_value, block_mask=mask,
            scale=self.scaling, enable_gqa=True,
        )  # fmt: skip


def errors(device: str, seed: int, *, small: bool) -> list[dict]:
    """The kernels against the gather in float32, each with random lengths of its own."""
    rng, rows = random.Random(seed), []
    for dtype, tolerance in TOLERANCES.items():
        for head_dim in (64,) if small else (64, 80, 128, 256):
            for kind, num_splits in (("decode", 1), ("split", 7), ("prefill", 1)):
                group_size = rng.choice((1, 3, 4, 8))
                cached = rng.randint(0, 40 if small else 3000)
                new = rng.randint(2, 9 if small else 300) if kind == "prefill" else 1
                scene = Scene(
                    3, cached, new, group_size, device=device, dtype=dtype, head_dim=head_dim,
                    num_heads=2 * group_size, seed=rng.randrange(2**30),
                )  # fmt: skip
                lengths = scene.batch.context_lens
                lengths[1] -= rng.randint(0, lengths[1] - new)  # ragged
                found = scene.read(TritonAttention(num_splits)).float()
                scene.query, scene.keys, scene.values = (
                    tensor.float() for tensor in (scene.query, scene.keys, scene.values)
                )
                expected = scene.read(GatherAttention())
                error = ((found - expected).abs().max() / expected.abs().max()).item()
                rows.append({
                    "kernel": kind, "dtype": str(dtype).split(".")[1], "head_dim": head_dim,
                    "group_size": group_size, "context_lens": lengths, "new": new,
                    "error": error, "tolerance": tolerance, "passed": error <= tolerance,
                })  # fmt: skip
    return rows


def event_ms(function: Callable[[], object]) -> float:
    """Median by device events; the L2 cache is cleared before each run."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=20, rep=60, return_mode="median"))


def clock_ms(function: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - start))
    return median(times)


def copy_bandwidth(device: str, num_bytes: int, timer: Callable) -> float:
    """Bytes per second that a plain copy reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (timer(lambda: target.copy_(source)) / 1000)


def peers_of(scene: Scene, flex_attention: Callable | None) -> dict[str, Callable[[], object]]:
    triton, gather = TritonAttention(), GatherAttention()
    found: dict[str, Callable[[], object]] = {
        "triton": lambda: scene.read(triton),
        "gather": lambda: scene.read(gather),
        "dense": scene.dense,
    }
    if flex_attention is not None:
        found["flex"] = scene.flex(flex_attention)
    return found


def measure(
    shape: tuple[int, int, int, int], scene_options: dict, timer: Callable,
    flex_attention: Callable | None, bandwidth: float,
) -> dict:  # fmt: skip
    sequences, cached, new, group_size = shape
    scene = Scene(sequences, cached, new, group_size, **scene_options)
    row: dict = {
        "sequences": sequences, "cached": cached, "new": new, "group_size": group_size,
        "bytes": scene.bytes, "operations": scene.operations, "ms": {},
    }  # fmt: skip
    for name, function in peers_of(scene, flex_attention).items():
        try:
            row["ms"][name] = timer(function)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["ms"][name] = None
            row[f"{name}_error"] = str(error).splitlines()[0]
    if ours := row["ms"]["triton"]:
        row["copy_share"] = scene.bytes / (ours / 1000) / bandwidth
        row["tera_operations_per_s"] = scene.operations / ours / 1e9
    return row


def line(row: dict) -> str:
    times = ", ".join(f"{n} {t:.3f}" if t else f"{n} -" for n, t in row["ms"].items())
    share = f"; {row['copy_share']:.0%} of the copy bandwidth" if "copy_share" in row else ""
    return (
        f"{row['sequences']:3} x {row['cached']:6,} cached + {row['new']:5,} new, group "
        f"{row['group_size']}: {times} ms{share}"
    )


def chart(rows: list[dict], device: str) -> Chart:
    """Share of the copy bandwidth that decode reaches, group 4, for each batch and context."""
    rows = [row for row in rows if row["new"] == 1 and row["group_size"] == 4]
    best = max(row.get("copy_share", 0) for row in rows)
    figure = Chart(f"Decode reaches {best:.0%} of the copy bandwidth at best ({device})")
    axes = figure.panels[0]
    labels = [f"{row['sequences']} x {row['cached'] + 1:,}" for row in rows]
    for offset, (name, color) in enumerate(PEERS.items()):
        # All read the same K and V; the gather's copy counts as time, not as bytes.
        shares = [
            100 * row["copy_share"] * row["ms"]["triton"] / row["ms"][name]
            if row["ms"].get(name) and "copy_share" in row
            else 0
            for row in rows
        ]
        places = [place + 0.2 * (offset - 1.5) for place in range(len(rows))]
        axes.bar(places, shares, 0.2, color=color, label=name)
    axes.axhline(85, color=VERMILION, linewidth=1, label="aim: 85 %")
    axes.set_xticks(range(len(rows)), labels, rotation=45, ha="right")
    axes.set_ylim(0, 118)
    axes.set_xlabel("sequences x tokens of context")
    axes.set_ylabel("% of the copy bandwidth")
    axes.legend(ncols=5, fontsize=8)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("error: no CUDA device here: use --rehearse to try the script", file=sys.stderr)
        return 1
    start = time.perf_counter()
    device = "cpu" if arguments.rehearse else "cuda"
    seed = random.SystemRandom().randrange(2**30)
    found = errors(device, seed, small=arguments.rehearse)
    for row in found:
        if not row["passed"]:
            print("error: not equal to the gather:", row, file=sys.stderr)
    print(f"seed {seed}: {sum(r['passed'] for r in found)} of {len(found)} within tolerance")
    timer = clock_ms if arguments.rehearse else event_ms
    bandwidth = copy_bandwidth(device, 2**24 if arguments.rehearse else 2**30, timer)
    print(f"a copy moves {bandwidth / 1e9:,.0f} GB/s")
    shapes = [(batch, length - 1, 1, group) for batch, length, group in DECODE] + PREFILL
    options = {"device": device, "dtype": torch.bfloat16}
    if arguments.rehearse:
        shapes = [(2, 40, 1, 4), (1, 0, 5, 4), (2, 30, 3, 1)]
        options = {"device": device, "dtype": torch.float32, "num_heads": 4, "head_dim": 64}
        room = 2**30
    else:
        # A third each: the pool, the dense copy, and what gather and peers need.
        room = torch.cuda.mem_get_info()[0] // 3
    from torch.nn.attention.flex_attention import flex_attention

    if not arguments.rehearse:
        flex_attention = torch.compile(flex_attention, dynamic=False)
    rows, left_out = [], []
    for shape in shapes:
        sequences, cached, new, group_size = shape
        kv_bytes = 4 * sequences * (cached + new) * NUM_HEADS // group_size * HEAD_DIM
        if kv_bytes > room or time.perf_counter() - start > arguments.seconds:
            left_out.append(shape)
            continue
        # Each shape of flex attention is compiled for seconds: for one group size only.
        row = measure(shape, options, timer, flex_attention if group_size == 4 else None, bandwidth)
        rows.append(row)
        print(line(row), flush=True)
        gc.collect()
    print(f"{len(left_out)} shapes left out, for memory or time")
    if arguments.rehearse:
        return 0 if all(row["passed"] for row in found) else 1
    name = torch.cuda.get_device_name()
    result = {
        "seed": seed, "copy_bytes_per_s": bandwidth, "errors": found, "rows": rows,
        "left_out": left_out, "block_size": BLOCK_SIZE, "head_dim": HEAD_DIM,
        "num_heads": NUM_HEADS,
    }  # fmt: skip
    slug = "_".join(name.lower().split())
    print("written to", write_result(f"gpu_attention_{slug}", result))
    chart(rows, name).save(RESULTS / f"gpu_attention_{slug}.png")
    return 0 if all(row["passed"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
