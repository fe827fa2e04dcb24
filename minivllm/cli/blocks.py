"""minivllm blocks: a small run on blocks, step by step."""

import re
import sys
from typing import TYPE_CHECKING, Annotated

import click
import typer

from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.simulation.workloads import Request

# A, B and C are there from the start, D comes later, and they cannot all grow at once.
SCRIPT = ("6+8", "3+9", "9+6", "5+3@3")


def blocks(
    requests: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT+OUTPUT[@STEP]]...",
            help="Lengths in tokens, and the step before which the request comes.",
        ),
    ] = None,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the pool.")] = 8,
    block_size: Annotated[int, typer.Option(help="Slots of a block.")] = 4,
    watermark: Annotated[float, typer.Option(help="Share that newcomers leave free.")] = 0.0,
    auto: Annotated[bool, typer.Option("--auto", help="Do not wait for a key.")] = False,
) -> None:
    """Watch the block manager and the scheduler at work, one key per step; q ends it."""
    from minivllm.memory.block_manager import BlockManager
    from minivllm.simulation.block_view import watch

    script = [parse(text) for text in requests or SCRIPT]
    frames = watch(
        sorted(script, key=lambda r: r.arrival), BlockManager(num_blocks, block_size, watermark)
    )
    print(f"requests (prompt + output): {', '.join(requests or SCRIPT)}\n")
    by_key = sys.stdin.isatty() and not auto
    if by_key:
        print("any key: next step, q: end\n")
    for number, frame in enumerate(frames, start=1):
        print(frame + "\n")
        if by_key and number < len(frames) and click.getchar() == "q":
            break


def parse(text: str) -> "Request":
    """`9+6@2`: a prompt of 9 tokens, 6 to generate, queued before step 2 (the first is 1)."""
    from minivllm.simulation.workloads import Request

    match = re.fullmatch(r"(\d{1,6})\+(\d{1,6})(?:@(\d{1,6}))?", text)
    prompt, output, step = (int(part or 1) for part in match.groups()) if match else (0, 0, 0)
    if min(prompt, output, step) < 1:
        raise RequestError(
            f"a request is {text!r}: write PROMPT+OUTPUT or PROMPT+OUTPUT@STEP, like 9+6@2, with "
            f"numbers from 1 up"
        )
    return Request(prompt, output, step - 1)
