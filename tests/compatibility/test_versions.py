"""What another set of versions wrote opens under this one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility.sample import check, versions

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.gz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=[archive.name.removesuffix(".tar.gz") for archive in ARCHIVES])
def test_a_store_and_a_checkpoint_of_other_versions_open_with_the_same_bits(archive: Path) -> None:
    assert check(archive) != versions()


def test_there_is_an_archive_of_the_gpu_versions() -> None:
    assert any("torch-2.11" in archive.name for archive in ARCHIVES)
