"""The Prefect flow: one skeleton for every algorithm."""

from __future__ import annotations

import asyncio

import httpx
from prefect import flow
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError

from configs.errors import UserError
from flows.execution import RunExecution, RunResult
from flows.prefect_client import configured_api_url, fail_fast

FAREWELL_S = 20.0
"""For Prefect to record the end of a run that is done."""
EXECUTIONS: dict[str, RunExecution] = {}


@flow(name="alignment", flow_run_name="{run}", persist_result=False, validate_parameters=False)
async def alignment(run: str) -> RunResult:
    """All iterations of a run; the object that holds clients and locks is found by the run's name."""
    return await EXECUTIONS[run].execute()


async def run_flow(execution: RunExecution) -> RunResult:
    """Run an execution as a Prefect flow run; how it ended is the execution's word, not the server's.

    Inside a flow run (of a deployment) the execution is a part of that one.
    Raises UserError when the server does not answer at the start, and what the execution raises.
    """
    if FlowRunContext.get() is not None:
        return await execution.execute()
    EXECUTIONS[execution.name] = execution
    fail_fast()
    flow_run = asyncio.ensure_future(alignment(execution.name))
    ended = asyncio.ensure_future(execution.ended.wait())
    try:
        await asyncio.wait({flow_run, ended}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({flow_run}, timeout=FAREWELL_S)
        return _result(flow_run, execution)
    except asyncio.CancelledError:
        flow_run.cancel()
        await asyncio.wait({flow_run})
        raise
    finally:
        ended.cancel()
        flow_run.cancel()
        del EXECUTIONS[execution.name]


def _result(flow_run: asyncio.Task[RunResult], execution: RunExecution) -> RunResult:
    error = flow_run.exception() if flow_run.done() else TimeoutError(f"no answer within {FAREWELL_S:g} s")
    if error is None:
        return flow_run.result()
    if not isinstance(error, httpx.HTTPError | PrefectHTTPStatusError | TimeoutError):
        raise error
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    if not execution.ended.is_set():
        raise UserError(f"PREFECT_API_URL={configured_api_url()}: the Prefect server does not answer ({cause})")
    execution.view.note(f"the Prefect server could not be told how the run ended ({cause[:200]})")
    if execution.error is not None:
        raise execution.error
    assert execution.result is not None
    return execution.result
