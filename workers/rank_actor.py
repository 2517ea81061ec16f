"""The rank actor: one Dask actor in one worker process, holding every role placed on its rank.

controller --StageRequest--> RankActor --(FSDP2 collectives)--> RankActors of the pool
                                 |  columns gathered on the pool's first rank
                                 v
                          DataPlane (memory, worker to worker) and the rollout store
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import get_worker

from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.stages import ColumnsRef, StageKey
from storage.atomic import make_folder, writing
from storage.locations import local_side, location
from storage.log_file import LogFile
from storage.records import StageManifest
from workers.envelope import Envelope, classify, enveloped
from workers.lines import CalledActor
from workers.progress import STAGE

if TYPE_CHECKING:
    from workers.data_plane import DataPlane
    from workers.rank_context import RankContext
    from workers.rendezvous import TCPStore
    from workers.stage_output import StageOutput
    from workers.stage_registry import StageMethod


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a rank is told once: its place in a pool and what it holds."""

    config: RunConfig
    run_dir: str
    pool: str
    pool_rank: int
    pool_size: int
    global_rank: int
    roles: tuple[str, ...]
    trained: tuple[str, ...]
    incarnation: int
    updates: Mapping[str, int] = field(default_factory=dict)
    """How often an iteration updates a role; one that is not named: once."""
    rendezvous: tuple[str, int] | None = None
    pool_sizes: tuple[int, ...] = ()
    """Of the pools in this rank's process group, in its order; empty: its own pool alone."""
    pool_number: int = 0
    """Its own pool's place among them."""


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """One stage, for one rank: which shard it computes and which weights it needs."""

    key: StageKey
    role: str
    method: str
    rollouts: ColumnsRef
    reads: tuple[str, ...]
    shard: int
    num_shards: int
    collect: bool
    incarnation: int
    weights_version: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    spans_pools: bool = False
    """All pools of the process group take part, not the rank's own alone."""
    row_set: str = ""
    others: Mapping[str, ColumnsRef] = field(default_factory=dict)
    also_reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankReply:
    """What a rank answers: nothing but small numbers; the columns stay where they are."""

    holder: str | None = None
    columns: tuple[str, ...] = ()
    num_rows: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak_gib: float | None = None
    """Most memory that the rank held in the stage."""
    span: tuple[float, float] = (0.0, 0.0)
    """Start and end, seconds since 1970."""


