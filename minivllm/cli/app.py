"""The application: its commands, and one line for every error."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from typer.exceptions import Abort, TyperException

import minivllm
from minivllm.cli import check, demo, generate, kv_size
from minivllm.errors import MinivllmError

app = typer.Typer(
    name="minivllm",
    help="How an LLM server manages its KV cache, built step by step.",
    no_args_is_help=True,
    add_completion=False,
)
app.command(name="check")(check.check)
app.command(name="generate")(generate.generate)
app.command(name="kv-size")(kv_size.kv_size)
app.command(name="demo")(demo.demo)


def print_version(wanted: bool) -> None:
    if wanted:
        print(minivllm.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Options that stand before the command."""


def main() -> None:
    """Runs the command line; what a user can mend ends in one line and a non-zero status."""
    try:
        status = app(standalone_mode=False)
    except MinivllmError as error:
        sys.exit(_fail(str(error), 1))
    except TyperException as error:
        sys.exit(_fail(error.format_message(), error.exit_code))
    except (KeyboardInterrupt, Abort):
        sys.exit(_fail("interrupted", 130))
    except BrokenPipeError:
        # The reader of a pipe (head, less) left: nothing more to say, to nobody.
        sys.stderr.close()
        sys.exit(0)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> int:
    line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(f"error: {line}", markup=False, highlight=False)
    return status
