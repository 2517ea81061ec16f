"""Whether this machine has what a local cluster is asked for: GPUs, cores, memory, short paths. Imports no torch.

A rank is a process. On GPUs each needs one of its own, since NCCL refuses two on one. On a CPU ranks may
share cores, which is slow but right, so that is only said; what the memory cannot hold is refused.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from configs.schema import RunConfig

DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu", "nvmap")
"""Of NVIDIA's driver, of WSL, of ROCm, of Jetson: without any of them torch sees no GPU."""
LONGEST_SOCKET = 107
"""Bytes of a socket's path, by the kernel."""
NAMES_IN_TMPDIR = {
    "torch": len("/pymp-12345678/listener-12345678"),
    "sglang": len("/hybridflow-engine-12345678/tmp12345678"),
}
"""Bytes of the longest path of a socket below the folder for temporary files, by engine."""
RANK_GIB = 0.3
"""Memory of a rank before it holds any weights, at least: 0.8 resident, much of it shared libraries."""


def machine_problems(config: RunConfig) -> Iterator[str]:
    """Devices that are not here, more ranks than the machine can hold, and a folder in which no socket has room."""
    if config.cluster.scheduler is not None:
        return  # the workers are elsewhere
    temporary = tempfile.gettempdir()
    longest = LONGEST_SOCKET - NAMES_IN_TMPDIR[config.rollout.engine]
    if (size := len(os.fsencode(temporary))) > longest:
        yield f"TMPDIR: {temporary} has {size} bytes, and sockets below it need one of at most {longest}; set another"
    ranks, device = config.resources.num_ranks, config.resources.device
    gpus = num_gpus()
    if device == "cuda" and (reason := no_gpu_reason(gpus)):
        yield f"resources.device: cuda, but {reason}; set it to auto or cpu"
    elif device != "cpu" and gpus and ranks > gpus:
        yield (
            f"resources.num_ranks: {ranks}, but this machine has {gpus} GPU{'s' * (gpus > 1)} and each rank needs "
            f"its own; lower it to {gpus}, or set resources.device to cpu"
        )
    if ranks * RANK_GIB > memory_gib():
        yield (
            f"resources.num_ranks: {ranks} processes of {RANK_GIB} GiB and more, but this machine has "
            f"{memory_gib():.0f} GiB; lower it, or name a cluster in cluster.scheduler"
        )


def machine_warnings(config: RunConfig) -> Iterator[str]:
    """What works, but hardly as it was meant."""
    ranks, cores = config.resources.num_ranks, num_cores()
    on_cpu = config.resources.device == "cpu" or (config.resources.device == "auto" and not num_gpus())
    threads = ranks * config.resources.threads_per_rank
    if config.cluster.scheduler is None and on_cpu and threads > cores:
        yield (
            f"resources.num_ranks: {ranks} ranks with resources.threads_per_rank {config.resources.threads_per_rank} "
            f"share {cores} cores; fewer are faster"
        )


def is_on_cpu(config: RunConfig) -> bool:
    """Whether this machine, without a GPU that torch could use, runs the ranks; False too where that is not known."""
    if config.resources.device == "cpu":
        return True
    here = config.resources.device == "auto" and config.cluster.scheduler is None
    return here and no_gpu_reason(num_gpus()) is not None


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def num_gpus(devices: Path = Path("/dev")) -> int | None:
    """NVIDIA GPUs that processes started here can use; None where the device files do not say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    files = len(list(devices.glob(DEVICE_FILES[0])))
    if visible is not None:
        named = [name for name in visible.split(",") if name.strip()]
        return 0 if "-1" in named or not named else min(len(named), files) if files else None
    if files:
        return files
    return None if any(any(devices.glob(name)) for name in DEVICE_FILES[1:]) else 0


def no_gpu_reason(gpus: int | None) -> str | None:
    """Why torch sees none here, for a message; None where it may. gpus: as `num_gpus` gives."""
    if gpus == 0:
        hidden = " (CUDA_VISIBLE_DEVICES hides them)" if os.environ.get("CUDA_VISIBLE_DEVICES") is not None else ""
        return f"this machine has no GPU{hidden}"
    return "the installed torch is a build for CPUs" if _torch_is_for_cpus() else None


def _torch_is_for_cpus() -> bool:
    """By the version file of the installed torch, which is read, not imported."""
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    texts = [file.read_text(encoding="utf-8") for f in folders if (file := Path(f) / "version.py").is_file()]
    return any(
        re.search(r"^cuda\b[^=\n]*= *None", text, re.M) and not re.search(r"^hip\b[^=\n]*= *['\"]", text, re.M)
        for text in texts
    )
