"""What benchmarks/rollout_store.py measures, in tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from zarr.codecs import ZstdCodec

from benchmarks.rollout_store import CODECS, main, make_batch, stored_with
from storage.errors import StorageError
from storage.rollout_store import RolloutStore


def test_every_variant_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rollout_store.json"
    main(["--samples", "8", "--tokens", "16", "--rounds", "1", "--folder", str(tmp_path), "--output", str(output)])
    rows = {row["variant"]: row for row in json.loads(output.read_text())["rows"]}
    ours = {"store write", "store commit", "store write+commit", "store read", "plain zarr read"}
    others = {f"store {step}, {codec}" for step in ("write+commit", "read") for codec in CODECS}
    assert set(rows) == ours | others | {"savez", "savez + fsync", "savez read"}
    assert all(row["median_ms"] > 0 for row in rows.values())
    assert "store read, zstd-3" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [output]


def test_the_store_knows_a_foreign_codec_only_while_it_is_measured(tmp_path: Path) -> None:
    store, batch = RolloutStore(tmp_path), make_batch(2, 4)
    with stored_with((ZstdCodec(level=1),)):
        manifest = store.write(0, "generate", batch, new_rows=True, attempt="1")
        store.commit(0, manifest, kind="column", arguments={}, metrics={})
        assert store.read(0).num_rows == 2
    with pytest.raises(StorageError, match="stored as no column is"):
        RolloutStore(tmp_path).read(0)
