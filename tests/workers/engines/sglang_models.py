"""Real SGLang engines for tests, on a CPU: started once, handed out with the weights of a reference model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from configs.schema import RolloutConfig, RunConfig
from tests.workers.engines import compliance, forked_launcher
from workers.engines.base import RolloutEngine
from workers.engines.factory import build_engine
from workers.engines.sglang import process
from workers.engines.sglang.engine import SglangEngine
from workers.engines.sglang_probe import sglang_unavailable_reason
from workers.reshard.transition import Transition

STUB = Path(__file__).parents[2] / "sgl_usable_sglang"
BUCKET_BYTES = 1 << 20


@contextmanager
def usable_sglang() -> Iterator[None]:
    """Engines' launchers are forked inside; skips the test where SGLang cannot be used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "launch", forked_launcher.launch)  # of this process: ranks start theirs as a run does
        if reason := sglang_unavailable_reason():
            pytest.skip(reason)
        yield


def new_engine(family: str, run_dir: Path, *, rank: int = 0, request_timeout_s: float = 60.0) -> SglangEngine:
    """Not started; for weights of the family's reference model."""
    rollout = RolloutConfig(engine="sglang", start_timeout_s=240, request_timeout_s=request_timeout_s)
    engine = build_engine(
        RunConfig(rollout=rollout),
        device=torch.device("cpu"),
        model=compliance.reference(family).config,
        run_dir=run_dir,
        rank=rank,
    )
    assert isinstance(engine, SglangEngine)
    return engine


def write(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Whole parameters through the reshard plan, bit for bit."""
    transition = Transition(
        model,
        engine.weights(),
        tensor_parallel_size=1,
        group=None,
        device=torch.device("cpu"),
        bucket_bytes=BUCKET_BYTES,
    )
    transition.run()
    transition.verify()


class SglangFactory:
    """Two engines in turn: a check that needs a second one gets another process."""

    def __init__(self, family: str, run_dir: Path, *, num_engines: int = 2) -> None:
        self.family = family
        self.engines = [new_engine(family, run_dir, rank=rank) for rank in range(num_engines)]
        self._turns = cycle(self.engines)

    def __call__(self, *, max_batch_tokens: int = 65536) -> SglangEngine:
        engine = next(self._turns)
        engine.wake()
        self.write(engine, compliance.reference(self.family))
        engine.set_version(0)
        return engine

    def write(self, engine: RolloutEngine, model: PreTrainedModel) -> None:
        write(engine, model)

    def close(self) -> None:
        for engine in self.engines:
            engine.shutdown()
