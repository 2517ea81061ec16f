"""The user's own modules, imported where their names are looked up: the controller, and every rank before its set-up.

A plugin registers by being imported: algorithms, estimators, losses, calls, transfer protocols, stage methods.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from configs.schema import RunConfig
from pipeline.registry import import_module


def load_plugins(config: RunConfig) -> tuple[ModuleType, ...]:
    """Import `config.plugins`, and the module of an algorithm named by import path; each once a process.

    Raises UnknownName for a file or module that does not exist. Errors inside it are raised as they are.
    """
    algorithm, colon, _ = config.algorithm.rpartition(":")
    named = (*config.plugins, algorithm) if colon else config.plugins
    importlib.invalidate_caches()
    return tuple(import_module(name, "plugin") for name in named)
