"""minivllm generate: answer prompts with a real model."""

import json
import os
import sys
from logging import ERROR, getLogger
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.llm import LLM


def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.", metavar="PROMPT...")],
    model: Annotated[
        str, typer.Option(help="smollm2-135m, tiny-random, a local folder, or a hub id.")
    ] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from this much probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same tokens.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End at this text; may be repeated.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON list and nothing else on stdout.")
    ] = False,
    max_tokens_per_step: Annotated[int, typer.Option(help="The scheduler's token budget.")] = 2048,
    max_running: Annotated[int, typer.Option(help="The scheduler's sequence budget.")] = 256,
    kv_cache: Annotated[
        str, typer.Option(help="Where K and V are: past_key_values, reserved, growing, paged.")
    ] = "past_key_values",
    kv_slots: Annotated[int, typer.Option(help="Size of the KV pool, in token slots.")] = 4096,
    block_size: Annotated[int, typer.Option(help="Slots of a block, for paged.")] = 16,
    attention: Annotated[
        str, typer.Option(help="How a paged pool is read: auto, gather, numba or triton.")
    ] = "auto",
    layers: Annotated[
        str, typer.Option(help="What computes the rest of a pool's model: torch or onednn.")
    ] = "torch",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request, in tokens; default: what fits.")
    ] = None,
) -> None:
    """Answer all prompts together, through the engine."""
    from minivllm.sampling_params import SamplingParams

    if stream and as_json:
        raise RequestError("--stream and --json exclude each other: choose one")
    for position, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise RequestError(f"prompt {position} is empty: it must have at least one character")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    if os.environ.get("TRITON_INTERPRET") == "1" and attention == "triton":
        print(
            "triton's kernels are interpreted here, which is for learning, and very slow",
            file=sys.stderr,
        )
    llm = load_llm(
        model,
        max_tokens_per_step=max_tokens_per_step,
        max_running=max_running,
        layers=layers,
        kv={
            "kv_cache": kv_cache,
            "kv_slots": kv_slots,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "attention": attention,
        },
    )
    requests: list = [p if raw else [{"role": "user", "content": p}] for p in prompts]
    if stream:
        print_stream(llm, requests, params)
        return
    completions = llm.generate(requests, params, progress=sys.stderr.isatty())
    if as_json:
        fields = ("prompt_token_ids", "token_ids", "text", "stop_reason")
        print(json.dumps([{name: getattr(c, name) for name in fields} for c in completions]))
        return
    for prompt, completion in zip(prompts, completions, strict=True):
        if len(prompts) > 1:
            Console().print(Text(f"> {prompt}", style="bold"))
        print(completion.text)


def load_llm(model: str, *, kv: dict[str, Any] | None = None, **options: Any) -> "LLM":
    """An LLM, with a sign of life on stderr while the libraries and the weights load.

    kv: what makes a KVOptions.
    """
    with Console(stderr=True).status(f"loading {model} ..."):
        from transformers.utils import logging

        from minivllm.llm import LLM
        from minivllm.stages import KVOptions

        logging.disable_progress_bar()
        # Its warnings about each retry; when all failed, load_model says so in one sentence.
        getLogger("huggingface_hub").setLevel(ERROR)
        return LLM(model, kv=KVOptions(**(kv or {})), **options)


def print_stream(llm: "LLM", requests: list, params) -> None:
    """Prints increments as they come; with several prompts, each answer in its own block."""
    from minivllm.cli.answers import AnswersView

    if len(requests) > 1:
        with AnswersView(len(requests)) as view:
            for position, increment in llm.stream(requests, params):
                view.add(position, increment)
        return
    for _, increment in llm.stream(requests, params):
        print(increment.text, end="", flush=True)
    print()
