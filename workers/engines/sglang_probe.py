"""Whether the SGLang engine can be used here; answered without importing sglang or torch.

(Importing sglang replaces the event-loop policy and takes seconds.)
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from configs.errors import UserError
from configs.schema import RunConfig
from configs.sglang_needs import has_nvidia_device, install_command, missing_on_cpu, other_pins

OLDEST = (0, 5, 16)
NEWEST = (0, 5, 23)
"""Versions between these two, both included, are supported."""

CPU_RELEASE = (0, 5, 23)
"""The version whose CPU path is used."""
NAMED = 3
"""Missing packages that a message names, at most."""


def sglang_unavailable_reason(*, on_gpu: bool | None = None) -> str | None:
    """One line saying why SGLang cannot be used on this machine; None when it can.

    on_gpu: whether for runs on a GPU; None: as the machine is.
    """
    on_gpu = has_nvidia_device() if on_gpu is None else on_gpu
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        return f"sglang is not installed: {install_command(on_gpu=on_gpu)}"
    if find_spec("sglang") is None:
        return f"sglang {installed} is installed but cannot be imported from here"
    if not OLDEST <= _release(installed) <= NEWEST:
        return f"sglang {installed} is not supported: {_written(OLDEST)} to {_written(NEWEST)} are"
    reason = None if on_gpu else _unusable_on_cpu(installed)
    return reason or _other_versions(installed)


def _unusable_on_cpu(installed: str) -> str | None:
    if _release(installed)[:3] != CPU_RELEASE:
        return (
            f"sglang {installed} is installed, but this machine has no NVIDIA device, and on a CPU only "
            f"{_written(CPU_RELEASE)} is supported: {install_command(on_gpu=False)}"
        )
    if missing := missing_on_cpu():
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        return f"sglang {installed} lacks {', '.join(missing[:NAMED])}{more} on a CPU: {install_command(on_gpu=False)}"
    return None


def _other_versions(installed: str) -> str | None:
    """SGLang and torch of another release do not load each other's kernels."""
    others = list(other_pins())
    if not others:
        return None
    wanted = " ".join(f"{text.split()[0]}=={text.split()[1]}" for text in others)
    return f"sglang {installed} wants {', '.join(others)}: pip install {wanted}"


def check_engine(config: RunConfig) -> None:
    """Raises UserError when the configured rollout engine cannot be used."""
    if config.rollout.engine == "sglang":
        reason = sglang_unavailable_reason()
        if reason is not None:
            without = " without rollout.engine_arguments" if config.rollout.engine_arguments else ""
            raise UserError(f"rollout.engine: sglang cannot be used: {reason}; use rollout.engine: torch{without}")


def _release(text: str) -> tuple[int, ...]:
    """(0, 5, 16) of "0.5.16", "0.5.16.post1", "0.5.16rc0+cu130"."""
    from packaging.version import Version

    return Version(text).release


def _written(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
