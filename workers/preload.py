"""Loaded by every Dask worker process of a local cluster, before it registers.

Imports torch and the models' code while the rest of the run comes up; leaves Ctrl-C to the
controller, which stops at a stage boundary; and ends the process without tearing down every
imported module, which takes seconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys

import workers.rank_context  # noqa: F401


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def dask_setup(worker: object) -> None:
    """Dask's hook, called in the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(_leave)
