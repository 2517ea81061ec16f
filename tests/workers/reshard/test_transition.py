"""Transitions over real gloo ranks, bit for bit against slices of whole parameters."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pipeline.reshard.geometry import ModelGeometry
from tests.gloo import run_ranks
from tests.models import tiny_config
from tests.workers.reshard import ranks
from workers.reshard import views
from workers.reshard.direct import DirectWriter
from workers.reshard.model import hf_config
from workers.reshard.transition import Transition

FAMILIES = ("llama", "qwen2", "qwen3")
BUCKET = 4096
SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"tie_word_embeddings": True, **ranks.ODD},
    {"attention_bias": True, **ranks.ODD},
)
SMALL = 200
"""Elements: norms and biases share a gather, weights do not."""


def _transition(
    family: str, world_size: int, tp_size: int, bucket: int, small: int, *, direct: bool = False, **sizes: Any
) -> tuple[Any, ...]:
    model = ranks.sharded_model(family, world_size, tp_size, **sizes)
    geometry = ModelGeometry.from_config(hf_config(model))
    engine = ranks.engine_memory(geometry, tp_size, torch.bfloat16)
    engines = ranks.every_engine(engine) if direct else None
    if engines is not None:
        engine = engines[torch.distributed.get_rank()]
    transition = Transition(
        model,
        engine,
        tensor_parallel_size=tp_size,
        group=ranks.world(),
        device=ranks.CPU,
        bucket_bytes=bucket,
        engines=engines,
        small_numel=small,
    )
    return model, geometry, engine, transition


def _every_case(rank: int, world_size: int, direct: bool) -> list[str]:
    failures: list[str] = []
    for tp_size in (n for n in (1, 2, 4) if world_size % n == 0):
        for family in FAMILIES:
            for sizes in SIZES:
                failures += _case(family, world_size, tp_size, SMALL, BUCKET, rank, sizes, direct)
        for small, bucket in ((0, BUCKET), (1 << 16, 1 << 20)):  # no parameter small, and every one
            failures += _case("qwen2", world_size, tp_size, small, bucket, rank, {}, direct)
        with pytest.MonkeyPatch.context() as patch:  # many launches, of few parameters or of one
            patch.setattr(views, "FIRST_LAUNCH_BYTES", 512)
            patch.setattr(views, "LAUNCH_BYTES", 8192)
            failures += _case("qwen2", world_size, tp_size, SMALL, BUCKET, rank, {}, direct)
    return failures


def _case(
    family: str, world_size: int, tp_size: int, small: int, bucket: int, rank: int, sizes: dict[str, Any], direct: bool
) -> list[str]:
    case = f"{family} tp {tp_size} small {small} {sizes}"
    model, geometry, engine, transition = _transition(
        family, world_size, tp_size, bucket, small, direct=direct, **sizes
    )
    before = ranks.addresses(engine)
    report = transition.run()
    wrong = ranks.wrong_parameters(
        ranks.whole_parameters(model), geometry, engine, tp_size, rank // (world_size // tp_size)
    )
    planned = transition.plan.received_bytes(rank, itemsize=2)
    checks = {
        f"wrong: {wrong}": not wrong,
        "not in place": ranks.addresses(engine) == before,
        f"received {report.received_bytes}, planned {planned}": report.received_bytes == planned,
        f"held {report.extra_bytes} beside": report.extra_bytes <= bucket,
    }
    transition.verify()
    return [f"{case}: {problem}" for problem, holds in checks.items() if not holds]


@pytest.mark.parametrize(
    ("world_size", "direct"), [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True), (4, True)]
)
def test_every_engine_parameter_is_the_slice_of_the_whole_one(world_size: int, direct: bool) -> None:
    """In place, within the bucket, and with the bytes that the plan states: families, tied or not, TP sizes."""
    for failures in run_ranks(_every_case, world_size, direct):
        assert failures == []


def _follows_updates(rank: int, world_size: int, direct: bool) -> list[bool]:
    model, geometry, engine, transition = _transition("qwen2", world_size, 2, BUCKET, SMALL, direct=direct)
    outcomes = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(-1.5)  # type: ignore[attr-defined]
        transition.run()
        outcomes.append(
            not ranks.wrong_parameters(ranks.whole_parameters(model), geometry, engine, 2, rank // (world_size // 2))
        )
    return outcomes


@pytest.mark.parametrize("direct", [False, True])
def test_each_run_brings_the_newest_weights(direct: bool) -> None:
    assert run_ranks(_follows_updates, 2, direct) == [[True, True], [True, True]]


def _one_rank_is_late(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Parameters of the own engine written before this rank's run, and not written after it; rank 0 never waits."""
    model, geometry, engine, transition = _transition("qwen2", world_size, 1, BUCKET, SMALL, direct=True)
    whole, write = ranks.whole_parameters(model), DirectWriter._write

    def late(self: DirectWriter, shards: Any) -> None:
        time.sleep(0.5 * rank)
        write(self, shards)

    torch.distributed.barrier()
    time.sleep(0.5 * rank)
    early = [name for name, held in engine.items() if not (held == ranks.UNWRITTEN).all()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectWriter, "_write", late)
        transition.run()
    return early, ranks.wrong_parameters(whole, geometry, engine, 1, 0)


