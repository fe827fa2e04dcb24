"""The entry point: puts the reader's own files in place before anything else is imported."""

import io
import os
import sys
from pathlib import Path


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no emoji shows a ? instead
    arguments = sys.argv[1:]
    folder = None
    if arguments and arguments[0] == "--impl" and len(arguments) > 1:
        folder, arguments = arguments[1], arguments[2:]
    elif arguments and arguments[0].startswith("--impl="):
        folder, arguments = arguments[0].removeprefix("--impl="), arguments[1:]
    if "triton" in arguments:
        # Triton decides when it is first imported whether its kernels are compiled or
        # interpreted, and transformers imports it; torch alone does not.
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
    error = None
    if folder is not None:
        from minivllm.course.overlay import files_in, install
        from minivllm.errors import CourseError

        try:
            install(files_in(Path(folder)))
        except CourseError as caught:
            error = caught

    from minivllm.cli import app

    sys.exit(app.fail(str(error), 1) if error else app.run(arguments))
