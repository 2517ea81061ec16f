"""executions.jsonl: each start of a run, with the configuration and the ranks that it went on with.

A stage's record in the store names the execution that computed it, so that one knows under which settings and on
how many ranks, whatever a resume has changed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.loader import from_tree, resolved
from configs.schema import RunConfig
from configs.sealed import seal
from storage.atomic import writing
from storage.errors import StorageError
from storage.lines import append_text, drop_torn_line
from storage.locations import Location
from storage.metrics import read_documents

FILE = "executions.jsonl"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """number: from 1, given once. first_iteration: where it went on. pools: ranks of each. started_at: seconds since
    1970.

    cause: of one that began inside a run, where workers were lost. changed: dotted keys whose values differ from those
    of the execution before: (before, now).
    """

    number: int
    first_iteration: int
    started_at: float
    pools: Mapping[str, int]
    placement: Mapping[str, str]
    changed: Mapping[str, tuple[Any, Any]]
    config: Mapping[str, Any]
    cause: str | None = None

    @property
    def num_ranks(self) -> int:
        return sum(self.pools.values())

    def to_json(self) -> dict[str, Any]:
        """What is stored, less the whole configuration."""
        return {
            "execution": self.number,
            "first_iteration": self.first_iteration,
            "started_at": self.started_at,
            "num_ranks": self.num_ranks,
            "pools": dict(self.pools),
            "placement": dict(self.placement),
            "changed": {key: list(values) for key, values in self.changed.items()},
            "cause": self.cause,
        }


def read_executions(run_dir: Location) -> list[Execution]:
    """Every execution, in order; none for a run of a program that kept none. Raises StorageError for a damaged line."""
    path = run_dir / FILE
    return [_execution(path, number, line) for number, line in enumerate(read_documents(path), start=1)]


def append_execution(run_dir: Location, execution: Execution) -> None:
    """Add a start. Raises StorageError when the disk refuses."""
    path = run_dir / FILE
    with writing(path):
        drop_torn_line(path)
        append_text(path, seal({**execution.to_json(), "config": execution.config}) + "\n")


def config_of(run_dir: Location, number: int) -> RunConfig | None:
    """The configuration of an execution; None where none is kept. Raises StorageError when it does not fit."""
    found = next((e for e in read_executions(run_dir) if e.number == number), None)
    if found is None:
        return None
    place = f"{run_dir / FILE} execution {number}"
    try:
        return from_tree(dict(found.config), place)
    except ConfigError as error:
        raise StorageError(f"the configuration of execution {number} cannot be used: {error}") from error


def execution_of(executions: Sequence[Execution], iteration: int, *, by: int) -> Execution | None:
    """Whose update of this iteration the weights hold that execution `by` had after it; None: no line is left.

    An execution runs, again or first, all updates from its `first_iteration` on; those before are in the checkpoint
    from which it went on, and came from the newest earlier execution that began at the iteration or before it.
    """
    found = [e for e in executions if e.number <= by and e.first_iteration <= iteration]
    return max(found, key=lambda e: e.number, default=None)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys of two resolved configurations whose values differ."""
    ours, theirs = dict(_flat(before)), dict(_flat(now))
    return {
        key: (ours.get(key), theirs.get(key)) for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        inside = isinstance(value, Mapping) and value
        pairs += _flat(value, f"{prefix}{key}.") if inside else [(f"{prefix}{key}", value)]
    return pairs


def next_execution(
    run_dir: Location,
    config: RunConfig,
    *,
    first_iteration: int,
    pools: Mapping[str, int],
    started_at: float,
    cause: str | None = None,
    after: int = 0,
) -> Execution:
    """The execution that begins now, beside those that are kept.

    after: a number that is taken, whatever lines are left: records of stages and checkpoints may name it.
    """
    earlier, tree = read_executions(run_dir), resolved(config)
    return Execution(
        number=max(after, *(execution.number for execution in earlier), 0) + 1,
        first_iteration=first_iteration,
        started_at=started_at,
        pools=pools,
        placement={str(role): pool for role, pool in config.resources.placement.items()},
        changed=changes(earlier[-1].config, tree) if earlier else {},
        config=tree,
        cause=cause,
    )


def _execution(path: Location, number: int, line: Mapping[str, Any]) -> Execution:
    try:
        return Execution(
            number=int(line["execution"]),
            first_iteration=int(line["first_iteration"]),
            started_at=float(line["started_at"]),
            pools={str(name): int(ranks) for name, ranks in line["pools"].items()},
            placement=dict(line["placement"]),
            changed={str(key): (before, now) for key, (before, now) in line["changed"].items()},
            config=dict(line["config"]),
            cause=line.get("cause"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{path} line {number} is damaged ({error!r}); remove the line") from error