def test_direct_writes_begin_when_all_engines_are_idle_and_end_when_all_are_written() -> None:
    assert run_ranks(_one_rank_is_late, 2) == [([], []), ([], [])]


def _one_wrong_bit(rank: int, world_size: int) -> str:
    _, _, engine, transition = _transition("llama", world_size, 2, BUCKET, SMALL)
    transition.run()
    if rank == 1:
        engine["model.layers.1.mlp.gate_up_proj.weight"].view(torch.int16)[33, 5] ^= 1
    try:
        transition.verify()
    except ValueError as error:
        return str(error)
    return "nothing was noticed"


def test_verification_finds_one_bit_and_every_rank_learns_of_it() -> None:
    messages = run_ranks(_one_wrong_bit, 2)
    assert "another rank" in messages[0]
    assert "gate_up_proj.weight (model.layers.1.mlp.up_proj.weight) of rank 1" in messages[1]


def _engine_that_does_not_fit(rank: int, world_size: int) -> str:
    model = ranks.sharded_model("llama", world_size, 1)
    geometry = ModelGeometry.from_config(hf_config(model))
    engine = ranks.engine_memory(geometry, 1, torch.bfloat16)
    if rank == 0:
        engine["model.norm.weight"] = engine["model.norm.weight"][:5]
        engine["lm_head.bias"] = engine.pop("lm_head.weight")
    try:
        Transition(
            model, engine, tensor_parallel_size=1, group=ranks.world(), device=ranks.CPU, bucket_bytes=BUCKET
        ).run()
    except ValueError as error:
        return str(error)
    return "nothing was noticed"


def test_an_engine_that_does_not_fit_is_refused_on_all_ranks_with_the_names() -> None:
    first, second = run_ranks(_engine_that_does_not_fit, 2)
    for phrase in ("lm_head.weight is missing", "lm_head.bias of the engine has no source", "norm.weight of the"):
        assert phrase in first
    assert "another rank" in second


def _tiny_bucket(rank: int, world_size: int) -> str:
    try:
        _transition("llama", world_size, 2, 64, 1 << 16, intermediate_size=256)
    except Exception as error:  # noqa: BLE001 - its type is what the test looks at
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def test_a_bucket_below_one_row_is_refused_with_the_remedy() -> None:
    for message in run_ranks(_tiny_bucket, 4):
        assert message.startswith("UserError: rollout.weights_bucket_mib is too small")


def _to_other_ranks(rank: int, world_size: int, num_sources: int, tp_size: int, direct: bool) -> tuple[int, int, int]:
    """Training on the first ranks, engines on the others; (bytes received, planned, and held by the engine)."""
    model = ranks.sharded_model("qwen3", num_sources, tp_size, **ranks.ODD) if rank < num_sources else None
    geometry = ModelGeometry.from_config(tiny_config("qwen3", **ranks.ODD))
    engine = {} if rank < num_sources else ranks.engine_memory(geometry, tp_size, torch.bfloat16)
    engines = ranks.every_engine(engine) if direct else None
    if engines is not None:
        engine = engines.get(rank, {})
    transition = Transition(
        model,
        engine,
        tensor_parallel_size=tp_size,
        group=ranks.world(),
        device=ranks.CPU,
        bucket_bytes=BUCKET,
        num_sources=num_sources,
        engines=engines,
        small_numel=SMALL,
    )
    report = transition.run()
    transition.verify()
    assert report.extra_bytes <= BUCKET
    return report.received_bytes, transition.plan.received_bytes(rank), sum(t.nbytes for t in engine.values())


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("num_sources", "tp_size"), [(2, 1), (2, 2), (3, 1)])
def test_engines_on_other_ranks_receive_their_slice(num_sources: int, tp_size: int, direct: bool) -> None:
    results = run_ranks(_to_other_ranks, 4, num_sources, tp_size, direct)
    for rank, (received, planned, held) in enumerate(results):
        assert received == planned
        assert (received > 0) == (rank >= num_sources)
        assert received <= held


def test_one_rank_with_a_model_that_is_not_sharded_needs_no_process_group() -> None:
    model = ranks.random_model("qwen2")
    geometry = ModelGeometry.from_config(hf_config(model))
    engine = ranks.engine_memory(geometry, 1, torch.float32)
    transition = Transition(model, engine, tensor_parallel_size=1, group=None, device=ranks.CPU, bucket_bytes=BUCKET)
    report = transition.run()
    transition.verify()
    assert ranks.wrong_parameters(ranks.whole_parameters(model), geometry, engine, 1, 0) == []
    assert (report.received_bytes, report.extra_bytes, report.num_collectives) == (0, 0, 0)
