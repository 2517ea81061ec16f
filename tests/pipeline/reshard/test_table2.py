"""The paper's table 2 beside the plan's own counts."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pipeline.reshard.__main__ import fitting_tp_sizes, main, table
from pipeline.reshard.shapes import SHAPES
from pipeline.reshard.volumes import plan_volume, table2


@pytest.mark.parametrize("shape", ["llama-7b", "qwen2-7b"])
def test_counts_of_the_plan_are_the_hybridflow_column(shape: str) -> None:
    geometry = SHAPES[shape]
    for tp_size in fitting_tp_sizes(geometry, 8):
        volume, cost = plan_volume(geometry, 8, tp_size), table2(tp=8, tp_g=tp_size)["HybridFlow"]
        norms = (2 * geometry.num_layers + 1) * geometry.hidden_size * 2
        cut = volume.model - (norms if tp_size > 1 else 0)
        assert volume.sharded == cost.communication * cut
        assert volume.replicated == (Fraction(7, 8) * norms if tp_size > 1 else 0)
        assert volume.engine == cost.peak_memory * cut + (volume.model - cut)
    print(f"\n{shape}\n{table(geometry, 8, fitting_tp_sizes(geometry, 8))}")


def test_formulas_give_the_papers_example() -> None:
    """Llama 7B in bf16, training 1-8-2, t_g = 2: 13.9, 12.2 and 5.25 GB of 13.9 x 16/15."""
    costs = table2(tp=8, dp=2, tp_g=2)
    assert [costs[name].communication for name in ("DS-Chat", "HybridFlow-V", "HybridFlow")] == [
        Fraction(15, 16),
        Fraction(7, 8),
        Fraction(3, 8),
    ]
    assert costs["HybridFlow"].redundancy == 0 and costs["HybridFlow-V"].redundancy == Fraction(1, 8)


def test_command_prints_a_row_per_tp_size(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--shape", "llama-7b", "--ranks", "8", "--tp", "1,2,8"])
    lines = capsys.readouterr().out.splitlines()
    assert "HybridFlow-V" in lines[1]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "8"]
    assert lines[4].split()[4] == "0.000", "nothing of the cut parameters travels where t_g = s"
