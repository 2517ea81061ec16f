"""The rollout engines of a pool as one thing: who owns one, how weights reach them, what happens when one dies.

Every method is collective over the pool. With a tensor-parallel size t an engine spans t ranks at stride
num_ranks / t (HybridFlow, section 5.3); the first of them owns it and asks it to generate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import RunConfig
from workers.engines.base import EngineError, GenerateRequest, GenerateResult, RolloutEngine, SamplingParams
from workers.engines.dispatch import generate_all
from workers.engines.factory import build_engine
from workers.engines.sglang.engine import SglangEngine
from workers.engines.sglang.handles import Exported
from workers.process_group import PoolGroup
from workers.reshard.transition import Transition
from workers.role_model import RoleModel

Handles = tuple[int | None, tuple[Exported, ...]]
"""An engine's process and what it exports; (None, ()) of a rank without one."""

logger = logging.getLogger(__name__)
RESTARTS = 2
"""Times that an engine which died in one call is started again."""


class EngineLink:
    """This rank's side. `engine` is None on ranks that another rank's engine spans."""

    def __init__(
        self, config: RunConfig, actor: RoleModel, *, group: PoolGroup, device: torch.device, run_dir: Path, rank: int
    ) -> None:
        self._config, self._actor, self._group, self._device = config, actor, group, device
        sglang = config.rollout.engine == "sglang"
        self.num_engines = group.size // (config.rollout.tensor_parallel_size if sglang else 1)
        self.engine_index = group.rank if group.rank < self.num_engines else None
        self.engine: RolloutEngine | None = None
        if self.engine_index is not None:
            self.engine = build_engine(
                config, device=device, model=actor.model.hf.config, run_dir=run_dir, rank=rank, num_ranks=group.size
            )
        self._transition: Transition | None = None
        self._processes: list[int | None] = []

    @property
    def version(self) -> int:
        return self._actor.version

    @property
    def started(self) -> bool:
        """Whether this rank's engine holds weights already (ranks without one: whether they have written any)."""
        return self._transition is not None or (self.engine is not None and self.engine.version >= 0)

    def sync(self) -> dict[str, float]:
        """Bring every engine's weights to the actor's version; nothing moves where all have it.

        Returns the transition's time, bytes and extra memory. Raises EngineError when an engine does not start,
        ValueError when the weights do not fit or, under `rollout.verify_weights`, are not bit for bit the actor's.
        """
        stale = self.engine is not None and self.engine.version != self._actor.version
        if not self._any(stale):
            return {}
        metrics = self._write_sglang() if self._config.rollout.engine == "sglang" else self._write_whole()
        if self.engine is not None:
            self.engine.set_version(self._actor.version)
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
                logger.warning("%s; starting it again with version %d", error, self._actor.version)
            self.sync()
        assert results is not None
        return results

    def wake(self) -> None:
        """Take the KV cache's memory again."""
        if self.engine is not None:
            self.engine.wake()

    def sleep(self) -> None:
        """Give memory back for training: an SGLang engine's KV cache; the whole Torch engine where roles offload."""
        if self.engine is not None and (self._config.rollout.engine == "sglang" or self._config.actor.fsdp.offload):
            self.engine.sleep()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

    def _any(self, here: bool) -> bool:
        flag = torch.tensor([float(here)])
        dist.all_reduce(flag, group=self._group.control)
        return bool(flag.item())

    def _write_whole(self) -> dict[str, float]:
        assert self.engine is not None
        self.engine.wake()
        self._actor.copy_full_parameters_into(self.engine.weights())
        return {}

    def _write_sglang(self) -> dict[str, float]:
        transition = self._current_transition()
        metrics = transition.run().metrics()
        if self._config.rollout.verify_weights:
            transition.verify()
        return metrics

    def _current_transition(self) -> Transition:
        """The plan over the engines' memory, made anew when one of them was started (again)."""
        engine = self.engine
        assert engine is None or isinstance(engine, SglangEngine)
        exported = engine.exported() if engine is not None else ()
        everyone = self._gathered((engine.launcher_pid if engine is not None else None, exported))
        processes = [pid for pid, _ in everyone]
        self._actor.reshard()
        if self._transition is None or processes != self._processes:
            owner, tp_rank = self._group.rank % self.num_engines, self._group.rank // self.num_engines
            handles: dict[str, Tensor] = everyone[owner][1][tp_rank].mapped()
            self._transition = Transition(
                self._actor.model.hf,
                handles,
                tensor_parallel_size=self._config.rollout.tensor_parallel_size,
                group=self._actor.mesh.get_group() if self._group.size > 1 else None,
                device=self._device,
                bucket_bytes=self._config.rollout.weights_bucket_mib << 20,
            )
            self._processes = processes
        return self._transition

    def _gathered(self, mine: Handles) -> list[Handles]:
        everyone: list[Handles] = [mine] * self._group.size
        dist.all_gather_object(everyone, mine, group=self._group.control)
        return everyone
