"""Overlay: other files in place of the package's modules, under the modules' own names.

Installed before the package is imported, it serves tests, command line and bug zoo alike: they
import `minivllm.scheduler` as always, and get the reader's file.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from minivllm.course.chapters import PACKAGE, ROOT
from minivllm.errors import CourseError


class Overlay(MetaPathFinder):
    """Finds the modules of `files` (module name -> path) there instead of in the package."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.files:
            return None
        return spec_from_file_location(name, self.files[name])


def install(files: dict[str, Path]) -> Overlay:
    """Makes later imports take `files`. Raises CourseError when one was imported already."""
    late = sorted(name for name in files if name in sys.modules)
    if late:
        raise CourseError(
            f"{', '.join(late)} is imported already, so your file would be ignored: "
            f"start a new Python process"
        )
    overlay = Overlay(files)
    sys.meta_path.insert(0, overlay)
    return overlay


def files_in(folder: Path) -> dict[str, Path]:
    """Module name -> file, for every file under folder that is named like a package module.

    A folder that holds chapters (`work`) gives the files of all of them; where two chapters have
    the same module, the later chapter's. Raises CourseError when there is nothing.
    """
    if not folder.is_absolute() and not folder.is_dir():
        folder = ROOT / folder
    files: dict[str, Path] = {}
    for top in sorted(folder.glob("ch[0-9][0-9]_*")) or [folder]:
        for path in sorted(top.rglob("*.py")):
            relative = path.relative_to(top)
            if (PACKAGE / relative).is_file():
                files[".".join(("minivllm", *relative.with_suffix("").parts))] = path.resolve()
    if not files:
        raise CourseError(
            f"no file in {folder} is named like a module of the package: "
            f"copy a chapter's exercises first, with `python -m minivllm start 1`"
        )
    return files
