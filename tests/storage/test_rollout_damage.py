"""Damage on the disk is an error that names the place, never other numbers."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from storage.atomic import write_file, writing
from storage.columns import open_group
from storage.errors import StorageError
from storage.rollout_store import RolloutStore
from tests.storage.batches import assert_same, full_batch, scores_for


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    store = RolloutStore(tmp_path / "rollouts")
    manifest = store.write(0, "generate", full_batch(0), new_rows=True, attempt="1")
    store.commit(0, manifest, kind="column", arguments={"version": 3}, metrics={"reward": 0.25})
    return store


def chunk_files(store: RolloutStore) -> list[Path]:
    return sorted(path for path in store.folder(0).glob("*/c/*") if path.is_file())


def test_a_missing_chunk_is_an_error_not_zeros(store: RolloutStore) -> None:
    for path in chunk_files(store):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(StorageError, match=f"{path} is missing"):
            store.read(0)
        with pytest.raises(StorageError, match=f"{path} is missing"):
            store.read(0, verify=False)
        path.write_bytes(data)
    assert_same(store.read(0), full_batch(0))


def test_a_truncated_chunk_is_named(store: RolloutStore) -> None:
    for path in chunk_files(store):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(StorageError, match=f"{path} has {len(data) // 2} bytes, {len(data)} were committed"):
            store.read(0)
        path.write_bytes(data)


def test_a_flipped_bit_is_named(store: RolloutStore) -> None:
    draw = random.Random(0)
    for path in chunk_files(store):
        data = path.read_bytes()
        for _ in range(8):
            path.write_bytes(flip(data, draw))
            with pytest.raises(StorageError, match=f"{path.parent.parent}"):
                store.read(0)
        path.write_bytes(data)


def test_a_chunk_of_another_iteration_is_noticed(store: RolloutStore) -> None:
    """A whole, valid chunk with the wrong numbers: only the column's own checksum can tell."""
    batch = full_batch(0)
    other = batch.with_columns(token={"response_mask": 1 - batch["response_mask"]})
    manifest = store.write(1, "generate", other, new_rows=True, attempt="1")
    store.commit(1, manifest, kind="column", arguments={}, metrics={})
    for name in ("response_mask", "values"):
        shutil.copyfile(store.folder(1) / name / "c" / "0", store.folder(0) / name / "c" / "0")
    with pytest.raises(StorageError, match="response_mask"):
        store.read(0)


def test_a_damaged_zarr_json_never_gives_other_numbers(store: RolloutStore) -> None:
    path = store.folder(0) / "zarr.json"
    data, stages = path.read_bytes(), store.stages(0)
    draw, refused = random.Random(1), 0
    for _ in range(150):
        path.write_bytes(flip(data, draw))
        try:
            found, found_stages = store.read(0), store.stages(0)
        except StorageError as error:
            refused += 1
            assert str(store.folder(0)) in str(error)
        else:
            # The flip hit something without meaning for the numbers, such as a space.
            assert_same(found, full_batch(0))
            assert found_stages == stages
    assert refused > 75


def test_a_zarr_json_that_has_lost_the_stages_is_not_an_uncommitted_iteration(store: RolloutStore) -> None:
    path = store.folder(0) / "zarr.json"
    whole = json.loads(path.read_bytes())
    lost = [{**whole, "attributes": left} for left in ({}, None, [], {"stages": {}})]
    for document in ({}, [], None, "group", *lost, {k: v for k, v in whole.items() if k != "attributes"}):
        path.write_text(json.dumps(document))
        for ask in (store.iterations, lambda: store.stages(0), lambda: store.read(0)):
            with pytest.raises(StorageError, match=f"{path} .*the file is damaged"):
                ask()


def test_iterations_whose_folders_have_changed_names_are_refused(store: RolloutStore) -> None:
    store.folder(0).rename(store.folder(1))
    with pytest.raises(StorageError, match=f"{store.folder(1)}/zarr.json is of iteration 0; give its folder"):
        store.read(1)


def test_an_iteration_that_is_removed_while_it_is_read_is_gone_and_not_damaged(store: RolloutStore) -> None:
    folder = store.folder(0)
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=f"^{folder}/zarr.json is gone"):
        open_group(folder)
    with pytest.raises(StorageError, match=f"^cannot write {folder}/x: .*; its folder was removed"), writing(folder):
        write_file(folder / "x", b"")


def test_another_format_version_is_refused(store: RolloutStore) -> None:
    path = store.folder(0) / "zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["format_version"] = 2
    path.write_text(json.dumps(document))
    with pytest.raises(StorageError, match=r"zarr\.json has format version 2, this program reads 1"):
        store.read(0)


def test_an_attribute_of_the_users_does_no_harm(store: RolloutStore) -> None:
    path = store.folder(0) / "zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["note"] = "the good one"
    path.write_text(json.dumps(document))
    assert_same(store.read(0), full_batch(0))


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "mkdir"])
def test_a_full_disk_stops_with_nothing_committed_lost(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    batch = full_batch(0)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StorageError, match="cannot write somewhere: No space left on device; free space"):
            manifest = store.write(0, "cost", scores_for(batch, 1), new_rows=False, attempt="1")
            store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert_same(store.read(0), batch)
    manifest = store.write(0, "cost", scores_for(batch, 1), new_rows=False, attempt="2")
    store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert_same(store.read(0, columns=["cost", "judge_values"]), scores_for(batch, 1))


def flip(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one bit turned over."""
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)
