"""minivllm start: a chapter's exercises, copied for you to work on."""

import shutil
from typing import Annotated

import typer

from minivllm.course.chapters import ROOT, find_chapter
from minivllm.errors import CourseError


def start(
    chapter: Annotated[str, typer.Argument(help="The chapter's number, like 1.")],
) -> None:
    """Copy a chapter's exercises to work/. What you have there already is never touched."""
    found = find_chapter(chapter)
    if not found.exercises:
        raise CourseError(f"chapter {found.number} has no exercises")
    for starter in sorted(found.starters.rglob("*.py")):
        target = found.work / starter.relative_to(found.starters)
        shown = target.relative_to(ROOT)
        if target.exists():
            print(f"kept    {shown} (yours)")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(starter, target)
            print(f"copied  {shown}")
    print()
    for exercise in found.exercises:
        print(f"{exercise.number}  {exercise.title} ({exercise.module})")
    print(f"\nTest your files with: python -m pytest tests/{found.name} --impl work")
