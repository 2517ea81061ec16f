from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import tiny_model_dir
from tests.workers.reference import build, grouped_rollouts, run_config
from workers.residency import FORWARD_PARTS, PARTS, Part, Residency

DEVICE = torch.device("cuda")
"""Only named here: the bookkeeping is tested without a GPU."""


class Shelf:
    """Real tensors on shelves named after devices."""

    def __init__(self, *, offloads: bool, parts: tuple[Part, ...] = PARTS, place: str = "cuda") -> None:
        self.offloads = offloads
        self.tensors: dict[Part, tuple[str, torch.Tensor]] = {p: (place, torch.ones(4)) for p in parts}
        self.moves: list[tuple[Part, str]] = []

    def bytes_on(self, part: Part) -> dict[str, int]:
        if part not in self.tensors:
            return {}
        place, tensor = self.tensors[part]
        return {place: tensor.nbytes}

    def move(self, part: Part, device: torch.device) -> None:
        self.moves.append((part, device.type))
        self.tensors[part] = (device.type, self.tensors[part][1])


def test_the_role_called_comes_and_those_that_offload_leave() -> None:
    models = {"actor": Shelf(offloads=True), "critic": Shelf(offloads=True), "reward": Shelf(offloads=False)}
    residency = Residency(models, device=DEVICE)
    residency.ensure("critic")
    assert set(residency.places()["actor"].values()) == {"host"}
    assert set(residency.places()["critic"].values()) == {"device"}
    assert set(residency.places()["reward"].values()) == {"device"}
    residency.ensure("actor")
    assert set(residency.places()["actor"].values()) == {"device"}
    assert set(residency.places()["critic"].values()) == {"host"}
    assert residency.device_bytes() == {"actor": 48, "critic": 0, "reward": 48}


def test_whether_anything_leaves_is_known_before() -> None:
    stays, leaves = Shelf(offloads=False), Shelf(offloads=True)
    assert Residency({"actor": stays, "critic": leaves}, device=DEVICE).anything_leaves
    assert not Residency({"actor": stays}, device=DEVICE).anything_leaves
    assert not Residency({"critic": leaves}, device=torch.device("cpu")).anything_leaves


def test_nothing_that_is_in_place_moves_again() -> None:
    models = {"actor": Shelf(offloads=True), "critic": Shelf(offloads=True)}
    residency = Residency(models, device=DEVICE)
    residency.ensure("actor")
    moved = len(models["critic"].moves)
    residency.ensure("actor")
    assert models["actor"].moves == []
    assert len(models["critic"].moves) == moved == 3


def test_a_forward_pass_leaves_the_optimizer_on_the_host() -> None:
    models = {"actor": Shelf(offloads=True, place="cpu")}
    residency = Residency(models, device=DEVICE)
    residency.ensure("actor", parts=FORWARD_PARTS)
    assert residency.places()["actor"] == {"parameters": "device", "gradients": "host", "optimizer": "host"}


def test_room_is_made_before_the_role_comes() -> None:
    order: list[str] = []

    class Recording(Shelf):
        def move(self, part: Part, device: torch.device) -> None:
            order.append(device.type)
            super().move(part, device)

    models = {"actor": Recording(offloads=True, place="cpu"), "critic": Recording(offloads=True)}
    Residency(models, device=DEVICE).ensure("actor")
    assert order == ["cpu"] * 3 + ["cuda"] * 3


def test_release_all_frees_the_device_of_roles_that_offload() -> None:
    models = {"actor": Shelf(offloads=True), "reward": Shelf(offloads=False, parts=("parameters",))}
    residency = Residency(models, device=DEVICE)
    residency.release_all()
    assert residency.device_bytes() == {"actor": 0, "reward": 16}
    assert residency.places()["reward"]["optimizer"] == "absent"


def test_an_unknown_role_is_an_error() -> None:
    with pytest.raises(KeyError):
        Residency({}, device=torch.device("cpu")).ensure("actor")


def test_a_role_model_says_what_it_holds(tmp_path: Path) -> None:
    config = run_config(tiny_model_dir(tmp_path), actor={"fsdp": {"offload": True}})
    models = {"actor": build("actor", config), "reference": build("reference", config)}
    residency = Residency(models, device=torch.device("cpu"))
    residency.ensure("actor")
    assert residency.places()["actor"] == {"parameters": "device", "gradients": "absent", "optimizer": "device"}
    assert residency.places()["reference"]["optimizer"] == "absent"
    num_bytes = sum(p.numel() * 4 for p in models["actor"].model.parameters())
    assert models["actor"].bytes_on("parameters") == {"cpu": num_bytes}
    assert models["actor"].bytes_on("optimizer")["cpu"] > 2 * num_bytes
    models["actor"].offload()
    models["actor"].onload()
    models["actor"].update([grouped_rollouts([2], [[3]])], "sft", seed=0)
