"""In which order memory, weights and engines change hands before a generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.schema import RunConfig
from workers.generation import prepare_engines
from workers.rank_context import RankContext

MIB = 1 << 20


@dataclass(kw_only=True)
class Rank:
    """Writes down what it is asked to do."""

    started: bool = True
    colocated: bool = True
    offloads: bool = False
    verifies: bool = False
    cache_bytes: int = 0
    done: list[str] = field(default_factory=list)

    def context(self) -> RankContext:
        def note(name: str) -> Any:
            return lambda: self.done.append(name)

        def sync(*, waking: bool) -> dict[str, float]:
            self.done.append("weights, KV cache" if waking else "weights")
            return {"reshard_seconds": 0.5}

        rollout = {"engine": "sglang", "verify_weights": self.verifies, "weights_bucket_mib": 2}
        engines = SimpleNamespace(
            started=self.started,
            colocated=self.colocated,
            cache_bytes=self.cache_bytes,
            sync=sync,
            wake=note("awake"),
        )
        releaser = SimpleNamespace(
            finish=note("all memory"),
            begin=note("memory, later"),
            until_free=lambda nbytes: self.done.append(f"{nbytes // MIB} MiB"),
        )
        residency = SimpleNamespace(anything_leaves=self.offloads, release_all=note("models leave"))
        config = RunConfig.model_validate({"rollout": rollout})
        context = SimpleNamespace(config=config, engines=engines, residency=residency, cache_releaser=releaser)
        return cast(RankContext, context)


ALL, CACHE = ["models leave", "all memory"], ["models leave", "7 MiB"]
AT_ONCE = ["weights, KV cache", "memory, later", "awake"]


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (Rank(cache_bytes=5 * MIB), [*CACHE, *AT_ONCE]),
        (Rank(), [*ALL, *AT_ONCE]),
        (Rank(offloads=True, cache_bytes=5 * MIB), ["weights", *CACHE, "awake"]),
        (Rank(verifies=True, cache_bytes=5 * MIB), ["weights", *CACHE, "awake"]),
        (Rank(started=False), [*ALL, *AT_ONCE]),
        (Rank(started=False, offloads=True), [*ALL, "weights", *ALL, "awake"]),
        (Rank(colocated=False), ["weights, KV cache", "awake"]),
    ],
    ids=["stay", "size-unknown", "offload", "verify", "first", "first-offload", "apart"],
)
def test_the_kv_cache_comes_back_while_weights_are_written_unless_these_make_room_for_it(
    rank: Rank, order: list[str]
) -> None:
    """Weights that leave the device are read before they do: through the host they would take ten times as long."""
    metrics = prepare_engines(rank.context())
    assert rank.done == order
    assert ("transition_seconds" in metrics) == rank.started and metrics["reshard_seconds"] == 0.5
