"""What SGLang needs on this machine, and the command that installs it; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

CPU_REQUIREMENTS = Path(__file__).resolve().parents[1] / "workers" / "engines" / "sglang" / "cpu" / "requirements.txt"
"""What an engine imports on a CPU beyond the dependencies of this distribution."""
PINS = ("torch", "transformers")
"""SGLang takes exactly one version of each."""


def has_nvidia_device() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def install_command(*, on_gpu: bool | None = None) -> str:
    """The same line for a clone and for an installed wheel. on_gpu: None: as the machine is that this is asked on."""
    if has_nvidia_device() if on_gpu is None else on_gpu:
        return "pip install 'hybridflow[sglang]' 'sglang==0.5.23'"
    return f"pip install --no-deps --requirement {CPU_REQUIREMENTS}"


def missing_on_cpu() -> list[str]:
    """Distributions of `CPU_REQUIREMENTS` that are not installed."""
    lines = CPU_REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    names = [line.partition("==")[0] for line in lines if "==" in line]
    return [name for name in names if _version_of(name) is None]


def other_pins() -> Iterator[str]:
    """`torch 2.14.1 (installed: 2.13.0)` where the installed version is not the one that SGLang asks for."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requires("sglang") or ()):
        if requirement.name in PINS and not requirement.extras and requirement.marker is None:
            installed = _version_of(requirement.name)
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                wanted = str(requirement.specifier).removeprefix("==")
                yield f"{requirement.name} {wanted} (installed: {installed or 'none'})"


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
