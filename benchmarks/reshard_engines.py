"""What `benchmarks.reshard` writes weights into: plain tensors, or a real SGLang engine.

An SGLang engine is started in the rank's process here, not behind its launcher: the common ways of
updating weights hand tensors to the engine's own object.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from pipeline.reshard.boxes import slices
from pipeline.reshard.engine_layout import engine_shapes, piece
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.layout import ReshardLayout
from pipeline.reshard.shapes import parameter_shapes
from pipeline.reshard.sources import Source
from workers.engines.sglang.handles import Exported, by_ipc, in_memory_file
from workers.engines.sglang.process import environment
from workers.engines.sglang.setup import write_model_dir
from workers.engines.sglang.spec import EngineSpec

NamedTensors = list[tuple[str, Tensor]]


class BenchedEngine(Protocol):
    """One rank's view of its engine."""

    def weights(self) -> dict[str, Tensor]:
        """This rank's slice, in the engine's memory."""
        ...

    @property
    def exported(self) -> Exported:
        """Where they are, for the other ranks."""
        ...

    def load(self, buckets: Iterable[NamedTensors], *, flattened: bool) -> None:
        """The common way: whole tensors, bucket by bucket (every rank of the group calls)."""
        ...

    def accept(self) -> None:
        """After new weights: drop what was cached, and take requests."""
        ...

    def release(self) -> None:
        """Give the KV cache's memory back."""
        ...

    def resume(self) -> None: ...

    def first_token(self) -> None:
        """Generate one token."""
        ...

    def shutdown(self) -> None: ...


class MemoryEngine:
    """Tensors of the shapes of an engine, on the rank's device; loading slices whole tensors into them."""

    def __init__(self, geometry: ModelGeometry, layout: ReshardLayout, rank: int, dtype: torch.dtype, device: Any):
        self._geometry, self._tp_size, self._tp_rank = geometry, layout.tp_size, layout.tp_ranks[rank] or 0
        sources = [Source(name=name, shape=shape) for name, shape in parameter_shapes(geometry).items()]
        shapes = engine_shapes(sources, geometry, layout.tp_size)
        weights = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self.exported = by_ipc(weights) if device.type == "cuda" else in_memory_file(weights)
        self._weights = weights if device.type == "cuda" else self.exported.mapped()

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def load(self, buckets: Iterable[NamedTensors], *, flattened: bool) -> None:
        for bucket in buckets:
            for name, tensor in _through_one_tensor(bucket) if flattened else bucket:
                part = piece(Source(name=name, shape=tuple(tensor.shape)), self._geometry, self._tp_size, self._tp_rank)
                self._weights[part.destination][slices(part.target)].copy_(tensor[slices(part.box)])

    def accept(self) -> None:
        return

    def release(self) -> None:
        return

    def resume(self) -> None:
        return

    def first_token(self) -> None:
        return

    def shutdown(self) -> None:
        self._weights = {}


class InlineSglang:
    """The engine of this rank's TP group; started by the group's first rank, mapped by all."""

    def __init__(
        self,
        config: PretrainedConfig,
        layout: ReshardLayout,
        rank: int,
        device: torch.device,
        folder: Path,
        *,
        memory_fraction: float,
    ) -> None:
        self._tp_size, self._cuda = layout.tp_size, device.type == "cuda"
        number, tp_rank = rank % layout.micro_dp_size, layout.tp_ranks[rank] or 0
        handles = folder / f"tp{layout.tp_size}" / str(number)
        self._engine: Any = None
        if tp_rank == 0:
            self._engine = _start(_spec(config, layout, number, device, memory_fraction), handles)
        dist.barrier()
        self.exported: Exported = pickle.loads((handles / f"{tp_rank}.pickle").read_bytes())
        self._weights = self.exported.mapped()

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def load(self, buckets: Iterable[NamedTensors], *, flattened: bool) -> None:
        if self._tp_size > 1:
            raise ValueError("the common ways are measured at TP 1")
        from workers.engines.sglang.versions import weight_update

        with weight_update(self._engine):
            for bucket in buckets:
                self._update(bucket, flattened)

    def _update(self, bucket: NamedTensors, flattened: bool) -> None:
        from workers.engines.sglang.versions import check

        if not flattened:
            check(self._engine.update_weights_from_tensor(bucket, flush_cache=False))
            return
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=bucket)
        parts = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        check(
            self._engine.update_weights_from_tensor(
                [MultiprocessingSerializer.serialize(parts)], load_format="flattened_bucket", flush_cache=False
            )
        )

    def accept(self) -> None:
        if self._engine is not None:
            self._engine.flush_cache()

    def release(self) -> None:
        if self._engine is not None:
            self._engine.flush_cache()
            self._on_gpu(self._engine.release_memory_occupation)

    def resume(self) -> None:
        if self._engine is not None:
            self._on_gpu(self._engine.resume_memory_occupation)

    def first_token(self) -> None:
        if self._engine is not None:
            sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            self._engine.generate(input_ids=[[5, 6, 7, 8]], sampling_params=sampling)

    def _on_gpu(self, move: Callable[..., None]) -> None:
        if self._cuda:  # nothing manages the memory of a CPU
            move(tags=["kv_cache"])

    def shutdown(self) -> None:
        self._weights = {}
        dist.barrier()  # nobody maps what is about to be freed
        if self._engine is not None:
            self._engine.shutdown()
            time.sleep(2.0)  # for the schedulers to give their memory back
        dist.barrier()


def _spec(
    config: PretrainedConfig, layout: ReshardLayout, number: int, device: torch.device, memory_fraction: float
) -> EngineSpec:
    """Of the number-th engine."""
    return EngineSpec(
        model_dir=write_model_dir(config, Path(tempfile.mkdtemp())),
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="bfloat16",
        max_positions=2048,
        vocabulary=config.vocab_size,
        tensor_parallel_size=layout.tp_size,
        base_gpu_id=number,
        gpu_id_step=layout.micro_dp_size,
        memory_fraction=memory_fraction,
        max_cached_tokens=None if device.type == "cuda" else 4096,
        cuda_graphs=False,
    )


def _start(spec: EngineSpec, handles: Path) -> Any:
    """A running engine in this process, whose handles are below `handles`."""
    handles.mkdir(parents=True)
    os.environ.update(environment(spec, str(handles)))
    # for this process, which is running already, its search path too
    sys.path += [folder for folder in os.environ["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
    from workers.engines.sglang.versions import EXPORTER, check, start_engine, weight_update

    engine = start_engine(spec)
    with weight_update(engine):
        check(engine.update_weights_from_tensor([], load_format=EXPORTER))
    return engine


def _through_one_tensor(bucket: NamedTensors) -> NamedTensors:
    flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
    parts = torch.split(flat, [tensor.numel() for _, tensor in bucket])
    return [(name, part.view(tensor.shape)) for (name, tensor), part in zip(bucket, parts, strict=True)]
