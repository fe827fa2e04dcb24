"""Generate the exercise starters from the package: chosen bodies blanked, all else kept.

python tools/build_exercises.py [--check] [CHAPTER ...]
"""

import argparse
import ast
import sys
from pathlib import Path

from minivllm.course.chapters import PACKAGE, Chapter, Exercise, all_chapters, find_chapter


def starters(chapter: Chapter) -> dict[Path, str]:
    """Path -> text of every starter of the chapter."""
    modules: dict[str, list[Exercise]] = {}
    for exercise in chapter.exercises:
        modules.setdefault(exercise.module, []).append(exercise)
    return {
        chapter.starters / module: starter(
            (PACKAGE / module).read_text(encoding="utf-8"), chapter, exercises
        )
        for module, exercises in modules.items()
    }


def starter(source: str, chapter: Chapter, exercises: list[Exercise]) -> str:
    """The module's text with the named bodies blanked.

    A body keeps its docstring and its own-line comments and ends in NotImplementedError, or in a
    Triton kernel, which cannot raise, in a static assertion.
    """
    lines = source.splitlines(keepends=True)
    edits = []
    for exercise in exercises:
        for name in exercise.names:
            node = _function(ast.parse(source), name)
            what = f'"exercise {exercise.number}: {name}"'
            is_kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
            end = (
                f"tl.static_assert(False, {what})"
                if is_kernel
                else (f"raise NotImplementedError({what})")
            )
            edits.append((*_blank(lines, node), end))
    for start, stop, kept, indent, end in sorted(edits, reverse=True):
        lines[start:stop] = [*kept, f"{indent}{end}\n"]
    titles = "".join(
        f"# Exercise {e.number}: {e.title} ({', '.join(e.names)}).\n" for e in exercises
    )
    note = f"{titles}# Test with: python -m pytest tests/{chapter.name} --impl work\n\n"
    return note + "".join(lines)


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    body, node = tree.body, None
    for part in name.split("."):
        node = next((n for n in body if getattr(n, "name", None) == part), None)
        if node is None:
            raise ValueError(f"there is no {name!r} to blank")
        body = node.body
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"{name!r} is no function")
    return node


def _blank(lines: list[str], node: ast.FunctionDef) -> tuple[int, int, list[str], str]:
    """(first line, last line, comments to keep, indent) of the body behind its docstring."""
    first = 1 if ast.get_docstring(node, clean=False) is not None else 0
    start = node.body[0].end_lineno if first else node.body[0].lineno - 1
    if not first:  # comments above the first statement belong to the body
        while lines[start - 1].strip().startswith("#"):
            start -= 1
    stop = node.body[-1].end_lineno
    assert start is not None
    assert stop is not None
    kept = [line for line in lines[start:stop] if line.strip().startswith("#")]
    indent = " " * node.body[0].col_offset
    return start, stop, [indent + line.strip() + "\n" for line in kept], indent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers; default all")
    parser.add_argument("--check", action="store_true", help="only say what is out of step")
    arguments = parser.parse_args()
    stale = 0
    for chapter in map(find_chapter, arguments.chapters) if arguments.chapters else all_chapters():
        for path, text in starters(chapter).items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale += 1
                print(("out of step" if arguments.check else "written") + f": {path}")
                if not arguments.check:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
