"""Every bug in the zoo is noticed by its chapter's tests. One that survives is a missing test."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minivllm.course.bugs import Bug, bugs_of, find_bug
from minivllm.course.chapters import all_chapters
from minivllm.errors import CourseError

CHAPTERS = [chapter for chapter in all_chapters() if bugs_of(chapter)]
AT_LEAST = {"ch00_kv_cache_math": 2}  # six everywhere else


def run_zoo(chapter):
    script = Path(__file__).with_name("run_zoo.py")
    command = [sys.executable, str(script), str(chapter.number), "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def zoos(request):
    """{chapter: a future with what its zoo said} of all that are asked for, two at a time."""
    name = test_every_bug_is_caught.__name__
    items = [i for i in request.session.items if getattr(i, "originalname", None) == name]
    with ThreadPoolExecutor(2) as pool:
        yield {i.callspec.params["chapter"]: pool.submit(run_zoo, i.callspec.params["chapter"])
               for i in items}  # fmt: skip


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_every_bug_is_caught(chapter, zoos):
    result = zoos[chapter].result()
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    assert sorted(results) == sorted(bug.number for bug in bugs_of(chapter))
    # 1: tests ran and failed. Anything else (0: survived, 2: could not even be imported) is wrong.
    wrong = {number: found for number, found in results.items() if found[0] != 1}
    assert not wrong
    assert not {number: found for number, found in results.items() if "error" in found[1]}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_the_zoo_is_large_enough_and_numbered(chapter):
    bugs = bugs_of(chapter)
    assert len(bugs) >= AT_LEAST.get(chapter.name, 6)
    assert [bug.number for bug in bugs] == [f"{chapter.number}.{n + 1}" for n in range(len(bugs))]
    for bug in bugs:
        compile(bug.source(), bug.module, "exec")


def test_an_edit_whose_text_is_gone_is_an_error():
    bug = Bug("1.99", "nobody", "sampler.py", "text that is not in the module", "")
    with pytest.raises(CourseError, match="occurs 0 times"):
        bug.source()


@pytest.mark.parametrize("number", ["1.99", "77.1", "x", "1", "1.2.3"])
def test_an_unknown_bug_is_one_clear_sentence(number):
    with pytest.raises(CourseError, match=r"there is no|is no bug"):
        find_bug(number)
