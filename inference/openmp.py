"""Threads of OpenMP, which torch computes with on a CPU.

Every thread that computes gets workers of its own, and they live as long as it does. Once all workers of a process
outnumber its cores, GNU's OpenMP lets them sleep between two loops instead of waiting awake. Waking them takes longer
than most loops of a decoding step: with as many threads as cores, a model that was loaded in one thread and decodes in
another takes twice as long for a compiled step. So workers end with the work of a thread.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

import torch

SOFT = 1  # omp_pause_soft: what the thread has set stays

# Empty in a forked child, which has none of its parent's workers and would wait for them.
_MAY_RELEASE = [True]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_MAY_RELEASE.clear)


def release_workers(*, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """Ends the calling thread's workers; its next loop starts new ones, in some 100 us. Does nothing where another
    OpenMP than GNU's runs.

    Args:
        is_ending: whether the interpreter ends, and has emptied its modules.
    """
    if is_ending() or not _MAY_RELEASE or torch.get_num_threads() == 1:
        return
    if (library := _find_openmp()) is not None:
        library.omp_pause_resource(SOFT, library.omp_get_initial_device())


@cache
def _find_openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP as torch has loaded it; None = torch computes with another one."""
    if (file := getattr(torch._C, "__file__", None)) is None:
        return None
    library = ctypes.CDLL(file)  # a look-up here goes through all that it is linked with
    is_other = hasattr(library, "__kmpc_fork_call")  # LLVM's or Intel's, which share workers among threads
    return library if hasattr(library, "omp_pause_resource") and not is_other else None
