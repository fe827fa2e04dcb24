"""Check the relative links of all Markdown files and notebooks: file and heading must exist.

python tools/check_links.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from minivllm.course.chapters import ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return FENCE.sub("", text)


def headings(path: Path) -> set[str]:
    """Anchors as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    problems = []
    for target in LINK.findall(text_of(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        if not linked.exists():
            problems.append(f"{path.relative_to(ROOT)}: {target} does not exist")
        elif anchor and linked.suffix in (".md", ".ipynb") and anchor not in headings(linked):
            problems.append(f"{path.relative_to(ROOT)}: {target} has no such heading")
    return problems


def tracked_texts() -> list[Path]:
    """Every Markdown file and notebook of the repository, tracked or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.ipynb"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines() if (ROOT / name).exists()]


def main() -> int:
    problems = [problem for path in tracked_texts() for problem in broken_links(path)]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
