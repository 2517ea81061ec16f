"""What a run keeps of its starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.loader import apply_overrides
from configs.schema import RunConfig
from storage.errors import StorageError
from storage.executions import FILE, append_execution, config_of, next_execution, read_executions

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
