"""Real gloo ranks for tests: processes of one thread each.

They are forked from a server process that has imported the heavy packages and nothing else, so that a
test does not pay for the imports of each of its ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workers.fork_server import PRELOADED


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """Results of `fn(rank, world_size, *args)` on every rank, in rank order.

    `fn` is a module-level function. The process group is initialised before the call; backend: gloo, or
    nccl with a GPU for each rank, which is current; where there are fewer, ranks share them.
    Raises RuntimeError with the rank's traceback when a rank fails, TimeoutError when one hangs.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)  # one server for these and for Dask's workers
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, store, pipes[rank][1], args, backend))
            for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, sender in pipes:
                sender.close()
            return [_result(rank, pipe, timeout_s) for rank, (pipe, _) in enumerate(pipes)]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.join(5)
                    process.kill()
                process.join()


def _share_gpus(rank: int, world_size: int, num_gpus: int) -> None:
    """Let NCCL take all ranks for hosts of their own, if some have to share a GPU: it refuses two of one host on one.

    Their bytes then go through sockets of this host.
    """
    if num_gpus < world_size:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _result(rank: int, pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"rank {rank} gave no result in {timeout_s:g} s: a hanging collective?")
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except EOFError as error:
        raise RuntimeError(f"rank {rank} died without a result") from error
    if not ok:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    args: tuple[Any, ...],
    backend: str,
) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        _share_gpus(rank, world_size, torch.cuda.device_count())
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        # plain pickle: the pipe's own would share a tensor's memory, which ends with this process
        reply = pickle.dumps((True, fn(rank, world_size, *args)))
    except Exception:  # noqa: BLE001 - carried to the parent, which raises it
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    pipe.send_bytes(reply)
    dist.barrier()  # another one may still be connecting to this one, in a group that it is about to make
    dist.destroy_process_group()
