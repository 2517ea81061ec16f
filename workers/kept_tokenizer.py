"""A run keeps its tokenizer's vocabulary, so that its tokens can be read where the model is not."""

from __future__ import annotations

from typing import Any

from storage.atomic import atomic_write, writing
from storage.locations import Location
from storage.token_text import FILE


def keep_vocabulary(tokenizer: Any, run_dir: Location) -> None:
    """Write `tokenizer.json` into the run directory, once; nothing for a tokenizer without that form.

    Raises StorageError when the disk refuses.
    """
    path = run_dir / FILE
    if path.exists() or not tokenizer.is_fast:
        return
    with writing(path):
        atomic_write(path, tokenizer.backend_tokenizer.to_str())
