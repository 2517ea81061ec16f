"""Reads torch DCP checkpoints without running what a file says: DCP's index is a pickle, its shards are not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from storage.errors import StorageError

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

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        with path.open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError, TypeError) as error:
                raise StorageError(f"{path} is no index of a checkpoint ({error}); take another step") from error
        if not isinstance(metadata, Metadata):
            raise StorageError(f"{path} is no index of a checkpoint; take another step")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name), torch.dtype))
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index does")
        return super().find_class(module, name)
