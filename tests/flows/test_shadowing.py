"""Packages of the working directory that are named like ours do not take their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("configs", "pipeline", "storage", "workers")
EDITABLE = f"""
import sys
from importlib.util import spec_from_file_location

class Finder:  # as setuptools' for editable installs: after every folder on the path
    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = {str(ROOT)!r} + "/" + name
        if name in {(*NAMES, "flows")!r}:
            return spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])

sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()] + [Finder]
from flows.cli import main
assert main(["config", "check", "good.yaml"]) == 2
import configs, pipeline, storage, workers, mine
print(all(m.__file__.startswith({str(ROOT)!r}) for m in (configs, pipeline, storage, workers)))
"""


def shadows(folder: Path) -> None:
    for name in NAMES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    (folder / "mine.py").touch()
    (folder / "good.yaml").write_text("nme: x\n")


def started(folder: Path, *args: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_editable_install_is_not_shadowed(tmp_path: Path) -> None:
    shadows(tmp_path)
    done = started(tmp_path, "-P", "-c", EDITABLE)
    assert done.stdout.splitlines() == ["True"], done.stderr
    assert len(done.stderr.splitlines()) == 1 and "did you mean name?" in done.stderr


def test_python_m_is_not_shadowed(tmp_path: Path) -> None:
    shadows(tmp_path)
    done = started(tmp_path, "-m", "flows.cli", "config", "check", "good.yaml", path=str(ROOT))
    assert done.returncode == 2 and "did you mean name?" in done.stderr, done.stderr
