"""The tables of the texts, made from the saved results of the benchmarks."""


def past_key_values_table(result: dict) -> str:
    rows = "".join(
        f"| {row['sequences']} | {row['engine_tokens_per_s']:.1f} | "
        f"{row['batched_tokens_per_s']:.1f} | {row['engine_python_share']:.1%} |\n"
        for row in result["rows"]
    )
    settings = result["settings"]
    return (
        "| sequences | engine, tokens/s | one batched pass, tokens/s | the engine's Python |\n"
        f"|---|---|---|---|\n{rows}\n"
        f"Medians of {settings['rounds']} alternating runs, decode only, float32, prompts of "
        f"{settings['prompt_len']} tokens, on {name_of(result)}.\n"
    )


def paged_attention_table(result: dict) -> str:
    rows = "".join(
        f"| {row['context_len']:,} | {row['dense_ms']:.2f} | {row['slice_ms']:.2f} | "
        f"{row['gather_ms']:.2f} | {row['to_dense']:.2f} | {row['to_slice']:.2f} |\n"
        for row in result["rows"]
    )
    return (
        "| tokens each | dense, ms | slice, ms | gather, ms | gather / dense | gather / slice |\n"
        f"|---|---|---|---|---|---|\n{rows}\n{measured_on(result)}"
    )


def compare_table(result: dict) -> str:
    def cell(row: dict, key: str, form: str) -> str:
        return "" if row[key] is None else format(row[key], form)

    rows = "".join(
        f"| {row['name']} | {row['tokens_equal']} of {row['requests']} | {row['peak_running']} | "
        f"{cell(row, 'token_share', '.1f')} | {row['decode_tokens_per_s']:.0f} | "
        f"{row['total_tokens_per_s']:.0f} | {row['speed']:.1f} | {row['total_speed']:.1f} |\n"
        for row in result["stages"]
    )
    return (
        "| stage | equal | at once | tokens, % of the pool | decode/s | total/s | "
        "decode, times reserve-max | total, times |\n"
        f"|---|---|---|---|---|---|---|---|\n{rows}\n{measured_on(result)}"
    )


def improvements_table(result: dict) -> str:
    rows = "".join(
        f"| {row['sequences']} x {row['prompt_len']:,} | {row['least_ms']:.0f} | "
        f"{row['ms']['plain']:.0f} | {row['ms']['products']:.0f} | {row['ms']['layers']:.0f} | "
        f"{row['ms']['numba']:.0f} | {row['ms']['onednn']:.0f} | "
        f"{row['ms']['plain'] / row['ms']['onednn']:.2f} |\n"
        for row in result["rows"]
    )
    return (
        "| sequences x tokens | at least, ms | model's layers, gather | faster products | "
        f"fewer calls | numba reads | oneDNN | gain |\n|---|{'---|' * 7}\n{rows}\n"
        f"ms of a decode step, medians of {result['steps']} steps, in turns, in float32, on "
        f"{name_of(result)}; it reads memory at {result['read_bytes_per_s'] / 1e9:.0f} GB/s.\n"
    )


def step_parts_table(result: dict) -> str:
    names = list(result["rows"][0]["parts"])
    rows = "".join(
        f"| {row['sequences']} x {row['prompt_len']:,} | "
        + " | ".join(f"{row['parts'][name]:.1f}" for name in names)
        + " |\n"
        for row in result["rows"]
    )
    return f"| ms of a step | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n{rows}\n"


def engine_table(result: dict) -> str:
    names = {
        "paged-numba-onednn": "minivllm",
        "vllm-eager": "vLLM, eager",
        "vllm-default": "vLLM, compiled",
        "generate": "generate",
        "bare": "bare model",
    }
    rows = ""
    for case, systems in result["cases"].items():
        cells = [
            f"{systems[name]['prefill']:.0f} / {systems[name]['decode']:.0f}"
            if name in systems
            else ""
            for name in names
        ]
        ratio = result["ratios"][case]
        cells.append(f"{ratio['prefill_to_vllm']:.2f} / {ratio['decode_to_vllm']:.2f}")
        rows += f"| {case} | {' | '.join(cells)} |\n"
    return (
        f"| sequences x prompt | {' | '.join(names.values())} | times vLLM's better mode |\n"
        f"|---|{'---|' * (len(names) + 1)}\n{rows}\n"
        f"Prefill / decode, tokens/s; {engine_runs(result)}"
    )


def engine_runs(result: dict) -> str:
    rounds = result["rounds"]
    runs = f"medians of {rounds} alternating runs" if rounds > 1 else "one run of each"
    return (
        f"{runs} in float32, on {name_of(result)}, "
        f"transformers {result['machine']['transformers']}, vLLM {result['versions']['vllm']}.\n"
    )


def engine_ratios_table(result: dict) -> str:
    rows = "".join(
        f"| {case} | {ratio['prefill_to_vllm']:.2f} | {ratio['decode_to_vllm']:.2f} |\n"
        for case, ratio in result["ratios"].items()
    )
    means = result["mean_prefill_to_vllm"], result["mean_decode_to_vllm"]
    return (
        "| times vLLM's better mode | prefill | decode |\n|---|---|---|\n"
        f"{rows}| *geometric mean of the shapes* | {means[0]:.2f} | {means[1]:.2f} |\n\n"
        f"From {engine_runs(result)}"
    )


def kernel_report_table(result: dict) -> str:
    rows = "".join(
        f"| {r['target']} | {r['registers']} | {r['spills']} | {r['shared']:,} | "
        f"{r['wide_loads']} | {r['narrow_loads']} | {r['async_copies']} | "
        f"{r['tensor_core_instructions']} | {r['occupancy']:.0%} |\n"
        for r in result["kernels"]
        if r["kernel"] == "decode" and r["head_dim"] == 128
    )
    return (
        "| target | registers | spills | shared, bytes | 128-bit loads | narrow | async | mma | "
        f"occupancy |\n|---|---|---|---|---|---|---|---|---|\n{rows}\n"
    )


def name_of(result: dict) -> str:
    """The machine of a result, and its torch."""
    machine = result["machine"]
    # Results from before it was recorded do not have it.
    vectors = f" ({machine['vector_instructions']})" if "vector_instructions" in machine else ""
    cores = f"{machine['cores']} cores"
    return f"{machine['processor']}{vectors} with {cores}, torch {machine['torch']}"


def measured_on(result: dict) -> str:
    rounds = result["settings"]["rounds"]
    runs = f"Medians of {rounds} alternating runs" if rounds > 1 else "One run"
    return f"{runs} in float32, on {name_of(result)}.\n"


TABLES = {
    "past_key_values": past_key_values_table,
    "paged_attention": paged_attention_table,
    "compare": compare_table,
    "compare_full": compare_table,
    "kernel_report": kernel_report_table,
    "improvements": improvements_table,
    "improvements parts": step_parts_table,
    "engine": engine_table,
    "engine_avx2 ratios": engine_ratios_table,
}
