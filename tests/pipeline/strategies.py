"""Hypothesis strategies that several tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from pipeline.mesh import ParallelMesh


@st.composite
def meshes(draw: st.DrawFn) -> ParallelMesh:
    """Any mesh up to 4-4-4, any generation sizes that divide it."""
    sizes = {axis: draw(st.integers(1, 4), label=axis) for axis in ("pp", "tp", "dp")}
    t_g = draw(st.sampled_from([n for n in range(1, 5) if sizes["tp"] % n == 0]), label="t_g")
    p_g = draw(st.sampled_from([n for n in range(1, 5) if sizes["pp"] % n == 0]), label="p_g")
    micro_dp = sizes["pp"] * sizes["tp"] // (p_g * t_g)
    return ParallelMesh(**sizes, micro_dp=micro_dp, generation_tp=t_g)
