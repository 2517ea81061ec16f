"""All that differs between the SGLang versions in use; imported in the launcher and below only.

0.5.16 (torch 2.11) is what GPUs run, 0.5.23 (torch 2.14.1) what a CPU runs.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang
import torch

from workers.engines.sglang.spec import EngineSpec
from workers.importing import without_collection
from workers.rendezvous import listening_store

LOOPBACK = "127.0.0.1"
EXPORTER = "workers.engines.sglang.exporter.export"
CONTEXT_SLACK = 8
"""SGLang ends a sequence a few tokens before `context_length`; sequences that are too long never reach it."""


def engine_arguments(spec: EngineSpec, rendezvous_port: int) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`. rendezvous_port: where its processes' torch process group meets."""
    arguments: dict[str, Any] = {
        "model_path": str(spec.model_dir),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "device": spec.device,
        "tp_size": spec.tensor_parallel_size,
        "context_length": spec.max_positions + CONTEXT_SLACK,
        "max_total_tokens": spec.max_cached_tokens,
        "random_seed": spec.random_seed & 0x7FFFFFFF,
        "custom_weight_loader": [EXPORTER],
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "sleep_on_idle": True,
        "nccl_port": rendezvous_port,
        "log_level": "info",
    }
    return arguments | (_gpu_arguments(spec) if spec.device == "cuda" else CPU_ARGUMENTS) | dict(spec.arguments)


CPU_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "mem_fraction_static": 0.2,
}


def _gpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "attention_backend": "triton",
        "disable_prefill_cuda_graph": True,
        "disable_cuda_graph": not spec.cuda_graphs,
        "disable_custom_all_reduce": spec.tensor_parallel_size > 1,
        "mem_fraction_static": spec.memory_fraction,
        "enable_memory_saver": True,
        "enable_deterministic_inference": spec.deterministic,
        "base_gpu_id": spec.base_gpu_id,
        "gpu_id_step": spec.gpu_id_step,
    }


@contextmanager
def weight_update(engine: Any) -> Iterator[None]:
    """What must stand around `update_weights_from_tensor`: a session, from 0.5.2x on."""
    if not hasattr(engine, "begin_weight_update"):
        yield
        return
    check(engine.begin_weight_update())
    try:
        yield
    finally:
        check(engine.end_weight_update())


def check(reply: Any) -> None:
    """Raises RuntimeError for a control call that did not succeed: (success, message, ...) or an object."""
    success, message = (reply[0], reply[1]) if isinstance(reply, tuple) else (reply.success, reply.message)
    if not success:
        raise RuntimeError(f"sglang {sglang.__version__}: {message}")


def start_engine(spec: EngineSpec) -> Any:
    """A running `sglang.Engine`; must be called in the main thread (SGLang sets signal handlers).

    Its schedulers meet in a store of this process: torch's own, in the first of them, would listen on every address
    of the host. Torch uses a launcher's store where these variables say that there is one.
    """
    store = listening_store(LOOPBACK)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    skip_other_models(architecture(spec))
    with without_collection():
        from sglang.srt.entrypoints.engine import Engine

        from workers.engines.sglang import scheduler

    # forked schedulers would inherit process groups, which an engine's launcher has none of
    forks = spec.device == "cpu" and not torch.distributed.is_initialized()

    class PluggedEngine(forking(Engine) if forks else Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(scheduler.run)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            # Without a tokenizer the schedulers answer directly: the process would only cost memory and time.
            return [], []

    engine = PluggedEngine(**engine_arguments(spec, store.port))
    engine.rendezvous = store  # it ends with the engine
    # Spares each later collection the objects of the start: half a second of every flush on a CPU.
    engine.freeze_gc()
    return engine


def forking(engine: Any) -> Any:
    """The class, with processes that are forked: half of a start is the second import of SGLang that this spares.

    For a CPU: an NVIDIA driver does not outlive a fork.
    """

    class ForkingEngine(engine):  # type: ignore[misc]
        @classmethod
        def _launch_scheduler_processes(cls, *arguments: Any, **options: Any) -> Any:
            multiprocessing.set_start_method("fork", force=True)  # SGLang has just set its own
            return super()._launch_scheduler_processes(*arguments, **options)

    return ForkingEngine


def architecture(spec: EngineSpec) -> str:
    config = json.loads((spec.model_dir / "config.json").read_text())
    return str(config["architectures"][0])


def skip_other_models(architecture: str) -> None:
    """Spare SGLang the import of its other model files: a third of the time to start."""
    (package,) = importlib.import_module("sglang.srt.models").__path__
    files = list(Path(package).glob("*.py"))
    defining = re.compile(rf"^class {re.escape(architecture)}\(", re.MULTILINE)
    others = [file.stem for file in files if not defining.search(file.read_text())]
    if len(others) < len(files):
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)


def leftovers(engine: Any) -> list[str]:
    """Files in shared memory that SGLang leaves behind when it is killed."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    return [str(shm_path_for(engine.port_args.instance_id))]


def abort(engine: Any, request_id: str) -> None:
    engine.tokenizer_manager.abort_request(rid=request_id)


def tokens_so_far(engine: Any, request_ids: Iterable[str]) -> int:
    """Tokens that have arrived of these requests; the schedulers report every 50 of them."""
    states = engine.tokenizer_manager.rid_to_state
    return sum(len(states[request_id].output_ids) for request_id in request_ids if request_id in states)


async def is_responsive(engine: Any, timeout_s: float) -> bool:
    """Whether the schedulers answer a question within this time."""
    try:
        await asyncio.wait_for(engine.tokenizer_manager.get_internal_state(), timeout_s)
    except TimeoutError:
        return False
    return True
