"""The chapter's README as a source: its marked blocks, and the notebook that it becomes.

Two kinds of blocks are filled by a tool and must not be edited by hand; both end in
`<!-- end -->`:

    <!-- excerpt: scheduler.py Scheduler._admit -->   code of the package (weave.py)
    <!-- output -->                                   what the cell above printed (weave.py)

The main README has `<!-- table: NAME -->`: the table of a benchmark's saved result.

An excerpt can name several things, separated by commas; `nodoc` behind the names leaves their
docstrings out, `head` keeps a class only up to its first method. An output can be
`<!-- output varies -->` (timings: not compared when the text is checked) and can have figures:
`<!-- output memory.png "What the figure shows" -->` saves the cell's figure as figures/memory.png.
"""

import ast
import re
from dataclasses import dataclass

MARKED = re.compile(
    r"<!-- (excerpt|output|table)\b:?(.*?)-->\n(?:.*?\n)??<!-- end -->\n", re.DOTALL
)
PYTHON_FENCE = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Output:
    """The options of an output block. figures: (file name, what it shows)."""

    varies: bool
    figures: tuple[tuple[str, str], ...]


def parse_output(options: str) -> Output:
    figures = tuple(re.findall(r'(\S+\.png) "([^"]*)"', options))
    return Output(varies=re.search(r"\bvaries\b", options) is not None, figures=figures)


def excerpt(source: str, options: str) -> str:
    """The code of the named functions, classes and methods, dedented, in the given order."""
    nodoc, head = (re.search(rf"\b{word}\b", options) is not None for word in ("nodoc", "head"))
    names = re.sub(r"\b(nodoc|head)\b", "", options)
    parts = [_definition(source, name.strip(), nodoc, head) for name in names.split(",")]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _definition(source: str, name: str, nodoc: bool, head: bool) -> str:
    node = _find(source, name)
    body = getattr(node, "body", [])
    lines = source.splitlines()
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    last = node.end_lineno
    if head:
        method = next(n for n in body if isinstance(n, ast.FunctionDef))
        last = min([method.lineno, *(d.lineno for d in method.decorator_list)]) - 1
    dropped: set[int] = set()
    if nodoc and ast.get_docstring(node, clean=False) is not None:
        dropped = set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
        if not lines[max(dropped)].strip():  # the empty line behind a class's docstring
            dropped.add(max(dropped) + 1)
    kept = [line for n, line in enumerate(lines[first - 1 : last], first) if n not in dropped]
    indent = len(kept[0]) - len(kept[0].lstrip())
    return "\n".join(line[indent:] for line in kept)


def line_of(source: str, name: str) -> int:
    """The line where a function, class, method, field or constant is defined."""
    return _find(source, name).lineno


def _find(source: str, name: str) -> ast.stmt:
    node, body = None, ast.parse(source).body
    for part in name.split("."):
        node = next((n for n in body if part in _names(n)), None)
        if node is None:
            raise ValueError(f"there is no {name!r}")
        body = getattr(node, "body", [])
    assert node is not None
    return node


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def python_cells(text: str) -> list[re.Match]:
    """The README's runnable fences, in the order of the notebook's code cells."""
    return list(PYTHON_FENCE.finditer(text))


def output_after(text: str, fence: re.Match) -> re.Match | None:
    """The output block that belongs to a fence: the one right behind it."""
    match = MARKED.search(text, fence.end())
    if match and match[1] == "output" and not text[fence.end() : match.start()].strip():
        return match
    return None
