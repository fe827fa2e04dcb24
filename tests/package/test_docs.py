"""The map of the code, the glossary, and the numbers in the texts, against the code."""

import re
import sys

import pytest

from minivllm.course.chapters import ROOT, all_chapters

sys.path.insert(0, str(ROOT / "tools"))
import check_numbers
import weave

DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_links_to_lines_are_in_step(path):
    text = path.read_text()
    assert weave.weave_line_links(text, path.parent) == text, "run `make course`"
    assert weave.LINE_LINK.search(text)


def test_every_term_is_in_its_chapter():
    """A term of the glossary occurs in the chapter that introduces it."""
    for term, chapter in re.findall(
        r"^\| \*\*(.+?)\*\* \|.*?\(\.\./(chapters/\S+)\)", (ROOT / "docs/glossary.md").read_text(),
        re.MULTILINE,
    ):  # fmt: skip
        text = " ".join((ROOT / chapter).read_text().lower().split())
        words = term.lower()
        assert words in text or words.replace(" ", "_") in text, f"{term} is not in {chapter}"


@pytest.mark.parametrize("chapter", all_chapters(), ids=lambda chapter: chapter.name)
def test_numbers_in_the_text_are_printed(chapter):
    assert check_numbers.unprinted_numbers(chapter) == []


def test_a_number_from_nowhere_is_found(tmp_path):
    text = "Memory grows by 31.7 % here.\n\nThe paper reports 20.4 %.\n\n"
    text += "```text\n12.34 and 1,155\n```\n"
    text += "\nIt was 12.3 and 1,155 and 2,048 slots, and 9,999 in all.\n"
    (tmp_path / "README.md").write_text(text)

    class Made:
        name, text = "made", tmp_path / "README.md"

    found = check_numbers.unprinted_numbers(Made)
    assert [problem.split()[1] for problem in found] == ["31.7", "9,999"]
