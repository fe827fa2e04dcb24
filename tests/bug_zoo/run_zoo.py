"""Run a chapter's tests on each of its bugs; prints {number: [exit status, summary]} as JSON.

A process of its own, because the wrong modules must be imported in place of the right ones. What
is slow to import (torch, transformers) is imported once; then each bug gets a fork of its own, two
of them, or so many, at a time.

    python tests/bug_zoo/run_zoo.py 1 [2]
"""

import json
import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from minivllm.course.bugs import Bug, bugs_of, run_tests_on
from minivllm.course.chapters import Chapter, find_chapter

LONGEST = 180  # seconds; a bug that makes the tests run on ends by a signal, which is not a 1


def summary(text: str) -> str:
    """pytest's closing line, like `1 failed, 18 passed in 1.33s`."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return lines[-1] if lines else text[-300:]


def run_in_fork(chapter: Chapter, bug: Bug, folder: Path) -> int:
    """Starts the tests on a bug in a child; its output goes to folder/log. Returns the pid."""
    import pytest

    bug.write(folder / "package")
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import torch

        torch.set_num_threads(1)
        signal.alarm(LONGEST)
        status = pytest.main(
            [str(chapter.tests), "--impl", str(folder / "package"), "-x", "-q", "--tb=no",
             "-p", "no:cacheprovider", "--hypothesis-profile", "no-shrink",
             "-m", "not full"]
        )  # fmt: skip
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def run_all(chapter: Chapter, parallel: int) -> dict[str, tuple[int, str]]:
    results: dict[str, tuple[int, str]] = {}
    if not hasattr(os, "fork"):
        for bug in bugs_of(chapter):
            result = run_tests_on(chapter, bug)
            results[bug.number] = (result.returncode, summary(result.stdout))
        return results

    import torch

    if not torch.cuda.is_available():  # as in tests/conftest.py, which comes too late here
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import hypothesis.stateful  # noqa: F401
    import tokenizers  # noqa: F401
    import tqdm  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    running: dict[int, tuple[Bug, Path]] = {}
    with tempfile.TemporaryDirectory() as top:
        for bug in [*bugs_of(chapter), None]:
            while running and (bug is None or len(running) >= parallel):
                pid, status = os.wait()
                ended, folder = running.pop(pid)
                log = (folder / "log").read_text(errors="replace")
                results[ended.number] = (os.waitstatus_to_exitcode(status), summary(log))
            if bug is not None:
                folder = Path(top) / bug.number
                folder.mkdir()
                running[run_in_fork(chapter, bug, folder)] = (bug, folder)
    return results


if __name__ == "__main__":
    at_a_time = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    print(json.dumps(run_all(find_chapter(sys.argv[1]), at_a_time)))
