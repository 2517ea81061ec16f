"""Rank actors whose models sleep: everything else of a run is real (Dask, data plane, store)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.rollouts import TOKEN_COLUMNS, Array, Rollouts, offsets_of
from workers.data_plane import DataPlane
from workers.rank_actor import RankActor, RankSpec, StageRequest
from workers.stage_output import StageOutput

if TYPE_CHECKING:
    from workers.stage_registry import StageMethod


CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Batch that the sleeping models pretend to work on."""

    num_samples: int = 1024
    num_tokens: int = 1024
    sleep_s: float = 0.2


@dataclass(frozen=True, kw_only=True)
class SleepingContext:
    """What `RankActor` needs of a context."""

    plane: DataPlane
    first: bool
    sizes: Sizes
    device: torch.device = CPU

    def use_group(self, *, spans_pools: bool) -> None:
        """No process group is there."""

    def close(self) -> None:
        """Nothing is held."""


class SleepingRank(RankActor):
    """A rank actor whose stages sleep; the pool's first rank then has random columns to store.

    Sizes travel in the configuration: `data.options` of the train set.
    """

    def build(self, spec: RankSpec, plane: DataPlane) -> SleepingContext:  # type: ignore[override]
        options = spec.config.data.train.options if spec.config.data.train else {}
        return SleepingContext(plane=plane, first=spec.pool_rank == 0, sizes=Sizes(**options))

    def method(self, role: str, method: str) -> StageMethod:
        return run_stage  # type: ignore[return-value]


def run_stage(context: SleepingContext, request: StageRequest) -> StageOutput:
    """Sleep, then make the columns that the call's row of the table says it writes."""
    ends = time.perf_counter() + context.sizes.sleep_s
    output = make_output(context, request)
    time.sleep(max(0.0, ends - time.perf_counter()))
    return output


def make_output(context: SleepingContext, request: StageRequest) -> StageOutput:
    """Random columns, made while the model would be computing."""
    from pipeline.calls import CALLS

    call, sizes = CALLS[f"{request.role}.{request.method}"], context.sizes
    metrics = {"kl": 0.0} if call.method == "compute_advantages" else {}
    if call.kind == "state" or not context.first:
        return StageOutput(num_rows=sizes.num_samples, metrics=metrics)
    rng = np.random.default_rng(request.key.iteration)
    lengths = np.full(sizes.num_samples, sizes.num_tokens)
    token = {n: _column(rng, n, sizes) for n in call.writes if n in TOKEN_COLUMNS}
    sample = {n: _sample_column(rng, n, sizes) for n in call.writes if n not in TOKEN_COLUMNS}
    columns = Rollouts(offsets=offsets_of(lengths), token_columns=token, sample_columns=sample)
    return StageOutput(columns=columns, new_rows=call.new_rows, num_rows=sizes.num_samples, metrics=metrics)


def _column(rng: np.random.Generator, name: str, sizes: Sizes) -> Array:
    dtype, count = np.dtype(TOKEN_COLUMNS[name][0]), sizes.num_samples * sizes.num_tokens
    if dtype.kind == "f":
        return rng.standard_normal(count, dtype=np.float32)
    return rng.integers(0, 2 if dtype == np.uint8 else 50_000, count).astype(dtype)


def _sample_column(rng: np.random.Generator, name: str, sizes: Sizes) -> Array:
    if name in ("finish_reason", "prompt_text", "text", "answer"):
        return np.array([f"{name} {i} " * 50 for i in range(sizes.num_samples)], dtype=object)
    return rng.standard_normal(sizes.num_samples).astype(np.float32)
