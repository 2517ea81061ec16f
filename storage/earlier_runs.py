"""What earlier runs of the same name left for the next one: weights to start from, prompts that were sampled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from storage.atomic import atomic_write, writing
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.errors import StorageError
from storage.locations import Location
from storage.reading import parse_json, read_file
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory

SEEN = "seen_prompts.json"
PROMPT_TEXT = "prompt_text"


def earlier_runs(name: str, parent: Location | str) -> list[RunDirectory]:
    """Runs with this configured name under `parent`, oldest first."""
    return [run for run in RunDirectory.runs(parent) if run.name == name]


def newest_checkpoint(runs: Iterable[RunDirectory]) -> tuple[RunDirectory, Checkpoint] | None:
    """The newest checkpoint that verifies of the last of these runs that has one."""
    for run in reversed(list(runs)):
        checkpoint = CheckpointStore(run.checkpoints).latest()
        if checkpoint is not None:
            return run, checkpoint
    return None


def prompt_digest(text: str) -> str:
    """What a prompt is recognised by: 64 bits of its text as the model reads it, in hexadecimal."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def sampled_prompts(run: RunDirectory) -> frozenset[str]:
    """Digests of the prompts that the run, and those before it, have sampled."""
    store = RolloutStore(run.rollouts)
    found = set(read_seen(run.path))
    for iteration in store.iterations():
        if any(PROMPT_TEXT in stage.columns for stage in store.stages(iteration).values()):
            texts = store.read(iteration, [PROMPT_TEXT], verify=False)[PROMPT_TEXT]
            found.update(prompt_digest(text) for text in set(texts.tolist()))
    return frozenset(found)


def write_seen(run: Location, digests: Iterable[str]) -> None:
    """Keep what was sampled before this run, so that a resume takes the same order."""
    with writing(run):
        atomic_write(run / SEEN, json.dumps(sorted(digests)))


def read_seen(run: Location) -> frozenset[str]:
    """What `write_seen` kept; nothing where it was not called. Raises StorageError for a damaged file."""
    path = run / SEEN
    if not path.exists():
        return frozenset()
    try:
        digests = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is damaged ({error}); restore it") from error
    if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        raise StorageError(f"{path} is damaged: it holds no list of texts; restore it")
    return frozenset(digests)
