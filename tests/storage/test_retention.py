"""Rollouts go when no resume needs them, whole and not by halves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints import CheckpointStore
from storage.errors import StorageError
from storage.retention import RolloutRetention, removable
from storage.rollout_store import RolloutStore
from tests.storage.crash import commit_generate, save_checkpoint


@given(
    stored=st.sets(st.integers(0, 40)),
    keep_last=st.integers(1, 12),
    keep_every=st.none() | st.integers(1, 12),
    resumed_from=st.none() | st.integers(0, 41),
)
def test_what_is_needed_stays(
    stored: set[int], keep_last: int, keep_every: int | None, resumed_from: int | None
) -> None:
    gone = removable(sorted(stored), keep_last=keep_last, keep_every=keep_every, resumed_from=resumed_from)
    kept = stored - set(gone)
    assert set(sorted(stored)[-keep_last:]) <= kept
    assert {i for i in stored if resumed_from is None or i >= resumed_from} <= kept
    assert keep_every is None or {i for i in stored if i % keep_every == 0} <= kept
    needed = {i for i in kept if i in sorted(stored)[-keep_last:] or resumed_from is None or i >= resumed_from}
    assert kept - needed == {i for i in kept - needed if keep_every is not None and i % keep_every == 0}


def retention(folder: Path, **changes: int | None) -> RolloutRetention:
    wanted = {"keep_last": 2, "keep_every": None, **changes}
    assert wanted["keep_last"] is not None
    return RolloutRetention(
        rollouts=RolloutStore(folder / "rollouts"),
        checkpoints=CheckpointStore(folder / "checkpoints", keep_last=2),
        keep_last=wanted["keep_last"],
        keep_every=wanted["keep_every"],
    )


def test_rollouts_before_the_oldest_checkpoint_go(tmp_path: Path) -> None:
    for iteration in range(8):
        commit_generate(tmp_path / "rollouts", iteration)
    assert retention(tmp_path).apply(8) == [], "without a checkpoint everything is replayed"
    for step in (4, 6):
        save_checkpoint(tmp_path / "checkpoints", step, 1)
    assert retention(tmp_path, keep_every=3).apply(6) == [1, 2]
    assert retention(tmp_path, keep_last=5).apply(6) == [0]
    store = RolloutStore(tmp_path / "rollouts")
    assert store.iterations() == [3, 4, 5, 6, 7]
    with pytest.raises(StorageError, match="00000001 has no committed rollouts"):
        store.read(1)


def test_checkpoints_that_were_passed_over_do_not_count(tmp_path: Path) -> None:
    for iteration in range(8):
        commit_generate(tmp_path / "rollouts", iteration)
    for step in (7, 8, 2):
        save_checkpoint(tmp_path / "checkpoints", step, 1)
    assert retention(tmp_path).apply(2) == [0, 1], "a resume replays from the second checkpoint on"


def test_a_removal_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    for iteration in range(6):
        commit_generate(tmp_path / "rollouts", iteration)
    save_checkpoint(tmp_path / "checkpoints", 4, 1)
    store = RolloutStore(tmp_path / "rollouts")
    (store.folder(0) / "zarr.json").unlink()
    assert store.iterations() == [1, 2, 3, 4, 5]
    assert retention(tmp_path).apply(4) == [0, 1, 2, 3]
    assert sorted(path.name for path in store.root.iterdir()) == ["00000004", "00000005"]