class RankActor(CalledActor):
    """Importing this module must stay cheap: the controller does, without torch; ranks import late.

    Synchronous methods queue on the worker's actor thread, where the process group and the
    devices live; asynchronous ones answer on its event loop, also while a collective blocks."""

    def __init__(self) -> None:
        self._context: RankContext | None = None
        self._spec: RankSpec | None = None
        self._store: TCPStore | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-writer")
        self._writes: dict[StageKey, Future[StageManifest]] = {}
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._saving: Future[Any] | None = None
        self._busy: tuple[str, float] | None = None

    @enveloped
    def open_rendezvous(self, interface: str | None, port: int) -> tuple[str, int]:
        """First rank of a process group: a TCP store; returns (host, port)."""
        from workers.rendezvous import open_rendezvous

        self._store = open_rendezvous(interface, port, get_worker().address)
        return str(self._store.host), int(self._store.port)

    @enveloped
    def setup(self, spec: RankSpec) -> dict[str, Any]:
        """Join the pool's process group and build the roles. Returns what is worth a log line."""
        from pipeline.plugins import load_plugins
        from storage.rollout_store import RolloutStore
        from workers.data_plane import DataPlane

        log_to_file(local_side(location(spec.run_dir)) / "logs" / f"rank-{spec.global_rank}.log")
        load_plugins(spec.config)
        worker = get_worker()
        plane = DataPlane(RolloutStore(location(spec.run_dir) / "rollouts"), worker)
        self._spec = spec
        self._context = self.build(spec, plane)
        return {"address": worker.address, "roles": list(spec.roles), "device": str(self._context.device)}

    @enveloped
    def run_stage(self, request: StageRequest) -> RankReply:
        """Compute one stage. All ranks of the pool are called, in the pool's one order."""
        context = self._ready(request.incarnation)
        started, since = time.perf_counter(), time.time()
        context.use_group(spans_pools=request.spans_pools)
        self._busy = (request.key.name, since)
        STAGE.begin(0)
        try:
            output, peak_gib = self._measured(context, request)
            self._publish(request, output)
        finally:
            self._busy = None
        seconds = time.perf_counter() - started
        return RankReply(
            peak_gib=peak_gib,
            span=(since, since + seconds),
            holder=context.plane.address if output.columns is not None else None,
            columns=output.columns.columns if output.columns is not None else (),
            num_rows=output.num_rows,
            metrics=named_metrics(output.metrics, request.row_set),
            seconds=seconds,
        )

    def _measured(self, context: RankContext, request: StageRequest) -> tuple[StageOutput, float | None]:
        """The stage's output and its peak memory in GiB. Raises OutOfMemory with the remedy."""
        from workers.memory import PeakMemory, out_of_memory

        with PeakMemory(context.device) as peak:
            try:
                output = self.method(request.role, request.method)(context, request)
            except (MemoryError, RuntimeError) as error:
                if classify(error) != "memory":
                    raise
                raise out_of_memory(
                    error,
                    role=request.role,
                    method=request.method,
                    tokens_per_micro_batch=context.config.training.max_tokens_per_micro_batch,
                    device=context.device,
                ) from error
        return output, peak.gib

    @enveloped
    def save_checkpoint(self, path: str, roles: tuple[str, ...], incarnation: int) -> dict[str, int]:
        """Copy the roles' shards and have a thread write them below `path` (collective); returns their versions."""
        context = self._ready(incarnation)
        writes = [context.model(role).saving(location(path) / role, context.group.writers) for role in roles]
        self._saving = self._saver.submit(lambda: [write() for write in writes])
        return {role: context.model(role).version for role in roles}

    @enveloped
    def load_checkpoint(self, path: str, roles: tuple[str, ...], incarnation: int) -> dict[str, int]:
        """Load the roles' shards from `path` (collective, any number of ranks); returns their versions."""
        context = self._ready(incarnation)
        for role in roles:
            context.model(role).load(location(path) / role)
        return {role: context.model(role).version for role in roles}

    @enveloped
    def compare_checkpoint(self, path: str, roles: tuple[str, ...], incarnation: int) -> list[dict[str, Any]]:
        """Tensors of the roles that are not, bit for bit, those below `path`, on this rank (collective)."""
        context = self._ready(incarnation)
        return [
            {**asdict(difference), "name": f"{role}/{difference.name}"}
            for role in roles
            for difference in context.model(role).differing_tensors(location(path) / role, context.group.writers)
        ]

    @enveloped
    def shutdown(self) -> None:
        """End engines and reward processes and leave the process group."""
        if self._context is not None:
            self._context.close()
        self._context = None
        self._writer.shutdown(wait=True)
        self._saver.shutdown(wait=True)

    def build(self, spec: RankSpec, plane: DataPlane) -> RankContext:
        """Join the pool and build the roles; another kind of rank builds something else."""
        from workers.rank_context import build_context

        return build_context(spec, plane, store=self._store)

    def method(self, role: str, method: str) -> StageMethod:
        """What a stage does on this rank."""
        import workers.held_out_stages
        import workers.preference_stages
        import workers.safe_rlhf_stages
        import workers.sampling_rounds
        import workers.stage_methods  # noqa: F401 - they register the built-in ones
        from workers.stage_registry import get_method

        return get_method(role, method)

    async def manifest(self, key: StageKey) -> Envelope:
        """Wait until the stage's arrays are on disk; returns their manifest, for the commit."""
        write = self._writes.pop(key)
        try:
            return Envelope(result=await asyncio.wrap_future(write))
        except (OSError, ValueError, UserError) as error:
            return Envelope(
                error=f"writing {key.name}: {error}",
                error_class="internal" if isinstance(error, ValueError) else "user",
            )

    async def checkpoint_saved(self) -> Envelope:
        """Wait until the checkpoint that was copied last is on the disk, as far as this rank writes it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return Envelope()
        await asyncio.wait([asyncio.wrap_future(saving)])
        return enveloped(saving.result)()

    async def ping(self) -> dict[str, Any]:
        """Answers in milliseconds, also while a stage runs: which, the seconds so far and the share that is done."""
        if self._busy is None:
            return {"stage": None, "seconds": 0.0, "share": None}
        stage, since = self._busy
        return {"stage": stage, "seconds": time.time() - since, "share": STAGE.share}

    def _ready(self, incarnation: int) -> RankContext:
        if self._context is None or self._spec is None:
            raise RuntimeError("this rank was not set up")
        if incarnation != self._spec.incarnation:
            raise RuntimeError(f"this rank is incarnation {self._spec.incarnation}, the call is for {incarnation}")
        return self._context

    def _publish(self, request: StageRequest, output: StageOutput) -> None:
        if output.columns is None:
            return
        context = self._ready(request.incarnation)
        context.plane.put(request.key.iteration, output.columns, row_set=request.row_set)
        self._writes[request.key] = self._writer.submit(
            context.plane.write,
            request.key,
            output.columns,
            new_rows=output.new_rows,
            attempt=f"{request.incarnation}",
            row_set=request.row_set,
        )


def named_metrics(metrics: Mapping[str, float], row_set: str) -> dict[str, float]:
    """Metrics of a further row set begin with its name, those of an evaluation aside."""
    return {f"{row_set}/{n}" if row_set and not n.startswith("eval/") else n: v for n, v in metrics.items()}


def log_to_file(path: Path) -> None:
    """Everything that this process logs, and its warnings, go to the run's folder from now on."""
    with writing(path):  # beside a run in an object store each host has a folder of its own
        make_folder(path.parent)
    logging.captureWarnings(True)
    handler = LogFile(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    for earlier in root.handlers[:]:
        root.removeHandler(earlier)
        earlier.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
