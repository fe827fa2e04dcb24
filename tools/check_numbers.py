"""Check that the numbers in the chapters' prose are numbers that the chapter prints.

A measured number has a decimal point or thousands, or counts percent, points or times. It must
stand in an output, a table, code or inline code of its chapter, to the same digits or rounded; or
its paragraph must name where it is from (the paper, a vendor, another chapter). What a cell prints
is run again by the tests, so a number that stands in an output is one that the code gives.

python tools/check_numbers.py [CHAPTER ...]
"""

import re
import sys

from minivllm.course.chapters import Chapter, all_chapters, find_chapter

BLOCK = re.compile(r"^```.*?^```|^\|.*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(
    r"(?<![\w.#§-])(\d{1,3}(?:,\d{3})+|\d+\.\d+|\d+(?= ?%|  *(?:points|times)))(?![\w]|\.\d)"
)
SOURCED = re.compile(
    r"\b(paper|Figure \d|vendor|states|reports|et al\.|Bugs? \d|[Ee]xercise|[Cc]hapters? \d"
    r"|https?:)"
)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def value(text: str) -> float:
    return float(text.replace(",", ""))


def is_a_setting(text: str) -> bool:
    """Round thousands, like 2,048 slots or 17,000 tokens, are what an example assumes."""
    return "," in text and (value(text) % 100 == 0 or value(text) % 256 == 0)


def printed_values(text: str) -> set[float]:
    """Every number in fenced blocks, tables and inline code."""
    found = set()
    for block in BLOCK.findall(text):
        for number in re.findall(r"\d[\d,_]*(?:\.\d+)?", block):
            found.add(float(number.replace(",", "").replace("_", "").rstrip(".")))
    return found


def is_printed(text: str, printed: set[float]) -> bool:
    wanted = value(text)
    digits = len(text.partition(".")[2])
    return any(round(number, digits) == wanted for number in printed)


def unprinted_numbers(chapter: Chapter) -> list[str]:
    text = chapter.text.read_text(encoding="utf-8")
    printed, problems = printed_values(text), []
    prose = COMMENT.sub("", BLOCK.sub(" ", text))
    for paragraph in re.split(r"\n\s*\n", prose):
        if SOURCED.search(paragraph):
            continue
        for number in NUMBER.findall(paragraph):
            if not is_a_setting(number) and not is_printed(number, printed):
                shown = " ".join(paragraph.split())
                at = shown.find(number)
                problems.append(
                    f"{chapter.name}: {number} in ... {shown[max(0, at - 60) : at + 40]} ..."
                )
    return problems


def main() -> int:
    chapters = [find_chapter(n) for n in sys.argv[1:]] or all_chapters()
    problems = [problem for chapter in chapters for problem in unprinted_numbers(chapter)]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
