"""Pickles that show that they were unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def bomb(target: Path) -> bytes:
    """A pickle that makes this file."""
    pickled = pickle.dumps(Bomb(target))
    pickle.loads(pickled)
    assert target.exists(), "it would work"
    target.unlink()
    return pickled
