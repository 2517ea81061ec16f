"""The process that a local cluster's workers are forked from, in milliseconds, also after a fault.

It imports torch and transformers, which takes seconds. Started first, it does so beside the controller's own imports:
this module imports the standard library only. Workers begin with the stop signals blocked, as it has them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from workers.stop_signals import kept_from_children

if TYPE_CHECKING:
    from configs.schema import RunConfig

PRELOADED = ["distributed", "workers.preload"]
"""What worker processes find imported where they are forked."""


def start_method(device: str) -> str:
    """How worker processes start: `forkserver`, but where an NVIDIA driver may be used each imports torch anew.

    A driver does not outlive a fork.
    """
    uses_driver = device != "cpu" and Path("/dev/nvidiactl").exists()
    return "forkserver" if sys.platform == "linux" and not uses_driver else "spawn"


def worker_environment(threads_per_rank: int) -> dict[str, str]:
    """Variables that count where a worker's process begins."""
    return {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads_per_rank)),
        "MALLOC_TRIM_THRESHOLD_": "65536",
        # the working directory never shadows a package of ours
        "PYTHONSAFEPATH": "1",
        # one for all workers, as Dask wants it
        "PYTHONHASHSEED": "6640",
        "TOKENIZERS_PARALLELISM": "false",
    }


def start(config: RunConfig) -> None:
    """Start the process, unless it runs or this configuration's workers are not forked."""
    if config.cluster.scheduler is not None or start_method(config.resources.device) != "forkserver":
        return
    multiprocessing.set_forkserver_preload(PRELOADED)
    with _environment(worker_environment(config.resources.threads_per_rank)), kept_from_children():
        forkserver.ensure_running()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables where they are not set: the user's own count, as in Dask."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
