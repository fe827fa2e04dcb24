"""The stages on the real model, at the chapter's short lengths and at full ShareGPT-like ones.

Short: all stages, as `python -m minivllm compare`. Full (--full): a maximum of 2,048 tokens, a pool
that holds four requests of it, only reserve-max and paged. Ratios of medians over alternating runs.

    python benchmarks/compare.py [--full] [--rounds 3]
"""

import argparse
from dataclasses import asdict

from machine import median, write_result

from minivllm.cli.compare import print_table, run
from minivllm.compare import StageResult

FULL = {"requests": 48, "kv_slots": 8192, "max_model_len": 2048, "shrink": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    settings = FULL if arguments.full else {}
    pooled = ["reserve-max", "grow", "paged-gather"]
    if arguments.full:
        pooled.remove("grow")
    rounds: list[list[StageResult]] = []
    for number in range(arguments.rounds):
        stages = pooled if arguments.full or number else ["past_key_values", *pooled]
        rounds.append(run(stages=stages, **settings))
        print_table(rounds[-1])
    rows = []
    for result in rounds[0]:
        runs = [r for results in rounds for r in results if r.name == result.name]
        row = {k: v for k, v in asdict(result).items() if k not in ("seconds", "running")}
        for key in ("decode_tokens_per_s", "total_tokens_per_s"):
            row[key] = median([getattr(r, key) for r in runs])
        rows.append(row)
    base = next(row for row in rows if row["name"] == "reserve-max")
    for row in rows:
        row["speed"] = row["decode_tokens_per_s"] / base["decode_tokens_per_s"]
        row["total_speed"] = row["total_tokens_per_s"] / base["total_tokens_per_s"]
        print(
            f"{row['name']:16} at once {row['peak_running']:3}, decode {row['speed']:.2f}, "
            f"total {row['total_speed']:.2f} times reserve-max"
        )
    result = {"settings": {"rounds": arguments.rounds, **settings}, "stages": rows}
    print("written to", write_result("compare_full" if arguments.full else "compare", result))


if __name__ == "__main__":
    main()
