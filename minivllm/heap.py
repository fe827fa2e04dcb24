"""The C library's heap: memory that is free and still counts as the process's."""

import ctypes
import os


def return_free_memory() -> None:
    """To the system, where the C library can (glibc): a compiler leaves holes in the heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
