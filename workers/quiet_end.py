"""Loaded by every Dask worker process of a local cluster, whose scheduler is the controller's.

A heartbeat that meets the end of the cluster is no news: Dask would print its traceback. Where the controller has
ended itself, the worker process does, too (`workers.preload`).
"""

from __future__ import annotations

import logging

LATE_HEARTBEAT = "Failed to communicate with scheduler during heartbeat"


def is_no_late_heartbeat(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LATE_HEARTBEAT)


async def dask_setup(worker: object) -> None:
    """Dask's hook, called in the worker process."""
    logging.getLogger("distributed.worker").addFilter(is_no_late_heartbeat)
