"""Which of each role's parameters, gradients and optimizer state are on the device, and which on the host.

Roles that are colocated take turns. Before a call the rank asks `ensure(role)`: the role's parts move to
the device, and the parts of every other role with `fsdp.offload: true` leave it first. On a CPU device
and host are the same memory and nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

Part = Literal["parameters", "gradients", "optimizer"]
Place = Literal["device", "host", "absent"]
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
FORWARD_PARTS: tuple[Part, ...] = ("parameters",)
"""What a forward pass reads; optimizer state may stay on the host."""
HOST = torch.device("cpu")


class Movable(Protocol):
    """What the manager needs of a model; `RoleModel` is one."""

    @property
    def offloads(self) -> bool:
        """Whether the role leaves the device while another one uses it."""

    def bytes_on(self, part: Part) -> dict[str, int]:
        """Bytes of the part by type of device (`cpu`, `cuda`); empty when there is none."""

    def move(self, part: Part, device: torch.device) -> None:
        """Move the part's tensors; those that are there already stay as they are."""


class Residency:
    """The manager of one rank. It keeps no record of its own: places are read off the tensors."""

    def __init__(self, models: Mapping[str, Movable], *, device: torch.device) -> None:
        self._models, self._device = models, device

    def ensure(self, role: str, *, parts: tuple[Part, ...] = PARTS) -> None:
        """Bring these parts of the role to the device, after the other roles have made room.

        Of the role itself, what is not asked for stays where it is. Raises KeyError for an unknown role.
        """
        model = self._models[role]
        if self._device.type == HOST.type:
            return
        for other in self._models.values():
            if other is not model and other.offloads:
                self._move(other, PARTS, HOST)
        self._move(model, parts, self._device)

    @property
    def anything_leaves(self) -> bool:
        """Whether `release_all` moves anything, at any time."""
        return self._device.type != HOST.type and any(model.offloads for model in self._models.values())

    def release_all(self) -> None:
        """Send every role that offloads to the host: the device is free for a rollout engine."""
        for model in self._models.values():
            if model.offloads:
                self._move(model, PARTS, HOST)

    def places(self) -> dict[str, dict[Part, Place]]:
        """For each role: where its parts are now."""
        return {
            role: {part: self._place(model.bytes_on(part)) for part in PARTS} for role, model in self._models.items()
        }

    def device_bytes(self) -> dict[str, int]:
        """For each role: bytes on the device."""
        kind = self._device.type
        return {role: sum(model.bytes_on(part).get(kind, 0) for part in PARTS) for role, model in self._models.items()}

    def _place(self, sizes: Mapping[str, int]) -> Place:
        if not sizes:
            return "absent"
        return "device" if self._device.type in sizes else "host"

    def _move(self, model: Movable, parts: tuple[Part, ...], device: torch.device) -> None:
        for part in parts:
            if set(model.bytes_on(part)) - {device.type}:
                model.move(part, device)
