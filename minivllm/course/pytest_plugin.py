"""pytest --impl FOLDER: a chapter's tests on your files, and a word on what is still to write."""

import re
from pathlib import Path

import pytest

from minivllm.course.chapters import ROOT, all_chapters, find_chapter
from minivllm.course.overlay import files_in, install
from minivllm.errors import CourseError

TODO = re.compile(r"exercise (\d+)\.(\d+): ([\w.]+)")
REACHED = pytest.StashKey[set[tuple[int, int, str]]]()
UNWRITTEN = pytest.StashKey[set[tuple[int, int, str]]]()
WRONG = pytest.StashKey[list[str]]()


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
    config.stash[REACHED], config.stash[WRONG] = set(), []
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"  # the reader's own line, without pages of the library
    left_out = "not own_process"  # there the package itself would be tested
    if "real_model" not in config.option.markexpr:
        # They take minutes and find nothing that the tiny model does not.
        left_out += " and not real_model"
    config.option.markexpr = f"({config.option.markexpr or 'True'}) and {left_out}"
    try:
        files = files_in(implementation(Path(folder), config.args))
        install(files)
    except CourseError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[UNWRITTEN] = {
        (int(chapter), int(number), what)
        for path in files.values()
        for chapter, number, what in TODO.findall(path.read_text(encoding="utf-8"))
    }


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
        # In a Triton kernel it is a static assertion, wrapped in an error of triton's own.
        unwritten = isinstance(error, NotImplementedError | AssertionError)
        unwritten = unwritten or type(error).__module__.startswith("triton")
        match = TODO.search(str(error)) if unwritten else None
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
    reached = item.config.stash.get(REACHED, None)
    if reached is not None and call.excinfo is not None:
        exercise = exercise_of(call.excinfo.value)
        if exercise is not None:
            reached.add(exercise)
            # The traceback would lead to a line that the reader has not written yet.
            report.longrepr = "exercise {}.{} is not written yet: {}".format(*exercise)
        elif report.failed:
            item.config.stash[WRONG].append(item.name)
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last lines of the run: what fails in code that is written, and what comes next."""
    wrong = list(dict.fromkeys(config.stash.get(WRONG, None) or ()))
    missing = sorted(config.stash.get(REACHED, None) or (), key=place)
    if missing:
        # Behind an exercise that is not written another may hide, which no test reached.
        missing = sorted({*missing, *config.stash[UNWRITTEN]}, key=place)
    if wrong:
        shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        fail = "test fails" if len(wrong) == 1 else "tests fail"
        print(f"\n{len(wrong)} {fail} in code that is written: {shown}")
    if missing:
        count = len({exercise[:2] for exercise in missing})
        exercises = "exercise is" if count == 1 else "exercises are"
        print(f"\nRed is expected here: {count} {exercises} not written yet.")
        chapter, number, what = missing[0]
        first = "First comes" if not wrong else "Next comes"
        print(f"{first} exercise {chapter}.{number}: {what}")


def place(exercise: tuple[int, int, str]) -> tuple[int, int, int]:
    """Where an exercise stands in its chapter, so that the first one is named first."""
    chapter, number, what = exercise
    listed = find_chapter(chapter).exercises
    names = [name for e in listed if e.number == f"{chapter}.{number}" for name in e.names]
    return chapter, number, names.index(what) if what in names else len(names)
