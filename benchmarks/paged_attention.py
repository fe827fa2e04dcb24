"""What reading through block tables costs: gather against slice and dense, on the same lengths.

slice is chapter 2's reader, sequence by sequence. dense is one call over all sequences without any
copy, which is possible only here, where all have the same length and lie in a row.

16 sequences that decode one token each, in the shapes of SmolLM2-135M, 30 layers after one
another so that no layer's K and V are in the processor's cache. Alternating runs.

    python benchmarks/paged_attention.py [--rounds 9]
"""

import argparse
import random
import time
from collections.abc import Callable

import torch
from machine import median, write_result

from minivllm.attention.batch import Batch
from minivllm.attention.dense import attend
from minivllm.attention.gather import GatherAttention
from minivllm.attention.slice import slice_attention

NUM_SEQS, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 30, 9, 3, 64, 16


def milliseconds(read: Callable[[int], object]) -> float:
    """Per layer."""
    start = time.perf_counter()
    for layer in range(NUM_LAYERS):
        read(layer)
    return 1000 * (time.perf_counter() - start) / NUM_LAYERS


@torch.inference_mode()
def measure(context_len: int, rounds: int) -> dict[str, float]:
    num_blocks = NUM_SEQS * -(-context_len // BLOCK_SIZE)
    shape = (NUM_LAYERS, num_blocks * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    keys, values = torch.randn(shape), torch.randn(shape)
    query = torch.randn(NUM_SEQS, NUM_HEADS, HEAD_DIM)
    ids = random.Random(0).sample(range(num_blocks), num_blocks)
    per_seq = num_blocks // NUM_SEQS
    tables = [ids[i * per_seq : (i + 1) * per_seq] for i in range(NUM_SEQS)]
    held = per_seq * BLOCK_SIZE
    regions = [range(i * held, (i + 1) * held) for i in range(NUM_SEQS)]
    none = torch.empty(0)
    loc, lens = list(range(NUM_SEQS + 1)), [context_len] * NUM_SEQS
    paged = Batch(none, none, none, loc, lens, tables, BLOCK_SIZE, none)
    contiguous = Batch(none, none, none, loc, lens, regions, 1, none)
    gather = GatherAttention()

    def by_gather(i: int) -> object:
        return gather(query, keys[i], values[i], paged, scaling=HEAD_DIM**-0.5)

    def by_slice(i: int) -> object:
        return slice_attention(query, keys[i], values[i], contiguous, scaling=HEAD_DIM**-0.5)

    def dense(i: int) -> object:
        key, value = (
            tensor[i].unflatten(0, (NUM_SEQS, held))[:, :context_len].transpose(1, 2)
            for tensor in (keys, values)
        )
        return attend(
            query.unflatten(1, (NUM_KV_HEADS, -1)), key, value, None, scaling=HEAD_DIM**-0.5
        )

    readers = {"dense": dense, "slice": by_slice, "gather": by_gather}
    runs: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(rounds + 1):
        for name, read in readers.items():
            took = milliseconds(read)
            if number:  # the first round warms up
                runs[name].append(took)
    times = {name: median(values) for name, values in runs.items()}
    return {
        "context_len": context_len,
        **{f"{name}_ms": value for name, value in times.items()},
        "to_slice": times["gather"] / times["slice"],
        "to_dense": times["gather"] / times["dense"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows = [measure(context_len, arguments.rounds) for context_len in (128, 512, 2048)]
    for row in rows:
        print(
            f"{row['context_len']:5,} tokens: dense {row['dense_ms']:.2f} ms, slice "
            f"{row['slice_ms']:.2f}, gather {row['gather_ms']:.2f}: {row['to_dense']:.2f} times "
            f"dense, {row['to_slice']:.2f} times slice"
        )
    result = {"settings": {"rounds": arguments.rounds, "sequences": NUM_SEQS}, "rows": rows}
    print("written to", write_result("paged_attention", result))


if __name__ == "__main__":
    main()
