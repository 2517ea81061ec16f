"""Plain values for JSON files that every reader can parse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def jsonable(value: Any) -> Any:
    """The value as JSON can hold it: numpy's scalars and arrays as Python's, keys as strings.

    Numbers that are not finite become None: JSON has no NaN. What JSON cannot hold is left as it is,
    for `json.dumps` to refuse.
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        return value.tolist()
    if isinstance(value, np.generic | np.ndarray):
        return jsonable(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
