"""Iterations seen through a second folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from storage.errors import StorageError
from storage.mirror import AlteredColumn, mirror, stored_iteration
from storage.rollout_store import RolloutStore
from tests.flows.stored_run import generated, stored_run


def test_an_altered_column_is_said_and_read_as_it_is(tmp_path: Path) -> None:
    store = RolloutStore(stored_run(tmp_path).rollouts)
    array: Any = zarr.open_group(store.folder(1), mode="r+")["rollout_log_probs"]
    array[2] = -7.0
    with pytest.raises(StorageError):
        store.read(1)
    stored = stored_iteration(store, 1)
    assert stored.altered == (AlteredColumn(iteration=1, stage="actor.generate_sequences", column="rollout_log_probs"),)
    mirror(stored, tmp_path / "mirror")
    seen = RolloutStore(tmp_path / "mirror").read(1)
    assert seen["rollout_log_probs"][2] == -7.0
    assert np.array_equal(seen["token_ids"], generated(1)["token_ids"])


def test_a_stage_that_is_left_out_can_be_written_and_the_store_keeps_its_own(tmp_path: Path) -> None:
    store = RolloutStore(stored_run(tmp_path).rollouts)
    mirror(stored_iteration(store, 0), tmp_path / "mirror", without={"actor.generate_sequences"})
    seen = RolloutStore(tmp_path / "mirror")
    other = generated(1)
    manifest = seen.write(0, "actor.generate_sequences", other, new_rows=True, attempt="b")
    seen.commit(0, manifest)
    assert np.array_equal(seen.read(0, ["token_ids"])["token_ids"], other["token_ids"])
    assert np.array_equal(store.read(0, ["token_ids"])["token_ids"], generated(0)["token_ids"])


def test_a_missing_chunk_is_damage(tmp_path: Path) -> None:
    store = RolloutStore(stored_run(tmp_path).rollouts)
    (store.folder(0) / "token_ids" / "c" / "0").unlink()
    with pytest.raises(StorageError, match="is missing"):
        stored_iteration(store, 0)
