"""The `zarr.json` of one iteration: which stages are committed, and the metadata of their arrays.

Replacing this one file is what commits a stage: by a rename, in an object store by a put that demands the version
that was read. Arrays that it does not name are not there for a reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c

from storage.atomic import atomic_write
from storage.errors import StorageError
from storage.jsonable import jsonable
from storage.locations import Location
from storage.object_path import AlreadyThere, ObjectPath
from storage.reading import parse_json, read_file
from storage.records import ArrayRecord, StageRecord

FORMAT_VERSION = 1
EMPTY_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
"""What `zarr.open_group` makes where a stage is being written: nothing of ours is in it."""
CODECS = {"bytes", "vlen-utf8", "blosc", "crc32c"}


@dataclass(frozen=True, kw_only=True)
class IterationGroup:
    """run, iteration, committed stages in commit order, and Zarr metadata by array name."""

    run: str
    iteration: int
    stages: Mapping[str, StageRecord] = field(default_factory=dict)
    array_metadata: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    """In an object store, the tag of the `zarr.json` that this was read from; empty: there was none."""

    def arrays(self, row_set: str = "") -> dict[str, ArrayRecord]:
        """Every committed array of a row set, by column name (`offsets` included)."""
        return {
            array.name: array for record in self.stages.values() if record.row_set == row_set for array in record.arrays
        }

    def with_stage(self, record: StageRecord, array_metadata: Mapping[str, Any]) -> IterationGroup:
        return replace(
            self,
            stages={**self.stages, record.stage: record},
            array_metadata={**self.array_metadata, **array_metadata},
        )


def load_group(folder: Location) -> IterationGroup | None:
    """The committed state of an iteration's folder; None when nothing is committed.

    Raises StorageError when the file is damaged or of another format version.
    """
    group = group_to_change(folder, run="", iteration=0)
    return group if group.stages else None


def group_to_change(folder: Location, *, run: str, iteration: int) -> IterationGroup:
    """As `load_group`; without stages, under these names, where nothing is committed."""
    path = folder / "zarr.json"
    empty = IterationGroup(run=run, iteration=iteration)
    try:
        content, version = path.read_version() if isinstance(path, ObjectPath) else (read_file(path), "")
        document = parse_json(content)
    except FileNotFoundError:
        return empty
    except ValueError as error:
        raise StorageError(f"{path} is not JSON ({error}); the file is damaged") from error
    if document == EMPTY_GROUP:
        return replace(empty, version=version)
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or "format_version" not in attributes:
        raise StorageError(f"{path} names no stages as every commit does; the file is damaged")
    group = replace(_from_attributes(path, attributes, document), version=version)
    if folder.name.isdigit() and int(folder.name) != group.iteration:
        raise StorageError(f"{path} is of iteration {group.iteration}; give its folder that iteration's name again")
    return group


def _from_attributes(path: Location, attributes: dict[str, Any], document: dict[str, Any]) -> IterationGroup:
    version = attributes["format_version"]
    if version != FORMAT_VERSION:
        raise StorageError(f"{path} has format version {version}, this program reads {FORMAT_VERSION}; use its program")
    if attributes.get("crc32c") != _attributes_checksum(attributes):
        raise StorageError(f"{path} does not match its own checksum; the file is damaged")
    try:
        metadata = dict(document["consolidated_metadata"]["metadata"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path} has lost its consolidated metadata; the file is damaged") from error
    _refuse_foreign_codecs(path, metadata)
    return IterationGroup(
        run=attributes["run"],
        iteration=attributes["iteration"],
        stages={name: StageRecord.from_json(record) for name, record in attributes["stages"].items()},
        array_metadata=metadata,
    )


def _refuse_foreign_codecs(path: Location, metadata: Mapping[str, Any]) -> None:
    """Zarr's codecs are plugins, and one of them unpickles: only those that columns are written with are used."""
    for name, array in metadata.items():
        try:
            known = array["zarr_format"] == 3 and CODECS.issuperset(codec["name"] for codec in array["codecs"])
        except (KeyError, TypeError):
            known = False
        if not known:
            raise StorageError(f"{path}: the array {name!r} is stored as no column is; the file is damaged")


def save_group(folder: Location, group: IterationGroup) -> None:
    """Replace the iteration's `zarr.json`: the moment of a commit.

    Raises StorageError when another process has replaced the version that the group was read from.
    """
    attributes: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "run": group.run,
        "iteration": group.iteration,
        "stages": jsonable({name: record.to_json() for name, record in group.stages.items()}),
    }
    document = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {**attributes, "crc32c": _attributes_checksum(attributes)},
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": dict(group.array_metadata),
        },
    }
    path = folder / "zarr.json"
    if not isinstance(path, ObjectPath):
        atomic_write(path, json.dumps(document))
        return
    try:
        path.write(json.dumps(document).encode(), replaces=group.version)
    except AlreadyThere as error:
        raise StorageError(f"{path} was replaced by another process: two run this run; stop one and resume") from error


def _attributes_checksum(attributes: Mapping[str, Any]) -> int:
    """crc32c of our attributes in canonical JSON; attributes that a user added are left out."""
    ours = {name: attributes.get(name) for name in ("format_version", "run", "iteration", "stages")}
    return int(google_crc32c.value(json.dumps(ours, sort_keys=True).encode()))
