"""What giving out and taking back blocks costs, against the size of the pool.

Three kinds of work on a pool that is nearly full: a request of 100 blocks comes and goes
(allocate, free); a request grows block by block (append); and, for comparison, ids taken from a
bare deque and put back in hundreds, which is the least that any free list must do.

    python benchmarks/block_manager.py [--rounds 5]
"""

import argparse
import time
from collections import deque

from machine import median, write_result

from minivllm.memory.block_manager import BlockManager
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence

BLOCK_SIZE = 16
AT_ONCE = 100


def sequence(name: str) -> Sequence:
    return Sequence(name, [0], SamplingParams())


def nearly_full(num_blocks: int) -> BlockManager:
    """All but 2 * AT_ONCE blocks belong to requests of AT_ONCE blocks."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    for number in range(num_blocks // AT_ONCE - 2):
        manager.allocate(sequence(f"old{number}"), AT_ONCE * BLOCK_SIZE)
    return manager


def allocate_and_free(manager: BlockManager, times: int) -> float:
    """Blocks per second that are allocated and freed, a hundred at once."""
    seq = sequence("new")
    start = time.perf_counter()
    for _ in range(times):
        manager.allocate(seq, AT_ONCE * BLOCK_SIZE)
        manager.free(seq)
    return times * AT_ONCE / (time.perf_counter() - start)


def append(manager: BlockManager, times: int) -> float:
    """Blocks per second when each is asked for by itself, as in decode."""
    seq = sequence("new")
    start = time.perf_counter()
    for _ in range(times):
        for block in range(AT_ONCE):
            manager.allocate(seq, block * BLOCK_SIZE + 1)
        manager.free(seq)
    return times * AT_ONCE / (time.perf_counter() - start)


def bare_deque(num_blocks: int, times: int) -> float:
    free = deque(range(num_blocks))
    start = time.perf_counter()
    for _ in range(times):
        taken = [free.popleft() for _ in range(AT_ONCE)]
        free.extend(taken)
    return times * AT_ONCE / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    managers = {size: nearly_full(size) for size in sizes}
    measured: dict[int, list[tuple[float, float, float]]] = {size: [] for size in sizes}
    for _ in range(arguments.rounds):
        for size, manager in managers.items():
            measured[size].append(
                (
                    allocate_and_free(manager, 5000),
                    append(manager, 500),
                    bare_deque(size, 5000),
                )
            )
    rows = []
    print("million blocks/s     allocate and free by 100   append one   bare deque by 100")
    for size, runs in measured.items():
        whole, single, bare = (median(column) for column in zip(*runs, strict=True))
        rows.append(
            {
                "num_blocks": size,
                "allocate_and_free_per_s": whole,
                "append_per_s": single,
                "bare_deque_per_s": bare,
            }
        )
        print(
            f"{size:>9,} blocks     {whole / 1e6:>24.1f}   {single / 1e6:>10.2f}   "
            f"{bare / 1e6:>17.1f}"
        )
    result = {"settings": {"rounds": arguments.rounds, "at_once": AT_ONCE}, "rows": rows}
    print("written to", write_result("block_manager", result))


if __name__ == "__main__":
    main()
