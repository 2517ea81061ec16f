"""What holds on a disk holds in an object store: committed whole or not at all, verified, retained."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zarr
from zarr.storage import ObjectStore

from configs.schema import RunConfig
from storage.atomic import write_files
from storage.checkpoints import CheckpointStore
from storage.errors import StorageError
from storage.iteration_group import group_to_change, save_group
from storage.lines import append_text, read_appended
from storage.locations import Location
from storage.metrics import MetricsLog, read_metrics
from storage.object_path import ObjectPath
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.s3 import BUCKET
from tests.storage.batches import assert_same, full_batch, scores_for
from tests.storage.crash import commit_cost, commit_generate, commit_one_column, save_checkpoint, small_batch
from tests.storage.test_rollout_crash import crash

_numbers = itertools.count()


@pytest.fixture
def root(s3: str) -> Iterator[ObjectPath]:
    """A folder of its own."""
    yield ObjectPath(BUCKET, f"test-{next(_numbers)}")


def test_a_stage_is_seen_once_it_is_committed(root: ObjectPath) -> None:
    store, batch = RolloutStore(root / "rollouts"), full_batch(3)
    manifest = store.write(0, "generate", batch, new_rows=True, attempt="1")
    assert store.iterations() == store.names() == []
    store.commit(0, manifest)
    store.commit(0, manifest)
    scores = scores_for(batch, 4)
    store.commit(0, store.write(0, "cost", scores, new_rows=False, attempt="1"))
    assert store.iterations() == store.names() == [0]
    assert_same(store.read(0, columns=batch.columns), batch)
    assert_same(store.read(0, columns=scores.columns, rows=[3, 1]), scores.select([3, 1]))
    folder = root / "rollouts/00000000"
    assert not [path for path in folder.files() if ".pending" in path.key], "what was copied is removed"
    plain = zarr.open_group(ObjectStore(folder.store, read_only=True), path=folder.key, mode="r")
    assert sorted(plain) == sorted(["offsets", *(name.replace("/", ".") for name in (*batch.columns, *scores.columns))])


def test_damage_is_found_and_named(root: ObjectPath) -> None:
    commit_generate(root)
    chunk = root / "00000000/token_ids/c/0"
    whole = chunk.read_bytes()
    chunk.write(whole[:-1])
    with pytest.raises(StorageError, match=rf"s3://{BUCKET}/{root.key}/00000000/token_ids/c/0 has .* bytes"):
        RolloutStore(root).read(0)
    chunk.write(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StorageError, match="token_ids cannot be decoded"):
        RolloutStore(root).read(0)
    chunk.remove()
    with pytest.raises(StorageError, match="c/0 is missing"):
        RolloutStore(root).read(0)


def test_a_controller_that_lingers_cannot_overwrite_a_commit(root: ObjectPath) -> None:
    commit_generate(root)
    folder = RolloutStore(root).folder(0)
    read_before = group_to_change(folder, run="", iteration=0)
    commit_cost(root)
    with pytest.raises(StorageError, match=r"zarr.json was replaced by another process"):
        save_group(folder, read_before)
    assert set(RolloutStore(root).stages(0)) == {"generate", "cost", "update_actor"}


def killed_at_each_request(scenario: str, root: ObjectPath) -> list[Location]:
    done = subprocess.run(crash("steps", scenario, str(root)), capture_output=True, text=True, check=True)
    return [root / str(step) for step in range(1, int(done.stdout) + 1)]


def test_killed_before_each_request_of_a_commit(root: ObjectPath) -> None:
    seen = []
    for place in killed_at_each_request("one_column", root):
        store = RolloutStore(place)
        seen.append("generate" in store.stages(0))
        if not seen[-1]:
            commit_one_column(place, attempt="2")
        assert_same(store.read(0), small_batch(0).only(["token_ids"]))
    # Absent up to one request, there from it on: that request is the commit.
    assert len(seen) > 8 and seen == sorted(seen) and {False, True} == set(seen)


def test_killed_before_each_request_of_a_checkpoint(root: ObjectPath) -> None:
    step, fill = 2, 9
    for place in killed_at_each_request("checkpoint_again", root):
        store = CheckpointStore(place)
        newest = store.latest()
        assert newest is not None and newest.step in (1, 2, step), "there is always one"
        assert newest.state["fill"] in (newest.step, fill)
        save_checkpoint(place, step, fill)
        newest = store.latest()
        assert newest is not None and (newest.step, newest.state["fill"]) == (step, fill)
        assert {path.name for path in place.iterdir()} == {f"{c.step:08d}" for c in store.committed()}
        assert len(store.committed()) == 2


def test_a_damaged_checkpoint_is_passed_over(root: ObjectPath, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(root)
    for step in (1, 2, 3):
        save_checkpoint(root, step, step)
    assert [checkpoint.step for checkpoint in store.committed()] == [2, 3]
    (root / "00000003/actor/__0_0.distcp").write(b"x" * 5000)
    newest = store.latest()
    assert newest is not None and newest.step == 2
    assert "00000003/actor/__0_0.distcp does not match its checksum" in caplog.text
    write_files(store.begin(3), {"half": b"written"})
    assert [checkpoint.step for checkpoint in store.committed()] == [2]


def test_lines_go_on_in_a_further_part(root: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.lines.PART_BYTES", 200)
    path = root / "metrics.jsonl"
    assert read_appended(path) == b"" and read_metrics(path) == []
    log = MetricsLog(path)
    assert all(log.append(iteration, {"loss": 0.5}) for iteration in range(12))
    assert not MetricsLog(path).append(11, {"loss": 0.1})
    assert [line["iteration"] for line in read_metrics(path)] == list(range(12))
    assert {entry.name for entry in root.iterdir()} == {"metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2"}
    append_text(path, "no json\n")
    with pytest.raises(StorageError, match="metrics.jsonl line 13 is not JSON"):
        read_metrics(path)


def test_names_of_objects_are_paths(root: ObjectPath) -> None:
    write_files(root, {"a/x.json": b"1", "a b/%2F ü.json": b"2", "c/d/x.json": b"3"})
    assert sorted(path.relative_to(root).as_posix() for path in root.rglob("*.json")) == [
        "a b/%2F ü.json",
        "a/x.json",
        "c/d/x.json",
    ]
    assert sorted(path.name for path in root.iterdir()) == ["a", "a b", "c"]
    assert root.glob("*/x.json") == [root / "a/x.json"]
    assert (root / "a b").is_dir() and not (root / "a b").is_file() and not (root / "a ").exists()
    assert ObjectPath.of(str(root / "a b")) == root / "a b"
    assert (root / "a b/%2F ü.json").read_bytes() == b"2"
    assert small_batch(0).num_rows == 5


def test_a_run_that_holds_nothing_goes_and_latest_is_the_one_before(
    root: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (RunDirectory.create(RunConfig(name=name), root) for name in ("first", "second"))
    commit_generate(first.rollouts)
    assert second.holds_nothing() and not first.holds_nothing()
    second.discard()
    assert RunDirectory.resolve(f"{root}/latest") == first and not second.path.exists() and not second.logs.exists()
    first.discard()
    assert not root.files()
