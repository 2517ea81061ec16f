"""The reshard plan against slices of whole parameters, with an executor in memory."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from pipeline.reshard.boxes import extent, slices
from pipeline.reshard.engine_layout import vocabulary_rows
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.layout import ReshardLayout
from pipeline.reshard.plan import ReshardPlan, make_plan
from pipeline.reshard.shapes import SHAPES, model_sources, num_elements, parameter_shapes
from pipeline.reshard.sources import Source, chunk
from tests.pipeline.reshard.engine_oracle import engine_parameters, geometries, whole_parameters

UNWRITTEN = -1
Arrays = dict[str, Any]


def execute(plan: ReshardPlan, whole: Arrays, rank: int) -> tuple[Arrays, int]:
    """Engine parameters of `rank` and the elements that came from other ranks; nothing is written twice."""
    engine = {name: np.full(shape, UNWRITTEN) for name, shape in plan.destinations.items()}
    sources = {source.name: source for source in plan.sources}
    received = 0
    for copy in plan.copies(rank):
        box = sources[copy.parameter].box(copy.source_rank, plan.layout.num_sources)
        assert box is not None
        sent = whole[copy.parameter][slices(box)][slices(copy.source)]
        assert sent.shape == extent(copy.source), "a copy reaches beyond its shard"
        target = engine[copy.destination][slices(copy.target)]
        assert target.shape == sent.shape
        assert (target == UNWRITTEN).all(), f"{copy.destination} is written twice"
        target[...] = sent
        received += sent.size if copy.source_rank != rank else 0
    return engine, received


def assert_filled(plan: ReshardPlan, geometry: ModelGeometry, rank: int) -> int:
    whole = whole_parameters(plan.sources)
    engine, received = execute(plan, whole, rank)
    tp_rank = plan.layout.tp_ranks[rank]
    assert tp_rank is not None
    wanted = engine_parameters(whole, geometry, plan.layout.tp_size, tp_rank, np.concatenate)
    assert engine.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(engine[name][: len(value)], value, err_msg=f"{name} of rank {rank}")
        assert (engine[name][len(value) :] == UNWRITTEN).all(), f"padding of {name} is written"
    return received


@st.composite
def colocated(draw: st.DrawFn) -> tuple[ModelGeometry, ReshardLayout, bool, int]:
    num_ranks = draw(st.integers(1, 8), label="ranks")
    tp_size = draw(st.sampled_from([n for n in range(1, 9) if num_ranks % n == 0]), label="tp")
    geometry = draw(geometries(tp_size))
    small = draw(st.sampled_from([0, 100, 10**6]), label="small")
    return geometry, ReshardLayout.colocated(num_ranks, tp_size), draw(st.booleans(), label="aligned"), small


@given(case=colocated())
@settings(max_examples=150, deadline=None)
def test_any_shape_fills_every_engine_rank_with_its_slice(
    case: tuple[ModelGeometry, ReshardLayout, bool, int],
) -> None:
    geometry, layout, aligned, small = case
    sources = model_sources(geometry, layout.world_size, tp_aligned=aligned)
    plan = make_plan(sources, geometry, layout, small_numel=small)
    for rank in range(layout.world_size):
        received = assert_filled(plan, geometry, rank)
        assert plan.received_bytes(rank, itemsize=2) == 2 * received


@given(case=colocated())
@settings(max_examples=40, deadline=None)
def test_what_all_ranks_write_is_what_every_engine_is_filled_with(
    case: tuple[ModelGeometry, ReshardLayout, bool, int],
) -> None:
    geometry, layout, aligned, small = case
    sources = model_sources(geometry, layout.world_size, tp_aligned=aligned)
    plan = make_plan(sources, geometry, layout, small_numel=small)
    written = [copy for rank in range(layout.world_size) for copy in plan.writes(rank)]
    assert sorted(written, key=repr) == sorted((c for r in range(layout.world_size) for c in plan.copies(r)), key=repr)
    for rank in range(layout.world_size):
        order = [other for other, _ in groupby(copy.destination_rank for copy in plan.writes(rank))]
        assert order == sorted(set(order), key=lambda other: (other - rank - 1) % layout.world_size)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_engines_on_other_ranks_are_filled_by_exchanges(data: st.DataObject) -> None:
    tp_size = data.draw(st.integers(1, 4), label="tp")
    layout = ReshardLayout.disjoint(data.draw(st.integers(1, 4)), tp_size * data.draw(st.integers(1, 2)), tp_size)
    geometry = data.draw(geometries(tp_size))
    plan = make_plan(model_sources(geometry, layout.num_sources, tp_aligned=True), geometry, layout)
    assert not plan.gathers and not plan.flat_gathers
    for rank, _ in layout.destinations:
        assert assert_filled(plan, geometry, rank) == sum(plan.received_elements(rank).values())


@given(geometry=geometries(4))
@settings(max_examples=40, deadline=None)
def test_parameters_that_are_whole_on_every_rank_are_not_sent(geometry: ModelGeometry) -> None:
    sources = tuple(
        Source(name=name, shape=shape, shard_dim=None) for name, shape in parameter_shapes(geometry).items()
    )
    plan = make_plan(sources, geometry, ReshardLayout.colocated(4, 4))
    for rank in range(4):
        assert assert_filled(plan, geometry, rank) == 0


@pytest.mark.parametrize(("num_ranks", "tp_size"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)])
@pytest.mark.parametrize("shape", ["qwen2-7b", "llama-7b"])
def test_received_bytes_are_the_closed_form(shape: str, num_ranks: int, tp_size: int) -> None:
    """(1/t_g - 1/s) of what the engine cuts, and (s-1)/s of what it holds whole."""
    geometry = SHAPES[shape]
    plan = make_plan(
        model_sources(geometry, num_ranks, tp_aligned=True), geometry, ReshardLayout.colocated(num_ranks, tp_size)
    )
    norms = (2 * geometry.num_layers + 1) * geometry.hidden_size
    cut = num_elements(geometry) - norms
    expected = cut // tp_size - cut // num_ranks + norms * (num_ranks - 1) // num_ranks
    assert [plan.received_bytes(rank) for rank in range(num_ranks)] == [2 * expected] * num_ranks


def test_training_shards_lie_inside_the_engine_slice_so_that_only_norms_travel_at_tp_equal_to_the_ranks() -> None:
    geometry = SHAPES["qwen2-7b"]
    plan = make_plan(model_sources(geometry, 4, tp_aligned=True), geometry, ReshardLayout.colocated(4, 4))
    travelled = [name for name, number in plan.received_elements(3).items() if number]
    assert travelled and all("norm" in name for name in travelled)
    assert not plan.exchange.copies


def test_micro_dp_groups_are_consecutive_and_tp_groups_strided() -> None:
    layout = ReshardLayout.colocated(8, 2)  # figure 8b's generation groups, on one training group
    assert layout.tp_ranks == (0, 0, 0, 0, 1, 1, 1, 1)
    assert [list(layout.micro_dp_group(rank)) for rank in (1, 6)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(layout.tp_group(rank)) for rank in (1, 6)] == [[1, 5], [2, 6]]


@given(size=st.integers(0, 60), num_ranks=st.integers(1, 9))
@settings(deadline=None)
def test_chunks_are_those_of_torch(size: int, num_ranks: int) -> None:
    import torch

    lengths = [len(part) for part in torch.arange(size).chunk(num_ranks)] if size else []
    ours = [chunk(size, rank, num_ranks) for rank in range(num_ranks)]
    assert [stop - start for start, stop in ours] == lengths + [0] * (num_ranks - len(lengths))


def test_unknown_parameters_are_refused_by_name() -> None:
    geometry = SHAPES["qwen2-tiny"]
    sources = model_sources(geometry, 2, tp_aligned=False)
    strangers = (
        Source(name="model.layers.0.self_attn.q_norm.weight", shape=(16,)),
        Source(name="visual.patch.weight", shape=(4, 4)),
    )
    with pytest.raises(UserError, match=r"2 parameters .*q_norm\.weight, visual\.patch\.weight"):
        make_plan((*sources, *strangers), geometry, ReshardLayout.colocated(2, 1))


def test_unknown_families_are_refused() -> None:
    with pytest.raises(UserError, match="'gemma2'.*llama, qwen2, qwen3"):
        ModelGeometry.from_config({"model_type": "gemma2"})


@pytest.mark.parametrize(
    ("num_ranks", "tp_size", "message"),
    [(4, 3, "does not divide the 4 ranks"), (8, 8, "4 attention heads"), (3, 3, "4 attention heads")],
)
def test_tp_sizes_that_do_not_fit_are_refused(num_ranks: int, tp_size: int, message: str) -> None:
    geometry = SHAPES["qwen2-tiny"]
    with pytest.raises(UserError, match=message):
        make_plan(
            model_sources(geometry, num_ranks, tp_aligned=True), geometry, ReshardLayout.colocated(num_ranks, tp_size)
        )


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "rows"),
    [(32000, 4, 8000), (32001, 1, 32064), (32001, 2, 16032), (100, 4, 32), (100, 3, 64)],
)
def test_vocabulary_is_padded_as_the_engine_pads_it(vocab_size: int, tp_size: int, rows: int) -> None:
    assert vocabulary_rows(vocab_size, tp_size) == rows
