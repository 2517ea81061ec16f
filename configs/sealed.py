"""JSON objects that say themselves whether they are damaged: their last key is a checksum of the others.

    {"iteration": 3, "reward_mean": 0.5, "crc32": "0a1b2c3d"}

crc32: CRC-32 (as zlib's), in 8 hexadecimal digits, of the object without it as `json.dumps` writes it in ASCII
without spaces. How the object is laid out does not count. Objects without one, of earlier versions, are taken as they
are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

KEY = "crc32"
MAX_DIGITS = 300
"""Of a whole number: more than that is no float."""


def seal(document: Mapping[str, Any], *, indent: int | None = None) -> str:
    """The document as JSON, with its checksum. Raises ValueError for what JSON cannot hold, as NaN."""
    plain = json.loads(json.dumps(document, allow_nan=False))
    return json.dumps({**plain, KEY: _checksum(plain)}, indent=indent, ensure_ascii=indent is None)


def unseal(data: bytes | str) -> dict[str, Any]:
    """The document, without its checksum. Raises ValueError that says in a few words what is wrong with it."""
    try:
        document = json.loads(data, parse_constant=_no_constant, parse_int=_int)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")
    if not document:
        return document
    name, found = next(reversed(document.items()))
    rest = {key: value for key, value in document.items() if key not in (name, KEY)}
    if name == KEY and found == _checksum(rest):
        return rest
    # The checksum's own name may be what is damaged: no other last value is the checksum of the rest.
    if KEY in document or (isinstance(found, str) and found == _checksum(rest)):
        raise ValueError(f"is damaged: it does not fit its checksum ({KEY})")
    return document


def _no_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which JSON has not")


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"holds a number of {len(digits)} digits")
    return int(digits)


def _checksum(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
