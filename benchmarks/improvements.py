"""Where the time of a decode step goes, and what each step towards speed buys.

Variants of the engine take turns, five decode steps each: the model's own layers and the gather;
each linear layer by the fastest of several products; whole layers in fewer calls; K and V read by
numba; and all but attention by ONNX Runtime. The last runs in a process of its own, where torch's
threads wait for less long (see minivllm/cli/main.py). Beside them the least that a step can take
here: the bytes of the weights, and of K and V, at the speed at which this machine reads memory.
SmolLM2-135M in float32.

    python benchmarks/improvements.py [--steps 25]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from machine import median, write_result
from systems import TimedModel

from minivllm import fast_layers
from minivllm.cli.main import SHORT_WAIT
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
    "onnx": ("numba", "onnx"),
}
TURN = 5  # steps
LAST = "onnx"
WORKER = "--last-variant"  # makes this script the process of the last variant


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
    llm = LLM(model, tokenizer, kv=kv, layers="onnx" if faster == "onnx" else "torch")
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
    from minivllm import onnx_layers

    spent = {"layers": 0.0, "attention": 0.0, "all": 0.0}

    def clocked(name: str, function: Callable) -> Callable:
        def run(*arguments, **options):
            start = time.perf_counter()
            found = function(*arguments, **options)
            spent[name] += time.perf_counter() - start
            return found

        return run

    model, attention = engine.runner.model, onnx_layers.pool_attention
    timed, compute = TimedModel(model), onnx_layers.Graph.__call__
    try:
        onnx_layers.Graph.__call__ = clocked("layers", compute)
        onnx_layers.pool_attention = clocked("attention", attention)
        engine.runner.model = timed
        step = clocked("all", engine.step)
        step()
        spent.update(dict.fromkeys(spent, 0.0))
        timed.seconds = 0.0
        for _ in range(steps):
            step()
    finally:
        onnx_layers.Graph.__call__, onnx_layers.pool_attention = compute, attention
        engine.runner.model = model
    spent["model"] = timed.seconds
    ms = {name: 1000 * seconds / steps for name, seconds in spent.items()}
    return {
        "layers, by ONNX Runtime": ms["layers"],
        "attention": ms["attention"],
        "the model's other work": ms["model"] - ms["layers"] - ms["attention"],
        "the engine's own": ms["all"] - ms["model"],
    }


def serve_last_variant(model, tokenizer) -> None:
    """Answers lines of JSON: a shape makes an engine, `step` and `parts` use it."""
    results, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps("ready"), file=results, flush=True)
    engine: Engine | None = None
    for line in sys.stdin:
        asked, *given = json.loads(line)
        if asked == "make":
            engine = None  # its memory goes before the next one's comes
            engine = make_engine(model, tokenizer, LAST, *given)
            answer: object = True
        elif asked == "step":
            answer = timed_ms(engine.step)
        else:
            answer = parts_of(engine, *given)
        print(json.dumps(answer), file=results, flush=True)


class LastVariant:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=os.environ | SHORT_WAIT,
        )  # fmt: skip
        self._process.stdout.readline()

    def ask(self, *request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def measure(
    model, tokenizer, last: LastVariant, num_seqs: int, prompt_len: int, steps: int,
    bandwidth: float,
) -> dict:  # fmt: skip
    engines = {
        name: make_engine(model, tokenizer, name, num_seqs, prompt_len, 2 * steps)
        for name in VARIANTS
        if name != LAST
    }
    last.ask("make", num_seqs, prompt_len, 2 * steps)
    runs: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(steps // TURN):
        for name in VARIANTS:
            time.sleep(0.05)  # the threads of the one before wait for work, and then do not
            for _ in range(TURN):
                ms = last.ask("step") if name == LAST else timed_ms(engines[name].step)
                runs[name].append(ms)
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
        "parts": last.ask("parts", min(steps, 15)),
    }


def bytes_of_a_token(engine: Engine) -> int:
    """Bytes of K and V of one token in all layers."""
    pool = engine.runner.pool
    return pool.num_bytes // (pool.keys.shape[1] * pool.block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument(WORKER, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model, tokenizer = load_model()
    if arguments.last_variant:
        serve_last_variant(model, tokenizer)
        return
    last = LastVariant()
    bandwidth = read_bandwidth()
    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for num_seqs, prompt_len in SHAPES:
        row = measure(model, tokenizer, last, num_seqs, prompt_len, arguments.steps, bandwidth)
        rows.append(row)
        times = ", ".join(f"{name} {ms:.1f}" for name, ms in row["ms"].items())
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in row["parts"].items())
        print(f"{num_seqs} x {prompt_len}: {times} ms; at least {row['least_ms']:.1f}; {parts}")
    result = {"steps": arguments.steps, "read_bytes_per_s": bandwidth, "rows": rows}
    print("written to", write_result("improvements", result))


if __name__ == "__main__":
    main()
