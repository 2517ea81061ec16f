"""Whether the SGLang engine can be used here; answered without importing sglang or torch.

(Importing sglang replaces the event-loop policy and takes seconds.)
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from configs.errors import UserError
from configs.schema import RunConfig

OLDEST = (0, 5, 16)
NEWEST = (0, 5, 23)
"""Versions between these two, both included, are supported."""

CPU_RELEASE = (0, 5, 23)
"""The version whose CPU path is used."""
KERNELS = "sgl_kernel"


def sglang_unavailable_reason() -> str | None:
    """One line saying why SGLang cannot be used on this machine; None when it can."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed: pip install 'hybridflow[sglang]'"
    if find_spec("sglang") is None:
        return f"sglang {installed} is installed but cannot be imported from here"
    if not OLDEST <= _release(installed) <= NEWEST:
        return f"sglang {installed} is not supported: {_written(OLDEST)} to {_written(NEWEST)} are"
    return None if _has_nvidia_device() else _unusable_on_cpu(installed)


def _unusable_on_cpu(installed: str) -> str | None:
    if _release(installed)[:3] != CPU_RELEASE:
        return (
            f"sglang {installed} is installed, but this machine has no NVIDIA device, and on a CPU only "
            f"{_written(CPU_RELEASE)} is supported"
        )
    if find_spec(KERNELS) is None:
        return (
            f"sglang {installed} needs a module {KERNELS} on a CPU, for its names only: "
            "put tests/sgl_kernel_stub of this project's sources on PYTHONPATH"
        )
    return None


def check_engine(config: RunConfig) -> None:
    """Raises UserError when the configured rollout engine cannot be used."""
    if config.rollout.engine == "sglang":
        reason = sglang_unavailable_reason()
        if reason is not None:
            raise UserError(f"rollout.engine: sglang cannot be used: {reason}; use rollout.engine: torch")


def _release(text: str) -> tuple[int, ...]:
    """(0, 5, 16) of "0.5.16", "0.5.16.post1", "0.5.16rc0+cu130"."""
    from packaging.version import Version

    return Version(text).release


def _written(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _has_nvidia_device() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))
