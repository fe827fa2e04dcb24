"""The engine beside transformers and vLLM: the same model, prompts and greedy tokens, two cores.

Six shapes (sequences x prompt tokens, 33 tokens each) and a trace of 48 requests with lengths like
Azure's conversations. All systems take turns; medians of the rounds. The first four shapes take a
second or two each, so that the systems that the ratios compare run them THRICE as often: a shape's
first run pays for new pages and for oneDNN's code of that shape, and the median of three runs may
still hold some of that. How to set up vLLM's Python is told in benchmarks/README.md.

    python benchmarks/engine.py [--rounds 3] [--vllm-python PATH]
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch
from cases import BUDGET, OURS, OUTPUT, STAGES, TRACE, make_cases, text_ids
from machine import RESULTS, median, write_result
from systems import System, generate, generate_batch, our_worker, stage, vllm_worker

from minivllm.charts.chart import BLUE, GREY, ORANGE, VERMILION, Chart
from minivllm.compare import TIE, Job
from minivllm.models import load_model
from minivllm.packaged_model import SMOLLM2

# Slow, or beside the point.
ONCE = ("past_key_values", "reserve-max", "paged-numba", "generate_batch")
THRICE = ("1 x 16", "16 x 16", "32 x 16", "1 x 512")
COMPARED = (OURS, "bare", "vllm-eager", "vllm-default")


def count_runs(name: str, case: str, rounds: int) -> int:
    """How often a system runs a case."""
    if name in ONCE or (name, case) == ("generate", TRACE):
        return 1
    return 3 * rounds if name in COMPARED and case in THRICE else rounds


def count_equal(
    tokens: list[list[int]], expected: list[list[int]], margins: list[list[float]]
) -> dict[str, int]:
    """Jobs with the expected tokens, and those whose first difference is a tie."""
    found = {"equal": 0, "ties": 0, "different": 0}
    for ours, theirs, margin in zip(tokens, expected, margins, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        kind = "equal" if first is None else "ties" if margin[first] < TIE else "different"
        found[kind] += 1
    return found


def measure(systems: dict[str, System], jobs: list[Job], rounds: int, case: str) -> dict:
    """One case through all systems: the medians of their rates, and how many tokens are equal."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    margins: list[list[float]] = []
    expected = generate(REFERENCE[0], margins)(jobs).tokens
    rows: dict[str, dict] = {}
    for number in range(3 * rounds):
        for name, system in systems.items():
            if number >= count_runs(name, case, rounds):
                continue
            if case == TRACE and name in ("bare", "generate_batch"):
                continue  # they take equal lengths only
            run = system(jobs)
            runs[name].append(run.rates(jobs))
            if number == 0:
                rows[name] = count_equal(run.tokens, expected, margins)
    for name, row in rows.items():
        row |= {k: median([run[k] for run in runs[name]]) for k in ("prefill", "decode", "total")}
        row["runs"] = runs[name]
        print(
            f"{case:9} {name:16} prefill {row['prefill']:6.0f}, decode {row['decode']:6.1f}, total "
            f"{row['total']:6.1f} tokens/s; {row['equal']} equal, {row['ties']} ties, "
            f"{row['different']} different",
            flush=True,
        )
    return rows


NAMES = {OURS: "minivllm", "vllm-eager": "vLLM, eager", "vllm-default": "vLLM, compiled"}
REFERENCE: list = []  # the model, for transformers' own tokens; set by main


