"""Stage past_key_values: tokens/s, against one batched pass, and the engine's own Python.

Each of the sequences decodes alone, one forward pass after the other; `transformers.generate` on
the same prompts as one batch shows what a single pass for all would give. Prompts have the same
length, so the batch needs no padding. The runs alternate; each number is a median.

    python benchmarks/past_key_values.py [--rounds 5]
"""

import argparse
import time

import torch
from machine import median, write_result

from minivllm import LLM, SamplingParams
from minivllm.models import load_model

PROMPT_LEN = 32
MAX_TOKENS = 25  # 1 from the prefill, then 24 decode steps
SIZES = (1, 4, 16)


def prompts(tokenizer, count: int) -> list[list[int]]:
    """count different prompts of PROMPT_LEN tokens."""
    text = "The wind had turned in the night and the boats lay the other way round. " * 20
    ids = tokenizer(text).input_ids
    return [ids[3 * i : 3 * i + PROMPT_LEN] for i in range(count)]


def run_engine(llm: LLM, count: int) -> dict:
    """Decode tokens/s from the first to the last token, and the share of a step outside the model.

    The runner's time is the model's; the rest of the loop is scheduling, sampling, text.
    """
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for prompt in prompts(llm.tokenizer, count):
        llm.engine.add_request(prompt, params)
    runner, model_seconds = llm.engine.runner, 0.0
    run = runner.run

    def timed_run(step):
        nonlocal model_seconds
        start = time.perf_counter()
        logits = run(step)
        model_seconds += time.perf_counter() - start
        return logits

    llm.engine.step()  # the prefill of all
    runner.run = timed_run
    start = time.perf_counter()
    num_tokens = 0
    while llm.engine.has_unfinished:
        num_tokens += len(llm.engine.step())
    seconds = time.perf_counter() - start
    runner.run = run
    return {"tokens_per_s": num_tokens / seconds, "python_share": 1 - model_seconds / seconds}


def run_batched(llm: LLM, count: int) -> dict:
    """Decode tokens/s of transformers' generate, all prompts in one batch."""
    input_ids = torch.tensor(prompts(llm.tokenizer, count))

    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        llm.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
        return time.perf_counter() - start

    # generate reports no times of its own: the difference to a run of one token is the decode.
    decode = seconds(MAX_TOKENS) - seconds(1)
    return {"tokens_per_s": count * (MAX_TOKENS - 1) / decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    llm = LLM(*load_model())
    run_engine(llm, 1)
    run_batched(llm, 1)  # both once before anything counts
    samples: dict[int, list[tuple[dict, dict]]] = {count: [] for count in SIZES}
    for _ in range(arguments.rounds):
        for count in SIZES:
            samples[count].append((run_engine(llm, count), run_batched(llm, count)))

    rows = []
    print(f"{'sequences':>9} {'engine tok/s':>13} {'batched tok/s':>14} {'ratio':>6} {'python':>7}")
    for count, runs in samples.items():
        row = {
            "sequences": count,
            "engine_tokens_per_s": median([engine["tokens_per_s"] for engine, _ in runs]),
            "batched_tokens_per_s": median([batched["tokens_per_s"] for _, batched in runs]),
            "engine_python_share": median([engine["python_share"] for engine, _ in runs]),
        }
        row["batched_over_engine"] = row["batched_tokens_per_s"] / row["engine_tokens_per_s"]
        rows.append(row)
        print(
            f"{count:9d} {row['engine_tokens_per_s']:13.1f} {row['batched_tokens_per_s']:14.1f} "
            f"{row['batched_over_engine']:6.2f} {row['engine_python_share']:7.1%}"
        )
    settings = {"prompt_len": PROMPT_LEN, "max_tokens": MAX_TOKENS, "rounds": arguments.rounds}
    print("written to", write_result("past_key_values", {"settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
