"""Bug: a wrong version of one package module, that the chapter's tests must notice."""

import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from minivllm.course.chapters import PACKAGE, ROOT, Chapter, find_chapter
from minivllm.errors import CourseError

ZOO = ROOT / "tests" / "bug_zoo"
MAX_FAILED = 12  # more would not tell more


@dataclass(frozen=True)
class Bug:
    """number: like `1.2`; symptom: who makes this mistake and what it looks like from outside.

    old, new: the edit of the module's text; old must occur exactly once.
    """

    number: str
    symptom: str
    module: str
    old: str
    new: str

    def source(self) -> str:
        """The wrong module's text. Raises CourseError when the text to replace is not there."""
        right = (PACKAGE / self.module).read_text(encoding="utf-8")
        if right.count(self.old) != 1:
            raise CourseError(
                f"bug {self.number}: the text it replaces occurs {right.count(self.old)} times "
                f"in {self.module}, and must occur once"
            )
        return right.replace(self.old, self.new)

    def write(self, folder: Path) -> None:
        """Writes the wrong module into folder, for the overlay."""
        path = folder / self.module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.source(), encoding="utf-8")


def bugs_of(chapter: Chapter) -> list[Bug]:
    path = ZOO / f"{chapter.name}.toml"
    if not path.exists():
        return []
    return [Bug(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["bug"]]


def find_bug(number: str) -> tuple[Chapter, Bug]:
    """The bug with a number like `1.2`. Raises CourseError when there is none."""
    match = re.fullmatch(r"(\d+)\.\d+", number)
    if match is None:
        raise CourseError(f"{number!r} is no bug: give chapter and number, like 1.2")
    chapter = find_chapter(match[1])
    bugs = {bug.number: bug for bug in bugs_of(chapter)}
    if number not in bugs:
        known = ", ".join(bugs) or "none"
        raise CourseError(f"there is no bug {number}: chapter {match[1]} has {known}")
    return chapter, bugs[number]


def run_tests_on(chapter: Chapter, bug: Bug) -> subprocess.CompletedProcess:
    """Runs the chapter's tests on the wrong version, without tracebacks (they show the place).

    Raises CourseError when they could not be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        bug.write(Path(folder))
        result = subprocess.run(
            [sys.executable, "-m", "pytest", str(chapter.tests), "--impl", folder,
             "-q", "--tb=no", f"--maxfail={MAX_FAILED}", "--hypothesis-profile", "no-shrink",
             "-m", "not full"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if result.returncode not in (0, 1):  # 0: all passed, 1: some failed
        raise CourseError(f"the tests could not be run: {result.stderr.strip() or result.stdout}")
    return result
