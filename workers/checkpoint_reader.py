"""Reads torch DCP checkpoints without running what a file says: DCP's index is a pickle, its shards are not."""

from __future__ import annotations

import pickle
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from storage.errors import StorageError
from storage.locations import Location
from storage.object_path import ObjectPath

INDEX = ".metadata"
CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
}  # fmt: skip
"""All that an index of tensors is made of, beside the dtypes of torch. Without `BytesStorageMetadata`: DCP unpickles
what is stored as bytes."""


class SafeReader(FileSystemReader):
    """DCP's reader of a folder. Raises StorageError for an index that names anything but data."""

    def __init__(self, place: Location) -> None:
        super().__init__(str(place))
        self._place = place

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._place / INDEX
        try:
            metadata = _Unpickler(BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError, TypeError) as error:
            raise StorageError(f"{path} is no index of a checkpoint ({error}); take another step") from error
        if not isinstance(metadata, Metadata):
            raise StorageError(f"{path} is no index of a checkpoint; take another step")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """From an object store only the files are fetched that this rank's part of the state is in."""
        if not isinstance(self._place, ObjectPath):
            return super().read_data(plan, planner)
        with tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
            for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
                (self._place / name).download(Path(folder) / name)
            self.path = Path(folder)
            return super().read_data(plan, planner)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name), torch.dtype))
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index does")
        return super().find_class(module, name)
