"""The course's machinery: starters, overlay, announced red, and that text and code are in step."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from minivllm.course import chapters as chapters_module
from minivllm.course.chapters import PACKAGE, ROOT, Chapter, all_chapters, find_chapter
from minivllm.errors import CourseError

sys.path.insert(0, str(ROOT / "tools"))
import build_exercises
import build_notebooks
import check_links
import weave
from chapter_text import MARKED, excerpt, parse_output

CHAPTERS = all_chapters()
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)


@each_chapter
def test_starters_are_in_step_with_the_package(chapter):
    generated = build_exercises.starters(chapter)
    on_disk = {path: path.read_text() for path in chapter.starters.rglob("*.py")}
    assert on_disk == generated, "run `make course`"


@each_chapter
def test_excerpts_and_outputs_are_in_step(chapter):
    assert chapter.text.read_text() == weave.woven(chapter), "run `make course`"


def test_the_main_readme_is_in_step_with_the_benchmarks():
    text = (ROOT / "README.md").read_text()
    assert text == weave.weave_tables(text), "run `make course`"


@each_chapter
def test_figures_are_those_of_the_notebook(chapter):
    figures = chapter.folder / "figures"
    text = chapter.text.read_text()
    named = [n for m in MARKED.finditer(text) for n, _ in parse_output(m[2]).figures]
    assert sorted(named) == sorted(path.name for path in figures.iterdir())
    assert len(named) >= 1
    cells = [c for c in weave.nbformat.read(chapter.notebook, 4).cells if c.cell_type == "code"]
    saved = [picture for cell in cells for picture in weave.pictures(cell)]
    assert saved == [(figures / name).read_bytes() for name in named]


# What takes long runs in processes of its own, two at a time with one thread each.


def run(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def check_notebook(chapter, folder):
    return run("tools/build_notebooks.py", "--check", chapter.number)


def on_starters(chapter, folder):
    return run_tests(chapter, chapter.starters)


def on_bodies(chapter, folder):
    for exercise in chapter.exercises:
        target = folder / chapter.name / exercise.module
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / exercise.module, target)
    return run_tests(chapter, folder)


def run_tests(chapter, folder):
    """As a reader does."""
    return run(
        "-m", "pytest", "-q", f"tests/{chapter.name}", "--impl", folder,
        "-m", "not full", "-p", "no:cacheprovider",
    )  # fmt: skip


@pytest.fixture(scope="module")
def outside(request, tmp_path_factory):
    """outside(job, chapter): what the job's process said. All that are asked for have begun."""
    jobs = {
        "test_the_notebook_has_every_cell_of_the_text_and_runs": check_notebook,
        "test_untouched_starters_are_red_in_the_announced_way": on_starters,
        "test_with_the_package_s_bodies_the_exercises_are_green": on_bodies,
    }
    names = [(getattr(i, "originalname", None), i) for i in request.session.items]
    asked = {(jobs[name], i.callspec.params["chapter"]) for name, i in names if name in jobs}
    order = list(jobs.values())
    with ThreadPoolExecutor(2) as pool:
        begun = {
            (job, chapter): pool.submit(job, chapter, tmp_path_factory.mktemp("work"))
            for job, chapter in sorted(asked, key=lambda key: (order.index(key[0]), -key[1].number))
        }  # the last chapters take longest
        yield lambda job, chapter: begun[job, chapter].result()


@each_chapter
def test_the_notebook_has_every_cell_of_the_text_and_runs(chapter, outside):
    """Runs it from the notebooks folder, without a display; what is printed is what is written."""
    result = outside(check_notebook, chapter)
    assert result.returncode == 0, result.stdout + result.stderr


