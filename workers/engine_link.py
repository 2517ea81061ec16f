"""The rollout engines of a run as one thing: who owns one, how weights reach them, what happens when one dies.

    colocated   ranks 0 1 2 3 train, and have the engines
    disjoint    ranks 0 1 train | ranks 2 3 have the engines       one process group, the training ranks first

Every method is collective over the group. With a tensor-parallel size t an engine spans t of the engines' ranks, at
stride num_ranks / t (HybridFlow, section 5.3); the first of them owns it and asks it to generate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from configs.schema import RunConfig
from workers.engine_memory import mapped_memory
from workers.engines.base import EngineError, GenerateRequest, GenerateResult, RolloutEngine, SamplingParams
from workers.engines.dispatch import generate_all
from workers.engines.factory import build_engine
from workers.engines.sglang.engine import SglangEngine
from workers.engines.sglang.handles import Exported
from workers.memory import free_bytes
from workers.process_group import PoolGroup, gather_to_all
from workers.reshard.transition import Transition
from workers.role_model import RoleModel

logger = logging.getLogger(__name__)
RESTARTS = 2
"""Times that an engine which died in one call is started again."""


class EngineLink:
    """This rank's side. `engine` is None on ranks that another rank's engine spans, and on those that only train."""

    def __init__(
        self,
        config: RunConfig,
        actor: RoleModel | None,
        *,
        group: PoolGroup,
        device: torch.device,
        run_dir: Path,
        rank: int,
        num_sources: int | None = None,
    ) -> None:
        """actor: None on a rank that only generates. num_sources: ranks that train, the first of the group; None: all.

        rank: the global one, for names of files.
        """
        self._config, self._actor, self._group, self._device = config, actor, group, device
        self._num_sources = group.size if num_sources is None else num_sources
        self._first = 0 if self._num_sources == group.size else self._num_sources
        sglang = config.rollout.engine == "sglang"
        num_ranks = group.size - self._first
        self.num_engines = num_ranks // (config.rollout.tensor_parallel_size if sglang else 1)
        place = group.rank - self._first
        self.engine_index = place if 0 <= place < self.num_engines else None
        self.engine: RolloutEngine | None = None
        self.model_config: PretrainedConfig = self._from_first(None if actor is None else actor.model.hf.config)
        if self.engine_index is not None:
            self.engine = build_engine(
                config,
                device=device,
                model=self.model_config,
                run_dir=run_dir,
                rank=place,
                num_ranks=num_ranks,
                name=rank,
            )
        self._transition: Transition | None = None
        self._process: int | None = None
        """Of this rank's engine, whose memory the transition writes into."""
        self._wanted = -1
        self.cache_bytes = 0
        """KV cache of this rank's engine as the last `sleep` freed it; 0: not known."""

    @property
    def started(self) -> bool:
        """Whether this rank's engine holds weights already (ranks without one: whether they have written any)."""
        return self._transition is not None or (self.engine is not None and self.engine.version >= 0)

    @property
    def writes_directly(self) -> bool:
        """Whether the last transition wrote into all engines, without collectives."""
        return self._transition is not None and self._transition.is_direct

    @property
    def colocated(self) -> bool:
        """Whether the engines stand on the ranks that train, and take turns with them."""
        return self._first == 0

    def sync(self, *, waking: bool = False) -> dict[str, float]:
        """Bring every engine's weights to the actor's version; nothing moves where all have it.

        waking: every rank has made room for its engine's `cache_bytes`, which it takes again meanwhile.
        Returns the transition's time, bytes and extra memory, the largest of the ranks'. Raises EngineError when an
        engine does not start, ValueError when the weights do not fit or, under `rollout.verify_weights`, are not bit
        for bit the actor's.
        """
        if self._has_ended():
            logger.warning("sglang engine: its processes have ended since its last call; starting it again")
        return self._sync(waking=waking)

    def _sync(self, *, waking: bool = False) -> dict[str, float]:
        self._wanted = self._largest(-1 if self._actor is None else self._actor.version)
        if waking and isinstance(self.engine, SglangEngine):
            self.engine.start_waking()
        stale = self.engine is not None and self.engine.version != self._wanted
        if not self._any(stale):
            return {}
        metrics = self._write_sglang() if self._config.rollout.engine == "sglang" else self._write_whole()
        if self.engine is not None:
            self.engine.set_version(self._wanted)
        dist.barrier(group=self._group.control)
        return metrics

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GenerateResult]:
        """A complete result for each of this rank's requests; ranks without an engine have none.

        An engine that dies is started again, gets the current weights, and its requests are sent again; the
        other ranks take part in the transition. Raises the engine's own error after the last restart.
        """
        results: list[GenerateResult] | None = None
        for attempt in range(1 + RESTARTS):
            error: EngineError | None = None
            if results is None:
                try:
                    results = generate_all(self.engine, requests, sampling) if self.engine is not None else []
                except EngineError as failure:
                    error = failure
            if not self._any(error is not None):
                break
            if attempt == RESTARTS:
                raise error or EngineError("the rollout engine of another rank failed; its log says why")
            if error is not None:
                logger.warning("%s; starting it again with version %d", error, self._wanted)
            self._sync()
        assert results is not None
        return results

    def wake(self) -> None:
        """Take the KV cache's memory again, on all ranks that an engine spans."""
        dist.barrier(group=self._group.control)
        if self.engine is not None:
            self.engine.wake()

    def sleep(self) -> None:
        """Give memory back for training: an SGLang engine's KV cache; the whole Torch engine where roles offload.

        `cache_bytes` is then what this has freed on this rank's GPU, 0 where an engine spans several: the answer of its
        first scheduler says nothing of the others.
        """
        sglang = self._config.rollout.engine == "sglang"
        if not self.colocated or not (sglang or self._config.actor.fsdp.offload):
            return
        before = free_bytes(self._device)
        if self.engine is not None:
            self.engine.sleep()
        if self._config.rollout.tensor_parallel_size == 1:
            self.cache_bytes = max(0, free_bytes(self._device) - before)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

    def _any(self, here: bool) -> bool:
        return bool(self._largest(int(here)))

    def _largest(self, here: int) -> int:
        number = torch.tensor([here])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group.control)
        return int(number.item())

    def _of_all_ranks(self, metrics: dict[str, float]) -> dict[str, float]:
        """The largest of each over the ranks: only those with an engine receive, and the slowest sets the pace."""
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group.control)
        return dict(zip(metrics, values.tolist(), strict=True))

    def _from_first(self, value: Any) -> Any:
        """The first rank's value, on ranks that have none."""
        if self._first == 0:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self._group.control, group_src=0)
        return values[0]

    def _write_whole(self) -> dict[str, float]:
        assert self.engine is not None and self._actor is not None  # the Torch engine stands beside its actor
        self.engine.wake()
        self._actor.copy_full_parameters_into(self.engine.weights())
        return {}

    def _write_sglang(self) -> dict[str, float]:
        transition = self._current_transition()
        metrics = self._of_all_ranks(transition.run().metrics())
        if self._config.rollout.verify_weights:
            transition.verify()
        return metrics

    def _current_transition(self) -> Transition:
        """The plan over the engines' memory, made anew when one of them was started (again)."""
        engine = self.engine
        assert engine is None or isinstance(engine, SglangEngine)
        if self._actor is not None:
            self._actor.reshard()
        if self._transition is None or self._any(not self._is_written(engine)):
            self._transition = None  # its views would keep the memory of an engine that has ended
            exported = engine.exported() if engine is not None else ()
            self._process = None if engine is None else engine.launcher_pid
            memory = mapped_memory(
                self._of_each_rank(exported), self._config.rollout.weights_transport, self._group, self._device
            )
            self._transition = Transition(
                None if self._actor is None else self._actor.model.hf,
                memory.own,
                tensor_parallel_size=self._config.rollout.tensor_parallel_size,
                group=dist.group.WORLD if self._group.size > 1 else None,
                device=self._device,
                bucket_bytes=self._config.rollout.weights_bucket_mib << 20,
                num_sources=self._num_sources,
                engines=memory.everyone,
            )
            logger.info("new weights reach the engines %s", self._way())
        return self._transition

    def _way(self) -> str:
        if self.writes_directly:
            return "directly: each rank writes into all of them"
        return "by collectives" if self._group.size > 1 else "from this rank alone"

    def _of_each_rank(self, mine: tuple[Exported, ...]) -> list[Exported | None]:
        """The slice of an engine that spans each rank of the group; None: it only trains (collective).

        mine: all slices of the engine that this rank owns; none on others.
        """
        owned = gather_to_all(mine, self._group)
        places = range(self._group.size - self._first)
        slices = [owned[self._first + place % self.num_engines][place // self.num_engines] for place in places]
        return [*[None] * self._first, *slices]

    def _has_ended(self) -> bool:
        """Whether this rank's engine has been written into and runs no more."""
        engine = self.engine
        return isinstance(engine, SglangEngine) and self._process is not None and engine.launcher_pid is None

    def _is_written(self, engine: SglangEngine | None) -> bool:
        """Whether this rank's engine, if it has one, runs in the process whose memory the transition writes into."""
        return engine is None or (engine.launcher_pid is not None and engine.launcher_pid == self._process)
