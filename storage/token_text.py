"""Token ids as the pieces of text that they stand for, without torch or transformers.

A run keeps its tokenizer as `tokenizer.json`; one that has none shows ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from storage.locations import Location

FILE = "tokenizer.json"
PLACEHOLDER = "\ufffd"
MAX_PENDING = 8


class TokenTexts:
    """The pieces of a run's tokens. folders: looked through in order for a `tokenizer.json`."""

    def __init__(self, folders: Sequence[Location]) -> None:
        self._files = [folder / FILE for folder in folders]

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = next((path for path in self._files if path.is_file()), None)
        if path is None:
            return None
        try:
            return Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:
            from storage.errors import StorageError

            raise StorageError(f"{path} cannot be read ({error}); delete it to see token ids") from error

    @property
    def are_known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; together they are the decoded text.

        A character of several tokens stands at the last of them, the others are empty.
        """
        if self._tokenizer is None:
            return [f"⟨{token}⟩" for token in token_ids]
        pieces: list[str] = []
        pending: list[int] = []
        before: list[int] = []
        for token in token_ids:
            pending.append(token)
            text = self._decoded([*before, *pending])[len(self._decoded(before)) :]
            if text.endswith(PLACEHOLDER) and len(pending) < MAX_PENDING:
                pieces.append("")
                continue
            pieces.append(text)
            pending, before = [], [token]
        if pending and pieces:
            pieces[-1] = self._decoded([*before, *pending])[len(self._decoded(before)) :]
        return pieces

    def _decoded(self, token_ids: list[int]) -> str:
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        known = [token for token in token_ids if 0 <= token < size]
        return str(self._tokenizer.decode(known, skip_special_tokens=False))
