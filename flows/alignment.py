"""The Prefect flow: one skeleton for every algorithm."""

from __future__ import annotations

from prefect import flow

from flows.execution import RunExecution, RunResult

EXECUTIONS: dict[str, RunExecution] = {}


@flow(name="alignment", flow_run_name="{run}", persist_result=False, validate_parameters=False)
async def alignment(run: str) -> RunResult:
    """All iterations of a run; the object that holds clients and locks is found by the run's name."""
    return await EXECUTIONS[run].execute()


async def run_flow(execution: RunExecution) -> RunResult:
    """Run an execution as a Prefect flow run."""
    EXECUTIONS[execution.name] = execution
    try:
        result: RunResult = await alignment(execution.name)
        return result
    finally:
        del EXECUTIONS[execution.name]
