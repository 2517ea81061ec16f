from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from configs import sglang_needs
from configs.errors import UserError
from configs.schema import RolloutConfig, RunConfig
from flows.commands.doctor import doctor
from workers.engines import sglang_probe
from workers.engines.sglang.process import CPU_KERNEL_NAMES
from workers.engines.sglang_probe import check_engine, sglang_unavailable_reason


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, release: str, *, requires: tuple[str, ...] = ()) -> None:
    """A distribution `sglang` of this version whose import would fail."""
    metadata = folder / f"sglang-{release}.dist-info"
    metadata.mkdir()
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n{needs}")
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(folder))


def on_machine_with(monkeypatch: pytest.MonkeyPatch, *, device: bool) -> None:
    monkeypatch.setattr(sglang_probe, "has_nvidia_device", lambda: device)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sglang_probe, "version", nothing)


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_package_names_the_extra() -> None:
    assert sglang_unavailable_reason() == f"sglang is not installed: {sglang_needs.install_command()}"


@pytest.mark.usefixtures("nothing_installed")
def test_for_a_gpu_the_gpu_way_is_named_on_any_machine() -> None:
    assert sglang_unavailable_reason(on_gpu=True) == (
        "sglang is not installed: pip install 'hybridflow[sglang]' 'sglang==0.5.23'"
    )
    assert "requirements.txt" in str(sglang_unavailable_reason(on_gpu=False))
    gpu_run = doctor().document["gpu_run"]
    assert any("pip install 'hybridflow[sglang]'" in line for line in gpu_run["slower"])
    assert not any("requirements.txt" in line for line in gpu_run["slower"])


@pytest.mark.parametrize("release", ["0.5.15", "0.5.24", "0.6"])
def test_other_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    pretend(tmp_path, monkeypatch, release)
    assert sglang_unavailable_reason() == f"sglang {release} is not supported: 0.5.16 to 0.5.23 are"


@pytest.mark.parametrize("release", ["0.5.16", "0.5.20.post1", "0.5.23"])
def test_supported_versions_are_usable_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    pretend(tmp_path, monkeypatch, release)
    on_machine_with(monkeypatch, device=True)
    assert sglang_unavailable_reason() is None


@pytest.mark.parametrize("release", ["0.5.16", "0.5.20.post1"])
def test_a_cpu_needs_the_newest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    pretend(tmp_path, monkeypatch, release)
    on_machine_with(monkeypatch, device=False)
    assert sglang_unavailable_reason() == (
        f"sglang {release} is installed, but this machine has no NVIDIA device, and on a CPU only 0.5.23 is supported: "
        f"{sglang_needs.install_command(on_gpu=False)}"
    )


def test_a_cpu_needs_what_an_engine_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, "0.5.23")
    on_machine_with(monkeypatch, device=False)
    config = RunConfig(rollout=RolloutConfig(engine="sglang"))
    monkeypatch.setattr(sglang_needs, "CPU_REQUIREMENTS", tmp_path / "needed.txt")
    (tmp_path / "needed.txt").write_text("# a comment\npackaging==1\nno-such-a==1\nno-such-b==2\n")
    with pytest.raises(UserError) as refused:
        check_engine(config)
    assert str(refused.value) == (
        "rollout.engine: sglang cannot be used: sglang 0.5.23 lacks no-such-a, no-such-b on a CPU: "
        f"pip install --no-deps --requirement {tmp_path}/needed.txt; use rollout.engine: torch"
    )
    (tmp_path / "needed.txt").write_text("packaging==1\n")
    check_engine(config)


def test_the_torch_that_sglang_asks_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, "0.5.23", requires=("torch==2.10.0", "transformers>=5", "numpy==1"))
    monkeypatch.setattr(sglang_probe, "missing_on_cpu", list)
    assert re.fullmatch(
        r"sglang 0.5.23 wants torch 2.10.0 \(installed: \S+\): pip install torch==2.10.0",
        sglang_unavailable_reason() or "",
    )


def test_what_is_listed_for_a_cpu_is_what_an_engine_there_lacked() -> None:
    listed = sglang_needs.CPU_REQUIREMENTS.read_text()
    assert all(f"\n{name}==" in listed for name in ("sglang", "dill", "gguf"))
    assert (CPU_KERNEL_NAMES / "sgl_kernel" / "__init__.py").is_file()


@pytest.mark.usefixtures("nothing_installed")
def test_the_torch_engine_needs_nothing() -> None:
    with pytest.raises(UserError, match="sglang is not installed"):
        check_engine(RunConfig(rollout=RolloutConfig(engine="sglang")))
    check_engine(RunConfig(rollout=RolloutConfig(engine="torch")))


def test_asking_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys; from workers.engines.sglang_probe import sglang_unavailable_reason as why; why(); "
        "sys.exit(bool({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
