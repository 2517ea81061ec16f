"""Our side of the laptop benchmark: one rank, in this process, made of the parts of a real run.

Inside an iteration: the copy of the actor's weights into the engine, generation, decoding and packing,
rewards (in their child process), advantages, the update. Outside: what joins ranks to a controller (Dask,
Prefect, the rollout store); `benchmarks.controller` and `benchmarks.rollout_store` measure those.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.stopwatch import Stopwatch
from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.rollouts import Rollouts
from pipeline.stages import ColumnsRef, StageKey
from workers.data_plane import DataPlane
from workers.data_source import Prompt
from workers.generation import generate_rollouts, prepare_engines
from workers.rank_actor import RankSpec, StageRequest
from workers.rank_context import RankContext, build_context
from workers.scoring import score_rewards
from workers.stage_methods import my_mini_batches


class InProcessPlane(DataPlane):
    """The columns stay in this process: nothing is fetched and nothing is written."""

    def __init__(self) -> None:
        pass

    @property
    def address(self) -> str:
        return "tcp://127.0.0.1:0"


class OurSide:
    """`context` is a rank's, built as a rank actor builds it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._folder = tempfile.TemporaryDirectory(prefix="laptop-")
        self.context = _context(config, self._folder.name)
        self.stopwatch = Stopwatch()
        actor = self.context.model("actor")
        assert actor.optimizer is not None
        self.stopwatch.watch(actor.optimizer, "step", "optimizer step")

    @property
    def prompts(self) -> list[Prompt]:
        """Those of all iterations, in order."""
        return self.context.prompts.prompts(range(len(self.context.prompts)))

    def iteration(self, number: int) -> dict[str, float]:
        """Seconds by stage; `total` holds all of it, `cpu` is the processor's in both threads."""
        size = self.config.data.batch_size
        prompts = self.prompts[number * size : (number + 1) * size]
        started, cpu_started = time.perf_counter(), time.process_time()
        with self.stopwatch.timed("weights to engine"):
            prepare_engines(self.context)
        with self.stopwatch.timed("generation"):
            rollouts, _ = generate_rollouts(self.context, prompts, np.arange(size), _request(number, "generate"))
        self.context.engines.sleep()
        with self.stopwatch.timed("reward"):
            scores = score_rewards(self.context, rollouts).columns
        rollouts = self._with_advantages(rollouts.with_columns(sample=scores))
        with self.stopwatch.timed("update"):
            self._update(rollouts, number)
        seconds = self.stopwatch.lap()
        seconds |= {"total": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}
        seconds["forward and backward"] = seconds.pop("update") - seconds["optimizer step"]
        return seconds

    def close(self) -> None:
        self.context.close()
        self._folder.cleanup()

    def _with_advantages(self, rollouts: Rollouts) -> Rollouts:
        result = compute_advantages(rollouts, self.config, kl_coef=0.0, estimator="group")
        return rollouts.with_columns(token=result.token_columns)

    def _update(self, rollouts: Rollouts, number: int) -> Mapping[str, float]:
        columns = ("token_ids", "response_mask", "rollout_log_probs", "advantages", "group", "prompt_length")
        batches: Sequence[Rollouts] = my_mini_batches(
            self.context, rollouts.only(columns), _request(number, "update"), seed=number
        )
        return self.context.model("actor").update(batches, "clipped", seed=number)


def _context(config: RunConfig, run_dir: str) -> RankContext:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    spec = RankSpec(
        config=config,
        run_dir=run_dir,
        pool="main",
        pool_rank=0,
        pool_size=1,
        global_rank=0,
        roles=("actor",),
        trained=("actor",),
        incarnation=0,
        rendezvous=(str(store.host), int(store.port)),
    )
    return build_context(spec, InProcessPlane(), store=store)


def _request(number: int, site: str, **arguments: Any) -> StageRequest:
    return StageRequest(
        key=StageKey(run="laptop", iteration=number, site=f"actor.{site}"),
        role="actor",
        method=site,
        rollouts=ColumnsRef(iteration=number, num_rows=0),
        reads=(),
        shard=0,
        num_shards=1,
        collect=True,
        incarnation=0,
        arguments=arguments,
    )


def num_computed_tokens(side: OurSide, number: int) -> tuple[int, int]:
    """Tokens that a training pass computes for an iteration: ours (prompts once), and padded in full."""
    config = side.config
    size, num_new = config.data.batch_size, config.rollout.max_new_tokens
    rows = size * config.rollout.num_samples
    lengths = [len(prompt.tokens) for prompt in side.prompts[number * size : (number + 1) * size]]
    return sum(lengths) + rows * num_new, rows * (max(lengths) + num_new)
