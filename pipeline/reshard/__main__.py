"""Print the paper's table 2 beside the counts of the reshard plan.

python -m pipeline.reshard [--shape llama-7b] [--ranks 8] [--tp 1,2,4,8]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.shapes import SHAPES, num_elements
from pipeline.reshard.volumes import plan_volume, table2

GB = 1e9
COLUMNS = ("DS-Chat", "HybridFlow-V", "HybridFlow")


def table(geometry: ModelGeometry, num_ranks: int, tp_sizes: Sequence[int]) -> str:
    """GB received per GPU (bf16): the paper's formulas, and what the plan counts.

    The formulas for a training group of `num_ranks` (t = s, p = d = 1) and p_g = 1.
    """
    header = f"{'t_g':>4} {'d_g':>4}" + "".join(f"{name:>14}" for name in COLUMNS)
    lines = [f"{header}{'plan':>10}{'sharded':>10}{'whole':>8}{'peak M/t_g':>12}{'plan':>8}"]
    for tp_size in tp_sizes:
        costs = table2(tp=num_ranks, tp_g=tp_size)
        plan = plan_volume(geometry, num_ranks, tp_size)
        formulas = "".join(f"{float(costs[name].communication) * plan.model / GB:>14.3f}" for name in COLUMNS)
        counts = f"{plan.received / GB:>10.3f}{plan.sharded / GB:>10.3f}{plan.replicated / GB:>8.4f}"
        peak = f"{float(costs['HybridFlow'].peak_memory) * plan.model / GB:>12.3f}{plan.engine / GB:>8.3f}"
        lines.append(f"{tp_size:>4} {num_ranks // tp_size:>4}{formulas}{counts}{peak}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.reshard", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append", help="default: llama-7b and qwen2-7b")
    parser.add_argument("--ranks", type=int, default=8, help="size of the training group")
    parser.add_argument("--tp", default="", help="generation TP sizes, by commas; default: all that fit")
    options = parser.parse_args(arguments)
    for shape in options.shape or ("llama-7b", "qwen2-7b"):
        geometry = SHAPES[shape]
        sizes = [int(size) for size in options.tp.split(",") if size] or fitting_tp_sizes(geometry, options.ranks)
        print(f"{shape}: {num_elements(geometry) / GB:.2f} B parameters, {options.ranks} ranks, GB received per GPU")
        print(table(geometry, options.ranks, sizes), end="\n\n")


def fitting_tp_sizes(geometry: ModelGeometry, num_ranks: int) -> list[int]:
    """Divisors of the ranks over which the model's heads can be cut."""
    return [n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and geometry.num_heads % n == 0]


if __name__ == "__main__":
    main()
