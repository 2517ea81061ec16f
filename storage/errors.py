"""What storage raises."""

from __future__ import annotations

from configs.errors import UserError


class StorageError(UserError):
    """Something on disk is missing, damaged, of another format or cannot be written: one line, file named."""
