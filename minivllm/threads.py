"""The threads of torch and of numba: one team, where the system allows it."""

import ctypes
from contextlib import suppress

OPENMP = "libgomp.so.1"  # as torch and numba ask for it on Linux


def share_a_team() -> None:
    """Before torch is imported; later, or on another system, it changes nothing.

    torch brings a copy of the OpenMP library, and numba takes the system's: two teams of threads,
    and those that wait for work keep the cores from those that have some. What is loaded already
    is taken by both, so the system's is loaded here.
    """
    with suppress(OSError):
        ctypes.CDLL(OPENMP)
