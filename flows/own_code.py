"""The user's own algorithm, estimator, loss and plugins: imported and traced once before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.errors import refuse
from configs.model_checks import head_problems
from configs.schema import RunConfig

TIMEOUT_S = 90.0
"""For starting Python, importing what the user's modules import (torch takes seconds), and the trace."""


def check_own_code(config: RunConfig) -> None:
    """Raises ConfigError, one line with file and line number, for code that cannot run.

    Costs nothing where the configuration names only what is built in.
    """
    refuse(own_code_problems(config))


def own_code_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the user's code, and with models that it reads and does not train."""
    named = (config.algorithm, config.advantage.estimator or "", config.loss.policy or "")
    if not config.plugins and not any(":" in name for name in named):
        return
    answer = _ask(config)
    if "problem" in answer:
        yield str(answer["problem"])
    else:
        yield from head_problems(config, answer["trained"])


def _ask(config: RunConfig) -> dict[str, list[str] | str]:
    # by path, so that pipeline is not imported here: it needs numpy
    script = Path(__file__).resolve().parent.parent / "pipeline" / "trace_process.py"
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(script)],
            input=config.model_dump_json().encode(),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"algorithm {config.algorithm!r}: importing its code takes more than {TIMEOUT_S:g} s"}
    if not done.stdout:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing printed"]
        return {"problem": f"algorithm {config.algorithm!r}: importing its code ended Python ({last[0]})"}
    answer: dict[str, list[str] | str] = json.loads(done.stdout)
    return answer
