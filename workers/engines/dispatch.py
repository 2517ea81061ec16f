"""Generation in which no request is lost in silence."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from workers.engines.base import (
    EngineError,
    GenerateRequest,
    GenerateResult,
    RolloutEngine,
    SamplingParams,
    missing_requests,
)

logger = logging.getLogger(__name__)


def generate_all(
    engine: RolloutEngine, requests: Sequence[GenerateRequest], sampling: SamplingParams, *, redispatches: int = 1
) -> list[GenerateResult]:
    """A complete result for each request, in order.

    Requests that the engine drops are logged and sent again up to `redispatches` times. Raises
    EngineError naming those that are still missing, ValueError for a request id that occurs twice.
    """
    if len({request.request_id for request in requests}) != len(requests):
        raise ValueError("request ids must differ within a call")
    results: dict[str | int, GenerateResult] = {}
    pending = list(requests)
    for attempt in range(1 + redispatches):
        if not pending and attempt:
            break
        results |= {result.request_id: result for result in engine.generate(pending, sampling)}
        pending = missing_requests(requests, results)
        if pending:
            logger.warning("engine returned nothing for requests %s (attempt %d)", _ids(pending), attempt + 1)
    if pending:
        name = engine.metadata.engine
        raise EngineError(f"{name} engine: no complete result for requests {_ids(pending)} in {attempt + 1} attempts")
    return [results[request.request_id] for request in requests]


def _ids(requests: Sequence[GenerateRequest], *, shown: int = 8) -> str:
    ids = ", ".join(str(request.request_id) for request in requests[:shown])
    return ids if len(requests) <= shown else f"{ids} and {len(requests) - shown} more"
