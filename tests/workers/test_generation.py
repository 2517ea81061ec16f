"""In which order memory, weights and engines change hands before a generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.schema import RunConfig
from workers.generation import prepare_engines
from workers.rank_context import RankContext

SGLANG = RunConfig.model_validate({"rollout": {"engine": "sglang"}})


@dataclass(kw_only=True)
class Rank:
    """Writes down what it is asked to do."""

    started: bool = True
    share_devices: bool = True
    offloads: bool = False
    done: list[str] = field(default_factory=list)

    def context(self) -> RankContext:
        def note(name: str) -> Any:
            return lambda: self.done.append(name)

        def sync(*, waking: bool) -> dict[str, float]:
            self.done.append("weights, KV cache" if waking else "weights")
            return {"reshard_seconds": 0.5}

        engines = SimpleNamespace(started=self.started, share_devices=self.share_devices, sync=sync, wake=note("awake"))
        residency = SimpleNamespace(anything_leaves=self.offloads, release_all=note("models leave"))
        giver = SimpleNamespace(finish=note("memory"))
        return cast(RankContext, SimpleNamespace(config=SGLANG, engines=engines, residency=residency, giver=giver))


ROOM = ["models leave", "memory"]


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (Rank(), [*ROOM, "weights, KV cache", *ROOM, "awake"]),
        (Rank(offloads=True), ["weights", *ROOM, "awake"]),
        (Rank(started=False), [*ROOM, "weights, KV cache", *ROOM, "awake"]),
        (Rank(started=False, offloads=True), [*ROOM, "weights, KV cache", *ROOM, "awake"]),
        (Rank(share_devices=False), ["weights, KV cache", "awake"]),
    ],
    ids=["stay", "offload", "first", "first-offload", "apart"],
)
def test_the_kv_cache_comes_back_while_weights_are_written_unless_these_make_room_for_it(
    rank: Rank, order: list[str]
) -> None:
    """Weights that leave the device are read before they do: through the host they would take ten times as long."""
    metrics = prepare_engines(rank.context())
    assert rank.done == order
    assert ("transition_seconds" in metrics) == rank.started and metrics["reshard_seconds"] == 0.5
