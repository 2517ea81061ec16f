"""What the documented commands leave in a clone is no change of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ("docs/examples/letters/tokenizer.json", "docs/examples/letters.jsonl", "docs/examples/runs/letters")


def test_outputs_of_documented_commands_are_ignored() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    benchmarks = {name for text in texts for name in re.findall(r"--output (\w+\.json)\b", text)}
    assert {"rollout_store.json", "laptop.json", "one.json"} <= benchmarks
    written = sorted({*benchmarks, *EXAMPLES, "reshard.json"})
    ignored = subprocess.run(["git", "check-ignore", *written], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout.split() == written
