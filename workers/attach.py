"""An existing cluster: whether its scheduler answers, and whether its workers fit this machine and this run."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from distributed import Client

from configs.errors import UserError, refuse
from configs.schema import RunConfig
from configs.secrets import references
from storage.atomic import atomic_write, make_folder, remove_tree, writing
from storage.locations import Location
from workers.hosts import HostReport, Question, differences, report, versions
from workers.network import host_of
from workers.placed_files import local_files
from workers.places import RESOURCE, worker_addresses
from workers.tls import client_context, security

ANSWER_S = 5.0
"""Dask's scheduler speaks first, at once; one that says nothing wants something else."""
SHARED_OUTPUT = (
    "output: worker {worker} does not see the run directory in {output}; name a folder that all hosts share under the "
    "same path, or an object store (s3://)"
)
SHARED_SCRATCH = (
    "worker {worker} does not see the folder of the replay in {output}; have TMPDIR name one that all hosts share, "
    "or replay on this machine: --set cluster.scheduler=null"
)
START_WORKERS = "start workers with `dask worker --nthreads 1 --memory-limit 0 --resources rank=1`"


@asynccontextmanager
async def attached(config: RunConfig, num_workers: int) -> AsyncIterator[Client]:
    """A client of `cluster.scheduler` with this many workers. Raises UserError when there is none."""
    cluster = config.cluster
    assert cluster.scheduler is not None
    found = security(cluster)
    place = f"cluster.scheduler={cluster.scheduler}"
    await _answering(
        cluster.scheduler, None if found is None else client_context(found), place, cluster.start_timeout_s
    )
    try:
        options = {} if found is None else {"security": found}
        client = await Client(cluster.scheduler, asynchronous=True, timeout=cluster.start_timeout_s, **options)
    except OSError as error:
        raise UserError(f"{place}: no scheduler answers there ({error})") from error
    async with client:
        await _same_scheduler(client, place)
        await _workers(client, num_workers, place, cluster.start_timeout_s)
        yield client


async def check_scheduler(client: Client, config: RunConfig, run_dir: Location) -> None:
    """Raises UserError when the scheduler is gone: workers end with it, and only its owner starts it again."""
    try:
        async with asyncio.timeout(ANSWER_S):
            if client.status == "running":
                await client.scheduler.identity()
                return
    except OSError:  # TimeoutError too
        pass
    raise UserError(
        f"cluster.scheduler={config.cluster.scheduler} is gone; what is committed is kept: "
        f"start it and its workers again, then: hybridflow resume {run_dir}"
    )


async def _answering(address: str, context: ssl.SSLContext | None, place: str, timeout_s: float) -> None:
    """Wait until the scheduler says its first byte, and say what is wrong if it never does."""
    host, port = host_of(address), int(address.rpartition(":")[2])
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=context), timeout_s)
            break
        except ssl.SSLError as error:
            raise UserError(f"{place}: TLS failed ({_why(error)}); see cluster.tls") from error
        except OSError as error:  # not started yet
            if asyncio.get_running_loop().time() + 0.5 > deadline:
                raise UserError(f"{place}: no scheduler answers there ({error})") from error
            await asyncio.sleep(0.5)
    try:
        first = await asyncio.wait_for(reader.read(1), min(ANSWER_S, timeout_s))
    except ssl.SSLError as error:
        raise UserError(f"{place}: the scheduler refuses this machine's certificate ({_why(error)})") from error
    except OSError:  # TimeoutError too
        first = b""
    finally:
        writer.close()
    if not first:
        hint = "" if context is not None else "; if it uses TLS, write tls:// and set cluster.tls"
        raise UserError(f"{place}: what listens there does not speak as a Dask scheduler does{hint}")


def _why(error: ssl.SSLError) -> str:
    return str(getattr(error, "verify_message", "") or error.reason or error).replace("_", " ").lower()


async def _same_scheduler(client: Client, place: str) -> None:
    theirs = (await client.scheduler.versions())["packages"]
    for name in ("distributed", "dask", "msgpack", "cloudpickle"):
        if name in theirs and str(theirs[name]) != versions()[name]:
            raise UserError(
                f"{place}: the scheduler has {name} {theirs[name]}, this machine {versions()[name]}; "
                "install the same versions"
            )


async def _workers(client: Client, num_workers: int, place: str, timeout_s: float) -> None:
    """Wait for this many places for ranks."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while len(found := await worker_addresses(client)) < num_workers:
        if asyncio.get_running_loop().time() > deadline:
            raise UserError(
                f"{place}: {len(found)} workers with the resource `{RESOURCE}` after {timeout_s:.0f} s, the run needs "
                f"{num_workers}; {START_WORKERS}"
            )
        await asyncio.sleep(0.1)


@contextmanager
def _probe(output: Location) -> Iterator[Location]:
    """A file with a name that is nowhere else, in the folder of the run directories, while workers look for it."""
    path = output.resolve() / f".seen-{secrets.token_hex(8)}"
    with writing(output):
        make_folder(path.parent)
        atomic_write(path, b"")
    try:
        yield path
    finally:
        remove_tree(path)


async def check_workers(client: Client, config: RunConfig, output: Location, *, asked: str = SHARED_OUTPUT) -> None:
    """Whether every worker that carries the label could be a rank; raises UserError for the first thing lacking.

    asked: what is said where a worker does not see `output`.
    """
    with _probe(output) as probe:
        question = Question(paths=local_files(config), variables=references(config), probe=str(probe))
        addresses = await worker_addresses(client)
        answers = await client.run(report, question, workers=addresses, on_error="return")
    lines = (
        line
        for worker, answer in sorted(answers.items())
        for line in (
            differences(worker, answer, question, unseen=asked.format(worker=worker, output=output))
            if isinstance(answer, HostReport)
            else [f"worker {worker} cannot run this project's code ({answer!r}); install the same version there"]
        )
    )
    refuse(lines, source=f"cluster.scheduler={config.cluster.scheduler}")
