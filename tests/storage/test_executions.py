"""What a run keeps of its starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.loader import apply_overrides
from configs.schema import RunConfig
from storage.errors import StorageError
from storage.executions import FILE, append_execution, config_of, next_execution, read_executions
from storage.rollout_store import RolloutStore

CONFIG = RunConfig()


def start(run: Path, config: RunConfig, first: int) -> None:
    pools = {"main": config.resources.num_ranks}
    append_execution(run, next_execution(run, config, first_iteration=first, pools=pools, started_at=1.5))


def test_each_start_keeps_its_settings_and_says_what_changed(tmp_path: Path) -> None:
    later = apply_overrides(CONFIG, ["resources.num_ranks=3", "kl.coef=0.5"])
    start(tmp_path, CONFIG, 0)
    start(tmp_path, later, 4)
    first, second = read_executions(tmp_path)
    assert (first.number, first.changed, first.num_ranks) == (1, {}, 1)
    assert (second.number, second.first_iteration, second.num_ranks) == (2, 4, 3)
    assert second.changed == {"kl.coef": (CONFIG.kl.coef, 0.5), "resources.num_ranks": (1, 3)}
    assert (config_of(tmp_path, 1), config_of(tmp_path, 2), config_of(tmp_path, 3)) == (CONFIG, later, None)


def test_a_torn_line_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    start(tmp_path, CONFIG, 0)
    with open(tmp_path / FILE, "a") as file:
        file.write('{"execution": 2, "fir')
    assert len(read_executions(tmp_path)) == 1
    start(tmp_path, CONFIG, 1)
    assert [execution.number for execution in read_executions(tmp_path)] == [1, 2]
    with open(tmp_path / FILE, "a") as file:
        file.write('{"execution": 3}\n')
    with pytest.raises(StorageError, match=f"{FILE} line 3 is damaged"):
        read_executions(tmp_path)
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"first_iteration": 1', '"first_iteration": 3'))
    with pytest.raises(StorageError, match=f"{FILE} line 2 is damaged: it does not fit its checksum"):
        read_executions(tmp_path)


def test_a_number_is_given_once_whatever_lines_are_removed(tmp_path: Path) -> None:
    for first in (0, 2, 4):
        start(tmp_path, CONFIG, first)
    first, _, third = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text(first + third)
    start(tmp_path, apply_overrides(CONFIG, ["kl.coef=0.5"]), 6)
    assert [execution.number for execution in read_executions(tmp_path)] == [1, 3, 4]
    found = config_of(tmp_path, 4)
    assert found is not None and found.kl.coef == 0.5
    (tmp_path / FILE).unlink()
    store = RolloutStore(tmp_path / "rollouts")
    store.log_state_stage(7, "actor.update_actor", execution=4)
    assert (store.last_execution(0), store.last_execution(8)) == (4, 0)
    later = next_execution(tmp_path, CONFIG, first_iteration=7, pools={}, started_at=1.5, after=store.last_execution(7))
    assert later.number == 5
