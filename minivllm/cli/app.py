"""The application: its commands, and one line for every error."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from typer.exceptions import Abort, TyperException

import minivllm
from minivllm.cli import (
    blocks,
    bug,
    check,
    compare,
    demo,
    generate,
    kernel_report,
    kv_size,
    plot,
    simulate,
    start,
)
from minivllm.errors import MinivllmError

app = typer.Typer(
    name="minivllm",
    help="How an LLM server manages its KV cache, built step by step.",
    no_args_is_help=True,
    add_completion=False,
)
app.command(name="check")(check.check)
app.command(name="generate")(generate.generate)
app.command(name="demo")(demo.demo)
app.command(name="kv-size")(kv_size.kv_size)
app.command(name="compare")(compare.compare)
app.command(name="kernel-report")(kernel_report.kernel_report)
app.command(name="blocks")(blocks.blocks)
app.command(name="simulate")(simulate.simulate)
app.add_typer(plot.plot, name="plot")
app.command(name="start")(start.start)
app.command(name="bug")(bug.bug)


def print_version(wanted: bool) -> None:
    if wanted:
        print(minivllm.__version__)
        raise typer.Exit


@app.callback()
def options(
    impl: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Use your own files, for example `work`; the first option, before the command.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    if impl is not None:  # cli.main takes it, when it comes first
        raise typer.BadParameter("--impl must be the first option: minivllm --impl work ...")


def run(arguments: list[str]) -> int:
    """Runs a command and returns the exit status; what a user can mend ends in one line."""
    try:
        status = app(arguments, standalone_mode=False)
    except MinivllmError as error:
        return fail(str(error), 1)
    except NotImplementedError as error:
        if not str(error).startswith("exercise "):
            raise
        return fail(f"not written yet: {error}", 1)
    except TyperException as error:
        return fail(error.format_message(), error.exit_code)
    except BrokenPipeError:
        # The reader of a pipe (head, less) left: nothing more to say, to nobody.
        sys.stderr.close()
        return 0
    except OSError as error:
        return fail(f"{error.filename or 'a file'}: {error.strerror or error}", 1)
    except (KeyboardInterrupt, Abort):
        return fail("interrupted", 130)
    return status if isinstance(status, int) else 0


def fail(message: str, status: int) -> int:
    line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(f"error: {line}", markup=False, highlight=False)
    return status
