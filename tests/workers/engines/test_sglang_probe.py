from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.schema import RolloutConfig, RunConfig
from workers.engines.sglang_probe import check_engine, sglang_unavailable_reason


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """A distribution `sglang` of this version whose import would fail."""
    metadata = folder / f"sglang-{release}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(folder))


def is_installed() -> bool:
    try:
        return bool(version("sglang"))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(is_installed(), reason="sglang is installed here")
def test_a_missing_package_names_the_extra() -> None:
    assert sglang_unavailable_reason() == "sglang is not installed: pip install 'hybridflow[sglang]'"


@pytest.mark.parametrize("release", ["0.5.15", "0.5.24", "0.6"])
def test_other_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    pretend(tmp_path, monkeypatch, release)
    assert sglang_unavailable_reason() == f"sglang {release} is not supported: 0.5.16 to 0.5.23 are"


HAS_DEVICE = any(Path("/dev").glob("nvidia[0-9]*"))
on_a_cpu = pytest.mark.skipif(HAS_DEVICE, reason="this machine has an NVIDIA device")


@pytest.mark.skipif(not HAS_DEVICE, reason="this machine has no NVIDIA device")
@pytest.mark.parametrize("release", ["0.5.16", "0.5.20.post1", "0.5.23"])
def test_supported_versions_are_usable_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    pretend(tmp_path, monkeypatch, release)
    assert sglang_unavailable_reason() is None


@on_a_cpu
@pytest.mark.parametrize("release", ["0.5.16", "0.5.20.post1"])
def test_a_cpu_needs_the_newest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    pretend(tmp_path, monkeypatch, release)
    assert sglang_unavailable_reason() == (
        f"sglang {release} is installed, but this machine has no NVIDIA device, and on a CPU only 0.5.23 is supported"
    )


@on_a_cpu
def test_a_cpu_needs_the_kernel_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, "0.5.23")
    config = RunConfig(rollout=RolloutConfig(engine="sglang"))
    with pytest.raises(UserError, match=r"^rollout.engine: sglang cannot be used: .*sgl_kernel.*; use rollout.engine"):
        check_engine(config)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "sgl_kernel_stub"))
    check_engine(config)


def test_the_torch_engine_needs_nothing() -> None:
    check_engine(RunConfig())


def test_asking_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys; from workers.engines.sglang_probe import sglang_unavailable_reason as why; why(); "
        "sys.exit(bool({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
