"""Loaded by every Dask worker process of a local cluster, before it registers.

Imports torch and the models' code while the rest of the run comes up; leaves Ctrl-C and SIGTERM to the
controller, which stops at a stage boundary; gives libraries their locks in a form that needs no
cleaning up, since a process of lost ranks is killed; and ends the process without tearing down
every imported module, which takes seconds.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys

from workers.importing import without_collection
from workers.stop_signals import end_for

with without_collection():
    import numcodecs
    from tqdm import tqdm

    import workers.rank_context  # noqa: F401


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _make_locks() -> None:
    """The locks that libraries make when they are first used, between processes that this one may fork.

    Where processes are not forked a lock is a file in shared memory, which stays when its process is killed until the
    controller ends, with a warning of leaked semaphores; for forks it has no name from its beginning.
    """
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        numcodecs.Blosc().encode(b"\0")
        tqdm.get_lock()
    finally:
        multiprocessing.set_start_method(method, force=True)


async def dask_setup(worker: object) -> None:
    """Dask's hook, called in the worker process."""
    if (starter := multiprocessing.parent_process()) is not None and starter.pid is not None:
        end_for(starter.pid)
    _make_locks()
    atexit.register(_leave)
