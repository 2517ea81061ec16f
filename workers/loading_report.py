"""What transformers reports of loading a model, judged: it starts weights that the files lack at random, in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from configs.errors import UserError

logger = logging.getLogger(__name__)
SHOWN = 3


def refuse_other_kinds(report: Mapping[str, Any], path: str, *, may_lack: tuple[str, ...] = ()) -> None:
    """Raises UserError when weights are missing, have other shapes, or belong to another kind of model.

    report: the loading info of `from_pretrained`. may_lack: beginnings of names whose weights may be new.
    """
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(may_lack))
    heads = sorted(name for name in report["unexpected_keys"] if name.startswith(("score.", "classifier.", "lm_head.")))
    mismatched = sorted(str(entry[0]) for entry in report.get("mismatched_keys", ()))
    if mismatched:
        raise UserError(
            f"model path {path!r}: {_some(mismatched)} have other shapes than config.json says; fetch it anew"
        )
    if missing:
        kind = f" (it has {_some(heads)} instead)" if heads else ""
        raise UserError(
            f"model path {path!r} has no {_some(missing)}{kind}, which would start at random; "
            "name a model of the kind that its role needs"
        )
    if any(not name.startswith("lm_head.") for name in heads):
        raise UserError(f"model path {path!r} has {_some(heads)}: a classifier, no language model; name one")
    others = sorted(set(report["unexpected_keys"]) - set(heads))
    if others:
        logger.warning("model path %r: %d weights are not used: %s", path, len(others), _some(others))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
