"""Where the time of a decode step goes, and what each step towards speed buys.

Variants of the engine take turns, five decode steps each: the model's own layers and the gather;
each linear layer by the fastest of several products; whole layers in fewer calls; K and V read by
numba; and the products by oneDNN, with packed weights. Beside them the least that a step can take
here: the bytes of the weights, and of K and V, at the speed at which this machine reads memory.
SmolLM2-135M in float32.

    python benchmarks/improvements.py [--steps 25]
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext

import minivllm  # noqa: F401 - before torch: see minivllm/threads.py

# isort: split
import torch
from machine import median, write_result
from systems import TimedModel

from minivllm import fast_layers, onednn_layers
from minivllm.engine import Engine
from minivllm.llm import LLM
from minivllm.models import load_model
from minivllm.sampling_params import SamplingParams
from minivllm.stages import KVOptions

SHAPES = [(1, 16), (4, 2048), (16, 16), (16, 512), (32, 16)]
VARIANTS = {
    # name: (reader, which layers are faster)
    "plain": ("gather", None),
    "products": ("gather", "products"),
    "layers": ("gather", "layers"),
    "numba": ("numba", "layers"),
    "onednn": ("numba", "onednn"),
}
TURN = 5  # steps
LAST = "onednn"


def read_bandwidth() -> float:
    """Bytes per second at which the threads read a tensor too large for any cache."""
    tensor = torch.ones(2**28)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        tensor.sum()
        times.append(time.perf_counter() - start)
    return tensor.nbytes / median(times)


def make_engine(
    model, tokenizer, variant: str, num_seqs: int, prompt_len: int, steps: int
) -> Engine:
    reader, faster = VARIANTS[variant]
    longest = prompt_len + steps + 8
    slots = num_seqs * (longest // 16 + 2) * 16
    kv = KVOptions("paged", slots, longest, attention=reader)
    llm = LLM(model, tokenizer, kv=kv, layers="onednn" if faster == "onednn" else "torch")
    runner = llm.engine.runner
    if faster is None:
        runner.layers = nullcontext
    elif faster == "products":
        runner.layers = fast_layers.FastLayers(model, whole=False)
    for i in range(num_seqs):
        prompt = [(7 * i + 3 * j) % 30_000 + 100 for j in range(prompt_len)]
        llm.engine.add_request(prompt, SamplingParams(max_tokens=steps + 8, ignore_eos=True))
    while any(not seq.generated_token_ids for seq in sequences(llm.engine)):
        llm.engine.step()
    return llm.engine


def sequences(engine: Engine) -> list:
    return [*engine.scheduler.running, *engine.scheduler.waiting]


def timed_ms(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def parts_of(engine: Engine, steps: int) -> dict[str, float]:
    """ms of a step of the last variant, by clocks around calls: each adds about a microsecond."""
    spent = {"products": 0.0, "attention": 0.0, "all": 0.0}

    def clocked(name: str, function: Callable) -> Callable:
        def run(*arguments, **options):
            start = time.perf_counter()
            found = function(*arguments, **options)
            spent[name] += time.perf_counter() - start
            return found

        return run

    model, attention = engine.runner.model, onednn_layers.pool_attention
    packed, products = onednn_layers.Packed, ("__call__", "plus", "times")
    timed, computed = TimedModel(model), [getattr(packed, name) for name in products]
    try:
        for name, compute in zip(products, computed, strict=True):
            setattr(packed, name, clocked("products", compute))
        onednn_layers.pool_attention = clocked("attention", attention)
        engine.runner.model = timed
        step = clocked("all", engine.step)
        step()
        spent.update(dict.fromkeys(spent, 0.0))
        timed.seconds = 0.0
        for _ in range(steps):
            step()
    finally:
        for name, compute in zip(products, computed, strict=True):
            setattr(packed, name, compute)
        onednn_layers.pool_attention = attention
        engine.runner.model = model
    spent["model"] = timed.seconds
    ms = {name: 1000 * seconds / steps for name, seconds in spent.items()}
    return {
        "products": ms["products"],
        "attention": ms["attention"],
        "the model's other work": ms["model"] - ms["products"] - ms["attention"],
        "the engine's own": ms["all"] - ms["model"],
    }


def measure(model, tokenizer, num_seqs: int, prompt_len: int, steps: int, bandwidth: float) -> dict:
    engines = {
        name: make_engine(model, tokenizer, name, num_seqs, prompt_len, 2 * steps)
        for name in VARIANTS
    }
    runs: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(steps // TURN):
        for name in VARIANTS:
            time.sleep(0.05)  # the threads of the one before wait for work, and then do not
            runs[name] += [timed_ms(engines[name].step) for _ in range(TURN)]
    times = {name: median(values) for name, values in runs.items()}
    weights = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    kv_bytes = bytes_of_a_token(engines["numba"]) * sum(
        seq.num_tokens for seq in sequences(engines["numba"])
    )
    return {
        "sequences": num_seqs,
        "prompt_len": prompt_len,
        "ms": times,
        "weight_bytes": weights,
        "kv_bytes": kv_bytes,
        "least_ms": 1000 * (weights + kv_bytes) / bandwidth,
        "parts": parts_of(engines[LAST], min(steps, 15)),
    }


def bytes_of_a_token(engine: Engine) -> int:
    """Bytes of K and V of one token in all layers."""
    pool = engine.runner.pool
    return pool.num_bytes // (pool.keys.shape[1] * pool.block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    model, tokenizer = load_model()
    bandwidth = read_bandwidth()
    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for num_seqs, prompt_len in SHAPES:
        row = measure(model, tokenizer, num_seqs, prompt_len, arguments.steps, bandwidth)
        rows.append(row)
        times = ", ".join(f"{name} {ms:.1f}" for name, ms in row["ms"].items())
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in row["parts"].items())
        print(f"{num_seqs} x {prompt_len}: {times} ms; at least {row['least_ms']:.1f}; {parts}")
    result = {"steps": arguments.steps, "read_bytes_per_s": bandwidth, "rows": rows}
    print("written to", write_result("improvements", result))


if __name__ == "__main__":
    main()
