"""pytest --impl FOLDER: a chapter's tests on your files, and a word on what is still to write."""

import re
from pathlib import Path

import pytest

from minivllm.course.chapters import ROOT, all_chapters
from minivllm.course.overlay import files_in, install
from minivllm.errors import CourseError

TODO = re.compile(r"exercise (\d+)\.(\d+): (.*)")
MISSING = pytest.StashKey[set[tuple[int, int, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl",
        metavar="FOLDER",
        help="test the files in FOLDER (`work`: your exercises) in place of the package's",
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--impl")
    if folder is None:
        return
    config.stash[MISSING] = set()
    try:
        install(files_in(implementation(Path(folder), config.args)))
    except CourseError as error:
        raise pytest.UsageError(str(error)) from None


def implementation(folder: Path, tests: list[str]) -> Path:
    """The folder itself, or the one chapter in it whose tests are asked for."""
    if not folder.is_absolute() and not folder.is_dir():
        folder = ROOT / folder
    named = [c for c in all_chapters() if any(c.name in Path(test).parts for test in tests)]
    if len(named) == 1 and (folder / named[0].name).is_dir():
        return folder / named[0].name
    if any(folder.glob("ch[0-9][0-9]_*")):
        if len(named) != 1:
            raise CourseError("--impl tests one chapter at a time: name it, like tests/ch01_*")
        raise CourseError(
            f"{folder} has no files of {named[0].name}: "
            f"`python -m minivllm start {named[0].number}` copies them"
        )
    return folder


def exercise_of(error: BaseException | None) -> tuple[int, int, str] | None:
    """(chapter, number, what) when the error, or what caused it, is an exercise to be written."""
    while error is not None:
        match = TODO.search(str(error)) if isinstance(error, NotImplementedError) else None
        if match is not None:
            return int(match[1]), int(match[2]), match[3]
        if isinstance(error, BaseExceptionGroup):  # Hypothesis: several things failed
            found = [exercise for inner in error.exceptions if (exercise := exercise_of(inner))]
            if found:
                return min(found)
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    missing = item.config.stash.get(MISSING, None)
    if missing is not None and call.excinfo is not None:
        exercise = exercise_of(call.excinfo.value)
        if exercise is not None:
            missing.add(exercise)
            # The traceback would lead to a line that the reader has not written yet.
            report.longrepr = "exercise {}.{} is not written yet: {}".format(*exercise)
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    missing = sorted(config.stash.get(MISSING, None) or ())
    if not missing:
        return
    chapter, number, what = missing[0]
    count = len({exercise[:2] for exercise in missing})
    print(f"\nRed is expected here: {count} of the exercises are not written yet.")
    print(f"First comes exercise {chapter}.{number}: {what}")
