"""minivllm demo: eight prompts through the engine, and what they cost."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# From three words to a page, so that prefill and decode of different requests mix.
STORY = (
    "The lighthouse keeper wrote every evening into the same book: the wind, the ships, the oil "
    "that was left. In forty years he had filled eleven of them. When the light was automated, "
    "two engineers came by boat, measured the lamp, and asked him what he wanted to keep. He gave "
    "them the lamp, the clock and the brass instruments, and carried the books down to the shore. "
)
PROMPTS = [
    "Say hello.",
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a haiku about a river in winter.",
    "Name three uses of a paper clip, and for each say who would need it most and why.",
    "Explain to a ten-year-old what a computer's memory is, and why a program that has too "
    "little of it becomes slow. Use a desk and a shelf as the example.",
    f"Give this story a title and say in one sentence what it is about. {STORY}",
    f"Here is a story. {STORY * 3} Who is the main person of the story, and what does he keep?",
]


def demo(
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 48,
    model: Annotated[str, typer.Option(help="As in `generate`.")] = "smollm2-135m",
) -> None:
    """Answer eight prompts of different lengths at the same time, streaming."""
    from minivllm.cli.generate import load_llm
    from minivllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    llm = load_llm(model)
    peak_bytes = 0

    def note_peak(_step: object) -> None:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, llm.engine.runner.kv_bytes())

    llm.engine.on_step = note_peak

    from minivllm.cli.answers import AnswersView

    labels = [f"{prompt if len(prompt) < 60 else prompt[:57] + '...'}\n  " for prompt in PROMPTS]
    chats: list = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    num_tokens = 0
    start = time.perf_counter()
    with AnswersView(len(PROMPTS), labels) as view:
        for position, increment in llm.stream(chats, params):
            view.add(position, increment)
            num_tokens += 1
    seconds = time.perf_counter() - start

    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("requests", f"{len(PROMPTS)}")
    table.add_row("tokens generated", f"{num_tokens}")
    table.add_row("seconds", f"{seconds:.1f}")
    table.add_row("tokens/s", f"{num_tokens / seconds:.1f}")
    table.add_row("KV bytes at the peak", f"{peak_bytes:,}")
    Console().print(table)