def ratios(cases: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Ours to the better of vLLM's modes, and to the bare model."""
    found: dict[str, dict[str, float]] = {}
    for case, rows in cases.items():
        ours, found[case] = rows[OURS], {}
        for key in ("prefill", "decode", "total"):
            peers = [row[key] for name, row in rows.items() if name.startswith("vllm")]
            if peers:
                found[case][f"{key}_to_vllm"] = ours[key] / max(peers)
            if "bare" in rows:
                found[case][f"{key}_to_bare"] = ours[key] / rows["bare"][key]
    return found


def chart(cases: dict[str, dict], machine_name: str) -> Chart:
    shapes = [case for case in cases if case != TRACE]
    compared = {"generate": GREY, "vllm-eager": ORANGE, "vllm-default": VERMILION, OURS: BLUE}
    compared = {n: c for n, c in compared.items() if all(n in cases[case] for case in shapes)}
    peers = [n for n in compared if n.startswith("vllm")] or ["generate"]
    prefill, decode = (
        statistics.geometric_mean(
            cases[c][OURS][key] / max(cases[c][n][key] for n in peers) for c in shapes
        )
        for key in ("prefill", "decode")
    )
    against = "vLLM's better mode" if "vllm-eager" in peers else peers[0]
    title = f"On average {prefill:.2f} (prefill) and {decode:.2f} (decode) times {against}"
    figure = Chart(f"{title} ({machine_name})", columns=2, width=9.6)
    for axes, key in zip(figure.panels, ("prefill", "decode"), strict=True):
        for number, (name, color) in enumerate(compared.items()):
            values = [cases[case][name][key] for case in shapes]
            width = 0.8 / len(compared)
            places = [p + width * (number - (len(compared) - 1) / 2) for p in range(len(shapes))]
            axes.bar(places, values, width, color=color, label=NAMES.get(name, name))
        axes.set_xticks(range(len(shapes)), shapes, rotation=30)
        axes.set_xlabel("sequences x prompt tokens")
        axes.set_ylabel(f"{key}, tokens/s")
        axes.grid(False, axis="x")
    figure.panels[1].legend(loc="upper right", fontsize=8)
    return figure


def main(arguments: SequenceOf[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--cases", nargs="*", help="only these, for example `16 x 16` trace")
    options = parser.parse_args(arguments)
    script = Path(__file__).with_name("peak_memory.py")
    peak = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True
    )
    memory = json.loads(peak.stdout.splitlines()[-1])
    allowed = 1.2 * (memory["weight_bytes"] + memory["pool_bytes"])
    print(
        f"peak {memory['peak_bytes'] / 1e6:,.0f} MB; weights + pool + 20 %: {allowed / 1e6:,.0f}; "
        f"most of the pool that was in use: {memory['used_pool_bytes'] / 1e6:,.0f}"
    )
    model, tokenizer = load_model()
    REFERENCE[:] = [model]
    systems: dict[str, System] = {
        name: our_worker("engine") if name == OURS else stage(model, tokenizer, name)
        for name in STAGES
    }
    systems |= {
        "bare": our_worker("bare"),
        "generate": generate(model),
        "generate_batch": generate_batch(model),
    }
    versions = {}
    if options.vllm_python:
        folder = str(SMOLLM2.prepare(lambda text: None))
        for mode in ("eager", "default"):
            systems[f"vllm-{mode}"] = peer = vllm_worker(options.vllm_python, folder, mode)
            versions["vllm"] = peer.ready["version"]
    warm_up = [Job([1, 2, 3, 4], 3)] * 2
    for system in systems.values():
        system(warm_up)
    cases = {}
    for case, jobs in make_cases(text_ids(tokenizer)).items():
        if options.cases is None or case in options.cases:
            cases[case] = measure(systems, jobs, options.rounds, case)
    found = ratios(cases)
    jobs = make_cases(text_ids(tokenizer))["32 x 16"]
    share = our_worker("own_share").ask(jobs)["own_share"]
    result = {
        "versions": versions, "rounds": options.rounds, "output_tokens": OUTPUT,
        "token_budget": BUDGET, "memory": memory, "cases": cases, "ratios": found,
        "own_share_of_a_step_at_32": share,
    }  # fmt: skip
    for case, row in found.items():
        print(f"{case:9}", ", ".join(f"{name} {value:.2f}" for name, value in row.items()))
    shapes = [row for case, row in found.items() if case != TRACE]
    for key in ("prefill_to_vllm", "decode_to_vllm"):
        if shapes and all(key in row for row in shapes):
            result[f"mean_{key}"] = statistics.geometric_mean(row[key] for row in shapes)
            print(f"{key}: geometric mean {result[f'mean_{key}']:.2f}")
    print(f"own share of a step at 32 sequences: {share:.1%}")
    if options.cases is None:
        path = write_result("engine", result)
        name = json.loads(path.read_text())["machine"]["processor"]
        chart(cases, f"{name}, {torch.get_num_threads()} threads").save(RESULTS / "engine.png")
        print("written to", path)


if __name__ == "__main__":
    main()
