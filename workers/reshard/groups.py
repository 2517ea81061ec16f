"""The process groups of a transition."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from pipeline.reshard.layout import ReshardLayout
from pipeline.reshard.plan import Scope
from workers.reshard.wire import Group


@dataclass(frozen=True, kw_only=True)
class ReshardGroups:
    """`world`: all ranks of the layout, in its order; `micro_dp`: this rank's. None where it is alone."""

    world: Group | None
    micro_dp: Group | None

    @classmethod
    def of_layout(cls, layout: ReshardLayout, world: Group | None) -> ReshardGroups:
        """Make the micro-DP groups (collective over the whole default group, as torch asks).

        world: the group of the layout's ranks; None where there is only one, without torch.distributed.
        """
        if layout.world_size == 1:
            return cls(world=None, micro_dp=None)
        if not layout.is_colocated or layout.micro_dp_size == 1:
            return cls(world=world, micro_dp=None)
        if layout.tp_size == 1:
            return cls(world=world, micro_dp=world)
        ranks = dist.get_process_group_ranks(world)
        own = dist.get_rank(world)
        mine: Group | None = None
        for first in range(0, layout.world_size, layout.micro_dp_size):
            members = layout.micro_dp_group(first)
            group = dist.new_group([ranks[member] for member in members])
            mine = group if own in members else mine
        return cls(world=world, micro_dp=mine)

    def of(self, scope: Scope) -> Group:
        """The group of a scope with several ranks."""
        return self.world if scope == "world" else self.micro_dp
