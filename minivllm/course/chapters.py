"""Chapter: where a chapter's text, exercises, tests and bugs are."""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from minivllm.errors import CourseError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "minivllm"


@dataclass(frozen=True)
class Exercise:
    """number: like `1.2`; module: the package's file, like `memory/kv_size.py`; names: what is
    blanked in it, like `Engine.step`."""

    number: str
    title: str
    module: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Chapter:
    """name: the folder's name, like `ch01_past_key_values`, the same under chapters and tests."""

    name: str

    @property
    def number(self) -> int:
        return int(self.name[2:4])

    @property
    def folder(self) -> Path:
        return ROOT / "chapters" / self.name

    @property
    def text(self) -> Path:
        return self.folder / "README.md"

    @property
    def notebook(self) -> Path:
        return ROOT / "notebooks" / f"{self.name}.ipynb"

    @property
    def starters(self) -> Path:
        return self.folder / "exercises"

    @property
    def tests(self) -> Path:
        return ROOT / "tests" / self.name

    @property
    def work(self) -> Path:
        """The reader's own files."""
        return ROOT / "work" / self.name

    @cached_property
    def exercises(self) -> tuple[Exercise, ...]:
        """From the chapter's exercises.toml, in order."""
        path = self.folder / "exercises.toml"
        if not path.exists():
            return ()
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["exercise"]
        return tuple(
            Exercise(e["number"], e["title"], e["module"], tuple(e["names"])) for e in entries
        )


def all_chapters() -> list[Chapter]:
    return [Chapter(p.name) for p in sorted((ROOT / "chapters").glob("ch[0-9][0-9]_*"))]


def find_chapter(number: str | int) -> Chapter:
    """The chapter with this number. Raises CourseError when there is none."""
    chapters = all_chapters()
    if not chapters:
        raise CourseError(f"there is no chapters folder in {ROOT}: run this in a clone")
    for chapter in chapters:
        if re.fullmatch(r"\d+", str(number)) and chapter.number == int(number):
            return chapter
    known = ", ".join(str(chapter.number) for chapter in chapters)
    raise CourseError(f"there is no chapter {number!r}: the chapters are {known}")
