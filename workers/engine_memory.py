"""The memory of a run's SGLang engines as this rank writes into it: that of its own engine, or of all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from configs.errors import UserError
from workers.engines.base import EngineError
from workers.engines.sglang.handles import Exported
from workers.process_group import PoolGroup, gather_to_all
from workers.reshard.direct import Engines

logger = logging.getLogger(__name__)
Transport = Literal["auto", "direct", "collectives"]


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """own: parameters of the engine that spans this rank; empty without one. everyone: None: collectives are needed."""

    own: Mapping[str, Tensor]
    everyone: Engines | None


def mapped_memory(
    exported: Sequence[Exported | None], transport: Transport, group: PoolGroup, device: torch.device
) -> EngineMemory:
    """Map what the transport needs (collective over `group`, of which `exported` has each rank's engine).

    Raises, on all ranks, UserError where `direct` is asked for and some rank cannot write into some engine or some rank
    may not map its own one's memory, EngineError where that is gone, as when its process has ended meanwhile.
    """
    direct = is_direct(exported, transport, group, device)
    memory: EngineMemory | None = None
    failure: UserError | EngineError | None = None
    try:
        memory = _of_all(exported, group.rank, device) if direct else _of_one(exported[group.rank])
    except UserError as error:
        failure = error
    except (FileNotFoundError, RuntimeError) as error:  # of a file; of CUDA, which says no more
        failure = EngineError(f"the engines' memory is gone: {str(error).splitlines()[0]}")
    failures = [failure for failure in gather_to_all(failure, group) if failure is not None]
    if memory is None or failures:
        raise next((failure for failure in failures if isinstance(failure, UserError)), failures[0])
    return memory


def _of_all(exported: Sequence[Exported | None], rank: int, device: torch.device) -> EngineMemory:
    everyone = all_mapped(exported, device)
    return EngineMemory(own=everyone.get(rank, {}), everyone=everyone)


def _of_one(own: Exported | None) -> EngineMemory:
    return EngineMemory(own={} if own is None else own.mapped(), everyone=None)


def is_direct(
    exported: Sequence[Exported | None], transport: Transport, group: PoolGroup, device: torch.device
) -> bool:
    """Whether every rank writes into all engines. On GPUs `auto` does not: over NVLink collectives are as fast."""
    if group.size == 1 or transport == "collectives" or (transport == "auto" and device.type == "cuda"):
        return False
    obstacle = direct_obstacle(exported, group, device)
    if obstacle is not None and transport == "direct":
        raise UserError(f"rollout.weights_transport=direct: {obstacle}; auto and collectives work there")
    if obstacle is not None:
        logger.info("new weights reach the engines by collectives: %s", obstacle)
    return obstacle is None


def direct_obstacle(exported: Sequence[Exported | None], group: PoolGroup, device: torch.device) -> str | None:
    """Why some rank cannot write into some engine, the same on all; None: all can (collective over `group`)."""
    here = (engine.unreachable_reason(device) for engine in exported if engine is not None)
    return next(filter(None, gather_to_all(next(filter(None, here), None), group)), None)


def all_mapped(exported: Sequence[Exported | None], device: torch.device) -> Engines:
    """Every rank's engine, for kernels of `device` to write into."""
    return {rank: engine.mapped(device) for rank, engine in enumerate(exported) if engine is not None}
