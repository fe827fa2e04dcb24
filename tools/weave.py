"""Fill the marked blocks of the chapters' READMEs: excerpts, and the notebooks' outputs.

python tools/weave.py [--check] [CHAPTER ...]
"""

import argparse
import base64
import json
import re
import sys
from pathlib import Path

import nbformat
from chapter_text import MARKED, excerpt, line_of, output_after, parse_output, python_cells
from tables import TABLES

from minivllm.course.chapters import PACKAGE, ROOT, Chapter, all_chapters, find_chapter

RICH = ("execute_result", "display_data")  # outputs that can be a picture


def weave_excerpts(text: str) -> str:
    """The README with every excerpt as the package has it now."""

    def fill(match: re.Match) -> str:
        if match[1] != "excerpt":
            return match[0]
        module, names = match[2].strip().split(maxsplit=1)
        source = (PACKAGE / module).read_text(encoding="utf-8")
        marker = match[0].split("-->", 1)[0] + "-->\n"
        return f"{marker}```py\n{excerpt(source, names)}```\n<!-- end -->\n"

    return MARKED.sub(fill, text)


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell printed to stdout, and its last value as text, if it has no picture."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            parts.append(output.text)
        elif output.output_type in RICH and "image/png" not in output.data:
            parts.append(output.data.get("text/plain", "") + "\n")
    return "".join(parts)


def pictures(cell: nbformat.NotebookNode) -> list[bytes]:
    return [
        base64.b64decode(output.data["image/png"])
        for output in cell.outputs
        if output.output_type in RICH and "image/png" in output.data
    ]


def weave_outputs(text: str, notebook: nbformat.NotebookNode, figures: Path | None) -> str:
    """The README with every output block as the notebook has it; writes the figures.

    figures: the folder for the pictures; None: they are left as they are.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    fences = python_cells(text)
    if [fence[1].rstrip() for fence in fences] != [cell.source for cell in cells]:
        raise ValueError("the notebook's cells are not the README's: build the notebook first")
    pieces, position = [], 0
    for fence, cell in zip(fences, cells, strict=True):
        block = output_after(text, fence)
        shown = printed(cell).rstrip()
        if block is None:
            if shown or pictures(cell):
                raise ValueError(f"a cell prints and has no output block: {cell.source[:60]!r}")
            continue
        options = parse_output(block[2])
        images = pictures(cell)
        if len(images) != len(options.figures):
            raise ValueError(f"{len(images)} pictures, {len(options.figures)} named: {block[0]!r}")
        body = f"```text\n{shown}\n```\n" if shown else ""
        for image, (name, alt) in zip(images, options.figures, strict=True):
            if figures is not None:
                figures.mkdir(exist_ok=True)
                (figures / name).write_bytes(image)
            body += ("\n" if body else "") + f"![{alt}](figures/{name})\n"
        marker = block[0].split("-->", 1)[0] + "-->\n"
        pieces += [text[position : block.start()], marker, body, "<!-- end -->\n"]
        position = block.end()
    return "".join(pieces) + text[position:]


LINE_LINK = re.compile(r"\[`([\w.]+)`\]\((\S+\.py)#L\d+\)")


def weave_line_links(text: str, folder: Path) -> str:
    """Links like [`Engine.step`](../minivllm/engine.py#L7), each with the line as it is now."""

    def fill(match: re.Match) -> str:
        name, target = match[1], match[2]
        source = (folder / target).read_text(encoding="utf-8")
        return f"[`{name}`]({target}#L{line_of(source, name)})"

    return LINE_LINK.sub(fill, text)


def woven(chapter: Chapter, *, write_figures: bool = False) -> str:
    """The README as it should be, given the package, the benchmarks and the saved notebook."""
    text = weave_tables(weave_excerpts(chapter.text.read_text(encoding="utf-8")))
    if not chapter.notebook.exists():
        return text
    notebook = nbformat.read(chapter.notebook, as_version=4)
    return weave_outputs(text, notebook, chapter.folder / "figures" if write_figures else None)


def weave_tables(text: str) -> str:
    """A text with every table as the saved results of the benchmarks give it."""

    def fill(match: re.Match) -> str:
        if match[1] != "table":
            return match[0]
        name = match[2].strip()
        path = ROOT / "benchmarks" / "results" / f"{name.split()[0]}.json"
        table = TABLES[name](json.loads(path.read_text(encoding="utf-8")))
        return f"<!-- table: {name} -->\n{table}<!-- end -->\n"

    return MARKED.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers; default all")
    parser.add_argument("--check", action="store_true", help="only say what is out of step")
    parser.add_argument("--excerpts-only", action="store_true", help="before a notebook is built")
    arguments = parser.parse_args()
    stale = 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        old = path.read_text(encoding="utf-8")
        new = weave_line_links(weave_tables(old), path.parent)
        if new != old:
            stale += 1
            print(("out of step" if arguments.check else "woven") + f": {path}")
            if not arguments.check:
                path.write_text(new, encoding="utf-8")
    for chapter in map(find_chapter, arguments.chapters) if arguments.chapters else all_chapters():
        old = chapter.text.read_text(encoding="utf-8")
        if arguments.excerpts_only:
            new = weave_tables(weave_excerpts(old))
        else:
            new = woven(chapter, write_figures=not arguments.check)
        if new != old:
            stale += 1
            print(("out of step" if arguments.check else "woven") + f": {chapter.text}")
            if not arguments.check:
                chapter.text.write_text(new, encoding="utf-8")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