@each_chapter
def test_a_rebuild_of_the_notebook_is_byte_stable(chapter):
    assert build_notebooks.convert(chapter) == build_notebooks.convert(chapter)
    saved = json.loads(chapter.notebook.read_text())
    assert saved["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in saved["cells"]]
    assert len(ids) == len(set(ids))


def test_links():
    assert [p for path in check_links.tracked_texts() for p in check_links.broken_links(path)] == []


@each_chapter
def test_the_text_names_every_bug_and_exercise_that_exists(chapter):
    """A number in the text must lead somewhere."""
    from minivllm.course.bugs import bugs_of

    text = chapter.text.read_text()
    bugs = {bug.number for bug in bugs_of(chapter)}
    assert set(re.findall(r"[Bb]ug (\d+\.\d+)", text)) <= bugs
    assert set(re.findall(r"Exercise (\d+\.\d+)", text)) == {e.number for e in chapter.exercises}


# The overlay, from outside: as a reader runs it.


@each_chapter
def test_untouched_starters_are_red_in_the_announced_way(chapter, outside):
    result = outside(on_starters, chapter)
    assert result.returncode == 1
    last = result.stdout.strip().splitlines()[-2:]
    assert last[0] == (
        f"Red is expected here: {len(chapter.exercises)} exercises are not written yet."
    )
    assert last[1].startswith(f"First comes exercise {chapter.exercises[0].number}: ")
    assert "NotImplementedError" not in result.stdout


@each_chapter
def test_with_the_package_s_bodies_the_exercises_are_green(chapter, outside):
    result = outside(on_bodies, chapter)
    assert result.returncode == 0, result.stdout
    assert "Red is expected" not in result.stdout


def minivllm(*arguments):
    command = [sys.executable, "-m", "minivllm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.real_model
def test_finished_exercises_answer_on_the_real_model(tmp_path):
    """The reader's files really run: the answer comes from an engine that says so."""
    chapter = find_chapter(1)
    for exercise in chapter.exercises:
        said = "\nimport sys\nprint(__name__, file=sys.stderr)\n"
        text = (PACKAGE / exercise.module).read_text()
        (tmp_path / exercise.module).write_text(text + said)
    result = minivllm(
        "--impl", tmp_path, "generate", "What is the capital of France?", "--max-tokens", "12"
    )
    assert result.stdout.strip() == "The capital of France is Paris."
    for name in ("sampler", "scheduler", "engine"):
        assert f"minivllm.{name}" in result.stderr


def test_an_unwritten_exercise_is_one_line_on_the_command_line():
    chapter = find_chapter(0)
    result = minivllm("--impl", chapter.starters, "kv-size", "gpt2")
    assert result.returncode == 1
    assert result.stderr == "error: not written yet: exercise 0.1: kv_bytes_per_token\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impl", "no/such/folder", "check"], "no file in"),
        (["check", "--impl", "work"], "No such option"),
        (["start", "99"], "there is no chapter '99'"),
        (["bug", "1.99"], "there is no bug 1.99"),
        (["bug", "frog"], "'frog' is no bug"),
    ],
)
def test_wrong_use_is_one_line(arguments, words):
    result = minivllm(*arguments)
    assert result.returncode != 0
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_comes_too_late_is_refused(tmp_path):
    (tmp_path / "scheduler.py").write_text("")
    code = (
        "import minivllm.scheduler\n"
        "from pathlib import Path\n"
        "from minivllm.course.overlay import files_in, install\n"
        f"install(files_in(Path({str(tmp_path)!r})))\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "minivllm.scheduler is imported already" in result.stderr


def test_start_copies_and_never_overwrites(tmp_path, monkeypatch, capsys):
    from minivllm.cli import start

    shutil.copytree(ROOT / "chapters", tmp_path / "chapters")
    for module in (chapters_module, start):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    start.start("1")
    mine = tmp_path / "work" / "ch01_past_key_values" / "sampler.py"
    assert "exercise 1.1" in mine.read_text()
    assert "copied" in capsys.readouterr().out
    mine.write_text("mine")
    start.start("1")
    assert mine.read_text() == "mine"
    assert "kept" in capsys.readouterr().out


def test_a_bug_as_a_puzzle_and_revealed():
    puzzle = minivllm("bug", "0.3")
    assert puzzle.returncode == 0
    assert "FAILED tests/ch00_kv_cache_math" in puzzle.stdout
    assert "round(" not in puzzle.stdout, "the puzzle gives the fault away"
    revealed = minivllm("bug", "0.3", "--reveal")
    assert "+    return round(" in revealed.stdout


def test_chapters_are_found_by_number():
    assert find_chapter(1) == find_chapter("01") == Chapter("ch01_past_key_values")
    for number in ("x", "-1", "", 50):
        with pytest.raises(CourseError, match="the chapters are 0, 1"):
            find_chapter(number)


# The tools themselves, on small texts.

SOURCE = '''
class A:
    """Doc of A."""

    x: int = 1

    def one(self):
        """Doc of one."""
        # why
        return 1

    def two(self):
        return 2


def three(a, b):
    # first
    c = a + b  # not kept

    # second
    return c
'''


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("A.two", "def two(self):\n    return 2\n"),
        ("A.one nodoc", "def one(self):\n    # why\n    return 1\n"),
        ("A head", 'class A:\n    """Doc of A."""\n\n    x: int = 1\n'),
        ("A head nodoc", "class A:\n    x: int = 1\n"),
    ],
)
def test_excerpts(names, expected):
    assert excerpt(SOURCE, names) == expected


def test_an_excerpt_of_something_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match=r"there is no 'A\.ten'"):
        excerpt(SOURCE, "A.ten")


def test_a_starter_keeps_docstrings_comments_and_signatures():
    from minivllm.course.chapters import Exercise

    exercises = [Exercise("9.1", "t", "m.py", ("A.one", "three"))]
    text = build_exercises.starter(SOURCE, Chapter("ch09_x"), exercises)
    assert '        """Doc of one."""\n        # why\n        raise NotImplementedError(' in text
    assert "    # first\n    # second\n    raise NotImplementedError(" in text
    assert "not kept" not in text
    assert "return 2" in text
    compile(text, "starter", "exec")


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(check_links, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A title!\n[a](#a-title) [b](#b) [c](gone.md) [d](page.md#a-title)\n")
    assert check_links.broken_links(page) == [
        "page.md: #b has no such heading",
        "page.md: gone.md does not exist",
    ]
