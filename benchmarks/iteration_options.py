"""The options of `benchmarks.iteration`, and what is wrong with them before anything is started."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from benchmarks.command_line import Parser, add_batch, add_output, check_gpus, check_writable, positive, whole
from benchmarks.shapes import add_layers, add_shape, geometry_of
from configs.errors import UserError, refuse
from configs.loader import load_config, stated
from configs.schema import RunConfig
from flows.preflight import check

PROGRAM = "python -m benchmarks.iteration"
OPTIONS = {
    "resources.num_ranks": "--ranks",
    "resources.device": "--gpus",
    "rollout.engine": "--engine",
    "rollout.tensor_parallel_size": "--tp",
    "rollout.num_samples": "--samples",
    "rollout.max_new_tokens": "--new-tokens",
    "data.batch_size": "--prompts",
    "data.max_prompt_tokens": "--prompt-tokens",
    "training.max_tokens_per_micro_batch": "--micro-batch-tokens",
}
"""Which option writes a key of the configuration, which the user never sees."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description="Whole GRPO iterations: times, tokens/s, MFU, idle GPUs.")
    add = parser.add_argument
    add_shape(parser)
    add_layers(parser)
    add("--gpus", type=whole, default=0, help="GPUs of this machine to use; 0: on the CPU (default: %(default)s)")
    add("--ranks", type=positive, default=None, help="processes that hold the model (default: one a GPU; 1 on the CPU)")
    add(
        "--engine",
        choices=("sglang", "torch"),
        default="sglang",
        help="what generates: SGLang, or torch in the rank's own process (default: %(default)s)",
    )
    add("--tp", type=positive, default=1, help="GPUs that an SGLang engine is cut over (default: %(default)s)")
    add_batch(parser, prompts=32)
    add("--reference", action="store_true", help="with a reference model and a KL term (default: without)")
    add("--warm-up", type=whole, default=1, help="first iterations that are not counted (default: %(default)s)")
    add(
        "--iterations",
        type=positive,
        default=3,
        help="measured ones, of which medians are shown (default: %(default)s)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other key of the configuration, as for hybridflow run; may be repeated",
    )
    add_output(parser)
    add(
        "--against",
        default=None,
        metavar="FILE",
        help="what --output of a run on fewer GPUs has written: prints how the throughput has grown (default: none)",
    )
    add("--logs", default=None, metavar="FOLDER", help="keeps the logs of the run's ranks and engines (default: none)")
    return parser.parse_args(arguments)


def check_machine(options: argparse.Namespace) -> None:
    """Raises UserError for what can be said before the configuration is written."""
    geometry_of(options)
    check_writable(options.output, "--output")
    if not options.gpus:
        return
    check_gpus(options.gpus, option=f"--gpus {options.gpus}", remedy="--gpus 0 runs on the CPU")
    if find_spec("pynvml") is None:
        raise UserError(
            f"--gpus {options.gpus}: nvidia-ml-py, which tells how busy GPUs are, is not installed: "
            "pip install nvidia-ml-py"
        )


def checked(path: Path, options: argparse.Namespace) -> RunConfig:
    """The configuration that was written there, with `--set`. Raises UserError, in words of the options."""
    with naming_options(path):
        config = load_config(str(path), options.set)
        check(config, source=str(path), stated=stated(str(path), options.set), trains=True)
    wanted, has = options.warm_up + options.iterations, config.training.num_iterations
    if has < wanted:
        raise UserError(
            f"--set training.num_iterations={has}: fewer than the {wanted} of --warm-up and --iterations; leave it out"
        )
    return config


@contextmanager
def naming_options(path: Path) -> Iterator[None]:
    """A UserError inside names the option in place of the file at `path` and its key; one of `--set` stays."""
    try:
        yield
    except UserError as error:
        refuse(as_options(line, path) for line in error.problems or (str(error),))


def as_options(line: str, path: Path) -> str:
    of_file = re.sub(rf"^{re.escape(str(path))}(:\d+)?: ", "", line)
    if of_file == line:
        return line
    for key, option in OPTIONS.items():
        of_file = of_file.replace(key, option)
    return of_file
