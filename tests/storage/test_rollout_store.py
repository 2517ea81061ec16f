"""Columns go in, and come back bit for bit once, and only once, they are committed."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import storage.arrays
from pipeline.rollouts import Rollouts, offsets_of
from storage.errors import StorageError
from storage.records import StageManifest
from storage.rollout_store import RolloutStore
from tests.storage.batches import assert_same, full_batch, scores_for


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    return RolloutStore(tmp_path / "my-run" / "rollouts")


def commit_batch(store: RolloutStore, iteration: int, batch: Rollouts, stage: str = "generate") -> None:
    manifest = store.write(iteration, stage, batch, new_rows=True, attempt="1")
    store.commit(iteration, manifest, kind="column", arguments={"version": 3}, metrics={"seconds": 1.5})


def test_columns_come_back_bit_for_bit(store: RolloutStore) -> None:
    batch = full_batch(0)
    commit_batch(store, 12, batch)
    assert_same(store.read(12), batch)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 30))
def test_any_batch_comes_back(tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, tokens: int) -> None:
    store = RolloutStore(tmp_path_factory.mktemp("any"))
    batch = full_batch(seed, num_rows=rows, max_tokens=tokens)
    commit_batch(store, 0, batch)
    assert_same(store.read(0), batch)


def test_infinities_and_nans_keep_their_bits(store: RolloutStore) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], dtype=np.float32)
    batch = Rollouts(offsets=offsets_of([2, 3]), token_columns={"values": values})
    commit_batch(store, 0, batch)
    assert store.read(0)["values"].tobytes() == values.tobytes()


def test_several_chunks_read_as_one_column(store: RolloutStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.arrays, "MAX_CHUNK_ELEMENTS", 16)
    batch = full_batch(1, num_rows=20)
    commit_batch(store, 0, batch)
    assert len(list((store.folder(0) / "values" / "c").iterdir())) > 5
    assert_same(store.read(0), batch)


def test_written_columns_are_unseen_until_committed(store: RolloutStore) -> None:
    batch = full_batch(0)
    commit_batch(store, 0, batch)
    extra = scores_for(batch, 1)
    manifest = store.write(0, "cost", extra, new_rows=False, attempt="1")
    assert set(store.stages(0)) == {"generate"}
    assert "cost" not in zarr.open_group(store.folder(0), mode="r")
    assert "cost" not in store.read(0)
    store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert list(store.stages(0)) == ["generate", "cost"]
    assert_same(store.read(0, columns=extra.columns), extra)


def test_an_iteration_that_is_only_written_does_not_exist(store: RolloutStore) -> None:
    store.write(3, "generate", full_batch(0), new_rows=True, attempt="1")
    assert store.iterations() == []
    assert store.stages(3) == {}
    with pytest.raises(StorageError, match="00000003 has no committed rollouts"):
        store.read(3)


def test_opening_a_half_written_iteration_with_zarr_does_no_harm(store: RolloutStore) -> None:
    """zarr.open_group creates a group where it finds none."""
    batch = full_batch(0)
    manifest = store.write(0, "generate", batch, new_rows=True, attempt="1")
    zarr.open_group(store.folder(0))
    assert store.iterations() == []
    store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert_same(store.read(0), batch)


def test_a_script_with_only_zarr_reads_the_same_numbers(store: RolloutStore, tmp_path: Path) -> None:
    batch = full_batch(4)
    commit_batch(store, 7, batch)
    script = tmp_path / "reader.py"
    script.write_text(
        "import json, sys, zarr\n"
        "group = zarr.open_group(sys.argv[1], mode='r')\n"
        "columns = {name: array[:].tolist() for name, array in group.arrays()}\n"
        "dimensions = {name: array.metadata.dimension_names[0] for name, array in group.arrays()}\n"
        "attributes = {name: group.attrs[name] for name in ('format_version', 'run', 'iteration')}\n"
        "print(json.dumps([columns, dimensions, attributes, sorted(group.attrs['stages'])]))\n"
    )
    command = [sys.executable, "-W", "error", str(script), str(store.folder(7))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    columns, dimensions, attributes, stages = json.loads(done.stdout)
    assert attributes == {"format_version": 1, "run": "my-run", "iteration": 7}
    assert stages == ["generate"]
    assert columns.pop("offsets") == batch.offsets.tolist()
    assert columns == {name.replace("/", "."): batch[name].tolist() for name in batch.columns}
    assert (dimensions["offsets"], dimensions["values"], dimensions["text"]) == (
        "offsets",
        "tokens",
        "samples",
    )


def test_what_zarr_sees_needs_no_unstable_feature(store: RolloutStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        commit_batch(store, 0, full_batch(0))
        store.read(0)


def test_rows_and_columns_can_be_selected(store: RolloutStore) -> None:
    batch = full_batch(2, num_rows=8)
    commit_batch(store, 0, batch)
    rows = [6, 0, 0, 3]
    names = ["text", "values", "reward/exact_match"]
    assert_same(store.read(0, columns=names, rows=rows), batch.only(names).select(rows))
    assert store.read(0, columns=[]).num_tokens == batch.num_tokens


def test_a_column_that_is_not_there_is_named(store: RolloutStore) -> None:
    commit_batch(store, 0, full_batch(0))
    with pytest.raises(StorageError, match="no committed column advantagez; there are offsets, token_ids"):
        store.read(0, columns=["advantagez"])


def test_committing_twice_changes_nothing(store: RolloutStore) -> None:
    batch = full_batch(0)
    manifest = store.write(0, "generate", batch, new_rows=True, attempt="1")
    store.commit(0, manifest, kind="column", arguments={}, metrics={"first": 1})
    before = (store.folder(0) / "zarr.json").read_bytes()
    store.commit(0, manifest, kind="column", arguments={}, metrics={"first": 2})
    assert (store.folder(0) / "zarr.json").read_bytes() == before
    assert_same(store.read(0), batch)


def test_the_first_committed_attempt_wins(store: RolloutStore) -> None:
    first, late = full_batch(0), full_batch(9)
    manifests = [
        store.write(0, "generate", batch, new_rows=True, attempt=str(n)) for n, batch in enumerate((first, late))
    ]
    for manifest in manifests:
        store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert_same(store.read(0), first)
    assert not any((store.folder(0) / ".pending").iterdir())


def test_an_attempt_written_again_replaces_its_leftovers(store: RolloutStore) -> None:
    store.write(0, "generate", full_batch(9), new_rows=True, attempt="same")
    batch = full_batch(1).only(["token_ids"])
    manifest = store.write(0, "generate", batch, new_rows=True, attempt="same")
    store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert_same(store.read(0), batch)


def test_a_manifest_whose_files_are_gone_is_refused(store: RolloutStore) -> None:
    old = store.write(0, "generate", full_batch(0), new_rows=True, attempt="1")
    store.write(0, "generate", full_batch(1), new_rows=True, attempt="2")
    for path in (store.folder(0) / ".pending" / "generate" / "1").iterdir():
        path.rename(path.with_name(f"{path.name}.gone"))
    with pytest.raises(StorageError, match="stage 'generate' must be written again"):
        store.commit(0, old, kind="column", arguments={}, metrics={})
    assert store.iterations() == []


def test_columns_of_other_rows_are_refused(store: RolloutStore) -> None:
    batch = full_batch(0, num_rows=4)
    commit_batch(store, 0, batch)
    reordered = scores_for(batch.select([1, 0, 2, 3]), 1)
    assert reordered.num_tokens == batch.num_tokens
    manifest = store.write(0, "cost", reordered, new_rows=False, attempt="1")
    with pytest.raises(StorageError, match="stage 'cost' are for 4 rows"):
        store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert set(store.stages(0)) == {"generate"}


def test_columns_without_rows_are_refused(store: RolloutStore) -> None:
    manifest = store.write(0, "cost", scores_for(full_batch(0), 1), new_rows=False, attempt="1")
    with pytest.raises(StorageError, match="no stage has committed rows"):
        store.commit(0, manifest, kind="column", arguments={}, metrics={})


def test_a_column_belongs_to_one_stage(store: RolloutStore) -> None:
    batch = full_batch(0)
    commit_batch(store, 0, batch)
    manifest = store.write(0, "other", batch.only(["values"]), new_rows=False, attempt="1")
    with pytest.raises(StorageError, match="column 'values', which stage 'generate' has committed"):
        store.commit(0, manifest, kind="column", arguments={}, metrics={})
    assert_same(store.read(0), batch)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("z", np.zeros(2, dtype=np.complex64), "'z' has dtype complex64"),
        ("z", np.array(["a", None], dtype=object), "'z' row 1 holds None"),
        ("z", np.array(["a", "\ud800"], dtype=object), "'z' row 1 holds text that UTF-8 cannot"),
        (".pending", np.zeros(2), "'.pending' cannot be stored under that name"),
        ("zarr.json", np.zeros(2), "'zarr.json' cannot be stored under that name"),
        ("offsets", np.zeros(2), "'offsets' and 'offsets' would both be"),
    ],
)
def test_what_cannot_be_stored_is_named(store: RolloutStore, column: str, values: np.ndarray, message: str) -> None:
    batch = Rollouts(offsets=offsets_of([1, 1]), sample_columns={column: values})
    with pytest.raises(StorageError, match=message):
        store.write(0, "generate", batch, new_rows=True, attempt="1")


def test_two_columns_may_not_share_an_array(store: RolloutStore) -> None:
    columns = {"reward/x": np.zeros(1), "reward.x": np.ones(1)}
    batch = Rollouts(offsets=offsets_of([1]), sample_columns=columns)
    with pytest.raises(StorageError, match=r"'reward/x' and 'reward\.x' would both be"):
        store.write(0, "generate", batch, new_rows=True, attempt="1")


def test_records_and_manifests_travel_as_json(store: RolloutStore) -> None:
    batch = full_batch(0)
    manifest = store.write(0, "generate#1", batch, new_rows=True, attempt="rank/0")
    travelled = StageManifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert travelled == manifest
    store.commit(0, travelled, kind="column", arguments={"version": np.int64(3)}, metrics={"kl": np.nan})
    record = store.stages(0)["generate#1"]
    assert record.columns == batch.columns
    assert (record.kind, record.arguments, record.metrics) == ("column", {"version": 3}, {"kl": None})


def test_an_update_is_logged_beside_the_columns(store: RolloutStore) -> None:
    batch = full_batch(0)
    commit_batch(store, 0, batch)
    store.log_state_stage(0, "update_actor", arguments={"from_version": 3}, metrics={"loss": 0.5})
    record = store.stages(0)["update_actor"]
    assert (record.kind, record.columns, record.metrics) == ("state", (), {"loss": 0.5})
    store.log_state_stage(0, "update_actor", arguments={"from_version": 3}, metrics={"loss": 0.25})
    assert store.stages(0)["update_actor"].metrics == {"loss": 0.25}
    assert_same(store.read(0), batch)


def test_an_update_can_be_the_first_entry(store: RolloutStore) -> None:
    store.log_state_stage(5, "update_actor", arguments={}, metrics={})
    assert store.iterations() == [5]
    with pytest.raises(StorageError, match="no committed rollouts"):
        store.read(5)


def test_an_update_cannot_take_the_name_of_a_column_stage(store: RolloutStore) -> None:
    commit_batch(store, 0, full_batch(0))
    with pytest.raises(StorageError, match="'generate' is committed with columns"):
        store.log_state_stage(0, "generate", arguments={}, metrics={})


def test_iterations_are_those_with_a_commit(store: RolloutStore) -> None:
    assert store.iterations() == []
    for iteration in (2, 11, 0):
        commit_batch(store, iteration, full_batch(iteration))
    assert store.iterations() == [0, 2, 11]


def test_commits_from_several_threads_lose_nothing(store: RolloutStore) -> None:
    batch = full_batch(0)
    commit_batch(store, 0, batch)

    def add(number: int) -> None:
        column = {f"part_{number}": np.full(batch.num_rows, number, dtype=np.int32)}
        extra = Rollouts(offsets=batch.offsets, sample_columns=column)
        manifest = store.write(0, f"stage_{number}", extra, new_rows=False, attempt="1")
        store.commit(0, manifest, kind="column", arguments={}, metrics={})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(12)))
    found = store.read(0)
    assert all((found[f"part_{number}"] == number).all() for number in range(12))


def write_in_another_process(root: Path, number: int, queue: multiprocessing.Queue[dict[str, object]]) -> None:
    extra = scores_for(full_batch(0), number)
    renamed = Rollouts(offsets=extra.offsets, sample_columns={f"cost_{number}": extra["cost"]})
    manifest = RolloutStore(root).write(0, f"cost_{number}", renamed, new_rows=False, attempt="1")
    queue.put(manifest.to_json())


def test_processes_write_while_one_controller_commits(store: RolloutStore) -> None:
    batch = full_batch(0)
    commit_batch(store, 0, batch)
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[dict[str, object]] = context.Queue()
    writers = [context.Process(target=write_in_another_process, args=(store.root, number, queue)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    for _ in writers:
        manifest = StageManifest.from_json(queue.get(timeout=60))
        store.commit(0, manifest, kind="column", arguments={}, metrics={})
    for writer in writers:
        writer.join(timeout=60)
    found = store.read(0)
    for number in (1, 2):
        np.testing.assert_array_equal(found[f"cost_{number}"], scores_for(batch, number)["cost"])


def test_an_iteration_keeps_several_row_sets_apart(store: RolloutStore) -> None:
    batch, greedy = full_batch(0, num_rows=6), full_batch(1, num_rows=3)
    commit_batch(store, 0, batch)
    store.commit(0, store.write(0, "generate#1", greedy, new_rows=True, attempt="1", row_set="greedy"))
    costs = scores_for(greedy, 2)
    store.commit(0, store.write(0, "cost", costs, new_rows=False, attempt="1", row_set="greedy"))
    assert_same(store.read(0), batch)
    assert_same(
        store.read(0, row_set="greedy"), greedy.with_columns(token=costs.token_columns, sample=costs.sample_columns)
    )
    assert store.stages(0)["generate#1"].row_set == "greedy" and store.stages(0)["generate"].row_set == ""
    group = zarr.open_group(store.folder(0), mode="r")
    assert group["greedy.reward"].shape == (3,) and group["reward"].shape == (6,)
    assert group["greedy.reward"].metadata.dimension_names == ("greedy.samples",)


def test_columns_of_one_row_set_do_not_fit_another(store: RolloutStore) -> None:
    batch, greedy = full_batch(0, num_rows=6), full_batch(1, num_rows=3)
    commit_batch(store, 0, batch)
    with pytest.raises(StorageError, match="no stage has committed rows"):
        store.commit(0, store.write(0, "cost", scores_for(greedy, 2), new_rows=False, attempt="1", row_set="greedy"))
    with pytest.raises(StorageError, match="no committed greedy"):
        store.read(0, row_set="greedy")
