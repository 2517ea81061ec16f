"""Where an iteration's metrics go: metrics.jsonl always, TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from configs.errors import UserError
from configs.schema import LoggingConfig, RunConfig
from storage.locations import local_side
from storage.metrics import MetricsLog
from storage.run_directory import RunDirectory


class Sink(Protocol):
    """One more place for numbers."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsSinks:
    """All sinks of a run. An iteration that metrics.jsonl has is logged nowhere again.

    Raises UserError when a sink is asked for and its package is not installed.
    """

    def __init__(self, run_directory: RunDirectory, config: RunConfig) -> None:
        check_sinks(config.logging)
        self._log = MetricsLog(run_directory.metrics)
        self._others: list[Sink] = []
        if config.logging.tensorboard:
            self._others.append(TensorBoardSink(run_directory))
        if config.logging.wandb_project is not None:
            self._others.append(WandbSink(run_directory, config, project=config.logging.wandb_project))

    def log(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Log an iteration once; sinks other than the file get its finite numbers."""
        if not self._log.append(iteration, metrics):
            return
        numbers = finite_numbers(metrics)
        for sink in self._others:
            sink.log(iteration, numbers)

    def close(self) -> None:
        """Write out what the sinks still hold."""
        for sink in self._others:
            sink.close()


def check_sinks(logging: LoggingConfig) -> None:
    """Raise UserError for a sink whose package is missing; imports nothing."""
    wanted = {
        "tensorboard": ("logging.tensorboard", logging.tensorboard),
        "wandb": ("logging.wandb_project", logging.wandb_project is not None),
    }
    for package, (key, is_wanted) in wanted.items():
        if is_wanted and find_spec(package) is None:
            raise UserError(
                f"{key} is set and {package} is not installed: pip install 'hybridflow[{package}]', or leave {key} out"
            )


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of the metrics, without those that no plot can show."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


class TensorBoardSink:
    """Scalars in RUN/tensorboard; `tensorboard --logdir RUNS` shows all runs."""

    def __init__(self, run_directory: RunDirectory) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(local_side(run_directory.path) / "tensorboard"))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run with the run directory's name as its id: a resume goes on with it."""

    def __init__(self, run_directory: RunDirectory, config: RunConfig, *, project: str) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            id=run_directory.path.name,
            name=run_directory.path.name,
            dir=str(local_side(run_directory.path)),
            config=config.model_dump(mode="json"),
            resume="allow",
        )

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()
