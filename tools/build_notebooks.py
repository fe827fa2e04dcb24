"""Build and execute the chapters' notebooks from their READMEs.

python tools/build_notebooks.py [--check] [CHAPTER ...]
"""

import argparse
import hashlib
import os
import re
import sys

import jupytext
import nbformat
from chapter_text import MARKED, output_after, parse_output, python_cells
from nbclient import NotebookClient
from weave import printed

from minivllm.course.chapters import ROOT, Chapter, all_chapters, find_chapter

TIMEOUT = 600  # seconds for one cell; the default of other tools (30) is too short for a model


def notebook_source(chapter: Chapter) -> str:
    """The README without printed outputs, its links made for the notebooks folder."""
    text = chapter.text.read_text(encoding="utf-8")
    # The excerpts' markers are for the tool; a reader of the notebook needs only the code. An
    # output goes whole, with its figure: the executed cell shows both.
    text = MARKED.sub(lambda m: "" if m[1] == "output" else _unmarked(m[0]), text)
    return re.sub(r"(!?\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)", lambda m: _link(chapter, m), text)


def _unmarked(block: str) -> str:
    return block.split("-->\n", 1)[1].rsplit("<!-- end -->", 1)[0]


def _link(chapter: Chapter, match: re.Match) -> str:
    label, target, anchor = match[1], match[2], match[3] or ""
    if re.match(r"[a-z]+:", target):
        return match[0]
    path = (chapter.folder / target).resolve()
    parts = path.relative_to(ROOT).parts
    if len(parts) == 3 and parts[0] == "chapters" and parts[2] == "README.md":
        return f"{label}({parts[1]}.ipynb{anchor})"
    return f"{label}({os.path.relpath(path, ROOT / 'notebooks').replace(os.sep, '/')}{anchor})"


def convert(chapter: Chapter) -> nbformat.NotebookNode:
    """The notebook without outputs; the same README gives the same bytes."""
    notebook = jupytext.reads(notebook_source(chapter), fmt="md")
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs the notebook in the notebooks folder, as Jupyter would, without a display."""
    os.environ.pop("MPLBACKEND", None)
    metadata = dict(notebook.metadata)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
        record_timing=False,
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(metadata)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str, str]]:
    return [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells]


def check(chapter: Chapter, *, run: bool = True) -> list[str]:
    """What is wrong with the saved notebook; run: execute it and compare what it prints."""
    if not chapter.notebook.exists():
        return [f"{chapter.notebook} is missing"]
    saved, fresh = nbformat.read(chapter.notebook, as_version=4), convert(chapter)
    if sources(saved) != sources(fresh):
        return [f"{chapter.notebook.name} is out of step with {chapter.text}"]
    if not run:
        return []
    execute(fresh)
    text, problems = chapter.text.read_text(encoding="utf-8"), []
    cells = [[c for c in nb.cells if c.cell_type == "code"] for nb in (saved, fresh)]
    for fence, old, new in zip(python_cells(text), *cells, strict=True):
        block = output_after(text, fence)
        if block is not None and parse_output(block[2]).varies:
            continue
        if printed(old) != printed(new):
            problems.append(
                f"{chapter.name}: a cell prints something else than the text says.\n"
                f"--- cell\n{old.source}\n--- text\n{printed(old)}--- now\n{printed(new)}"
            )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers; default all")
    parser.add_argument("--check", action="store_true", help="only say what is out of step")
    arguments = parser.parse_args()
    problems = []
    for chapter in map(find_chapter, arguments.chapters) if arguments.chapters else all_chapters():
        if arguments.check:
            problems += check(chapter)
            continue
        print(f"executing {chapter.name} ...", flush=True)
        notebook = execute(convert(chapter))
        chapter.notebook.parent.mkdir(exist_ok=True)
        nbformat.validate(notebook)
        nbformat.write(notebook, chapter.notebook)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
