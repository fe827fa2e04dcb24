"""minivllm bug: a puzzle from the bug zoo."""

import difflib
import sys
from typing import Annotated

import typer

from minivllm.course.bugs import MAX_FAILED, find_bug, run_tests_on
from minivllm.course.chapters import PACKAGE


def bug(
    number: Annotated[str, typer.Argument(help="Chapter and number, like 1.2.")],
    reveal: Annotated[bool, typer.Option("--reveal", help="Show the wrong lines.")] = False,
) -> None:
    """Run a chapter's tests on a wrong version of the package: what is wrong with it?"""
    chapter, found = find_bug(number)
    print(f"bug {found.number}: {found.symptom}\n")
    if reveal:
        right = (PACKAGE / found.module).read_text(encoding="utf-8").splitlines()
        wrong = found.source().splitlines()
        for line in difflib.unified_diff(right, wrong, found.module, "wrong", lineterm="", n=2):
            print(line)
        return
    print(f"Running tests/{chapter.name} on it (up to a minute) ...", flush=True)
    result = run_tests_on(chapter, found)
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    print("\n".join(failed))
    if result.returncode == 0:
        print("\nNo test failed: this bug survives, which is a bug in the tests. Please report it.")
        sys.exit(1)
    which = "these tests fail, and only these"
    if len(failed) >= MAX_FAILED:
        which = f"these tests fail (the first {MAX_FAILED}, there may be more)"
    print(
        f"\nWhich line of the package could make {which}? "
        f"`python -m minivllm bug {number} --reveal` shows it."
    )
