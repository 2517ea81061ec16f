"""What this machine lacks is said before anything starts."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from configs import machine_checks
from configs.machine_checks import LONGEST_SOCKET, machine_problems, machine_warnings, num_cores, num_gpus
from configs.schema import RunConfig


def config(**resources: Any) -> RunConfig:
    return RunConfig.model_validate({"resources": resources})


def gpus(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr(machine_checks, "num_gpus", lambda: count)


@pytest.mark.parametrize(
    ("files", "visible", "count"),
    [
        (("null",), None, 0),
        (("nvidia0", "nvidia1", "nvidiactl"), None, 2),
        (("nvidia0", "nvidia1"), "1", 1),
        (("nvidia0", "nvidia1"), "0,1,2", 2),
        (("nvidia0",), "", 0),
        (("nvidia0",), "-1", 0),
        (("dxg",), None, None),
        (("kfd",), None, None),
    ],
)
def test_gpus_are_counted_by_their_files_and_what_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], visible: str | None, count: int | None
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus(tmp_path) == count


def test_cuda_without_a_gpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (line,) = machine_problems(config(device="cuda"))
    assert line == "resources.device: cuda, but this machine has no GPU; set it to auto or cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides them" in next(machine_problems(config(device="cuda")))
    assert not list(machine_problems(config(device="auto")))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_two_ranks_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    gpus(monkeypatch, 2)
    monkeypatch.setattr(machine_checks, "_torch_is_for_cpus", lambda: False)
    assert not list(machine_problems(config(device=device, num_ranks=2)))
    (line,) = machine_problems(config(device=device, num_ranks=3))
    assert "resources.num_ranks: 3" in line and "2 GPUs" in line and "lower it to 2" in line
    assert not list(machine_problems(config(device="cpu", num_ranks=3)))


def test_ranks_that_share_cores_are_said_and_allowed() -> None:
    many = config(device="cpu", num_ranks=num_cores() + 1)
    assert not list(machine_problems(many))
    (line,) = machine_warnings(many)
    assert f"{num_cores() + 1} ranks" in line and f"share {num_cores()} cores" in line
    assert not list(machine_warnings(config(device="cpu", num_ranks=num_cores())))


def test_another_clusters_machines_are_not_judged_by_this_one() -> None:
    tree = {"resources": {"num_ranks": 10**6, "device": "cuda"}, "cluster": {"scheduler": "tcp://10.0.0.1:8786"}}
    elsewhere = RunConfig.model_validate(tree)
    assert not [*machine_problems(elsewhere), *machine_warnings(elsewhere)]


@pytest.mark.parametrize(("engine", "longest"), [("torch", 75), ("sglang", 68)])
def test_a_folder_for_temporary_files_in_which_no_socket_has_room_is_refused(
    engine: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes count, of which `é` has two."""
    made = RunConfig.model_validate({"rollout": {"engine": engine}})
    monkeypatch.setattr(tempfile, "tempdir", f"/é{'a' * (longest - 3)}")
    assert not list(machine_problems(made))
    monkeypatch.setattr(tempfile, "tempdir", f"/é{'a' * (longest - 2)}")
    (line,) = machine_problems(made)
    assert line.startswith("TMPDIR: /éa") and f"has {longest + 1} bytes" in line and f"at most {longest}" in line


def test_the_longest_socket_is_one_that_the_kernel_binds(tmp_path: Path) -> None:
    """Of 107 bytes, and no longer."""
    folder = f"{tmp_path}/"
    with socket.socket(socket.AF_UNIX) as short, socket.socket(socket.AF_UNIX) as long:
        name = "s" * (LONGEST_SOCKET - len(folder))
        short.bind(folder + name)
        with pytest.raises(OSError, match="too long"):
            long.bind(folder + name + "s")
