"""The entry point of SGLang's scheduler processes, with this project's changes made first."""

from __future__ import annotations

from typing import Any

from workers.importing import without_collection


def run(*arguments: Any, **options: Any) -> Any:
    """SGLang's own entry point, after `plugin.register`.

    The plugin is also an entry point of this distribution (`sglang.srt.plugins`); this makes it work
    where the project is on the path without being installed, or `SGLANG_PLUGINS` leaves it out.
    """
    with without_collection():
        from sglang.srt.managers.scheduler import run_scheduler_process

        from workers.engines.sglang import plugin

    plugin.apply()
    return run_scheduler_process(*arguments, **options)
